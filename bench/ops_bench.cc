// Measures each operator with Google Benchmark, at the debug model's sizes (2048 tokens = 4 sequences of 512). Rates
// are FLOP (2 per multiply-add; in attention only the lower triangle counts), or the bytes that must be read and
// written at least.
#include <benchmark/benchmark.h>

#include <cstring>

#include "ops/attention/mla_attention.h"
#include "ops/attention/rope.h"
#include "ops/elementwise/swiglu.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/loss/cross_entropy.h"
#include "ops/norm/rmsnorm.h"
#include "ops/optimizer/adamw.h"
#include "ops/routing/permute.h"
#include "ops/routing/router.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr std::int64_t kTokens = 2048, kSeqLen = 512, kDim = 256, kHeads = 16, kVocab = 2048;
constexpr std::int64_t kExperts = 8, kTopK = 3, kRows = kTokens * kTopK, kInter = 256;

/// Provides memory, GEMM kernels and random operands of one benchmark.
class Bench {
 public:
  Bench() : arena_(std::size_t{1} << 30) {}
  Context context() { return {.arena = &arena_}; }

  Tensor random(Shape shape, DType dtype) {
    const Tensor tensor = arena_.allocate(shape, dtype);
    const Philox philox(1, stream_++);
    for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
      const float value = static_cast<float>(philox.uniform(static_cast<std::uint64_t>(i))) - 0.5f;
      if (dtype == DType::kFloat32) {
        tensor.data<float>()[i] = value;
      } else {
        tensor.data<BFloat16>()[i] = BFloat16(value);
      }
    }
    return tensor;
  }
  Tensor floats(Shape shape) { return random(shape, DType::kFloat32); }
  Tensor ints(Shape shape) {
    const Tensor tensor = arena_.allocate(shape, DType::kInt32);
    std::fill_n(tensor.data<std::int32_t>(), tensor.num_elements(), 0);
    return tensor;
  }

 private:
  Arena arena_;
  std::uint32_t stream_ = 0;
};

DType dtype_of(const benchmark::State& state) { return state.range(0) == 0 ? DType::kFloat32 : DType::kBFloat16; }

template <typename Operator>
void run(benchmark::State& state, double flop, double bytes, Operator&& op) {
  for (auto _ : state) op();
  state.SetLabel(state.range(0) == 0 ? "float32" : "bfloat16");
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  if (flop > 0) state.counters["FLOP/s"] = benchmark::Counter(flop, rate);
  if (bytes > 0) state.counters["B/s"] = benchmark::Counter(bytes, rate);
}

double bytes_of(std::initializer_list<Tensor> tensors) {
  double sum = 0;
  for (const Tensor& tensor : tensors) sum += static_cast<double>(tensor.num_bytes());
  return sum;
}

void gemm_forward(benchmark::State& state) {
  Bench bench;
  const std::int64_t m = state.range(1), n = state.range(2);
  const Tensor x = bench.random({kTokens, n}, dtype_of(state)), w = bench.random({m, n}, dtype_of(state));
  const Tensor y = bench.random({kTokens, m}, dtype_of(state));
  run(state, 2.0 * kTokens * static_cast<double>(m * n), 0, [&] { linear_forward(bench.context(), x, w, y); });
}

void gemm_wgrad(benchmark::State& state) {
  Bench bench;
  const std::int64_t m = state.range(1), n = state.range(2);
  const Tensor x = bench.random({kTokens, n}, dtype_of(state)), d_y = bench.random({kTokens, m}, dtype_of(state));
  const Tensor d_w = bench.floats({m, n});
  run(state, 2.0 * kTokens * static_cast<double>(m * n), 0, [&] { linear_wgrad(bench.context(), d_y, x, d_w); });
}

/// Measures the library at a size that suits it, as the machine's peak.
void gemm_peak(benchmark::State& state) {
  Bench bench;
  constexpr std::int64_t kSize = 2048;
  const Tensor a = bench.random({kSize, kSize}, dtype_of(state)), b = bench.random({kSize, kSize}, dtype_of(state));
  const Tensor c = bench.random({kSize, kSize}, dtype_of(state));
  run(state, 2.0 * kSize * kSize * kSize, 0, [&] { linear_forward(bench.context(), a, b, c); });
}

struct GroupedOperands {
  Tensor x, w, y, offsets, d_w;

  GroupedOperands(Bench& bench, DType dtype)
      : x(bench.random({kRows, kDim}, dtype)),
        w(bench.random({kExperts, 2 * kInter, kDim}, dtype)),
        y(bench.random({kRows, 2 * kInter}, dtype)),
        offsets(bench.ints({kExperts + 1})),
        d_w(bench.floats({kExperts, 2 * kInter, kDim})) {
    for (std::int64_t e = 0; e <= kExperts; ++e) {
      offsets.data<std::int32_t>()[e] = static_cast<std::int32_t>(kRows * e / kExperts);
    }
  }
  static constexpr double kFlop = 2.0 * kRows * kDim * 2 * kInter;
};

void grouped_forward(benchmark::State& state) {
  Bench bench;
  const GroupedOperands o(bench, dtype_of(state));
  run(state, o.kFlop, 0, [&] { grouped_linear_forward(bench.context(), o.x, o.w, o.offsets, o.y); });
}
void grouped_dgrad(benchmark::State& state) {
  Bench bench;
  const GroupedOperands o(bench, dtype_of(state));
  run(state, o.kFlop, 0, [&] { grouped_linear_dgrad(bench.context(), o.y, o.w, o.offsets, o.x); });
}
void grouped_wgrad(benchmark::State& state) {
  Bench bench;
  const GroupedOperands o(bench, dtype_of(state));
  run(state, o.kFlop, 0, [&] { grouped_linear_wgrad(bench.context(), o.y, o.x, o.offsets, o.d_w); });
}

struct AttentionOperands {
  MlaDims dims{.num_seqs = kTokens / kSeqLen,
               .seq_len = kSeqLen,
               .num_heads = kHeads,
               .dim_nope = 128,
               .dim_rope = 64,
               .dim_v = 128,
               .scale = 0.07f};
  MlaOperands in;
  Tensor o, lse, d_q, d_kv, d_k_rope;

  AttentionOperands(Bench& bench, DType dtype) {
    in = {.q = bench.random({kTokens, kHeads * 192}, dtype),
          .kv = bench.random({kTokens, kHeads * 256}, dtype),
          .k_rope = bench.random({kTokens, 64}, dtype),
          .doc_start_T = bench.ints({kTokens})};
    o = bench.random({kTokens, kHeads * 128}, dtype);
    lse = bench.floats({kTokens, kHeads});
    d_q = bench.random(in.q.shape(), dtype);
    d_kv = bench.random(in.kv.shape(), dtype);
    d_k_rope = bench.random(in.k_rope.shape(), dtype);
    mla_attention_forward(bench.context(), dims, in, o, lse);
  }
  /// The multiply-adds of one score or one value number, over the lower triangle.
  static constexpr double kPairs = static_cast<double>(kTokens) * kSeqLen / 2 * kHeads;
};

void attention_forward(benchmark::State& state) {
  Bench bench;
  const AttentionOperands a(bench, dtype_of(state));
  run(state, 2 * a.kPairs * (192 + 128), 0, [&] { mla_attention_forward(bench.context(), a.dims, a.in, a.o, a.lse); });
}
void attention_backward(benchmark::State& state) {
  Bench bench;
  const AttentionOperands a(bench, dtype_of(state));
  run(state, 2 * a.kPairs * (3 * 192 + 2 * 128), 0,
      [&] { mla_attention_backward(bench.context(), a.dims, a.in, a.o, a.lse, a.o, a.d_q, a.d_kv, a.d_k_rope); });
}

void norm_forward(benchmark::State& state) {
  Bench bench;
  const DType dtype = dtype_of(state);
  const Tensor x = bench.random({kTokens, kDim}, dtype), w = bench.random({kDim}, dtype),
               y = bench.random({kTokens, kDim}, dtype);
  const Tensor rstd = bench.floats({kTokens});
  run(state, 0, bytes_of({x, y}), [&] { rmsnorm_forward(bench.context(), x, w, 1e-5f, y, rstd); });
}
void norm_backward(benchmark::State& state) {
  Bench bench;
  const DType dtype = dtype_of(state);
  const Tensor x = bench.random({kTokens, kDim}, dtype), w = bench.random({kDim}, dtype),
               d_y = bench.random({kTokens, kDim}, dtype);
  const Tensor rstd = bench.floats({kTokens}), d_x = bench.random({kTokens, kDim}, dtype), d_w = bench.floats({kDim});
  run(state, 0, bytes_of({x, d_y, d_x}),
      [&] { rmsnorm_backward(bench.context(), d_y, x, w, rstd, d_x, Write::kAssign, d_w); });
}
void rope_queries(benchmark::State& state) {
  Bench bench;
  const Tensor q = bench.random({kTokens, kHeads * 192}, dtype_of(state));
  const Tensor positions = bench.ints({kTokens}), cos = bench.floats({kSeqLen, 32}), sin = bench.floats({kSeqLen, 32});
  const double rotated = 2.0 * kTokens * kHeads * 64 * static_cast<double>(size_of(q.dtype()));
  run(state, 0, rotated,
      [&] { rope(bench.context(), q, kHeads, 64, positions, cos, sin, RopeDirection::kForward, q); });
}
void swiglu(benchmark::State& state) {
  Bench bench;
  const Tensor h = bench.random({kRows, 2 * kInter}, dtype_of(state)),
               a = bench.random({kRows, kInter}, dtype_of(state));
  run(state, 0, bytes_of({h, a}), [&] { swiglu_forward(bench.context(), h, a); });
}
void swiglu_gradient(benchmark::State& state) {
  Bench bench;
  const Tensor h = bench.random({kRows, 2 * kInter}, dtype_of(state)),
               a = bench.random({kRows, kInter}, dtype_of(state));
  const Tensor d_h = bench.random(h.shape(), dtype_of(state)), d_a = bench.random(a.shape(), dtype_of(state));
  run(state, 0, bytes_of({h, a, d_h, d_a}), [&] { swiglu_backward(bench.context(), d_a, h, d_h, a); });
}
void cross_entropy_chunk(benchmark::State& state) {
  Bench bench;
  const Tensor logits = bench.floats({512, kVocab}), losses = bench.floats({512}), labels = bench.ints({512});
  const Tensor d_logits = bench.random({512, kVocab}, dtype_of(state)), sums = bench.floats({1, 512, 3});
  run(state, 0, bytes_of({logits, d_logits}), [&] {
    cross_entropy_sums(bench.context(), logits, labels, 0, sums[0]);
    cross_entropy(bench.context(), sums, logits, labels, 0, 1.0f, losses, d_logits);
  });
}
void router(benchmark::State& state) {
  Bench bench;
  const Tensor logits = bench.floats({kTokens, kExperts}), bias = bench.floats({kExperts});
  const RouterOutputs outputs{.scores_TE = bench.floats({kTokens, kExperts}),
                              .expert_ids_TK = bench.ints({kTokens, kTopK}),
                              .weights_TK = bench.floats({kTokens, kTopK}),
                              .counts_E = bench.ints({kExperts}),
                              .balance_f_BE = {}};
  run(state, 0, bytes_of({logits, outputs.scores_TE, outputs.expert_ids_TK, outputs.weights_TK}),
      [&] { router_forward(bench.context(), {.top_k = kTopK}, logits, bias, outputs); });
}
void combine(benchmark::State& state) {
  Bench bench;
  const Tensor x = bench.random({kRows, kDim}, dtype_of(state)), y = bench.random({kTokens, kDim}, dtype_of(state));
  const Tensor rows = bench.ints({kTokens, kTopK}), weights = bench.floats({kTokens, kTopK});
  for (std::int64_t i = 0; i < kRows; ++i) rows.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 5 % kRows);
  run(state, 0, bytes_of({x, y}), [&] { combine_rows(bench.context(), x, rows, weights, y, Write::kAssign); });
}
void adamw_step(benchmark::State& state) {
  Bench bench;
  constexpr std::int64_t kSize = 1 << 24;
  const Tensor g = bench.floats({kSize}), m = bench.floats({kSize}), v = bench.floats({kSize}),
               w = bench.floats({kSize});
  std::fill_n(v.data<float>(), kSize, 0.01f);
  const Tensor shadow = state.range(0) == 0 ? Tensor() : bench.random({kSize}, DType::kBFloat16);
  const AdamWOptions options{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};
  const AdamWStep step = adamw_step(options, 1e-3f, 10);
  const Tensor step_S = bench.floats({AdamWStep::kNumbers});
  std::memcpy(step_S.raw(), &step, sizeof step);
  run(state, 0, kSize * (7 * 4 + (shadow.defined() ? 2 : 0)),
      [&] { adamw(bench.context(), options, step_S, g, m, v, w, shadow); });
}

void both_types(benchmark::internal::Benchmark* b) { b->Arg(0)->Arg(1); }
/// Lists [out, in] of the debug model's linear layers: wq, wkv_b, wo, output.
void linear_layers(benchmark::internal::Benchmark* b) {
  for (const std::int64_t dtype : {0, 1}) {
    b->Args({dtype, 3072, 256})->Args({dtype, 4096, 512})->Args({dtype, 256, 2048})->Args({dtype, 2048, 256});
  }
}

BENCHMARK(gemm_peak)->Apply(both_types)->UseRealTime();
BENCHMARK(gemm_forward)->Apply(linear_layers)->UseRealTime();
BENCHMARK(gemm_wgrad)->Apply(linear_layers)->UseRealTime();
BENCHMARK(grouped_forward)->Apply(both_types)->UseRealTime();
BENCHMARK(grouped_dgrad)->Apply(both_types)->UseRealTime();
BENCHMARK(grouped_wgrad)->Apply(both_types)->UseRealTime();
BENCHMARK(attention_forward)->Apply(both_types)->UseRealTime();
BENCHMARK(attention_backward)->Apply(both_types)->UseRealTime();
BENCHMARK(norm_forward)->Apply(both_types)->UseRealTime();
BENCHMARK(norm_backward)->Apply(both_types)->UseRealTime();
BENCHMARK(rope_queries)->Apply(both_types)->UseRealTime();
BENCHMARK(swiglu)->Apply(both_types)->UseRealTime();
BENCHMARK(swiglu_gradient)->Apply(both_types)->UseRealTime();
BENCHMARK(cross_entropy_chunk)->Apply(both_types)->UseRealTime();
BENCHMARK(router)->Arg(0)->UseRealTime();
BENCHMARK(combine)->Apply(both_types)->UseRealTime();
BENCHMARK(adamw_step)->Apply(both_types)->UseRealTime();

}  // namespace
}  // namespace tessera
