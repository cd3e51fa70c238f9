#include "data/shard.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace tessera::data {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is mapped, not parsed");

constexpr std::uint64_t kAlignment = sizeof(std::uint64_t);
constexpr std::uint32_t kMaxVocabSizeOf2Bytes = 1u << 16;

std::uint64_t header_checksum(const ShardHeader& header) {
  return checksum(as_bytes_of(header).first(offsetof(ShardHeader, header_checksum)));
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Shard::Shard(const std::filesystem::path& path) : file_(path) {
  const std::span<const std::byte> bytes = file_.bytes();
  require(bytes.size() >= sizeof(ShardHeader),
          "shard '{}': {} bytes, fewer than the header's {}: not a shard, or cut short", path.string(), bytes.size(),
          sizeof(ShardHeader));
  std::memcpy(&header_, bytes.data(), sizeof header_);
  check_header();
  const std::uint64_t num_blocks = (header_.file_bytes - header_.checksums_offset) / sizeof(std::uint64_t);
  const std::uint64_t found = checksum(bytes.subspan(header_.checksums_offset));
  require(found == header_.table_checksum,
          "shard '{}': the table of block checksums at byte {} has checksum {:016x}, expected {:016x}: the "
          "file is damaged",
          path.string(), header_.checksums_offset, found, header_.table_checksum);
  verified_ = std::make_unique<std::atomic<std::uint8_t>[]>(num_blocks);
}

void Shard::check_header() const {
  const std::string name = file_.path().string();
  const std::uint64_t size = file_.bytes().size();
  const ShardHeader& h = header_;
  require(h.magic == kShardMagic, "shard '{}': it does not begin with a shard's 8 letters: not a shard, or damaged",
          name);
  require(h.version == kShardVersion, "shard '{}': format version {}, this program reads version {}", name, h.version,
          kShardVersion);
  require(h.file_bytes == size, "shard '{}': the file has {} bytes, its header says {}: cut short or damaged", name,
          size, h.file_bytes);
  const std::uint64_t sum = header_checksum(h);
  require(sum == h.header_checksum,
          "shard '{}': the header has checksum {:016x}, expected {:016x}: the file is damaged", name, sum,
          h.header_checksum);

  // From here on, only a faulty writer can be the cause of an error, but the numbers are about to be used as addresses.
  // The first two conditions bound the counts by the file's length, so that the sums below cannot overflow.
  const bool counts_fit = (h.token_bytes == 2 || h.token_bytes == 4) && h.num_tokens <= size / h.token_bytes &&
                          h.num_documents >= 1 && h.num_documents <= size / sizeof(std::uint64_t);
  bool layout_fits = counts_fit && h.block_bytes >= kAlignment && h.tokens_offset == sizeof(ShardHeader);
  if (layout_fits) {
    const std::uint64_t documents_offset = round_up(h.tokens_offset + h.num_tokens * h.token_bytes, kAlignment);
    const std::uint64_t checksums_offset = documents_offset + (h.num_documents + 1) * sizeof(std::uint64_t);
    const std::uint64_t payload = checksums_offset - h.tokens_offset;
    const std::uint64_t num_blocks = payload / h.block_bytes + (payload % h.block_bytes != 0 ? 1 : 0);
    layout_fits = h.documents_offset == documents_offset && h.checksums_offset == checksums_offset &&
                  h.file_bytes == checksums_offset + num_blocks * sizeof(std::uint64_t);
  }
  require(layout_fits,
          "shard '{}': {} tokens of {} bytes and {} documents, in sections at bytes {}, {} and {}, do not "
          "make a file of "
          "{} bytes",
          name, h.num_tokens, h.token_bytes, h.num_documents, h.tokens_offset, h.documents_offset, h.checksums_offset,
          size);
  require(h.vocab_size > 0 && h.vocab_size <= (1u << 31) && h.max_token_id < h.vocab_size && h.bos_id < h.vocab_size &&
              h.eos_id < h.vocab_size,
          "shard '{}': largest token id {}, BOS {} and EOS {}, expected less than the vocabulary size {}", name,
          h.max_token_id, h.bos_id, h.eos_id, h.vocab_size);
}

std::uint64_t Shard::load_u64(std::uint64_t offset) const {
  std::uint64_t value;
  std::memcpy(&value, file_.bytes().data() + offset, sizeof value);
  return value;
}

void Shard::ensure_verified(std::uint64_t offset, std::uint64_t size) const {
  if (size == 0) return;
  const std::uint64_t base = header_.tokens_offset;
  const std::uint64_t last = (offset + size - 1 - base) / header_.block_bytes;
  for (std::uint64_t block = (offset - base) / header_.block_bytes; block <= last; ++block) {
    if (verified_[block].load(std::memory_order_relaxed) != 0) continue;
    const std::uint64_t begin = base + block * header_.block_bytes;
    // The header may claim blocks of nearly 2^64 bytes, so block_bytes must not be added to anything.
    const std::uint64_t end = begin + std::min(header_.block_bytes, header_.checksums_offset - begin);
    const std::uint64_t found = checksum(file_.bytes().subspan(begin, end - begin));
    const std::uint64_t expected = load_u64(header_.checksums_offset + block * sizeof(std::uint64_t));
    require(found == expected,
            "shard '{}': bytes {} to {} have checksum {:016x}, expected {:016x}: the file is damaged", path().string(),
            begin, end - 1, found, expected);
    verified_[block].store(1, std::memory_order_relaxed);
  }
}

void Shard::read_tokens(std::uint64_t first, std::span<std::int32_t> out) const {
  TESSERA_CHECK(first <= num_tokens() && out.size() <= num_tokens() - first, "tokens {} + {} of {}", first, out.size(),
                num_tokens());
  const std::uint64_t offset = header_.tokens_offset + first * header_.token_bytes;
  ensure_verified(offset, out.size() * header_.token_bytes);
  const std::byte* source = file_.bytes().data() + offset;
  if (header_.token_bytes == sizeof(std::int32_t)) {
    std::memcpy(out.data(), source, out.size_bytes());
  } else {
    for (std::size_t i = 0; i < out.size(); ++i) {
      std::uint16_t id;
      std::memcpy(&id, source + i * sizeof id, sizeof id);
      out[i] = id;
    }
  }
}

TokenRange Shard::document(std::uint64_t document_idx) const {
  TESSERA_CHECK(document_idx < num_documents(), "document {} of {}", document_idx, num_documents());
  const std::uint64_t offset = header_.documents_offset + document_idx * sizeof(std::uint64_t);
  ensure_verified(offset, 2 * sizeof(std::uint64_t));
  const TokenRange range{load_u64(offset), load_u64(offset + sizeof(std::uint64_t))};
  require(range.begin < range.end && range.end <= num_tokens(),
          "shard '{}': document {} is at tokens {} to {}, expected a range within {} tokens", path().string(),
          document_idx, range.begin, range.end, num_tokens());
  return range;
}

void Shard::verify() const {
  ensure_verified(header_.tokens_offset, header_.checksums_offset - header_.tokens_offset);
  std::uint64_t end = 0;
  for (std::uint64_t i = 0; i < num_documents(); ++i) {
    const TokenRange range = document(i);
    require(range.begin == end, "shard '{}': document {} begins at token {}, but the one before ends at {}",
            path().string(), i, range.begin, end);
    end = range.end;
  }
  require(end == num_tokens(), "shard '{}': the last document ends at token {} of {}", path().string(), end,
          num_tokens());
  std::vector<std::int32_t> ids(std::min<std::uint64_t>(num_tokens(), kShardBlockBytes));
  for (std::uint64_t first = 0; first < num_tokens(); first += ids.size()) {
    const std::span<std::int32_t> part(ids.data(), std::min<std::uint64_t>(ids.size(), num_tokens() - first));
    read_tokens(first, part);
    for (std::size_t i = 0; i < part.size(); ++i) {
      require(static_cast<std::uint32_t>(part[i]) <= header_.max_token_id,
              "shard '{}': token {} has id {}, its header says that the largest is {}", path().string(), first + i,
              static_cast<std::uint32_t>(part[i]), header_.max_token_id);
    }
  }
}

ShardWriter::ShardWriter(const std::filesystem::path& path, const Tokenizer& tokenizer) : file_(path) {
  header_.magic = kShardMagic;
  header_.version = kShardVersion;
  header_.vocab_size = static_cast<std::uint32_t>(tokenizer.vocab_size());
  header_.token_bytes = header_.vocab_size <= kMaxVocabSizeOf2Bytes ? 2 : 4;
  header_.bos_id = static_cast<std::uint32_t>(tokenizer.bos_id());
  header_.eos_id = static_cast<std::uint32_t>(tokenizer.eos_id());
  header_.tokens_offset = sizeof(ShardHeader);
  header_.block_bytes = kShardBlockBytes;
  header_.tokenizer_checksum = tokenizer.checksum();
  block_.reserve(kShardBlockBytes);
  file_.write(as_bytes_of(header_));  // reserves its place; its numbers are known only at the end
}

void ShardWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t size = std::min<std::size_t>(bytes.size(), kShardBlockBytes - block_.size());
    block_.insert(block_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    bytes = bytes.subspan(size);
    if (block_.size() == kShardBlockBytes) flush_block();
  }
}

void ShardWriter::flush_block() {
  checksums_.push_back(checksum(block_));
  file_.write(block_);
  block_.clear();
}

void ShardWriter::append_token(std::int32_t id) {
  const auto value = static_cast<std::uint32_t>(id);
  TESSERA_CHECK(value < header_.vocab_size, "token id {}, vocabulary size {}", id, header_.vocab_size);
  header_.max_token_id = std::max(header_.max_token_id, value);
  append(as_bytes_of(value).first(header_.token_bytes));
  ++header_.num_tokens;
}

void ShardWriter::add_document(std::span<const std::int32_t> tokens) {
  document_starts_.push_back(header_.num_tokens);
  append_token(static_cast<std::int32_t>(header_.bos_id));
  for (const std::int32_t id : tokens) append_token(id);
  append_token(static_cast<std::int32_t>(header_.eos_id));
  ++header_.num_documents;
}

ShardHeader ShardWriter::finish() {
  TESSERA_CHECK(header_.num_documents > 0);
  const std::uint64_t tokens_end = header_.tokens_offset + header_.num_tokens * header_.token_bytes;
  header_.documents_offset = round_up(tokens_end, kAlignment);
  const std::array<std::byte, kAlignment> zeros{};
  append(std::span(zeros).first(header_.documents_offset - tokens_end));
  document_starts_.push_back(header_.num_tokens);
  append(std::as_bytes(std::span(document_starts_)));
  if (!block_.empty()) flush_block();
  header_.checksums_offset = file_.size();
  const auto table = std::as_bytes(std::span(checksums_));
  file_.write(table);
  header_.table_checksum = checksum(table);
  header_.file_bytes = file_.size();
  header_.header_checksum = header_checksum(header_);
  file_.write_at(0, as_bytes_of(header_));
  file_.commit();
  return header_;
}

}  // namespace tessera::data
