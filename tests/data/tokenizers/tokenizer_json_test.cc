// Tests that each damaged, hostile or unsupported tokenizer.json gives a clear Error.
#include "data/tokenizers/tokenizer_json.h"

#include "data/tokenizers/hf_tokenizer.h"
#include "tests/data/tokenizer_json_support.h"

namespace tessera::data {
namespace {

struct BadFile {
  std::string change;  // describes the case
  std::function<void(json&)> apply;
  std::vector<std::string> parts;  // parts of the message
};

void PrintTo(const BadFile& file, std::ostream* out) { *out << file.change; }

std::vector<BadFile> bad_files() {
  return {
      {"no model", [](json& j) { j.erase("model"); }, {"$.model is missing"}},
      {"model is an array", [](json& j) { j["model"] = json::array(); }, {"$.model: expected an object, got array"}},
      {"model type", [](json& j) { j["model"]["type"] = "Unigram"; }, {"$.model.type", "\"Unigram\""}},
      {"prefix", [](json& j) { j["model"]["continuing_subword_prefix"] = "##"; }, {"continuing_subword_prefix", "##"}},
      {"suffix", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, {"end_of_word_suffix", "</w>"}},
      {"byte_fallback", [](json& j) { j["model"]["byte_fallback"] = true; }, {"$.model.byte_fallback"}},
      {"byte_fallback type", [](json& j) { j["model"]["byte_fallback"] = 1; }, {"byte_fallback", "true or false"}},
      {"dropout", [](json& j) { j["model"]["dropout"] = 0.1; }, {"$.model.dropout", "0.1"}},
      {"no vocab", [](json& j) { j["model"].erase("vocab"); }, {"$.model.vocab is missing"}},
      {"vocab is an array", [](json& j) { j["model"]["vocab"] = {"a"}; }, {"$.model.vocab: expected an object"}},
      {"an empty token", [](json& j) { j["model"]["vocab"][""] = 300; }, {"$.model.vocab", "without text"}},
      {"id is a string", [](json& j) { j["model"]["vocab"]["x"] = "1"; }, {"$.model.vocab, token \"x\"", "an id"}},
      {"id is negative", [](json& j) { j["model"]["vocab"]["x"] = -1; }, {"token \"x\"", "-1"}},
      {"id is a fraction", [](json& j) { j["model"]["vocab"]["x"] = 1.5; }, {"token \"x\"", "1.5"}},
      {"id 2^31", [](json& j) { j["model"]["vocab"]["x"] = 2147483648u; }, {"token \"x\"", "2147483648", "too large"}},
      {"id 2^31-1", [](json& j) { j["model"]["vocab"]["x"] = 2147483647; }, {"token \"x\"", "too large for a file of"}},
      {"id 2^64-1", [](json& j) { j["model"]["vocab"]["x"] = ~0ull; }, {"token \"x\"", "too large"}},
      {"an id twice", [](json& j) { j["model"]["vocab"]["ab"] = 97; }, {"$.model.vocab", "\"ab\"", "same id 97"}},
      {"no merges", [](json& j) { j["model"].erase("merges"); }, {"$.model.merges is missing"}},
      {"merges is an object", [](json& j) { j["model"]["merges"] = json::object(); }, {"merges: expected an array"}},
      {"merge is a number", [](json& j) { j["model"]["merges"][1] = 5; }, {"$.model.merges[1]", "a pair"}},
      {"merge of three",
       [](json& j) {
         j["model"]["merges"][1] = {"a", "b", "c"};
       },
       {"merges[1]", "a pair"}},
      {"merge of numbers",
       [](json& j) {
         j["model"]["merges"][1] = {1, 2};
       },
       {"merges[1]", "a pair"}},
      {"merge without space", [](json& j) { j["model"]["merges"][0] = "ab"; }, {"merges[0]", "a space between"}},
      {"merge with two spaces", [](json& j) { j["model"]["merges"][0] = "a b c"; }, {"merges[0]", "a space between"}},
      {"merge of unknown", [](json& j) { j["model"]["merges"][0] = "a xyz"; }, {"merges[0]", "\"xyz\" is not in"}},
      {"merge to unknown", [](json& j) { j["model"]["merges"][0] = "a c"; }, {"merges[0]", "\"ac\" is not in"}},
      {"merge twice", [](json& j) { j["model"]["merges"][2] = "a b"; }, {"merges[2]", "merged twice"}},
      {"merge with nothing", [](json& j) { j["model"]["merges"][0] = " ab"; }, {"merges[0]", "\"\" is not in"}},
      {"NFC",
       [](json& j) {
         j["normalizer"] = {{"type", "NFC"}};
       },
       {"$.normalizer", "\"NFC\" is not supported"}},
      {"NFKC in a sequence",
       [](json& j) {
         j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}};
       },
       {"$.normalizer.normalizers[0]", "\"NFKC\" is not supported"}},
      {"normalizer is a string", [](json& j) { j["normalizer"] = "NFC"; }, {"$.normalizer: expected an object"}},
      {"no pre-tokenizer", [](json& j) { j["pre_tokenizer"] = nullptr; }, {"$.pre_tokenizer is missing"}},
      {"Metaspace",
       [](json& j) {
         j["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       {"$.pre_tokenizer", "\"Metaspace\""}},
      {"Whitespace in a sequence",
       [](json& j) {
         j["pre_tokenizer"] = sequence({{{"type", "Whitespace"}}, byte_level(false)});
       },
       {"$.pre_tokenizer.pretokenizers[0]", "\"Whitespace\""}},
      {"no ByteLevel", [](json& j) { j["pre_tokenizer"] = split("a", "Isolated"); }, {"there is no ByteLevel"}},
      {"after ByteLevel",
       [](json& j) {
         j["pre_tokenizer"] = sequence({byte_level(false), split("a", "Isolated")});
       },
       {"pretokenizers[1]", "\"Split\" after ByteLevel"}},
      {"behavior",
       [](json& j) {
         j["pre_tokenizer"] = sequence({split("a", "isolated"), byte_level(false)});
       },
       {"pretokenizers[0].behavior", "\"isolated\""}},
      {"no pattern",
       [](json& j) {
         j["pre_tokenizer"] = sequence({split("a", "Isolated"), byte_level(false)});
         j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json::object();
       },
       {"pretokenizers[0].pattern", "\"Regex\" or a \"String\""}},
      {"an empty pattern",
       [](json& j) {
         j["pre_tokenizer"] = sequence({split("", "Isolated"), byte_level(false)});
       },
       {"pretokenizers[0].pattern", "empty"}},
      {"a bad regex",
       [](json& j) {
         j["pre_tokenizer"] = sequence({split("a(", "Isolated"), byte_level(false)});
       },
       {"pretokenizers[0]", "\"a(\"", "not closed"}},
      {"too many splits",
       [](json& j) { j["pre_tokenizer"] = sequence(std::vector<json>(1000, split("a", "Isolated"))); },
       {"pretokenizers[64]", "more than 64"}},
      {"decoder",
       [](json& j) {
         j["decoder"] = {{"type", "WordPiece"}};
       },
       {"$.decoder", "\"WordPiece\""}},
      {"no decoder", [](json& j) { j["decoder"] = nullptr; }, {"$.decoder is missing"}},
      {"added_tokens is an object", [](json& j) { j["added_tokens"] = json::object(); }, {"$.added_tokens", "array"}},
      {"added token without id", [](json& j) { j["added_tokens"][0].erase("id"); }, {"added_tokens[0].id is missing"}},
      {"added token, huge id",
       [](json& j) { j["added_tokens"][0]["id"] = 1'000'000'000; },
       {"$.added_tokens[0].id", "1000000000", "too large"}},
      {"added token, empty", [](json& j) { j["added_tokens"][0]["content"] = ""; }, {"added_tokens[0].content"}},
      {"added token, long",
       [](json& j) { j["added_tokens"][0]["content"] = std::string(2000, 'x'); },
       {"added_tokens[0].content", "2000 bytes"}},
      {"added token twice",
       [](json& j) { j["added_tokens"][1]["content"] = "<s>"; },
       {"added_tokens[1].content", "<s>"}},
      {"added token, id of one before it",
       [](json& j) {
         j["added_tokens"] = {added_token(262, "<x>"), added_token(262, "<y>")};
       },
       {"added_tokens[1].id is 262", "gives \"<y>\" id 263"}},
      {"added token, id of another",
       [](json& j) { j["added_tokens"][1] = added_token(256, "<x>"); },
       {"added_tokens[1]", "\"<x>\"", "\"ab\"", "same id 256"}},
      {"added token, id beyond the next",
       [](json& j) { j["added_tokens"].push_back(added_token(270, "<x>")); },
       {"added_tokens[2].id is 270", "gives \"<x>\" id 262"}},
      {"added token, counted behind the vocabulary",
       [](json& j) {
         j["model"]["vocab"]["x y"] = 300;
         j["added_tokens"].push_back(added_token(301, "<x>"));
       },
       {"added_tokens[2].id is 301", "gives \"<x>\" id 263"}},
      {"unk_token for a missing byte",
       [](json& j) {
         j["model"]["unk_token"] = "<s>";
         j["model"]["vocab"].erase("z");
       },
       {"$.model.unk_token", "the byte 0x7A (\"z\")", "expected null"}},
      {"added token, other id than in the vocabulary",
       [](json& j) { j["added_tokens"][1]["content"] = "ab"; },
       {"added_tokens[1]", "\"ab\"", "id 261 here", "id 256"}},
      {"added token, flag", [](json& j) { j["added_tokens"][0]["lstrip"] = "no"; }, {"added_tokens[0].lstrip"}},
      {"template without token",
       [](json& j) {
         j["post_processor"] = {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", json::object()}}}}};
       },
       {"$.post_processor.single[0].SpecialToken.id is missing"}},
      {"template with unknown token",
       [](json& j) {
         j["post_processor"] = {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", {{"id", "<x>"}}}}}}};
       },
       {"post_processor", "\"<x>\"", "no such token"}},
      {"no BOS, no EOS",
       [](json& j) {
         j["added_tokens"] = json::array();
         for (const char* name : {"<s>", "</s>"}) j["model"]["vocab"].erase(name);
       },
       {"tokenizer_config.json", "eos_token"}},
      {"EOS is not special", [](json& j) { j["added_tokens"][1]["special"] = false; }, {"EOS", "261", "special"}},
      {"a long name in a message",
       [](json& j) { j["model"]["merges"][0] = "a " + std::string(100'000, 'x'); },
       {"merges[0]", "xxx...\" (100000 bytes)"}},
  };
}

class BadTokenizerJson : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadTokenizerJson, IsAnErrorThatNamesFileAndField) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  GetParam().apply(file);
  const auto path = write_file(scratch / "tokenizer.json", file.dump());
  std::vector<std::string> parts = GetParam().parts;
  parts.push_back(path.string());
  const std::string message = expect_error([&] { HfTokenizer{path}; }, parts);
  EXPECT_LT(message.size(), 1000u);
}

INSTANTIATE_TEST_SUITE_P(Files, BadTokenizerJson, ::testing::ValuesIn(bad_files()));

TEST(TokenizerJson, NotJson) {
  const TemporaryFolder scratch;
  const auto load = [&](const std::string& content) {
    const auto path = write_file(scratch / "tokenizer.json", content);
    return [path] { HfTokenizer{path}; };
  };
  const std::string good = small_tokenizer().dump();
  expect_error(load(""), {"tokenizer.json", "not JSON"});
  expect_error(load("[]"), {"tokenizer.json", "expected an object"});
  expect_error(load("3"), {"tokenizer.json", "expected an object"});
  expect_error(load(good.substr(0, good.size() / 2)), {"tokenizer.json", "not JSON"});
  expect_error(load(good + "}"), {"tokenizer.json", "not JSON"});
  expect_error(load("{\"a\": \"\xff\"}"), {"tokenizer.json", "UTF-8"});
  expect_error(load("{\"a\": \"\\ud800\"}"), {"tokenizer.json", "not JSON"});
  expect_error(load("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}"), {"tokenizer.json", "'c' occurs twice"});
  expect_error(load(std::string(100'000, '[')), {"tokenizer.json", "nested deeper"});
  expect_error(load(std::string(100'000, '[') + std::string(100'000, ']')), {"tokenizer.json", "nested deeper"});
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  expect_error(load(objects), {"tokenizer.json", "nested deeper"});
  expect_error([&] { HfTokenizer{scratch / "none.json"}; }, {"none.json"});
}

// A cut or changed file gives an Error or a tokenizer that works, but never a crash.
TEST(TokenizerJson, DamageIsFoundOrHarmless) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["pre_tokenizer"] = sequence({split("\\p{N}{1,3}", "Isolated"), byte_level(false)});
  const std::string good = file.dump();
  int num_errors = 0;
  for (std::size_t at = 0; at < good.size(); at += 7) {
    std::string changed = good;
    changed[at] = static_cast<char>(changed[at] ^ (1 << at / 7 % 8));
    for (const std::string& bad : {changed, good.substr(0, at)}) {
      const auto path = write_file(scratch / "tokenizer.json", bad);
      try {
        const HfTokenizer tokenizer(path);
        tokenizer.decode(tokenizer.encode_with_special("abc 12 <s>\n"));
      } catch (const Error&) {
        ++num_errors;
      }
    }
  }
  EXPECT_GT(num_errors, static_cast<int>(good.size() / 7));  // at least all prefixes are errors
}

TEST(TokenizerJson, ReadsWhatKnownFilesHave) {
  json file = small_tokenizer();
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", json::array()}};
  file["model"].erase("type");
  file["model"]["continuing_subword_prefix"] = "";
  file["model"]["end_of_word_suffix"] = "";
  file["model"]["merges"] = json::array({{"a", "b"}, {"b", "c"}, {"a", "bc"}, {"\u0120", "a"}});
  file["pre_tokenizer"] = sequence(
      {split("x", "MergedWithNext", true), {{"type", "Digits"}, {"individual_digits", true}}, byte_level(true, true)});
  file["post_processor"] = {{"type", "Sequence"},
                            {"processors",
                             {byte_level(false),
                              {{"type", "TemplateProcessing"},
                               {"single",
                                {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                 {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                                 {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}}}}}};
  const TokenizerJson result = parse_tokenizer_json(file.dump(), "tokenizer.json");
  EXPECT_EQ(result.vocab_size, 262);
  EXPECT_EQ(result.template_bos, "<s>");
  EXPECT_EQ(result.template_eos, "</s>");
  EXPECT_EQ(result.model.merges.size(), 4u);
  EXPECT_EQ(result.model.merged, (std::vector<std::int32_t>{256, 257, 258, 259}));
  ASSERT_EQ(result.pre_tokenizer.splits.size(), 2u);
  EXPECT_EQ(result.pre_tokenizer.splits[0].behavior, SplitBehavior::kMergedWithNext);
  EXPECT_TRUE(result.pre_tokenizer.splits[0].invert);
  EXPECT_EQ(result.pre_tokenizer.splits[1].behavior, SplitBehavior::kIsolated);
  EXPECT_TRUE(result.pre_tokenizer.add_prefix_space);
  EXPECT_TRUE(result.pre_tokenizer.byte_level_regex);
}

}  // namespace
}  // namespace tessera::data
