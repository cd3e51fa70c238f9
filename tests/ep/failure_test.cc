// Tests the errors of dispatchers that cannot work, and that dispatchers work on where they can.
#include <thread>

#include "ep/backends/make_dispatcher.h"
#include "tests/ep/layer.h"

namespace tessera {
namespace {

using comm_test::with_ranks;
using ep_test::allocated_dispatcher;
using ep_test::Case;
using ep_test::Layer;
using ep_test::LayerRun;
using ep_test::message_of;

constexpr std::size_t kFailureArenaBytes = std::size_t{4} << 20;

TEST(DispatcherFailure, MoreRowsThanCanBeCounted) {
  with_ranks(3, [](ProcessGroup& group) {
    Case test_case{.num_tokens = std::int64_t{1} << 28};
    EXPECT_THAT(message_of<Error>([&] { make_dispatcher(DispatchBackend::kDirect, group, test_case.options()); }),
                testing::AllOf(testing::HasSubstr("room for any load of 268435456 tokens per rank on 3 ranks"),
                               testing::HasSubstr("parallelism.expert_parallel_capacity_factor, now 0,")));
    test_case.capacity_factor = 2.0;
    make_dispatcher(DispatchBackend::kDirect, group, test_case.options());
  });
}

/// One rank does not come to its second dispatch. The others name it, and say what they have seen of it.
TEST(DispatcherFailure, ARankThatDoesNotCome) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half a call";
  std::vector<std::string> messages(3);
  const auto body = [&](ProcessGroup& group) {
    const Case test_case;
    const auto dispatcher = allocated_dispatcher(DispatchBackend::kDirect, group, test_case.options());
    Arena arena(kFailureArenaBytes);
    const Layer layer(test_case, group.size(), 1);
    LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, {.arena = &arena});
    run.dispatch();
    run.combine();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return;
    }
    messages[static_cast<std::size_t>(group.rank())] = message_of<RankFailure>([&] { run.dispatch_again(); });
  };
  with_ranks(3, body, {.timeout = Progress::Seconds(0.5)});
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_THAT(messages[rank], testing::HasSubstr("dispatch again of layers.7.moe (world) did not end within"));
    EXPECT_THAT(messages[rank], testing::HasSubstr("it waits for rank 1 of world to come: epoch 3 expected, 1 seen"));
    EXPECT_THAT(messages[rank], testing::ContainsRegex("rank 1 \\(process"));
  }
}

/// A dispatcher finds what a router must not give before it stores anything in a wrong place.
TEST(DispatcherFailure, RoutingThatContradictsItself) {
  with_ranks(1, [](ProcessGroup& group) {
    const Case test_case;
    for (const int fault : {0, 1, 2}) {
      for (const DispatchBackend backend : {DispatchBackend::kStandard, DispatchBackend::kDirect}) {
        const auto dispatcher = allocated_dispatcher(backend, group, test_case.options());
        Arena arena(kFailureArenaBytes);
        const Layer layer(test_case, 1, 1);
        const TokenRouting routing = layer.tensors(arena, 0);
        auto* ids = routing.expert_ids_tK.data<std::int32_t>();
        auto* counts = routing.counts_E.data<std::int32_t>();
        if (fault == 0) ++counts[ids[0]];
        if (fault == 1) --counts[ids[0]], ++counts[(ids[0] + 1) % 12];
        if (fault == 2) ids[4] = 12;
        const Context op{.arena = &arena};
        const DispatchSaved saved = dispatcher->allocate_saved(op, {.name = "layer"}, routing);
        const Tensor x_RD = arena.allocate({saved.num_rows(), test_case.dim}, DType::kFloat32);
        EXPECT_THROW(dispatcher->dispatch(op, layer.tokens(arena, "y", 0), saved, x_RD), InternalError) << fault;
      }
    }
  });
}

}  // namespace
}  // namespace tessera
