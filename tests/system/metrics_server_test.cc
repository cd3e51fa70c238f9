#include "system/metrics_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "tests/expect_error.h"
#include "tests/scrape.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(MetricsServer, AnswersWhatWasPublishedLast) {
  MetricsServer server("127.0.0.1:0", "tessera_test_");
  server.publish({{"old", "Gone later", {}, 1.0}});
  server.publish({{"loss", "Mean loss", {}, 2.5},
                  {"errors_total", "By kind", {{"kind", "a"}}, 3.0, true},
                  {"errors_total", "By kind", {{"kind", "b"}}, 0.0, true}});
  const std::string answer = scrape(server.port());
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("# HELP tessera_test_loss Mean loss\n# TYPE tessera_test_loss gauge\n"
                                "tessera_test_loss 2.5\n"));
  EXPECT_THAT(answer, HasSubstr("# TYPE tessera_test_errors_total counter\n"));
  EXPECT_THAT(answer, HasSubstr("tessera_test_errors_total{kind=\"a\"} 3\n"));
  EXPECT_THAT(answer, HasSubstr("tessera_test_errors_total{kind=\"b\"} 0\n"));
  EXPECT_THAT(answer, Not(HasSubstr("tessera_test_old")));
}

TEST(MetricsServer, ASeriesThatIsPublishedTwiceAppearsOnce) {
  MetricsServer server("127.0.0.1:0", "tessera_test_");
  server.publish({{"finding", "", {{"gpu", "0"}}, 1.0}, {"finding", "", {{"gpu", "0"}}, 2.0}});
  const std::string answer = scrape(server.port());
  EXPECT_THAT(answer, HasSubstr("tessera_test_finding{gpu=\"0\"} 2\n"));
  EXPECT_EQ(answer.find("\ntessera_test_finding"), answer.rfind("\ntessera_test_finding"));
}

TEST(MetricsServer, AnswersNothingElse) {
  const MetricsServer server("127.0.0.1:0", "tessera_test_");
  EXPECT_THAT(ask(server.port(), "GET /etc/passwd HTTP/1.0\r\n\r\n"), HasSubstr(" 404 Not Found"));
  EXPECT_THAT(ask(server.port(), "POST /metrics HTTP/1.0\r\n\r\n"), Not(HasSubstr(" 200 OK")));
}

TEST(MetricsServer, ManyReadersSeeWholeSnapshots) {
  MetricsServer server("127.0.0.1:0", "tessera_test_");
  const auto publish = [&](double value) { server.publish({{"first", "", {}, value}, {"second", "", {}, value}}); };
  publish(0.0);
  std::atomic<bool> ends = false;
  std::atomic<int> num_read = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      const auto value_of = [](const std::string& text, const std::string& name) {
        const std::size_t at = text.find("\n" + name + " ");
        if (at == text.npos) return std::string("none");
        const std::size_t begin = at + name.size() + 2;
        return text.substr(begin, text.find('\n', begin) - begin);
      };
      while (!ends) {
        const std::string text = scrape(server.port());
        if (text.empty()) continue;
        EXPECT_NE(value_of(text, "tessera_test_first"), "none");
        EXPECT_EQ(value_of(text, "tessera_test_first"), value_of(text, "tessera_test_second"));
        ++num_read;
      }
    });
  }
  for (int i = 100; num_read < 50; i = i == 999 ? 100 : i + 1) publish(i);
  ends = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(MetricsServer, ConnectionsThatAskNothingDoNotSilenceIt) {
  MetricsServer server("127.0.0.1:0", "tessera_test_");
  server.publish({{"loss", "", {}, 2.5}});
  std::vector<int> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(connect_to(server.port()));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(scrape(server.port()), HasSubstr("tessera_test_loss 2.5"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  for (const int socket : idle) ::close(socket);
}

TEST(MetricsServer, AnAddressThatIsTakenIsAnError) {
  const MetricsServer server("127.0.0.1:0", "a_");
  const std::string taken = "127.0.0.1:" + std::to_string(server.port());
  expect_error([&] { MetricsServer(taken, "b_"); }, {"cannot serve metrics at '" + taken + "'"});
}

TEST(MetricsServer, ListensOnTheOneAddressThatWasNamed) {
  for (const char* address : {"", "0", "9400", ":9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000",
                              "127.0.0.1:0,0.0.0.0:0", "nonsense"}) {
    expect_error([&] { MetricsServer(address, "b_"); }, {"'" + std::string(address) + "'", "HOST:PORT"});
  }
}

TEST(MetricsServer, LeavesTheProcesssSignalsAlone) {
  struct sigaction before {};
  before.sa_handler = SIG_DFL;
  struct sigaction others {};
  ASSERT_EQ(sigaction(SIGPIPE, &before, &others), 0);
  {
    const MetricsServer server("127.0.0.1:0", "a_");
    struct sigaction now {};
    sigaction(SIGPIPE, nullptr, &now);
    EXPECT_EQ(now.sa_handler, SIG_DFL);
    // Each of the server's threads blocks SIGTERM; this thread does not.
    int num_blocking = 0, num_open = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(task.path() / "status");
      for (std::string line; std::getline(status, line);) {
        if (!line.starts_with("SigBlk:")) continue;
        const bool blocks = (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
        ++(blocks ? num_blocking : num_open);
      }
    }
    EXPECT_GE(num_blocking, 2);
    EXPECT_EQ(num_open, 1);
  }
  sigaction(SIGPIPE, &others, nullptr);
}

}  // namespace
}  // namespace tessera
