// Compares two-level dispatch on virtual domains with what each rank must get, with delayed ranks and messages.
#include <thread>

#include "ep/backends/make_dispatcher.h"
#include "tests/ep/cpu_ranks.h"

namespace tessera {
namespace {

using ep_test::Case;
using ep_test::cases;
using ep_test::Domains;
using ep_test::expect_measured;
using ep_test::Layer;
using ep_test::LayerRun;
using ep_test::Memory;
using ep_test::message_of;
using ep_test::on_ranks;
using ep_test::Skew;

constexpr std::size_t kManyBytes = std::size_t{48} << 20;

/// A number of domains, and of ranks in each.
struct DomainMesh {
  int num_domains, ranks_per_domain;
  int num_ranks() const { return num_domains * ranks_per_domain; }
};
constexpr DomainMesh kMeshes[] = {{2, 1}, {2, 2}, {2, 4}, {4, 2}};

/// Returns the case on the mesh's domains. Its number of experts is one that the ranks divide.
Case on_domains(Case test_case, const DomainMesh& mesh) {
  test_case.num_domains = mesh.num_domains;
  if (test_case.num_experts % mesh.num_ranks() != 0) test_case.num_experts *= 2;
  return test_case;
}

std::unique_ptr<Dispatcher> allocated(Domains& domains, const Case& test_case, ep::StepHook* hook = nullptr) {
  std::unique_ptr<Dispatcher> dispatcher = domains.make_direct(test_case.options(), hook);
  dispatcher->allocate();
  return dispatcher;
}

/// Makes two passes through one dispatcher, each with another routing.
void expect_passes(const DomainMesh& mesh, const Case& test_case, std::uint64_t seed) {
  on_ranks(mesh.num_ranks(), seed, [&](ProcessGroup& group, ep::StepHook* hook) {
    Domains domains(group, mesh.num_domains);
    const auto dispatcher = allocated(domains, test_case, hook);
    EXPECT_FALSE(dispatcher->waits_for_gpu());
    EXPECT_GT(dispatcher->window_bytes(), 0u);
    for (std::uint64_t pass = 1; pass <= 2; ++pass) {
      Memory memory(test_case.num_tokens > 100 ? kManyBytes : ep_test::kLargeArenaBytes);
      const Layer layer(test_case, group.size(), pass);
      LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op());
      const Write write = pass == 1 ? Write::kAssign : Write::kAccumulate;
      run.make_all(write, write);
    }
  });
}

TEST(TwoLevel, GivesWhatItPromises) {
  for (const DomainMesh& mesh : kMeshes) {
    std::uint64_t seed = 0;
    for (const Case& in_float : cases()) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Case test_case = on_domains(in_float, mesh);
        test_case.dtype = dtype;
        if (test_case.top_k == test_case.num_experts) test_case.skew = Skew::kUniform;
        SCOPED_TRACE(testing::Message() << mesh.num_domains << " domains of " << mesh.ranks_per_domain << ", case "
                                        << seed / 2 << ", " << name_of(dtype));
        expect_passes(mesh, test_case, seed++ % 5);
      }
    }
  }
}

/// No token crosses between domains, or all do.
TEST(TwoLevel, TokensOfOneDomain) {
  for (const DomainMesh& mesh : kMeshes) {
    for (const Skew skew : {Skew::kOwnDomain, Skew::kNextDomain}) {
      for (const PayloadPrecision payload : {PayloadPrecision::kDefault, PayloadPrecision::kMxfp8}) {
        const Case test_case = on_domains({.num_tokens = 21,
                                           .dtype = DType::kBFloat16,
                                           .alignment = 16,
                                           .skew = skew,
                                           .quantized = true,
                                           .dispatch_forward = payload,
                                           .combine_backward = payload},
                                          mesh);
        SCOPED_TRACE(testing::Message() << mesh.num_domains << " domains of " << mesh.ranks_per_domain);
        expect_passes(mesh, test_case, static_cast<std::uint64_t>(skew));
      }
    }
  }
}

/// The calls of three layers overlap, as in Dispatcher.LayersInterleave.
TEST(TwoLevel, LayersInterleave) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    on_ranks(4, seed, [&](ProcessGroup& group, ep::StepHook* hook) {
      const Case test_case{.dtype = DType::kBFloat16, .alignment = 8, .in_window = seed % 2 == 0, .num_domains = 2};
      Domains domains(group, test_case.num_domains);
      const auto dispatcher = allocated(domains, test_case, hook);
      Memory memory(ep_test::kLargeArenaBytes);
      std::vector<Layer> layers;
      std::vector<std::unique_ptr<LayerRun>> runs;
      for (std::uint64_t i = 0; i < 3; ++i) layers.emplace_back(test_case, group.size(), seed * 10 + i);
      for (const Layer& layer : layers) {
        runs.push_back(std::make_unique<LayerRun>(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op()));
      }
      for (int step = 0; step < 2; ++step) {
        for (const auto& run : runs) run->dispatch();
        for (const auto& run : runs) run->combine();
        runs[2]->combine_backward();
        runs[2]->dispatch_backward();
        runs[1]->combine_backward();
        runs[1]->check_gradients("kept gradients");
        runs[0]->combine_backward();
        runs[0]->dispatch_backward();
        runs[1]->dispatch_backward();
        runs[1]->dispatch_again();
      }
    });
  }
}

/// These layers have fewer tokens and a smaller alignment than there is room for.
TEST(TwoLevel, SmallerLayers) {
  on_ranks(4, 7, [&](ProcessGroup& group, ep::StepHook* hook) {
    const Case large{.alignment = 32, .in_window = true, .num_domains = 2};
    Domains domains(group, large.num_domains);
    const auto dispatcher = allocated(domains, large, hook);
    for (const std::int64_t num_tokens : {std::int64_t{1}, large.num_tokens, std::int64_t{5}}) {
      Memory memory(ep_test::kLargeArenaBytes);
      Case test_case = large;
      test_case.num_tokens = num_tokens;
      test_case.alignment = num_tokens == 5 ? 1 : 32;
      const Layer layer(test_case, group.size(), 3);
      LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op());
      run.dispatch();
      run.combine();
      run.combine_backward();
      run.dispatch_backward();
    }
  });
}

TEST(TwoLevel, IsMeasured) {
  on_ranks(4, 0, [&](ProcessGroup& group, ep::StepHook*) {
    set_num_threads(2);
    Domains domains(group, 2);
    for (Case test_case : cases()) {
      test_case.num_domains = 2;
      test_case.skew = Skew::kUniform;
      const auto dispatcher = allocated(domains, test_case);
      expect_measured(Layer(test_case, group.size(), 1), *dispatcher, group);
    }
  });
}

/// One rank does not come to its second dispatch, and no other gets through it.
TEST(TwoLevel, ARankThatDoesNotCome) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half a call";
  std::vector<std::string> messages(4);
  const auto body = [&](ProcessGroup& group) {
    const Case test_case{.num_domains = 2};
    Domains domains(group, test_case.num_domains);
    const auto dispatcher = allocated(domains, test_case);
    Memory memory(ep_test::kLargeArenaBytes);
    const Layer layer(test_case, group.size(), 1);
    LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op());
    run.dispatch();
    run.combine();
    if (group.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    messages[static_cast<std::size_t>(group.rank())] = message_of<RankFailure>([&] { run.dispatch_again(); });
    // In a run, the failure of another rank ends all ranks. Here each rank must find the failure itself.
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  };
  comm_test::with_ranks(4, body, {.timeout = Progress::Seconds(0.5)});
  EXPECT_THAT(messages[0], testing::HasSubstr("dispatch again of layers.7.moe (ep_within) did not end within"));
  EXPECT_THAT(messages[0], testing::HasSubstr("it waits for rank 1 of ep_within to come"));
  EXPECT_THAT(messages[3], testing::HasSubstr("all-to-all of dispatch again of layers.7.moe (ep_across)"));
}

}  // namespace
}  // namespace tessera
