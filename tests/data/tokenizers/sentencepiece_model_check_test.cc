#include "data/tokenizers/sentencepiece_model_check.h"

#include <sentencepiece_trainer.h>

#include <cmath>
#include <limits>
#include <unordered_map>

#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "tests/data/support.h"

namespace tessera::data {
namespace {

// The functions below build a protobuf message, field by field.
std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}
std::string field(std::uint64_t number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string piece(const std::string& text, float score = -1.0f, std::uint64_t type = 1) {
  return field(1, field(1, text) + varint(2 << 3 | 5) + std::string(reinterpret_cast<const char*>(&score), 4) +
                      varint(3 << 3) + varint(type));
}

constexpr std::uint64_t kUserDefined = 4;

/// Returns the least that a model needs: unknown, BOS, EOS and some letters.
std::string base_model() {
  std::string model = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3);
  for (const char* text : {"a", "b", "c", "\xE2\x96\x81"}) model += piece(text);
  return model;
}

/// Returns a normalizer with a table of character rules.
std::string charsmap(const std::vector<std::uint32_t>& units, const std::string& texts) {
  const auto size = static_cast<std::uint32_t>(units.size() * sizeof(std::uint32_t));
  return field(3, field(2, std::string(reinterpret_cast<const char*>(&size), sizeof size) +
                               std::string(reinterpret_cast<const char*>(units.data()), size) + texts));
}

std::uint32_t unit(std::uint32_t label, std::uint32_t offset, bool has_value = false) {
  return label | offset << 10 | (has_value ? 1u << 8 : 0u);
}
std::uint32_t value(std::uint32_t number) { return number | 1u << 31; }

/// Returns a chain of `length` letters 'a', each with the value `last`. It gives as many matches as it has letters.
std::vector<std::uint32_t> chain(std::uint32_t length, std::uint32_t last) {
  std::vector<std::uint32_t> units(256 * (length + 2));
  for (std::uint32_t i = 0; i < units.size(); ++i) units[i] = unit(~i & 0xff, 0);  // no byte reaches these units
  std::uint32_t node = 0;
  for (std::uint32_t i = 1; i <= length + 1; ++i) {
    const std::uint32_t base = 256 * i;
    units[node] = unit(node == 0 ? 0 : 'a', node ^ base, node != 0);
    if (node != 0) units[base] = value(last);
    node = base ^ 'a';
  }
  return units;
}

void expect_refused(const std::string& model, const std::string& part) {
  const TemporaryFolder scratch;
  const auto path = write_file(scratch / "x.model", model);
  expect_error([&] { SentencePieceTokenizer tokenizer(path); }, {path.string(), part});
}

std::vector<std::int32_t> encode(const std::string& model, const std::string& text) {
  const TemporaryFolder scratch;
  return SentencePieceTokenizer(write_file(scratch / "x.model", model)).encode(text);
}

TEST(SentencePieceModelCheck, WellFormedModelsPass) {
  EXPECT_EQ(encode(base_model(), "ab"), (std::vector<std::int32_t>{6, 3, 4}));
  // This rule replaces "a" by "c".
  EXPECT_EQ(encode(base_model() + charsmap(chain(1, 0), std::string("c\0", 2)), "ab"),
            (std::vector<std::int32_t>{6, 5, 4}));
  EXPECT_FALSE(encode(base_model() + charsmap(chain(32, 0), std::string("c\0", 2)), std::string(100, 'a')).empty());
}

TEST(SentencePieceModelCheck, TheLibrarysOwnRulesPass) {
  const TemporaryFolder scratch;
  write_file(scratch / "text", "the quality of being amicable, of naming names\n");
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      std::unordered_map<std::string, std::string>{{"input", scratch / "text"},
                                                   {"model_prefix", scratch / "m"},
                                                   {"minloglevel", "2"},
                                                   {"hard_vocab_limit", "false"},
                                                   {"vocab_size", "40"},
                                                   {"normalization_rule_name", "nmt_nfkc_cf"}});
  ASSERT_TRUE(status.ok()) << status.ToString();
  const std::string model = read_text_file(scratch / "m.model");
  ASSERT_GT(model.size(), 100'000u);
  EXPECT_NO_THROW(check_sentencepiece_model(model, "m.model"));
  EXPECT_EQ(encode(model, "THE \xEF\xBC\xA1"), encode(model, "the a"));
}

TEST(SentencePieceModelCheck, CharacterRulesThatLeadOut) {
  const std::string part = "precompiled_charsmap";
  const std::string text("c\0", 2);
  const std::string base = base_model();
  EXPECT_NO_THROW(encode(base + charsmap(chain(1, 1), text), "ab"));             // at the NUL: an empty text
  expect_refused(base + charsmap(chain(1, 2), text), part);                      // behind the texts
  expect_refused(base + charsmap(chain(1, 0), "c"), part);                       // no NUL
  expect_refused(base + charsmap(chain(33, 0), text), part);                     // more matches than the library holds
  expect_refused(base + charsmap({}, text), part);                               // no root
  expect_refused(base + charsmap(std::vector<std::uint32_t>(255), text), part);  // a byte without its unit
  std::vector<std::uint32_t> units(256);
  units[0] = unit(0, 1u << 20);
  expect_refused(base + charsmap(units, text), part);  // the first step leads out
  units = chain(1, 0);
  units[256 ^ 'a'] = unit('a', 'a', true);  // the chain goes on from 256 again
  expect_refused(base + charsmap(units, text), part);
  for (const std::uint32_t size : {1u, 5u, 6u, 7u, 8u, ~0u}) {
    const std::string bytes = std::string(reinterpret_cast<const char*>(&size), sizeof size) + std::string(3, '\0');
    expect_refused(base + field(3, field(2, bytes)), part);
    expect_refused(base + field(5, field(2, bytes)), part);  // the table of the denormalizer
  }
}

TEST(SentencePieceModelCheck, PiecesThatTheTriesCannotHold) {
  const std::string base = base_model();
  expect_refused(base + piece(std::string("\0x", 2)), "piece 7 has 2 bytes");
  expect_refused(base + piece(std::string("x\0", 2), 0, kUserDefined), "piece 7 has 2 bytes");
  expect_refused(base + piece(""), "piece 7 has 0 bytes");
  expect_refused(base + piece(std::string(8001, 'x')), "piece 7 has 8001 bytes");
  expect_refused(base + piece("x", std::nanf("")), "piece 7 has the score nan");
  expect_refused(base + piece("x", std::numeric_limits<float>::infinity()), "piece 7 has the score inf");
}

TEST(SentencePieceModelCheck, NestedUserDefinedPieces) {
  std::string model = base_model();
  for (std::size_t length = 2; length <= 65; ++length) model += piece(std::string(length, 'x'), 0, kUserDefined);
  model += piece("y", 0, kUserDefined);
  EXPECT_EQ(encode(model, std::string(200, 'x')).size(), 5u);  // the prefix, 65 letters three times, and 5 letters
  expect_refused(model + piece(std::string(66, 'x'), 0, kUserDefined), "more than 64 user-defined pieces");
}

// The check must read a model in the same way as protobuf.
TEST(SentencePieceModelCheck, TypesAndTagsThatProtobufReadsOtherwise) {
  const auto nested = [](std::uint64_t last_type, const std::string& more) {
    std::string model = base_model();
    for (std::size_t length = 2; length <= 66; ++length) {
      model += field(1, field(1, std::string(length, 'x')) + varint(3 << 3) + varint(last_type) + more);
    }
    return model;
  };
  // First the type occurs once more, with an invalid value. Then it has bits beyond 32.
  expect_refused(nested(kUserDefined, varint(3 << 3) + varint(99)), "more than 64 user-defined pieces");
  expect_refused(nested(kUserDefined + (std::uint64_t{1} << 32), ""), "more than 64 user-defined pieces");
  // The tag of field 1 has bits above the 32 that protobuf keeps.
  const std::string body = field(1, std::string("x\0", 2));
  expect_refused(base_model() + varint((std::uint64_t{1} << 32) + (1 << 3 | 2)) + varint(body.size()) + body,
                 "no protobuf message");
}

TEST(SentencePieceModelCheck, BytesThatAreNoMessage) {
  const std::string base = base_model();
  for (std::size_t length = 1; length < base.size(); ++length) {
    const TemporaryFolder scratch;
    const auto path = write_file(scratch / "x.model", base.substr(0, length));
    try {
      SentencePieceTokenizer tokenizer(path);  // succeeds if the cut is between two pieces
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos);
    }
  }
  expect_refused("\x0B\x0C", "not a SentencePiece model");               // a group of protobuf
  expect_refused(std::string(11, '\xFF'), "not a SentencePiece model");  // a number of more than 64 bits
}

}  // namespace
}  // namespace tessera::data
