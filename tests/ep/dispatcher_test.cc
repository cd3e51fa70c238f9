// Compares every backend with what each rank must get, on 1 to 4 ranks, with delayed ranks and messages. Also compares
// each backend that moves rows between ranks with `standard`, bit for bit.
#include "ep/dispatcher.h"

#include <gmock/gmock.h>

#include "ep/backends/backend_choices.h"
#include "tests/ep/cpu_ranks.h"

namespace tessera {
namespace {

using ep_test::allocated_dispatcher;
using ep_test::Bytes;
using ep_test::Case;
using ep_test::cases;
using ep_test::expect_measured;
using ep_test::kArenaBytes;
using ep_test::kLargeArenaBytes;
using ep_test::Layer;
using ep_test::LayerRun;
using ep_test::Memory;
using ep_test::on_ranks;
using ep_test::Skew;

constexpr int kMaxRanks = 4;

/// Returns `standard`, and then all other backends for this number of ranks.
std::vector<DispatchBackend> backends(int num_ranks) {
  std::vector<DispatchBackend> result;
  for (const auto& [name, backend] : dispatch_backends()) {
    if (name == backend.name) result.push_back(backend);
  }
  if (num_ranks == 1) result.push_back(DispatchBackend::kLocal);
  return result;
}

/// Makes two passes through one dispatcher, each with another routing. What the first pass left behind would show in
/// the second.
TEST(Dispatcher, GivesWhatItPromises) {
  for (int size = 1; size <= kMaxRanks; ++size) {
    std::uint64_t seed = 0;
    for (const Case& in_float : cases()) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Case test_case = in_float;
        test_case.dtype = dtype;
        // A token that chooses all experts cannot choose only half of them.
        if (test_case.top_k == test_case.num_experts) test_case.skew = Skew::kUniform;
        SCOPED_TRACE(testing::Message() << size << " ranks, case " << seed / 2 << ", " << name_of(dtype));
        on_ranks(size, seed++ % 5, [&](ProcessGroup& group, ep::StepHook* hook) {
          std::vector<std::map<std::string, Bytes>> results;
          for (const DispatchBackend backend : backends(group.size())) {
            const auto dispatcher = allocated_dispatcher(backend, group, test_case.options(), hook);
            for (std::uint64_t pass = 1; pass <= 2; ++pass) {
              Memory memory(test_case.num_tokens > 100 ? kLargeArenaBytes : kArenaBytes);
              const Layer layer(test_case, group.size(), pass);
              LayerRun run(layer, backend, *dispatcher, group, memory.op());
              const Write write = pass == 1 ? Write::kAssign : Write::kAccumulate;
              run.make_all(write, write);
              if (backend != DispatchBackend::kLocal) results.push_back(run.results());
            }
          }
          EXPECT_FALSE(results[0].empty());
          for (std::size_t run = 2; run < results.size(); ++run) {
            for (const auto& [name, bytes] : results[run % 2]) {
              EXPECT_TRUE(bytes == results[run][name]) << "standard and backend " << run / 2 << ": " << name;
            }
          }
        });
      }
    }
  }
}

/// The direct backend serves one of several domains. Some choices then have no row, and some tokens have none at all.
TEST(Dispatcher, ChoicesInOtherDomains) {
  for (int size = 1; size <= kMaxRanks; ++size) {
    std::uint64_t seed = 0;
    for (Case test_case : cases()) {
      test_case.one_of_domains = seed % 2 == 0 ? 2 : 5;
      SCOPED_TRACE(testing::Message() << size << " ranks, case " << seed);
      on_ranks(size, seed++ % 5, [&](ProcessGroup& group, ep::StepHook* hook) {
        const auto dispatcher = allocated_dispatcher(DispatchBackend::kDirect, group, test_case.options(), hook);
        for (std::uint64_t pass = 1; pass <= 2; ++pass) {
          Memory memory(kLargeArenaBytes);
          const Layer layer(test_case, group.size(), pass);
          LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op());
          const Write write = pass == 1 ? Write::kAssign : Write::kAccumulate;
          run.make_all(write, write);
        }
      });
    }
  }
}

/// The calls of three layers overlap, so that sums of several layers follow each other. Rows and gradients are kept, or
/// stay in the window until those of the next layer arrive.
TEST(Dispatcher, LayersInterleave) {
  for (int size = 2; size <= kMaxRanks; ++size) {
    for (const DispatchBackend backend : backends(size)) {
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        on_ranks(size, seed, [&](ProcessGroup& group, ep::StepHook* hook) {
          const Case test_case{.dtype = DType::kBFloat16, .alignment = 8, .in_window = seed % 2 == 0};
          const auto dispatcher = allocated_dispatcher(backend, group, test_case.options(), hook);
          Memory memory;
          std::vector<Layer> layers;
          std::vector<std::unique_ptr<LayerRun>> runs;
          for (std::uint64_t i = 0; i < 3; ++i) layers.emplace_back(test_case, group.size(), seed * 10 + i);
          for (const Layer& layer : layers) {
            runs.push_back(std::make_unique<LayerRun>(layer, backend, *dispatcher, group, memory.op()));
          }
          const auto check_kept_rows = [&] {
            for (const auto& run : runs) {
              if (!test_case.in_window) run->check_rows("kept");
            }
          };
          for (int step = 0; step < 2; ++step) {
            for (const auto& run : runs) run->dispatch();
            runs[2]->check_rows("kept");
            for (const auto& run : runs) run->combine();
            check_kept_rows();
            runs[2]->combine_backward();
            runs[2]->dispatch_backward();
            runs[1]->combine_backward();
            runs[1]->check_gradients("kept gradients");
            runs[0]->combine_backward();  // in the window, its gradients replace those of runs[1]
            runs[0]->dispatch_backward();
            runs[1]->dispatch_backward();
            check_kept_rows();
            runs[1]->dispatch_again();
          }
        });
      }
    }
  }
}

/// These layers have fewer tokens and a smaller alignment than there is room for.
TEST(Dispatcher, SmallerLayers) {
  for (const DispatchBackend backend : backends(3)) {
    on_ranks(3, 7, [&](ProcessGroup& group, ep::StepHook* hook) {
      const Case large{.alignment = 32, .in_window = true};
      const auto dispatcher = allocated_dispatcher(backend, group, large.options(), hook);
      for (const std::int64_t num_tokens : {std::int64_t{1}, large.num_tokens, std::int64_t{5}}) {
        Memory memory;
        Case test_case = large;
        test_case.num_tokens = num_tokens;
        test_case.alignment = num_tokens == 5 ? 1 : 32;
        const Layer layer(test_case, group.size(), 3);
        LayerRun run(layer, backend, *dispatcher, group, memory.op());
        run.dispatch();
        run.combine();
        run.combine_backward();
        run.dispatch_backward();
      }
    });
  }
}

/// Expects <dispatch(y), rows> = <y, dispatch_backward(rows)>, over all ranks.
TEST(Dispatcher, BackwardIsTheTranspose) {
  for (int size = 1; size <= kMaxRanks; ++size) {
    on_ranks(size, 0, [&](ProcessGroup& group, ep::StepHook*) {
      for (const DispatchBackend backend : backends(group.size())) {
        const Case test_case{.alignment = 4, .on_grid = false};
        const auto dispatcher = allocated_dispatcher(backend, group, test_case.options());
        Memory memory;
        const Context op = memory.op();
        const Layer layer(test_case, group.size(), 11);
        const TokenRouting routing = layer.tensors(memory.arena, group.rank());
        const DispatchSaved saved = dispatcher->allocate_saved(op, {.name = "layer", .alignment = 4}, routing);
        const Tensor y_tD = layer.tokens(memory.arena, "y", group.rank());
        const Tensor x_RD = memory.arena.allocate({saved.num_rows(), test_case.dim}, DType::kFloat32);
        const Tensor rows_RD = memory.arena.allocate({saved.num_rows(), test_case.dim}, DType::kFloat32);
        const Tensor back_tD = memory.arena.allocate({test_case.num_tokens, test_case.dim}, DType::kFloat32);
        const Tensor d_weights_tK = memory.arena.allocate({test_case.num_tokens, test_case.top_k}, DType::kFloat32);
        for (std::int64_t i = 0; i < rows_RD.num_elements(); ++i) {
          rows_RD.data<float>()[i] = layer.number("any", group.rank(), i / 1000, 0, i % 1000);
        }
        dispatcher->dispatch(op, y_tD, saved, x_RD);
        dispatcher->dispatch_backward(op, rows_RD, saved.weights_R, saved, back_tD, Write::kAssign, d_weights_tK);
        const std::int64_t used = saved.num_rows_1().data<std::int32_t>()[0];
        double sums[] = {dot(doubles(x_RD.rows(0, used)), doubles(rows_RD.rows(0, used))),
                         dot(doubles(y_tD), doubles(back_tD)),
                         dot(doubles(x_RD.rows(0, used)), doubles(x_RD.rows(0, used)))};
        group.all_reduce(std::span(sums), "test");
        EXPECT_GT(sums[2], 1.0);
        EXPECT_NEAR(sums[0], sums[1], 1e-5 * sums[2]);
        // The call was given the weights as their own gradients, so it must return the weights.
        EXPECT_EQ(doubles(d_weights_tK), doubles(routing.weights_tK));
      }
    });
  }
}

/// A measuring run takes as much memory as a real one, and touches no data.
TEST(Dispatcher, IsMeasured) {
  for (const int size : {1, 2}) {
    on_ranks(size, 0, [&](ProcessGroup& group, ep::StepHook*) {
      set_num_threads(2);
      for (const DispatchBackend backend : backends(group.size())) {
        for (Case test_case : cases()) {
          test_case.skew = Skew::kUniform;
          const auto dispatcher = allocated_dispatcher(backend, group, test_case.options());
          const Layer layer(test_case, group.size(), 1);
          expect_measured(layer, *dispatcher, group);
        }
      }
    });
  }
}

TEST(Dispatcher, RowsOfTheWorstCaseAndOfACapacity) {
  on_ranks(2, 0, [](ProcessGroup& group, ep::StepHook*) {
    // There are 2 · 37 tokens. Each has up to min(3, 6) rows on a rank.
    Case test_case{.alignment = 32};
    auto dispatcher = allocated_dispatcher(DispatchBackend::kStandard, group, test_case.options());
    EXPECT_EQ(dispatcher->max_rows(37, 1), 222);
    EXPECT_EQ(dispatcher->max_rows(37, 32), (222 + 6 * 31) / 32 * 32);
    test_case.capacity_factor = 1.21;  // times 37 · 3 rows
    dispatcher = allocated_dispatcher(DispatchBackend::kStandard, group, test_case.options());
    EXPECT_EQ(dispatcher->max_rows(37, 1), 135);
    EXPECT_EQ(dispatcher->max_rows(37, 32), (135 + 6 * 31) / 32 * 32);
    test_case.capacity_factor = 100.0;
    dispatcher = allocated_dispatcher(DispatchBackend::kDirect, group, test_case.options());
    EXPECT_EQ(dispatcher->max_rows(37, 1), 222);
    // If all rows go to one rank, this rank needs exactly the room that there is.
    Memory memory;
    test_case = {.skew = Skew::kOneRank};
    dispatcher = allocated_dispatcher(DispatchBackend::kDirect, group, test_case.options());
    const Layer layer(test_case, group.size(), 1);
    LayerRun run(layer, DispatchBackend::kDirect, *dispatcher, group, memory.op());
    EXPECT_EQ(run.saved().num_rows(), 222);
    run.dispatch();
    EXPECT_EQ(run.saved().num_rows_1().data<std::int32_t>()[0], group.rank() == 1 ? 222 : 0);
  });
}

}  // namespace
}  // namespace tessera
