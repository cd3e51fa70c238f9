// Byte-level byte-pair encoding (Sennrich et al., ACL 2016; Radford et al., 2019). At first each byte of a word is a
// token. As long as two neighbours can be merged, the pair whose merge was learned first is merged. Of equal pairs,
// that is the leftmost.
//
// In the file, tokens are texts in which each character stands for a byte. The printable characters of Latin-1 stand
// for themselves, and characters from U+0100 on for the other bytes. In memory tokens are bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "data/tokenizers/tokenizer_json.h"

namespace tessera::data {

/// Returns the text that stands for `byte`.
std::string byte_level_text(std::uint8_t byte);

/// Sets `bytes` to the bytes that `text` stands for. If a character stands for no byte, it sets `bytes` to `text` and
/// returns false.
bool byte_level_bytes(std::string_view text, std::string& bytes);

/// Caches recent words and their ids. Its size is bounded: a word replaces the one that was in its slot.
class WordCache {
 public:
  static constexpr std::size_t kMaxWordBytes = 30;
  static constexpr std::size_t kMaxIds = 8;

  /// Holds a word in a form that is fast to compare.
  struct Key {
    std::array<std::uint64_t, 4> words{};  // the bytes, then zeros, and the number of bytes at the end
    bool operator==(const Key&) const = default;
  };
  struct Slot {
    Key key;
    std::array<std::int32_t, kMaxIds> ids{};
  };

  WordCache() : slots_(kNumSlots) {}

  static Key key_of(std::string_view word);
  /// Returns the slot where the word is or would be. If the slot holds the ids of the word, it has the word's key.
  Slot& slot_of(const Key& key) { return slots_[hash(key) & (kNumSlots - 1)]; }

 private:
  static constexpr std::size_t kNumSlots = 1u << 15;
  static std::size_t hash(const Key& key);

  std::vector<Slot> slots_;
};

/// Holds the memory that a thread needs for merging.
struct BpeScratch {
  struct Symbol {
    std::int32_t id = 0;
    std::int32_t previous = -1;
    std::int32_t next = -1;
    std::uint32_t rank = 0;  // of the merge with the next symbol
  };
  struct Candidate {
    std::uint32_t rank;
    std::int32_t at;
    std::int32_t left, right;  // the candidate is stale if the symbols have changed
  };
  WordCache cache;
  std::string kept;  // a word without its missing bytes
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

class Bpe {
 public:
  /// If spec.ignore_merges, a word that is itself a token gets that token, except for the ids in `never`, which is
  /// sorted.
  Bpe(const BpeSpec& spec, const std::vector<std::int32_t>& never);

  /// Returns the bytes that have no token. As in the `tokenizers` library, they are dropped before anything is merged.
  const std::vector<std::uint8_t>& missing_bytes() const { return missing_bytes_; }

  /// Appends the ids of `word`, which must not be empty.
  void encode_word(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const;

  /// Returns whether encode_word may give `id`.
  bool can_give(std::int32_t id) const;

 private:
  struct Merge {
    std::uint64_t pair = kNoPair;
    std::uint32_t rank = kNoRank;
    std::int32_t id = -1;
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  static constexpr std::uint64_t kNoPair = ~std::uint64_t{0};
  static constexpr std::uint32_t kNoRank = ~std::uint32_t{0};

  const Merge& find_merge(std::int32_t left, std::int32_t right) const;
  void merge_short(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const;
  void merge_long(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const;

  std::array<std::int32_t, 256> byte_ids_{};  // -1: the byte has no token
  std::vector<std::uint8_t> missing_bytes_;
  std::unordered_set<std::int32_t> given_ids_;
  std::vector<Merge> merges_;  // open addressing; the size is a power of two
  int shift_ = 0;              // 64 minus log2 of the size
  Merge no_merge_;
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>> whole_words_;  // used with ignore_merges
};

}  // namespace tessera::data
