// Compares tokenizers of tokenizer.json with the `tokenizers` library, for the pre-tokenizers of DeepSeek-V3, Llama 3
// and GPT-2. tests/reference/make_tokenizer_goldens.py has stored the library's ids.
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>
#include <optional>

#include "base/text.h"
#include "data/tokenizers/hf_tokenizer.h"
#include "support.h"

namespace tessera::data {
namespace {

std::string unzipped(const std::string& name) {
  const std::string path = std::string(TESSERA_TEST_DATA) + "/golden/tokenizer/" + name;
  gzFile file = gzopen(path.c_str(), "rb");
  EXPECT_NE(file, nullptr) << path;
  std::string content;
  std::vector<char> part(1u << 16);
  for (int size; file != nullptr && (size = gzread(file, part.data(), static_cast<unsigned>(part.size()))) > 0;) {
    content.append(part.data(), static_cast<std::size_t>(size));
  }
  if (file != nullptr) gzclose(file);
  return content;
}

/// Reads a file of the format that make_tokenizer_goldens.py describes.
class GoldenReader {
 public:
  explicit GoldenReader(const std::string& name) : content_(unzipped(name)) {}

  bool done() const { return at_ == content_.size(); }
  std::string text() { return std::string(bytes(count())); }
  /// Returns the next ids, or none if they are the same as the ids before them.
  std::optional<std::vector<std::int32_t>> ids() {
    const std::uint32_t size = count();
    if (size == 0xFFFFFFFFu) return std::nullopt;
    std::vector<std::int32_t> result(size);
    for (std::int32_t& id : result) {
      std::uint16_t value;
      std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
      id = value;
    }
    return result;
  }

 private:
  std::uint32_t count() {
    std::uint32_t value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view bytes(std::size_t size) {
    TESSERA_CHECK(size <= content_.size() - at_, "the golden file ends early");
    at_ += size;
    return std::string_view(content_).substr(at_ - size, size);
  }

  std::string content_;
  std::size_t at_ = 0;
};

class TokenizerGolden : public ::testing::TestWithParam<const char*> {
 protected:
  std::string name() const { return GetParam(); }
  HfTokenizer tokenizer(const TemporaryFolder& scratch) const {
    return HfTokenizer(write_file(scratch / "tokenizer.json", unzipped(name() + ".json.gz")));
  }
};

TEST_P(TokenizerGolden, EncodesAsTheLibrary) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = this->tokenizer(scratch);
  GoldenReader strings("strings.gz");
  GoldenReader expected(name() + ".ids.gz");
  int num_strings = 0;
  int num_with_special = 0;
  int num_different = 0;
  for (; !strings.done(); ++num_strings) {
    const std::string text = strings.text();
    const std::vector<std::int32_t> with_special = expected.ids().value();
    const std::optional<std::vector<std::int32_t>> plain = expected.ids();
    num_with_special += plain.has_value();
    const bool equal = tokenizer.encode_with_special(text) == with_special;
    const bool plain_equal = tokenizer.encode(text) == plain.value_or(with_special);
    if ((!equal || !plain_equal) && ++num_different <= 5) {
      ADD_FAILURE() << "string " << num_strings << ": " << ::testing::PrintToString(text.substr(0, 300))
                    << "\n expected " << ::testing::PrintToString(with_special) << "\n got      "
                    << ::testing::PrintToString(tokenizer.encode_with_special(text)) << "\n plain    "
                    << ::testing::PrintToString(tokenizer.encode(text));
    }
  }
  EXPECT_TRUE(expected.done());
  EXPECT_EQ(num_different, 0);
  EXPECT_GE(num_strings, 10'000);
  EXPECT_GE(num_with_special, 100);
}

TEST_P(TokenizerGolden, DecodesAsTheLibrary) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = this->tokenizer(scratch);
  GoldenReader cases(name() + ".decode.gz");
  int num_cases = 0;
  int num_repaired = 0;
  for (; !cases.done(); ++num_cases) {
    const std::vector<std::int32_t> ids = cases.ids().value();
    const std::string expected = cases.text();
    std::string text = tokenizer.decode(ids);
    num_repaired += repair_utf8(text) > 0;
    ASSERT_EQ(text, expected) << ::testing::PrintToString(ids);
  }
  EXPECT_GE(num_cases, 1000);
  EXPECT_GE(num_repaired, 100);
}

// Decoding gives the whole text back. The only exceptions are tokens that were made to take the white space beside
// them.
TEST_P(TokenizerGolden, LosesNothing) {
  const TemporaryFolder scratch;
  const HfTokenizer tokenizer = this->tokenizer(scratch);
  GoldenReader strings("strings.gz");
  while (!strings.done()) {
    const std::string text = strings.text();
    if (text.find("<both>") != std::string::npos || text.find("<right>") != std::string::npos) continue;
    const std::vector<std::int32_t> ids = tokenizer.encode(text);
    ASSERT_EQ(tokenizer.decode(ids), text);
    for (const std::int32_t id : ids) {
      ASSERT_NE(id, tokenizer.bos_id());
      ASSERT_NE(id, tokenizer.eos_id());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, TokenizerGolden, ::testing::Values("deepseek_v3", "llama3", "gpt2"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tessera::data
