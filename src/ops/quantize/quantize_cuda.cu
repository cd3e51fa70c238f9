#include "ops/kit/reduce.cuh"
#include "ops/quantize/quantize.h"
#include "ops/quantize/tile_quantizer.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kErrorBlocks = 1024;

/// Produces the numbers of x unchanged. x is a matrix or a stack of matrices.
template <typename T>
struct Plain {
  using Number = T;
  static constexpr int kInFlight = 8, kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
  template <int kCount>
  using Input = Lanes<T, kCount>;

  const T* x;
  std::int64_t matrix_stride, stride;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
    return get_lanes<kCount>(x + matrix * matrix_stride + row * stride + column);
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const auto&, Lanes<T, kCount> (&out)[1], float&) const {
    out[0] = input;
  }
};

template <typename T>
struct Widened : Plain<T> {
  using Wide = void;
};

/// Returns the producer for x, a matrix or a stack of matrices.
template <typename T>
Plain<T> plain(const Tensor& x) {
  const bool stack = x.num_dims() == 3;
  return {.x = numbers<T>(x), .matrix_stride = stack ? x.stride() : 0, .stride = stack ? x.dim(2) : x.stride()};
}

/// A quantized matrix, or a stack of them, as kernels read it.
struct QuantizedInput {
  const std::uint8_t* elements;
  const void* scales;
  mx::Format format;
  std::uint32_t length, rows_per_matrix, scales_per_row, scale_rows_per_matrix;

  explicit QuantizedInput(const mx::Quantized& x)
      : elements(x.element_bytes()), scales(x.scales.raw()), format(x.format) {
    const int last = x.elements.num_dims() - 1;
    TESSERA_CHECK(x.elements.num_elements() <= kMost32BitItems, "{}", x.elements.shape().to_string());
    length = static_cast<std::uint32_t>(x.elements.dim(last));
    rows_per_matrix = static_cast<std::uint32_t>(x.elements.dim(last - 1));
    scales_per_row = static_cast<std::uint32_t>(x.scales.dim(last));
    scale_rows_per_matrix = static_cast<std::uint32_t>(x.scales.dim(last - 1));
  }

  /// Returns the scale of a number. `row` counts the rows of all matrices.
  __device__ float scale(std::uint32_t row, std::uint32_t column) const {
    std::uint32_t scale_row = row;
    if (format.scale_height() != 1) {
      scale_row = row / rows_per_matrix * scale_rows_per_matrix + row % rows_per_matrix / format.scale_height();
    }
    const std::size_t at = std::size_t{scale_row} * scales_per_row + column / format.scale_width();
    return format.scale_type == mx::ScaleType::kE8M0 ? mx::value_of_scale(static_cast<const std::uint8_t*>(scales)[at])
                                                     : static_cast<const float*>(scales)[at];
  }
  /// Loads kCount numbers of a row, which lie in one block.
  template <int kCount>
  __device__ void load(std::uint32_t row, std::uint32_t column, float (&y)[kCount]) const {
    struct alignas(kCount) Bytes {
      std::uint8_t x[kCount];
    };
    const auto bytes = *reinterpret_cast<const Bytes*>(elements + std::size_t{row} * length + column);
    const float factor = scale(row, column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      y[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(bytes.x[i], __NV_E4M3))) * factor;
    }
  }
};

template <typename T, int kCount>
__global__ void dequantize_kernel(const QuantizedInput x, T* y, std::uint32_t groups_per_row, std::uint32_t groups) {
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < groups; i += gridDim.x * kThreads) {
    const std::uint32_t row = i / groups_per_row, column = i % groups_per_row * kCount;
    float numbers[kCount];
    x.load(row, column, numbers);
    store_lanes(numbers, y + std::size_t{row} * x.length + column);
  }
}

template <typename T, int kCount>
__global__ void error_kernel(const T* x, std::int64_t stride, const QuantizedInput q, std::uint32_t groups_per_row,
                             std::uint32_t num_rows, const std::int32_t* num_rows_1, double2* parts) {
  const std::uint32_t groups = groups_per_row * (num_rows_1 == nullptr ? num_rows : *num_rows_1);
  double2 sums{0.0, 0.0};
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < groups; i += gridDim.x * kThreads) {
    const std::uint32_t row = i / groups_per_row, column = i % groups_per_row * kCount;
    float number[kCount], value[kCount];
    load_lanes(x + row * stride + column, number);
    q.load(row, column, value);
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      const double difference = static_cast<double>(number[lane]) - static_cast<double>(value[lane]);
      sums.x += static_cast<double>(number[lane]) * static_cast<double>(number[lane]);
      sums.y += difference * difference;
    }
  }
  __shared__ double slots[2][kThreads / kWarp];
  sums = {sum_of_block(sums.x, slots[0]), sum_of_block(sums.y, slots[1])};
  if (threadIdx.x == 0) parts[blockIdx.x] = sums;
}

__global__ void add_parts_kernel(const double2* parts, double* sums_2) {
  double2 sums{0.0, 0.0};
  for (int i = threadIdx.x; i < kErrorBlocks; i += kThreads) sums.x += parts[i].x, sums.y += parts[i].y;
  __shared__ double slots[2][kThreads / kWarp];
  sums = {sum_of_block(sums.x, slots[0]), sum_of_block(sums.y, slots[1])};
  if (threadIdx.x == 0) sums_2[0] += sums.x, sums_2[1] += sums.y;
}

/// Returns whether rows can be read in groups of 8 numbers, each within one block, instead of number by number.
bool in_groups(const Tensor& x) { return in_lanes(x.num_dims() == 3 ? x.reshape({x.dim(0) * x.dim(1), x.dim(2)}) : x); }

}  // namespace

void quantize_first_rows(const Context& op, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns,
                         const Tensor& num_rows_1) {
  if (op.measuring() || (!rows.defined() && !columns.defined())) return;
  const bool stack = x.num_dims() == 3;
  for_float_type(x.dtype(), [&]<typename T>(T) {
    TileArgs<Plain<T>> args{.producer = plain<T>(x),
                            .outputs = {{.rows = tile_output(rows), .columns = tile_output(columns)}},
                            .num_matrices = stack ? x.dim(0) : 1,
                            .num_rows = x.dim(stack ? 1 : 0),
                            .length = x.dim(stack ? 2 : 1),
                            .num_rows_1 = num_rows_1.defined() ? numbers<const std::int32_t>(num_rows_1) : nullptr};
    run_tiles(op, args, in_groups(x));
  });
}

void quantize(const Context& op, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns) {
  quantize_first_rows(op, x, rows, columns, {});
}

void quantize_weight(const Context& op, const Tensor& w, const mx::Format& format, const QuantizedWeight& quantized) {
  if (op.measuring()) return;
  const bool stack = w.num_dims() == 3;
  for_float_type(w.dtype(), [&]<typename T>(T) {
    TileArgs<Widened<T>> args{.producer = {plain<T>(w)},
                              .outputs = {{.rows = tile_output_wide(quantized.wide_rows, format),
                                           .columns = tile_output_wide(quantized.wide_columns, format)}},
                              .num_matrices = stack ? w.dim(0) : 1,
                              .num_rows = w.dim(stack ? 1 : 0),
                              .length = w.dim(stack ? 2 : 1)};
    run_tiles(op, args, in_groups(w));
  });
}

void dequantize(const Context& op, const mx::Quantized& x, const Tensor& y) {
  if (op.measuring() || y.num_elements() == 0) return;
  for_lanes(in_groups(y), [&](auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    const auto groups = static_cast<std::uint32_t>(y.num_elements() / kCount);
    for_float_type(y.dtype(), [&]<typename T>(T) {
      dequantize_kernel<T, kCount><<<grid_for(op, groups, kThreads), kThreads, 0, stream_of(op)>>>(
          QuantizedInput(x), numbers<T>(y), static_cast<std::uint32_t>(y.dim(y.num_dims() - 1) / kCount), groups);
    });
  });
}

void quantization_error(const Context& op, const Tensor& x, const mx::Quantized& q, const Tensor& sums_2,
                        const Tensor& num_rows_1) {
  const ArenaScope scope(*op.arena);
  const Tensor parts = op.arena->allocate({kErrorBlocks, 2}, DType::kFloat64);
  if (op.measuring() || x.num_elements() == 0) return;
  const std::int64_t length = x.dim(x.num_dims() - 1);
  for_lanes(in_groups(x), [&](auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    for_float_type(x.dtype(), [&]<typename T>(T) {
      error_kernel<T, kCount><<<kErrorBlocks, kThreads, 0, stream_of(op)>>>(
          numbers<const T>(x), x.num_dims() == 2 ? x.stride() : length, QuantizedInput(q),
          static_cast<std::uint32_t>(length / kCount), static_cast<std::uint32_t>(x.num_elements() / length),
          num_rows_1.defined() ? numbers<const std::int32_t>(num_rows_1) : nullptr, static_cast<double2*>(parts.raw()));
    });
  });
  add_parts_kernel<<<1, kThreads, 0, stream_of(op)>>>(static_cast<const double2*>(parts.raw()),
                                                      numbers<double>(sums_2));
}

}  // namespace tessera::cuda
