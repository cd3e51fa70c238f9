// Measures expert-parallel dispatch and combine of one MoE layer by direct stores between the GPUs of this machine, for
// each number of SMs that a call takes:
//   bench_ep_gpu [--gpus N] [--shape 4096,7168,256,8 --shape 16384,2048,64,6] [--sms 8,16,20,24,32] [--repetitions 20]
//       [--domains 1]
// A shape is tokens per GPU, dim, experts, top-k. Rows are bfloat16, or cross in MXFP8. bfloat16 rows stay in the
// window that receives them. Routing is uniform at random. "As DeepEP" is what DeepEP's own test times
// (tests/test_intranode.py): a dispatch with the layout of an earlier one, of tokens that already have the payload's
// precision. --domains N treats the GPUs as those of N nodes, with NCCL between the nodes.
// Times are microseconds of the slowest GPU, from events around --repetitions calls of a kind in a row. GB/s count the
// copies of tokens that a GPU sends on average: one per rank that a token goes to, its own rank included, as DeepEP
// counts them. The number in brackets counts only copies to other GPUs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <numeric>
#include <sstream>

#include "comm/ranks.h"
#include "comm/transport/thread_transport.h"
#include "ep/backends/make_dispatcher.h"
#include "ep/dispatcher.h"
#include "ops/runtime/runtime.h"
#include "tensor/philox.h"
#include "tests/ep/whole_calls.h"

namespace tessera {
namespace {

struct Shape4 {
  std::int64_t tokens, dim, experts, top_k;
};

constexpr std::array kCalls = {"dispatch", "again", "combine", "combine backward", "dispatch backward", "as DeepEP"};

/// A rank's routing: its router's results, and how many copies of its tokens go to each rank.
struct Routing {
  std::vector<std::int32_t> ids, counts;
  std::vector<float> weights;
  std::vector<std::int64_t> copies;
};

Routing route(const Shape4& shape, int rank, int num_ranks) {
  Routing routing;
  routing.counts.resize(static_cast<std::size_t>(shape.experts));
  routing.copies.resize(static_cast<std::size_t>(num_ranks));
  const Philox philox(static_cast<std::uint64_t>(rank), stream_of("bench.routing"));
  std::vector<std::int32_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    std::vector<bool> goes_to(static_cast<std::size_t>(num_ranks));
    for (std::int64_t k = 0; k < shape.top_k; ++k) {
      const std::int64_t any =
          k + philox.words(static_cast<std::uint64_t>(t * shape.top_k + k))[0] % (shape.experts - k);
      std::swap(experts[static_cast<std::size_t>(k)], experts[static_cast<std::size_t>(any)]);
      const std::int32_t expert = experts[static_cast<std::size_t>(k)];
      routing.ids.push_back(expert);
      routing.weights.push_back(1.0f / static_cast<float>(shape.top_k));
      ++routing.counts[static_cast<std::size_t>(expert)];
      goes_to[static_cast<std::size_t>(expert / (shape.experts / num_ranks))] = true;
    }
    for (std::size_t peer = 0; peer < goes_to.size(); ++peer) routing.copies[peer] += goes_to[peer] ? 1 : 0;
  }
  return routing;
}

void run(const DomainGroups& groups, cuda::Runtime& runtime, const Shape4& shape, PayloadPrecision payload, int num_sms,
         int repetitions) {
  ProcessGroup& group = groups.all;
  const Routing routing = route(shape, group.rank(), group.size());
  const DispatchOptions options{.max_tokens = shape.tokens,
                                .dim = shape.dim,
                                .num_experts = shape.experts,
                                .top_k = shape.top_k,
                                .dtype = DType::kBFloat16,
                                .capacity_factor = 1.25,
                                .dispatch_forward = payload,
                                .combine_backward = payload,
                                .device = Device::kCuda,
                                .num_sms = num_sms};
  const auto dispatcher = groups.across.size() == 1 ? make_dispatcher(DispatchBackend::kDirect, group, options)
                                                    : make_two_level_dispatcher(groups, options);
  const ep_test::WholeCalls whole(*dispatcher);
  std::array<double, kCalls.size()> us{};
  const auto pass = [&](Arena& arena) {
    const Context op{.arena = &arena, .cuda = &runtime};
    const auto allocate = [&](const Shape& its, DType dtype) { return arena.allocate(its, dtype); };
    const Shape slots{shape.tokens, shape.top_k};
    const TokenRouting tensors{.expert_ids_tK = allocate(slots, DType::kInt32),
                               .weights_tK = allocate(slots, DType::kFloat32),
                               .counts_E = allocate({shape.experts}, DType::kInt32)};
    const DispatchSaved saved = dispatcher->allocate_saved(op, {.name = "bench"}, tensors);
    const Tensor y_tD = allocate({shape.tokens, shape.dim}, options.dtype);
    const Tensor out_tD = allocate(y_tD.shape(), options.dtype), d_weights_tK = allocate(slots, DType::kFloat32);
    const mx::Quantized packed = mx::allocate_quantized({saved.num_rows(), shape.dim}, mx::Format{}, allocate);
    const Tensor rows_RD = allocate({saved.num_rows(), shape.dim}, options.dtype);
    GemmOperand x_RD, d_out_RD, payload_tD;
    if (payload == PayloadPrecision::kDefault) {
      payload_tD.plain = y_tD;
      x_RD.plain = dispatcher->rows_in_window(op, saved);
      d_out_RD.plain = dispatcher->gradients_in_window(op, saved);
    } else {
      payload_tD.rows = mx::allocate_quantized(y_tD.shape(), mx::Format{}, allocate);
      x_RD.rows = d_out_RD.rows = packed;
    }
    const std::array<std::function<void()>, kCalls.size()> calls = {
        [&] { whole.dispatch(op, y_tD, saved, x_RD); },
        [&] { whole.dispatch_again(op, y_tD, saved, x_RD); },
        [&] { whole.combine(op, rows_RD, saved, out_tD, Write::kAssign); },
        [&] { whole.combine_backward(op, y_tD, saved, d_out_RD); },
        [&] { whole.dispatch_backward(op, rows_RD, saved.weights_R, saved, out_tD, Write::kAssign, d_weights_tK); },
        [&] { whole.dispatch_again(op, payload_tD, saved, x_RD); }};
    if (op.measuring()) {
      for (const auto& call : calls) call();
      return;
    }
    const auto put = [&](const auto& from, const Tensor& to) {
      cuda::copy_bytes(runtime.stream(), from.data(), to.num_bytes(), to.raw());
    };
    put(routing.ids, tensors.expert_ids_tK), put(routing.counts, tensors.counts_E);
    put(routing.weights, tensors.weights_tK);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      cuda::Event begin, end;
      calls[i]();
      runtime.synchronize();
      group.barrier("bench");
      calls[i]();
      begin.record(runtime.stream());
      for (int repetition = 0; repetition < repetitions; ++repetition) calls[i]();
      end.record(runtime.stream());
      runtime.synchronize();
      dispatcher->check();
      us[i] = 1e6 * end.seconds_since(begin) / repetitions;
    }
  };
  Arena measuring(Device::kCuda);
  pass(measuring);
  dispatcher->allocate();
  {
    Arena arena(measuring.peak(), Device::kCuda);
    pass(arena);
  }
  const std::vector<double> all = group.all_gather(std::span(us), "bench");
  std::vector<double> copies(2);
  for (std::size_t peer = 0; peer < routing.copies.size(); ++peer) {
    copies[0] += static_cast<double>(routing.copies[peer]);
    if (static_cast<int>(peer) != group.rank()) copies[1] += static_cast<double>(routing.copies[peer]);
  }
  group.all_reduce(std::span(copies), "bench");
  if (group.rank() != 0) return group.barrier("bench");
  fmt::print("{:>3} SMs {}", num_sms, payload == PayloadPrecision::kDefault ? "bf16 " : "mxfp8");
  for (std::size_t i = 0; i < kCalls.size(); ++i) {
    double slowest = 0.0;
    for (std::size_t r = i; r < all.size(); r += kCalls.size()) slowest = std::max(slowest, all[r]);
    const bool is_sum = i == 2 || i == 4;
    const double bytes = payload == PayloadPrecision::kDefault || is_sum
                             ? 2.0 * static_cast<double>(shape.dim)
                             : static_cast<double>(shape.dim) * (1.0 + 1.0 / mx::kBlock);
    const double rate = bytes / static_cast<double>(group.size()) / slowest * 1e-3;
    fmt::print("  {} {:.0f} us {:.0f} ({:.0f}) GB/s", kCalls[i], slowest, copies[0] * rate, copies[1] * rate);
  }
  fmt::print("\n");
  std::fflush(stdout);
  group.barrier("bench");
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  int gpus = tessera::cuda::num_devices(), repetitions = 20, domains = 1;
  std::vector<std::string> shapes = {"4096,7168,256,8", "16384,2048,64,6"};
  std::vector<int> sms = {8, 16, 20, 24, 32};
  CLI::App app("Times of expert-parallel dispatch and combine between this machine's GPUs");
  app.add_option("--gpus", gpus);
  app.add_option("--shape", shapes, "tokens per GPU,dim,experts,top-k");
  app.add_option("--sms", sms)->delimiter(',');
  app.add_option("--repetitions", repetitions);
  app.add_option("--domains", domains)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (gpus % domains != 0) return app.exit(CLI::ValidationError("--domains", "does not divide the number of GPUs"));
  tessera::run_rank_threads(gpus, [&](std::unique_ptr<tessera::Transport> transport) {
    tessera::Ranks ranks(std::move(transport), tessera::Progress::Seconds(20.0));
    tessera::ProcessGroup& group = ranks.world();
    tessera::cuda::use_device(group.rank());
    tessera::cuda::Runtime runtime;
    group.use_gpu(runtime.stream_of_calls(), runtime.stream_of_calls());
    tessera::ProcessGroup within, across;
    if (domains > 1) {
      const int per_domain = group.size() / domains;
      within = group.split(group.rank() / per_domain, group.rank(), "ep_within");
      across = group.split(group.rank() % per_domain, group.rank(), "ep_across");
    }
    const tessera::DomainGroups groups{.all = group, .within = within, .across = across};
    for (const std::string& text : shapes) {
      tessera::Shape4 shape{};
      std::istringstream numbers(text);
      char comma = ',';
      numbers >> shape.tokens >> comma >> shape.dim >> comma >> shape.experts >> comma >> shape.top_k;
      tessera::require(!numbers.fail() && numbers.eof(), "a shape is tokens,dim,experts,top-k, not {}", text);
      if (group.rank() == 0)
        fmt::print("{} GPUs{}, {}\n", group.size(), domains == 1 ? "" : fmt::format(" in {} domains", domains), text);
      for (const auto payload : {tessera::PayloadPrecision::kDefault, tessera::PayloadPrecision::kMxfp8}) {
        for (const int num_sms : sms) tessera::run(groups, runtime.calls(), shape, payload, num_sms, repetitions);
      }
    }
  });
  return 0;
}
