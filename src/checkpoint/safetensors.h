// safetensors files (huggingface.co/docs/safetensors, format 0.4). A file begins with the length n of the header in 8
// bytes, little endian. Then follow n bytes of JSON, {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ...,
// "__metadata__": {...}}, and the data.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "tensor/tensor.h"

namespace tessera {

struct SafetensorsEntry {
  std::string dtype;  // as in the file: "F32", "BF16", "I32", "F64", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Maps a file. It checks every length and offset against the file's size before use. Errors name the file and the
/// tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Throws Error if there is no such tensor.
  const SafetensorsEntry& at(const std::string& name) const;
  /// Returns a read-only view of the tensor in the mapped file. Throws Error unless the tensor has exactly this dtype
  /// and shape.
  Tensor view(const std::string& name, const Shape& shape, DType dtype) const;
  /// Copies a tensor to `target`. Throws Error unless the tensor in the file has the target's dtype and shape.
  void read(const std::string& name, const Tensor& target) const;

 private:
  MappedFile file_;
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous
};

struct WrittenFile {
  std::uint64_t size;
  std::uint64_t checksum;
};

/// Describes a tensor that a SafetensorsWriter will write.
struct SafetensorsSpec {
  std::string name;
  std::string dtype;  // as in the file
  std::vector<std::int64_t> shape;

  std::uint64_t num_bytes() const;
};

/// Returns the name of a type in files: "F32", "BF16", "I32".
std::string safetensors_dtype(DType dtype);
/// Returns one spec per tensor, with its name, type and shape.
std::vector<SafetensorsSpec> specs_of(std::span<const NamedTensor> tensors);

/// Writes a file piece by piece. The constructor writes the header. append() takes the bytes of all tensors, in order.
/// The file appears when finish() returns. All three throw SystemError if the file cannot be written. finish() throws
/// InternalError if bytes are missing.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::span<const SafetensorsSpec> tensors,
                    const std::map<std::string, std::string>& metadata);
  void append(std::span<const std::byte> bytes);
  WrittenFile finish();

 private:
  AtomicFile file_;
  Checksum sum_;
  std::uint64_t expected_size_ = 0;
};

/// Writes all tensors to `path`, atomically.
WrittenFile write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace tessera
