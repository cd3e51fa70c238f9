#include "system/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <spdlog/sinks/ostream_sink.h>
#include <unistd.h>

#include <sstream>
#include <thread>

#include "base/log.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Captures what is logged, in place of standard error.
class LogTaken {
 public:
  LogTaken() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)));
  }
  ~LogTaken() { spdlog::set_default_logger(before_); }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::shared_ptr<spdlog::logger> before_;
};

/// Redirects standard error to a file or a terminal, as long as the object lives.
class ErrorsTo {
 public:
  explicit ErrorsTo(int descriptor) : before_(dup(STDERR_FILENO)) { dup2(descriptor, STDERR_FILENO); }
  ~ErrorsTo() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
  }

 private:
  int before_;
};

TEST(FormatQuantity, ThreeDigitsAndAPrefix) {
  EXPECT_EQ(format_quantity(0, "B"), "0 B");
  EXPECT_EQ(format_quantity(7, "documents"), "7 documents");
  EXPECT_EQ(format_quantity(999, "B"), "999 B");
  EXPECT_EQ(format_quantity(1000, "B"), "1.00 kB");
  EXPECT_EQ(format_quantity(999'600, "B"), "1.00 MB");
  EXPECT_EQ(format_quantity(12'345'678, "tokens"), "12.3 M tokens");
  EXPECT_EQ(format_quantity(1.5, "B/s"), "1.50 B/s");
  EXPECT_EQ(format_quantity(123'456, "B/s"), "123 kB/s");
}

TEST(FormatDuration, HoursIfThereAreAny) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(123.9), "2:03");
  EXPECT_EQ(format_duration(3723), "1:02:03");
}

TEST(ProgressBar, LogsALineNowAndThenWithoutATerminal) {
  FILE* const file = std::tmpfile();
  const ErrorsTo errors(fileno(file));
  const LogTaken log;
  {
    ProgressBar bar("reading", 1000, "B");
    for (int i = 0; i < 1000; ++i) bar.advance(1);
  }
  EXPECT_EQ(log.text(), "");  // it is too soon for a line
  ProgressBar bar("reading", 1000, "B", 0.0);
  bar.advance(200);
  bar.set(250, "3 documents");
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("reading: 25%, 250 B of 1.00 kB, "), HasSubstr("B/s, ETA 0:00, 3 documents")));
  const std::size_t size = log.text().size();
  spdlog::default_logger()->set_level(spdlog::level::warn);
  bar.set(300);
  EXPECT_EQ(log.text().size(), size);  // the level suppresses the line
  std::fclose(file);
}

/// Returns what a half-full bar draws on a terminal with this many columns.
std::string drawn_on_terminal(unsigned short num_columns) {
  int screen = -1, terminal = -1;
  const struct winsize size { .ws_row = 25, .ws_col = num_columns, .ws_xpixel = 0, .ws_ypixel = 0 };
  EXPECT_EQ(openpty(&screen, &terminal, nullptr, nullptr, &size), 0);
  {
    const ErrorsTo errors(terminal);
    const LogTaken log;
    ProgressBar bar("reading", 1000, "B");
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    bar.set(500);
    EXPECT_EQ(log.text(), "");
  }
  close(terminal);
  std::string shown;  // a terminal may hand over its text in pieces; a read fails after the last one
  for (char character = 0; read(screen, &character, 1) == 1;) shown += character;
  close(screen);
  return shown;
}

TEST(ProgressBar, DrawsOverItselfOnATerminal) {
  EXPECT_THAT(drawn_on_terminal(120), AllOf(HasSubstr("\r\033[K[###############...............] reading: 50%"),
                                            ::testing::EndsWith("\r\033[K")));
  const std::string narrow = drawn_on_terminal(60), erase = "\r\033[K";
  EXPECT_THAT(narrow, AllOf(::testing::ContainsRegex("\\[#+\\.+\\] reading: 50%, 500 B of 1.00 kB, .*B/s, ETA 0:00"),
                            ::testing::StartsWith(erase + "["), ::testing::EndsWith(erase)));
  EXPECT_EQ(narrow.size(), 59 + 2 * erase.size());  // the bar is so short that the line does not wrap
}

}  // namespace
}  // namespace tessera
