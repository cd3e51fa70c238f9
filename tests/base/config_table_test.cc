#include "base/config_table.h"

#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::expect_error;

enum class Colour { kRed, kGreen };

struct Settings {
  bool flag = false;
  std::int64_t count = 3;
  double rate = 0.5;
  float small = 0.7f;
  std::string name = "x";
  Colour colour = Colour::kRed;

  ConfigTable table() {
    ConfigTable t;
    t.add("first.flag", flag, "a flag");
    t.add("first.count", count, "a count");
    t.add("second.rate", rate, "a rate");
    t.add("second.small", small, "a float");
    t.add("second.name", name, "a name");
    t.add("second.colour", colour, {{"red", Colour::kRed}, {"green", Colour::kGreen}}, "a colour");
    return t;
  }
};

TEST(ConfigTable, TomlAndOverrides) {
  Settings s;
  s.table().apply_toml("[first]\nflag = true\ncount = 1_000\n[second]\nrate = 2\ncolour = \"green\"\n", "file");
  EXPECT_TRUE(s.flag);
  EXPECT_EQ(s.count, 1000);
  EXPECT_EQ(s.rate, 2.0);  // a whole number is a number
  EXPECT_EQ(s.colour, Colour::kGreen);
  for (const char* text :
       {"--first.flag=false", "--second.rate=1e-3", "--second.name=\"a b\"", "--second.colour=red"}) {
    s.table().apply_override(text);
  }
  EXPECT_FALSE(s.flag);
  EXPECT_EQ(s.rate, 1e-3);
  EXPECT_EQ(s.name, "a b");
  s.table().apply_override("--first.flag");
  EXPECT_TRUE(s.flag);
}

TEST(ConfigTable, PrintsWhatItReads) {
  Settings s;
  s.name = "a \"quoted\\\" \n\t\x01 name";
  s.rate = 8e-4;
  s.colour = Colour::kGreen;
  const std::string text = s.table().to_toml();
  Settings again;
  again.table().apply_toml(text, "text");
  EXPECT_EQ(again.name, s.name);
  EXPECT_EQ(again.rate, s.rate);
  EXPECT_EQ(again.small, s.small);
  EXPECT_EQ(again.table().to_toml(), text);
}

TEST(ConfigTable, UnknownKeys) {
  Settings s;
  expect_error([&] { s.table().apply_toml("[first]\n\ncuont = 1\n", "file.toml"); },
               {"file.toml:3", "'first.cuont'", "'first.count'"});
  expect_error([&] { s.table().apply_override("--third.colour=red"); }, {"'third.colour'", "'second.colour'"});
  expect_error([&] { s.table().apply_toml("count = 1\n", "file"); }, {"'count'", "'first.count'"});
}

TEST(ConfigTable, ValuesOfAWrongKind) {
  Settings s;
  expect_error([&] { s.table().apply_toml("[first]\ncount = 1.5\n", "file"); }, {"file:2", "first.count", "integer"});
  expect_error([&] { s.table().apply_toml("[first]\ncount = [1]\n", "file"); }, {"first.count", "integer"});
  expect_error([&] { s.table().apply_toml("[first]\nflag = 1\n", "file"); }, {"first.flag", "boolean"});
  expect_error([&] { s.table().apply_toml("[second]\ncolour = \"blue\"\n", "file"); }, {"blue", "red, green"});
  expect_error([&] { s.table().apply_override("--first.count=12x"); }, {"12x", "integer"});
  expect_error([&] { s.table().apply_override("--first.count=99999999999999999999"); }, {"integer"});
  expect_error([&] { s.table().apply_override("--first.count"); }, {"first.count=VALUE"});
  expect_error([&] { s.table().apply_toml("[first\n", "file"); }, {"file:1"});
  EXPECT_EQ(s.count, 3);
}

}  // namespace
}  // namespace tessera
