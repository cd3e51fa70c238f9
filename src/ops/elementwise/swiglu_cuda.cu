#include "ops/elementwise/swiglu.h"
#include "ops/kit/formulas.cuh"
#include "ops/quantize/tile_quantizer.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct Forward {
  using Number = T;
  static constexpr int kInFlight = 4, kBlocksPerSm = sizeof(T) == 2 ? 4 : 2;
  template <int kCount>
  struct Input {
    Lanes<T, kCount> gate, up;
  };

  const T* h;
  std::int64_t width;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t, std::int64_t row, std::int64_t column) const {
    const T* at = h + row * 2 * width + column;
    return {get_lanes<kCount>(at), get_lanes<kCount>(at + width)};
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const auto&, Lanes<T, kCount> (&out)[1], float&) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[0].x[i] = from_float<T>(swiglu_of(to_float(input.gate.x[i]), to_float(input.up.x[i])));
    }
  }
};

/// Produces d_gate, d_up and weight · a. The sums over rows are those of d_a · a. Without weights, each weight is 1.
template <typename T>
struct Backward {
  using Number = T;
  static constexpr int kOutputs = 3, kInFlight = 1, kTeams = 2;
  static constexpr int kBlocksPerSm = 2;
  static constexpr bool kSums = true;
  template <int kCount>
  struct Input {
    Lanes<T, kCount> d_a, gate, up;
    float weight;
  };

  const T *d_a, *h;
  const float* weights;
  std::int64_t width;

  template <int kCount>
  __device__ Input<kCount> load(std::int64_t, std::int64_t row, std::int64_t column) const {
    const T* at = h + row * 2 * width + column;
    return {get_lanes<kCount>(d_a + row * width + column), get_lanes<kCount>(at), get_lanes<kCount>(at + width),
            weights == nullptr ? 1.0f : weights[row]};
  }
  template <int kCount>
  __device__ void compute(const Input<kCount>& input, const auto&, Lanes<T, kCount> (&out)[3], float& sum) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float gate = to_float(input.gate.x[i]), up = to_float(input.up.x[i]);
      const float gradient = to_float(input.d_a.x[i]), s = sigmoid(gate), silu = gate * s;
      const float a = silu * up, weighted = input.weight * gradient;
      sum += gradient * a;
      out[0].x[i] = from_float<T>(weighted * up * (s + silu * (1.0f - s)));
      out[1].x[i] = from_float<T>(weighted * silu);
      out[2].x[i] = from_float<T>(input.weight * a);
    }
  }
};

__global__ void add_sums_kernel(const float* sums, std::int64_t num_tiles, std::int64_t num_rows,
                                const std::int32_t* num_rows_1, float* d_weights) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= (num_rows_1 == nullptr ? num_rows : *num_rows_1)) return;
  float sum = 0.0f;
  for (std::int64_t tile = 0; tile < num_tiles; ++tile) sum += sums[tile * num_rows + row];
  d_weights[row] = sum;
}

/// Returns whether the halves of a matrix [R, 2 · width] have no block in common.
bool halves_apart(const GemmOperand& x, std::int64_t width) {
  // The blocks of columns run along the other dim.
  return (!x.rows.defined() || width % x.rows.format.along == 0) &&
         (!x.columns.defined() || width % x.columns.format.across == 0);
}

void backward(const Context& op, const Tensor& d_a_RF, const Tensor& h_R2F, const Tensor& weights_R,
              const Tensor& num_rows_1, const GemmOperand& d_h_R2F, const GemmOperand& a_RF,
              const Tensor& d_weights_R) {
  const std::int64_t num_rows = d_a_RF.dim(0), width = d_a_RF.dim(1), num_tiles = (width + kSide - 1) / kSide;
  const ArenaScope scope(*op.arena);
  Tensor sums;
  if (d_weights_R.defined()) sums = op.arena->allocate({num_tiles, num_rows}, DType::kFloat32);
  // If a block of numbers lies in both halves of d_h, d_h is quantized after all of it is computed.
  GemmOperand d_h = d_h_R2F;
  if (!halves_apart(d_h_R2F, width)) {
    if (!d_h.plain.defined()) d_h.plain = op.arena->allocate({num_rows, 2 * width}, h_R2F.dtype());
    d_h.rows = d_h.columns = {};
  }
  if (op.measuring() || num_rows == 0 || width == 0) return;
  const std::int32_t* num_computed = num_rows_1.defined() ? numbers<const std::int32_t>(num_rows_1) : nullptr;
  for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    const TileArgs<Backward<T>> args{
        .producer = {.d_a = numbers<T>(d_a_RF),
                     .h = numbers<T>(h_R2F),
                     .weights = weights_R.defined() ? numbers<const float>(weights_R) : nullptr,
                     .width = width},
        .outputs = {tile_outputs<T>(d_h), tile_outputs<T>(d_h, width), tile_outputs<T>(a_RF)},
        .num_rows = num_rows,
        .length = width,
        .num_rows_1 = num_computed,
        .sums = numbers<float>(sums)};
    run_tiles(op, args, in_lanes(d_a_RF, h_R2F, d_h.plain, a_RF.plain));
  });
  if (d_weights_R.defined()) {
    add_sums_kernel<<<static_cast<unsigned>((num_rows + kThreads - 1) / kThreads), kThreads, 0, stream_of(op)>>>(
        numbers<const float>(sums), num_tiles, num_rows, num_computed, numbers<float>(d_weights_R));
  }
  if (d_h_R2F.quantized() && !d_h.quantized())
    quantize_first_rows(op, d_h.plain, d_h_R2F.rows, d_h_R2F.columns, num_rows_1);
}

}  // namespace

void swiglu_forward(const Context& op, const Tensor& h_R2F, const GemmOperand& a_RF, const Tensor& num_rows_1) {
  if (op.measuring()) return;
  const std::int64_t width = h_R2F.dim(1) / 2;
  for_float_type(h_R2F.dtype(), [&]<typename T>(T) {
    const TileArgs<Forward<T>> args{
        .producer = {.h = numbers<T>(h_R2F), .width = width},
        .outputs = {tile_outputs<T>(a_RF)},
        .num_rows = h_R2F.dim(0),
        .length = width,
        .num_rows_1 = num_rows_1.defined() ? numbers<const std::int32_t>(num_rows_1) : nullptr};
    run_tiles(op, args, width % kLanes == 0 && in_lanes(h_R2F, a_RF.plain));
  });
}

void swiglu_backward(const Context& op, const Tensor& d_a_RF, const Tensor& h_R2F, const GemmOperand& d_h_R2F,
                     const GemmOperand& a_RF) {
  backward(op, d_a_RF, h_R2F, {}, {}, d_h_R2F, a_RF, {});
}

void swiglu_backward_weighted(const Context& op, const Tensor& d_a_RF, const Tensor& h_R2F, const Tensor& weights_R,
                              const Tensor& num_rows_1, const GemmOperand& d_h_R2F, const GemmOperand& weighted_a_RF,
                              const Tensor& d_weights_R) {
  backward(op, d_a_RF, h_R2F, weights_R, num_rows_1, d_h_R2F, weighted_a_RF, d_weights_R);
}

}  // namespace tessera::cuda
