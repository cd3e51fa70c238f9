#include "data/tokenizers/tokenizer_json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "base/json.h"
#include "base/parse_number.h"
#include "base/text.h"
#include "data/tokenizers/bpe.h"

namespace tessera::data {
namespace {

using nlohmann::json;

/// Limits the depth of recursion: each split runs within a call of the one before.
constexpr std::size_t kMaxSplits = 64;

/// At every position of a text, the search for added tokens reads up to this many bytes.
constexpr std::size_t kMaxAddedTokenBytes = 1024;

using TokenizerFields = JsonFields<json>;

std::string text_or(const TokenizerFields& fields, const char* name, const char* missing) {
  return fields.find(name) == nullptr ? missing : fields.text(name);
}
bool flag_or(const TokenizerFields& fields, const char* name, bool missing) {
  return fields.find(name) == nullptr ? missing : fields.flag(name);
}

// A file has 100,000 tokens and merges. So their places are functions, which are called only when something is wrong.

/// Parses an id. A token takes some bytes of the file, and ids leave few gaps, so an id beyond the file's size is an
/// Error. Tables by id are then no larger than the file justifies.
template <typename Place>
std::int32_t parse_id(const json& value, std::size_t file_bytes, Place&& place) {
  if (!value.is_number_unsigned()) fail("{}: expected an id, got {}", place(), describe_json(value));
  const auto id = value.get<std::uint64_t>();
  const auto limit = std::min<std::uint64_t>(file_bytes, std::numeric_limits<std::int32_t>::max());
  if (id >= limit) fail("{}: id {} is too large for a file of {} bytes", place(), id, file_bytes);
  return static_cast<std::int32_t>(id);
}

using Ids = std::unordered_map<std::string_view, std::int32_t>;

/// Parses [a, b], or "a b" as in files before 2024.
template <typename Place>
std::pair<std::string_view, std::string_view> parse_pair(const json& merge, Place&& place) {
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
      fail("{}: expected two tokens with a space between, got {}", place(), quote_text(text));
    }
    return {text.substr(0, space), text.substr(space + 1)};
  }
  if (!merge.is_array() || merge.size() != 2 || !merge[0].is_string() || !merge[1].is_string()) {
    fail("{}: expected a pair of tokens, got {}", place(), describe_json(merge));
  }
  return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
}

BpeSpec parse_model(const TokenizerFields& fields, std::size_t file_bytes) {
  // The first files of this kind do not name the model's type.
  const std::string type = text_or(fields, "type", "BPE");
  require(type == "BPE", "{}: only BPE is supported, got {}", fields.place_of("type"), quote_text(type));
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    require(text_or(fields, name, "").empty(), "{}: not supported, expected null or \"\", got {}",
            fields.place_of(name), quote_text(text_or(fields, name, "")));
  }
  require(!flag_or(fields, "byte_fallback", false), "{}: not supported, expected false",
          fields.place_of("byte_fallback"));
  if (const json* dropout = fields.find("dropout")) {
    require(dropout->is_number() && dropout->get<double>() == 0, "{}: not supported, expected null or 0, got {}",
            fields.place_of("dropout"), describe_json(*dropout));
  }
  BpeSpec spec;
  spec.ignore_merges = flag_or(fields, "ignore_merges", false);

  const json& vocab = fields.at("vocab");
  require(vocab.is_object(), "{}: expected an object, got {}", fields.place_of("vocab"), describe_json(vocab));
  Ids ids;
  for (const auto& [token, id] : vocab.get_ref<const json::object_t&>()) {
    const auto place = [&, &name = token] {
      return fmt::format("{}, token {}", fields.place_of("vocab"), quote_text(name));
    };
    if (token.empty()) fail("{}: a token without text", place());
    spec.vocab.emplace_back(token, parse_id(id, file_bytes, place));
    ids.emplace(token, spec.vocab.back().second);
  }
  for (std::size_t byte = 0; byte < 256 && fields.find("unk_token") != nullptr; ++byte) {
    const std::string name = byte_level_text(static_cast<std::uint8_t>(byte));
    require(ids.contains(name), "{}: not supported for a vocabulary without the byte 0x{:02X} ({}), expected null",
            fields.place_of("unk_token"), byte, quote_text(name));
  }
  std::sort(spec.vocab.begin(), spec.vocab.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  for (std::size_t i = 1; i < spec.vocab.size(); ++i) {
    const auto& [token, id] = spec.vocab[i];
    const auto& [other, other_id] = spec.vocab[i - 1];
    if (id == other_id) {
      fail("{}: tokens {} and {} have the same id {}", fields.place_of("vocab"), quote_text(other), quote_text(token),
           id);
    }
  }

  const json& merges = fields.array("merges");
  std::unordered_set<std::uint64_t> pairs;
  std::string joined;
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto place = [&] { return fmt::format("{}[{}]", fields.place_of("merges"), i); };
    const auto id_of = [&](std::string_view token) {
      const auto found = ids.find(token);
      if (found == ids.end()) fail("{}: {} is not in the vocabulary", place(), quote_text(token));
      return found->second;
    };
    const auto [left, right] = parse_pair(merges[i], place);
    joined.assign(left).append(right);
    const std::pair pair(id_of(left), id_of(right));
    const auto key = static_cast<std::uint64_t>(pair.first) << 32 | static_cast<std::uint32_t>(pair.second);
    if (!pairs.insert(key).second) fail("{}: {} and {} are merged twice", place(), quote_text(left), quote_text(right));
    spec.merges.push_back(pair);
    spec.merged.push_back(id_of(joined));
  }
  return spec;
}

std::vector<AddedToken> parse_added_tokens(const TokenizerFields& root, const BpeSpec& model, std::size_t file_bytes) {
  std::vector<AddedToken> tokens;
  if (root.find("added_tokens") == nullptr) return tokens;
  const json& array = root.array("added_tokens");
  Ids vocab;
  for (const auto& [token, id] : model.vocab) vocab.emplace(token, id);
  const auto token_of = [&](std::int32_t id) -> const std::string* {
    const auto found = std::lower_bound(model.vocab.begin(), model.vocab.end(), id,
                                        [](const auto& entry, std::int32_t value) { return entry.second < value; });
    return found != model.vocab.end() && found->second == id ? &found->first : nullptr;
  };
  std::unordered_set<std::string> contents;
  auto next_id = static_cast<std::int32_t>(model.vocab.size());  // as the library counts them
  for (std::size_t i = 0; i < array.size(); ++i) {
    const TokenizerFields fields(array[i], fmt::format("{}[{}]", root.place_of("added_tokens"), i));
    AddedToken& token = tokens.emplace_back();
    token.content = fields.text("content");
    token.id = parse_id(fields.at("id"), file_bytes, [&] { return fields.place_of("id"); });
    token.single_word = flag_or(fields, "single_word", false);
    token.lstrip = flag_or(fields, "lstrip", false);
    token.rstrip = flag_or(fields, "rstrip", false);
    token.special = flag_or(fields, "special", false);
    token.normalized = flag_or(fields, "normalized", !token.special);
    require(!token.content.empty(), "{}: a token without text", fields.place_of("content"));
    require(token.content.size() <= kMaxAddedTokenBytes, "{}: a token of {} bytes, expected at most {}",
            fields.place_of("content"), token.content.size(), kMaxAddedTokenBytes);
    require(contents.insert(token.content).second, "{}: {} is there twice", fields.place_of("content"),
            quote_text(token.content));
    const auto in_vocab = vocab.find(token.content);
    require(in_vocab == vocab.end() || in_vocab->second == token.id,
            "{}: {} has id {} here and id {} in the model's vocabulary", fields.place(), quote_text(token.content),
            token.id, in_vocab == vocab.end() ? 0 : in_vocab->second);
    const std::string* const owner = token_of(token.id);
    require(owner == nullptr || *owner == token.content, "{}: {} and the model's token {} have the same id {}",
            fields.place(), quote_text(token.content), owner == nullptr ? std::string() : quote_text(*owner), token.id);
    require(in_vocab != vocab.end() || token.id == next_id,
            "{} is {}, and the `tokenizers` library gives {} id {}: it gives the next free id to each added token that "
            "is not in the model's vocabulary",
            fields.place_of("id"), token.id, quote_text(token.content), next_id);
    next_id = std::max(next_id, token.id + 1);
  }
  return tokens;
}

void require_no_normalizer(const TokenizerFields& root) {
  const json* normalizer = root.find("normalizer");
  if (normalizer == nullptr) return;
  const TokenizerFields fields(*normalizer, root.place_of("normalizer"));
  const std::string& type = fields.text("type");
  require(type == "Sequence", "{}: {} is not supported, expected null: Tessera does not change text", fields.place(),
          quote_text(type));
  const json& sequence = fields.array("normalizers");
  if (sequence.empty()) return;
  const TokenizerFields first(sequence[0], fields.place_of("normalizers") + "[0]");
  fail("{}: {} is not supported, expected no normalizer: Tessera does not change text", first.place(),
       quote_text(first.text("type")));
}

SplitBehavior parse_behavior(const TokenizerFields& fields) {
  const std::string& name = fields.text("behavior");
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  fail("{}: expected Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous, got {}",
       fields.place_of("behavior"), quote_text(name));
}

SplitSpec parse_split(const TokenizerFields& fields) {
  SplitSpec split;
  split.place = fields.place();
  split.behavior = parse_behavior(fields);
  split.invert = flag_or(fields, "invert", false);
  const TokenizerFields pattern(fields.at("pattern"), fields.place_of("pattern"));
  split.is_regex = pattern.find("Regex") != nullptr;
  require(split.is_regex != (pattern.find("String") != nullptr), "{}: expected a \"Regex\" or a \"String\"",
          pattern.place());
  split.pattern = pattern.text(split.is_regex ? "Regex" : "String");
  require(!split.pattern.empty(), "{}: an empty pattern", pattern.place());
  return split;
}

/// Adds what `fields` says to `spec`. `ended` becomes true at ByteLevel, after which nothing may follow.
void parse_pre_tokenizer(const TokenizerFields& fields, PreTokenizerSpec& spec, bool& ended) {
  const std::string& type = fields.text("type");
  if (type == "Sequence") {
    const json& sequence = fields.array("pretokenizers");
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      parse_pre_tokenizer(TokenizerFields(sequence[i], fmt::format("{}[{}]", fields.place_of("pretokenizers"), i)),
                          spec, ended);
    }
    return;
  }
  require(spec.splits.size() < kMaxSplits, "{}: more than {} pre-tokenizers", fields.place(), kMaxSplits);
  require(!ended, "{}: {} after ByteLevel is not supported", fields.place(), quote_text(type));
  if (type == "Split") {
    spec.splits.push_back(parse_split(fields));
  } else if (type == "Digits") {
    SplitSpec& split = spec.splits.emplace_back();
    split.place = fields.place();
    split.pattern = "\\p{N}";
    const bool individual = flag_or(fields, "individual_digits", false);
    split.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  } else if (type == "ByteLevel") {
    spec.add_prefix_space = flag_or(fields, "add_prefix_space", true);
    spec.byte_level_regex = flag_or(fields, "use_regex", true);
    ended = true;
  } else {
    fail("{}: {} is not supported, expected Split, Digits, ByteLevel or a Sequence of them", fields.place(),
         quote_text(type));
  }
}

/// Finds BOS and EOS in TemplateProcessing: the tokens before and after the text.
void parse_post_processor(const TokenizerFields& fields, TokenizerJson& result) {
  const std::string& type = fields.text("type");
  if (type == "Sequence") {
    const json& sequence = fields.array("processors");
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      parse_post_processor(TokenizerFields(sequence[i], fmt::format("{}[{}]", fields.place_of("processors"), i)),
                           result);
    }
  } else if (type == "TemplateProcessing") {
    const json& pieces = fields.array("single");
    bool text_was_there = false;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const TokenizerFields piece(pieces[i], fmt::format("{}[{}]", fields.place_of("single"), i));
      if (const json* special = piece.find("SpecialToken")) {
        const std::string& token = TokenizerFields(*special, piece.place_of("SpecialToken")).text("id");
        if (text_was_there) result.template_eos = token;
        if (!text_was_there && result.template_bos.empty()) result.template_bos = token;
      } else {
        text_was_there = true;
      }
    }
  }
  // Other processors say where a token's text begins and ends, which is not used here.
}

/// Parses "token" or {"content": "token", ...}.
std::string parse_named_token(const TokenizerFields& fields, const char* name) {
  const json* field = fields.find(name);
  if (field == nullptr) return {};
  return field->is_object() ? TokenizerFields(*field, fields.place_of(name)).text("content") : fields.text(name);
}

}  // namespace

TokenizerJson parse_tokenizer_json(std::string_view content, const std::filesystem::path& path) {
  const std::string place = fmt::format("tokenizer '{}'", path.string());
  const json file = parse_json(content, place);
  require(file.is_object(), "{}: expected an object, got {}", place, describe_json(file));
  const TokenizerFields root(file, place + ", $");
  TokenizerJson result;
  result.model = parse_model(TokenizerFields(root.at("model"), root.place_of("model")), content.size());
  result.added_tokens = parse_added_tokens(root, result.model, content.size());
  require_no_normalizer(root);
  bool ended = false;
  parse_pre_tokenizer(TokenizerFields(root.at("pre_tokenizer"), root.place_of("pre_tokenizer")), result.pre_tokenizer,
                      ended);
  require(ended, "{}: only byte-level BPE is supported, but there is no ByteLevel", root.place_of("pre_tokenizer"));
  const TokenizerFields decoder(root.at("decoder"), root.place_of("decoder"));
  require(decoder.text("type") == "ByteLevel", "{}: {} is not supported, expected ByteLevel", decoder.place(),
          quote_text(decoder.text("type")));
  if (const json* processor = root.find("post_processor")) {
    parse_post_processor(TokenizerFields(*processor, root.place_of("post_processor")), result);
  }
  if (!result.model.vocab.empty()) result.vocab_size = result.model.vocab.back().second + 1;
  for (const AddedToken& token : result.added_tokens) result.vocab_size = std::max(result.vocab_size, token.id + 1);
  return result;
}

TokenizerConfigJson parse_tokenizer_config_json(std::string_view content, const std::filesystem::path& path) {
  const std::string place = fmt::format("tokenizer '{}'", path.string());
  const json file = parse_json(content, place);
  require(file.is_object(), "{}: expected an object, got {}", place, describe_json(file));
  const TokenizerFields root(file, place + ", $");
  TokenizerConfigJson config{.names_bos = file.contains("bos_token"),
                             .bos_token = parse_named_token(root, "bos_token"),
                             .eos_token = parse_named_token(root, "eos_token"),
                             .added_tokens = {}};
  if (const json* decoder = root.find("added_tokens_decoder")) {
    const std::string decoder_place = root.place_of("added_tokens_decoder");
    require(decoder->is_object(), "{}: expected an object, got {}", decoder_place, describe_json(*decoder));
    for (const auto& [name, token] : decoder->get_ref<const json::object_t&>()) {
      const auto id = parse_number<std::uint64_t>(name);
      require(id.has_value(), "{}: expected ids as names, got {}", decoder_place, quote_text(name));
      config.added_tokens.emplace(*id,
                                  TokenizerFields(token, fmt::format("{}.{}", decoder_place, *id)).text("content"));
    }
  }
  return config;
}

}  // namespace tessera::data
