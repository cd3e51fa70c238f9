// Compares the direct dispatcher on GPUs with the one on CPUs, bit for bit. The ranks are threads. They share one GPU
// or, where there are several, have a GPU each. Dispatch on two levels runs on a GPU per rank only, because NCCL needs
// that.
#include <cuda_runtime.h>

#include <cstring>

#include "device/cuda_check.h"
#include "device/cuda_graph.h"
#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"
#include "tests/comm/gpus.h"
#include "tests/comm/one_gpu.h"
#include "tests/ep/layer.h"
#include "tests/gpu_delay.h"

namespace tessera {
namespace {

using comm_test::num_gpus;
using comm_test::OneGpuTransport;
using comm_test::with_ranks;
using ep_test::Bytes;
using ep_test::Case;
using ep_test::cases;
using ep_test::Domains;
using ep_test::Layer;
using ep_test::LayerRun;
using ep_test::message_of;
using ep_test::Skew;
using Results = std::map<std::string, Bytes>;

constexpr int kMaxRanks = 4;

/// Returns the number of bytes that a pass on the CPU needs.
std::size_t host_bytes(const Case& test_case) {
  return std::size_t{test_case.dim > 1000 ? 192u : test_case.num_tokens > 100 ? 24u : 3u} << 20;
}

const bool kEnvironment = comm_test::use_gin_plugin(TESSERA_GIN_PLUGIN);

/// The windows of the groups in `gpus` are in the GPUs' memory.
using Body = std::function<void(Domains& host, Domains& gpus, cuda::Runtime&)>;

/// Puts the windows of domains of one rank into GPU memory. (NCCL has no groups of one rank.) Larger groups have
/// NCCL's.
class OwnGpuTransport : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;

  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    std::unique_ptr<Transport> part = transport().split(color, order, axis);
    if (axis != "ep") return part;
    return std::make_unique<OneGpuTransport>(std::move(part), true);
  }
};

/// Runs the body on `num_ranks` ranks with a GPU each.
void on_own_gpus(int num_ranks, const Body& body, int num_domains = 1,
                 Progress::Seconds timeout = Progress::Seconds(10.0)) {
  SCOPED_TRACE("a GPU per rank");
  with_ranks(num_ranks,
             [&](ProcessGroup& world) {
               cuda::use_device(comm_test::gpu_of(world.rank()));
               cuda::Runtime runtime;
               ProcessGroup group = world.split(0, world.rank(), "ep");
               group.use_gpu(runtime.stream_of_calls(), runtime.stream_of_calls());
               Domains host(world, num_domains), gpus(group, num_domains);
               body(host, gpus, runtime);
             },
             {.timeout = timeout, .wrap = [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
                return std::make_unique<OwnGpuTransport>(std::move(transport));
              }});
}

void on_one_gpu(int num_ranks, const Body& body, Progress::Seconds timeout = Progress::Seconds(10.0)) {
  SCOPED_TRACE("one GPU");
  const auto wrap = [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
    return std::make_unique<OneGpuTransport>(std::move(transport));
  };
  with_ranks(num_ranks,
             [&](ProcessGroup& world) {
               cuda::Runtime runtime;
               ProcessGroup group = world.split(0, world.rank(), "ep");
               Domains host(world, 1), gpus(group, 1);
               body(host, gpus, runtime);
             },
             {.timeout = timeout, .wrap = wrap});
}

/// Runs the body on one GPU. If there are as many GPUs as ranks, also runs it on a GPU per rank.
void on_gpus(int num_ranks, const Body& body, Progress::Seconds timeout = Progress::Seconds(10.0)) {
  if (num_ranks > 1 && num_gpus() >= num_ranks) on_own_gpus(num_ranks, body, 1, timeout);
  on_one_gpu(num_ranks, body, timeout);
}

/// Delays the stream by a random time, also as a part of a graph. The seed determines the times.
class Delays {
 public:
  Delays(std::uint64_t seed, int rank)
      : seed_(seed), random_(seed * 100 + static_cast<std::uint64_t>(rank), stream_of("test.gpu_delay")) {}

  void put(const cuda::Runtime& runtime) {
    if (seed_ == 0) return;
    const auto words = random_.words(num_put_++);
    if (words[0] % 2 == 0) return;
    put_delay(runtime.stream(), static_cast<int>(words[1] % 1500));
  }

 private:
  std::uint64_t seed_;
  Philox random_;
  std::uint64_t num_put_ = 0;
};

/// A rank's layer on the GPU: its operands, its calls and their results. The operands keep their addresses, and hold
/// other numbers in each pass.
class GpuRun {
 public:
  GpuRun(const Case& test_case, Dispatcher& dispatcher, const ProcessGroup& group, const Context& op,
         const std::string& name = "layers.7.moe")
      : case_(test_case), calls_(dispatcher), rank_(group.rank()), op_(op), name_(name) {
    const Shape slots{test_case.num_tokens, test_case.top_k}, tokens{test_case.num_tokens, test_case.dim};
    routing_ = {.expert_ids_tK = allocate(slots, DType::kInt32),
                .weights_tK = allocate(slots, DType::kFloat32),
                .counts_E = allocate({test_case.num_experts}, DType::kInt32)};
    saved_ = dispatcher.allocate_saved(op, {.name = name_, .alignment = test_case.alignment}, routing_);
    const Shape rows{saved_.num_rows(), test_case.dim};
    y_TD_ = allocate(tokens, test_case.dtype), d_y_TD_ = allocate(tokens, test_case.dtype);
    out_TD_ = allocate(tokens, test_case.dtype), d_in_TD_ = allocate(tokens, test_case.dtype);
    out_RD_ = allocate(rows, test_case.dtype), d_x_RD_ = allocate(rows, test_case.dtype);
    d_weights_R_ = allocate({saved_.num_rows()}, DType::kFloat32), d_weights_TK_ = allocate(slots, DType::kFloat32);
    x_RD_ = operand(test_case.in_window ? dispatcher.rows_in_window(op, saved_) : Tensor());
    d_out_RD_ = operand(test_case.in_window ? dispatcher.gradients_in_window(op, saved_) : Tensor());
    poison(saved_.offsets_e1), poison(saved_.weights_R);
  }

  /// Copies the numbers of a pass into the operands of the calls.
  void fill(const Layer& layer, const LayerRun& cpu) {
    layer_ = &layer;
    Arena host(host_bytes(case_));
    const TokenRouting routing = layer.tensors(host, rank_);
    put(routing.expert_ids_tK, routing_.expert_ids_tK), put(routing.weights_tK, routing_.weights_tK);
    put(routing.counts_E, routing_.counts_E);
    put(layer.tokens(host, "y", rank_), y_TD_), put(layer.tokens(host, "d_y", rank_), d_y_TD_);
    put(layer.tokens(host, "before", rank_), out_TD_), put(layer.tokens(host, "before", rank_), d_in_TD_);
    put(cpu.rows("out"), out_RD_), put(cpu.rows("d_x"), d_x_RD_);
    const Layer::Rows expected = layer.rows_of(rank_);
    num_used_ = static_cast<std::int64_t>(expected.rows.size());
    const Tensor d_weights = host.allocate({saved_.num_rows()}, DType::kFloat32);
    ep_test::set_bytes(d_weights, 0xff);
    for (std::size_t r = 0; r < expected.rows.size(); ++r) {
      const Layer::Row& row = expected.rows[r];
      if (row.source >= 0) d_weights.data<float>()[r] = layer.number("d_weight", row.source, row.token, row.k);
    }
    put(d_weights, d_weights_R_);
    poison(d_weights_TK_);
  }

  void dispatch() {
    poison(x_RD_);
    calls_.dispatch(op_, y_TD_, saved_, x_RD_);
  }
  void dispatch_again() {
    poison(x_RD_);
    calls_.dispatch_again(op_, y_TD_, saved_, x_RD_);
  }
  /// If rows may stay in the window, the experts' outputs are there, over the rows.
  void combine(Write write) {
    if (case_.in_window) copy(op_, out_RD_, x_RD_.plain);
    calls_.combine(op_, case_.in_window ? x_RD_.plain : out_RD_, saved_, out_TD_, write);
  }
  void combine_backward() {
    poison(d_out_RD_);
    calls_.combine_backward(op_, d_y_TD_, saved_, d_out_RD_);
  }
  void dispatch_backward(Write write) {
    calls_.dispatch_backward(op_, d_x_RD_, d_weights_R_, saved_, d_in_TD_, write, d_weights_TK_);
  }

  // These functions copy what has arrived into results(), under LayerRun's names.
  void fetch_rows(const std::string& call) { fetch(call, x_RD_); }
  void fetch_gradients(const std::string& call) { fetch(call, d_out_RD_); }
  void fetch_sums() {
    results_["combine"] = get(out_TD_);
    results_["dispatch backward"] = get(d_in_TD_);
    const Bytes fetched = get(d_weights_TK_);
    layer_->expect_d_weights(std::span(reinterpret_cast<const float*>(fetched.data()), fetched.size() / sizeof(float)),
                             rank_);
  }
  const Results& results() const { return results_; }

  /// Expects the CPU's results. Also compares what dispatch saved for the layer's other operators.
  void expect_same(const LayerRun& cpu) {
    EXPECT_EQ(get(saved_.offsets_e1), ep_test::bytes(cpu.saved().offsets_e1));
    EXPECT_EQ(get(saved_.weights_R), ep_test::bytes(cpu.saved().weights_R));
    for (const auto& [name, bytes] : cpu.results()) {
      if (name.starts_with("kept")) continue;
      ASSERT_TRUE(results_.contains(name)) << name;
      const Bytes& mine = results_.at(name);
      const auto differs = std::ranges::mismatch(mine, bytes);
      EXPECT_TRUE(mine == bytes) << name << " on rank " << rank_ << ", from byte " << differs.in1 - mine.begin()
                                 << " of " << mine.size() << " and " << bytes.size() << " on";
    }
  }

 private:
  Tensor allocate(const Shape& shape, DType dtype) const { return op_.arena->allocate(shape, dtype); }
  GemmOperand operand(const Tensor& in_window) const {
    const Shape shape{saved_.num_rows(), case_.dim};
    const auto make = [&](const Shape& s, DType dtype) { return allocate(s, dtype); };
    GemmOperand x;
    if (case_.plain) x.plain = in_window.defined() ? in_window : allocate(shape, case_.dtype);
    if (case_.quantized) {
      x.rows = mx::allocate_quantized(shape, mx::Format{}, make);
      x.columns = mx::allocate_quantized(mx::transposed(shape), mx::Format{}, make);
    }
    return x;
  }
  void poison(const Tensor& x) const {
    if (op_.measuring() || !x.defined()) return;
    TESSERA_CUDA(cudaMemsetAsync(x.raw(), 0xff, x.num_bytes(), op_.cuda->stream().handle()));
  }
  void poison(const GemmOperand& x) const {
    for (const Tensor& part : {x.plain, x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales}) {
      poison(part);
    }
  }
  void put(const Tensor& from, const Tensor& to) const {
    TESSERA_CHECK(from.num_bytes() == to.num_bytes());
    cuda::copy_bytes(op_.cuda->stream(), from.raw(), from.num_bytes(), to.raw());
    op_.cuda->synchronize();
  }
  Bytes get(const Tensor& x) const {
    Bytes bytes(x.num_bytes());
    op_.cuda->fetch(x, bytes.data());
    return bytes;
  }
  void fetch(const std::string& call, const GemmOperand& x) {
    if (num_used_ == 0) return;
    const auto rows = [&](const char* part, const Tensor& of) {
      if (of.defined()) results_[call + part] = get(of.rows(0, num_used_));
    };
    const auto columns = [&](const char* part, const Tensor& of, std::int64_t used) {
      if (!of.defined()) return;
      const Bytes all = get(of);
      Bytes& some = results_[call + part];
      some.clear();
      for (std::int64_t line = 0; line < of.dim(0); ++line) {
        some.insert(some.end(), all.begin() + line * of.dim(1), all.begin() + line * of.dim(1) + used);
      }
    };
    rows(" plain", x.plain), rows(" elements", x.rows.elements), rows(" scales", x.rows.scales);
    columns(" columns", x.columns.elements, num_used_);
    columns(" columns' scales", x.columns.scales, (num_used_ + mx::kBlock - 1) / mx::kBlock);
  }

  Case case_;
  ep_test::WholeCalls calls_;
  int rank_;
  Context op_;
  std::string name_;
  const Layer* layer_ = nullptr;
  TokenRouting routing_;
  DispatchSaved saved_;
  GemmOperand x_RD_, d_out_RD_;
  Tensor y_TD_, d_y_TD_, out_TD_, d_in_TD_, out_RD_, d_x_RD_, d_weights_R_, d_weights_TK_;
  std::int64_t num_used_ = 0;
  Results results_;
};

/// Makes the same pass of a layer on the CPU.
class CpuPass {
 public:
  CpuPass(const Layer& layer, Dispatcher& dispatcher, const ProcessGroup& group)
      : arena_(host_bytes(layer.test_case())),
        run_(layer, DispatchBackend::kDirect, dispatcher, group, {.arena = &arena_}) {}
  LayerRun& run() { return run_; }

 private:
  Arena arena_;
  LayerRun run_;
};

/// A rank's two dispatchers, and the memory that a run on the GPU takes.
struct Rank {
  Rank(const Case& test_case, Domains& host, Domains& rank_gpus, cuda::Runtime& rank_runtime, int num_sms = 2)
      : gpus(rank_gpus.all), runtime(rank_runtime) {
    DispatchOptions options = test_case.options();
    cpu = host.make_direct(options);
    cpu->allocate();
    options.device = Device::kCuda;
    options.num_sms = num_sms;
    gpu = rank_gpus.make_direct(options);
    Arena measuring(Device::kCuda);
    GpuRun run(test_case, *gpu, gpus, {.arena = &measuring, .cuda = &runtime});
    run.dispatch();
    run.combine(Write::kAssign);
    run.combine_backward();
    run.dispatch_again();
    run.dispatch_backward(Write::kAssign);
    run_bytes = measuring.peak();
    gpu->allocate();
  }
  ~Rank() { come_together(); }  // before windows are freed
  /// Waits until no kernel waits for another one any more. Memory may then be allocated and freed.
  void come_together() {
    runtime.synchronize();
    gpus.barrier("test");
  }

  ProcessGroup& gpus;
  cuda::Runtime& runtime;
  std::unique_ptr<Dispatcher> cpu, gpu;
  std::size_t run_bytes = 0;
};

class GpuDirect : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  }
};

std::vector<Case> gpu_cases() {
  std::vector<Case> all = cases();
  // These cases have several chunks, rows of several rounds of 16-byte pieces, and forms that are computed from packed
  // rows.
  all.push_back(
      {.num_tokens = 280, .dim = 136, .top_k = 8, .alignment = 32, .in_window = true, .capacity_factor = 2.0});
  all.push_back({.num_tokens = 260,
                 .dim = 2080,
                 .top_k = 2,
                 .alignment = 128,
                 .skew = Skew::kForced,
                 .capacity_factor = 1.25,
                 .on_grid = false});
  all.push_back({.num_tokens = 300,
                 .dim = 160,
                 .top_k = 6,
                 .alignment = 32,
                 .plain = false,
                 .quantized = true,
                 .dispatch_forward = ep_test::kMxfp8,
                 .capacity_factor = 2.5,
                 .on_grid = false});
  return all;
}

/// Compares two passes of a rank with the CPU's.
void expect_bits_of_the_cpu(const Case& test_case, std::uint64_t seed, Domains& host, Domains& gpus,
                            cuda::Runtime& runtime) {
  Rank rank(test_case, host, gpus, runtime, 2 + static_cast<int>(seed % 4));
  Delays delays(seed % 3, gpus.all.rank());
  Arena arena(rank.run_bytes, Device::kCuda);
  GpuRun run(test_case, *rank.gpu, gpus.all, {.arena = &arena, .cuda = &runtime});
  for (std::uint64_t pass = 1; pass <= 2; ++pass) {
    const Layer layer(test_case, gpus.all.size(), pass);
    CpuPass cpu(layer, *rank.cpu, gpus.all);
    const Write combine = pass == 1 ? Write::kAssign : Write::kAccumulate;
    const Write backward = pass == 1 ? Write::kAccumulate : Write::kAssign;
    cpu.run().make_all(combine, backward);
    run.fill(layer, cpu.run());
    rank.come_together();
    delays.put(runtime), run.dispatch();
    run.fetch_rows("dispatch");
    delays.put(runtime), run.combine(combine);
    delays.put(runtime), run.combine_backward();
    run.fetch_gradients("combine backward");
    delays.put(runtime), run.dispatch_again();
    delays.put(runtime), run.dispatch_backward(backward);
    run.fetch_rows("dispatch again");
    run.fetch_sums();
    run.expect_same(cpu.run());
    rank.gpu->check();
    rank.come_together();
  }
}

/// Compares every case in both types with the CPU, after `adapt(its, seed)` has changed it.
template <typename Adapt>
void expect_bits_of_all_cases(Domains& host, Domains& gpus, cuda::Runtime& runtime, Adapt&& adapt) {
  std::uint64_t seed = 0;
  const int num_ranks = gpus.all.size();
  for (const Case& in_float : gpu_cases()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Case test_case = in_float;
      test_case.dtype = dtype;
      if (test_case.num_experts % num_ranks != 0) test_case.num_experts *= 2;
      if (test_case.top_k == test_case.num_experts) test_case.skew = Skew::kUniform;
      if (test_case.dim % 8 != 0 && dtype == DType::kBFloat16) continue;  // rows must be whole 16 bytes
      SCOPED_TRACE(testing::Message() << num_ranks << " ranks, case " << seed / 2 << ", " << name_of(dtype));
      adapt(test_case, seed);
      expect_bits_of_the_cpu(test_case, seed++, host, gpus, runtime);
    }
  }
}

TEST_F(GpuDirect, GivesTheBitsOfTheCpu) {
  for (const int size : {1, 2, 3, kMaxRanks}) {
    on_gpus(size, [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
      expect_bits_of_all_cases(host, gpus, runtime, [](Case& /*its*/, std::uint64_t /*seed*/) {});
    });
    if (HasFailure()) return;
  }
}

/// The GPUs serve one of several domains. Some choices then have no row, and some tokens have none at all.
TEST_F(GpuDirect, GivesTheBitsOfTheCpuOfOneOfManyDomains) {
  for (const int size : {1, 2, kMaxRanks}) {
    on_gpus(size, [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
      expect_bits_of_all_cases(host, gpus, runtime, [](Case& test_case, std::uint64_t seed) {
        test_case.one_of_domains = seed % 2 == 0 ? 2 : 5;
      });
    });
    if (HasFailure()) return;
  }
}

/// The domains are virtual.
TEST_F(GpuDirect, GivesTheBitsOfTheCpuOnTwoLevels) {
  constexpr std::pair<int, int> kMeshes[] = {{2, 2}, {3, 1}, {4, 1}, {2, 4}, {4, 2}};
  if (num_gpus() < 4) GTEST_SKIP() << "needs 4 GPUs";
  for (const auto& [num_domains, ranks_per_domain] : kMeshes) {
    const int size = num_domains * ranks_per_domain;
    if (num_gpus() < size) continue;
    SCOPED_TRACE(testing::Message() << num_domains << " domains");
    on_own_gpus(
        size,
        [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
          expect_bits_of_all_cases(host, gpus, runtime, [&](Case& test_case, std::uint64_t /*seed*/) {
            test_case.num_domains = gpus.across.size();
          });
        },
        num_domains);
    if (HasFailure()) return;
  }
}

/// All tokens leave their domain, or all stay in it.
TEST_F(GpuDirect, TokensOfOneDomain) {
  if (num_gpus() < 4) GTEST_SKIP() << "needs 4 GPUs";
  for (const Skew skew : {Skew::kOwnDomain, Skew::kNextDomain}) {
    const Case test_case{.num_tokens = 21, .alignment = 16, .skew = skew, .quantized = true, .num_domains = 2};
    on_own_gpus(
        4,
        [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
          expect_bits_of_the_cpu(test_case, 1, host, gpus, runtime);
        },
        test_case.num_domains);
  }
}

/// The calls of two layers overlap. They run once by themselves, as a first step does. Then a graph records them, and
/// replays them with other routings, without the host in between. Ranks are delayed within the graph.
void expect_bits_of_a_graph(const Case& test_case, Domains& host, Domains& gpus, cuda::Runtime& runtime) {
  Rank rank(test_case, host, gpus, runtime, 3);
  Delays delays(7, gpus.all.rank());
  Arena arena(2 * rank.run_bytes, Device::kCuda);
  const Context op{.arena = &arena, .cuda = &runtime};
  GpuRun first(test_case, *rank.gpu, gpus.all, op), second(test_case, *rank.gpu, gpus.all, op);
  const auto step = [&] {
    for (GpuRun* run : {&first, &second}) delays.put(runtime), run->dispatch();
    for (GpuRun* run : {&first, &second}) delays.put(runtime), run->combine(Write::kAccumulate);
    for (GpuRun* run : {&second, &first}) {
      delays.put(runtime), run->combine_backward();
      if (run == &first) run->dispatch_again();
      delays.put(runtime), run->dispatch_backward(Write::kAccumulate);
    }
  };
  cuda::Graph graph;
  for (std::uint64_t pass = 0; pass <= 4; ++pass) {
    const Layer layers[] = {{test_case, gpus.all.size(), 10 * pass}, {test_case, gpus.all.size(), 10 * pass + 1}};
    CpuPass cpu_first(layers[0], *rank.cpu, gpus.all), cpu_second(layers[1], *rank.cpu, gpus.all);
    for (CpuPass* cpu : {&cpu_first, &cpu_second}) cpu->run().make_all(Write::kAccumulate, Write::kAccumulate);
    first.fill(layers[0], cpu_first.run());
    second.fill(layers[1], cpu_second.run());
    rank.come_together();
    if (pass == 1) graph = cuda::Graph(runtime.stream(), step);
    pass == 0 ? step() : graph.launch(runtime.stream());
    for (GpuRun* run : {&first, &second}) {
      run->fetch_sums();
      // The window holds only what arrived last: these rows, and the gradients of the first layer.
      run->fetch_rows("dispatch");
      run->fetch_rows("dispatch again");
      run->fetch_gradients("combine backward");
      if (run == &second && test_case.in_window) continue;
      run->expect_same(run == &first ? cpu_first.run() : cpu_second.run());
    }
    rank.gpu->check();
    rank.come_together();
  }
}

TEST_F(GpuDirect, AsPartsOfAGraph) {
  for (const int size : {2, kMaxRanks}) {
    for (const bool in_window : {false, true}) {
      const Case test_case{
          .num_tokens = 200, .dim = 72, .dtype = DType::kBFloat16, .alignment = 8, .in_window = in_window};
      on_gpus(size, [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
        expect_bits_of_a_graph(test_case, host, gpus, runtime);
      });
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuDirect, AsPartsOfAGraphOnTwoLevels) {
  if (num_gpus() < 4) GTEST_SKIP() << "needs 4 GPUs";
  for (const int num_domains : {2, 4}) {
    const Case test_case{
        .num_tokens = 200, .dim = 72, .dtype = DType::kBFloat16, .alignment = 8, .num_domains = num_domains};
    on_own_gpus(
        4,
        [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
          expect_bits_of_a_graph(test_case, host, gpus, runtime);
        },
        test_case.num_domains);
  }
}

/// A dispatch right after another one must not change counts that a late block of another rank still reads. The late
/// blocks are those of rank 1 that only receive. At first there are SMs for rank 1's first blocks only. The SMs that
/// become free are held, except for one, until other ranks begin their second dispatch. The GPU starts the blocks of
/// rank 1 last.
TEST_F(GpuDirect, BlocksThatStartLate) {
  constexpr int kSms = 16, kEarly = 8, kLongMicroseconds = 4000, kShortMicroseconds = 2000, kHeldMicroseconds = 500;
  for (const int size : {2, 4, 8}) {
    on_one_gpu(size, [&](Domains& host, Domains& gpus, cuda::Runtime& rank_runtime) {
      const int me = gpus.all.rank();
      cuda::Runtime rank_1(cuda::Priority::kLow);
      cuda::Runtime& runtime = me == 1 ? rank_1 : rank_runtime;
      const Case test_case{.num_tokens = 96, .dim = 64, .num_experts = 16, .dtype = DType::kBFloat16, .alignment = 32};
      Rank rank(test_case, host, gpus, runtime, kSms);
      Arena arena(2 * rank.run_bytes, Device::kCuda);
      const Context op{.arena = &arena, .cuda = &runtime};
      GpuRun first(test_case, *rank.gpu, gpus.all, op), second(test_case, *rank.gpu, gpus.all, op);
      const cuda::Stream for_long(cuda::Priority::kHigh), for_short(cuda::Priority::kHigh), behind_rank_0;
      for (std::uint64_t pass = 1; pass <= 5; ++pass) {
        const Layer layers[] = {{test_case, size, 2 * pass}, {test_case, size, 2 * pass + 1}};
        CpuPass cpu_first(layers[0], *rank.cpu, gpus.all), cpu_second(layers[1], *rank.cpu, gpus.all);
        cpu_first.run().dispatch();
        cpu_second.run().dispatch();
        first.fill(layers[0], cpu_first.run());
        second.fill(layers[1], cpu_second.run());
        rank.come_together();
        const int of_others = kSms * (size - 2) + kEarly;
        if (me == 0) {
          hold_sms(for_long, rank_runtime.num_sms() - of_others - kSms, kLongMicroseconds);
          hold_sms(for_short, kSms, kShortMicroseconds);
        }
        for (const int turn : {2, 1, 0}) {  // ranks from 2 on, then rank 1, then rank 0
          gpus.all.barrier("turn");
          if (std::min(me, 2) != turn) continue;
          first.dispatch();
          second.dispatch();
        }
        if (me == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));  // rank 0's first dispatch now waits for SMs
          hold_sms(behind_rank_0, of_others + kSms - 1, kHeldMicroseconds);
        }
        first.fetch_rows("dispatch");
        second.fetch_rows("dispatch");
        first.expect_same(cpu_first.run());
        second.expect_same(cpu_second.run());
        rank.gpu->check();
        for (const cuda::Stream* stream : {&for_long, &for_short, &behind_rank_0}) stream->synchronize();
        rank.come_together();
      }
    });
    if (HasFailure()) return;
  }
}

/// A layer's forward and backward in as many rounds as it needs, as an MoE layer makes them. The experts return their
/// rows, and a row's gradient of the weight is the weight. On a GPU, the operands keep their addresses.
class PassInRounds {
 public:
  PassInRounds(const Case& test_case, const Dispatcher& dispatcher, const Context& op) : case_(test_case), op_(op) {
    const Shape slots{test_case.num_tokens, test_case.top_k}, tokens{test_case.num_tokens, test_case.dim};
    const auto allocate = [&](const Shape& shape, DType dtype) { return op.arena->allocate(shape, dtype); };
    routing_ = {.expert_ids_tK = allocate(slots, DType::kInt32),
                .weights_tK = allocate(slots, DType::kFloat32),
                .counts_E = allocate({test_case.num_experts}, DType::kInt32)};
    first_ = dispatcher.allocate_saved(op, {.name = "layers.7.moe", .alignment = test_case.alignment}, routing_);
    for (Tensor* x : {&y_TD_, &d_y_TD_, &out_TD_, &d_in_TD_}) *x = allocate(tokens, test_case.dtype);
    d_weights_TK_ = allocate(slots, DType::kFloat32);
    later_rounds_1_ = allocate({1}, DType::kFloat64);
  }

  /// Copies the numbers of a pass into the operands. Results hold no numbers until run().
  void fill(const Layer& layer, int rank) const {
    Arena host(host_bytes(case_));
    const TokenRouting routing = layer.tensors(host, rank);
    put(routing.expert_ids_tK, routing_.expert_ids_tK), put(routing.weights_tK, routing_.weights_tK);
    put(routing.counts_E, routing_.counts_E);
    put(layer.tokens(host, "y", rank), y_TD_), put(layer.tokens(host, "d_y", rank), d_y_TD_);
    for (const Tensor& x : {out_TD_, d_in_TD_, d_weights_TK_}) {
      const Tensor nans = host.allocate(x.shape(), x.dtype());
      ep_test::set_bytes(nans, 0xff);
      put(nans, x);
    }
    const Tensor zero_1 = host.allocate({1}, DType::kFloat64);
    ep_test::set_bytes(zero_1, 0);
    put(zero_1, later_rounds_1_);
  }

  /// Makes the pass. The rounds before `least` run even if no rows are left for them.
  void run(Dispatcher& dispatcher, std::int64_t least = 1) const {
    const ArenaScope scope(*op_.arena);
    const ep_test::CrossedTokens crossed(
        op_, dispatcher, first_,
        {.y = y_TD_, .d_y = d_y_TD_, .out = out_TD_, .d_in = d_in_TD_, .d_weights = d_weights_TK_});
    const auto dispatch = [&](const Context& op, const DispatchSaved& saved) {
      const Tensor x_RD = rows(saved);
      dispatcher.dispatch(op, crossed.y, saved, x_RD);
      return x_RD;
    };
    const auto backward = [&](const Context& op, const DispatchSaved& saved, Write write, const Tensor& d_weights) {
      const Tensor d_RD = rows(saved);
      dispatcher.combine_backward(op, crossed.d_y, saved, d_RD);
      dispatcher.dispatch_backward(op, d_RD, saved.weights_R, saved, crossed.d_in, write, d_weights);
    };
    crossed.begin_forward();
    dispatcher.combine(op_, dispatch(op_, first_), first_, crossed.out, Write::kAssign);
    dispatcher.for_later_rounds(op_, first_, least, [&](const Context& call, const DispatchSaved& saved) {
      dispatcher.combine(call, dispatch(call, saved), saved, crossed.out, Write::kAccumulate);
    });
    crossed.end_forward();
    dispatcher.add_later_rounds(op_, first_, later_rounds_1_);
    crossed.begin_backward();
    backward(op_, first_, Write::kAssign, crossed.d_weights);
    dispatcher.for_later_rounds(op_, first_, least, [&](const Context& call, const DispatchSaved& saved) {
      dispatch(call, saved);
      const Tensor d_weights = op_.arena->allocate(crossed.d_weights.shape(), DType::kFloat32);
      backward(call, saved, Write::kAccumulate, d_weights);
      add(call, crossed.d_weights, d_weights, crossed.d_weights);
    });
    crossed.end_backward();
  }

  std::int64_t num_rounds(const Dispatcher& dispatcher) const { return dispatcher.num_rounds(op_, first_); }
  double num_later_rounds() const {
    double later = -1.0;
    std::memcpy(&later, get(later_rounds_1_).data(), sizeof later);
    return later;
  }
  std::vector<Bytes> results() const { return {get(out_TD_), get(d_in_TD_), get(d_weights_TK_)}; }

 private:
  Tensor rows(const DispatchSaved& saved) const {
    return op_.arena->allocate({saved.num_rows(), case_.dim}, case_.dtype);
  }
  void put(const Tensor& from, const Tensor& to) const {
    if (op_.cuda == nullptr) return void(std::memcpy(to.raw(), from.raw(), from.num_bytes()));
    cuda::copy_bytes(op_.cuda->stream(), from.raw(), from.num_bytes(), to.raw());
    op_.cuda->synchronize();
  }
  Bytes get(const Tensor& x) const {
    if (op_.cuda == nullptr) return ep_test::bytes(x);
    Bytes bytes(x.num_bytes());
    op_.cuda->fetch(x, bytes.data());
    return bytes;
  }

  Case case_;
  Context op_;
  TokenRouting routing_;
  DispatchSaved first_;
  Tensor y_TD_, d_y_TD_, out_TD_, d_in_TD_, d_weights_TK_, later_rounds_1_;
};

/// Loads beyond a rank's room are worked off in rounds, with the bits of the CPU's rounds. In a graph, which is
/// recorded once, the GPUs repeat the loop as often as the counts of each launch say.
void expect_rounds_of_the_cpu(Case test_case, bool in_graph, Domains& host, Domains& gpus, cuda::Runtime& runtime) {
  test_case.capacity_factor = 1.25;
  const int num_ranks = gpus.all.size();
  Rank rank(test_case, host, gpus, runtime);
  Arena measuring(Device::kCuda);
  PassInRounds(test_case, *rank.gpu, {.arena = &measuring, .cuda = &runtime}).run(*rank.gpu);
  Arena host_arena(host_bytes(test_case)), arena(measuring.peak(), Device::kCuda);
  const PassInRounds on_cpu(test_case, *rank.cpu, {.arena = &host_arena});
  const PassInRounds on_gpu(test_case, *rank.gpu, {.arena = &arena, .cuda = &runtime});
  rank.come_together();
  cuda::Graph graph;
  if (in_graph && test_case.num_domains > 1) {  // NCCL connects in its first all-to-all, as in a first step
    on_gpu.fill(Layer(test_case, num_ranks, 0), gpus.all.rank());
    on_gpu.run(*rank.gpu);
    rank.come_together();
  }
  if (in_graph) graph = cuda::Graph(runtime.stream(), [&] { on_gpu.run(*rank.gpu); });
  std::uint64_t pass = 1;
  for (const Skew skew : {Skew::kOneRank, Skew::kForced, Skew::kOneExpert, Skew::kUniform, Skew::kOneRank}) {
    test_case.skew = skew;
    SCOPED_TRACE(testing::Message() << "pass " << pass << ", in a graph: " << in_graph);
    const Layer layer(test_case, num_ranks, pass++);
    on_cpu.fill(layer, gpus.all.rank());
    on_cpu.run(*rank.cpu);
    const int domains = test_case.num_domains;
    if (skew == Skew::kOneRank && gpus.all.rank() / (num_ranks / domains) == domains - 1) {
      EXPECT_GE(on_cpu.num_rounds(*rank.cpu), num_ranks == 2 ? 2 : 3);
    }
    on_gpu.fill(layer, gpus.all.rank());
    rank.come_together();
    if (in_graph) {
      graph.launch(runtime.stream());
    } else {
      on_gpu.run(*rank.gpu, pass % 2 == 0 ? 2 : 1);
    }
    EXPECT_EQ(on_gpu.num_rounds(*rank.gpu), on_cpu.num_rounds(*rank.cpu));
    EXPECT_EQ(on_gpu.num_later_rounds(), static_cast<double>(on_cpu.num_rounds(*rank.cpu) - 1));
    EXPECT_EQ(on_gpu.results(), on_cpu.results());
    rank.gpu->check();
    rank.come_together();
  }
}

void expect_rounds_of_the_cpu(bool in_graph, Domains& host, Domains& gpus, cuda::Runtime& runtime) {
  Case test_case{.num_tokens = 200, .dim = 64, .num_experts = 12, .alignment = 4, .num_domains = gpus.across.size()};
  expect_rounds_of_the_cpu(test_case, in_graph, host, gpus, runtime);
  test_case.dtype = DType::kBFloat16;
  test_case.alignment = 32;
  test_case.dispatch_forward = ep_test::kMxfp8;
  expect_rounds_of_the_cpu(test_case, in_graph, host, gpus, runtime);
}

TEST_F(GpuDirect, RoundsGiveTheBitsOfTheCpu) {
  for (const int size : {2, 3, kMaxRanks}) {
    for (const bool in_graph : {false, true}) {
      on_gpus(size, [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
        expect_rounds_of_the_cpu(in_graph, host, gpus, runtime);
      });
      if (HasFailure()) return;
    }
  }
}

/// Tokens cross before the loop of rounds, and sums after it.
TEST_F(GpuDirect, RoundsOnTwoLevels) {
  if (num_gpus() < 4) GTEST_SKIP() << "needs 4 GPUs";
  for (const bool in_graph : {false, true}) {
    on_own_gpus(
        4,
        [&](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
          expect_rounds_of_the_cpu(in_graph, host, gpus, runtime);
        },
        2);
    if (HasFailure()) return;
  }
}

/// One rank does not come to its second dispatch. The others name it, and say what they have seen of it.
TEST_F(GpuDirect, ARankThatDoesNotCome) {
  on_gpus(
      3,
      [](Domains& host, Domains& gpus, cuda::Runtime& runtime) {
        const Case test_case;
        Rank rank(test_case, host, gpus, runtime);
        Arena arena(rank.run_bytes, Device::kCuda);
        GpuRun run(test_case, *rank.gpu, gpus.all, {.arena = &arena, .cuda = &runtime});
        const Layer layer(test_case, gpus.all.size(), 1);
        CpuPass cpu(layer, *rank.cpu, gpus.all);
        cpu.run().make_all(Write::kAssign, Write::kAssign);
        run.fill(layer, cpu.run());
        rank.come_together();
        run.dispatch();
        run.combine(Write::kAssign);
        if (gpus.all.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        run.dispatch_again();
        run.dispatch_backward(Write::kAssign);  // does nothing
        runtime.synchronize();
        for (int again = 0; again < 2; ++again) {
          const std::string message = message_of<RankFailure>([&] { rank.gpu->check(); });
          EXPECT_THAT(message, testing::HasSubstr("dispatch again of layers.7.moe (ep) did not end within 1 s"));
          EXPECT_THAT(message, testing::HasSubstr("it waits for rank 1 of ep to come: epoch 3 expected, 1 seen"));
          EXPECT_THAT(message, testing::ContainsRegex("rank 1 \\(process"));
        }
      },
      Progress::Seconds(1.0));
}

}  // namespace
}  // namespace tessera
