// Rows of `tessera bench quantize` and `operators`. These operators are bound by memory, so their work is the bytes
// that must move: inputs read once and outputs written once. Sizes are those of the 16B model unless stated otherwise.
#include <cstring>

#include "app/bench/gpu_bench.h"
#include "ops/attention/rope.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/embedding.h"
#include "ops/elementwise/swiglu.h"
#include "ops/loss/cross_entropy.h"
#include "ops/norm/rmsnorm.h"
#include "ops/optimizer/adamw.h"
#include "ops/quantize/quantize.h"
#include "ops/routing/permute.h"
#include "ops/routing/router.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

double bytes_of(std::initializer_list<Tensor> tensors) {
  double sum = 0.0;
  for (const Tensor& tensor : tensors) sum += tensor.defined() ? static_cast<double>(tensor.num_bytes()) : 0.0;
  return sum;
}
double bytes_of(const mx::Quantized& x) { return bytes_of({x.elements, x.scales}); }
double bytes_of(const GemmOperand& x) { return bytes_of({x.plain}) + bytes_of(x.rows) + bytes_of(x.columns); }

// The 16B model: tokens of a micro-batch, model dim, latent dim; routed rows, hidden dim of an expert.
constexpr std::int64_t kT = 16384, kD = 2048, kC = 512, kR = 98304, kF = 1408;

std::string text(const Shape& shape) { return shape.to_string(); }

void norms(GpuBench& bench) {
  for (const std::int64_t width : {kC, kD, std::int64_t{7168}}) {
    const Shape shape{kT, width};
    bench.row("rmsnorm_forward", text(shape), [&bench, shape] {
      const Tensor x = bench.random(shape), w = bench.random({shape[1]}), y = bench.empty(shape, kBf16);
      const Tensor rstd = bench.empty({shape[0]}, kFloat);
      return Call{bytes_of({x, w, y, rstd}), [=](const Context& op) { rmsnorm_forward(op, x, w, 1e-5f, y, rstd); }};
    });
    for (const Write write : {Write::kAssign, Write::kAccumulate}) {
      const bool adds = write == Write::kAccumulate;
      bench.row(adds ? "rmsnorm_backward +=" : "rmsnorm_backward", text(shape), [&bench, shape, write, adds] {
        const Tensor d_y = bench.random(shape), x = bench.random(shape), w = bench.random({shape[1]});
        const Tensor rstd = bench.random({shape[0]}, kFloat), d_x = bench.random(shape);
        const Tensor d_w = bench.random({shape[1]}, kFloat);
        return Call{bytes_of({d_y, x, w, rstd, d_x, adds ? d_x : Tensor(), d_w, d_w}),
                    [=](const Context& op) { rmsnorm_backward(op, d_y, x, w, rstd, d_x, write, d_w); }};
      });
    }
  }
  const Shape shape{kT, kD};
  const auto residual = [&](const std::string& name, bool quantizes) {
    bench.row(name, text(shape), [&bench, shape, quantizes] {
      const Tensor x = bench.random(shape), delta = bench.random(shape), w = bench.random({kD});
      const Tensor sum = bench.empty(shape, kBf16), rstd = bench.empty({kT}, kFloat);
      const GemmOperand y = quantizes ? bench.operand(shape, kMxfp8) : GemmOperand(bench.empty(shape, kBf16));
      return Call{bytes_of({x, delta, w, sum, rstd}) + bytes_of(y),
                  [=](const Context& op) { residual_rmsnorm_forward(op, x, delta, w, 1e-5f, sum, y, rstd); }};
    });
  };
  residual("residual_rmsnorm", false);
  residual("residual_rmsnorm, 1x32", true);
}

void plain_memory(GpuBench& bench) {
  bench.row("copy", text({kT, kD}), [&] {
    const Tensor x = bench.random({kT, kD}), y = bench.empty({kT, kD}, kBf16);
    return Call{bytes_of({x, y}), [=](const Context& op) { copy(op, x, y); }};
  });
  bench.row("set_zero", "2^27 float32", [&] {
    const Tensor x = bench.empty({std::int64_t{1} << 27}, kFloat);
    return Call{bytes_of({x}), [=](const Context& op) { set_zero(op, x); }};
  });
}

void activations(GpuBench& bench) {
  const Shape h_shape{kR, 2 * kF}, a_shape{kR, kF};
  for (const bool quantizes : {false, true}) {
    const std::string suffix = quantizes ? ", 1x32" : "";
    const auto output = [&bench, quantizes](const Shape& shape) {
      return quantizes ? bench.operand(shape, kMxfp8) : GemmOperand(bench.empty(shape, kBf16));
    };
    bench.row("swiglu_forward" + suffix, text(h_shape), [&] {
      const Tensor h = bench.random(h_shape);
      const GemmOperand a = output(a_shape);
      return Call{bytes_of({h}) + bytes_of(a), [=](const Context& op) { swiglu_forward(op, h, a); }};
    });
    bench.row("swiglu_backward_weighted" + suffix, text(h_shape), [&] {
      const Tensor h = bench.random(h_shape), d_a = bench.random(a_shape), weights = bench.random({kR}, kFloat);
      const Tensor d_weights = bench.empty({kR}, kFloat), num_rows_1 = bench.ints(1, [](std::int64_t) { return kR; });
      const GemmOperand d_h = output(h_shape);
      GemmOperand a = output(a_shape);
      a.rows = {};  // the weight gradient reads only its columns
      return Call{bytes_of({h, d_a, weights, d_weights}) + bytes_of(d_h) + bytes_of(a), [=](const Context& op) {
                    swiglu_backward_weighted(op, d_a, h, weights, num_rows_1, d_h, a, d_weights);
                  }};
    });
  }
  bench.row("rope", "T 16384, 16 heads, 64", [&] {
    constexpr std::int64_t kHeads = 16, kHead = 192, kRope = 64;
    const Tensor x = bench.random({kT, kHeads * kHead}), angles = bench.random({kT, kRope / 2}, kFloat);
    const Tensor positions = bench.ints(kT, [](std::int64_t t) { return t % 8192; });
    return Call{bytes_of({x, x}) * kRope / kHead + bytes_of({angles, angles}) / 2, [=](const Context& op) {
                  rope(op, x, kHeads, kRope, positions, angles, angles, RopeDirection::kForward, x);
                }};
  });
}

void embeddings(GpuBench& bench) {
  constexpr std::int64_t kV = 102400;
  // Tokens are distributed like text: the most frequent one is one in 25.
  const auto token = [philox = Philox(3, 4)](std::int64_t t) -> std::int64_t {
    const double u = philox.uniform(static_cast<std::uint64_t>(t));
    return t % 25 == 0 ? 7 : static_cast<std::int64_t>(u * u * u * static_cast<double>(kV));
  };
  bench.row("embedding_forward", text({kT, kD}), [&] {
    const Tensor tokens = bench.ints(kT, token), table = bench.random({kV, kD}), x = bench.empty({kT, kD}, kBf16);
    return Call{bytes_of({tokens, x, x}), [=](const Context& op) { embedding_forward(op, tokens, table, 0, x); }};
  });
  bench.row("embedding_backward", text({kT, kD}), [&] {
    const Tensor tokens = bench.ints(kT, token), d_x = bench.random({kT, kD}), d_table = bench.random({kV, kD}, kFloat);
    std::vector<bool> seen(static_cast<std::size_t>(kV));
    std::size_t num_rows = 0;
    for (std::int64_t t = 0; t < kT; ++t) {
      const auto id = static_cast<std::size_t>(token(t));
      num_rows += seen[id] ? 0 : 1;
      seen[id] = true;
    }
    return Call{bytes_of({tokens, d_x}) + 2.0 * static_cast<double>(num_rows * kD * sizeof(float)),
                [=](const Context& op) { embedding_backward(op, tokens, d_x, 0, d_table); }};
  });
}

/// The routing of a model whose operators are measured.
struct RoutedModel {
  const char* name;
  std::int64_t experts, top_k;
  RouterOptions options;
};

struct Routed {
  Tensor logits, bias;
  RouterOutputs out;
};

/// Returns random logits and what the model's router makes of them.
Routed route(GpuBench& bench, const RoutedModel& model) {
  const std::int64_t experts = model.experts, top_k = model.top_k;
  const Tensor logits = bench.random({kT, experts}, kFloat), bias = bench.random({experts}, kFloat);
  const RouterOutputs out{.scores_TE = bench.empty({kT, experts}, kFloat),
                          .expert_ids_TK = bench.empty({kT, top_k}, DType::kInt32),
                          .weights_TK = bench.empty({kT, top_k}, kFloat),
                          .counts_E = bench.empty({experts}, DType::kInt32),
                          .balance_f_BE = {}};
  router_forward(bench.context(), model.options, logits, bias, out);
  return {logits, bias, out};
}

void router_rows(GpuBench& bench, const RoutedModel& model) {
  bench.row("router_forward", model.name, [&] {
    const auto [logits, bias, out] = route(bench, model);
    return Call{bytes_of({logits, out.scores_TE, out.expert_ids_TK, out.weights_TK}),
                [=, options = model.options](const Context& op) { router_forward(op, options, logits, bias, out); }};
  });
  bench.row("router_backward", model.name, [&] {
    const auto [logits, bias, out] = route(bench, model);
    const Tensor d_weights = bench.random({kT, model.top_k}, kFloat);
    return Call{bytes_of({logits, out.scores_TE, out.expert_ids_TK, out.weights_TK, d_weights}),
                [=, options = model.options](const Context& op) {
                  router_backward(op, options, out, d_weights, 0.0f, logits);
                }};
  });
  bench.row("balance_sums", model.name, [&] {
    const auto [logits, bias, out] = route(bench, model);
    const Tensor sums = bench.empty({2, 2, model.experts}, kFloat);
    return Call{bytes_of({out.scores_TE}),
                [=, options = model.options](const Context& op) { balance_sums(op, options, out.scores_TE, sums); }};
  });
}

void permutation_rows(GpuBench& bench, const RoutedModel& model) {
  const std::int64_t experts = model.experts, top_k = model.top_k;
  constexpr std::int64_t kAlignment = 128;
  const std::int64_t rows = max_rows(kT * top_k, experts, kAlignment);
  const auto sorted = [&bench, &model, experts, top_k, rows] {
    const RouterOutputs out = route(bench, model).out;
    const Tensor offsets = bench.empty({experts + 1}, DType::kInt32), slots = bench.empty({rows}, DType::kInt32);
    const Tensor rows_TK = bench.empty({kT, top_k}, DType::kInt32);
    sort_by_expert(bench.context(), out.expert_ids_TK, out.counts_E, kAlignment, offsets, slots, rows_TK);
    return std::tuple{out, offsets, slots, rows_TK};
  };
  bench.row("sort_by_expert", model.name, [&] {
    const auto [out, offsets, slots, rows_TK] = sorted();
    return Call{bytes_of({out.expert_ids_TK, slots, rows_TK}), [=](const Context& op) {
                  sort_by_expert(op, out.expert_ids_TK, out.counts_E, kAlignment, offsets, slots, rows_TK);
                }};
  });
  // Tokens are read once per row: more than the cache holds.
  for (const bool quantizes : {false, true}) {
    bench.row(quantizes ? "gather_rows, 1x32" : "gather_rows", model.name, [&] {
      const auto [out, offsets, slots, rows_TK] = sorted();
      const Tensor x = bench.random({kT, kD}), num_rows_1 = offsets.rows(experts, experts + 1);
      const GemmOperand y = quantizes ? bench.operand({rows, kD}, kMxfp8) : GemmOperand(bench.empty({rows, kD}, kBf16));
      const auto num_read = static_cast<double>(top_k) * bytes_of({x});
      return Call{num_read + bytes_of(y), [=](const Context& op) { gather_rows(op, x, slots, top_k, num_rows_1, y); }};
    });
  }
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    bench.row(write == Write::kAssign ? "combine_rows" : "combine_rows +=", model.name, [&] {
      const auto [out, offsets, slots, rows_TK] = sorted();
      const Tensor x = bench.random({rows, kD}), y = bench.random({kT, kD});
      const Tensor weights_TK = write == Write::kAssign ? out.weights_TK : Tensor();
      const auto num_read = static_cast<double>(top_k) * bytes_of({y});
      return Call{num_read + bytes_of({rows_TK, weights_TK, y, write == Write::kAssign ? Tensor() : y}),
                  [=](const Context& op) { combine_rows(op, x, rows_TK, weights_TK, y, write); }};
    });
  }
}

void routing(GpuBench& bench) {
  const RoutedModel models[] = {{"T 16384, 6 of 64", 64, 6, {.top_k = 6, .seq_len = 8192, .tokens_per_seq = 8192}},
                                {"T 16384, 8 of 256",
                                 256,
                                 8,
                                 {.score_function = ScoreFunction::kSigmoid,
                                  .route_norm = true,
                                  .top_k = 8,
                                  .num_groups = 8,
                                  .num_limited_groups = 4,
                                  .seq_len = 8192,
                                  .tokens_per_seq = 8192}}};
  for (const RoutedModel& model : models) {
    router_rows(bench, model);
    permutation_rows(bench, model);
  }
}

void losses(GpuBench& bench) {
  constexpr std::int64_t kChunk = 512, kV = 102400;
  const auto labels = [&] { return bench.ints(kChunk, [](std::int64_t t) { return t * 199; }); };
  bench.row("cross_entropy_sums", text({kChunk, kV}), [&] {
    const Tensor logits = bench.random({kChunk, kV}, kFloat), of = labels(), sums = bench.empty({kChunk, 3}, kFloat);
    return Call{bytes_of({logits}), [=](const Context& op) { cross_entropy_sums(op, logits, of, 0, sums); }};
  });
  for (const DType dtype : {kBf16, kFloat}) {
    bench.row(std::string("cross_entropy to ") + name_of(dtype), text({kChunk, kV}), [&] {
      const Tensor logits = bench.random({kChunk, kV}, kFloat), of = labels(),
                   sums = bench.empty({1, kChunk, 3}, kFloat);
      const Tensor loss_T = bench.empty({kChunk}, kFloat);
      const Tensor d_logits = dtype == kFloat ? logits : bench.empty({kChunk, kV}, kBf16);
      cross_entropy_sums(bench.context(), logits, of, 0, sums[0]);
      return Call{bytes_of({logits, d_logits}),
                  [=](const Context& op) { cross_entropy(op, sums, logits, of, 0, 1.0f, loss_T, d_logits); }};
    });
  }
  // Of an output projection in 8 bits.
  bench.row("cross_entropy_sums of bfloat16", text({kChunk, kV}), [&] {
    const Tensor logits = bench.random({kChunk, kV}, kBf16), of = labels(), sums = bench.empty({kChunk, 3}, kFloat);
    return Call{bytes_of({logits}), [=](const Context& op) { cross_entropy_sums(op, logits, of, 0, sums); }};
  });
  for (const auto& [name, rows] : {std::pair{"1x128", kWide}, {"1x256", kWidest}}) {
    bench.row(fmt::format("cross_entropy of bfloat16, {} E8M0", name), text({kChunk, kV}), [&, rows = rows] {
      const Tensor logits = bench.random({kChunk, kV}, kBf16), of = labels();
      const Tensor sums = bench.empty({1, kChunk, 3}, kFloat), loss_T = bench.empty({kChunk}, kFloat);
      GemmOperand d_logits;
      d_logits.rows = bench.quantized({kChunk, kV}, rows);
      d_logits.columns = bench.quantized({kV, kChunk}, kWide);
      cross_entropy_sums(bench.context(), logits, of, 0, sums[0]);
      return Call{bytes_of({logits}) + bytes_of(d_logits),
                  [=](const Context& op) { cross_entropy(op, sums, logits, of, 0, 1.0f, loss_T, d_logits); }};
    });
  }
}

constexpr AdamWOptions kAdamW{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};

/// Returns the numbers of a step on the GPU.
Tensor adamw_numbers(GpuBench& bench) {
  const Tensor step_S = bench.empty({AdamWStep::kNumbers}, kFloat);
  const AdamWStep step = adamw_step(kAdamW, 1e-4f, 10);
  cuda::copy_bytes(bench.runtime().stream(), &step, sizeof step, step_S.raw());
  return step_S;
}

void optimizers(GpuBench& bench) {
  constexpr std::int64_t kN = 1 << 27;
  for (const auto& [name, dtype] : {std::pair{"adamw", kFloat}, {"adamw, moments in bfloat16", kBf16}}) {
    bench.row(name, text({kN}), [&, dtype = dtype] {
      const Tensor d_w = bench.random({kN}, kFloat), w = bench.random({kN}, kFloat), m = bench.random({kN}, dtype);
      const Tensor v = bench.empty({kN}, dtype), shadow = bench.empty({kN}, kBf16);
      set_zero(bench.context(), v);
      const Tensor step_S = adamw_numbers(bench);
      return Call{bytes_of({d_w, m, m, v, v, w, w, shadow}),
                  [=](const Context& op) { adamw(op, kAdamW, step_S, d_w, m, v, w, shadow); }};
    });
  }
  const Shape experts{64, 2048, 1024};
  for (const auto& [name, format] : {std::pair{"128x128", kWideSquare}, {"256x256", kWidestSquare}}) {
    bench.row(fmt::format("adamw_quantized, {} E8M0", name), text(experts), [&, format = format] {
      const Tensor d_w = bench.random({kN}, kFloat), w = bench.random(experts, kFloat), m = bench.random({kN}, kFloat);
      const Tensor v = bench.empty({kN}, kFloat);
      set_zero(bench.context(), v);
      const Tensor step_S = adamw_numbers(bench);
      const QuantizedWeight q = bench.weight(experts, format);
      return Call{bytes_of({d_w, m, m, v, v, w, w}) + bytes_of(q.rows) + bytes_of(q.columns),
                  [=](const Context& op) { adamw_quantized(op, kAdamW, step_S, d_w, m, v, w, kBf16, format, q); }};
    });
  }
  bench.row("sum_of_squares", text({kN}), [&] {
    const Tensor x = bench.random({kN}, kFloat), squares_1 = bench.empty({1}, DType::kFloat64);
    return Call{bytes_of({x}), [=](const Context& op) { sum_of_squares(op, x, squares_1); }};
  });
}

}  // namespace

void time_quantizers(GpuBench& bench) {
  const auto both = [&](const std::string& name, Shape shape, const mx::Format& format) {
    bench.row(name, text(shape), [&bench, shape, format] {
      const Tensor x = bench.random(shape);
      const GemmOperand q = bench.operand(shape, format);
      return Call{bytes_of({x}) + bytes_of(q), [=](const Context& op) { quantize(op, x, q.rows, q.columns); }};
    });
  };
  for (const Shape& shape : {Shape{kT, kD}, {kT, 7168}, {kR, kF}, {kR, kD}}) both("quantize 1x32", shape, kMxfp8);
  both("quantize 1x128 E8M0", {kR, kF}, kWide);
  both("quantize 128x128 E8M0", {kR, kF}, kWideSquare);
  both("quantize 1x256 E8M0", {kR, kF}, kWidest);
  both("quantize 256x256 E8M0", {kR, kF}, kWidestSquare);
  both("quantize 1x128 float32", {kR, kF}, kFloatRows);
  both("quantize 128x128 float32", {kR, kF}, kFloatSquare);
  bench.row("quantize 1x32, rows", text({kR, kF}), [&] {
    const Tensor x = bench.random({kR, kF});
    const mx::Quantized q = bench.quantized({kR, kF}, kMxfp8);
    return Call{bytes_of({x, q.elements, q.scales}), [=](const Context& op) { quantize(op, x, q, {}); }};
  });
  bench.row("quantize 1x32, columns", text({kR, kF}), [&] {
    const Tensor x = bench.random({kR, kF});
    const mx::Quantized q = bench.quantized({kF, kR}, kMxfp8);
    return Call{bytes_of({x, q.elements, q.scales}), [=](const Context& op) { quantize(op, x, {}, q); }};
  });
  // The weight of 8 experts. On Hopper it is quantized to bfloat16, too, which the exact products read.
  bench.row("quantize_weight 1x32", text({8, 2 * kF, kD}), [&] {
    const Shape shape{8, 2 * kF, kD};
    const Tensor x = bench.random(shape);
    const QuantizedWeight w = bench.weight(shape, kMxfp8);
    return Call{bytes_of({x, w.wide_rows, w.wide_columns}) + bytes_of(w.rows) + bytes_of(w.columns),
                [=](const Context& op) { quantize_weight(op, x, kMxfp8, w); }};
  });
  bench.row("dequantize 1x32", text({kR, kF}), [&] {
    const Tensor x = bench.random({kR, kF});
    const mx::Quantized q = bench.quantized({kR, kF}, kMxfp8);
    quantize(bench.context(), x, q, {});
    return Call{bytes_of({x, q.elements, q.scales}), [=](const Context& op) { dequantize(op, q, x); }};
  });
  bench.row("quantization_error 1x32", text({kR, kF}), [&] {
    const Tensor x = bench.random({kR, kF}), sums_2 = bench.empty({2}, DType::kFloat64);
    const mx::Quantized q = bench.quantized({kR, kF}, kMxfp8);
    quantize(bench.context(), x, q, {});
    return Call{bytes_of({x, q.elements, q.scales}), [=](const Context& op) { quantization_error(op, x, q, sums_2); }};
  });
}

void time_operators(GpuBench& bench) {
  plain_memory(bench);
  norms(bench);
  activations(bench);
  embeddings(bench);
  routing(bench);
  losses(bench);
  optimizers(bench);
}

}  // namespace tessera
