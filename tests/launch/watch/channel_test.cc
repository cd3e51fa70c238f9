#include "launch/watch/channel.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/expect_error.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;

std::string endpoint_of(const LauncherChannel& launcher) {
  return "tcp://127.0.0.1:" + std::to_string(launcher.port());
}

std::optional<Message> wait_for_message(MonitorChannel& monitor) {
  for (int i = 0; i < 100; ++i) {
    monitor.wait(milliseconds(50), {});
    if (auto message = monitor.receive()) return message;
  }
  return std::nullopt;
}

TEST(Channel, MessagesGoBothWaysWithTheirFiles) {
  LauncherChannel launcher(true);
  MonitorChannel monitor("n1", endpoint_of(launcher), launcher.key());
  monitor.send({{"say", "hello"}}, {"first", std::string("\0\1", 2)});
  const auto hello = launcher.receive(milliseconds(5000));
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->node, "n1");
  EXPECT_EQ(hello->body.at("say"), "hello");
  EXPECT_THAT(hello->files, ElementsAre("first", std::string("\0\1", 2)));
  launcher.send({"n1", {{"do", "watch"}, {"attempt", 3}}});
  const auto order = wait_for_message(monitor);
  ASSERT_TRUE(order);
  EXPECT_EQ(order->body.at("attempt"), 3);
}

TEST(Channel, WhoDoesNotHaveTheKeyIsNotHeard) {
  LauncherChannel launcher(true), other(true);
  MonitorChannel stranger("n1", endpoint_of(launcher), other.key());
  stranger.send({{"say", "hello"}});
  EXPECT_FALSE(launcher.receive(milliseconds(500)));
}

TEST(Channel, TheNextMonitorOfANodeTakesThePlaceOfTheOneBefore) {
  LauncherChannel launcher(true);
  MonitorChannel first("n1", endpoint_of(launcher), launcher.key());
  first.send({{"say", "first"}});
  ASSERT_TRUE(launcher.receive(milliseconds(5000)));
  MonitorChannel second("n1", endpoint_of(launcher), launcher.key());
  second.send({{"say", "second"}});
  ASSERT_TRUE(launcher.receive(milliseconds(5000)));
  launcher.send({"n1", {{"do", "quit"}}});
  EXPECT_TRUE(wait_for_message(second));
}

TEST(Channel, ANodeWhoseConnectionEndsIsNamed) {
  LauncherChannel launcher(true);
  MonitorChannel stays("n1", endpoint_of(launcher), launcher.key());
  auto goes = std::make_unique<MonitorChannel>("n2", endpoint_of(launcher), launcher.key());
  for (MonitorChannel* monitor : {&stays, goes.get()}) {
    monitor->send({{"say", "hello"}});
    ASSERT_TRUE(launcher.receive(milliseconds(5000)));
  }
  EXPECT_THAT(launcher.take_disconnected(), ElementsAre());
  goes.reset();
  std::vector<std::string> ended;
  for (int i = 0; i < 100 && ended.empty(); ++i) {
    EXPECT_FALSE(launcher.receive(milliseconds(20)));
    ended = launcher.take_disconnected();
  }
  EXPECT_THAT(ended, ElementsAre("n2"));
  EXPECT_THAT(launcher.take_disconnected(), ElementsAre());
}

TEST(Channel, OnlyAProcessThatIsAtWorkAnswers) {
  const milliseconds short_time(300);
  std::string endpoint;
  {
    LauncherChannel launcher(true);
    endpoint = endpoint_of(launcher);
    EXPECT_TRUE(is_launcher_at(endpoint, milliseconds(5000)));
    EXPECT_FALSE(launcher.receive(milliseconds(100)));
  }
  EXPECT_FALSE(is_launcher_at(endpoint, short_time));
  EXPECT_FALSE(is_launcher_at("nonsense", short_time));
  // The kernel accepts connections even for a process that is stopped.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  EXPECT_FALSE(is_launcher_at("tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port)), short_time));
  close(listener);
}

TEST(Channel, AWrongKeyIsRefused) {
  expect_error([] { MonitorChannel("n1", "tcp://127.0.0.1:1", "short"); }, {"5 characters, expected 40"});
}

}  // namespace
}  // namespace tessera
