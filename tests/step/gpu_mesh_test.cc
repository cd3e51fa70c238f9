// Trains on several GPUs. Compares losses, gradients and loads of every mesh with those of one rank on a CPU.
#include "tests/step/mesh_training.h"

namespace tessera::mesh_test {
namespace {

class OnGpus : public ::testing::TestWithParam<MeshCase> {};

// Of ten steps, the first two run operator by operator, and the others as graphs.
TEST_P(OnGpus, TrainsAsOneRankDoes) {
  MeshCase mesh_case = GetParam();
  mesh_case.device = Device::kCuda;
  if (comm_test::num_gpus() < mesh_case.num_ranks) {
    GTEST_SKIP() << "needs " << mesh_case.num_ranks << " GPUs: " << cuda::why_unavailable();
  }
  expect_as_on_one_rank(mesh_case);
}

class ReducedAsBfloat16OnGpus : public ::testing::TestWithParam<MeshCase> {};

// GPUs round and add the same numbers in the same order as CPUs. Only the gradients that they round differ, in their
// last bits, which now and then makes a step of bfloat16.
TEST_P(ReducedAsBfloat16OnGpus, TrainsAsOnCpus) {
  MeshCase mesh_case = GetParam();
  if (comm_test::num_gpus() < mesh_case.num_ranks) {
    GTEST_SKIP() << "needs " << mesh_case.num_ranks << " GPUs: " << cuda::why_unavailable();
  }
  const Trained in_float32 = train(mesh_case);
  mesh_case.overrides = mesh_case.overrides + kReduceBfloat16;
  const Trained on_cpus = train(mesh_case);
  mesh_case.device = Device::kCuda;
  const Trained on_gpus = train(mesh_case);
  expect_near(on_gpus.losses, on_cpus.losses, 1e-4, "loss");
  expect_near(on_gpus.grad_norms, on_cpus.grad_norms, 1e-3, "gradient norm");
  for (const auto& [name, expected] : on_cpus.gradients) {
    const std::vector<float>& gradient = on_gpus.gradients.at(name);
    EXPECT_LT(relative_error(gradient, expected), 0.5 * relative_error(gradient, in_float32.gradients.at(name)))
        << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, ReducedAsBfloat16OnGpus,
                         ::testing::Values(MeshCase{"fsdp2", 2, {}, 2}, MeshCase{"fsdp4", 4, {}},
                                           MeshCase{"hsdp", 4, {.dp_replicate = 2}},
                                           MeshCase{"ep2_of_fsdp4_direct", 4, {.ep = 2}, 2, kDirect},
                                           MeshCase{"pp2_fsdp2", 4, {.pp = 2}, 4},
                                           MeshCase{"pp2_fsdp2_per_micro_batch", 4, {.pp = 2}, 4, kPerMicroBatch}),
                         [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Meshes, OnGpus,
    ::testing::Values(MeshCase{"fsdp2", 2, {}}, MeshCase{"fsdp4", 4, {}, 2}, MeshCase{"fsdp8", 8, {}, 1, kBalance},
                      MeshCase{"replicate2", 2, {.dp_replicate = 2}, 2}, MeshCase{"hsdp", 4, {.dp_replicate = 2}, 2},
                      MeshCase{"fsdp2_mtp", 2, {}, 2, kMtp}, MeshCase{"fsdp4_never", 4, {}, 1, kNever},
                      MeshCase{"fsdp2_full", 2, {}, 1, kFull}, MeshCase{"tp2", 2, {.tp = 2}},
                      MeshCase{"tp2_queries", 2, {.tp = 2}, 1, kQueries},
                      MeshCase{"fsdp2_tp2", 4, {.tp = 2}, 1, kSelective}, MeshCase{"cp2", 2, {.cp = 2}},
                      MeshCase{"cp4_balance", 4, {.cp = 4}, 1, kBalance},
                      MeshCase{"cp2_documents", 2, {.cp = 2}, 2, kDocuments}, MeshCase{"fsdp2_cp2", 4, {.cp = 2}, 2}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    ExpertMeshes, OnGpus,
    ::testing::Values(
        MeshCase{"ep2", 2, {.ep = 2}}, MeshCase{"ep4_balance", 4, {.ep = 4}, 1, kBalance},
        MeshCase{"ep2_of_fsdp4_selective", 4, {.ep = 2}, 1, kSelective}, MeshCase{"ep2_mxfp8", 2, {.ep = 2}, 1, kMxfp8},
        MeshCase{"ep2_mxfp8_direct", 2, {.ep = 2}, 1, kDirect + kMxfp8},
        MeshCase{"ep2_direct", 2, {.ep = 2}, 2, kDirect}, MeshCase{"ep4_mtp_direct", 4, {.ep = 4}, 1, kDirect + kMtp},
        MeshCase{"ep2_of_fsdp4_direct", 4, {.ep = 2}, 2, kDirect + kBalance},
        MeshCase{"ep2_of_fsdp4_never_full_direct", 4, {.ep = 2}, 1, kDirect + kNever + kFull},
        MeshCase{"ep2_selective_direct", 2, {.ep = 2}, 1, kDirect + kSelective},
        MeshCase{"ep8_groups_direct", 8, {.ep = 8}, 1, kDirect + kGroups},
        MeshCase{"ep2_rounds", 2, {.ep = 2}, 2, kRounds},
        MeshCase{"ep2_rounds_direct", 2, {.ep = 2}, 2, kDirect + kRounds},
        MeshCase{"ep4_rounds_full_direct", 4, {.ep = 4}, 1, kDirect + kRounds + kFull},
        MeshCase{"ep2_of_fsdp4_rounds_mxfp8_direct", 4, {.ep = 2}, 1, kDirect + kRounds + kWgradHigh},
        MeshCase{"pp2_ep2_zbv_rounds_direct", 4, {.pp = 2, .ep = 2}, 4, schedule("ZBVZeroBubble") + kDirect + kRounds},
        MeshCase{"ep4_of_2x2_rounds_selective_direct", 4, {.ep = 4, .ep_domain = 2}, 1, kDirect + kRounds + kSelective},
        MeshCase{"ep4_of_2x2_direct", 4, {.ep = 4, .ep_domain = 2}, 2, kDirect + kBalance},
        MeshCase{"ep4_of_2x2_selective_direct", 4, {.ep = 4, .ep_domain = 2}, 1, kDirect + kSelective},
        MeshCase{"ep8_of_2x4_full_direct", 8, {.ep = 8, .ep_domain = 4}, 1, kDirect + kFull},
        MeshCase{"ep8_of_4x2_direct", 8, {.ep = 8, .ep_domain = 2}, 1, kDirect},
        MeshCase{"ep4_of_2x2_of_fsdp8_mxfp8_direct", 8, {.ep = 4, .ep_domain = 2}, 1, kDirect + kWgradHigh},
        MeshCase{"tp2_ep2_direct", 2, {.tp = 2, .ep = 2}, 1, kDirect + kBalance},
        MeshCase{"cp2_ep2_selective_direct", 2, {.cp = 2, .ep = 2}, 2, kDirect + kSelective}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    PipelineMeshes, OnGpus,
    ::testing::Values(
        MeshCase{"pp2", 2, {.pp = 2}, 4}, MeshCase{"pp2_interleaved", 2, {.pp = 2}, 4, schedule("Interleaved1F1B")},
        MeshCase{"pp2_zbv_selective", 2, {.pp = 2}, 4, schedule("ZBVZeroBubble") + kSelective},
        MeshCase{"pp2_zbv_mtp", 2, {.pp = 2}, 2, schedule("ZBVZeroBubble") + kMtp},
        MeshCase{"pp2_dualpipev_full", 2, {.pp = 2}, 4, schedule("DualPipeV") + kFull},
        MeshCase{"pp2_dualpipev_mxfp8", 2, {.pp = 2}, 4, schedule("DualPipeV") + kWgradHigh},
        MeshCase{"pp4_balance", 4, {.pp = 4}, 8, kBalance},
        MeshCase{"pp4_zbv", 4, {.pp = 4}, 8, schedule("ZBVZeroBubble") + kEightLayers},
        MeshCase{"pp4_interleaved", 4, {.pp = 4}, 8, schedule("Interleaved1F1B") + kEightLayers},
        MeshCase{"pp4_dualpipev_mtp", 4, {.pp = 4}, 8, schedule("DualPipeV") + kEightLayers + kMtp},
        MeshCase{"pp2_fsdp2", 4, {.pp = 2}, 4}, MeshCase{"pp2_ep2", 4, {.pp = 2, .ep = 2}, 4},
        MeshCase{"pp2_fsdp2_zbv_mtp", 4, {.pp = 2}, 2, schedule("ZBVZeroBubble") + kMtp},
        MeshCase{"pp2_tp2_dualpipev", 4, {.tp = 2, .pp = 2}, 4, schedule("DualPipeV")},
        MeshCase{"pp2_ep2_zbv_direct", 4, {.pp = 2, .ep = 2}, 4, schedule("ZBVZeroBubble") + kDirect},
        MeshCase{
            "pp2_fsdp2_cp2_ep2_zbv_direct", 8, {.cp = 2, .pp = 2, .ep = 2}, 4, schedule("ZBVZeroBubble") + kDirect}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    PairedPasses, OnGpus,
    ::testing::Values(
        MeshCase{"ep2_in_turns", 2, {.ep = 2}, 4, kOverlap},
        MeshCase{"ep2_in_turns_direct", 2, {.ep = 2}, 4, kOverlap + kDirect + kBalance},
        MeshCase{"ep2_in_turns_some_rounds_direct", 2, {.ep = 2}, 4, kOverlap + kDirect + kSomeRounds + kSelective},
        MeshCase{"ep2_in_turns_mxfp8_not_kept_direct", 2, {.ep = 2}, 4, kOverlap + kDirect + kWgradHigh + kNotKept},
        MeshCase{"ep2_of_fsdp4_in_turns_direct", 4, {.ep = 2}, 2, kOverlap + kDirect},
        MeshCase{"ep4_in_turns_rounds_full_direct", 4, {.ep = 4}, 2, kOverlap + kDirect + kRounds + kFull},
        MeshCase{"ep4_of_2x2_in_turns_direct", 4, {.ep = 4, .ep_domain = 2}, 2, kOverlap + kDirect},
        MeshCase{"ep4_of_2x2_in_turns_some_rounds_direct",
                 4,
                 {.ep = 4, .ep_domain = 2},
                 4,
                 kOverlap + kDirect + kSomeRounds + kSixteen},
        MeshCase{"tp2_ep4_of_2x2_direct", 4, {.tp = 2, .ep = 4, .ep_domain = 2}, 1, kDirect},
        MeshCase{"tp2_ep2_in_turns_direct", 2, {.tp = 2, .ep = 2}, 4, kOverlap + kDirect},
        MeshCase{"pp2_ep2_dualpipev", 4, {.pp = 2, .ep = 2}, 4, kDualPipeV + kOverlap},
        // A layer's first dispatch of a step takes a later round in some steps, and none in others.
        MeshCase{"pp2_ep2_zbv_some_rounds_direct",
                 4,
                 {.pp = 2, .ep = 2},
                 4,
                 schedule("ZBVZeroBubble") + kDirect + kSomeRounds},
        MeshCase{"pp2_ep2_dualpipev_some_rounds_direct",
                 4,
                 {.pp = 2, .ep = 2},
                 4,
                 kDualPipeV + kOverlap + kDirect + kSomeRounds},
        MeshCase{"pp2_ep2_dualpipev_direct",
                 4,
                 {.pp = 2, .ep = 2},
                 4,
                 kDualPipeV + kOverlap + kDirect + kSelective + kDefers},
        MeshCase{
            "pp2_ep2_dualpipev_rounds_direct", 4, {.pp = 2, .ep = 2}, 4, kDualPipeV + kOverlap + kDirect + kRounds},
        MeshCase{"pp2_ep4_of_2x2_dualpipev_direct",
                 8,
                 {.pp = 2, .ep = 4, .ep_domain = 2},
                 4,
                 kDualPipeV + kDirect + kSixteen}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tessera::mesh_test
