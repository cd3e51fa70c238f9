#include "comm/transport/bell.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using SteadyClock = std::chrono::steady_clock;

/// Many threads ring for one that waits. None of the rings may be lost, whichever thread rings first.
TEST(Bell, WakesItsWaiterHoweverManyRing) {
  constexpr std::int64_t kRingers = 8, kRings = 50;
  constexpr auto kForEver = std::chrono::seconds(2), kTime = std::chrono::seconds(3);
  Bell bell;
  std::atomic<std::int64_t> num_rung{0}, round{0};
  std::atomic<bool> ends{false};
  std::vector<std::thread> ringers;
  for (std::int64_t i = 0; i < kRingers; ++i) {
    ringers.emplace_back([&] {
      for (std::int64_t done = 0; !ends;) {
        if (round == done) {
          std::this_thread::yield();
          continue;
        }
        ++done;
        for (std::int64_t k = 0; k < kRings; ++k) {
          ++num_rung;
          bell.ring();
        }
      }
    });
  }
  std::int64_t num_lost = 0;
  for (const auto begin = SteadyClock::now(); SteadyClock::now() - begin < kTime && num_lost == 0;) {
    const std::int64_t expected = ++round * kRingers * kRings;
    for (;;) {
      const std::uint32_t seen = bell.count();
      if (num_rung == expected) break;
      const auto asleep = SteadyClock::now();
      bell.wait_for(seen, kForEver);
      // The bell was rung after count() had returned, and the thread slept on.
      if (SteadyClock::now() - asleep >= kForEver && bell.count() != seen) ++num_lost;
    }
  }
  ends = true;
  for (std::thread& ringer : ringers) ringer.join();
  EXPECT_EQ(num_lost, 0) << "in " << round << " rounds";
  EXPECT_GT(round, 10);
}

TEST(Bell, WaitsNoLongerThanItIsTold) {
  Bell bell;
  const auto begin = SteadyClock::now();
  bell.wait_for(bell.count(), std::chrono::milliseconds(20));
  EXPECT_GE(SteadyClock::now() - begin, std::chrono::milliseconds(20));
  const std::uint32_t before = bell.count();
  bell.ring();
  EXPECT_NE(bell.count(), before);
  bell.wait(before);  // returns at once
}

}  // namespace
}  // namespace tessera
