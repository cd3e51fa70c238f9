// Compares collectives with their definitions on 1 to 4 ranks, with messages that arrive in many orders.
#include "comm/process_group.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "comm/together.h"
#include "comm/transport/forwarding_transport.h"
#include "tensor/arena.h"
#include "tests/comm/delayed_transport.h"
#include "tests/comm/ranks.h"

namespace tessera {
namespace {

using comm_test::DelayedTransport;
using comm_test::with_ranks;

constexpr int kMaxRanks = 4;

/// Returns a number that depends on its rank and index. Sums of these numbers round.
float number(int rank, std::int64_t i) {
  return std::sin(static_cast<float>(rank * 7919 + i % 104729)) * std::exp2(static_cast<float>(i % 5));
}

Tensor floats(Arena& arena, std::int64_t count) { return arena.allocate({count}, DType::kFloat32); }

void fill(const Tensor& x, int rank) {
  for (std::int64_t i = 0; i < x.num_elements(); ++i) x.data<float>()[i] = number(rank, i);
}

/// Returns the sum that an operation promises: added in the order of the ranks, in float32.
float sum_at(int num_ranks, std::int64_t i) {
  float sum = number(0, i);
  for (int rank = 1; rank < num_ranks; ++rank) sum += number(rank, i);
  return sum;
}

/// Runs `body` on a number of ranks, once with prompt messages and once with late ones.
void on_size(int size, const std::function<void(ProcessGroup&)>& body) {
  with_ranks(size, body);
  with_ranks(size, body, {.wrap = [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
               return std::make_unique<DelayedTransport>(std::move(transport), 5);
             }});
}
void on_all_sizes(const std::function<void(ProcessGroup&)>& body) {
  for (int size = 1; size <= kMaxRanks; ++size) on_size(size, body);
}
/// Runs `body` on so many ranks that small parts are gathered and summed in rounds.
void on_many_ranks(const std::function<void(ProcessGroup&)>& body) {
  if (launched_by_mpi()) GTEST_SKIP() << "there are fewer processes";
  for (const int size : {17, 24, 32}) on_size(size, body);
}

/// Sizes below and above one piece of a sum and the limit of one round. They include odd sizes, one and zero.
const std::vector<std::int64_t> kCounts = {0, 1, 7, 1000, 4096, 4097, 70'001, 400'003};
/// Sizes below and above the limit of rounds.
const std::vector<std::int64_t> kCountsOfMany = {0, 1, 7, 1024, 1025};

TEST(ProcessGroup, AllGather) {
  const auto body = [](ProcessGroup& group) {
    for (const std::int64_t count : group.size() <= kMaxRanks ? kCounts : kCountsOfMany) {
      Arena arena(1 << 24);
      const Tensor in = floats(arena, count), out = floats(arena, count * group.size());
      fill(in, group.rank());
      group.all_gather(in, out, "test").wait();
      for (int rank = 0; rank < group.size(); ++rank) {
        for (std::int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(out.data<float>()[rank * count + i], number(rank, i)) << rank << " " << i;
        }
      }
      // The gather also works in place, with the input as a part of the output.
      const Tensor own = out.rows(group.rank() * count, (group.rank() + 1) * count);
      for (std::int64_t i = 0; i < count; ++i) own.data<float>()[i] += 1.0f;
      group.all_gather(own, out, "test").wait();
      for (int rank = 0; rank < group.size(); ++rank) {
        for (std::int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(out.data<float>()[rank * count + i], number(rank, i) + 1.0f);
        }
      }
    }
  };
  on_all_sizes(body);
  on_many_ranks(body);
}

TEST(ProcessGroup, ReduceScatter) {
  const auto body = [](ProcessGroup& group) {
    for (const std::int64_t count : group.size() <= kMaxRanks ? kCounts : kCountsOfMany) {
      Arena arena(1 << 24);
      const Tensor in = floats(arena, count * group.size()), out = floats(arena, count);
      fill(in, group.rank());
      for (std::int64_t i = 0; i < count; ++i) out.data<float>()[i] = NAN;
      group.reduce_scatter(in, out, Write::kAssign, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(out.data<float>()[i], sum_at(group.size(), group.rank() * count + i)) << i;
      }
      group.reduce_scatter(in, out, Write::kAccumulate, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(out.data<float>()[i], 2.0f * sum_at(group.size(), group.rank() * count + i)) << i;
      }
    }
  };
  on_all_sizes(body);
  on_many_ranks(body);
}

float as_bfloat16(float x) { return static_cast<float>(BFloat16(x)); }

/// Each rank's numbers are rounded once, and their sum is that of float32 in the order of the ranks. The counts lie
/// below and above a piece of a sum, and the limit of rounds, which they reach with half as many bytes.
TEST(ProcessGroup, ReduceScatterAsBfloat16) {
  const auto body = [](ProcessGroup& group) {
    std::vector<std::int64_t> counts = kCounts;
    if (group.size() > kMaxRanks) counts = {0, 1, 7, 1024, 1025, 2048, 2049};
    const bool rounds = group.size() > 1;
    // The sums of numbers that are not rounded, or that are rounded again after each addition, are others.
    std::int64_t num_as_float32 = 0, num_as_sums_of_bfloat16 = 0, num_sums = 0;
    for (const std::int64_t count : counts) {
      Arena arena(1 << 24);
      const Tensor in = floats(arena, count * group.size()), out = floats(arena, count);
      std::vector<float> expected;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = group.rank() * count + i;
        float sum = rounds ? as_bfloat16(number(0, at)) : number(0, at), narrow_sum = sum;
        for (int rank = 1; rank < group.size(); ++rank) {
          sum += as_bfloat16(number(rank, at));
          narrow_sum = as_bfloat16(narrow_sum + as_bfloat16(number(rank, at)));
        }
        expected.push_back(sum);
        ++num_sums;
        num_as_float32 += sum == sum_at(group.size(), at) ? 1 : 0;
        num_as_sums_of_bfloat16 += sum == narrow_sum ? 1 : 0;
        out.data<float>()[i] = NAN;
      }
      fill(in, group.rank());
      group.reduce_scatter_as_bfloat16(in, out, Write::kAssign, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(out.data<float>()[i], expected[static_cast<std::size_t>(i)]) << count << " " << i;
      }
      std::fill_n(out.data<float>(), count, 0.1f);
      fill(in, group.rank());
      group.reduce_scatter_as_bfloat16(in, out, Write::kAccumulate, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(out.data<float>()[i], 0.1f + expected[static_cast<std::size_t>(i)]) << count << " " << i;
      }
    }
    if (!rounds) return;
    EXPECT_LT(num_as_float32, num_sums / 10);
    EXPECT_LT(num_as_sums_of_bfloat16, num_sums * 9 / 10);
  };
  on_all_sizes(body);
  on_many_ranks(body);
}

TEST(ProcessGroup, AllReduce) {
  on_all_sizes([](ProcessGroup& group) {
    for (const std::int64_t count : kCounts) {
      Arena arena(1 << 24);
      const Tensor x = floats(arena, count);
      fill(x, group.rank());
      group.all_reduce(x, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(x.data<float>()[i], sum_at(group.size(), i)) << i;
    }
  });
}

/// A sum of bfloat16 numbers is added in float32 and rounded once.
TEST(ProcessGroup, SumsOfBfloat16RoundOnce) {
  on_all_sizes([](ProcessGroup& group) {
    for (const std::int64_t count : {std::int64_t{300}, std::int64_t{100'000}}) {
      Arena arena(1 << 24);
      const Tensor x = arena.allocate({count}, DType::kBFloat16);
      for (std::int64_t i = 0; i < count; ++i) x.data<BFloat16>()[i] = BFloat16(number(group.rank(), i));
      group.all_reduce(x, "test").wait();
      for (std::int64_t i = 0; i < count; ++i) {
        float sum = 0.0f;
        for (int rank = 0; rank < group.size(); ++rank) sum += static_cast<float>(BFloat16(number(rank, i)));
        ASSERT_EQ(x.data<BFloat16>()[i].bits, BFloat16(sum).bits) << i;
      }
    }
  });
}

TEST(ProcessGroup, AllToAll) {
  on_all_sizes([](ProcessGroup& group) {
    Arena arena(1 << 20);
    const int size = group.size(), own = group.rank();
    // Rank a sends (3a + b) % 4 rows of 5 numbers to rank b. For some pairs that is no row.
    const auto rows = [](int from, int to) { return static_cast<std::int64_t>((3 * from + to) % 4); };
    std::vector<std::int64_t> in_rows, out_rows;
    for (int peer = 0; peer < size; ++peer) {
      in_rows.push_back(rows(own, peer));
      out_rows.push_back(rows(peer, own));
    }
    const Tensor in = arena.allocate({16, 5}, DType::kFloat32), out = arena.allocate({16, 5}, DType::kFloat32);
    std::int64_t row = 0;
    for (int peer = 0; peer < size; ++peer) {
      for (std::int64_t r = 0; r < rows(own, peer); ++r, ++row) {
        for (int i = 0; i < 5; ++i) {
          in.data<float>()[row * 5 + i] = static_cast<float>(own * 1000 + peer * 100 + r * 10 + i);
        }
      }
    }
    group.all_to_all_v(in, in_rows, out, out_rows, "test").wait();
    row = 0;
    for (int peer = 0; peer < size; ++peer) {
      for (std::int64_t r = 0; r < rows(peer, own); ++r, ++row) {
        for (int i = 0; i < 5; ++i) {
          ASSERT_EQ(out.data<float>()[row * 5 + i], static_cast<float>(peer * 1000 + own * 100 + r * 10 + i));
        }
      }
    }
    const Tensor even_in = floats(arena, 3 * size), even_out = floats(arena, 3 * size);
    fill(even_in, own);
    group.all_to_all(even_in, even_out, "test").wait();
    for (int peer = 0; peer < size; ++peer) {
      for (int i = 0; i < 3; ++i) ASSERT_EQ(even_out.data<float>()[peer * 3 + i], number(peer, own * 3 + i));
    }
  });
}

/// Parts have room for 4 rows. What lies behind the counted rows does not arrive.
TEST(ProcessGroup, AllToAllOfCountedRows) {
  on_all_sizes([](ProcessGroup& group) {
    Arena arena(1 << 20);
    const int size = group.size(), own = group.rank();
    const auto rows = [](int from, int to) { return (3 * from + to) % 5; };
    const Tensor num_sent = arena.allocate({size}, DType::kInt32), num_received = arena.allocate({size}, DType::kInt32);
    const Tensor in = arena.allocate({4 * size, 3}, DType::kFloat32), out = arena.allocate(in.shape(), DType::kFloat32);
    for (int peer = 0; peer < size; ++peer) {
      num_sent.data<std::int32_t>()[peer] = rows(own, peer);
      num_received.data<std::int32_t>()[peer] = rows(peer, own);
      for (int i = 0; i < 12; ++i) {
        in.data<float>()[peer * 12 + i] = static_cast<float>(own * 1000 + peer * 100 + i);
        out.data<float>()[peer * 12 + i] = -1.0f;
      }
    }
    group.all_to_all_counted(in, num_sent, out, num_received, "test").wait();
    for (int peer = 0; peer < size; ++peer) {
      for (int i = 0; i < 12; ++i) {
        const auto sent = static_cast<float>(peer * 1000 + own * 100 + i);
        ASSERT_EQ(out.data<float>()[peer * 12 + i], i < 3 * rows(peer, own) ? sent : -1.0f) << peer << " " << i;
      }
    }
  });
}

TEST(ProcessGroup, Broadcast) {
  on_all_sizes([](ProcessGroup& group) {
    for (int root = 0; root < group.size(); ++root) {
      Arena arena(1 << 20);
      const Tensor x = floats(arena, 999);
      fill(x, group.rank());
      group.broadcast(x, root, "test").wait();
      for (std::int64_t i = 0; i < 999; ++i) ASSERT_EQ(x.data<float>()[i], number(root, i));
    }
  });
}

/// The ranks form a ring. Several messages of each tag are in flight, and are received in another order than they are
/// sent.
TEST(ProcessGroup, SendAndReceive) {
  on_all_sizes([](ProcessGroup& group) {
    if (group.size() == 1) return;
    Arena arena(1 << 20);
    const int next = (group.rank() + 1) % group.size(), previous = (group.rank() + group.size() - 1) % group.size();
    constexpr int kTags = 3, kMessages = 4;
    std::vector<Tensor> in, out;
    std::vector<Work> work;
    for (int message = 0; message < kMessages; ++message) {
      for (int tag = 0; tag < kTags; ++tag) {
        in.push_back(floats(arena, 100 + tag));
        fill(in.back(), group.rank() * 100 + message * 10 + tag);
        work.push_back(group.send(in.back(), next, tag, "test"));
      }
    }
    for (int tag = kTags; tag-- > 0;) {
      for (int message = 0; message < kMessages; ++message) {
        out.push_back(floats(arena, 100 + tag));
        work.push_back(group.receive(out.back(), previous, tag, "test"));
      }
    }
    for (Work& w : work) w.wait();
    std::size_t at = 0;
    for (int tag = kTags; tag-- > 0;) {
      for (int message = 0; message < kMessages; ++message, ++at) {
        for (std::int64_t i = 0; i < 100 + tag; ++i) {
          ASSERT_EQ(out[at].data<float>()[i], number(previous * 100 + message * 10 + tag, i));
        }
      }
    }
  });
}

/// Many operations are in flight at once. The test waits for them from the last to the first.
TEST(ProcessGroup, OperationsOverlap) {
  on_all_sizes([](ProcessGroup& group) {
    Arena arena(1 << 24);
    constexpr std::int64_t kCount = 70'000;
    std::vector<Tensor> sums, gathered;
    std::vector<Work> work;
    for (int k = 0; k < 6; ++k) {
      sums.push_back(floats(arena, k % 2 == 0 ? kCount : 100));
      fill(sums.back(), group.rank());
      work.push_back(group.all_reduce(sums.back(), "test"));
      gathered.push_back(floats(arena, 10 * group.size()));
      const Tensor own = gathered.back().rows(10 * group.rank(), 10 * (group.rank() + 1));
      fill(own, group.rank() + k);
      work.push_back(group.all_gather(own, gathered.back(), "test"));
    }
    for (std::size_t i = work.size(); i-- > 0;) work[i].wait();
    for (const Tensor& x : sums) {
      for (std::int64_t i = 0; i < x.num_elements(); ++i) ASSERT_EQ(x.data<float>()[i], sum_at(group.size(), i));
    }
    for (int k = 0; k < 6; ++k) {
      for (int rank = 0; rank < group.size(); ++rank) {
        for (std::int64_t i = 0; i < 10; ++i) {
          ASSERT_EQ(gathered[static_cast<std::size_t>(k)].data<float>()[rank * 10 + i], number(rank + k, i));
        }
      }
    }
  });
}

TEST(ProcessGroup, NumbersOfTheHost) {
  on_all_sizes([](ProcessGroup& group) {
    std::vector<double> x = {1.0, 0.1 * (group.rank() + 1), -3.0 * group.rank()};
    group.all_reduce(x, "test");
    double tenths = 0.0;
    for (int rank = 0; rank < group.size(); ++rank) tenths += 0.1 * (rank + 1);
    EXPECT_EQ(x[0], group.size());
    EXPECT_EQ(x[1], tenths);
    EXPECT_EQ(x[2], -1.5 * group.size() * (group.size() - 1));
    group.barrier("test");
  });
}

/// Counts the messages that ranks of the world send.
class CountingMessages : public ForwardingTransport {
 public:
  CountingMessages(std::unique_ptr<Transport> transport, std::atomic<int>& sent)
      : ForwardingTransport(std::move(transport)), sent_(sent) {}
  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    ++sent_;
    return transport().send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return transport().split(color, order, axis);
  }

 private:
  std::atomic<int>& sent_;
};

// Numbers of the host, barriers and broadcasts take ⌈log₂ P⌉ messages per rank and direction at most, on any number of
// ranks and with any root. Sending to all other ranks would take P - 1.
TEST(ProcessGroup, SmallOperationsSendFewMessagesPerRank) {
  for (const int size : {2, 3, 5, 6, 7, 8, 13, 32}) {
    const int rounds = static_cast<int>(std::ceil(std::log2(size))), sum_of_ranks = size * (size - 1) / 2;
    std::vector<std::atomic<int>> sent(static_cast<std::size_t>(size));
    const auto body = [&](ProcessGroup& group) {
      const int rank = group.rank();
      std::atomic<int>& own = sent[static_cast<std::size_t>(rank)];
      const auto expect_few = [&](const char* what, int most) {
        EXPECT_LE(own.exchange(0), most) << what << " on rank " << rank << " of " << size;
      };
      own = 0;
      const double mine[] = {static_cast<double>(rank), -1.0};
      const std::vector<double> all = group.all_gather(mine, "test");
      expect_few("all-gather", rounds);
      for (int r = 0; r < size; ++r) {
        EXPECT_EQ(all[2 * static_cast<std::size_t>(r)], r);
        EXPECT_EQ(all[2 * static_cast<std::size_t>(r) + 1], -1.0);
      }
      double sums[] = {static_cast<double>(rank), 0.1 * rank, 1.0};
      group.all_reduce(sums, "test");
      expect_few("all-reduce", rounds + 1);
      EXPECT_EQ(sums[0], sum_of_ranks);
      EXPECT_NEAR(sums[1], 0.1 * sum_of_ranks, 1e-12 * size * size);
      EXPECT_EQ(sums[2], size);
      const std::vector<double> sums_of_all = group.all_gather(sums, "test");
      for (std::size_t i = 0; i < sums_of_all.size(); ++i)
        EXPECT_EQ(sums_of_all[i], sums[i % 3]) << "not the same bits";
      own = 0;
      group.barrier("test");
      expect_few("barrier", rounds + 1);
      std::vector<float> numbers(5, static_cast<float>(rank));
      const Tensor x(numbers.data(), {5}, DType::kFloat32, Device::kCpu);
      group.all_reduce(x, "test").wait();
      expect_few("all-reduce of a small tensor", rounds);
      EXPECT_EQ(numbers[4], static_cast<float>(sum_of_ranks));
      // Few ranks send to all others, in one round.
      std::vector<float> parts(static_cast<std::size_t>(size), static_cast<float>(rank));
      const Tensor in(parts.data(), {size}, DType::kFloat32, Device::kCpu);
      group.reduce_scatter(in, x.rows(0, 1), Write::kAssign, "test").wait();
      expect_few("reduce-scatter of a small tensor", size > 16 ? rounds : size - 1);
      group.all_gather(x.rows(0, 1), in, "test").wait();
      expect_few("all-gather of a small tensor", size > 16 ? rounds : size - 1);
      EXPECT_EQ(parts[static_cast<std::size_t>(size) - 1], static_cast<float>(sum_of_ranks));
      for (const int root : {0, 1, size - 1}) {
        std::ranges::fill(numbers, static_cast<float>(rank));
        group.broadcast(x, root, "test").wait();
        expect_few("broadcast", rounds);
        EXPECT_EQ(numbers[3], static_cast<float>(root));
      }
    };
    with_ranks(size, body, {.wrap = [&](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
                 std::atomic<int>& own = sent[static_cast<std::size_t>(transport->rank())];
                 return std::make_unique<CountingMessages>(std::move(transport), own);
               }});
  }
}

TEST(ProcessGroup, SplitsByColor) {
  with_ranks(4, [](ProcessGroup& world) {
    // Odd and even ranks form two groups, in reverse order.
    ProcessGroup part = world.split(world.rank() % 2, -world.rank(), "part");
    EXPECT_EQ(part.size(), 2);
    EXPECT_EQ(part.rank(), world.rank() < 2 ? 1 : 0);
    std::vector<double> x = {static_cast<double>(world.rank())};
    part.all_reduce(x, "test");
    EXPECT_EQ(x[0], world.rank() % 2 == 0 ? 2.0 : 4.0);
    // Operations of the parts and of the whole world are independent of each other.
    Arena arena(1 << 20);
    const Tensor a = floats(arena, 50), b = floats(arena, 50);
    fill(a, world.rank());
    fill(b, world.rank());
    Work first, second;
    if (world.rank() % 2 == 0) {
      first = world.all_reduce(a, "test");
      second = part.all_reduce(b, "test");
    } else {
      second = part.all_reduce(b, "test");
      first = world.all_reduce(a, "test");
    }
    second.wait();
    first.wait();
    for (std::int64_t i = 0; i < 50; ++i) {
      ASSERT_EQ(a.data<float>()[i], sum_at(4, i));
      ASSERT_EQ(b.data<float>()[i], number(world.rank() % 2, i) + number(world.rank() % 2 + 2, i));
    }
  });
}

TEST(ProcessGroup, WindowsAreSharedAndZeroed) {
  on_all_sizes([](ProcessGroup& group) {
    if (group.size() == 1) return;
    const auto window = group.allocate_window(1000);
    EXPECT_EQ(window->num_bytes(), 1000u);
    for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(window->peer(group.rank())[i], std::byte{0});
    group.barrier("test");
    // Every rank stores into the memory of every rank.
    for (int rank = 0; rank < group.size(); ++rank) {
      window->peer(rank)[group.rank()] = static_cast<std::byte>(group.rank() + 10 * rank + 1);
    }
    group.barrier("test");
    for (int rank = 0; rank < group.size(); ++rank) {
      EXPECT_EQ(window->peer(group.rank())[rank], static_cast<std::byte>(rank + 10 * group.rank() + 1));
    }
    group.barrier("test");
  });
}

/// A rank that waits for a store into its window still advances the operations that it has started. Here the store is
/// made only after the rank's own message has arrived.
TEST(ProcessGroup, WaitsForStoresIntoAWindow) {
  on_all_sizes([](ProcessGroup& group) {
    if (group.size() == 1) return;
    const auto window = group.allocate_window(sizeof(std::atomic<std::int64_t>));
    const auto word_of = [&](int rank) -> std::atomic<std::int64_t>& {
      return *reinterpret_cast<std::atomic<std::int64_t>*>(window->peer(rank));
    };
    Arena arena(1 << 12);
    const Tensor x = floats(arena, 10), y = floats(arena, 10);
    fill(x, group.rank());
    const int next = (group.rank() + 1) % group.size(), previous = (group.rank() + group.size() - 1) % group.size();
    Work sent = group.send(x, next, 0, "test");
    group.receive(y, previous, 0, "test").wait();
    word_of(previous).store(7, std::memory_order_release);
    group.wait_until(
        "wait", "test", previous, [&] { return word_of(group.rank()).load(std::memory_order_acquire) == 7; },
        [] { return std::string(); });
    sent.wait();
    EXPECT_EQ(y.data<float>()[3], number(previous, 3));
  });
}

/// When one wait covers many operations, each operation has the whole timeout.
TEST(Progress, TheTimeoutCountsAnewWhereTheWaitGetsOn) {
  using Clock = std::chrono::steady_clock;
  Progress progress(nullptr, Progress::Seconds(1.0));
  const auto nothing = [] { return std::string(); };
  const auto run = [&](Progress::Seconds until, Progress::Seconds moves) {
    const Clock::time_point begin = Clock::now();
    progress.wait_until(
        "test", [&] { return Clock::now() - begin > until; }, nothing,
        [&] {
          const Progress::Seconds now = Clock::now() - begin;
          return static_cast<std::uint64_t>(std::min(now, moves) / Progress::Seconds(0.05));
        });
  };
  EXPECT_NO_THROW(run(Progress::Seconds(2.5), Progress::Seconds(2.5)));
  EXPECT_THROW(run(Progress::Seconds(30.0), Progress::Seconds(0.5)), RankFailure);
}

/// The body takes longer on one rank than the others wait for an operation.
TEST(RunTogether, ALongBodyKeepsTheOthersWaiting) {
  const auto body = [](ProcessGroup& group) {
    std::atomic<int> calls = 0;
    run_long_together(group, "test", [&] {
      if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(3));
      ++calls;
    });
    EXPECT_EQ(calls, 1);
    std::string message;
    try {
      run_long_together(group, "test", [&] {
        if (group.rank() == 2) fail("too long");
      });
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_EQ(message, "rank 2: too long");
  };
  with_ranks(3, body, {.timeout = Progress::Seconds(1.5)});
}

// The ranks take different numbers of steps. An error on one ends all, even those that would go on for ever.
TEST(RunTogether, StepsEndTogether) {
  with_ranks(3, [](ProcessGroup& group) {
    int steps = 0;
    run_steps_together(group, "test", [&] { return ++steps <= 10 * group.rank(); });
    EXPECT_EQ(steps, 10 * group.rank() + 1);
    const auto step = [&] {
      if (group.rank() == 1) throw Error("a bad file");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      return true;
    };
    try {
      run_steps_together(group, "test", step);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 1: a bad file"));
    }
  });
}

/// If some ranks fail, all ranks fail with the error of the first of them.
TEST(RunTogether, AnErrorOfSomeRanksIsThatOfTheFirstOnAll) {
  with_ranks(4, [](ProcessGroup& group) {
    int calls = 0;
    run_together(group, "test", [&] { ++calls; });
    EXPECT_EQ(calls, 1);
    for (const std::size_t length : {0u, 1u, 3u, 1000u}) {
      const std::string text(length, 'x');
      std::string message;
      try {
        run_together(group, "test", [&] {
          if (group.rank() == 1 || group.rank() == 3) fail("{} of {}", text, group.rank());
        });
      } catch (const Error& error) {
        message = error.what();
      }
      EXPECT_EQ(message, fmt::format("rank 1: {} of 1", text));
    }
    ExitStatus status = ExitStatus::kDone;
    try {
      run_together(group, "test", [&] {
        if (group.rank() == 2) throw Error("full", ExitStatus::kStorageFailed);
      });
    } catch (const Error& error) {
      status = error.status();
    }
    EXPECT_EQ(status, ExitStatus::kStorageFailed);
    group.barrier("test");
  });
}

// After a failure, the operations that were started must not write into their tensors any more: the memory is freed.
TEST(ProcessGroup, AFailureEndsWhatWasStarted) {
  constexpr std::int64_t kCount = 1000;
  with_ranks(2, [](ProcessGroup& group) {
    Arena arena(1 << 16);
    const Tensor in = floats(arena, kCount), out = floats(arena, 2 * kCount);
    fill(in, group.rank());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return group.all_gather(in, out, "weights").wait();
    }
    EXPECT_THROW(
        {
          const Work work = group.all_gather(in, out, "weights");
          fail("too many rows");
        },
        Error);
    for (std::int64_t i = 0; i < kCount; ++i) ASSERT_EQ(out.data<float>()[kCount + i], number(1, i)) << i;
  });
}

TEST(ProcessGroup, AFailureLeavesWhatDoesNotEnd) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half an operation";
  with_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 1) return;
    Arena arena(1 << 16);
    const Tensor in = floats(arena, 8), out = floats(arena, 16);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(
        {
          const Work work = group.all_gather(in, out, "weights");
          fail("too many rows");
        },
        Error);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  });
}

/// One rank does not join an operation. The other ranks report which one, and what each rank does.
TEST(ProcessGroup, ARankThatHangs) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half an operation";
  std::string message;
  try {
    with_ranks(3,
               [](ProcessGroup& group) {
                 if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
                 group.barrier("the first step");
               },
               {.timeout = Progress::Seconds(0.3)});
  } catch (const RankFailure& failure) {
    message = failure.what();
  }
  EXPECT_THAT(message, testing::HasSubstr("barrier of the first step (world) did not end within 0.3 s"));
  // Rank 0 waits for rank 1, and rank 2 for rank 0.
  EXPECT_THAT(message, testing::ContainsRegex("\\(comm.init_timeout_seconds\\); waiting for rank 1; "
                                              "no message has come from rank [01]\n"));
  EXPECT_THAT(message, testing::HasSubstr("rank 1 (process"));
  EXPECT_THAT(message, testing::ContainsRegex("rank 1 .*in starting"));
  EXPECT_THAT(message, testing::ContainsRegex("rank [02] .*in barrier of the first step"));
}

/// A thread that waits for a message sleeps until it is there. It must not use the processor, which many ranks share.
TEST(ProcessGroup, ThreadsSleepUntilAMessageComes) {
  if (launched_by_mpi()) GTEST_SKIP() << "processes poll";
  with_ranks(2, [](ProcessGroup& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const auto switches = [] {
      rusage usage{};
      getrusage(RUSAGE_THREAD, &usage);
      return usage.ru_nvcsw;
    };
    const auto before = switches();
    const auto begin = std::chrono::steady_clock::now();
    world.barrier("a late rank");
    if (world.rank() == 1) return;
    EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
    EXPECT_LT(switches() - before, 50);  // it looks at its peers twice a second
  });
}

TEST(ThreadTransport, AMessageEndsWithItsRequest) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks are threads here";
  run_rank_threads(2, [](std::unique_ptr<Transport> world) {
    std::byte data{}, go{};
    const auto finish = [](Request& request) {
      while (!request.test()) std::this_thread::yield();
    };
    if (world->rank() == 0) {
      world->send(&data, 1, 1, 7);  // its request ends at once, as if the sender had failed
      finish(*world->send(&go, 1, 1, 8));
      return;
    }
    const auto taken_back = world->receive(&data, 1, 0, 7);
    finish(*world->receive(&go, 1, 0, 8));
    EXPECT_FALSE(taken_back->test());
  });
}

/// Nothing rings when a delay ends. So a transport that delays messages has no bell, and its ranks poll instead.
TEST(ProcessGroup, ATransportThatDelaysMessagesHasNoBell) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks are threads here";
  run_rank_threads(2, [](std::unique_ptr<Transport> transport) {
    EXPECT_NE(transport->bell(), nullptr);
    EXPECT_NE(transport->split(0, 0, "pp")->bell(), nullptr);
    EXPECT_EQ(ForwardingTransport(std::move(transport)).bell(), nullptr);
  });
}

TEST(ThreadTransport, NodesHaveTheirRanks) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks are threads here";
  const auto body = [](std::unique_ptr<Transport> transport) {
    const int rank = transport->rank();
    Ranks ranks(std::move(transport), Progress::Seconds(60.0));
    EXPECT_EQ(ranks.num_on_node(), rank < 4 ? 2 : 1);
    EXPECT_EQ(ranks.rank_on_node(), rank % 2);
    EXPECT_EQ(ranks.first_ranks_on_nodes(), (std::vector<int>{0, 0, 2, 2, 4}));
  };
  run_rank_threads(5, body, 2);
}

/// A transport whose board of ranks sees two nodes with two ranks each.
class TwoNodes : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  std::unique_ptr<Transport> split_by_node() override { return transport().split(rank() / 2, rank(), "node"); }
};

/// Ranks do not see what ranks of another node do. They see only who has sent them nothing, which may wait itself.
/// Their error names that rank by its number in the world, whatever the group.
TEST(ProcessGroup, ARankOfAnotherNodeThatHangs) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half an operation";
  std::array<std::string, 4> messages;
  with_ranks(4,
             [&](ProcessGroup& world) {
               ProcessGroup group = world.split(world.rank() == 0 ? 0 : 1, world.rank(), "dp_shard");
               if (world.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(900));
               if (world.rank() % 3 == 0) return;
               try {
                 group.barrier("the first step");
               } catch (const RankFailure& failure) {
                 messages[static_cast<std::size_t>(world.rank())] = failure.what();
               }
             },
             {.timeout = Progress::Seconds(0.3), .wrap = [](std::unique_ptr<Transport> transport) {
                return std::make_unique<TwoNodes>(std::move(transport));
              }});
  // Rank 1 is the only rank of its node in this wait. Rank 2 waits for rank 1, and sees that rank 3, on the same node,
  // computes.
  EXPECT_THAT(messages[1],
              testing::ContainsRegex("did not end within 0.3 s [^\n]*; no message has come from rank 3\n"));
  EXPECT_THAT(messages[1], testing::Not(testing::HasSubstr("rank 3 (process")));
  EXPECT_THAT(messages[2], testing::HasSubstr("waiting for rank 3; no message has come from rank 1\n"));
}

/// A rank does not join the creation of a group. That call has no timeout and returns only when it is complete, so
/// another thread reports the rank.
TEST(ProcessGroup, ARankThatOthersCannotStopWaitingFor) {
  if (launched_by_mpi()) GTEST_SKIP() << "the ranks would be left with half an operation";
  std::mutex mutex;
  std::vector<std::string> messages;
  const auto keep = [&](const std::exception& failure) {
    const std::lock_guard lock(mutex);
    messages.emplace_back(failure.what());
  };
  with_ranks(2,
             [](ProcessGroup& group) {
               static_cast<void>(group.split(0, group.rank(), "dp_shard"));  // all ranks join this one in time
               if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(6000));
               static_cast<void>(group.split(0, group.rank(), "ep"));
             },
             {.timeout = Progress::Seconds(2.0), .failure_handler = keep});
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_THAT(messages[0], testing::HasSubstr("creation of ep (world) did not end within 2 s "
                                              "(comm.init_timeout_seconds); waiting for rank 1\n"));
  EXPECT_THAT(messages[0], testing::ContainsRegex("rank 0 .*in creation of ep"));
}

}  // namespace
}  // namespace tessera
