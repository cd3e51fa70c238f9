#include "data/tokenizers/hf_tokenizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "system/stop.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 4> kBosNames{"<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>", "<|begin_of_text|>",
                                                    "<s>", "<|endoftext|>"};
constexpr std::array<std::string_view, 4> kEosNames{"<\uFF5Cend\u2581of\u2581sentence\uFF5C>", "<|end_of_text|>",
                                                    "</s>", "<|endoftext|>"};

std::vector<std::int32_t> special_ids(const TokenizerJson& json) {
  std::vector<std::int32_t> ids;
  for (const AddedToken& token : json.added_tokens) {
    if (token.special) ids.push_back(token.id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

/// Names some of the bytes that a vocabulary lacks. Those that most texts have come first.
std::string describe_missing(std::vector<std::uint8_t> bytes) {
  const auto rarity = [](std::uint8_t byte) {
    if (byte == ' ') return 0;
    if (byte == '\n') return 1;
    return byte < 0x80 && std::isalnum(byte) != 0 ? 2 : 3;
  };
  std::ranges::stable_sort(bytes, {}, rarity);
  constexpr std::size_t kShown = 5;
  std::vector<std::string> names;
  for (const std::uint8_t byte : std::span(bytes).first(std::min(kShown, bytes.size()))) {
    const std::string code = fmt::format("0x{:02X} (\"{}\" in the file)", byte, byte_level_text(byte));
    names.push_back(byte == ' ' ? "the space, " + code : byte == '\n' ? "the line feed, " + code : code);
  }
  return fmt::format("{}{}", fmt::join(names, "; "), bytes.size() > kShown ? "; ..." : "");
}

/// Adds the BOS and EOS that a tokenizer_config.json names as special tokens. As in transformers, names that are not in
/// the vocabulary yet get the next ids. Throws Error if transformers gives another id, because it numbers the new
/// tokens of added_tokens_decoder first.
void add_named_tokens(const TokenizerConfigJson& config, const fs::path& path, TokenizerJson& json) {
  std::unordered_map<std::string, std::int32_t> ids;  // as in transformers
  auto next_id = static_cast<std::int32_t>(json.model.vocab.size());
  for (const auto& [token, id] : json.model.vocab) ids.emplace(token, id);
  for (const AddedToken& token : json.added_tokens) {
    ids.emplace(token.content, token.id);
    next_id = std::max(next_id, token.id + 1);
  }
  std::vector<std::string> new_tokens;
  for (const auto& [id, token] : config.added_tokens) new_tokens.push_back(token);
  for (const std::string& token : {config.bos_token, config.eos_token}) new_tokens.push_back(token);
  for (const std::string& token : new_tokens) {
    if (!token.empty() && ids.emplace(token, next_id).second) ++next_id;
  }
  for (const std::string& name : {config.bos_token, config.eos_token}) {
    const auto is_it = [&](const AddedToken& token) { return token.content == name; };
    if (name.empty() || std::any_of(json.added_tokens.begin(), json.added_tokens.end(), is_it)) continue;
    const auto known = std::find_if(json.model.vocab.begin(), json.model.vocab.end(),
                                    [&](const auto& entry) { return entry.first == name; });
    const std::int32_t id = known != json.model.vocab.end() ? known->second : json.vocab_size++;
    require(id == ids.at(name),
            "'{}': transformers gives the token {} id {}, and Tessera gives it id {}: add the new tokens of "
            "added_tokens_decoder to added_tokens of {}",
            path.string(), quote_text(name), ids.at(name), id, kTokenizerJsonName);
    json.added_tokens.push_back({.id = id, .content = name, .special = true});
  }
}

}  // namespace

/// A tokenizer's files and their content.
struct HfTokenizer::Source {
  fs::path path;
  std::string file;
  std::optional<std::string> config_file;
  TokenizerJson json;
  TokenizerConfigJson config;

  explicit Source(const fs::path& tokenizer_path)
      : path(tokenizer_path), file(read_text_file(path)), json(parse_tokenizer_json(file, path)) {
    std::error_code unreadable;
    if (!fs::exists(config_path(), unreadable)) return;
    config_file = read_text_file(config_path());
    config = parse_tokenizer_config_json(*config_file, config_path());
    add_named_tokens(config, config_path(), json);
  }
  fs::path config_path() const { return path.parent_path() / kTokenizerConfigName; }
};

struct HfTokenizer::Scratch {
  RegexScratch regex;
  BpeScratch bpe;
  std::vector<TextPart> parts;
};

/// Borrows a Scratch from the pool for the time of one call.
class HfTokenizer::BorrowedScratch {
 public:
  explicit BorrowedScratch(const HfTokenizer& owner) : owner_(owner) {
    {
      const std::lock_guard lock(owner_.mutex_);
      if (!owner_.free_scratch_.empty()) {
        scratch_ = std::move(owner_.free_scratch_.back());
        owner_.free_scratch_.pop_back();
      }
    }
    if (scratch_ == nullptr) scratch_ = std::make_unique<Scratch>();
  }
  ~BorrowedScratch() {
    const std::lock_guard lock(owner_.mutex_);
    owner_.free_scratch_.push_back(std::move(scratch_));
  }
  BorrowedScratch(const BorrowedScratch&) = delete;
  BorrowedScratch& operator=(const BorrowedScratch&) = delete;

  Scratch& operator*() const { return *scratch_; }

 private:
  const HfTokenizer& owner_;
  std::unique_ptr<Scratch> scratch_;
};

HfTokenizer::HfTokenizer(const fs::path& path) : HfTokenizer(Source(path)) {}

HfTokenizer::HfTokenizer(Source&& source)
    : file_(std::move(source.file)),
      config_file_(std::move(source.config_file)),
      added_tokens_(source.json.added_tokens),
      pre_tokenizer_(source.json.pre_tokenizer),
      bpe_(source.json.model, special_ids(source.json)) {
  const TokenizerJson& json = source.json;
  if (const auto& missing = bpe_.missing_bytes(); !missing.empty()) {
    spdlog::warn(
        "tokenizer '{}' has no token for {} of the 256 bytes: {}. They are dropped from texts, as the library does",
        source.path.string(), missing.size(), describe_missing(missing));
  }
  // Collects the bytes of each token, in the order of ids.
  const auto vocab_size = static_cast<std::size_t>(json.vocab_size);
  std::vector<const std::string*> model_tokens(vocab_size);
  std::vector<const AddedToken*> added(vocab_size);
  for (const auto& [token, id] : json.model.vocab) model_tokens[static_cast<std::size_t>(id)] = &token;
  for (const AddedToken& token : json.added_tokens) added[static_cast<std::size_t>(token.id)] = &token;
  has_token_.resize(vocab_size);
  token_begin_.reserve(vocab_size + 1);
  std::string bytes;
  for (std::size_t id = 0; id < vocab_size; ++id) {
    token_begin_.push_back(token_bytes_.size());
    has_token_[id] = added[id] != nullptr || model_tokens[id] != nullptr;
    if (added[id] != nullptr) {
      // Some special tokens also result from plain text, such as a padding token "!". Decoding turns them back into
      // text.
      const bool is_text = !added[id]->special || bpe_.can_give(static_cast<std::int32_t>(id));
      if (is_text) token_bytes_ += added[id]->content;
    } else if (model_tokens[id] != nullptr) {
      byte_level_bytes(*model_tokens[id], bytes);
      token_bytes_ += bytes;
    }
    if (json.model.ignore_merges && added[id] != nullptr && added[id]->special && model_tokens[id] != nullptr &&
        byte_level_bytes(*model_tokens[id], bytes)) {
      special_words_.emplace(bytes, static_cast<std::int32_t>(id));
    }
  }
  token_begin_.push_back(token_bytes_.size());

  choose_bos_and_eos(source);
}

HfTokenizer::~HfTokenizer() = default;

void HfTokenizer::choose_bos_and_eos(const Source& source) {
  const fs::path& path = source.path;
  const TokenizerJson& json = source.json;
  const TokenizerConfigJson& config = source.config;
  std::unordered_map<std::string_view, std::int32_t> ids;
  for (const auto& [token, id] : json.model.vocab) ids.emplace(token, id);
  for (const AddedToken& token : json.added_tokens) ids.emplace(token.content, token.id);
  const auto id_of = [&](const std::string& token, const std::string& place) {
    const auto found = ids.find(token);
    require(found != ids.end(), "{} is \"{}\", but tokenizer '{}' has no such token", place, token, path.string());
    return found->second;
  };
  const auto well_known = [&](std::span<const std::string_view> names) {
    for (const std::string_view name : names) {
      if (const auto found = ids.find(name); found != ids.end()) return found->second;
    }
    return -1;
  };

  const std::string post_processor =
      fmt::format("tokenizer '{}', $.post_processor: the template's token", path.string());
  if (!config.eos_token.empty()) {
    eos_id_ = id_of(config.eos_token, fmt::format("'{}': eos_token", source.config_path().string()));
  } else if (!json.template_eos.empty()) {
    eos_id_ = id_of(json.template_eos, post_processor);
  } else {
    eos_id_ = well_known(kEosNames);
  }
  if (!config.bos_token.empty()) {
    bos_id_ = id_of(config.bos_token, fmt::format("'{}': bos_token", source.config_path().string()));
  } else if (config.names_bos) {  // null: the model has no BOS
    bos_id_ = eos_id_;
  } else if (!json.template_bos.empty()) {
    bos_id_ = id_of(json.template_bos, post_processor);
  } else {
    bos_id_ = well_known(kBosNames);
  }
  require(bos_id_ >= 0 && eos_id_ >= 0,
          "tokenizer '{}': which token is {}? Put a {} beside it with {{\"bos_token\": \"...\", \"eos_token\": "
          "\"...\"}}",
          path.string(), eos_id_ < 0 ? "EOS" : "BOS", kTokenizerConfigName);
  for (const auto& [name, id] : {std::pair("BOS", bos_id_), std::pair("EOS", eos_id_)}) {
    const auto is_this = [wanted = id](const AddedToken& token) { return token.id == wanted; };
    const auto added = std::find_if(json.added_tokens.begin(), json.added_tokens.end(), is_this);
    const bool is_found_in_text = added != json.added_tokens.end() && !added->special;
    require(
        !is_found_in_text,
        "tokenizer '{}': {} is id {}, an added token that is looked for in texts: expected one with \"special\": true",
        path.string(), name, id);
    require(!bpe_.can_give(id),
            "tokenizer '{}': {} is id {}, which the model also gives for a text: it is a byte's token, a word or the "
            "result of merges, so \"special\" does not keep it apart. Name another token in {}, or take the merges of "
            "this one out of the file",
            path.string(), name, id, kTokenizerConfigName);
  }
}

std::vector<TokenizerFile> HfTokenizer::files() const {
  std::vector<TokenizerFile> files{{.name = kTokenizerJsonName, .content = file_}};
  if (config_file_) files.push_back({.name = kTokenizerConfigName, .content = *config_file_});
  return files;
}

std::vector<std::int32_t> HfTokenizer::encode_text(std::string_view text, bool special_is_text) const {
  std::string repaired;
  if (!is_utf8(text)) {
    repaired = text;
    repair_utf8(repaired);
    text = repaired;
  }
  const BorrowedScratch borrowed(*this);
  Scratch& scratch = *borrowed;
  added_tokens_.split(text, special_is_text, scratch.regex, scratch.parts);
  std::vector<std::int32_t> ids;
  ids.reserve(text.size() / 3);
  for (const TextPart& part : scratch.parts) {
    if (part.id >= 0) {
      ids.push_back(part.id);
      continue;
    }
    pre_tokenizer_.split(part.text, scratch.regex, [&](std::string_view word) {
      throw_if_stopped();  // a document may be a whole library
      if (!special_is_text && !special_words_.empty()) {
        if (const auto found = special_words_.find(std::string(word)); found != special_words_.end()) {
          ids.push_back(found->second);
          return;
        }
      }
      bpe_.encode_word(word, scratch.bpe, ids);
    });
  }
  return ids;
}

std::vector<std::int32_t> HfTokenizer::encode(std::string_view text) const {
  return encode_text(text, /*special_is_text=*/true);
}

std::vector<std::int32_t> HfTokenizer::encode_with_special(std::string_view text) const {
  return encode_text(text, /*special_is_text=*/false);
}

std::string HfTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) {
    require(id >= 0 && id < vocab_size(), "token id {} is outside the tokenizer's vocabulary [0, {})", id,
            vocab_size());
    const auto at = static_cast<std::size_t>(id);
    require(has_token_[at], "token id {}: the tokenizer has no token of this id", id);
    if (id == bos_id_ || id == eos_id_) continue;  // the file may not mark them as special
    text.append(token_bytes_, token_begin_[at], token_begin_[at + 1] - token_begin_[at]);
  }
  return text;
}

}  // namespace tessera::data
