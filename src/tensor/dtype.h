// The types of tensors' numbers, and the devices that hold the numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// The types of numbers. kFloat8E4M3 and kFloat8E8M0 are those of a quantized matrix's elements and scales
/// (mx/formats.h).
enum class DType : std::uint8_t { kFloat64, kFloat32, kBFloat16, kInt32, kFloat8E4M3, kFloat8E8M0 };

std::size_t size_of(DType dtype);
inline std::size_t size_in_bytes(std::int64_t count, DType dtype) {
  return static_cast<std::size_t>(count) * size_of(dtype);
}
/// Returns "float64", "float32", "bfloat16", "int32", "float8_e4m3" or "float8_e8m0".
const char* name_of(DType dtype);

/// Says where a tensor's numbers are. kCuda is the process's GPU. Tensors on kMeta have no numbers: operators check
/// their shapes and return. A step run on kMeta measures the memory that the same step needs.
enum class Device : std::uint8_t { kCpu, kCuda, kMeta };

}  // namespace tessera
