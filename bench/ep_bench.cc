// Measures dispatch and combine of one MoE layer, standard against direct, on the ranks that mpirun starts:
//   mpirun -np 4 bench_ep [--tokens 4096] [--dim 1024] [--experts 64] [--top-k 6] [--repetitions 15] [--capacity 2]
// Rows are bfloat16. Direct leaves them in the window that receives them, as for a layer that saves no rows. There are
// two routings. One is uniform at random. The other is that of [debug] moe_force_load_balance, (t·K + k) mod E: a
// token's experts are neighbours and most of its copies go to one rank, which suits a backend that sends one copy per
// rank. The backends take turns. Each call begins at a barrier, and its time is the slowest rank's. Medians are
// reported. The program fails if direct is less than 1.5 times as fast as standard.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <numeric>

#include "base/stopwatch.h"
#include "comm/transport/mpi_transport.h"
#include "ep/backends/make_dispatcher.h"
#include "ep/dispatcher.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr double kLeastRatio = 1.5;

struct Sizes {
  std::int64_t tokens = 4096, dim = 1024, experts = 64, top_k = 6;
  int repetitions = 15;
  double capacity = 2.0;
};

enum class RoutingKind { kUniform, kForced };

void fill(const TokenRouting& routing, const Sizes& sizes, RoutingKind kind, int rank) {
  auto* ids = routing.expert_ids_tK.data<std::int32_t>();
  auto* counts = routing.counts_E.data<std::int32_t>();
  std::fill_n(counts, sizes.experts, 0);
  const Philox philox(static_cast<std::uint64_t>(rank), stream_of("bench.routing"));
  std::vector<std::int32_t> experts(static_cast<std::size_t>(sizes.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t t = 0; t < sizes.tokens; ++t) {
    for (std::int64_t k = 0; k < sizes.top_k; ++k) {
      const std::int64_t slot = t * sizes.top_k + k;
      const std::int64_t any = k + philox.words(static_cast<std::uint64_t>(slot))[0] % (sizes.experts - k);
      std::swap(experts[static_cast<std::size_t>(k)], experts[static_cast<std::size_t>(any)]);
      ids[slot] = kind == RoutingKind::kUniform ? experts[static_cast<std::size_t>(k)]
                                                : static_cast<std::int32_t>(slot % sizes.experts);
      routing.weights_tK.data<float>()[slot] = 1.0f / static_cast<float>(sizes.top_k);
      ++counts[ids[slot]];
    }
  }
}

constexpr std::array kCalls = {"dispatch", "combine", "combine backward", "dispatch backward"};

/// A backend, and the operands of a layer that it moves.
struct Side {
  const char* name;
  std::unique_ptr<Dispatcher> dispatcher;
  TokenRouting routing = {};
  DispatchSaved saved = {};
  Tensor y_tD = {}, x_RD = {}, d_out_RD = {}, out_tD = {}, d_weights_tK = {};
  std::vector<std::array<double, kCalls.size()>> ms = {};  // for each repetition

  void allocate(const Context& op) {
    const DispatchOptions& options = dispatcher->options();
    const Shape slots{options.max_tokens, options.top_k};
    routing = {.expert_ids_tK = op.arena->allocate(slots, DType::kInt32),
               .weights_tK = op.arena->allocate(slots, DType::kFloat32),
               .counts_E = op.arena->allocate({options.num_experts}, DType::kInt32)};
    saved = dispatcher->allocate_saved(op, {.name = name}, routing);
    y_tD = op.arena->allocate({options.max_tokens, options.dim}, options.dtype);
    out_tD = op.arena->allocate(y_tD.shape(), options.dtype);
    d_weights_tK = op.arena->allocate(slots, DType::kFloat32);
    x_RD = dispatcher->rows_in_window(op, saved);
    d_out_RD = dispatcher->gradients_in_window(op, saved);
    for (Tensor* rows : {&x_RD, &d_out_RD}) {
      if (!rows->defined()) *rows = op.arena->allocate({saved.num_rows(), options.dim}, options.dtype);
    }
  }

  /// Makes call `which` of kCalls. The experts return their rows unchanged.
  void call(const Context& op, std::size_t which) {
    if (which == 0) dispatcher->dispatch(op, y_tD, saved, x_RD);
    if (which == 1) dispatcher->combine(op, x_RD, saved, out_tD, Write::kAssign);
    if (which == 2) dispatcher->combine_backward(op, y_tD, saved, d_out_RD);
    if (which == 3) {
      dispatcher->dispatch_backward(op, d_out_RD, saved.weights_R, saved, out_tD, Write::kAssign, d_weights_tK);
    }
  }
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const std::size_t half = x.size() / 2;
  return x.size() % 2 == 1 ? x[half] : 0.5 * (x[half - 1] + x[half]);
}

/// Returns the milliseconds of the slowest rank. All ranks begin together.
template <typename Body>
double time_of(ProcessGroup& group, Body&& body) {
  group.barrier("bench");
  const Stopwatch watch;
  body();
  const double mine = 1e3 * watch.seconds();
  const std::vector<double> all = group.all_gather(std::span(&mine, 1), "bench");
  return *std::max_element(all.begin(), all.end());
}

/// Prints the times. Returns whether direct is as fast as it should be.
bool report(const ProcessGroup& group, const Sizes& sizes, RoutingKind kind, std::span<const Side, 2> sides) {
  fmt::print("{} ranks, {} thread(s) each; {} tokens per rank, dim {}, {} experts, top {}, bfloat16, {} routing\n",
             group.size(), num_threads(), sizes.tokens, sizes.dim, sizes.experts, sizes.top_k,
             kind == RoutingKind::kUniform ? "uniform random" : "(t·K + k) mod E");
  for (const Side& side : sides) {
    fmt::print("  {:<9}", side.name);
    for (std::size_t i = 0; i < kCalls.size(); ++i) {
      std::vector<double> ms;
      for (const auto& repetition : side.ms) ms.push_back(repetition[i]);
      fmt::print(" {} {:.2f} ms ", kCalls[i], median(ms));
    }
    fmt::print("\n");
  }
  bool fast = true;
  for (const std::size_t first : {0u, 2u}) {
    std::vector<double> ratios;
    for (std::size_t r = 0; r < sides[0].ms.size(); ++r) {
      const auto ms = [&](const Side& side) { return side.ms[r][first] + side.ms[r][first + 1]; };
      ratios.push_back(ms(sides[0]) / ms(sides[1]));
    }
    fmt::print("  {} + {}: direct {:.2f} times as fast as standard (median of {} pairs, {:.2f} to {:.2f})\n",
               kCalls[first], kCalls[first + 1], median(ratios), ratios.size(),
               *std::min_element(ratios.begin(), ratios.end()), *std::max_element(ratios.begin(), ratios.end()));
    fast = fast && median(ratios) >= kLeastRatio;
  }
  return fast;
}

/// Measures both routings. Returns whether direct is as fast as it should be, on rank 0.
bool run(ProcessGroup& group, const Sizes& sizes) {
  bool fast = true;
  const DispatchOptions options{.max_tokens = sizes.tokens,
                                .dim = sizes.dim,
                                .num_experts = sizes.experts,
                                .top_k = sizes.top_k,
                                .dtype = DType::kBFloat16,
                                .capacity_factor = sizes.capacity};
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kForced}) {
    Side sides[] = {{"standard", make_dispatcher(DispatchBackend::kStandard, group, options)},
                    {"direct", make_dispatcher(DispatchBackend::kDirect, group, options)}};
    Arena measuring;
    const Context plan{.arena = &measuring};
    for (Side& side : sides) side.allocate(plan);
    for (Side& side : sides) {
      for (std::size_t i = 0; i < kCalls.size(); ++i) side.call(plan, i);
    }
    Arena arena(measuring.peak());
    const Context op{.arena = &arena};
    for (Side& side : sides) {
      side.dispatcher->allocate();
      side.allocate(op);
      fill(side.routing, sizes, kind, group.rank());
      for (std::int64_t i = 0; i < side.y_tD.num_elements(); ++i) {
        side.y_tD.data<BFloat16>()[i] = BFloat16(static_cast<float>(i % 251) - 125.0f);
      }
    }
    for (int repetition = -2; repetition < sizes.repetitions; ++repetition) {  // two warm up
      for (Side& side : sides) {
        std::array<double, kCalls.size()> ms{};
        for (std::size_t i = 0; i < ms.size(); ++i) ms[i] = time_of(group, [&] { side.call(op, i); });
        if (repetition >= 0) side.ms.push_back(ms);
      }
    }
    if (group.rank() == 0) fast = report(group, sizes, kind, sides) && fast;
  }
  return fast;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Sizes sizes;
  int threads = 1;
  CLI::App app("Times of expert-parallel dispatch and combine; run under mpirun");
  app.add_option("--tokens", sizes.tokens, "per rank");
  app.add_option("--dim", sizes.dim);
  app.add_option("--experts", sizes.experts);
  app.add_option("--top-k", sizes.top_k);
  app.add_option("--repetitions", sizes.repetitions);
  app.add_option("--capacity", sizes.capacity, "rows of a rank, as a multiple of a balanced load's; 0: for any load");
  app.add_option("--threads", threads, "of a rank");
  CLI11_PARSE(app, argc, argv);
  const tessera::MpiRuntime runtime;
  std::unique_ptr<tessera::Transport> world = runtime.world();
  tessera::RankBoard board(*world);
  tessera::Progress progress(&board, tessera::Progress::Seconds(300.0));
  tessera::ProcessGroup group(std::move(world), progress, "ep");
  tessera::set_num_threads(threads);
  return tessera::run(group, sizes) ? 0 : 1;  // an exception ends the process, and with it all ranks
}
