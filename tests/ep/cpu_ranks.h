// Runs layers on ranks that compute on CPUs.
#pragma once

#include "tests/ep/layer.h"
#include "tests/threads_scope.h"

namespace tessera::ep_test {

inline constexpr std::size_t kArenaBytes = std::size_t{3} << 20, kLargeArenaBytes = std::size_t{12} << 20;

/// Holds a rank's memory, filled with NaN.
struct Memory {
  explicit Memory(std::size_t num_bytes = kArenaBytes) : arena(num_bytes) { poison(arena); }
  Arena arena;
  Context op() { return {.arena = &arena}; }
};

/// Runs `body` on `num_ranks` ranks. The seed determines how ranks and messages are delayed. With 0 nothing is delayed.
inline void on_ranks(int num_ranks, std::uint64_t seed, const std::function<void(ProcessGroup&, ep::StepHook*)>& body) {
  comm_test::RankOptions options;
  if (seed != 0) {
    options.wrap = [seed](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
      return std::make_unique<comm_test::DelayedTransport>(std::move(transport), seed);
    };
  }
  const ThreadsScope threads;
  comm_test::with_ranks(
      num_ranks,
      [&](ProcessGroup& group) {
        set_num_threads(1 + group.rank() % 2);
        RandomDelays delays(seed, group.rank());
        body(group, seed != 0 ? &delays : nullptr);
      },
      options);
}

/// Expects that a measuring run takes as much memory as a real one, and that it touches no data.
inline void expect_measured(const Layer& layer, Dispatcher& dispatcher, const ProcessGroup& group) {
  const Case& test_case = layer.test_case();
  const WholeCalls calls(dispatcher);
  const auto pass = [&](Arena& arena) {
    const Context op{.arena = &arena};
    const auto tensor = [&](const Shape& shape, DType dtype) {
      const Tensor x = arena.allocate(shape, dtype);
      if (!op.measuring()) set_bytes(x, 0);
      return x;
    };
    const DispatchSaved saved = dispatcher.allocate_saved(op, {.name = "layer", .alignment = test_case.alignment},
                                                          layer.tensors(arena, group.rank()));
    const Shape rows{saved.num_rows(), test_case.dim}, tokens{test_case.num_tokens, test_case.dim};
    const Tensor y_tD = tensor(tokens, test_case.dtype);
    GemmOperand x_RD;
    if (test_case.plain) x_RD.plain = dispatcher.rows_in_window(op, saved);
    if (test_case.plain && !x_RD.plain.defined()) x_RD.plain = tensor(rows, test_case.dtype);
    if (test_case.quantized) {
      x_RD.rows = mx::allocate_quantized(rows, mx::Format{}, tensor);
      x_RD.columns = mx::allocate_quantized(mx::transposed(rows), mx::Format{}, tensor);
    }
    const Tensor out_RD = tensor(rows, test_case.dtype);
    const Tensor d_weights_tK = tensor({test_case.num_tokens, test_case.top_k}, DType::kFloat32);
    calls.dispatch(op, y_tD, saved, x_RD);
    calls.combine(op, out_RD, saved, y_tD, Write::kAssign);
    calls.combine_backward(op, y_tD, saved, x_RD);
    calls.dispatch_again(op, y_tD, saved, x_RD);
    calls.dispatch_backward(op, out_RD, saved.weights_R, saved, y_tD, Write::kAssign, d_weights_tK);
  };
  Arena measuring;
  pass(measuring);
  Arena real(measuring.peak());
  pass(real);
  EXPECT_EQ(real.peak(), measuring.peak());
}

}  // namespace tessera::ep_test
