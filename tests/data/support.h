// Helpers for the tests of data/: temporary folders, gzip, damaged files and small datasets.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "data/prepare.h"
#include "data/shard.h"
#include "tensor/philox.h"
#include "tests/expect_error.h"

namespace tessera::data {

/// Makes an empty folder for the running test. The destructor removes it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = fmt::format("tessera_data_{}_{}_{}", test->test_suite_name(), test->name(), getpid());
    std::replace(name.begin(), name.end(), '/', '_');  // names of tests with parameters have a slash
    folder_ = std::filesystem::path(::testing::TempDir()) / name;
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(folder_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  const std::filesystem::path& path() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

inline std::filesystem::path write_file(const std::filesystem::path& path, std::string_view content) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  EXPECT_TRUE(file.good()) << path;
  return path;
}

/// Flips a bit of a file in place, which is many times faster than writing the file again.
inline void flip_bit(const std::filesystem::path& path, std::size_t byte, int bit) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(byte));
  const int value = file.get() ^ (1 << bit);
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(value));
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

inline std::string gzipped(std::string_view content) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, content.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// Changes a shard's header and corrects the header's checksum. The result is what a faulty writer would leave.
template <typename Change>
void change_header(const std::filesystem::path& path, Change&& change) {
  std::string content = read_text_file(path);
  ShardHeader header;
  std::memcpy(&header, content.data(), sizeof header);
  change(header);
  header.header_checksum = checksum(as_bytes_of(header).first(offsetof(ShardHeader, header_checksum)));
  std::memcpy(content.data(), &header, sizeof header);
  write_file(path, content);
}

/// Makes a dataset of bytes and returns its folder. Its documents are "0 ", "1 LETTERS", ... with 0 to 52 random
/// letters, so that no two samples are alike.
inline std::filesystem::path make_dataset(const TemporaryFolder& scratch, int num_documents, std::uint64_t shard_tokens,
                                          double val_fraction = 0) {
  const Philox letters(0, stream_of("test.letters"));
  std::string lines;
  for (int i = 0; i < num_documents; ++i) {
    std::string text = fmt::format("{} ", i);
    for (int k = 0; k < i * 7 % 53; ++k) {
      text.push_back(static_cast<char>(
          'a' + letters.words(static_cast<std::uint64_t>(i) * 53 + static_cast<std::uint64_t>(k))[0] % 26));
    }
    lines += fmt::format("{{\"text\": \"{}\"}}\n", text);
  }
  PrepareOptions options;
  options.inputs = {write_file(scratch / "in.jsonl", lines)};
  options.tokenizer = "bytes";
  options.output = scratch / "dataset";
  options.val_fraction = val_fraction;
  options.shard_tokens = shard_tokens;
  prepare_dataset(options);
  return options.output;
}

/// Returns all tokens of a split, joined.
inline std::vector<std::int32_t> all_tokens(const std::filesystem::path& dataset, const std::string& split) {
  std::vector<std::int32_t> all;
  for (const Shard& shard : open_split(dataset, read_manifest(dataset), split)) {
    std::vector<std::int32_t> part(shard.num_tokens());
    shard.read_tokens(0, part);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace tessera::data
