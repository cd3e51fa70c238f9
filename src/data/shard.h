// Token shards: files of tokenized documents (docs/data.md has the format byte by byte).
//
//   header            128 bytes, ShardHeader, little-endian
//   tokens            num_tokens ids of 2 or 4 bytes; each document is BOS, its tokens, EOS
//   zeros             up to a multiple of 8
//   document starts   num_documents + 1 of uint64: where in `tokens` each begins, then num_tokens
//   block checksums   uint64 XXH3 of each block of 64 KiB between the header and this table
//
// The header holds a checksum of itself and of the table of block checksums. So the 8 bytes of the header's checksum
// cover every byte of the file. A file of any size can be opened by reading its header and one small table.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/file.h"
#include "data/tokenizers/tokenizer.h"

namespace tessera::data {

struct ShardHeader {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t token_bytes;  // 2 if vocab_size <= 65536, else 4
  std::uint32_t vocab_size;
  std::uint32_t max_token_id;  // the largest id in the shard
  std::uint32_t bos_id;
  std::uint32_t eos_id;
  std::uint64_t num_tokens;  // BOS and EOS included
  std::uint64_t num_documents;
  std::uint64_t tokens_offset;  // offsets are in bytes from the start of the file
  std::uint64_t documents_offset;
  std::uint64_t checksums_offset;
  std::uint64_t file_bytes;
  std::uint64_t block_bytes;
  std::uint64_t tokenizer_checksum;
  std::uint64_t table_checksum;   // XXH3 of the table of block checksums
  std::uint64_t reserved[2];      // zero
  std::uint64_t header_checksum;  // XXH3 of the 120 bytes before it
};
static_assert(sizeof(ShardHeader) == 128);

inline constexpr std::array<char, 8> kShardMagic = {'T', 'S', 'R', 'A', 'T', 'O', 'K', '\n'};
inline constexpr std::uint32_t kShardVersion = 1;

/// Blocks are small, because the first access to a sample of some KiB reads and checks whole blocks. They are large
/// enough that the table, which is read when a shard is opened, is 1/8192 of the file.
inline constexpr std::uint64_t kShardBlockBytes = 1u << 16;

/// Describes tokens [begin, end) of a shard.
struct TokenRange {
  std::uint64_t begin;
  std::uint64_t end;
};

/// Reads a shard. Opening it checks the file's length against the header before it trusts any other number, then the
/// header and the table of checksums. Blocks are checked when they are first accessed. Every problem is an Error that
/// names the file, what was found and what was expected. Several threads may call the members at once.
class Shard {
 public:
  explicit Shard(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const ShardHeader& header() const { return header_; }
  std::uint64_t num_tokens() const { return header_.num_tokens; }
  std::uint64_t num_documents() const { return header_.num_documents; }

  /// Writes tokens [first, first + out.size()) to `out`. Allocates nothing.
  void read_tokens(std::uint64_t first, std::span<std::int32_t> out) const;

  /// Returns the range of a document's tokens, BOS and EOS included.
  TokenRange document(std::uint64_t document_idx) const;

  /// Checks everything: all blocks, the order of the documents, and that all ids are at most max_token_id.
  void verify() const;

 private:
  void check_header() const;
  void ensure_verified(std::uint64_t offset, std::uint64_t size) const;
  std::uint64_t load_u64(std::uint64_t offset) const;

  MappedFile file_;
  ShardHeader header_{};
  // The flag of a block is 1 after the block was found intact. Two threads may check the same block. Both find the
  // same.
  std::unique_ptr<std::atomic<std::uint8_t>[]> verified_;
};

/// Writes one shard. The complete file appears when `finish` returns. If `finish` is not called, no file appears.
class ShardWriter {
 public:
  ShardWriter(const std::filesystem::path& path, const Tokenizer& tokenizer);

  /// Appends BOS, `tokens` and EOS.
  void add_document(std::span<const std::int32_t> tokens);
  std::uint64_t num_tokens() const { return header_.num_tokens; }

  /// Completes the file. Returns the header as it was written.
  ShardHeader finish();

 private:
  void append_token(std::int32_t id);
  void append(std::span<const std::byte> bytes);
  void flush_block();

  AtomicFile file_;
  ShardHeader header_{};
  std::vector<std::byte> block_;
  std::vector<std::uint64_t> document_starts_;
  std::vector<std::uint64_t> checksums_;
};

}  // namespace tessera::data
