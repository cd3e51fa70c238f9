#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian");

/// The format's own limit on the size of headers.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

std::uint64_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t, std::less<>> kSizes = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
      {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  const auto found = kSizes.find(dtype);
  return found == kSizes.end() ? 0 : found->second;
}

std::string to_string(const std::vector<std::int64_t>& dims) { return nlohmann::json(dims).dump(); }

/// Returns the product of the dims times the element size. Throws Error if it is negative or does not fit into 64 bits.
std::uint64_t num_bytes(const std::vector<std::int64_t>& shape, std::uint64_t element, const std::string& where) {
  std::uint64_t product = element;
  for (const std::int64_t dim : shape) {
    require(dim >= 0 && !__builtin_mul_overflow(product, static_cast<std::uint64_t>(dim), &product),
            "{}: shape {} is not possible", where, to_string(shape));
  }
  return product;
}

/// The place of a tensor's bytes in a file's data.
struct Range {
  std::int64_t begin = 0, end = 0;
  std::string tensor = {};  // its name, for messages
};

/// Throws Error unless each byte of the data belongs to one tensor, as the format demands.
void require_tiling(std::vector<Range> ranges, std::size_t data_size, const std::string& name) {
  std::ranges::sort(ranges, {}, &Range::begin);
  const auto size = static_cast<std::int64_t>(data_size);
  ranges.push_back({.begin = size, .end = size});
  Range last;
  for (const Range& range : ranges) {
    require(last.end <= range.begin, "'{}', tensor '{}': its bytes {} to {} overlap those of '{}'", name, range.tensor,
            range.begin, range.end, last.tensor);
    require(last.end == range.begin, "'{}': bytes {} to {} of its data belong to no tensor", name, last.end,
            range.begin);
    last = range;
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  const std::string name = path.string();
  const std::span<const std::byte> bytes = file_.bytes();
  require(bytes.size() >= 8, "'{}' is {} bytes long; a safetensors file has at least 8", name, bytes.size());
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  require(header_bytes <= kMaxHeaderBytes && header_bytes <= bytes.size() - 8,
          "'{}': the header is said to be {} bytes long, the file is {}: truncated, or no safetensors file", name,
          header_bytes, bytes.size());
  const std::string_view header_text(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
  const std::span<const std::byte> data = bytes.subspan(8 + header_bytes);

  std::vector<Range> ranges;
  const auto header = parse_json(header_text, fmt::format("'{}', header", name));
  require(header.is_object(), "'{}': the header is no JSON object", name);
  for (const auto& item : header.items()) {
    const std::string& key = item.key();
    const nlohmann::json& value = item.value();
    if (key == "__metadata__") {
      require(value.is_object(), "'{}': __metadata__ is no JSON object", name);
      for (const auto& [meta_key, meta_value] : value.items()) {
        require(meta_value.is_string(), "'{}': __metadata__.{} is no string", name, printable(meta_key));
        metadata_[meta_key] = meta_value.get<std::string>();
      }
      continue;
    }
    const std::string where = fmt::format("'{}', tensor '{}'", name, printable(key));
    const auto whole_numbers = [&](const char* field) {
      const auto found = value.is_object() ? value.find(field) : value.end();
      require(value.is_object() && found != value.end() && found->is_array(), "{}: no list '{}'", where, field);
      std::vector<std::int64_t> numbers;
      for (const auto& number : *found) {
        require(number.is_number_integer(), "{}: '{}' holds something that is no whole number", where, field);
        numbers.push_back(number.get<std::int64_t>());
      }
      return numbers;
    };
    SafetensorsEntry entry;
    entry.shape = whole_numbers("shape");
    const std::vector<std::int64_t> offsets = whole_numbers("data_offsets");
    require(value.contains("dtype") && value["dtype"].is_string(), "{}: no 'dtype'", where);
    entry.dtype = value["dtype"].get<std::string>();
    const std::uint64_t element = element_bytes(entry.dtype);
    require(element > 0, "{}: unknown dtype '{}'", where, printable(entry.dtype));
    require(offsets.size() == 2 && 0 <= offsets[0] && offsets[0] <= offsets[1] &&
                static_cast<std::uint64_t>(offsets[1]) <= data.size(),
            "{}: data_offsets {} lie outside of the file's {} bytes of data: truncated?", where, to_string(offsets),
            data.size());
    const auto size = static_cast<std::uint64_t>(offsets[1] - offsets[0]);
    require(num_bytes(entry.shape, element, where) == size, "{}: shape {} of {} does not take {} bytes", where,
            to_string(entry.shape), entry.dtype, size);
    entry.bytes = data.subspan(static_cast<std::size_t>(offsets[0]), size);
    entries_.emplace(key, std::move(entry));
    if (size > 0) ranges.push_back({offsets[0], offsets[1], printable(key)});
  }
  require_tiling(std::move(ranges), data.size(), name);
}

const SafetensorsEntry& SafetensorsFile::at(const std::string& name) const {
  const auto found = entries_.find(name);
  require(found != entries_.end(), "'{}' has no tensor '{}'", file_.path().string(), printable(name));
  return found->second;
}

Tensor SafetensorsFile::view(const std::string& name, const Shape& shape, DType dtype) const {
  const SafetensorsEntry& entry = at(name);
  void* data = const_cast<std::byte*>(entry.bytes.data());
  const Tensor tensor(data, shape, dtype, Device::kCpu);
  const std::vector<std::int64_t> expected = tensor.shape().dims();
  require(entry.dtype == safetensors_dtype(dtype) && entry.shape == expected,
          "'{}', tensor '{}': is {} {}, expected {} {}", file_.path().string(), name, entry.dtype,
          to_string(entry.shape), safetensors_dtype(dtype), to_string(expected));
  require(reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) == 0, "'{}', tensor '{}': not aligned",
          file_.path().string(), name);
  return tensor;
}

void SafetensorsFile::read(const std::string& name, const Tensor& target) const {
  TESSERA_CHECK(target.is_contiguous());
  std::memcpy(target.raw(), view(name, target.shape(), target.dtype()).raw(), target.num_bytes());
}

std::string safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "F64";
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kInt32:
      return "I32";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
    case DType::kFloat8E8M0:
      return "F8_E8M0";
  }
  return "";
}

std::vector<SafetensorsSpec> specs_of(std::span<const NamedTensor> tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({.name = name, .dtype = safetensors_dtype(tensor.dtype()), .shape = tensor.shape().dims()});
  }
  return specs;
}

std::uint64_t SafetensorsSpec::num_bytes() const { return tessera::num_bytes(shape, element_bytes(dtype), name); }

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const SafetensorsSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const SafetensorsSpec& spec : tensors) {
    const std::uint64_t end = offset + spec.num_bytes();
    header[spec.name] = {{"dtype", spec.dtype}, {"shape", spec.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  const std::uint64_t header_bytes = text.size();
  append(as_bytes_of(header_bytes));
  append(std::as_bytes(std::span(text)));
  expected_size_ = file_.size() + offset;
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  file_.write(bytes);
  sum_.update(bytes);
}

WrittenFile SafetensorsWriter::finish() {
  TESSERA_CHECK(file_.size() == expected_size_, "{} bytes written, the header says {}", file_.size(), expected_size_);
  file_.commit();
  return {.size = file_.size(), .checksum = sum_.value()};
}

WrittenFile write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, specs_of(tensors), metadata);
  for (const auto& [name, tensor] : tensors) {
    TESSERA_CHECK(tensor.is_contiguous(), "{}", name);
    writer.append({static_cast<const std::byte*>(tensor.raw()), tensor.num_bytes()});
  }
  return writer.finish();
}

}  // namespace tessera
