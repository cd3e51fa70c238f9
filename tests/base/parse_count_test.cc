#include "base/parse_count.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"

namespace tessera {
namespace {

TEST(ParseCount, NumbersAndUnits) {
  for (const auto& [text, count] : std::vector<std::pair<const char*, std::int64_t>>{
           {"0", 0},
           {"7", 7},
           {"-1", -1},
           {"32k", 32'000},
           {"32K", 32'000},
           {"100M", 100'000'000},
           {"1.5M", 1'500'000},
           {"1.500M", 1'500'000},
           {"2G", 2'000'000'000},
           {"2B", 2'000'000'000},
           {"3T", 3'000'000'000'000},
           {"64Ki", 65'536},
           {"1.5Ki", 1536},
           {"1Mi", 1'048'576},
           {"2Gi", 2'147'483'648},
           {"1e12", 1'000'000'000'000},
           {"1.5e3", 1500},
           {"-2e0", -2},
           {"9e18", 9'000'000'000'000'000'000},
           {"0.001k", 1},
           {"-0.5k", -500},
           {"9223372036854775807", std::numeric_limits<std::int64_t>::max()},
           {"-9223372036854775808", std::numeric_limits<std::int64_t>::min()}}) {
    EXPECT_EQ(parse_count(text), count) << text;
  }
}

TEST(ParseCount, Refuses) {
  for (const char* text : {"",
                           "k",
                           "x",
                           "32x",
                           "32 k",
                           " 32",
                           "32kk",
                           "32kB",
                           "32ki i",
                           "32Bi",
                           "1.5",
                           "1.0",
                           "1.",
                           "1.k",
                           ".5k",
                           "1.0005k",
                           "0.3Ki",
                           "1e",
                           "1e-3",
                           "1e+3",
                           "1e3k",
                           "1E6",
                           "1.5e0",
                           "10e18",
                           "0e19",
                           "+3",
                           "0x10",
                           "9223372036854775808",
                           "9223372036854775.808k",
                           "10000000T",
                           "1.1234567890123456789k"}) {
    EXPECT_EQ(parse_count(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace tessera
