// Compares gradients of every parameter on several GPUs with one GPU's, in the precisions of training runs. Both are
// compared with float32 on a CPU. A mesh may be at most 1.5 times as far from that as one GPU is: it rounds as often,
// but adds in another order. What a mesh loses or counts twice is far more. tests/gpu_mutants.py --meshes shows that.
#include "tests/step/text_gradients.h"

namespace tessera::gradient_test {
namespace {

using mesh_test::kDirect;
using mesh_test::kNotKept;
using mesh_test::kPerMicroBatch;
using mesh_test::kReduceBfloat16;
using mesh_test::kRounds;
using mesh_test::kSelective;
using mesh_test::schedule;

constexpr double kBound = 1.5;

/// All meshes divide these sizes, and a rank's parts are whole blocks of 128.
const Overrides kMeshSizes = {"--model.args.n_layers=4", "--model.args.num_experts=8",
                              "--model.args.moe_inter_dim=512"};

struct Precision {
  const char* name;
  Overrides overrides;

  friend void PrintTo(const Precision& precision, std::ostream* out) { *out << precision.name; }
};

/// Returns the gradients of one rank, which are computed once. Cases with rounds have the real router. The others have
/// forced balance, because rounding may change what the router chooses.
const Gradients& of_one_rank(bool is_forced, const Precision& precision, Device device) {
  static std::map<std::tuple<bool, std::string, Device>, Gradients> runs;
  const std::tuple key(is_forced, precision.name, device);
  const auto found = runs.find(key);
  if (found != runs.end()) return found->second;
  const Overrides overrides = kMeshSizes + (is_forced ? kForced : Overrides{}) + precision.overrides;
  return runs[key] = first_gradients({"one", 1, {}, 2, overrides, device});
}

class GradientsOnGpus : public ::testing::TestWithParam<std::tuple<MeshCase, Precision>> {};

TEST_P(GradientsOnGpus, AreAsGoodAsOneGpus) {
  auto [mesh_case, precision] = GetParam();
  if (comm_test::num_gpus() < mesh_case.num_ranks) {
    GTEST_SKIP() << "needs " << mesh_case.num_ranks << " GPUs: " << cuda::why_unavailable();
  }
  mesh_case.device = Device::kCuda;
  const bool is_forced =
      parse_job_config(kGradientModel, mesh_case.overrides).parallelism.expert_parallel_capacity_factor == 0.0;
  mesh_case.overrides = kMeshSizes + (is_forced ? kForced : Overrides{}) + precision.overrides + mesh_case.overrides;
  // The error of float32 is a thousandth of the other precisions' or less.
  const Gradients &exact = of_one_rank(is_forced, {"float32", kFloat32}, Device::kCpu),
                  &one = of_one_rank(is_forced, precision, Device::kCuda), many = first_gradients(mesh_case);
  ASSERT_EQ(many.size(), exact.size());
  Worst worst;
  for (const auto& [name, expected] : exact) {
    const double of_one = distance(one.at(name), expected), of_many = distance(many.at(name), expected);
    ASSERT_GT(of_one, 0.0) << name;
    EXPECT_LE(of_many, kBound * of_one) << name << ", whose norm is " << std::sqrt(dot(expected, expected));
    worst.see(of_many / of_one, name);
  }
  fmt::print("{} {}: error at most {:.3f} times one GPU's ({})\n", mesh_case.name, precision.name, worst.error,
             worst.name);
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, GradientsOnGpus,
    ::testing::Combine(
        ::testing::Values(MeshCase{"fsdp2", 2, {}, 2}, MeshCase{"fsdp2_not_kept", 2, {}, 2, kNotKept},
                          MeshCase{"fsdp2_reduce", 2, {}, 2, kReduceBfloat16},
                          MeshCase{"replicate2", 2, {.dp_replicate = 2}, 2}, MeshCase{"tp2", 2, {.tp = 2}, 2},
                          MeshCase{"cp2", 2, {.cp = 2}, 2}, MeshCase{"ep2", 2, {.ep = 2}, 2},
                          MeshCase{"ep2_direct", 2, {.ep = 2}, 2, kDirect}, MeshCase{"pp2", 2, {.pp = 2}, 4},
                          MeshCase{"pp2_interleaved", 2, {.pp = 2}, 4, schedule("Interleaved1F1B")},
                          MeshCase{"pp2_zbv", 2, {.pp = 2}, 4, schedule("ZBVZeroBubble") + kSelective},
                          MeshCase{"pp2_dualpipev", 2, {.pp = 2}, 4, schedule("DualPipeV")},
                          MeshCase{"fsdp2_tp2", 4, {.tp = 2}, 2},
                          MeshCase{"replicate2_cp2", 4, {.dp_replicate = 2, .cp = 2}, 2},
                          MeshCase{"ep4_of_2x2_direct", 4, {.ep = 4, .ep_domain = 2}, 2, kDirect},
                          MeshCase{"pp2_fsdp2_per_micro_batch", 4, {.pp = 2}, 4, kPerMicroBatch},
                          MeshCase{"pp2_ep2_zbv_direct", 4, {.pp = 2, .ep = 2}, 4, schedule("ZBVZeroBubble") + kDirect},
                          MeshCase{"ep2_rounds", 2, {.ep = 2}, 2, kRounds},
                          MeshCase{"ep2_rounds_direct", 2, {.ep = 2}, 2, kDirect + kRounds},
                          MeshCase{"pp2_ep2_rounds", 4, {.pp = 2, .ep = 2}, 4, kRounds},
                          MeshCase{"pp2_fsdp2_cp2_ep2_direct", 8, {.cp = 2, .pp = 2, .ep = 2}, 2, kDirect}),
        ::testing::Values(Precision{"bfloat16", kBfloat16}, Precision{"mxfp8", recipe("mxfp8", "128x128")},
                          Precision{"mxfp8_exact", recipe("mxfp8", "1x32")},
                          Precision{"fp8_blockwise", recipe("fp8_blockwise", "default")})),
    [](const auto& test) {
      return fmt::format("{}_{}", std::get<MeshCase>(test.param).name, std::get<Precision>(test.param).name);
    });

}  // namespace
}  // namespace tessera::gradient_test
