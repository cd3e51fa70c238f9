#include "run/memory_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/cuda.h"
#include "run/record/metrics.h"
#include "tests/step/mesh_training.h"

namespace tessera::mesh_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class MemoryAdvice : public ::testing::Test {
 protected:
  static JobConfig config(const std::string& mode, int batch) {
    return parse_job_config(kSmallModel,
                            {"--activation_checkpoint.mode=" + mode, "--training.seq_len=64",
                             fmt::format("--training.local_batch_size={}", batch), "--training.global_batch_size=8"});
  }
  static MemoryPlan plan_of(const JobConfig& config) { return TrainingStep(config).memory_plan(); }
  static std::string advice(std::size_t available, std::size_t others = 0) {
    const JobConfig given = config("none", 8);
    return memory_advice({given}, others, available);
  }
};

TEST_F(MemoryAdvice, NamesTheNearestSettingsThatFit) {
  const std::size_t selective = plan_of(config("selective", 8)).total(), full = plan_of(config("full", 8)).total();
  ASSERT_LT(full, selective);
  EXPECT_THAT(advice(selective), AllOf(HasSubstr("weights"), HasSubstr("none"),
                                       HasSubstr("that fits: activation_checkpoint.mode = \"full\":"),
                                       HasSubstr("that fits: activation_checkpoint.mode = \"selective\":"),
                                       HasSubstr("mode = \"none\", training.local_batch_size = ")));
  // With a byte less, selective needs a smaller batch. A byte that is needed besides the step has the same effect.
  for (const std::string& text : {advice(selective - 1), advice(selective, 1)}) {
    EXPECT_THAT(text,
                AllOf(HasSubstr("mode = \"selective\", training.local_batch_size = 4, training.global_batch_size = 8"),
                      HasSubstr("mode = \"full\":")));
  }
}

TEST_F(MemoryAdvice, SaysThatNothingFits) {
  EXPECT_THAT(advice(1 << 10), AllOf(HasSubstr("no mode fits"), Not(HasSubstr("that fits:"))));
}

TEST_F(MemoryAdvice, MomentsInBfloat16TakeHalf) {
  const MemoryPlan plan = plan_of(config("none", 8));
  JobConfig smaller = config("none", 8);
  smaller.optimizer.state_dtype = DType::kBFloat16;
  MemoryPlan expected = plan;
  expected.optimizer_state /= 2;
  EXPECT_EQ(plan_of(smaller), expected);
  EXPECT_THAT(advice(1 << 10), HasSubstr("with optimizer.state_dtype = \"bfloat16\", by mode: none "));
  EXPECT_THAT(advice(1 << 10), Not(HasSubstr("(fits)")));
  EXPECT_THAT(advice(expected.total()), HasSubstr("by mode: none " + format_gib(expected.total()) + " (fits)"));
  EXPECT_THAT(memory_advice({smaller}, 0, 1 << 10), Not(HasSubstr("state_dtype")));
  JobConfig slow = config("none", 8);  // bfloat16 moments cannot follow this beta2
  slow.optimizer.beta2 = 0.999;
  EXPECT_THAT(memory_advice({slow}, 0, 1 << 10), Not(HasSubstr("state_dtype")));
}

TEST_F(MemoryAdvice, GradientsSentInBfloat16TakeNoMemory) {
  for (const Overrides& overrides : {Overrides{}, Overrides{"--parallelism.pipeline_parallel_degree=2"},
                                     Overrides{"--parallelism.pipeline_parallel_degree=2"} + kPerMicroBatch}) {
    const auto plan_with = [&](const Overrides& more) {
      const JobConfig given = parse_job_config(
          kSmallModel, overrides + more + Overrides{"--training.seq_len=64", "--training.global_batch_size=32"});
      const PlannedRun run{given, Device::kCpu, resolve(given.mesh_degrees(), 4)};
      return memory_plan(run, 0, Recompute::kNone, 2);
    };
    EXPECT_EQ(plan_with(kReduceBfloat16), plan_with({}));
  }
}

/// Compares the plans of ranks on a mesh that exists with the plans for the same mesh before it exists.
class PlannedMesh : public ::testing::TestWithParam<MeshCase> {
 protected:
  static JobConfig config() {
    Overrides overrides = GetParam().overrides;
    overrides.emplace_back("--training.local_batch_size=2");
    overrides.emplace_back("--training.global_batch_size=16");
    return parse_job_config(kMeshModel, overrides);
  }
};

TEST_P(PlannedMesh, TakesWhatItsRanksTake) {
  const JobConfig given = config();
  const MeshDegrees degrees = resolve(GetParam().degrees, GetParam().num_ranks);
  with_ranks(GetParam().num_ranks, [&](ProcessGroup& world) {
    const auto mesh = std::make_shared<Mesh>(world, degrees);
    const Mesh planned = Mesh::planned(degrees, world.rank());
    for (ProcessGroup Mesh::*group : {&Mesh::pp, &Mesh::dp_replicate, &Mesh::cp, &Mesh::tp, &Mesh::ep, &Mesh::sequence,
                                      &Mesh::tokens, &Mesh::shard_of_cut, &Mesh::shard_of_whole,
                                      &Mesh::shard_of_experts, &Mesh::model, &Mesh::ep_within, &Mesh::ep_across}) {
      const ProcessGroup& group_of_rank = (*mesh).*group;
      EXPECT_EQ((planned.*group).size(), group_of_rank.size()) << group_of_rank.axis();
      EXPECT_EQ((planned.*group).rank(), group_of_rank.rank()) << group_of_rank.axis();
      EXPECT_EQ((planned.*group).axis(), group_of_rank.axis());
    }
    for (const auto& [name, mode] : recompute_modes()) {
      JobConfig asked = given;
      asked.activation_checkpoint.mode = mode;
      const MemoryPlan there = TrainingStep(asked, mesh).memory_plan();
      const PlannedRun run{given, Device::kCpu, degrees};
      EXPECT_EQ(memory_plan(run, world.rank(), mode, 2), there) << name;
      EXPECT_EQ(memory_plans(run, mode, 2).at(static_cast<std::size_t>(mesh->place.pp)), there) << name;
      EXPECT_EQ(there.windows > 0, asked.parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, PlannedMesh,
    ::testing::Values(MeshCase{"fsdp4", 4, {}}, MeshCase{"ep2_of_fsdp4_reduce", 4, {.ep = 2}, 1, kReduceBfloat16},
                      MeshCase{"hsdp", 4, {.dp_replicate = 2}, 1, kMtp}, MeshCase{"tp2", 2, {.tp = 2}, 1, kBalance},
                      MeshCase{"cp2", 2, {.cp = 2}, 1, kNever}, MeshCase{"ep2_of_fsdp4", 4, {.ep = 2}},
                      MeshCase{"ep4_direct_mxfp8", 4, {.ep = 4}, 1, kDirect + kMxfp8}, MeshCase{"pp4", 4, {.pp = 4}},
                      MeshCase{"ep4_of_2x2_direct", 4, {.ep = 4, .ep_domain = 2}, 1, kDirect},
                      MeshCase{"ep2_overlap", 2, {.ep = 2}, 1, Overrides{"--parallelism.expert_parallel_overlap"}},
                      MeshCase{"pp2_ep2_dualpipev", 4, {.pp = 2, .ep = 2}, 1, schedule("DualPipeV")},
                      MeshCase{"ep8_of_4x2_direct_mxfp8",
                               8,
                               {.ep = 8, .ep_domain = 2},
                               1,
                               kDirect + kMxfp8 +
                                   Overrides{"--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8"}},
                      MeshCase{"pp2_fsdp2_cp2_tp2_ep4_direct_zbv",
                               16,
                               {.cp = 2, .tp = 2, .pp = 2, .ep = 4},
                               1,
                               kDirect + Overrides{"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}}),
    [](const auto& test) { return test.param.name; });

// The advice for many ranks counts the windows, and suggests a smaller batch or capacity factor.
TEST_F(MemoryAdvice, OfManyRanks) {
  const JobConfig given = parse_job_config(
      kSmallModel, {"--training.seq_len=64", "--training.local_batch_size=4", "--training.global_batch_size=16",
                    "--parallelism.expert_parallel_degree=2", "--parallelism.expert_parallel_comm_backend=direct"});
  const PlannedRun run{given, Device::kCpu, resolve(given.mesh_degrees(), 4)};
  const std::size_t smaller = memory_plan(run, 0, Recompute::kNone, 2).total();
  EXPECT_THAT(memory_advice(run, 0, smaller),
              AllOf(HasSubstr(" windows "), HasSubstr(" per rank"),
                    HasSubstr("mode = \"none\", training.local_batch_size = 2, training.global_batch_size = 16"),
                    HasSubstr("expert_parallel_capacity_factor = 1.5")));
  // 16 sequences are no multiple of 3 ranks' 12.
  EXPECT_THROW(given.validate_on(resolve({.dp_shard = 3}, 3)), Error);
}

TEST_F(MemoryAdvice, OfAPipelineIsOfTheRankThatTakesMost) {
  const JobConfig given =
      parse_job_config(kSmallModel, {"--training.seq_len=64", "--training.local_batch_size=2",
                                     "--training.global_batch_size=8", "--parallelism.pipeline_parallel_degree=2"});
  const PlannedRun run{given, Device::kCpu, resolve(given.mesh_degrees(), 2)};
  const std::vector<MemoryPlan> plans = memory_plans(run, given.activation_checkpoint.mode, 2);
  ASSERT_EQ(plans.size(), 2u);
  const std::size_t most = plans[1].total() > plans[0].total() ? 1 : 0;
  ASSERT_NE(plans[0].total(), plans[1].total());
  const std::size_t available = plans[most].total() - 1;
  EXPECT_THAT(memory_advice(run, 0, available),
              AllOf(HasSubstr(fmt::format("of rank {} of the pipeline", most)), HasSubstr("that fits:")));
}

// The memory of such a step can be measured, but the step cannot run.
TEST_F(MemoryAdvice, AStepOfAPlannedMeshDoesNotRun) {
  const JobConfig given = config("none", 2);
  const auto mesh = std::make_shared<Mesh>(Mesh::planned({.dp_shard = 4}, 3));
  TrainingStep step(given, mesh);
  EXPECT_THROW(step.allocate(), InternalError);
  double number = 0.0;
  EXPECT_THROW(mesh->tokens.all_reduce(std::span(&number, 1), "a number"), InternalError);
}

// A GPU's windows differ from a CPU's. The plan does not need a GPU.
TEST_F(MemoryAdvice, OfGpusThatAreNotThere) {
  if (!cuda::is_built()) GTEST_SKIP() << cuda::why_unavailable();
  const JobConfig given = parse_job_config(
      kSmallModel, {"--training.seq_len=64", "--training.local_batch_size=4", "--parallelism.expert_parallel_degree=8",
                    "--parallelism.expert_parallel_comm_backend=direct"});
  const MemoryPlan plan =
      memory_plan({given, Device::kCuda, resolve(given.mesh_degrees(), 8)}, 5, Recompute::kSelective, 4);
  // 256 tokens go to 8 ranks with an expert each, top 3. The window has flags and counts, twice; places and choices of
  // all tokens; rows and gradients of any load; sums; and gradients of weights. Every part is a multiple of the
  // alignment.
  const std::size_t tokens = 256, rows = 8 * tokens, row = 64 * 2;
  const std::size_t flags = 2 * 8 * kAlignment, counts = 2 * 8 * 8 * 4;
  EXPECT_EQ(plan.windows,
            flags + counts + 8 * tokens * 4 + 8 * tokens * 3 * 8 + 2 * rows * row + 3 * tokens * row + tokens * 3 * 4);
  // With 4 domains of 2 ranks there are 2 sources, 4 times the tokens, and 2 experts. 2 ranks make a token's sums.
  // Buffers for what crosses have a part for each of the 3 other domains.
  MeshDegrees domains = given.mesh_degrees();
  domains.ep_domain = 2;
  const std::size_t many = 4 * tokens;
  EXPECT_EQ(memory_plan({given, Device::kCuda, resolve(domains, 8)}, 5, Recompute::kSelective, 4).windows,
            2 * 2 * kAlignment + kAlignment + 2 * many * 4 + 2 * many * 3 * 8 + 2 * rows * row + 2 * many * row +
                many * 3 * 4 + 2 * 3 * tokens * row);
}

}  // namespace
}  // namespace tessera::mesh_test
