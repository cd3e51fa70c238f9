// Compares collectives on tensors in GPU memory with their definitions. They run on 2 GPUs and on all GPUs, by
// themselves and as parts of a CUDA graph.
#include "comm/gpu_group.h"

#include <gmock/gmock.h>

#include <cmath>
#include <thread>

#include "device/cuda_graph.h"
#include "tensor/arena.h"
#include "tests/comm/gpus.h"

namespace tessera {
namespace {

using comm_test::num_gpus;
using comm_test::with_gpus;
using ::testing::HasSubstr;

const bool kEnvironment = comm_test::use_gin_plugin(TESSERA_GIN_PLUGIN);

class GpuGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs: " << cuda::why_unavailable();
  }
};

/// Returns a small whole number, so that sums are exact in any order.
float number(int rank, std::int64_t i) { return static_cast<float>((rank + 1) * ((i * 7) % 31 - 15)); }

/// A rank of a test. It fills tensors in its GPU's memory from the host, and reads them back.
class Rank {
 public:
  Rank(ProcessGroup& ranks, const cuda::Stream& stream) : world(ranks), computation(stream) {}

  Tensor make(std::int64_t count, const std::function<float(std::int64_t)>& value, DType dtype = DType::kFloat32) {
    const Tensor x = arena_.allocate({count}, dtype);
    std::vector<float> wide;
    std::vector<BFloat16> narrow;
    for (std::int64_t i = 0; i < count; ++i) {
      wide.push_back(value(i));
      narrow.emplace_back(value(i));
    }
    const void* source = dtype == DType::kFloat32 ? static_cast<const void*>(wide.data()) : narrow.data();
    cuda::copy_bytes(computation, source, x.num_bytes(), x.raw());
    computation.synchronize();
    return x;
  }
  /// Makes a tensor of this rank's numbers.
  Tensor own(std::int64_t count, DType dtype = DType::kFloat32) {
    return make(
        count, [&](std::int64_t i) { return number(world.rank(), i); }, dtype);
  }
  Tensor poisoned(std::int64_t count) {
    return make(count, [](std::int64_t) { return NAN; });
  }
  /// Waits for the stream before it copies. A copy to memory that is not pinned waits under a lock of the process,
  /// which the stand-in for a network needs (gin_plugin.cc).
  std::vector<float> read(const Tensor& x) {
    computation.synchronize();
    std::vector<float> wide(static_cast<std::size_t>(x.num_elements()));
    std::vector<BFloat16> narrow(wide.size());
    const bool is_wide = x.dtype() == DType::kFloat32;
    cuda::copy_bytes(computation, x.raw(), x.num_bytes(), is_wide ? static_cast<void*>(wide.data()) : narrow.data());
    computation.synchronize();
    if (!is_wide) std::ranges::transform(narrow, wide.begin(), [](BFloat16 b) { return static_cast<float>(b); });
    return wide;
  }

  Arena& arena() { return arena_; }

  ProcessGroup& world;
  const cuda::Stream& computation;

 private:
  Arena arena_{std::size_t{64} << 20, Device::kCuda};
};

/// Runs `body` on 2 GPUs, and then on all GPUs.
void on_gpus(const std::function<void(Rank&)>& body) {
  for (const int size : {2, num_gpus()}) {
    with_gpus(size, [&](ProcessGroup& world, const cuda::Stream& computation) {
      Rank rank(world, computation);
      body(rank);
    });
  }
}

constexpr std::int64_t kCounts[] = {8, 1000, 300'000};

float sum_of_all(int size, std::int64_t i) {
  float sum = 0.0f;
  for (int rank = 0; rank < size; ++rank) sum += number(rank, i);
  return sum;
}

TEST_F(GpuGroups, AllGather) {
  on_gpus([](Rank& r) {
    for (const std::int64_t count : kCounts) {
      const Tensor in = r.own(count), out = r.poisoned(count * r.world.size());
      r.world.all_gather(in, out, "test").wait();
      const std::vector<float> all = r.read(out);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        ASSERT_EQ(all[i], number(static_cast<int>(at / count), at % count)) << i;
      }
    }
  });
}

TEST_F(GpuGroups, ReduceScatter) {
  on_gpus([](Rank& r) {
    const int size = r.world.size();
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const std::int64_t count : kCounts) {
        const Tensor out = r.make(
            count, [](std::int64_t) { return 1.0f; }, dtype);
        for (const Write write : {Write::kAccumulate, Write::kAssign}) {
          r.world.reduce_scatter(r.own(count * size, dtype), out, write, "test").wait();
          const std::vector<float> sums = r.read(out);
          for (std::int64_t i = 0; i < count; ++i) {
            const float expected =
                sum_of_all(size, r.world.rank() * count + i) + (write == Write::kAssign ? 0.0f : 1.0f);
            ASSERT_EQ(sums[static_cast<std::size_t>(i)], static_cast<float>(BFloat16(expected))) << i;
          }
        }
      }
    }
  });
}

/// The sums of numbers that bfloat16 cannot hold are, to the bit, those of the ranks' rounded numbers, added in float32
/// in the order of the ranks. They are computed by themselves and as parts of a graph. The largest count takes more
/// than one pass of a kernel's threads.
TEST_F(GpuGroups, ReduceScatterAsBfloat16) {
  on_gpus([](Rank& r) {
    const int size = r.world.size();
    const auto fraction = [](int rank, std::int64_t i) { return std::sin(static_cast<float>(rank * 7919 + i)); };
    for (const std::int64_t count : {std::int64_t{8}, std::int64_t{1000}, std::int64_t{600'000}}) {
      const auto own = [&](std::int64_t i) { return fraction(r.world.rank(), i); };
      const Tensor in = r.make(count * size, own), source = r.make(count * size, own), out = r.poisoned(count);
      std::vector<float> expected;
      for (std::int64_t i = 0; i < count; ++i) {
        float sum = 0.0f;
        for (int rank = 0; rank < size; ++rank) {
          sum += static_cast<float>(BFloat16(fraction(rank, r.world.rank() * count + i)));
        }
        expected.push_back(sum);
      }
      r.world.reduce_scatter_as_bfloat16(in, out, Write::kAssign, "test").wait();
      ASSERT_EQ(r.read(out), expected) << count;
      const cuda::Graph graph(r.computation, [&] {
        cuda::copy_bytes(r.computation, source.raw(), source.num_bytes(), in.raw());
        r.world.reduce_scatter_as_bfloat16(in, out, Write::kAccumulate, "test").wait();
      });
      for (int replay = 0; replay < 3; ++replay) {
        const std::vector<float> before = r.read(out);
        graph.launch(r.computation);
        const std::vector<float> sums = r.read(out);
        for (std::size_t i = 0; i < sums.size(); ++i) ASSERT_EQ(sums[i], before[i] + expected[i]) << count << " " << i;
      }
    }
  });
}

TEST_F(GpuGroups, AllReduce) {
  on_gpus([](Rank& r) {
    for (const std::int64_t count : kCounts) {
      const Tensor x = r.own(count);
      r.world.all_reduce(x, "test").wait();
      const std::vector<float> sums = r.read(x);
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(sums[static_cast<std::size_t>(i)], sum_of_all(r.world.size(), i)) << i;
      }
    }
  });
}

TEST_F(GpuGroups, AllToAllOfRows) {
  on_gpus([](Rank& r) {
    const int size = r.world.size(), own = r.world.rank();
    // Rank a sends (3a + b) % 4 rows of 5 numbers to rank b. For some pairs that is no row.
    const auto rows = [](int from, int to) { return static_cast<std::int64_t>((3 * from + to) % 4); };
    std::vector<std::int64_t> in_rows, out_rows;
    for (int peer = 0; peer < size; ++peer) {
      in_rows.push_back(rows(own, peer));
      out_rows.push_back(rows(peer, own));
    }
    constexpr std::int64_t kRows = 3 * comm_test::kMaxGpus, kWidth = 5;
    // A number encodes its sender, its receiver, and its row among those of the pair.
    std::vector<float> numbers;
    for (int peer = 0; peer < size; ++peer) {
      for (std::int64_t row = 0; row < in_rows[static_cast<std::size_t>(peer)]; ++row) {
        numbers.insert(numbers.end(), kWidth, static_cast<float>(own * 100 + peer * 10 + row));
      }
    }
    numbers.resize(kRows * kWidth);
    const Tensor in = r.make(kRows * kWidth, [&](std::int64_t i) { return numbers[static_cast<std::size_t>(i)]; });
    const Tensor out = r.poisoned(kRows * kWidth);
    r.world.all_to_all_v(in.reshape({kRows, kWidth}), in_rows, out.reshape({kRows, kWidth}), out_rows, "test").wait();
    const std::vector<float> received = r.read(out);
    std::size_t at = 0;
    for (int peer = 0; peer < size; ++peer) {
      for (std::int64_t i = 0; i < out_rows[static_cast<std::size_t>(peer)] * kWidth; ++i, ++at) {
        const std::int64_t row = i / kWidth;
        ASSERT_EQ(received[at], static_cast<float>(peer * 100 + own * 10 + row)) << at;
      }
    }
    EXPECT_TRUE(at == received.size() || std::isnan(received[at]));
  });
}

/// Rank a sends the first (3a + b + n) · 97 % 301 of 300 rows to rank b in exchange n. In exchange 3 it sends none, if
/// a + b is odd, and all in exchange 4. Rows have 6 bytes or 16. If kernels send, only these rows arrive. Otherwise
/// whole parts arrive.
void exchange_counted_rows(bool in_kernels) {
  static constexpr std::int64_t kPart = 300;
  on_gpus([&](Rank& r) {
    const int size = r.world.size(), own = r.world.rank();
    if (in_kernels) r.world.open_counted(static_cast<std::size_t>(size * kPart * 16));
    const auto rows = [](int from, int to, int round) {
      if ((from + to) % 2 == 1 && round == 3) return 0;
      if ((from + to) % 2 == 1 && round == 4) return static_cast<int>(kPart);
      return (3 * from + to + round) * 97 % 301;
    };
    const auto number_of = [](int from, int to, std::int64_t i) {
      return static_cast<float>((from * 8 + to + i) % 251);
    };
    for (const auto& [width, dtype] : {std::pair{3, DType::kBFloat16}, std::pair{4, DType::kFloat32}}) {
      const std::int64_t part = kPart * width;
      const auto sent = [&](std::int64_t i) { return number_of(own, static_cast<int>(i / part), i % part); };
      const Tensor in = r.make(size * part, sent, dtype).reshape({size * kPart, width});
      const Tensor unset = r.make(
          size * part, [](std::int64_t) { return NAN; }, dtype);
      const Tensor out = r.make(
                              size * part, [](std::int64_t) { return 0.0f; }, dtype)
                             .reshape(in.shape());
      const Tensor num_sent = r.arena().allocate({size}, DType::kInt32),
                   num_received = r.arena().allocate({size}, DType::kInt32);
      const auto exchange = [&] {
        cuda::copy_bytes(r.computation, unset.raw(), unset.num_bytes(), out.raw());
        r.world.all_to_all_counted(in, num_sent, out, num_received, "test").wait();
      };
      cuda::Graph graph;
      for (int round = 0; round < 8; ++round) {
        std::vector<std::int32_t> to, from;
        for (int peer = 0; peer < size; ++peer) {
          to.push_back(rows(own, peer, round));
          from.push_back(rows(peer, own, round));
        }
        cuda::copy_bytes(r.computation, to.data(), num_sent.num_bytes(), num_sent.raw());
        cuda::copy_bytes(r.computation, from.data(), num_received.num_bytes(), num_received.raw());
        if (round == 2) graph = cuda::Graph(r.computation, exchange);
        round < 2 ? exchange() : graph.launch(r.computation);
        const std::vector<float> received = r.read(out);
        for (std::int64_t i = 0; i < size * part; ++i) {
          const auto peer = static_cast<int>(i / part);
          const float there = received[static_cast<std::size_t>(i)];
          if (i % part < from[static_cast<std::size_t>(peer)] * width || !in_kernels) {
            ASSERT_EQ(there, number_of(peer, own, i % part)) << "round " << round << ", number " << i;
          } else {
            ASSERT_TRUE(std::isnan(there)) << "round " << round << ", number " << i;
          }
        }
      }
    }
  });
}

TEST_F(GpuGroups, AllToAllOfCountedRows) { exchange_counted_rows(false); }

/// This needs the version of NCCL for which the program was built.
TEST_F(GpuGroups, KernelsSendCountedRows) { exchange_counted_rows(true); }

TEST_F(GpuGroups, Broadcast) {
  on_gpus([](Rank& r) {
    const Tensor x = r.own(1000);
    r.world.broadcast(x, r.world.size() - 1, "test").wait();
    const std::vector<float> numbers = r.read(x);
    for (std::int64_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(numbers[static_cast<std::size_t>(i)], number(r.world.size() - 1, i));
    }
  });
}

/// Splits two groups from the world: pairs of neighbours, and all ranks in reverse order.
TEST_F(GpuGroups, Split) {
  on_gpus([](Rank& r) {
    const int own = r.world.rank(), pairs = r.world.size() / 2;
    ProcessGroup pair = r.world.split(std::min(own / 2, pairs), own, "pair");
    ProcessGroup reversed = r.world.split(0, -own, "reversed");
    if (pair.size() == 2) {
      const Tensor x = r.own(100);
      pair.all_reduce(x, "test").wait();
      EXPECT_EQ(r.read(x)[1], number(own / 2 * 2, 1) + number(own / 2 * 2 + 1, 1));
    }
    const Tensor in = r.own(8), out = r.poisoned(8 * r.world.size());
    reversed.all_gather(in, out, "test").wait();
    const std::vector<float> all = r.read(out);
    for (int rank = 0; rank < r.world.size(); ++rank) {
      EXPECT_EQ(all[static_cast<std::size_t>(8 * rank + 1)], number(r.world.size() - 1 - rank, 1));
    }
  });
}

/// Rank 0 begins an operation on weights that the others begin later. Meanwhile operations of other kinds must end.
TEST_F(GpuGroups, KindsOfTrafficDoNotWaitForEachOther) {
  on_gpus([](Rank& r) {
    for (const Traffic traffic : {Traffic::kActivations, Traffic::kExperts}) {
      ProcessGroup other = r.world.split(0, r.world.rank(), "other", traffic);
      for (int round = 0; round < 2; ++round) {  // connections are made in the first one
        const bool begins_early = round == 1 && r.world.rank() == 0;
        const Tensor x = r.own(1000), y = r.own(1000);
        Work late;
        if (begins_early) late = r.world.all_reduce(x, "weights");
        other.all_reduce(y, "test").wait();
        cuda::Event done;
        done.record(r.computation);
        r.world.wait_for_gpu(done, "the other kind");
        r.world.barrier("the other kind");
        if (!begins_early) late = r.world.all_reduce(x, "weights");
        late.wait();
        EXPECT_EQ(r.read(x)[1], sum_of_all(r.world.size(), 1));
        EXPECT_EQ(r.read(y)[1], sum_of_all(r.world.size(), 1));
      }
    }
  });
}

/// Collectives of two groups overlap, and the test waits late for one of them. A graph records them and replays them.
TEST_F(GpuGroups, AsPartsOfAGraph) {
  on_gpus([](Rank& r) {
    ProcessGroup other = r.world.split(0, r.world.rank(), "other");
    const std::int64_t count = 1000;
    const Tensor x = r.own(count), y = r.own(count), gathered = r.poisoned(count * r.world.size());
    const auto step = [&] {
      Work late = other.all_gather(y, gathered, "late");
      r.world.all_reduce(x, "test").wait();
      r.world.all_reduce(x, "again").wait();
      late.wait();
    };
    step();
    r.computation.synchronize();
    const cuda::Graph graph(r.computation, step);
    for (int replay = 0; replay < 3; ++replay) {
      const Tensor fresh = r.own(count);
      cuda::copy_bytes(r.computation, fresh.raw(), fresh.num_bytes(), x.raw());
      graph.launch(r.computation);
      const std::vector<float> sums = r.read(x), all = r.read(gathered);
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(sums[static_cast<std::size_t>(i)],
                  static_cast<float>(r.world.size()) * sum_of_all(r.world.size(), i));
        ASSERT_EQ(all[static_cast<std::size_t>((r.world.size() - 1) * count + i)], number(r.world.size() - 1, i));
      }
    }
  });
}

/// The messages are too long to be sent before they are received. The receiver takes them in another order than the
/// sender sends them. They move by themselves and as parts of a graph.
TEST_F(GpuGroups, LinksInAnyOrder) {
  on_gpus([](Rank& r) {
    const int size = r.world.size(), own = r.world.rank(), next = (own + 1) % size, previous = (own + size - 1) % size;
    const auto tag_of = [](int from, int k) { return 2 * from + k; };
    std::vector<ProcessGroup::Link> links;
    for (int from = 0; from < size; ++from) {
      for (const int k : {0, 1}) links.push_back({.from = from, .to = (from + 1) % size, .tag = tag_of(from, k)});
    }
    r.world.open_links(links);
    constexpr std::int64_t kCount = 2 << 20;
    const Tensor sent[] = {r.own(kCount), r.own(kCount)}, received[] = {r.poisoned(kCount), r.poisoned(kCount)};
    const auto exchange = [&] {
      Work sends[2];
      for (const int k : {0, 1}) sends[k] = r.world.send(sent[k], next, tag_of(own, k), "test");
      for (const int k : {1, 0}) r.world.receive(received[k], previous, tag_of(previous, k), "test").wait();
      for (Work& send : sends) send.wait();
    };
    const auto expect_received = [&](float factor) {
      for (const int k : {0, 1}) {
        const std::vector<float> numbers = r.read(received[k]);
        for (std::int64_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(numbers[static_cast<std::size_t>(i)], factor * number(previous, i)) << k << " " << i;
        }
      }
    };
    exchange();
    expect_received(1.0f);
    const cuda::Graph graph(r.computation, exchange);
    for (const float factor : {2.0f, 3.0f}) {
      for (const Tensor& x : sent) {
        std::vector<float> numbers;
        for (std::int64_t i = 0; i < kCount; ++i) numbers.push_back(factor * number(own, i));
        cuda::copy_bytes(r.computation, numbers.data(), x.num_bytes(), x.raw());
        r.computation.synchronize();
      }
      graph.launch(r.computation);
      expect_received(factor);
    }
  });
}

/// Every rank stores its number into all windows. After a barrier each rank reads the numbers that the others have
/// stored.
TEST_F(GpuGroups, WindowsThatAllRanksStoreInto) {
  on_gpus([](Rank& r) {
    const auto size = static_cast<std::size_t>(r.world.size()), own = static_cast<std::size_t>(r.world.rank());
    const std::unique_ptr<SymmetricWindow> window = r.world.allocate_window(size * sizeof(float));
    EXPECT_GE(window->num_bytes(), size * sizeof(float));
    const float value = number(r.world.rank(), 3);
    for (int peer = 0; peer < r.world.size(); ++peer) {
      cuda::copy_bytes(r.computation, &value, sizeof value, window->peer(peer) + own * sizeof(float));
    }
    r.computation.synchronize();
    r.world.barrier("stores");
    std::vector<float> stored(size);
    cuda::copy_bytes(r.computation, window->peer(r.world.rank()), size * sizeof(float), stored.data());
    r.computation.synchronize();
    for (std::size_t rank = 0; rank < size; ++rank) EXPECT_EQ(stored[rank], number(static_cast<int>(rank), 3));
    r.world.barrier("reads");
  });
}

/// One rank never starts an operation. The other rank's error names the operation, and the GPU's work that hangs is
/// ended.
TEST_F(GpuGroups, AHangingOperationIsToldOf) {
  with_gpus(2,
            [](ProcessGroup& world, const cuda::Stream& computation) {
              Rank r(world, computation);
              const Tensor x = r.own(1000);
              world.all_reduce(x, "the first").wait();
              computation.synchronize();
              if (world.rank() == 1) return std::this_thread::sleep_for(std::chrono::seconds(4));
              world.all_reduce(x, "layers.3").wait();
              cuda::Event done;
              done.record(computation);
              try {
                world.wait_for_gpu(done, "step 7");
                ADD_FAILURE() << "did not hang";
              } catch (const RankFailure& failure) {
                EXPECT_THAT(failure.what(), HasSubstr("step 7 did not end within 2 s"));
                EXPECT_THAT(failure.what(), HasSubstr("; the GPU is in all-reduce of layers.3 (world)"));
              }
              EXPECT_EQ(done.wait(), nullptr);
            },
            {.timeout = Progress::Seconds(2.0)});
}

}  // namespace
}  // namespace tessera
