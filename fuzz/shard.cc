// Fuzzes Shard with any bytes: once unchanged, and once with all checksums right. Otherwise a changed byte would only
// ever meet the checksums.
#include "data/shard.h"

#include <cstddef>
#include <cstring>

#include "target.h"

using namespace tessera;
using data::Shard;
using data::ShardHeader;

namespace {

void read_all(const std::filesystem::path& path) {
  const Shard shard(path);
  std::vector<std::int32_t> tokens(shard.num_tokens());
  shard.read_tokens(0, tokens);
  for (std::uint64_t i = 0; i < shard.num_documents(); ++i) {
    const data::TokenRange range = shard.document(i);
    shard.read_tokens(range.begin, std::span(tokens).first(range.end - range.begin));
  }
  shard.verify();
}

/// Returns the bytes with right checksums of blocks, table and header, as far as there is room for them.
std::string with_checksums(std::string bytes) {
  ShardHeader header;
  if (bytes.size() < sizeof header) return bytes;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.magic = data::kShardMagic;
  header.version = data::kShardVersion;
  header.file_bytes = bytes.size();
  const auto all = std::as_bytes(std::span(bytes));
  const std::uint64_t table = header.checksums_offset;
  if (sizeof header <= table && table <= bytes.size() && header.block_bytes >= 8) {
    std::uint64_t at = table;
    for (std::uint64_t begin = sizeof header; begin < table && bytes.size() - at >= 8; at += 8) {
      const std::uint64_t length = std::min(header.block_bytes, table - begin);
      const std::uint64_t sum = checksum(all.subspan(begin, length));
      std::memcpy(bytes.data() + at, &sum, sizeof sum);
      begin += length;
    }
    header.table_checksum = checksum(all.subspan(table));
  }
  header.header_checksum = checksum(as_bytes_of(header).first(offsetof(ShardHeader, header_checksum)));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(fuzz::as_text({data, size}));
  for (const std::string& content : {bytes, with_checksums(bytes)}) {
    const auto path = fuzz::write_input("input.tokens", content);
    fuzz::read_hostile(path.native(), [&] { read_all(path); });
  }
  return 0;
}
