// Rows of `tessera bench gemm`, `grouped` and `attention`: products, whose work is multiplications and additions.
// Quantized weights exist already, as in training, which makes them once per step. `tessera bench quantize` times that.
#include <cmath>
#include <optional>

#include "app/bench/gpu_bench.h"
#include "ops/attention/mla_attention.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"

namespace tessera {
namespace {

/// A linear layer, or the layers of several experts.
struct Layer {
  std::int64_t num_rows, in, out;
  std::int64_t experts = 0;  // 0: a dense layer
  bool skewed = false;       // sizes of groups differ by up to 8 to 1; else they are equal

  std::string shape() const {
    if (experts == 0) return fmt::format("{}x{}x{}", num_rows, out, in);
    return fmt::format("E{} R{} {}->{} {}", experts, num_rows, in, out, skewed ? "skewed" : "equal");
  }
  Shape weight() const { return experts == 0 ? Shape{out, in} : Shape{experts, out, in}; }
  double flop() const { return 2.0 * static_cast<double>(num_rows) * static_cast<double>(in * out); }
};

/// Returns the sizes of the groups: multiples of 128, which the weight gradients of 8-bit operands need.
/// bench/peers/grouped_mm.py uses the same.
std::vector<std::int64_t> group_sizes(const Layer& layer) {
  std::vector<std::int64_t> sizes;
  const auto weight = [&](std::int64_t e) { return layer.skewed ? 1 + (5 * e + 3) % 8 : std::int64_t{1}; };
  std::int64_t sum = 0, left = layer.num_rows;
  for (std::int64_t e = 0; e < layer.experts; ++e) sum += weight(e);
  for (std::int64_t e = 0; e < layer.experts; ++e) {
    sizes.push_back(layer.num_rows / 128 * weight(e) / sum * 128);
    left -= sizes.back();
  }
  sizes.back() += left;
  return sizes;
}

/// Returns where the experts' rows begin; undefined for a dense layer.
Tensor offsets_of(GpuBench& bench, const Layer& layer) {
  if (layer.experts == 0) return {};
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t size : group_sizes(layer)) offsets.push_back(offsets.back() + size);
  return bench.ints(layer.experts + 1, [&](std::int64_t e) { return offsets[static_cast<std::size_t>(e)]; });
}

// These functions give the operators of ops/gemm/gemm.h, grouped_gemm.h and quantized_gemm.h one name per pass.

template <typename Operand, typename Weight>
void forward(const Context& op, const Operand& x, const Weight& w, const Tensor& offsets, const Tensor& y) {
  offsets.defined() ? grouped_linear_forward(op, x, w, offsets, y) : linear_forward(op, x, w, y);
}
template <typename Operand, typename Weight>
void dgrad(const Context& op, const Operand& d_y, const Weight& w, const Tensor& offsets, const Tensor& d_x) {
  offsets.defined() ? grouped_linear_dgrad(op, d_y, w, offsets, d_x) : linear_dgrad(op, d_y, w, d_x);
}
template <typename Operand>
void wgrad(const Context& op, const Operand& d_y, const Operand& x, const Tensor& offsets, const Tensor& d_w,
           Write write) {
  offsets.defined() ? grouped_linear_wgrad(op, d_y, x, offsets, d_w, write) : linear_wgrad(op, d_y, x, d_w, write);
}

const char* sign_of(Write write) { return write == Write::kAssign ? "=" : "+="; }

void in_bf16(GpuBench& bench, const Layer& layer) {
  const Shape x_shape{layer.num_rows, layer.in}, y_shape{layer.num_rows, layer.out};
  bench.row("bf16 fwd", layer.shape(), [&] {
    const Tensor x = bench.random(x_shape), w = bench.random(layer.weight()), y = bench.empty(y_shape, kBf16);
    const Tensor offsets = offsets_of(bench, layer);
    return Call{layer.flop(), [=](const Context& op) { forward(op, x, w, offsets, y); }};
  });
  bench.row("bf16 dgrad", layer.shape(), [&] {
    const Tensor d_y = bench.random(y_shape), w = bench.random(layer.weight()), d_x = bench.empty(x_shape, kBf16);
    const Tensor offsets = offsets_of(bench, layer);
    return Call{layer.flop(), [=](const Context& op) { dgrad(op, d_y, w, offsets, d_x); }};
  });
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    bench.row(fmt::format("bf16 wgrad {}", sign_of(write)), layer.shape(), [&] {
      const Tensor d_y = bench.random(y_shape), x = bench.random(x_shape), d_w = bench.random(layer.weight(), kFloat);
      const Tensor offsets = offsets_of(bench, layer);
      return Call{layer.flop(), [=](const Context& op) { wgrad(op, d_y, x, offsets, d_w, write); }};
    });
  }
}

mx::Quantized random_rows(GpuBench& bench, const Shape& shape, const mx::Format& format) {
  const mx::Quantized rows = bench.quantized(shape, format);
  quantize(bench.context(), bench.random(shape), rows, {});
  return rows;
}
mx::Quantized random_columns(GpuBench& bench, const Shape& shape, const mx::Format& format) {
  const mx::Quantized columns = bench.quantized(mx::transposed(shape), format);
  quantize(bench.context(), bench.random(shape), {}, columns);
  return columns;
}

/// Returns a weight in the form that products read in training, which makes it once per step.
QuantizedWeight random_weight(GpuBench& bench, const Shape& shape, const mx::Format& format) {
  const QuantizedWeight w = bench.weight(shape, format);
  quantize_weight(bench.context(), bench.random(shape), format, w);
  return w;
}

struct Precision {
  const char* name;
  mx::Format activation, weight;
  std::optional<mx::Format> wgrad_gradient, wgrad_input;  // none: wgrad is that of another precision
};
/// DeepSeek-V3's recipe; MXFP8 with scales that 128 or 256 numbers share; MXFP8 as specified, with blocks of 32.
constexpr Precision kPrecisions[] = {{"fp8", kFloatRows, kFloatSquare, kFloatRows, kFloatRows},
                                     {"mxfp8/128", kWide, kWideSquare, kWide, kWideSquare},
                                     {"mxfp8/256", kWidest, kWidestSquare, {}, {}},
                                     {"mxfp8/32", kMxfp8, kMxfp8, kMxfp8, kMxfp8}};

void in_8_bits(GpuBench& bench, const Layer& layer, const Precision& precision) {
  constexpr double kTimesCeiling = 2.0;
  const Shape x_shape{layer.num_rows, layer.in}, y_shape{layer.num_rows, layer.out};
  const std::string name = precision.name;
  const auto weight = [&] { return random_weight(bench, layer.weight(), precision.weight); };
  bench.row(name + " fwd", layer.shape(), [&] {
    const mx::Quantized x = random_rows(bench, x_shape, precision.activation);
    const QuantizedWeight w = weight();
    const Tensor offsets = offsets_of(bench, layer), y = bench.empty(y_shape, kBf16);
    return Call{layer.flop(), [=](const Context& op) { forward(op, x, w, offsets, y); }, kTimesCeiling};
  });
  bench.row(name + " dgrad", layer.shape(), [&] {
    const mx::Quantized d_y = random_rows(bench, y_shape, precision.activation);
    const QuantizedWeight w = weight();
    const Tensor offsets = offsets_of(bench, layer), d_x = bench.empty(x_shape, kBf16);
    return Call{layer.flop(), [=](const Context& op) { dgrad(op, d_y, w, offsets, d_x); }, kTimesCeiling};
  });
  if (!precision.wgrad_input) return;
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    bench.row(fmt::format("{} wgrad {}", name, sign_of(write)), layer.shape(), [&] {
      const mx::Quantized d_y = random_columns(bench, y_shape, *precision.wgrad_gradient);
      const mx::Quantized x = random_columns(bench, x_shape, *precision.wgrad_input);
      const Tensor offsets = offsets_of(bench, layer), d_w = bench.random(layer.weight(), kFloat);
      return Call{layer.flop(), [=](const Context& op) { wgrad(op, d_y, x, offsets, d_w, write); }, kTimesCeiling};
    });
  }
}

void time_layer(GpuBench& bench, const Layer& layer) {
  in_bf16(bench, layer);
  for (const Precision& precision : kPrecisions) in_8_bits(bench, layer, precision);
}

}  // namespace

void time_gemms(GpuBench& bench) {
  time_layer(bench, {.num_rows = 8192, .in = 8192, .out = 8192});
  time_layer(bench, {.num_rows = 16384, .in = 2048, .out = 2816});
}

void time_grouped_gemms(GpuBench& bench) {
  for (const bool skewed : {false, true}) {
    time_layer(bench, {.num_rows = 98304, .in = 2048, .out = 1408, .experts = 8, .skewed = skewed});
    time_layer(bench, {.num_rows = 98304, .in = 1408, .out = 2048, .experts = 8, .skewed = skewed});
    time_layer(bench, {.num_rows = 65536, .in = 7168, .out = 2048, .experts = 32, .skewed = skewed});
    time_layer(bench, {.num_rows = 16384, .in = 7168, .out = 2048, .experts = 32, .skewed = skewed});
  }
}

void time_attention(GpuBench& bench) {
  struct Size {
    std::int64_t seqs, heads, length;
  };
  for (const auto& [seqs, heads, length] : {Size{4, 16, 4096}, Size{1, 128, 8192}, Size{2, 16, 8192}}) {
    const MlaDims dims{.num_seqs = seqs,
                       .seq_len = length,
                       .num_heads = heads,
                       .dim_nope = 128,
                       .dim_rope = 64,
                       .dim_v = 128,
                       .scale = 1.0f / std::sqrt(192.0f),
                       .whole_sequences = true};
    const std::int64_t tokens = seqs * length, dim_qk = dims.dim_nope + dims.dim_rope;
    const Shape q_shape{tokens, heads * dim_qk}, kv_shape{tokens, heads * (dims.dim_nope + dims.dim_v)};
    const Shape rope_shape{tokens, dims.dim_rope}, o_shape{tokens, heads * dims.dim_v};
    const std::string shape = fmt::format("B{} H{} S{}", seqs, heads, length);
    // Only the lower triangle counts. Forward: q · kᵀ and p · v. Backward: q · kᵀ, d_q, d_k, d_o · vᵀ and d_v.
    const auto scores = static_cast<double>(seqs * heads * length * length);
    const double forward_flop = scores * static_cast<double>(dim_qk + dims.dim_v),
                 backward_flop = scores * static_cast<double>(3 * dim_qk + 2 * dims.dim_v);
    const auto operands_of = [&] {
      return MlaOperands{.q = bench.random(q_shape),
                         .kv = bench.random(kv_shape),
                         .k_rope = bench.random(rope_shape),
                         .doc_start_T = bench.ints(tokens, [](std::int64_t) { return 0; })};
    };
    bench.row("attention fwd", shape, [&] {
      const MlaOperands operands = operands_of();
      const Tensor o = bench.empty(o_shape, kBf16), lse = bench.empty({tokens, heads}, kFloat);
      return Call{forward_flop, [=](const Context& op) { mla_attention_forward(op, dims, operands, o, lse); }};
    });
    bench.row("attention bwd", shape, [&] {
      const MlaOperands operands = operands_of();
      const Tensor o = bench.empty(o_shape, kBf16), lse = bench.empty({tokens, heads}, kFloat);
      mla_attention_forward(bench.context(), dims, operands, o, lse);
      const Tensor d_o = bench.random(o_shape), d_q = bench.empty(q_shape, kBf16), d_kv = bench.empty(kv_shape, kBf16);
      const Tensor d_k_rope = bench.empty(rope_shape, kBf16);
      return Call{backward_flop, [=](const Context& op) {
                    mla_attention_backward(op, dims, operands, o, lse, d_o, d_q, d_kv, d_k_rope);
                  }};
    });
  }
}

}  // namespace tessera
