#include "data/tokenizers/sentencepiece_model_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.h"

namespace tessera::data {
namespace {

/// The library's limits: Normalizer::kMaxTrieResultsSize, and kResultSize of PrefixMatcher::PrefixMatch.
constexpr std::uint32_t kMaxRuleMatches = 32;
constexpr std::size_t kMaxNestedSymbols = 64;
constexpr std::size_t kMaxPieceBytes = 8000;

// Field numbers of sentencepiece_model.proto.
constexpr std::uint64_t kModelPieces = 1, kModelNormalizer = 3, kModelDenormalizer = 5;
constexpr std::uint64_t kPieceText = 1, kPieceScore = 2, kPieceType = 3;
constexpr std::uint64_t kNormalizerCharsmap = 2;
constexpr std::uint32_t kUserDefined = 4;  // a value of ModelProto.SentencePiece.Type

/// Reads the fields of a protobuf message, one after the other (protobuf.dev/programming-guides/encoding).
class Message {
 public:
  enum Wire : std::uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  struct Field {
    std::uint64_t number;
    std::uint64_t wire;
    std::uint64_t value = 0;  // of a varint, or the bits of a fixed32
    std::string_view bytes;
  };

  Message(std::string_view bytes, const std::string& place) : rest_(bytes), place_(place) {}

  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const std::uint64_t tag = varint();
    if (tag > std::numeric_limits<std::uint32_t>::max()) refuse();  // protobuf would drop the upper bits
    Field field{.number = tag >> 3, .wire = tag & 7, .bytes = {}};
    if (field.wire == kVarint) {
      field.value = varint();
    } else if (field.wire == kFixed64) {
      take(8);
    } else if (field.wire == kFixed32) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, take(4).data(), sizeof bits);
      field.value = bits;
    } else if (field.wire == kBytes) {
      field.bytes = take(varint());
    } else {
      refuse();
    }
    return field;
  }

 private:
  [[noreturn]] void refuse() const { fail("{}: not a SentencePiece model: no protobuf message, or damaged", place_); }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    refuse();
  }
  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) refuse();
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  const std::string& place_;
};

/// A double array of Darts-clone (darts.h, DoubleArrayUnit). From the unit at node n, a byte c leads to the unit at n ^
/// offset(n) ^ c if that unit has the label c. If the unit says that it has a value, the value is at n ^ offset(n).
class DoubleArray {
 public:
  /// `bytes` must hold one unit or more.
  explicit DoubleArray(std::string_view bytes) : units_(bytes.size() / sizeof(std::uint32_t)), matches_(units_.size()) {
    std::memcpy(units_.data(), bytes.data(), units_.size() * sizeof(std::uint32_t));
  }

  /// Returns whether every walk stays inside of the array and ends, finds at most `max_matches` values, and finds only
  /// values below `num_values`.
  bool is_sound(std::uint32_t max_matches, std::size_t num_values) {
    // The depth-first search uses its own stack, because a damaged array can be as deep as it is long.
    struct Visit {
      std::uint32_t node;
      std::uint32_t next_byte = 0;
      std::uint32_t most = 0;  // the most matches on one way from a child on
    };
    std::vector<Visit> way;
    const auto enter = [&](std::uint32_t node) {
      way.push_back({node});
      matches_[node] = kOnTheWay;
      return (base(node) | 0xff) < units_.size();
    };
    if (!enter(0)) return false;
    while (!way.empty()) {
      Visit& visit = way.back();
      if (visit.next_byte == 256) {
        if (has_value(visit.node)) {
          if ((units_[base(visit.node)] & ~kValueFlag) >= num_values) return false;
          ++visit.most;
        }
        if (visit.most > max_matches) return false;
        matches_[visit.node] = kSeen + visit.most;
        way.pop_back();
        continue;
      }
      const std::uint32_t byte = visit.next_byte;
      const std::uint32_t child = base(visit.node) ^ byte;
      const bool is_child = (units_[child] & kLabelMask) == byte;
      if (is_child && matches_[child] == kOnTheWay) return false;  // a cycle
      if (is_child && matches_[child] == kNew) {
        if (!enter(child)) return false;  // the search comes back to this byte afterwards
        continue;
      }
      if (is_child) visit.most = std::max(visit.most, matches_[child] - kSeen);
      ++visit.next_byte;
    }
    return true;
  }

 private:
  static constexpr std::uint32_t kValueFlag = 1u << 31;
  static constexpr std::uint32_t kLabelMask = kValueFlag | 0xff;  // a value is no child
  enum : std::uint32_t { kNew, kOnTheWay, kSeen };                // kSeen + n: at most n matches from here on

  std::uint32_t base(std::uint32_t node) const {
    const std::uint32_t unit = units_[node];
    return node ^ ((unit >> 10) << ((unit & (1u << 9)) >> 6));
  }
  bool has_value(std::uint32_t node) const { return ((units_[node] >> 8) & 1) != 0; }

  std::vector<std::uint32_t> units_;
  std::vector<std::uint32_t> matches_;  // per node: one of the enumerators above, or kSeen + n
};

/// Checks a table of character rules. It consists of three parts: the double array's size in 4 bytes, the double array,
/// and the replacements, each with a NUL at its end. The double array leads from replaced texts to places in the
/// replacements.
void check_charsmap(std::string_view charsmap, const std::string& place) {
  static_assert(std::endian::native == std::endian::little);
  if (charsmap.empty()) return;
  const std::size_t num_bytes = charsmap.size();
  std::uint32_t size = 0;
  bool sound = num_bytes > sizeof size;
  if (sound) {
    std::memcpy(&size, charsmap.data(), sizeof size);
    charsmap.remove_prefix(sizeof size);
    sound = 0 < size && size < charsmap.size() && size % sizeof(std::uint32_t) == 0 && charsmap.back() == '\0' &&
            DoubleArray(charsmap.substr(0, size)).is_sound(kMaxRuleMatches, charsmap.size() - size);
  }
  require(sound, "{}: its table of character rules (precompiled_charsmap, {} bytes) is damaged", place, num_bytes);
}

void check_normalizer(std::string_view bytes, const std::string& place) {
  Message message(bytes, place);
  while (const auto field = message.next()) {
    if (field->number == kNormalizerCharsmap) check_charsmap(field->bytes, place);
  }
}

/// Checks a piece. Returns its text if the piece is user-defined.
std::optional<std::string_view> check_piece(std::string_view bytes, std::size_t piece_idx, const std::string& place) {
  Message message(bytes, place);
  std::string_view text;
  float score = 0.0f;
  bool is_user_defined = false;
  while (const auto field = message.next()) {
    if (field->number == kPieceText && field->wire == Message::kBytes) text = field->bytes;
    if (field->number == kPieceScore && field->wire == Message::kFixed32) {
      score = std::bit_cast<float>(static_cast<std::uint32_t>(field->value));
    }
    // If there are several values, protobuf keeps the last one that it knows, and of each its lower 32 bits.
    const bool is_type = field->number == kPieceType && field->wire == Message::kVarint;
    if (is_type && static_cast<std::uint32_t>(field->value) == kUserDefined) is_user_defined = true;
  }
  require(!text.empty() && text.size() <= kMaxPieceBytes && text.find('\0') == std::string_view::npos,
          "{}: piece {} has {} bytes, expected 1 to {} and none of them NUL", place, piece_idx, text.size(),
          kMaxPieceBytes);
  require(std::isfinite(score), "{}: piece {} has the score {}", place, piece_idx, score);
  if (!is_user_defined) return std::nullopt;
  return text;
}

void check_user_defined(std::vector<std::string_view> symbols, const std::string& place) {
  // In sorted order, a symbol comes before those that begin with it. The stack holds all symbols that begin the current
  // one.
  std::sort(symbols.begin(), symbols.end());
  std::vector<std::string_view> beginnings;
  for (const std::string_view symbol : symbols) {
    while (!beginnings.empty() && !symbol.starts_with(beginnings.back())) beginnings.pop_back();
    beginnings.push_back(symbol);
    require(beginnings.size() <= kMaxNestedSymbols,
            "{}: more than {} user-defined pieces of which each begins with the one before", place, kMaxNestedSymbols);
  }
}

}  // namespace

void check_sentencepiece_model(std::string_view model, const std::string& place) {
  Message message(model, place);
  std::vector<std::string_view> user_defined;
  std::size_t num_pieces = 0;
  while (const auto field = message.next()) {
    if (field->wire != Message::kBytes) continue;
    if (field->number == kModelPieces) {
      if (const auto symbol = check_piece(field->bytes, num_pieces++, place)) user_defined.push_back(*symbol);
    } else if (field->number == kModelNormalizer || field->number == kModelDenormalizer) {
      check_normalizer(field->bytes, place);
    }
  }
  check_user_defined(std::move(user_defined), place);
}

}  // namespace tessera::data
