// Compares the standard dispatcher on GPUs with the one on CPUs, bit for bit. The ranks are threads with a GPU each,
// because NCCL needs that.
#include "ops/runtime/runtime.h"
#include "tests/comm/gpus.h"
#include "tests/ep/layer.h"

namespace tessera {
namespace {

using comm_test::num_gpus;
using ep_test::Bytes;
using ep_test::Case;
using ep_test::Layer;
using ep_test::Skew;

constexpr std::size_t kArenaBytes = std::size_t{24} << 20;

/// Makes a rank's pass of a layer on one device, round by round, and collects what every call gives.
class Pass {
 public:
  Pass(const Layer& layer, Dispatcher& dispatcher, int rank, const Context& op)
      : layer_(layer), case_(layer.test_case()), dispatcher_(dispatcher), rank_(rank), op_(op), host_(kArenaBytes) {
    const TokenRouting routing = layer.tensors(host_, rank);
    routing_ = {.expert_ids_tK = put(routing.expert_ids_tK),
                .weights_tK = put(routing.weights_tK),
                .counts_E = put(routing.counts_E)};
  }

  void run() {
    const Tensor y = tokens("y"), sums = tokens("before");
    std::vector<DispatchSaved> rounds;
    do {
      const auto round = static_cast<std::int64_t>(rounds.size());
      rounds.push_back(
          round == 0 ? dispatcher_.allocate_saved(op_, {.name = "layers.7.moe", .alignment = case_.alignment}, routing_)
                     : dispatcher_.allocate_later(op_, rounds.front(), round));
      const DispatchSaved& saved = rounds.back();
      const Tensor x = rows(saved);
      dispatcher_.dispatch(op_, y, saved, x);
      note(get(saved.offsets_e1)), note(get(saved.weights_R));
      num_used_.push_back(
          reinterpret_cast<const std::int32_t*>(results_[results_.size() - 2].data())[offsets_end(saved)]);
      note(get(used(x, saved)));
      dispatcher_.combine(op_, x, saved, sums, round == 0 ? Write::kAssign : Write::kAccumulate);
      if (round == 0) num_rounds_ = dispatcher_.num_rounds(op_, saved);
    } while (std::ssize(rounds) < num_rounds_);
    note(get(sums));
    backward(rounds, y);
  }

  std::int64_t num_rounds() const { return num_rounds_; }
  const std::vector<Bytes>& results() const { return results_; }

 private:
  void backward(const std::vector<DispatchSaved>& rounds, const Tensor& y) {
    const Tensor d_out = tokens("d_y"), d_y = tokens("before");
    for (const DispatchSaved& saved : rounds) {
      const Tensor x = rows(saved), d_x = rows(saved), d_weights = put(routing_of_zeros());
      dispatcher_.dispatch_again(op_, y, saved, x);
      note(get(used(x, saved)));
      dispatcher_.combine_backward(op_, d_out, saved, d_x);
      note(get(used(d_x, saved)));
      dispatcher_.dispatch_backward(op_, d_x, saved.weights_R, saved, d_y, Write::kAccumulate, d_weights);
      note(get(d_weights));
    }
    note(get(d_y));
  }

  bool on_gpu() const { return op_.cuda != nullptr; }
  Tensor put(const Tensor& x) const {
    if (!on_gpu()) return x;
    const Tensor copy = op_.arena->allocate(x.shape(), x.dtype());
    cuda::copy_bytes(op_.cuda->stream(), x.raw(), x.num_bytes(), copy.raw());
    return copy;
  }
  Bytes get(const Tensor& x) const {
    if (!on_gpu() || x.num_bytes() == 0) return ep_test::bytes(x);
    Bytes bytes(x.num_bytes());
    op_.cuda->fetch(x, bytes.data());
    return bytes;
  }
  void note(Bytes bytes) { results_.push_back(std::move(bytes)); }

  Tensor tokens(const char* what) { return put(layer_.tokens(host_, what, rank_)); }
  /// Returns rows that are NaN.
  Tensor rows(const DispatchSaved& saved) {
    const Tensor x = host_.allocate({saved.num_rows(), case_.dim}, case_.dtype);
    ep_test::set_bytes(x, 0xff);
    return put(x);
  }
  Tensor routing_of_zeros() {
    const Tensor x = host_.allocate({case_.num_tokens, case_.top_k}, DType::kFloat32);
    ep_test::set_bytes(x, 0);
    return x;
  }
  static std::size_t offsets_end(const DispatchSaved& saved) {
    return static_cast<std::size_t>(saved.offsets_e1.dim(0) - 1);
  }
  Tensor used(const Tensor& x, const DispatchSaved& saved) const {
    return x.rows(0, num_used_[static_cast<std::size_t>(saved.round)]);
  }

  const Layer& layer_;
  const Case& case_;
  Dispatcher& dispatcher_;
  int rank_;
  Context op_;
  Arena host_;
  TokenRouting routing_;
  std::int64_t num_rounds_ = 1;
  std::vector<std::int64_t> num_used_;  // rows of each round
  std::vector<Bytes> results_;
};

/// Compares two passes of every rank. The second one follows the first without a wait in between.
void expect_bits_of_the_cpu(const Case& test_case, int num_ranks, std::int64_t num_rounds) {
  comm_test::with_ranks(num_ranks, [&](ProcessGroup& world) {
    cuda::use_device(comm_test::gpu_of(world.rank()));
    cuda::Runtime runtime;
    ProcessGroup gpus = world.split(0, world.rank(), "ep");
    gpus.use_gpu(runtime.stream_of_calls(), runtime.stream_of_calls());
    DispatchOptions options = test_case.options();
    const auto cpu = ep_test::allocated_dispatcher(DispatchBackend::kStandard, world, options);
    options.device = Device::kCuda;
    const auto gpu = ep_test::allocated_dispatcher(DispatchBackend::kStandard, gpus, options);
    EXPECT_TRUE(gpu->waits_for_gpu());
    Arena host(kArenaBytes), device(kArenaBytes, Device::kCuda);
    for (std::uint64_t number = 1; number <= 2; ++number) {
      const Layer layer(test_case, num_ranks, number);
      Pass expected(layer, *cpu, world.rank(), {.arena = &host});
      Pass actual(layer, *gpu, world.rank(), {.arena = &device, .cuda = &runtime});
      expected.run();
      actual.run();
      EXPECT_EQ(expected.num_rounds(), num_rounds);
      EXPECT_EQ(actual.num_rounds(), num_rounds);
      ASSERT_EQ(actual.results().size(), expected.results().size());
      for (std::size_t i = 0; i < expected.results().size(); ++i) {
        EXPECT_TRUE(actual.results()[i] == expected.results()[i]) << "result " << i << " on rank " << world.rank();
      }
    }
    runtime.synchronize();
    gpus.barrier("test");
  });
}

class GpuStandard : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
    if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  }
};

TEST_F(GpuStandard, GivesTheBitsOfTheCpu) {
  for (const int num_ranks : {2, 3, 4, 8}) {
    if (num_gpus() < num_ranks) continue;
    for (Case test_case : ep_test::cases()) {
      test_case.plain = true, test_case.quantized = false;
      if (test_case.num_experts % num_ranks != 0) test_case.num_experts *= 2;
      if (test_case.top_k == test_case.num_experts) test_case.skew = Skew::kUniform;
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        test_case.dtype = dtype;
        SCOPED_TRACE(testing::Message() << num_ranks << " ranks, " << name_of(dtype));
        expect_bits_of_the_cpu(test_case, num_ranks, 1);
      }
    }
  }
}

// All rows are of one rank, which has room for those of a balanced load: there are as many rounds as ranks.
TEST_F(GpuStandard, WorksOffALoadInRounds) {
  for (const int num_ranks : {2, 4}) {
    if (num_gpus() < num_ranks) continue;
    for (const std::int64_t num_tokens : {36, 600}) {
      expect_bits_of_the_cpu({.num_tokens = num_tokens, .skew = Skew::kOneRank, .capacity_factor = 1.0}, num_ranks,
                             num_ranks);
    }
  }
}

}  // namespace
}  // namespace tessera
