#include "base/parse_number.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace tessera {
namespace {

TEST(ParseNumber, TakesATextThatIsOneNumber) {
  EXPECT_EQ(parse_number<std::int64_t>("-9223372036854775808"), INT64_MIN);
  EXPECT_EQ(parse_number<std::uint16_t>("65535"), 65535);
  EXPECT_EQ(parse_number<int>("007"), 7);
  EXPECT_EQ(parse_number<double>("-2.5e3"), -2500.0);
}

TEST(ParseNumber, TakesNothingElse) {
  for (const char* text : {"", "-", "+1", " 1", "1 ", "1x", "0x10", "1.5", "2147483648"}) {
    EXPECT_EQ(parse_number<int>(text), std::nullopt) << text;
  }
  EXPECT_EQ(parse_number<std::uint16_t>("65536"), std::nullopt);
  EXPECT_EQ(parse_number<std::uint16_t>("-1"), std::nullopt);
  EXPECT_EQ(parse_number<double>("1e999"), std::nullopt);
}

}  // namespace
}  // namespace tessera
