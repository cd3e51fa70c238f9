#include "data/tokenizers/pre_tokenizer.h"

namespace tessera::data {
namespace {

/// The pattern of ByteLevel, which is GPT-2's.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

PreTokenizer::PreTokenizer(const PreTokenizerSpec& spec) : add_prefix_space_(spec.add_prefix_space) {
  for (const SplitSpec& split : spec.splits) {
    stages_.push_back(
        {.regex = split.is_regex ? Regex(split.pattern, split.place) : Regex::literal(split.pattern, split.place),
         .behavior = split.behavior,
         .invert = split.invert});
  }
  prefix_stage_ = stages_.size();
  if (spec.byte_level_regex) {
    stages_.push_back(
        {.regex = Regex(kByteLevelPattern, "ByteLevel"), .behavior = SplitBehavior::kIsolated, .invert = false});
  }
}

}  // namespace tessera::data
