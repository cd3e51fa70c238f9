#include "data/tokenizers/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace tessera::data {
namespace {

/// After a word longer than this, encoding frees the memory that its merges took (about 80 bytes per byte).
constexpr std::size_t kMaxKeptWord = 1u << 20;

/// Words of up to this many bytes scan all pairs for each merge. Longer ones keep the pairs in a heap.
constexpr std::size_t kMaxShortWord = 40;

constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15u;  // 2^64 divided by the golden ratio

struct ByteTable {
  std::array<std::uint32_t, 256> character{};  // indexed by byte
  std::array<std::int32_t, 512> byte;          // indexed by character; -1: the character stands for no byte

  ByteTable() {
    byte.fill(-1);
    std::uint32_t next = 256;
    for (std::uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      character[b] = printable ? b : next++;
      byte[character[b]] = static_cast<std::int32_t>(b);
    }
  }
};

const ByteTable& byte_table() {
  static const ByteTable table;
  return table;
}

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

std::string byte_level_text(std::uint8_t byte) {
  const std::uint32_t character = byte_table().character[byte];  // below U+0800
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xC0 | character >> 6), static_cast<char>(0x80 | (character & 0x3F))};
}

bool byte_level_bytes(std::string_view text, std::string& bytes) {
  bytes.clear();
  for (std::size_t at = 0; at < text.size();) {
    std::uint32_t character = static_cast<std::uint8_t>(text[at++]);
    if (character >= 0x80) {
      if (character >= 0xE0 || at == text.size()) break;
      character = (character & 0x1F) << 6 | (static_cast<std::uint8_t>(text[at++]) & 0x3F);
    }
    if (character >= byte_table().byte.size() || byte_table().byte[character] < 0) break;
    bytes.push_back(static_cast<char>(byte_table().byte[character]));
    if (at == text.size()) return true;
  }
  bytes = text;
  return false;
}

WordCache::Key WordCache::key_of(std::string_view word) {
  Key key;
  std::memcpy(key.words.data(), word.data(), word.size());
  key.words[3] |= static_cast<std::uint64_t>(word.size()) << 56;
  return key;
}

std::size_t WordCache::hash(const Key& key) {
  const std::uint64_t a = (key.words[0] ^ std::rotl(key.words[1], 23)) * kMultiplier;
  const std::uint64_t b = (key.words[2] ^ std::rotl(key.words[3], 29)) * 0xD6E8FEB86659FD93u;
  const std::uint64_t mixed = (a ^ a >> 32 ^ b) * kMultiplier;
  return static_cast<std::size_t>(mixed >> 40);
}

Bpe::Bpe(const BpeSpec& spec, const std::vector<std::int32_t>& never) {
  std::unordered_map<std::string_view, std::int32_t> ids;
  for (const auto& [token, id] : spec.vocab) ids.emplace(token, id);
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    const auto found = ids.find(byte_level_text(static_cast<std::uint8_t>(byte)));
    byte_ids_[byte] = found == ids.end() ? -1 : found->second;
    if (found == ids.end()) missing_bytes_.push_back(static_cast<std::uint8_t>(byte));
  }

  const std::size_t num_slots = std::bit_ceil(2 * spec.merges.size() + 2);
  shift_ = 64 - std::countr_zero(num_slots);
  merges_.resize(num_slots);
  for (std::size_t i = 0; i < spec.merges.size(); ++i) {
    const std::uint64_t pair = pair_of(spec.merges[i].first, spec.merges[i].second);
    std::size_t slot = pair * kMultiplier >> shift_;
    while (merges_[slot].pair != kNoPair) slot = (slot + 1) & (num_slots - 1);
    merges_[slot] = {.pair = pair, .rank = static_cast<std::uint32_t>(i), .id = spec.merged[i]};
  }

  given_ids_.insert(byte_ids_.begin(), byte_ids_.end());
  given_ids_.erase(-1);
  given_ids_.insert(spec.merged.begin(), spec.merged.end());
  if (!spec.ignore_merges) return;
  std::string bytes;
  for (const auto& [token, id] : spec.vocab) {
    if (std::binary_search(never.begin(), never.end(), id)) continue;
    if (byte_level_bytes(token, bytes)) {
      whole_words_.emplace(bytes, id);
      given_ids_.insert(id);
    }
  }
}

bool Bpe::can_give(std::int32_t id) const { return given_ids_.contains(id); }

const Bpe::Merge& Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  std::size_t slot = pair * kMultiplier >> shift_;
  while (merges_[slot].pair != pair) {
    if (merges_[slot].pair == kNoPair) return no_merge_;
    slot = (slot + 1) & (merges_.size() - 1);
  }
  return merges_[slot];
}

void Bpe::encode_word(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const {
  WordCache::Slot* slot = nullptr;
  WordCache::Key key;
  if (word.size() <= WordCache::kMaxWordBytes) {
    key = WordCache::key_of(word);
    slot = &scratch.cache.slot_of(key);
    if (slot->key == key) {
      for (const std::int32_t id : slot->ids) {
        if (id < 0) break;
        ids.push_back(id);
      }
      return;
    }
  }
  const std::size_t begin = ids.size();
  const auto whole = whole_words_.empty() ? whole_words_.end() : whole_words_.find(word);
  if (whole != whole_words_.end()) {
    ids.push_back(whole->second);
  } else {
    if (!missing_bytes_.empty()) {
      scratch.kept.clear();
      for (const char c : word) {
        if (byte_ids_[static_cast<std::uint8_t>(c)] >= 0) scratch.kept.push_back(c);
      }
      word = scratch.kept;
    }
    if (!word.empty()) word.size() <= kMaxShortWord ? merge_short(word, scratch, ids) : merge_long(word, scratch, ids);
  }
  const std::size_t size = ids.size() - begin;
  if (slot != nullptr && size <= WordCache::kMaxIds) {
    slot->key = key;
    slot->ids.fill(-1);
    std::copy(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end(), slot->ids.begin());
  }
}

void Bpe::merge_short(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const {
  std::vector<BpeScratch::Symbol>& symbols = scratch.symbols;
  symbols.resize(word.size());
  for (std::size_t i = 0; i < word.size(); ++i) symbols[i].id = byte_ids_[static_cast<std::uint8_t>(word[i])];
  const auto rank_at = [&](std::size_t i) {
    return i + 1 < symbols.size() ? find_merge(symbols[i].id, symbols[i + 1].id).rank : kNoRank;
  };
  for (std::size_t i = 0; i < symbols.size(); ++i) symbols[i].rank = rank_at(i);
  while (true) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < symbols.size(); ++i) {
      if (symbols[i].rank < symbols[best].rank) best = i;
    }
    if (symbols[best].rank == kNoRank) break;
    symbols[best].id = find_merge(symbols[best].id, symbols[best + 1].id).id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    symbols[best].rank = rank_at(best);
    if (best > 0) symbols[best - 1].rank = rank_at(best - 1);
  }
  for (const BpeScratch::Symbol& symbol : symbols) ids.push_back(symbol.id);
}

void Bpe::merge_long(std::string_view word, BpeScratch& scratch, std::vector<std::int32_t>& ids) const {
  using Candidate = BpeScratch::Candidate;
  std::vector<BpeScratch::Symbol>& symbols = scratch.symbols;
  std::vector<Candidate>& heap = scratch.heap;
  const auto is_later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto symbol = [&](std::int32_t i) -> BpeScratch::Symbol& { return symbols[static_cast<std::size_t>(i)]; };
  const auto candidate_at = [&](std::int32_t i) -> Candidate {
    const std::int32_t next = symbol(i).next;
    if (next < 0) return {.rank = kNoRank, .at = i, .left = 0, .right = 0};
    return {.rank = find_merge(symbol(i).id, symbol(next).id).rank,
            .at = i,
            .left = symbol(i).id,
            .right = symbol(next).id};
  };
  const auto size = static_cast<std::int32_t>(word.size());
  require(static_cast<std::size_t>(size) == word.size(), "a word of {} bytes, without a place to cut it, is too long",
          word.size());
  symbols.resize(word.size());
  for (std::int32_t i = 0; i < size; ++i) {
    symbol(i) = {.id = byte_ids_[static_cast<std::uint8_t>(word[static_cast<std::size_t>(i)])],
                 .previous = i - 1,
                 .next = i + 1 < size ? i + 1 : -1};
  }
  heap.clear();
  for (std::int32_t i = 0; i < size; ++i) {
    if (const Candidate candidate = candidate_at(i); candidate.rank != kNoRank) heap.push_back(candidate);
  }
  std::make_heap(heap.begin(), heap.end(), is_later);
  const auto push = [&](std::int32_t i) {
    const Candidate candidate = candidate_at(i);
    if (candidate.rank == kNoRank) return;
    heap.push_back(candidate);
    std::push_heap(heap.begin(), heap.end(), is_later);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_later);
    const Candidate top = heap.back();
    heap.pop_back();
    BpeScratch::Symbol& left = symbol(top.at);
    if (left.id != top.left || left.next < 0 || symbol(left.next).id != top.right) continue;
    BpeScratch::Symbol& right = symbol(left.next);
    left.id = find_merge(top.left, top.right).id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbol(left.next).previous = top.at;
    if (left.previous >= 0) push(left.previous);
    push(top.at);
  }
  for (std::int32_t i = 0; i >= 0; i = symbol(i).next) ids.push_back(symbol(i).id);
  if (word.size() > kMaxKeptWord) {
    symbols = {};
    heap = {};
  }
}

}  // namespace tessera::data
