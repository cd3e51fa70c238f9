#include "plan/measure/calibrate_ranks.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>

#include "base/median.h"
#include "ep/backends/make_dispatcher.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/init.h"
#include "ops/gemm/gemm.h"
#include "ops/kit/call_stream.h"
#include "plan/cluster.h"

namespace tessera {
namespace {

constexpr const char* kName = "calibrate";
constexpr int kRounds = 5;                // of each time; the median counts
constexpr double kLeastSeconds = 0.02;    // of a round
constexpr double kProductsPerCall = 1.5;  // products beside a transfer last so many times as long

/// What is measured, on CPUs and on GPUs.
struct Sizes {
  std::vector<std::int64_t> transfers;  // bytes of a whole tensor, the smallest first
  std::int64_t m, n, k;                 // of the product
  double steady_seconds;                // of the same product on all ranks, after as long to settle the clocks
};
const Sizes kCpuSizes{{1 << 16, 1 << 20, 1 << 24}, 256, 1024, 1024, 1.0};
const Sizes kGpuSizes{{1 << 20, 1 << 24, 1 << 28}, 8192, 4096, 4096, 4.0};

class RankProbe {
 public:
  RankProbe(ProcessGroup& world, cuda::Runtime* runtime)
      : world_(world),
        runtime_(runtime),
        sizes_(runtime == nullptr ? kCpuSizes : kGpuSizes),
        arena_(capacity(), runtime == nullptr ? Device::kCpu : Device::kCuda) {
    x_ = filled({sizes_.m, sizes_.k});
    w_ = filled({sizes_.n, sizes_.k});
    y_ = arena_.allocate({sizes_.m, sizes_.n}, DType::kBFloat16);
    std::vector<ProcessGroup::Link> links;
    for (int from = 0; from + 1 < world.size(); from += 2) links.push_back({.from = from, .to = from + 1, .tag = from});
    world.open_links(links);
  }

  Context op() { return {.arena = &arena_, .cuda = runtime_}; }
  ProcessGroup& world() { return world_; }
  const Sizes& sizes() const { return sizes_; }
  void product(const Context& op) const { linear_forward(op, x_, w_, y_, Write::kAssign); }

  /// Starts a transfer of `bytes` in a whole tensor. Ranks that have no part in it return an empty one. Nobody reads
  /// the numbers, so their memory may be taken again at once.
  Work start(const std::string& kind, std::int64_t bytes) {
    const ArenaScope scope(arena_);
    const auto tensor = [&](std::int64_t num_bytes, DType dtype) {
      return arena_.allocate({num_bytes / static_cast<std::int64_t>(size_of(dtype))}, dtype);
    };
    const std::int64_t part = bytes / world_.size();
    const auto gathered = DType::kBFloat16, summed = DType::kFloat32;
    if (kind == "all_gather")
      return world_.all_gather(tensor(part, gathered), tensor(part * world_.size(), gathered), kName);
    if (kind == "all_reduce") return world_.all_reduce(tensor(bytes, summed), kName);
    if (kind == "all_to_all") {
      return world_.all_to_all(tensor(part * world_.size(), gathered), tensor(part * world_.size(), gathered), kName);
    }
    if (kind == "reduce_scatter") {
      return world_.reduce_scatter(tensor(part * world_.size(), summed), tensor(part, summed), Write::kAssign, kName);
    }
    const int rank = world_.rank(), from = rank / 2 * 2;
    if (from + 1 >= world_.size()) return {};
    const Tensor x = tensor(bytes, gathered);
    return rank == from ? world_.send(x, from + 1, from, kName) : world_.receive(x, from, from, kName);
  }

  /// Returns the seconds that each rank needs for so many calls, which all begin together.
  std::vector<double> times_of(const std::function<void()>& call, int calls) {
    synchronize();
    world_.barrier(kName);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return world_.all_gather(std::span(&seconds, 1), kName);
  }
  /// Returns the seconds of a call, of the slowest rank.
  double seconds_of(const std::function<void()>& call) {
    const auto slowest = [&](int calls) { return std::ranges::max(times_of(call, calls)); };
    int calls = 1;
    for (slowest(1); slowest(calls) < kLeastSeconds; calls *= 2) continue;
    std::vector<double> seconds;
    for (int round = 0; round < kRounds; ++round) seconds.push_back(slowest(calls) / calls);
    return median(seconds);
  }

  /// Returns the part of a call's duration that products lose that run beside it. `beside(count)` makes so many
  /// products beside a call.
  double overlap_cost(const std::function<void()>& call, const std::function<void(int)>& beside) {
    const double of_call = seconds_of(call), of_product = seconds_of([&] { product(op()); });
    const int count = std::max(2, static_cast<int>(std::ceil(kProductsPerCall * of_call / of_product)));
    const double alone = seconds_of([&] {
      for (int i = 0; i < count; ++i) product(op());
    });
    return lost_part(of_call, alone, seconds_of([&] { beside(count); }));
  }

 private:
  void synchronize() {
    if (runtime_ != nullptr) runtime_->synchronize();
  }

  /// Returns the bytes of the product's operands, and of two tensors of the largest transfer.
  std::size_t capacity() const {
    const std::int64_t numbers = sizes_.m * sizes_.k + sizes_.n * sizes_.k + sizes_.m * sizes_.n;
    constexpr std::size_t kScratch = std::size_t{256} << 20;
    return static_cast<std::size_t>(6 * numbers + 2 * sizes_.transfers.back()) + kScratch;
  }

  /// Returns random bfloat16 numbers: a GPU's clock depends on what it multiplies.
  Tensor filled(const Shape& shape) {
    const Tensor x = arena_.allocate(shape, DType::kBFloat16);
    const ArenaScope scope(arena_);
    const Tensor numbers = arena_.allocate(shape, DType::kFloat32);
    const Init normal{.std = 1.0f, .bound = 3.0f};
    draw_initial(op(), Philox(0, stream_of(kName)), {.first = normal, .second = normal}, 0,
                 numbers.reshape({shape.num_elements()}));
    convert(op(), numbers, x);
    return x;
  }

  ProcessGroup& world_;
  cuda::Runtime* runtime_;
  const Sizes& sizes_;
  Arena arena_;
  Tensor x_, w_, y_;
};

constexpr const char* kGigabytes = "GB/s of a rank and direction";
constexpr const char* kMicroseconds = "us";

void add_transfers(RankProbe& probe, std::vector<RankValue>& values) {
  const auto n = static_cast<double>(probe.world().size());
  std::vector<MeasuredCall> all;
  const auto add = [&](const std::string& prefix, const std::vector<MeasuredCall>& calls, const std::string& source) {
    const OperatorRate rate = fit_rate(calls);
    const double per_byte = rate.seconds_per[OperatorWork::kOtherBytes];
    require(per_byte > 0.0,
            "transfers of {} took no longer for more bytes: calibrate on a machine that has nothing else to do",
            prefix);
    values.push_back({prefix + ".gb_per_s", 1e-9 / per_byte, kGigabytes, source, {}});
    values.push_back(
        {prefix + ".microseconds", 1e6 * rate.seconds_per[OperatorWork::kCalls], kMicroseconds, source, {}});
  };
  const std::string sizes = fmt::format("tensors of {} to {} KiB", probe.sizes().transfers.front() >> 10,
                                        probe.sizes().transfers.back() >> 10);
  for (const std::string kind : kTransferKinds) {
    std::vector<MeasuredCall> calls;
    for (const std::int64_t bytes : probe.sizes().transfers) {
      OperatorWork work;
      work.amounts[OperatorWork::kCalls] = 1.0;
      work.amounts[OperatorWork::kOtherBytes] = bytes_of_link(kind, static_cast<double>(bytes), n);
      calls.push_back({work, probe.seconds_of([&] { probe.start(kind, bytes).wait(); })});
    }
    add(kind, calls, sizes);
    all.insert(all.end(), calls.begin(), calls.end());
  }
  add("domain", all, "all kinds of transfers, " + sizes);
}

double overlap_cost_of(RankProbe& probe, const std::string& kind) {
  const std::int64_t bytes = probe.sizes().transfers.back();
  return probe.overlap_cost([&] { probe.start(kind, bytes).wait(); },
                            [&](int count) {
                              Work work = probe.start(kind, bytes);
                              for (int i = 0; i < count; ++i) probe.product(probe.op());
                              work.wait();
                            });
}

/// Returns the part of the direct backend's calls that products beside them lose: the mean of dispatch and combine.
/// Tokens choose their experts in turn.
double direct_overlap_cost(RankProbe& probe, cuda::Runtime* runtime) {
  ProcessGroup& world = probe.world();
  constexpr std::int64_t kTokens = 4096, kDim = 7168, kTopK = 8;
  const std::int64_t experts = 32 * world.size();
  const auto dispatcher = make_dispatcher(DispatchBackend::kDirect, world,
                                          {.max_tokens = kTokens,
                                           .dim = kDim,
                                           .num_experts = experts,
                                           .top_k = kTopK,
                                           .dtype = DType::kBFloat16,
                                           .capacity_factor = 1.5,
                                           .device = Device::kCuda,
                                           .num_sms = kDefaultSms});
  std::vector<std::int32_t> ids, counts(static_cast<std::size_t>(experts));
  for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
    // Neighbouring choices are on different ranks.
    const std::int64_t expert = i % world.size() * 32 + i / world.size() % 32;
    ids.push_back(static_cast<std::int32_t>(expert));
    ++counts[static_cast<std::size_t>(expert)];
  }
  const std::vector<float> weights(ids.size(), 1.0f / kTopK);
  double cost = 0.0;
  const auto pass = [&](Arena& arena) {
    const Context op{.arena = &arena, .cuda = runtime};
    const TokenRouting routing{.expert_ids_tK = arena.allocate({kTokens, kTopK}, DType::kInt32),
                               .weights_tK = arena.allocate({kTokens, kTopK}, DType::kFloat32),
                               .counts_E = arena.allocate({experts}, DType::kInt32)};
    const DispatchSaved saved = dispatcher->allocate_saved(op, {.name = kName}, routing);
    const Tensor y_tD = arena.allocate({kTokens, kDim}, DType::kBFloat16);
    const Tensor rows_RD = arena.allocate({saved.num_rows(), kDim}, DType::kBFloat16);
    GemmOperand tokens_tD, x_RD;
    tokens_tD.plain = y_tD;
    x_RD.plain = dispatcher->rows_in_window(op, saved);
    const std::function<void(const Context&)> calls[] = {
        [&](const Context& own) { dispatcher->dispatch(own, tokens_tD, saved, x_RD); },
        [&](const Context& own) { dispatcher->combine(own, rows_RD, saved, y_tD, Write::kAssign); }};
    if (op.measuring()) {
      for (const auto& call : calls) call(op);
      return;
    }
    cuda::copy_bytes(runtime->stream(), ids.data(), routing.expert_ids_tK.num_bytes(), routing.expert_ids_tK.raw());
    cuda::copy_bytes(runtime->stream(), counts.data(), routing.counts_E.num_bytes(), routing.counts_E.raw());
    cuda::copy_bytes(runtime->stream(), weights.data(), routing.weights_tK.num_bytes(), routing.weights_tK.raw());
    for (const auto& call : calls) {
      const auto beside = [&](int count) {
        const ArenaScope scope(arena);  // the call's scratch is kept until it ends
        CallStream stream(op, dispatcher->num_sms());
        Context product = stream.beside();
        product.arena = probe.op().arena;  // which takes the scratch of a product back before join()
        for (int i = 0; i < count; ++i) probe.product(product);
        call(stream.begin());
        stream.join();
      };
      cost += 0.5 * probe.overlap_cost([&] { call(op); }, beside);
    }
    dispatcher->check();
  };
  Arena measuring(Device::kCuda);
  pass(measuring);
  dispatcher->allocate();
  Arena arena(measuring.peak(), Device::kCuda);
  pass(arena);
  return cost;
}

/// Adds σ: all ranks make the same product, for a while.
void add_straggler(RankProbe& probe, std::vector<RankValue>& values) {
  const auto call = [&] { probe.product(probe.op()); };
  const int calls = std::max(1, static_cast<int>(probe.sizes().steady_seconds / probe.seconds_of(call)));
  probe.times_of(call, calls);
  const std::vector<double> times = probe.times_of(call, calls);
  const std::string source =
      fmt::format("one product on {} ranks at the same time, {:.0f} s", times.size(), probe.sizes().steady_seconds);
  values.push_back({"slowest_over_mean", slowest_over_mean(times), "ratio", source, {}});
  values.push_back({"straggler", straggler_of(times), "part of the mean", source, {}});
}

}  // namespace

std::vector<RankValue> calibrate_ranks(ProcessGroup& world, cuda::Runtime* runtime) {
  TESSERA_CHECK(world.size() > 1, "{}", world.size());
  RankProbe probe(world, runtime);
  std::vector<RankValue> values = {
      {"ranks", static_cast<double>(world.size()), "ranks of one node", "tessera bench calibrate", {}}};
  add_transfers(probe, values);
  constexpr const char* kPart = "part of the transfer's duration";
  values.push_back({"overlap_cost",
                    0.5 * (overlap_cost_of(probe, "all_gather") + overlap_cost_of(probe, "reduce_scatter")),
                    kPart,
                    "what products lose beside an all-gather and a reduce-scatter, mean",
                    {}});
  if (runtime != nullptr) {
    values.push_back({"direct.overlap_cost",
                      direct_overlap_cost(probe, runtime),
                      kPart,
                      "what products lose beside a direct dispatch and combine, mean",
                      {}});
  }
  add_straggler(probe, values);
  return values;
}

double bytes_of_link(const std::string& kind, double bytes, double n) {
  if (kind == "send") return bytes;
  return (kind == "all_reduce" ? 2.0 : 1.0) * bytes * (n - 1.0) / n;
}

double lost_part(double of_call, double alone, double beside) {
  return std::clamp((beside - alone) / of_call, 0.0, 1.0);
}

double slowest_over_mean(std::span<const double> seconds) {
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  return std::ranges::max(seconds) * static_cast<double>(seconds.size()) / sum;
}

double straggler_of(std::span<const double> seconds) {
  return (slowest_over_mean(seconds) - 1.0) / expected_maximum(std::ssize(seconds));
}

}  // namespace tessera
