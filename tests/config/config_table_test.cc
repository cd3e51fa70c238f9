#include "config/config_table.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/data/support.h"

namespace tessera {
namespace {

enum class Colour { kRed, kGreen };

struct Settings {
  bool flag = false;
  std::int64_t count = 3;
  double rate = 0.5;
  float small = 0.7f;
  std::string name = "x";
  Colour colour = Colour::kRed;
  ConfigTable::List list = {"a"};
  ConfigTable::Lists lists;

  ConfigTable table() {
    ConfigTable t;
    t.add("first.flag", flag, "a flag");
    t.add("first.count", count, "a count");
    t.add("second.rate", rate, "a rate");
    t.add("second.small", small, "a float");
    t.add("second.name", name, "a name");
    t.add("second.colour", colour, {{"red", Colour::kRed}, {"green", Colour::kGreen}}, "a colour");
    t.add("second.list", list, "a list");
    t.add("second.lists", lists, "lists");
    t.ignore("other.flag", ConfigTable::Form::kFlag, "of another program");
    t.ignore("other.below.*", ConfigTable::Form::kValue, "of another program");
    t.refuse("other.feature", ConfigTable::Form::kFlag, "a feature");
    return t;
  }
};

TEST(ConfigTable, TomlAndOverrides) {
  Settings s;
  s.table().apply_toml("[first]\nflag = true\ncount = 1_000\n[second]\nrate = 2\ncolour = \"green\"\n", "file");
  EXPECT_TRUE(s.flag);
  EXPECT_EQ(s.count, 1000);
  EXPECT_EQ(s.rate, 2.0);  // a whole number is a valid number
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

TEST(ConfigTable, CountsOnTheCommandLineMayHaveUnits) {
  Settings s;
  s.table().apply_override("--first.count=32k");
  EXPECT_EQ(s.count, 32'000);
  s.table().apply_override("--first.count=1.5Mi");
  EXPECT_EQ(s.count, 1'572'864);
  for (const char* bad : {"--first.count=32x", "--first.count=1.5", "--first.count="}) {
    expect_error([&] { s.table().apply_override(bad); }, {bad, "not a value of type integer", "32k, 1.5M or 2e9"});
  }
  EXPECT_EQ(s.count, 1'572'864);
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
  expect_error([&] { s.table().apply_override("--cuont=1"); }, {"'cuont'", "'first.count'"});
  expect_error([&] { s.table().apply_override("--something.else=1"); }, {"'something.else'", "section.name"});
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
  expect_error([&] { s.table().apply_toml("[second]\ncolour = green\n", "file"); }, {"file:2", "a text in quotes"});
  EXPECT_EQ(s.count, 3);
}

TEST(ConfigTable, NumbersAndNamesComeBack) {
  for (const std::int64_t count :
       {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
    for (const double rate : {0.0, -1.0, 1e16, 1e-300, 0.1 + 0.2, std::numeric_limits<double>::max(), HUGE_VAL}) {
      for (const char* name : {"", "\"", "\\", "tab\tand é", "[section]", "a = 1 # no comment", "'"}) {
        Settings s, again;
        s.count = count;
        s.rate = rate;
        s.small = 0.1f;
        s.name = name;
        again.table().apply_toml(s.table().to_toml(), "text");
        EXPECT_EQ(again.count, count);
        EXPECT_EQ(again.rate, rate);
        EXPECT_EQ(again.small, 0.1f);
        EXPECT_EQ(again.name, name);
      }
    }
  }
}

TEST(ConfigTable, OverrideForms) {
  Settings s;
  ConfigTable table = s.table();
  for (const char* text : {"first.count=7", "--first.flag=True", "--second.rate=-2", "--second.name=a=b"}) {
    table.apply_override(text);
  }
  EXPECT_EQ(s.count, 7);
  EXPECT_TRUE(s.flag);
  EXPECT_EQ(s.rate, -2.0);
  EXPECT_EQ(s.name, "a=b");
  table.apply_override("--second.name='quoted'");
  EXPECT_EQ(s.name, "quoted");
  table.apply_override("--second.name=");
  EXPECT_EQ(s.name, "");
  table.apply_override("--first.flag=False");
  EXPECT_FALSE(s.flag);
  expect_error([&] { table.apply_override("--second.colour=blue"); }, {"blue", "red, green"});
  expect_error([&] { table.apply_override("--first.flag=1"); }, {"first.flag", "boolean"});
  expect_error([&] { table.apply_override("--second.rate=fast"); }, {"second.rate", "fast", "number"});
  expect_error([&] { table.apply_override("--second.rate="); }, {"second.rate", "number"});
  expect_error([&] { table.apply_override("first.cout=1"); }, {"'first.cout'", "'first.count'"});
}

TEST(ConfigTable, ErrorsInToml) {
  Settings s;
  expect_error([&] { s.table().apply_toml("[second]\nname = 3\n", "f"); }, {"f:2", "second.name", "string"});
  expect_error([&] { s.table().apply_toml("[second]\nrate = \"1\"\n", "f"); }, {"f:2", "second.rate", "number"});
  expect_error([&] { s.table().apply_toml("[first]\ncount = 1\ncount = 2\n", "f"); }, {"f:3"});
  expect_error([&] { s.table().apply_toml("[first]\ncount = 1979-05-27\n", "f"); }, {"f:2", "first.count"});
  expect_error([&] { s.table().apply_toml("[first.count]\nx = 1\n", "f"); }, {"f:2", "'first.count.x'"});
}

TEST(ConfigTable, CountsInStringsMayHaveUnits) {
  Settings s;
  s.table().apply_toml("[first]\ncount = \"32k\"\n", "file");
  EXPECT_EQ(s.count, 32'000);
  expect_error([&] { s.table().apply_toml("[first]\ncount = \"3 k\"\n", "file"); },
               {"file:2", "first.count", "\"3 k\"", "a whole number"});
  for (const char* number : {"10k", "1.5M", "4Ki"}) {
    expect_error([&] { s.table().apply_toml(fmt::format("[first]\ncount = {}\n", number), "file"); },
                 {"file:2", "in TOML a number with a unit is a string: steps = \"10k\""});
  }
}

TEST(ConfigTable, AFloatOfTomlThatIsWholeIsACount) {
  Settings s;
  s.table().apply_toml("[first]\ncount = 2e9\n", "file");
  EXPECT_EQ(s.count, 2'000'000'000);
  s.table().apply_toml("[first]\ncount = -3.0\n", "file");
  EXPECT_EQ(s.count, -3);
  for (const char* number : {"1.5", "1e300", "nan", "inf"}) {
    expect_error([&] { s.table().apply_toml(fmt::format("[first]\ncount = {}\n", number), "file"); },
                 {"file:2", "first.count is", "a whole number"});
  }
}

TEST(ConfigTable, OtherFormatsAreRecognised) {
  Settings s;
  const auto refused = [&](std::string_view text, const std::string& what) {
    expect_error([&] { s.table().apply_toml(text, "file"); }, {"file", what, "expected"});
  };
  for (const char* json : {"{\"first\": {\"count\": 3}}", "\n  {\n}", "\xEF\xBB\xBF{}"}) refused(json, "this is JSON");
  for (const char* yaml : {"first:\n  count: 3\n", "---\nfirst:\n", "# text\n\nfirst: {count: 3}\n"}) {
    refused(yaml, "this is YAML");
  }
  refused(std::string_view("\xFF\xFE[\0", 4), "this is UTF-16");
  refused(std::string_view("a\0", 2), "this is a binary file");
  expect_error([&] { s.table().apply_toml("name = \"a: b\n", "file"); }, {"file:1"});
}

TEST(ConfigTable, Describes) {
  Settings s;
  const auto all = s.table().describe();
  ASSERT_EQ(all.size(), 8u);
  EXPECT_EQ(all[1].key, "first.count");
  EXPECT_EQ(all[1].type, "integer");
  EXPECT_EQ(all[1].value, "3");
  EXPECT_EQ(all[1].help, "a count");
  EXPECT_EQ(all[3].value, "0.7");  // a float prints as it was written
  EXPECT_EQ(all[5].value, "\"red\"");
  EXPECT_NE(all[5].type.find("green"), std::string::npos);
}

TEST(ConfigTable, Lists) {
  Settings s;
  s.table().apply_toml("[second]\nlist = [\"x\", \"y z\"]\n", "file");
  EXPECT_EQ(s.list, (ConfigTable::List{"x", "y z"}));
  EXPECT_NE(s.table().to_toml().find("list = [\"x\", \"y z\"]"), std::string::npos);
  s.table().apply_toml("[second]\nlist = \"p, q\"\n", "file");
  EXPECT_EQ(s.list, (ConfigTable::List{"p", "q"}));
  s.table().apply_override("--second.list=a,b");
  EXPECT_EQ(s.list, (ConfigTable::List{"a", "b"}));
  s.table().apply_override("--second.list=\"only\"");
  EXPECT_EQ(s.list, (ConfigTable::List{"only"}));
  s.table().apply_override("--second.list=");
  EXPECT_TRUE(s.list.empty());
  expect_error([&] { s.table().apply_toml("[second]\nlist = [1]\n", "file"); }, {"file:2", "second.list", "list"});
  expect_error([&] { s.table().apply_toml("[second]\nname = [\"x\"]\n", "file"); },
               {"file:2", "second.name", "string"});
}

TEST(ConfigTable, ListsOfLists) {
  const ConfigTable::Lists expected = {{"a", "b c"}, {"d"}};
  Settings s;
  EXPECT_NE(s.table().to_toml().find("lists = []"), std::string::npos);
  s.table().apply_toml("[second]\nlists = [[\"a\", \"b c\"], [\"d\"]]\n", "file");
  EXPECT_EQ(s.lists, expected);
  EXPECT_NE(s.table().to_toml().find("lists = [[\"a\", \"b c\"], [\"d\"]]"), std::string::npos);
  s.table().apply_toml("[second]\nlists = []\n", "file");
  EXPECT_TRUE(s.lists.empty());
  s.table().apply_toml("[second]\nlists = \"a, b c; d\"\n", "file");
  EXPECT_EQ(s.lists, expected);
  s.table().apply_override("--second.lists=");
  EXPECT_TRUE(s.lists.empty());
  s.table().apply_override("--second.lists=a,b c;d");
  EXPECT_EQ(s.lists, expected);
  // A printed value reads back, even if it has lists without items.
  s.lists = {{}, {"[\"x\", ';']", "y,z"}};
  Settings again;
  again.table().apply_toml(s.table().to_toml(), "text");
  EXPECT_EQ(again.lists, s.lists);
  for (const char* value : {"[\"a\"]", "[\"a\", [\"b\"]]", "[[1]]", "[[[\"a\"]]]", "3"}) {
    expect_error([&] { s.table().apply_toml(fmt::format("[second]\nlists = {}\n", value), "file"); },
                 {"file:2", "second.lists", "list of lists of strings"});
  }
  expect_error([&] { s.table().apply_toml("[second]\nlist = [[\"a\"]]\n", "file"); },
               {"second.list", "list of strings"});
}

TEST(ConfigTable, KeysOfAnotherProgram) {
  Settings s;
  ConfigTable t = s.table();
  t.apply_toml("[other]\nflag = false\nfeature = false\n[other.below]\ndates = [1979-05-27]\nempty = []\n", "file");
  EXPECT_EQ(t.ignored(), (ConfigTable::List{"other.below.dates"}));
  t.apply_override("--other.flag");
  t.apply_override("--other.no_feature");
  t.apply_override("--other.no-flag");
  t.apply_override("--other.flag=true");  // the list names each key once
  EXPECT_EQ(t.ignored(), (ConfigTable::List{"other.below.dates", "other.flag"}));
  expect_error([&] { t.apply_toml("[other]\nfeature = true\n", "file"); },
               {"file:2", "other.feature", "a feature", "not built"});
  expect_error([&] { t.apply_override("--other.feature"); }, {"other.feature", "a feature", "not built"});
  EXPECT_EQ(t.describe_foreign().size(), 3u);
}

TEST(ConfigTable, FlagsAsTyroWritesThem) {
  Settings s;
  s.flag = true;
  s.table().apply_override("--first.no-flag");
  EXPECT_FALSE(s.flag);
  expect_error([&] { s.table().apply_override("--first.no_count"); }, {"first.no_count"});
  expect_error([&] { s.table().apply_override("--second.no-name"); }, {"second.no_name"});  // a text, not a flag
  EXPECT_EQ(s.name, "x");
  const ConfigTable t = s.table();
  EXPECT_TRUE(t.takes_value("first.count", "3"));
  EXPECT_TRUE(t.takes_value("first.flag", "false"));
  EXPECT_FALSE(t.takes_value("first.flag", "file.toml"));
  EXPECT_FALSE(t.takes_value("first.no-flag", "file.toml"));
  EXPECT_FALSE(t.takes_value("other.flag", "file.toml"));
  EXPECT_TRUE(t.takes_value("other.below.key", "file.toml"));
  EXPECT_FALSE(t.takes_value("other.below.no-key", "file.toml"));
  EXPECT_FALSE(t.takes_value("other.no_flag", "file.toml"));
  EXPECT_TRUE(t.takes_value("unknown.key", "x"));  // so that the error shows the key and its value
}

TEST(ConfigTable, AKeyOfVeryManyPartsIsRefusedBeforeItOverflowsTheStack) {
  Settings s;
  std::string key = "a";
  for (int i = 0; i < 200000; ++i) key += ".a";
  expect_error([&] { s.table().apply_toml("\n[" + key + "]\n", "file"); }, {"file:2", "parts"});
  expect_error([&] { s.table().apply_toml(key + " = 1\n", "file"); }, {"file:1", "parts"});
  // Dots outside of keys do not count.
  s.table().apply_toml("[second]  # 1.2.3.4.5.6.7.8.9.10\nname = \"\\\"1.2.3.4.5.6.7.8.9.10.11\"\n", "file");
  EXPECT_EQ(s.name, "\"1.2.3.4.5.6.7.8.9.10.11");
  for (const std::string quotes : {"\"\"\"", "'''"}) {
    s.table().apply_toml(fmt::format("[second]\nname = {0}1\n'2' \"2\" ........... 3{0}\n", quotes), "file");
    EXPECT_EQ(s.name, "1\n'2' \"2\" ........... 3");
    for (const std::size_t of_text : {0u, 1u, 2u}) {  // quotes that belong to the text, before those that close it
      const std::string text = fmt::format("a = {{x = {0}1{1}{0}, {2} = 1}}\n", quotes, quotes.substr(0, of_text), key);
      expect_error([&] { s.table().apply_toml(text, "file"); }, {"file:1", "parts"});
    }
  }
}

}  // namespace
}  // namespace tessera
