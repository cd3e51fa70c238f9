// Types of tensors' numbers, and where the numbers are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// kFloat8E4M3 and kFloat8E8M0 are what a quantized matrix is made of (mx/formats.h): elements and scales.
enum class DType : std::uint8_t { kFloat64, kFloat32, kBFloat16, kInt32, kFloat8E4M3, kFloat8E8M0 };

std::size_t size_of(DType dtype);
/// "float64", "float32", "bfloat16", "int32", "float8_e4m3", "float8_e8m0".
const char* name_of(DType dtype);

/// Where a tensor's numbers are. kCuda: on the process's GPU. kMeta: nowhere; operators check shapes and return. A step
/// run on kMeta measures the memory that the same step needs.
enum class Device : std::uint8_t { kCpu, kCuda, kMeta };

}  // namespace tessera
