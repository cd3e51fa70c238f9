#include "data/tokenizers/hf_tokenizer.h"

#include <thread>

#include "base/log.h"
#include "data/load_tokenizer.h"
#include "tests/data/tokenizer_json_support.h"
#include "tests/log_of.h"
#include "tests/threads_scope.h"

namespace tessera::data {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kAb = 256, kBc = 257, kAbc = 258, kSpaceA = 259, kBos = 260, kEos = 261;

HfTokenizer load(const TemporaryFolder& scratch, const json& file) {
  return HfTokenizer(write_file(scratch / "tokenizer.json", file.dump()));
}

HfTokenizer load_with(const TemporaryFolder& scratch, const std::vector<json>& added_tokens) {
  json file = small_tokenizer();
  for (const json& token : added_tokens) file["added_tokens"].push_back(token);
  return load(scratch, file);
}

TEST(HfTokenizer, Describes) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = load(scratch, small_tokenizer());
  EXPECT_EQ(tokenizer.kind(), "huggingface");
  EXPECT_EQ(tokenizer.vocab_size(), 262);
  EXPECT_EQ(tokenizer.bos_id(), kBos);
  EXPECT_EQ(tokenizer.eos_id(), kEos);
  ASSERT_EQ(tokenizer.files().size(), 1u);
  EXPECT_EQ(tokenizer.files()[0].name, "tokenizer.json");
  EXPECT_EQ(tokenizer.files()[0].content, small_tokenizer().dump());
}

TEST(HfTokenizer, NamesTheMissingBytesThatMatter) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  for (const char* token : {"\u0100", "\u010A", "\u0120", "z", "ab", "bc", "abc", "\u0120a"}) {
    file["model"]["vocab"].erase(token);
  }
  file["model"]["merges"] = json::array();
  const std::string log = log_of([&] {
    load(scratch, file);
    spdlog::default_logger()->flush();
  });
  EXPECT_NE(log.find("no token for 4 of the 256 bytes: the space, 0x20 (\"\u0120\" in the file); the line feed, 0x0A "
                     "(\"\u010A\" in the file); 0x7A (\"z\" in the file); 0x00"),
            std::string::npos)
      << log;
}

// The tokenizer first makes the merge that was learned first, wherever it is. Of equal merges it makes the leftmost
// first.
TEST(HfTokenizer, MergesInTheirOrder) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = load(scratch, small_tokenizer());
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.encode("abc"), (Ids{kAb, 'c'}));
  EXPECT_EQ(tokenizer.encode("bc"), Ids{kBc});
  EXPECT_EQ(tokenizer.encode("abab"), (Ids{kAb, kAb}));
  EXPECT_EQ(tokenizer.encode(" abc"), (Ids{' ', kAb, 'c'}));
  EXPECT_EQ(tokenizer.encode(" a"), Ids{kSpaceA});
  EXPECT_EQ(tokenizer.encode("\xC3\xA9"), (Ids{0xC3, 0xA9}));
  EXPECT_EQ(tokenizer.encode(std::string("\0\n", 2)), (Ids{0, '\n'}));

  json file = small_tokenizer();
  file["model"]["merges"] = {"b c", "a bc", "a b", "\u0120 a"};
  EXPECT_EQ(load(scratch, file).encode("abc"), Ids{kAbc});
  EXPECT_EQ(load(scratch, file).encode("abcabd"), (Ids{kAbc, kAb, 'd'}));

  file["model"]["vocab"]["aa"] = 270;
  file["model"]["merges"] = {"a a"};
  EXPECT_EQ(load(scratch, file).encode("aaaaa"), (Ids{270, 270, 'a'}));
}

// The tokenizer merges long words by another algorithm, and remembers short ones. Neither changes the result.
TEST(HfTokenizer, LongWordsAreMergedLikeShortOnes) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  json& model = file["model"];
  // These merges over a and b overlap in many ways.
  model["merges"] = json::array();
  std::int32_t next = 300;
  const Philox random(3, stream_of("test.merges"));
  std::vector<std::string> tokens{"a", "b"};
  for (std::uint64_t i = 0; tokens.size() < 60; ++i) {
    const std::string& left = tokens[random.words(i)[0] % tokens.size()];
    const std::string& right = tokens[random.words(i)[1] % tokens.size()];
    const std::string joined = left + right;
    if (joined.size() > 12 || (model["vocab"].contains(joined) && joined != "ab")) continue;
    if (joined != "ab") model["vocab"][joined] = next++;
    model["merges"].push_back({left, right});
    tokens.push_back(joined);
  }
  std::map<std::pair<std::string, std::string>, std::size_t> ranks;
  for (std::size_t i = 0; i < model["merges"].size(); ++i) {
    ranks.emplace(std::pair(model["merges"][i][0], model["merges"][i][1]), i);
  }
  const HfTokenizer tokenizer = load(scratch, file);
  for (std::uint64_t i = 0; i < 300; ++i) {
    std::string word;
    for (std::uint64_t k = 0; k < 1 + i % 100; ++k) word += random.words(1000 + i * 100 + k)[0] % 2 == 0 ? 'a' : 'b';
    // This loop follows the definition step by step.
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    while (true) {
      std::size_t best = 0, best_rank = ranks.size();
      for (std::size_t k = 0; k + 1 < parts.size(); ++k) {
        const auto rank = ranks.find({parts[k], parts[k + 1]});
        if (rank != ranks.end() && rank->second < best_rank) best = k, best_rank = rank->second;
      }
      if (best_rank == ranks.size()) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    Ids expected;
    for (const std::string& part : parts) expected.push_back(model["vocab"][part]);
    for (int again = 0; again < 2; ++again) ASSERT_EQ(tokenizer.encode(word), expected) << word;
  }
}

TEST(HfTokenizer, IgnoreMergesTakesWholeWords) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["model"]["vocab"]["\u0120xyz"] = 262;  // no merge makes this token
  EXPECT_EQ(load(scratch, file).encode("abc xyz"), (Ids{kAb, 'c', ' ', 'x', 'y', 'z'}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(load(scratch, file).encode("abc xyz abcd"), (Ids{kAbc, 262, ' ', kAb, 'c', 'd'}));
}

// With ignore_merges a word could be a special token of the vocabulary. In a document it is text.
TEST(HfTokenizer, SpecialWordsAreTextInDocuments) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["model"]["ignore_merges"] = true;
  file["model"]["vocab"]["end"] = 262;
  file["added_tokens"].push_back(added_token(262, "end", true));
  file["added_tokens"].back()["single_word"] = true;
  write_file(scratch / "tokenizer_config.json", R"({"bos_token": null, "eos_token": "end"})");
  const HfTokenizer tokenizer = load(scratch, file);
  EXPECT_EQ(tokenizer.eos_id(), 262);
  EXPECT_EQ(tokenizer.bos_id(), 262);
  EXPECT_EQ(tokenizer.encode("end"), (Ids{'e', 'n', 'd'}));
  EXPECT_EQ(tokenizer.encode_with_special("end"), Ids{262});
  EXPECT_EQ(tokenizer.encode_with_special("1end"), (Ids{'1', 262}));  // no added token, but a word of the vocabulary
  EXPECT_EQ(tokenizer.encode("1end"), (Ids{'1', 'e', 'n', 'd'}));
}

TEST(HfTokenizer, SpecialTokensAreTextUnlessAskedFor) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = load_with(scratch, {added_token(262, "<tool>")});
  const std::string text = "a<s><tool>b";
  EXPECT_EQ(tokenizer.encode(text), (Ids{'a', '<', 's', '>', 262, 'b'}));
  EXPECT_EQ(tokenizer.encode_with_special(text), (Ids{'a', kBos, 262, 'b'}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode_with_special(text)), "a<tool>b");
}

TEST(HfTokenizer, TheLongestAddedTokenOfTheLeftmost) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer =
      load_with(scratch, {added_token(262, "<x"), added_token(263, "<x><x>"), added_token(264, "x><xy")});
  EXPECT_EQ(tokenizer.encode("<x><x><x>"), (Ids{263, 262, '>'}));
  EXPECT_EQ(tokenizer.encode("<x><xy"), (Ids{262, '>', 262, 'y'}));
  EXPECT_EQ(tokenizer.encode("x><xy"), Ids{264});
}

TEST(HfTokenizer, NormalizedTokensComeAfterTheOthers) {
  const TemporaryFolder scratch;
  json late = added_token(262, "<s><s>");
  late["normalized"] = true;
  const HfTokenizer tokenizer = load_with(scratch, {late});
  EXPECT_EQ(tokenizer.encode_with_special("<s><s>"), (Ids{kBos, kBos}));
  EXPECT_EQ(tokenizer.encode("<s><s>"), Ids{262});
}

TEST(HfTokenizer, StripsTakeWhiteSpace) {
  const TemporaryFolder scratch;
  json left = added_token(262, "<l>"), right = added_token(263, "<r>"), both = added_token(264, "<b>");
  left["lstrip"] = true;
  right["rstrip"] = true;
  both["lstrip"] = both["rstrip"] = true;
  const HfTokenizer tokenizer = load_with(scratch, {left, right, both});
  EXPECT_EQ(tokenizer.encode("x \t\n<l> y"), (Ids{'x', 262, ' ', 'y'}));
  EXPECT_EQ(tokenizer.encode("x <r>\u3000\u00a0\u2028 y"), (Ids{'x', ' ', 263, 'y'}));
  EXPECT_EQ(tokenizer.encode("x\u1680\u2003\u0085<b> \u205f\u202fy"), (Ids{'x', 264, 'y'}));
  EXPECT_EQ(tokenizer.encode("\u200b<b>"), (Ids{0xE2, 0x80, 0x8B, 264}));  // no white space in Unicode
  EXPECT_EQ(tokenizer.encode("  <b>  <b>  "), (Ids{264, 264}));
  EXPECT_EQ(tokenizer.encode("<r> <l>"), (Ids{263, 262}));
}

// These tokens are white space and take white space. None is taken twice, or looked at again and again.
TEST(HfTokenizer, SpacesThatTakeSpacesTakeLinearTime) {
  const TemporaryFolder scratch;
  json left = added_token(262, " "), right = added_token(263, "\t");
  left["lstrip"] = true;
  right["rstrip"] = true;
  const HfTokenizer tokenizer = load_with(scratch, {left, right});
  EXPECT_EQ(tokenizer.encode("x\t\ty  z"), (Ids{'x', 263, 'y', 262, 262, 'z'}));
  EXPECT_EQ(tokenizer.encode(std::string(1'000'000, ' ')), Ids(1'000'000, 262));
  EXPECT_EQ(tokenizer.encode(std::string(1'000'000, '\t')), Ids{263});
}

TEST(HfTokenizer, SingleWords) {
  const TemporaryFolder scratch;
  json word = added_token(262, "ab");
  word["content"] = "abcd";
  word["single_word"] = true;
  const HfTokenizer tokenizer = load_with(scratch, {word});
  const auto has = [&](const std::string& text) {
    const Ids ids = tokenizer.encode(text);
    return std::find(ids.begin(), ids.end(), 262) != ids.end();
  };
  for (const char* text : {"abcd", " abcd ", "-abcd.", "\u4e00 abcd", "\u00b2abcd", "abcd\u2019"}) {
    EXPECT_TRUE(has(text)) << text;
  }
  for (const char* text :
       {"xabcd", "abcdx", "1abcd", "abcd_", "\u00e9abcd", "abcd\u0301", "\u4e00abcd", "abcd\u200d"}) {
    EXPECT_FALSE(has(text)) << text;
  }
}

TEST(HfTokenizer, DecodesBytes) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["model"]["vocab"]["\u00c3\u0142"] = 262;  // the bytes C3 A0, which are a character
  file["model"]["vocab"]["<\u4e2d>"] = 263;      // stands for no bytes, so it decodes to itself
  file["model"]["vocab"]["xyz"] = 270;           // ids 264 and 267 to 269 have no token
  file["added_tokens"].push_back(added_token(265, "caf\u00e9 "));
  file["added_tokens"].push_back(added_token(266, "<pad>", true));
  const HfTokenizer tokenizer = load(scratch, file);
  EXPECT_EQ(tokenizer.vocab_size(), 271);
  EXPECT_EQ(tokenizer.decode(Ids{}), "");
  EXPECT_EQ(tokenizer.decode(Ids{0xC3, 0xA9}), "\u00e9");
  EXPECT_EQ(tokenizer.decode(Ids{0xC3}), "\xC3");  // half a character
  EXPECT_EQ(tokenizer.decode(Ids{0xA9, 262, 0xF0}), "\xA9\u00e0\xF0");
  EXPECT_EQ(tokenizer.decode(Ids{kBos, kSpaceA, 263, 265, 266, kEos}), " a<\u4e2d>caf\u00e9 ");
  expect_error([&] { tokenizer.decode(Ids{-1}); }, {"-1", "[0, 271)"});
  expect_error([&] { tokenizer.decode(Ids{271}); }, {"271", "[0, 271)"});
  expect_error([&] { tokenizer.decode(Ids{267}); }, {"267", "no token"});
}

TEST(HfTokenizer, IllFormedTextIsRepaired) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = load(scratch, small_tokenizer());
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a\xFF"
                                              "b\xC3")),
            "a\uFFFDb\uFFFD");
}

TEST(HfTokenizer, BosAndEos) {
  const TemporaryFolder scratch;
  const auto with_config = [&](const std::string& config, const json& file = small_tokenizer()) {
    write_file(scratch / "tokenizer_config.json", config);
    return load(scratch, file);
  };
  const auto ids = [](const HfTokenizer& tokenizer) { return std::pair(tokenizer.bos_id(), tokenizer.eos_id()); };
  json file = small_tokenizer();
  file["added_tokens"].push_back(added_token(262, "<|im_start|>", true));
  file["added_tokens"].push_back(added_token(263, "<|im_end|>", true));

  // The names in tokenizer_config.json have priority, then the template, then known names.
  const std::string both = R"({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}})";
  EXPECT_EQ(ids(with_config(both, file)), std::pair(262, 263));
  EXPECT_EQ(ids(with_config(R"({"eos_token": "<|im_end|>", "bos_token": null})", file)), std::pair(263, 263));
  EXPECT_EQ(ids(with_config(R"({"eos_token": "<|im_end|>"})", file)), std::pair(kBos, 263));
  EXPECT_EQ(ids(with_config("{}", file)), std::pair(kBos, kEos));
  file["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", {{{"SpecialToken", {{"id", "<|im_start|>"}}}}, {{"Sequence", {{"id", "A"}}}}}}};
  EXPECT_EQ(ids(with_config("{}", file)), std::pair(262, kEos));
  EXPECT_EQ(ids(with_config(both, file)), std::pair(262, 263));

  json gpt2 = small_tokenizer();
  for (const char* name : {"<s>", "</s>"}) gpt2["model"]["vocab"].erase(name);
  gpt2["added_tokens"] = {added_token(260, "<|endoftext|>", true)};
  EXPECT_EQ(ids(with_config("{}", gpt2)), std::pair(260, 260));

  // Names that the vocabulary lacks get the next ids. A name that is only in the vocabulary becomes a special token.
  const HfTokenizer named = with_config(R"({"bos_token": "<new>", "eos_token": "<newer>"})");
  EXPECT_EQ(ids(named), std::pair(262, 263));
  EXPECT_EQ(named.vocab_size(), 264);
  EXPECT_EQ(named.decode(Ids{262, 'x', 263}), "x");
  EXPECT_EQ(named.encode_with_special("<new>x"), (Ids{262, 'x'}));
  json in_vocabulary = small_tokenizer();
  in_vocabulary["model"]["vocab"]["<eot>"] = 262;
  const HfTokenizer found = with_config(R"({"eos_token": "<eot>"})", in_vocabulary);
  EXPECT_EQ(found.eos_id(), 262);
  EXPECT_EQ(found.decode(Ids{'x', 262}), "x");

  // transformers first numbers the new tokens of added_tokens_decoder, in the order of their ids.
  const HfTokenizer numbered = with_config(
      R"({"bos_token": "<new>", "eos_token": "</s>", "added_tokens_decoder": {"9000": {"content": "<pad>"},
          "500": {"content": "<new>"}, "97": {"content": "a"}}})");
  EXPECT_EQ(ids(numbered), std::pair(262, kEos));
  expect_error(
      [&] {
        with_config(R"({"bos_token": "<new>", "added_tokens_decoder": {"500": {"content": "<pad>"},
                        "9000": {"content": "<new>"}}})");
      },
      {"tokenizer_config.json", "transformers gives the token \"<new>\" id 263", "Tessera gives it id 262"});
  expect_error([&] { with_config(R"({"added_tokens_decoder": {"x": {"content": "<pad>"}}})"); },
               {"tokenizer_config.json", "$.added_tokens_decoder", "\"x\""});

  expect_error([&] { with_config(R"({"eos_token": 3})"); }, {"tokenizer_config.json", "eos_token", "string"});
  expect_error([&] { with_config(R"({"eos_token": {"lstrip": true}})"); }, {"eos_token.content is missing"});
  expect_error([&] { with_config(R"({"eos_token": "ab"})"); }, {"EOS", "256", "special"});
  expect_error([&] { with_config(R"({"eos_token": "a"})"); }, {"EOS", "97", "special"});
  expect_error([&] { with_config("{"); }, {"tokenizer_config.json", "not JSON"});
}

// "special" does not keep a text from giving this token. So the error must not give a missing "special" as the reason.
TEST(HfTokenizer, MergesThatSpellBos) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  const json spelled = file;
  file["model"]["vocab"]["<s"] = 262;
  file["model"]["vocab"]["<s>"] = kBos;
  file["model"]["merges"].push_back("< s");
  EXPECT_NO_THROW(load(scratch, file));
  file["model"]["merges"].push_back("<s >");
  const std::string message =
      expect_error([&] { load(scratch, file); }, {"tokenizer.json", "BOS is id 260", "the result of merges"});
  EXPECT_EQ(message.find("expected one with \"special\""), std::string::npos) << message;
  json unmarked = spelled;
  unmarked["added_tokens"] = {added_token(kBos, "<s>", false), added_token(kEos, "</s>", true)};
  expect_error([&] { load(scratch, unmarked); }, {"BOS is id 260", "expected one with \"special\": true"});
}

// Decoding keeps a special token that a text can give, too. BOS and EOS give no text, even if the file does not call
// them special.
TEST(HfTokenizer, DecodingLosesNoText) {
  const TemporaryFolder scratch;
  const HfTokenizer padded = load_with(scratch, {added_token('!', "!", true)});
  EXPECT_EQ(padded.decode(padded.encode("a!")), "a!");
  json file = small_tokenizer();
  file["added_tokens"] = json::array();
  file["model"]["vocab"]["<s>"] = 260;
  file["model"]["vocab"]["</s>"] = 261;
  const HfTokenizer unmarked = load(scratch, file);
  EXPECT_EQ(unmarked.eos_id(), kEos);
  EXPECT_EQ(unmarked.decode(Ids{kBos, 'x', kEos}), "x");
}

// The expected ids are those of the `tokenizers` library 0.23. A byte without a token vanishes, and its neighbours
// merge.
TEST(HfTokenizer, BytesWithoutATokenAreDropped) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["model"]["vocab"].erase(byte_level_text(0xC3));
  file["model"]["vocab"].erase(byte_level_text(0xA9));
  const HfTokenizer tokenizer = load(scratch, file);
  EXPECT_EQ(tokenizer.encode("a\u00E9b"), Ids{kAb});
  EXPECT_EQ(tokenizer.encode("\u00E9"), Ids{});
  EXPECT_EQ(tokenizer.encode("\u00E9 \u00E9x"), (Ids{' ', 'x'}));
  const std::string word = "a" + std::string("\u00E9") + "b";
  Ids expected;
  std::string many;
  for (int i = 0; i < 500; ++i) {  // long enough for the algorithm for long words
    many += word;
    expected.push_back(kAb);
  }
  EXPECT_EQ(tokenizer.encode(many), expected);
}

// A document of such bytes alone would consist of BOS and EOS.
TEST(Prepare, DocumentsWithoutTokensAreSkippedAndCounted) {
  const TemporaryFolder scratch;
  json file = small_tokenizer();
  file["model"]["vocab"].erase(byte_level_text(0xC3));
  file["model"]["vocab"].erase(byte_level_text(0xA9));
  PrepareOptions options;
  options.inputs = {write_file(scratch / "a.txt", "\u00E9"), write_file(scratch / "b.txt", "b")};
  options.tokenizer = write_file(scratch / "tokenizer.json", file.dump());
  options.output = scratch / "out";
  options.val_fraction = 0;
  const PrepareResult result = prepare_dataset(options);
  EXPECT_EQ(result.num_without_tokens, 1u);
  EXPECT_EQ(all_tokens(options.output, "train"), (Ids{kBos, 'b', kEos}));
}

// Many threads encode at once, as `tessera data prepare` does.
TEST(HfTokenizer, ThreadsDoNotDisturbEachOther) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = load(scratch, small_tokenizer());
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  for (int i = 0; i < 200; ++i) {
    texts.push_back(fmt::format("abc {} <s> {}\n", i * 7919, std::string(static_cast<std::size_t>(i), 'b')));
    expected.push_back(tokenizer.encode(texts.back()));
  }
  std::vector<std::thread> threads;
  std::atomic<int> num_different{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < texts.size(); ++i) num_different += tokenizer.encode(texts[i]) != expected[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_different, 0);
}

TEST(LoadTokenizer, FindsTokenizerJson) {
  const TemporaryFolder scratch;
  write_file(scratch / "assets/tokenizer.json", small_tokenizer().dump());
  write_file(scratch / "other.json", small_tokenizer().dump());
  const auto plain = load_tokenizer((scratch / "assets").string());
  EXPECT_EQ(plain->kind(), "huggingface");
  EXPECT_EQ(plain->checksum(), load_tokenizer((scratch / "assets/tokenizer.json").string())->checksum());
  EXPECT_EQ(plain->checksum(), load_tokenizer((scratch / "other.json").string())->checksum());

  write_file(scratch / "assets/tokenizer_config.json", R"({"bos_token": "</s>"})");
  const auto configured = load_tokenizer((scratch / "assets").string());
  EXPECT_EQ(configured->bos_id(), kEos);
  EXPECT_NE(configured->checksum(), plain->checksum());

  write_file(scratch / "assets/tokenizer.model", "of another kind, as Llama 3 has it");
  EXPECT_EQ(load_tokenizer((scratch / "assets").string())->kind(), "huggingface");
}

TEST(Prepare, KeepsTheTokenizersFiles) {
  const TemporaryFolder scratch;
  write_file(scratch / "assets/tokenizer.json", small_tokenizer().dump(1));
  write_file(scratch / "assets/tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
  std::string lines;
  for (int i = 0; i < 500; ++i) lines += fmt::format("{{\"text\": \"abc </s> {} ab\\n\"}}\n", i * i);
  PrepareOptions options;
  options.inputs = {write_file(scratch / "in.jsonl", lines)};
  options.tokenizer = (scratch / "assets").string();
  options.shard_tokens = 2000;
  options.val_fraction = 0.1;

  const ThreadsScope threads_before;
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    options.output = scratch / fmt::format("dataset-{}", threads);
    prepare_dataset(options);
  }
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch / "dataset-1")) {
    const std::string name = entry.path().filename().string();
    for (const char* other : {"dataset-2", "dataset-4"}) {
      EXPECT_EQ(read_text_file(entry.path()), read_text_file(scratch / other / name)) << name;
    }
    ++num_files;
  }
  EXPECT_GE(num_files, 6);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    EXPECT_EQ(read_text_file(scratch / "dataset-1" / name), read_text_file(scratch / "assets" / name));
  }

  const Manifest manifest = read_manifest(scratch / "dataset-1");
  EXPECT_EQ(manifest.tokenizer_kind, "huggingface");
  EXPECT_EQ(manifest.vocab_size, 262);
  const auto tokenizer = load_dataset_tokenizer(scratch / "dataset-1", manifest);
  const Ids tokens = all_tokens(scratch / "dataset-1", "train");
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), kEos),
            // Only the ends of documents are EOS.
            static_cast<std::ptrdiff_t>(num_documents(manifest.splits.at("train"))));
  EXPECT_EQ(tokenizer->decode(std::span(tokens).first(12)).substr(0, 10), "abc </s> 0");

  options.overwrite = true;  // the copied files count as parts of a dataset
  options.output = scratch / "dataset-1";
  prepare_dataset(options);
  write_file(scratch / "dataset-1/tokenizer_config.json", R"({"bos_token": "</s>", "eos_token": "</s>"})");
  expect_error([&] { load_dataset_tokenizer(scratch / "dataset-1", manifest); },
               {"dataset-1/tokenizer.json", "checksum", "damaged, or another one"});
}

}  // namespace
}  // namespace tessera::data
