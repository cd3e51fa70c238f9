#include "app/bench/gpu_bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "device/cuda_graph.h"
#include "ops/gemm/gemm.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr std::size_t kArenaBytes = std::size_t{24} << 30;
/// Least bytes of all operands of one row: several times the L2 cache.
constexpr std::size_t kBytesInTurn = std::size_t{400} << 20;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;
/// Least seconds of a graph: many times what its launch takes.
constexpr double kGraphSeconds = 0.004;
/// Seconds that calls run before a row is timed. Products draw so much power that clocks fall; 0.1 s per row are enough
/// for that.
constexpr double kWarmSecondsOfBytes = 0.01, kWarmSecondsOfProducts = 0.1;

const char* unit_of(WorkUnit work) { return work == WorkUnit::kBytes ? "TB/s" : "TFLOP/s"; }

}  // namespace

GpuBench::GpuBench(WorkUnit work, const GpuTableOptions& options)
    : work_(work), filter_(options.filter), arena_(kArenaBytes, Device::kCuda) {
  if (!options.json.empty()) json_.emplace(options.json);
  const Philox philox(1, 2);
  for (std::size_t i = 0; i < kPattern; ++i) {
    numbers_[i] = static_cast<float>(philox.uniform(i)) - 0.5f;
    bf16_[i] = BFloat16(numbers_[i]);
  }
  source_ = arena_.allocate_bytes(kCopyBytes), target_ = arena_.allocate_bytes(kCopyBytes);
  fmt::print("{}\n{:30} {:26} {:>10} {:>8} {:>7}\n",
             work == WorkUnit::kBytes
                 ? "%: of the rate of a copy from memory to memory in this run"
                 : "%: of the rate of the bfloat16 product through cuBLASLt in this run, the first row; of twice that "
                   "for 8-bit operands",
             "operator", "shape", "µs", unit_of(work), "%");
  const ArenaScope scope(arena_);
  ceiling_ = work == WorkUnit::kBytes ? time_row("copy", "1 GiB", {ceiling()})
                                      : time_row("bf16 product", "8192x8192x8192", {ceiling()});
}

Call GpuBench::ceiling() {
  if (work_ == WorkUnit::kBytes) return {2.0 * static_cast<double>(kCopyBytes), [this](const Context&) { copy(); }};
  constexpr std::int64_t kSize = 8192;
  const Tensor x = random({kSize, kSize}), w = random({kSize, kSize}), y = empty({kSize, kSize}, kBf16);
  constexpr auto kEdge = static_cast<double>(kSize);
  return {2.0 * kEdge * kEdge * kEdge, [=](const Context& op) { linear_forward(op, x, w, y); }};
}

void GpuBench::row(const std::string& name, const std::string& shape, const std::function<Call()>& make) {
  if (name.find(filter_) == std::string::npos) return;
  const ArenaScope scope(arena_);
  const std::size_t before = arena_.used();
  std::vector<Call> calls{make()};
  const std::size_t one = arena_.used() - before;
  while (arena_.used() - before < std::max(kBytesInTurn, 2 * one)) calls.push_back(make());
  time_row(name, shape, calls);
}

void GpuBench::finish() {
  if (json_) json_->commit();
}

Tensor GpuBench::random(Shape shape, DType dtype) {
  const Tensor tensor = arena_.allocate(shape, dtype);
  auto* to = static_cast<std::byte*>(tensor.raw());
  const std::size_t all = tensor.num_bytes(), first = std::min(all, kPattern * size_of(dtype));
  const bool is_bf16 = dtype == kBf16;
  cuda::copy_bytes(runtime_.stream(), is_bf16 ? static_cast<const void*>(bf16_.data()) : numbers_.data(), first, to);
  for (std::size_t done = first; done < all; done += std::min(done, all - done)) {
    cuda::copy_bytes(runtime_.stream(), to, std::min(done, all - done), to + done);
  }
  return tensor;
}

Tensor GpuBench::ints(std::int64_t count, const std::function<std::int64_t(std::int64_t)>& value) {
  const Tensor tensor = arena_.allocate({count}, DType::kInt32);
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<std::int32_t>(value(i)));
  cuda::copy_bytes(runtime_.stream(), values.data(), tensor.num_bytes(), tensor.raw());
  return tensor;
}

void GpuBench::copy() { cuda::copy_bytes(runtime_.stream(), source_, kCopyBytes, target_); }

double GpuBench::median_seconds(const std::vector<Call>& calls) {
  const auto turn = [&] {
    for (const Call& call : calls) call.run(context());
  };
  turn();
  events_[0].record(runtime_.stream());
  turn();
  events_[1].record(runtime_.stream());
  runtime_.synchronize();
  const double turn_seconds = events_[1].seconds_since(events_[0]);
  const int num_turns = static_cast<int>(std::ceil(kGraphSeconds / turn_seconds));
  const auto turns = [&] {
    for (int i = 0; i < num_turns; ++i) turn();
  };
  const cuda::Graph graph(runtime_.stream(), turns);
  const bool is_copy = work_ == WorkUnit::kBytes && ceiling_ == 0.0;
  const auto launch = [&] { is_copy ? turns() : graph.launch(runtime_.stream()); };
  const double warm_seconds = work_ == WorkUnit::kBytes ? kWarmSecondsOfBytes : kWarmSecondsOfProducts;
  for (double done = 0.0; done < warm_seconds; done += num_turns * turn_seconds) launch();
  events_[0].record(runtime_.stream());
  for (std::size_t i = 1; i < events_.size(); ++i) {
    launch();
    events_[i].record(runtime_.stream());
  }
  runtime_.synchronize();
  std::vector<double> seconds;
  for (std::size_t i = 1; i < events_.size(); ++i) seconds.push_back(events_[i].seconds_since(events_[i - 1]));
  std::nth_element(seconds.begin(), seconds.begin() + kLaunches / 2, seconds.end());
  return seconds[kLaunches / 2] / static_cast<double>(num_turns * calls.size());
}

double GpuBench::time_row(const std::string& name, const std::string& shape, const std::vector<Call>& calls) {
  const double seconds = median_seconds(calls), rate = calls[0].work / seconds;
  const double share = ceiling_ > 0.0 ? rate / (ceiling_ * calls[0].times_ceiling) : 1.0;  // the ceiling's own row: 1
  const double printed = rate * 1e-12;
  fmt::print("{:30} {:26} {:10.1f} {:8.{}f} {:6.0f}%\n", name, shape, seconds * 1e6, printed,
             work_ == WorkUnit::kBytes ? 2 : 0, 100.0 * share);
  std::fflush(stdout);
  if (json_) {
    const nlohmann::ordered_json line = {{"name", name},    {"shape", shape},         {"microseconds", seconds * 1e6},
                                         {"rate", printed}, {"unit", unit_of(work_)}, {"share", share}};
    json_->write(line.dump() + "\n");
  }
  return rate;
}

void print_gpu_table(GpuTable table, const GpuTableOptions& options) {
  require(cuda::available(), "no GPU: {}", cuda::why_unavailable());
  const bool is_of_bytes = table == GpuTable::kQuantize || table == GpuTable::kOperators;
  GpuBench bench(is_of_bytes ? WorkUnit::kBytes : WorkUnit::kFlop, options);
  switch (table) {
    case GpuTable::kGemm:
      time_gemms(bench);
      break;
    case GpuTable::kGrouped:
      time_grouped_gemms(bench);
      break;
    case GpuTable::kAttention:
      time_attention(bench);
      break;
    case GpuTable::kQuantize:
      time_quantizers(bench);
      break;
    case GpuTable::kOperators:
      time_operators(bench);
      break;
  }
  bench.finish();
}

}  // namespace tessera
