#include "data/tokenizers/tokenizer.h"

#include <sentencepiece_trainer.h>

#include "base/log.h"
#include "base/text.h"
#include "data/load_tokenizer.h"
#include "data/sentencepiece_trainer.h"
#include "data/tokenizers/byte_tokenizer.h"
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "tensor/philox.h"
#include "tests/data/support.h"
#include "tests/log_of.h"

namespace tessera::data {
namespace {

std::string training_text() {
  const Philox random(1, stream_of("test.text"));
  const std::vector<std::string> words{
      "the",   "moral", "of",         "amicable",      "entry\n", "is",     "a.\n\n", "17",    "2024",    "quality",
      "being", "[1913", "Webster]\n", "\u00e9t\u00e9", "   see",  "{word}", "naming", "names", "renamed", "tab\there"};
  std::string text;
  for (std::uint64_t i = 0; i < 20000; ++i) text += words[random.words(i)[0] % words.size()] + " ";
  return text;
}

std::string train(const std::string& text, std::int32_t vocab_size, std::uint64_t sample_bytes = 1u << 20,
                  std::uint64_t seed = 0) {
  const TemporaryFolder scratch;
  DocumentSource source({write_file(scratch / "text.txt", text)});
  return train_sentencepiece(source, {.vocab_size = vocab_size, .sample_bytes = sample_bytes, .seed = seed});
}

/// Returns a model that all tests share if they only use it.
const std::string& small_model() {
  static const std::string model = train(training_text(), 400);
  return model;
}

std::unique_ptr<Tokenizer> small_tokenizer(const TemporaryFolder& scratch) {
  return load_tokenizer(write_file(scratch / "small.model", small_model()).string());
}

const std::vector<std::string>& hard_texts() {
  static const std::vector<std::string> texts{"",
                                              " ",
                                              "the quality of being amicable.\n   [1913 Webster]\n",
                                              "  two spaces in front, three behind   ",
                                              "\n\n\n",
                                              "\r\n\t mixed \t\t\n  \n white \n",
                                              "na\u00efve \u4f60\u597d \U0001F600 \u0301combining",
                                              "\u2581 the space's own sign \u2581\u2581x \u2581",
                                              "<s> </s> <unk> <0x41> \u2585 \u2047 are only text",
                                              "\uFEFFbyte order mark, no-break\u00a0space, \u3000 and \u200b, \uFFFD",
                                              std::string("a NUL \0 within", 14),
                                              "1234567890",
                                              "Ａｆｕｌｌ ｗｉｄｔｈ ﬁ ligature \u212b"};
  return texts;
}

TEST(ByteTokenizer, IdsAreBytes) {
  const ByteTokenizer tokenizer;
  EXPECT_EQ(tokenizer.vocab_size(), 258);
  EXPECT_EQ(tokenizer.bos_id(), 256);
  EXPECT_EQ(tokenizer.eos_id(), 257);
  EXPECT_EQ(tokenizer.encode("a\xC3\xA9"), (std::vector<std::int32_t>{0x61, 0xC3, 0xA9}));
  EXPECT_EQ(tokenizer.decode(std::vector<std::int32_t>{256, 0x61, 0xC3, 0xA9, 257}), "a\xC3\xA9");
  for (const std::string& text : hard_texts()) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  expect_error([&] { tokenizer.decode(std::vector<std::int32_t>{258}); }, {"258"});
  expect_error([&] { tokenizer.decode(std::vector<std::int32_t>{-1}); }, {"-1"});
}

TEST(SentencePieceTokenizer, LosesNothing) {
  const TemporaryFolder scratch;
  const auto tokenizer = small_tokenizer(scratch);
  EXPECT_EQ(tokenizer->vocab_size(), 400);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  for (const std::string& text : hard_texts()) {
    const std::vector<std::int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->decode(ids), text);
    for (const std::int32_t id : ids) {
      EXPECT_GT(id, 2) << "a control or unknown piece in: " << text;
      EXPECT_LT(id, tokenizer->vocab_size());
    }
  }
}

/// Chinese has few spaces. Without a piece for the space, it would come back as U+2581, which stands for it.
TEST(SentencePieceTokenizer, ARareSpaceStaysASpace) {
  std::string text;
  for (int i = 0; i < 10'000; ++i) text += "\u4f60\u597d\u4e16\u754c";
  const TemporaryFolder scratch;
  const auto tokenizer = load_tokenizer(write_file(scratch / "a.model", train(text + " end", 270)).string());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("hello big world")), "hello big world");
}

/// The library uses U+2585 itself.
TEST(SentencePieceTokenizer, TextsWithTheLibrarysOwnCharacterAreTrainedOn) {
  std::string text;
  for (int i = 0; i < 10'000; ++i) text += "\u2585 amicable ";
  const TemporaryFolder scratch;
  const auto tokenizer = load_tokenizer(write_file(scratch / "a.model", train(text, 285)).string());
  EXPECT_LE(tokenizer->encode(" amicable").size(), 4u);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("a \u2585 b")), "a \u2585 b");
}

TEST(SentencePieceTokenizer, LosesNothingOfRandomText) {
  const TemporaryFolder scratch;
  const auto tokenizer = small_tokenizer(scratch);
  const Philox random(2, stream_of("test.random_text"));
  for (std::uint64_t i = 0; i < 200; ++i) {
    std::string text;
    for (std::uint64_t k = 0; k < 50; ++k) text.push_back(static_cast<char>(random.words(i * 50 + k)[0]));
    repair_utf8(text);
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST(SentencePieceTokenizer, LearnsPieces) {
  const TemporaryFolder scratch;
  const auto tokenizer = small_tokenizer(scratch);
  const std::string text = training_text();
  EXPECT_LT(tokenizer->encode(text).size(), text.size() / 2);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
}

TEST(SentencePieceTokenizer, DigitsStandAloneAndARunOfSpacesIsAPiece) {
  std::string text;
  for (int i = 0; i < 10'000; ++i) text += "1913        Webster ";
  const TemporaryFolder scratch;
  const auto tokenizer = load_tokenizer(write_file(scratch / "a.model", train(text, 280)).string());
  for (std::int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    const std::string piece = tokenizer->decode(std::vector{id});
    EXPECT_TRUE(piece.size() == 1 || piece.find_first_of("0123456789") == piece.npos) << piece;
  }
  EXPECT_EQ(tokenizer->encode(std::string(8, ' ')).size(), 1u);
}

// The tokenizer encodes long texts in pieces. The result must not depend on them.
TEST(SentencePieceTokenizer, LongTextsAreEncodedLikeTheirParts) {
  const TemporaryFolder scratch;
  const auto tokenizer = small_tokenizer(scratch);
  const std::string sentence = "the quality of being   amicable.\n [1913 Webster]\n";
  const std::vector<std::int32_t> sentence_ids = tokenizer->encode(" " + sentence);
  for (std::size_t shift = 0; shift < sentence.size(); shift += 3) {  // the cuts are at all kinds of places
    std::string text(shift, 'x');
    std::vector<std::int32_t> expected = tokenizer->encode(text);
    for (int i = 0; i < 1400; ++i) {  // 70 kB; the first cut is near 64 kB
      text += " " + sentence;
      expected.insert(expected.end(), sentence_ids.begin(), sentence_ids.end());
    }
    ASSERT_TRUE(tokenizer->encode(text) == expected) << "shift " << shift;
  }
  const std::string no_spaces(300'000, 'x');
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(no_spaces)), no_spaces);
}

/// Trains a model that is not like those of train_sentencepiece, and returns its file.
std::filesystem::path train_elsewhere(const TemporaryFolder& scratch,
                                      const std::unordered_map<std::string, std::string>& options) {
  std::unordered_map<std::string, std::string> all{{"input", write_file(scratch / "text", training_text())},
                                                   {"model_prefix", scratch / "m"},
                                                   {"minloglevel", "2"},
                                                   {"model_type", "bpe"},
                                                   {"byte_fallback", "true"},
                                                   {"vocab_size", "300"},
                                                   {"normalization_rule_name", "identity"}};
  for (const auto& [name, value] : options) all[name] = value;
  const auto status = sentencepiece::SentencePieceTrainer::Train(all);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return scratch / "m.model";
}

/// Such models change the ends of a text, so a text must not be cut.
TEST(SentencePieceTokenizer, ModelsFromElsewhereGetLongTextsAsAWhole) {
  const TemporaryFolder scratch;
  std::string words = "the";
  while (words.size() < 70'000) words += " quality being Webster";
  for (const auto& options : std::vector<std::unordered_map<std::string, std::string>>{
           {{"remove_extra_whitespaces", "false"}},
           {},
           {{"add_dummy_prefix", "false"}},
           {{"treat_whitespace_as_suffix", "true"}, {"add_dummy_prefix", "false"}}}) {
    const auto tokenizer = load_tokenizer(train_elsewhere(scratch, options).string());
    for (const std::string& text : {words, std::string(70'000, 'x')}) {
      EXPECT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text) << text.substr(0, 10);
    }
  }
}

TEST(SentencePieceTokenizer, AModelThatChangesTextsIsWarnedOf) {
  const TemporaryFolder scratch;
  const auto log_of_model = [&](const std::string& rule, const std::string& removes_spaces) {
    const auto path =
        train_elsewhere(scratch, {{"normalization_rule_name", rule}, {"remove_extra_whitespaces", removes_spaces}});
    return log_of([&] {
      load_tokenizer(path.string());
      spdlog::default_logger()->flush();
    });
  };
  EXPECT_NE(log_of_model("nmt_nfkc", "false").find("changes texts: of \"a\\x0a  b\u2460\" it makes"),
            std::string::npos);
  EXPECT_NE(log_of_model("identity", "true").find("changes texts"), std::string::npos);
  EXPECT_EQ(log_of_model("identity", "false").find("changes texts"), std::string::npos);
}

TEST(SentencePieceTokenizer, TrainingIsDeterministic) {
  const std::string text = training_text();
  EXPECT_EQ(train(text, 400), small_model());
  EXPECT_EQ(train(text, 300, 40'000, 5), train(text, 300, 40'000, 5));
  EXPECT_NE(train(text, 300, 10'000, 5), train(text, 300, 10'000, 6));  // another seed takes another sample
}

TEST(SentencePieceTokenizer, TheSampleIsOfTheWholeText) {
  std::string text;
  for (const char* word : {"begin ", "middle ", "finish "}) {
    for (int i = 0; i < 20'000; ++i) text += word;
  }
  const TemporaryFolder scratch;
  const auto tokenizer =
      // Samples 10 of 100 pieces.
      load_tokenizer(write_file(scratch / "a.model", train(text, 284, 40'000, 1)).string());
  for (const char* word : {" begin", " middle", " finish"}) EXPECT_LE(tokenizer->encode(word).size(), 4u) << word;
}

TEST(SentencePieceTokenizer, TrainingErrors) {
  expect_error([] { train(training_text(), 259); }, {"259", "more than 259"});
  expect_error([] { train("tiny", 5000); },
               {"5000 pieces", "4 bytes", "at most", "smaller vocabulary", "give more text"});
  expect_error(
      [] { train(training_text(), 5000, 4'096); },
      {"5000 pieces", fmt::format("of the text's {}", training_text().size()), "larger sample", "--sample-bytes"});
  expect_error([] { train("", 300); }, {"no text"});
}

TEST(LoadTokenizer, FindsWhatIsNamed) {
  const TemporaryFolder scratch;
  write_file(scratch / "model/tokenizer.model", small_model());
  EXPECT_EQ(load_tokenizer("bytes")->kind(), "bytes");
  const auto tokenizer = load_tokenizer((scratch / "model").string());
  EXPECT_EQ(tokenizer->kind(), "sentencepiece");
  ASSERT_EQ(tokenizer->files().size(), 1u);
  EXPECT_EQ(tokenizer->files()[0].name, "tokenizer.model");
  EXPECT_EQ(tokenizer->files()[0].content, small_model());
  EXPECT_EQ(tokenizer->checksum(), small_tokenizer(scratch)->checksum());
  EXPECT_NE(tokenizer->checksum(), load_tokenizer("bytes")->checksum());
  EXPECT_EQ(load_tokenizer(make_dataset(scratch, 3, 1000).string())->kind(), "bytes");
}

// Existing datasets have these checksums, which cover the kind and then the files.
TEST(LoadTokenizer, ChecksumsStayAsTheyAre) {
  const TemporaryFolder scratch;
  const auto checksum_of = [](const std::string& text) { return checksum(std::as_bytes(std::span(text))); };
  EXPECT_EQ(load_tokenizer("bytes")->checksum(), checksum_of("bytes"));
  EXPECT_EQ(small_tokenizer(scratch)->checksum(), checksum_of("sentencepiece" + small_model()));
}

TEST(LoadTokenizer, Errors) {
  const TemporaryFolder scratch;
  expect_error([&] { load_tokenizer("byte"); }, {"'byte'", "expected 'bytes'", "no such file"});
  std::filesystem::create_directories(scratch / "empty");
  expect_error([&] { load_tokenizer((scratch / "empty").string()); }, {"empty", "tokenizer.model"});
  expect_error([&] { load_tokenizer(write_file(scratch / "a.model", "").string()); }, {"a.model", "empty file"});
  expect_error([&] { load_tokenizer(write_file(scratch / "b.model", "not a model").string()); },
               {"b.model", "not a SentencePiece model"});
  expect_error([&] { load_tokenizer(write_file(scratch / "c.model", small_model().substr(0, 1000)).string()); },
               {"c.model", "not a SentencePiece model"});
}

}  // namespace
}  // namespace tessera::data
