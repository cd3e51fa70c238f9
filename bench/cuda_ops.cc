// CUDA operators that are bound by memory, against a device-to-device copy of the same run.
//
//   bench_cuda_ops [PART_OF_A_NAME]
//
// A row of the table: bytes that must move (inputs read once, outputs written once), the median time of a call, and
// the rate, also as a share of the copy's. Calls take turns on sets of operands that are together far larger than the
// L2 cache. Each operator is captured as a graph first, and the graph run, because a training step will be one.
#include <cuda_runtime.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ops/adamw.h"
#include "ops/cross_entropy.h"
#include "ops/cuda/runtime.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/permute.h"
#include "ops/quantize.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/router.h"
#include "ops/swiglu.h"
#include "tensor/cuda_check.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr DType kBf16 = DType::kBFloat16, kFloat = DType::kFloat32;
/// Of one row of the table, at least: several times the L2 cache.
constexpr std::size_t kBytesInTurn = std::size_t{400} << 20;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;
constexpr int kCalls = 24;

/// A call on its own operands.
struct Call {
  std::size_t num_bytes;
  std::function<void(const Context&)> run;
};

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)), arena_(std::size_t{24} << 30, Device::kCuda) {
    const Philox philox(1, 2);
    for (std::size_t i = 0; i < kPattern; ++i) {
      numbers_[i] = static_cast<float>(philox.uniform(i)) - 0.5f;
      bf16_[i] = BFloat16(numbers_[i]);
    }
    for (cudaEvent_t& event : events_) TESSERA_CUDA(cudaEventCreate(&event));
    source_ = arena_.allocate_bytes(kCopyBytes), target_ = arena_.allocate_bytes(kCopyBytes);
    fmt::print("{:28} {:24} {:>9} {:>10} {:>7} {:>6}\n", "operator", "shape", "MB", "µs", "TB/s", "copy");
    copy_rate_ = time_calls("copy", "1 GiB", {{2 * kCopyBytes, [&](const Context&) { copy(); }}});
  }

  /// `make()` gives a call on operands that it takes from random() and the like.
  void row(const std::string& name, const std::string& shape, const std::function<Call()>& make) {
    if (name.find(filter_) == std::string::npos) return;
    const ArenaScope scope(arena_);
    const std::size_t before = arena_.used();
    std::vector<Call> calls{make()};
    const std::size_t one = arena_.used() - before;
    while (arena_.used() - before < std::max(kBytesInTurn, 2 * one)) calls.push_back(make());
    time_calls(name, shape, calls);
  }

  /// Uniform in [-0.5, 0.5], a pattern that repeats every million numbers.
  Tensor random(Shape shape, DType dtype = kBf16) {
    const Tensor tensor = arena_.allocate(shape, dtype);
    auto* to = static_cast<std::byte*>(tensor.raw());
    const std::size_t all = tensor.num_bytes(), first = std::min(all, kPattern * size_of(dtype));
    cuda::copy_bytes(runtime_.stream(), dtype == kBf16 ? static_cast<const void*>(bf16_.data()) : numbers_.data(),
                     first, to);
    for (std::size_t done = first; done < all; done += std::min(done, all - done)) {
      cuda::copy_bytes(runtime_.stream(), to, std::min(done, all - done), to + done);
    }
    return tensor;
  }
  Tensor ints(std::int64_t count, const std::function<std::int64_t(std::int64_t)>& value) {
    const Tensor tensor = arena_.allocate({count}, DType::kInt32);
    std::vector<std::int32_t> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<std::int32_t>(value(i)));
    cuda::copy_bytes(runtime_.stream(), values.data(), tensor.num_bytes(), tensor.raw());
    return tensor;
  }
  Tensor empty(Shape shape, DType dtype) { return arena_.allocate(shape, dtype); }
  mx::Quantized quantized(const Shape& shape, const mx::Format& format) {
    return mx::allocate_quantized(shape, format, [&](const Shape& s, DType dtype) { return empty(s, dtype); });
  }
  GemmOperand operand(const Shape& shape, const mx::Format& format) {
    GemmOperand x;
    x.rows = quantized(shape, format), x.columns = quantized(mx::transposed(shape), format);
    return x;
  }
  Context context() { return {.arena = &arena_, .cuda = &runtime_}; }
  cuda::Runtime& runtime() { return runtime_; }

 private:
  static constexpr std::size_t kPattern = 1 << 20;

  void copy() { cuda::copy_bytes(runtime_.stream(), source_, kCopyBytes, target_); }

  void run_as_graph(const Call& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    const cudaStream_t stream = runtime_.stream().handle();
    TESSERA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call.run(context());
    TESSERA_CUDA(cudaStreamEndCapture(stream, &graph));
    TESSERA_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    TESSERA_CUDA(cudaGraphLaunch(executable, stream));
    runtime_.synchronize();
    TESSERA_CUDA(cudaGraphExecDestroy(executable));
    TESSERA_CUDA(cudaGraphDestroy(graph));
  }

  /// TB/s.
  double time_calls(const std::string& name, const std::string& shape, const std::vector<Call>& calls) {
    const cudaStream_t stream = runtime_.stream().handle();
    for (const Call& call : calls) call.run(context());
    run_as_graph(calls[0]);
    // While these run the calls are put on the stream, so that they follow each other without gaps.
    for (int i = 0; i < 4; ++i) copy();
    for (int i = 0; i < kCalls; ++i) {
      TESSERA_CUDA(cudaEventRecord(events_[2 * i], stream));
      calls[static_cast<std::size_t>(i) % calls.size()].run(context());
      TESSERA_CUDA(cudaEventRecord(events_[2 * i + 1], stream));
    }
    runtime_.synchronize();
    std::vector<float> milliseconds(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      TESSERA_CUDA(
          cudaEventElapsedTime(&milliseconds[static_cast<std::size_t>(i)], events_[2 * i], events_[2 * i + 1]));
    }
    std::nth_element(milliseconds.begin(), milliseconds.begin() + kCalls / 2, milliseconds.end());
    const double seconds = static_cast<double>(milliseconds[kCalls / 2]) * 1e-3;
    const auto num_bytes = static_cast<double>(calls[0].num_bytes);
    const double rate = num_bytes / seconds * 1e-12;
    fmt::print("{:28} {:24} {:9.1f} {:10.1f} {:7.2f} {:5.0f}%\n", name, shape, num_bytes * 1e-6, seconds * 1e6, rate,
               100.0 * rate / (copy_rate_ > 0.0 ? copy_rate_ : rate));
    return rate;
  }

  std::string filter_;
  cuda::Runtime runtime_;
  Arena arena_;
  std::vector<float> numbers_ = std::vector<float>(kPattern);
  std::vector<BFloat16> bf16_ = std::vector<BFloat16>(kPattern);
  std::byte *source_ = nullptr, *target_ = nullptr;
  cudaEvent_t events_[2 * kCalls] = {};
  double copy_rate_ = 0.0;
};

std::size_t bytes_of(std::initializer_list<Tensor> tensors) {
  std::size_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.defined() ? tensor.num_bytes() : 0;
  return sum;
}
std::size_t bytes_of(const GemmOperand& x) {
  return bytes_of({x.plain, x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales});
}

constexpr mx::Format kMxfp8{};
constexpr mx::Format kWide{.along = 128};
constexpr mx::Format kWideSquare{.along = 128, .across = 128};
constexpr mx::Format kFloatRows{.scale_type = mx::ScaleType::kFloat32, .along = 128};
constexpr mx::Format kFloatSquare{.scale_type = mx::ScaleType::kFloat32, .along = 128, .across = 128};

// The 16B model: tokens of a micro-batch, model dim, latent; routed rows, hidden dim of an expert.
constexpr std::int64_t kT = 16384, kD = 2048, kC = 512, kR = 98304, kF = 1408;

std::string text(const Shape& shape) { return shape.to_string(); }

void quantizers(Bench& bench) {
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

void norms(Bench& bench) {
  for (const std::int64_t width : {kC, kD, std::int64_t{7168}}) {
    const Shape shape{kT, width};
    bench.row("rmsnorm_forward", text(shape), [&bench, shape] {
      const Tensor x = bench.random(shape), w = bench.random({shape[1]}), y = bench.empty(shape, kBf16);
      const Tensor rstd = bench.empty({shape[0]}, kFloat);
      return Call{bytes_of({x, w, y, rstd}), [=](const Context& op) { rmsnorm_forward(op, x, w, 1e-5f, y, rstd); }};
    });
    bench.row("rmsnorm_backward", text(shape), [&bench, shape] {
      const Tensor d_y = bench.random(shape), x = bench.random(shape), w = bench.random({shape[1]});
      const Tensor rstd = bench.random({shape[0]}, kFloat), d_x = bench.empty(shape, kBf16);
      const Tensor d_w = bench.random({shape[1]}, kFloat);
      return Call{bytes_of({d_y, x, w, rstd, d_x, d_w, d_w}),
                  [=](const Context& op) { rmsnorm_backward(op, d_y, x, w, rstd, d_x, Write::kAssign, d_w); }};
    });
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

void activations(Bench& bench) {
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
      a.rows = {};  // the weight gradient reads its columns only
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

void embeddings(Bench& bench) {
  constexpr std::int64_t kV = 102400;
  // Like text: the most frequent token is one in 25.
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
    return Call{bytes_of({tokens, d_x}) + 2 * num_rows * kD * sizeof(float),
                [=](const Context& op) { embedding_backward(op, tokens, d_x, 0, d_table); }};
  });
}

/// What leads tokens to their experts and back.
void routing(Bench& bench) {
  struct Model {
    const char* name;
    std::int64_t experts, top_k;
    RouterOptions options;
  };
  const Model models[] = {{"T 16384, 6 of 64", 64, 6, {.top_k = 6, .seq_len = 8192, .tokens_per_seq = 8192}},
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
  for (const Model& model : models) {
    const std::int64_t experts = model.experts, top_k = model.top_k;
    const auto routed = [&bench, &model, experts, top_k] {
      const Tensor logits = bench.random({kT, experts}, kFloat), bias = bench.random({experts}, kFloat);
      const RouterOutputs out{.scores_TE = bench.empty({kT, experts}, kFloat),
                              .expert_ids_TK = bench.empty({kT, top_k}, DType::kInt32),
                              .weights_TK = bench.empty({kT, top_k}, kFloat),
                              .counts_E = bench.empty({experts}, DType::kInt32),
                              .balance_f_BE = {}};
      router_forward(bench.context(), model.options, logits, bias, out);
      return std::tuple{logits, bias, out};
    };
    bench.row("router_forward", model.name, [&] {
      const auto [logits, bias, out] = routed();
      return Call{bytes_of({logits, out.scores_TE, out.expert_ids_TK, out.weights_TK}),
                  [=, options = model.options](const Context& op) { router_forward(op, options, logits, bias, out); }};
    });
    bench.row("router_backward", model.name, [&] {
      const auto [logits, bias, out] = routed();
      const Tensor d_weights = bench.random({kT, top_k}, kFloat);
      return Call{bytes_of({logits, out.scores_TE, out.expert_ids_TK, out.weights_TK, d_weights}),
                  [=, options = model.options](const Context& op) {
                    router_backward(op, options, out, d_weights, 0.0f, logits);
                  }};
    });
    bench.row("balance_sums", model.name, [&] {
      const auto [logits, bias, out] = routed();
      const Tensor sums = bench.empty({2, 2, experts}, kFloat);
      return Call{bytes_of({out.scores_TE}),
                  [=, options = model.options](const Context& op) { balance_sums(op, options, out.scores_TE, sums); }};
    });
    constexpr std::int64_t kAlignment = 128;
    const std::int64_t rows = max_rows(kT * top_k, experts, kAlignment);
    const auto sorted = [&bench, routed, experts, top_k, rows] {
      const RouterOutputs out = std::get<2>(routed());
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
        const GemmOperand y =
            quantizes ? bench.operand({rows, kD}, kMxfp8) : GemmOperand(bench.empty({rows, kD}, kBf16));
        const auto num_read = static_cast<std::size_t>(top_k) * x.num_bytes();
        return Call{num_read + bytes_of(y),
                    [=](const Context& op) { gather_rows(op, x, slots, top_k, num_rows_1, y); }};
      });
    }
    for (const Write write : {Write::kAssign, Write::kAccumulate}) {
      bench.row(write == Write::kAssign ? "combine_rows" : "combine_rows +=", model.name, [&] {
        const auto [out, offsets, slots, rows_TK] = sorted();
        const Tensor x = bench.random({rows, kD}), y = bench.random({kT, kD});
        const Tensor weights_TK = write == Write::kAssign ? out.weights_TK : Tensor();
        const auto num_read = static_cast<std::size_t>(top_k) * y.num_bytes();
        return Call{num_read + bytes_of({rows_TK, weights_TK, y, write == Write::kAssign ? Tensor() : y}),
                    [=](const Context& op) { combine_rows(op, x, rows_TK, weights_TK, y, write); }};
      });
    }
  }
}

void losses(Bench& bench) {
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
}

void optimizers(Bench& bench) {
  constexpr std::int64_t kN = 1 << 27;
  bench.row("adamw", text({kN}), [&] {
    const Tensor d_w = bench.random({kN}, kFloat), m = bench.random({kN}, kFloat), w = bench.random({kN}, kFloat);
    const Tensor v = bench.empty({kN}, kFloat), shadow = bench.empty({kN}, kBf16);
    set_zero(bench.context(), v);
    const Tensor step_S = bench.empty({AdamWStep::kNumbers}, kFloat);
    const AdamWOptions options{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};
    const AdamWStep step = adamw_step(options, 1e-4f, 10);
    cuda::copy_bytes(bench.runtime().stream(), &step, sizeof step, step_S.raw());
    return Call{bytes_of({d_w, m, m, v, v, w, w, shadow}),
                [=](const Context& op) { adamw(op, options, step_S, d_w, m, v, w, shadow); }};
  });
  bench.row("sum_of_squares", text({kN}), [&] {
    const Tensor x = bench.random({kN}, kFloat), squares_1 = bench.empty({1}, DType::kFloat64);
    return Call{bytes_of({x}), [=](const Context& op) { sum_of_squares(op, x, squares_1); }};
  });
}

void run(const std::string& filter) {
  require(cuda::available(), "{}", cuda::why_unavailable());
  Bench bench(filter);
  quantizers(bench);
  norms(bench);
  activations(bench);
  embeddings(bench);
  routing(bench);
  losses(bench);
  optimizers(bench);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    tessera::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
