// Gradients on several GPUs, in the precisions of training runs (tests/step/mesh_gradients.h).
#include "tests/step/mesh_gradients.h"

namespace tessera::gradient_test {
namespace {

using mesh_test::kDirect;
using mesh_test::kDualPipeV;
using mesh_test::kNotKept;
using mesh_test::kOverlap;
using mesh_test::kPerMicroBatch;
using mesh_test::kReduceBfloat16;
using mesh_test::kRounds;
using mesh_test::kSelective;
using mesh_test::schedule;

class GradientsOnGpus : public ::testing::TestWithParam<std::tuple<MeshCase, Precision>> {};

TEST_P(GradientsOnGpus, AreAsGoodAsOneGpus) {
  auto [mesh_case, precision] = GetParam();
  if (comm_test::num_gpus() < mesh_case.num_ranks) {
    GTEST_SKIP() << "needs " << mesh_case.num_ranks << " GPUs: " << cuda::why_unavailable();
  }
  mesh_case.device = Device::kCuda;
  expect_as_good_as_one_rank(mesh_case, precision);
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, GradientsOnGpus,
    ::testing::Combine(
        ::testing::Values(
            MeshCase{"fsdp2", 2, {}, 2}, MeshCase{"fsdp2_not_kept", 2, {}, 2, kNotKept},
            MeshCase{"fsdp2_reduce", 2, {}, 2, kReduceBfloat16}, MeshCase{"replicate2", 2, {.dp_replicate = 2}, 2},
            MeshCase{"tp2", 2, {.tp = 2}, 2}, MeshCase{"cp2", 2, {.cp = 2}, 2}, MeshCase{"ep2", 2, {.ep = 2}, 2},
            MeshCase{"ep2_direct", 2, {.ep = 2}, 2, kDirect},
            MeshCase{"pp2", 2, {.pp = 2}, 4}, MeshCase{"pp2_interleaved", 2, {.pp = 2}, 4, schedule("Interleaved1F1B")},
            MeshCase{"pp2_zbv", 2, {.pp = 2}, 4, schedule("ZBVZeroBubble") + kSelective},
            MeshCase{"pp2_dualpipev", 2, {.pp = 2}, 4, schedule("DualPipeV")}, MeshCase{"fsdp2_tp2", 4, {.tp = 2}, 2},
            MeshCase{"replicate2_cp2", 4, {.dp_replicate = 2, .cp = 2}, 2},
            MeshCase{"ep4_of_2x2_direct", 4, {.ep = 4, .ep_domain = 2}, 2, kDirect},
            MeshCase{"pp2_fsdp2_per_micro_batch", 4, {.pp = 2}, 4, kPerMicroBatch},
            MeshCase{"pp2_ep2_zbv_direct", 4, {.pp = 2, .ep = 2}, 4, schedule("ZBVZeroBubble") + kDirect},
            MeshCase{"ep2_in_turns_direct", 2, {.ep = 2}, 4, kOverlap + kDirect},
            MeshCase{"pp2_ep2_dualpipev_direct", 4, {.pp = 2, .ep = 2}, 4, kDualPipeV + kOverlap + kDirect},
            MeshCase{"ep2_rounds", 2, {.ep = 2}, 2, kRounds},
            MeshCase{"ep2_rounds_direct", 2, {.ep = 2}, 2, kDirect + kRounds},
            MeshCase{"pp2_ep2_rounds", 4, {.pp = 2, .ep = 2}, 4, kRounds},
            MeshCase{"pp2_fsdp2_cp2_ep2_direct", 8, {.cp = 2, .pp = 2, .ep = 2}, 2, kDirect}),
        ::testing::Values(Precision{"bfloat16", kBfloat16}, Precision{"mxfp8", recipe("mxfp8", "128x128")},
                          Precision{"mxfp8_256", recipe("mxfp8", "256x256")},
                          Precision{"mxfp8_exact", recipe("mxfp8", "1x32")},
                          Precision{"fp8_blockwise", recipe("fp8_blockwise", "default")})),
    [](const auto& test) {
      return fmt::format("{}_{}", std::get<MeshCase>(test.param).name, std::get<Precision>(test.param).name);
    });

}  // namespace
}  // namespace tessera::gradient_test
