// safetensors files (huggingface.co/docs/safetensors, format 0.4): 8 bytes, little endian: length n of the header; n
// bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ..., "__metadata__": {...}}; then the data.
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

/// A mapped file. Every length and offset is checked against the file's size before it is used; errors are Error and
/// name the file and the tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Throws Error if there is no such tensor.
  const SafetensorsEntry& at(const std::string& name) const;
  /// The tensor in the mapped file, only to be read. Throws Error unless it has exactly this dtype and shape.
  Tensor view(const std::string& name, const Shape& shape, DType dtype) const;
  /// Copies a tensor of the target's dtype and shape. Throws Error if the file's differs.
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

/// A tensor that a SafetensorsWriter is going to write.
struct SafetensorsSpec {
  std::string name;
  std::string dtype;  // as in the file
  std::vector<std::int64_t> shape;

  std::uint64_t num_bytes() const;
};

/// The file's name of a type: "F32", "BF16", "I32".
std::string safetensors_dtype(DType dtype);
/// One per tensor, of its type and shape.
std::vector<SafetensorsSpec> specs_of(std::span<const NamedTensor> tensors);

/// Writes a file whose numbers come piece by piece: the header at once, then all tensors' bytes in their order. The
/// file appears when it is finished.
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
