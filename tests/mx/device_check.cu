// Proves that the definition in mx/ is the same on a GPU. Compares its functions, compiled for the device, with the
// hardware's conversions over all of float32, and with themselves on the host. Prints one line per check. The exit
// status is 1 if any number differs, and 77 (skipped) if this machine has no GPU that can run the program.
#include <cuda_fp8.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "mx/block.h"
#include "mx/scale_layout.h"

namespace tessera::mx {
namespace {

constexpr int kSkipped = 77;
constexpr int kThreads = 256, kBlocks = 4096;

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(EXIT_FAILURE);
}

/// An array in device memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) { require(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc"); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> copy() const {
    std::vector<T> result(size_);
    require(cudaMemcpy(result.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return result;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

bool report(const char* name, std::uint64_t count, std::uint64_t mismatches, std::uint64_t first) {
  std::printf("%-58s %11llu cases  ", name, static_cast<unsigned long long>(count));
  if (mismatches == 0) {
    std::printf("equal\n");
  } else {
    std::printf("%llu DIFFER, the first 0x%llx\n", static_cast<unsigned long long>(mismatches),
                static_cast<unsigned long long>(first));
  }
  return mismatches == 0;
}

// --- Comparison with the hardware: a check says of a bit pattern whether both agree ---

struct Mismatches {
  unsigned long long count, first;
};

template <typename Check>
__global__ void sweep(Check check, std::uint64_t count, Mismatches* mismatches) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    if (check(static_cast<std::uint32_t>(i))) continue;
    atomicAdd(&mismatches->count, 1ull);
    atomicMin(&mismatches->first, static_cast<unsigned long long>(i));
  }
}

/// Checks the patterns 0 to count - 1.
template <typename Check>
bool equals_hardware(const char* name, std::uint64_t count, Check check) {
  DeviceArray<Mismatches> mismatches(1);
  const Mismatches none{0, ~0ull};
  require(cudaMemcpy(mismatches.data(), &none, sizeof(none), cudaMemcpyHostToDevice), "cudaMemcpy");
  sweep<<<kBlocks, kThreads>>>(check, count, mismatches.data());
  require(cudaGetLastError(), name);
  const Mismatches result = mismatches.copy()[0];
  return report(name, count, result.count, result.first);
}

template <typename Element>
constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E4M3;
template <>
constexpr __nv_fp8_interpretation_t kInterpretation<E5M2> = __NV_E5M2;

template <typename Element>
struct Cast {
  __device__ bool operator()(std::uint32_t bits) const {
    const float x = float_of(bits);
    return cast_to<Element>(x) == __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kInterpretation<Element>);
  }
};

template <typename Element>
struct Value {
  __device__ bool operator()(std::uint32_t byte) const {
    const float value = value_of<Element>(static_cast<std::uint8_t>(byte));
    const float hardware =
        __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), kInterpretation<Element>)));
    return bits_of(value) == bits_of(hardware) || (value != value && hardware != hardware);
  }
};

__device__ int to_e8m0(float x, cudaRoundMode rounding) { return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, rounding); }

struct Rceil {
  __device__ bool operator()(std::uint32_t bits) const {
    const float amax = float_of(bits);
    return scale_byte(amax, ScalingMode::kRceil) == to_e8m0(amax * float_of(E4M3::kReciprocal), cudaRoundPosInf);
  }
};
struct Floor {
  __device__ bool operator()(std::uint32_t bits) const {
    const float amax = float_of(bits);
    return scale_byte(amax, ScalingMode::kFloor) == max(0, to_e8m0(amax, cudaRoundZero) - 8);
  }
};
struct Ceil {
  __device__ bool operator()(std::uint32_t bits) const {
    const float amax = float_of(bits);
    return scale_byte(amax, ScalingMode::kCeil) == max(0, to_e8m0(amax, cudaRoundPosInf) - 8);
  }
};

struct ScaleValue {
  __device__ bool operator()(std::uint32_t byte) const {
    const auto s = static_cast<std::uint8_t>(byte);
    const float value = value_of_scale(s);
    const float hardware = __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(s)));
    if (s == kScaleNaN) return value != value && hardware != hardware;
    return value == hardware && value * inverse_of_scale(s) == 1.0f;
  }
};

// --- Comparison with the host: a function of an index is evaluated on both ---

template <typename Function>
__global__ void evaluate(Function function, std::uint64_t count, std::uint64_t* results) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    results[i] = function(i);
  }
}

template <typename Function>
bool equals_host(const char* name, std::uint64_t count, Function function) {
  DeviceArray<std::uint64_t> results(count);
  evaluate<<<kBlocks, kThreads>>>(function, count, results.data());
  require(cudaGetLastError(), name);
  const auto on_device = results.copy();
  std::uint64_t mismatches = 0, first = 0;
  for (std::uint64_t i = count; i-- > 0;) {
    if (function(i) == on_device[i]) continue;
    ++mismatches;
    first = i;
  }
  return report(name, count, mismatches, first);
}

constexpr std::uint32_t kPatternStride = 257;
constexpr std::uint64_t kPatterns = (kFloatInfinity + kPatternStride - 1) / kPatternStride;

/// Returns the scale bytes of a magnitude in all modes, for both elements.
struct Scales {
  __host__ __device__ std::uint64_t operator()(std::uint64_t i) const {
    const float amax = float_of(static_cast<std::uint32_t>(i) * kPatternStride);
    std::uint64_t bytes = 0;
    for (int mode = 0; mode < 4; ++mode) {
      bytes = bytes << 8 | scale_byte<E4M3>(amax, static_cast<ScalingMode>(mode));
      bytes = bytes << 8 | scale_byte<E5M2>(amax, static_cast<ScalingMode>(mode));
    }
    return bytes;
  }
};

struct FloatScales {
  __host__ __device__ std::uint64_t operator()(std::uint64_t i) const {
    const float amax = float_of(static_cast<std::uint32_t>(i) * kPatternStride);
    return std::uint64_t{bits_of(float_scale(amax))} << 32 | bits_of(inverse_float_scale(amax));
  }
};

/// Mixes the bits of a number (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014).
__host__ __device__ std::uint64_t split_mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

__host__ __device__ void add(std::uint64_t& checksum, std::uint8_t byte) {
  checksum = (checksum ^ byte) * 0x100000001B3ull;  // FNV-1a
}

/// Returns a checksum of the bytes that a random block becomes in all modes, for both elements.
struct BlockBytes {
  template <typename Element>
  __host__ __device__ static void add_block(std::uint64_t& checksum, const float* x) {
    for (int mode = 0; mode < 4; ++mode) {
      std::uint8_t elements[kBlock];
      add(checksum, quantize_block<Element>(x, kBlock, static_cast<ScalingMode>(mode), elements));
      for (const std::uint8_t element : elements) add(checksum, element);
    }
  }
  __host__ __device__ std::uint64_t operator()(std::uint64_t i) const {
    const std::uint64_t choice = split_mix(i);
    const std::uint32_t top = static_cast<std::uint32_t>(choice) % 255, spread = 1 + (choice >> 32) % 20;
    float x[kBlock];
    for (int j = 0; j < kBlock; ++j) {
      const std::uint64_t random = split_mix(i << 8 | static_cast<std::uint64_t>(j) | 1ull << 63);
      const std::uint32_t below = static_cast<std::uint32_t>(random >> 32) % spread;
      const std::uint32_t exponent = below > top ? 0 : top - below;
      x[j] = float_of((static_cast<std::uint32_t>(random) & 0x807fffffu) | exponent << kFloatMantissaBits);
    }
    if (choice >> 58 == 0) x[choice >> 52 & 31] = float_of(choice >> 57 & 1 ? kFloatInfinity : 0xffc00000u);
    std::uint64_t checksum = 0xCBF29CE484222325ull;
    add_block<E4M3>(checksum, x);
    add_block<E5M2>(checksum, x);
    return checksum;
  }
};

struct PackedOffset {
  static constexpr std::uint64_t kRows = 300, kColumns = 17;
  __host__ __device__ std::uint64_t operator()(std::uint64_t i) const {
    return packed_scale_offset(static_cast<std::int64_t>(i / kColumns), static_cast<std::int64_t>(i % kColumns),
                               kColumns);
  }
};

/// Returns 0 if this machine has a GPU for which there is code in this program, or else kSkipped.
int find_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    std::printf("skipped: no GPU (%s)\n", cudaGetErrorString(status));
    return kSkipped;
  }
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, sweep<Cast<E4M3>>);
  if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction) {
    std::printf("skipped: no code for %s, compute capability %d.%d\n", properties.name, properties.major,
                properties.minor);
    return kSkipped;
  }
  require(code, "cudaFuncGetAttributes");
  std::printf("%s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
  return 0;
}

int run() {
  if (const int status = find_gpu(); status != 0) return status;
  constexpr std::uint64_t kAll = 1ull << 32, kFinite = kFloatInfinity;
  bool equal = true;
  equal &= equals_hardware("cast_to<E4M3>, hardware, all float32", kAll, Cast<E4M3>{});
  equal &= equals_hardware("cast_to<E5M2>, hardware, all float32", kAll, Cast<E5M2>{});
  equal &= equals_hardware("value_of<E4M3>, hardware, all bytes", 256, Value<E4M3>{});
  equal &= equals_hardware("value_of<E5M2>, hardware, all bytes", 256, Value<E5M2>{});
  equal &= equals_hardware("value_of_scale, CUDA's, all bytes", 256, ScaleValue{});
  // CUDA's conversion to E8M0 is in hardware from compute capability 10.0 on. It ends at 2^127, while ceil goes on to
  // 2^128.
  equal &= equals_hardware("scale_byte, rceil, CUDA's E8M0, all magnitudes", kFinite, Rceil{});
  equal &= equals_hardware("scale_byte, floor, CUDA's E8M0, all magnitudes", kFinite, Floor{});
  equal &= equals_hardware("scale_byte, ceil, CUDA's E8M0, magnitudes to 2^127", 0x7f000001u, Ceil{});
  equal &= equals_host("scale_byte, all modes, host", kPatterns, Scales{});
  equal &= equals_host("float_scale, inverse_float_scale, host", kPatterns, FloatScales{});
  equal &= equals_host("quantize_block, all modes, host", 1u << 17, BlockBytes{});
  equal &= equals_host("packed_scale_offset, host", PackedOffset::kRows * PackedOffset::kColumns, PackedOffset{});
  return equal ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace tessera::mx

int main() { return tessera::mx::run(); }
