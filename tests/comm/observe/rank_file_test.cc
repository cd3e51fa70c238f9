// Tests what the file of a rank tells ranks and monitors, while the rank runs and after its end.
#include "comm/observe/rank_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/file.h"
#include "comm/observe/flight_analysis.h"
#include "tests/comm/ranks.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class RankFiles : public ::testing::Test {
 protected:
  RankFiles() : folder_(fs::temp_directory_path() / fmt::format("tessera-rank-files-{}", ::getpid())) {}
  void TearDown() override { fs::remove_all(folder_); }
  void SetUp() override {
    if (launched_by_mpi()) GTEST_SKIP() << "ranks are threads here";
  }

  fs::path path(int rank) const { return rank_file_path(folder_, 2, rank); }
  std::unique_ptr<RankFile> file(int rank) const { return std::make_unique<RankFile>(folder_, 2, rank); }
  /// Runs `body` on threads as ranks, each with a file.
  void with_files(int num_ranks, const std::function<void(Ranks&)>& body, double timeout = 60.0) const {
    run_rank_threads(num_ranks, [&](std::unique_ptr<Transport> transport) {
      std::unique_ptr<RankFile> rank_file = file(transport->rank());
      Ranks ranks(std::move(transport), Progress::Seconds(timeout), std::move(rank_file));
      body(ranks);
    });
  }

  fs::path folder_;
};

TEST_F(RankFiles, TellWhatTheirRankDoes) {
  const fs::path rank_file = path(0);
  {
    Ranks one(file(0));
    RankState state = read_rank_file(rank_file);
    EXPECT_EQ(state.world_rank, 0);
    EXPECT_EQ(state.world_size, 1);
    EXPECT_EQ(state.attempt, 2);
    EXPECT_EQ(state.pid, ::getpid());
    EXPECT_EQ(state.process, ProcessState::kLives);
    EXPECT_EQ(state.section, Section::kStarting);
    EXPECT_FALSE(state.end.has_value());
    one.set_step(7);
    state = read_rank_file(rank_file);
    EXPECT_EQ(state.step, 7);
    EXPECT_EQ(state.section, Section::kStep);
    EXPECT_LE(state.section_since_ns, state.read_ns);
    const std::int64_t before = state.section_since_ns;
    one.set_step(8);  // starts the section anew
    EXPECT_GT(read_rank_file(rank_file).section_since_ns, before);
    one.set_section(Section::kCheckpoint);
    EXPECT_EQ(read_rank_file(rank_file).section, Section::kCheckpoint);
    one.set_end(ExitStatus::kStorageFailed, "the disk is full");
    one.set_end(ExitStatus::kRankFailed, "a later error");
    one.set_step(9);  // of a thread that does not know yet
  }
  const RankState state = read_rank_file(rank_file);
  EXPECT_EQ(state.section, Section::kEnded);
  ASSERT_TRUE(state.end.has_value());
  EXPECT_EQ(state.end->exit_status, 74);
  EXPECT_EQ(state.end->message, "the disk is full");
}

/// Each look is at a few ranks only, and all ranks have their turns.
TEST_F(RankFiles, ShowADeadRankOfMany) {
  const pid_t child = fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  constexpr int kNumRanks = 20, kDead = 17, kNumLooks = 3;
  run_rank_threads(kNumRanks, [&](std::unique_ptr<Transport> transport) {
    const int rank = transport->rank();
    std::unique_ptr<RankFile> rank_file = file(rank);
    if (rank == kDead) rank_file->entry().pid = child;
    RankBoard board(*transport, std::move(rank_file));
    std::vector<int> found;
    for (int look = 0; look < kNumLooks; ++look) {
      if (const auto dead = board.find_dead()) found.push_back(*dead);
    }
    EXPECT_THAT(found, ::testing::ElementsAre(kDead));
    static_cast<void>(transport->split(0, rank, "end"));  // files stay until all have looked
  });
}

TEST_F(RankFiles, OutliveARankThatIsKilled) {
  const pid_t child = fork();
  if (child == 0) {
    const RankFile rank_file(folder_, 2, 5);
    ::pause();
    ::_exit(0);
  }
  for (int i = 0; i < 500 && !fs::exists(path(5)); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(read_rank_file(path(5)).process, ProcessState::kLives);
  ::kill(child, SIGSTOP);
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  EXPECT_EQ(read_rank_file(path(5)).process, ProcessState::kStopped);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  const RankState state = read_rank_file(path(5));
  EXPECT_EQ(state.process, ProcessState::kEnded);
  EXPECT_EQ(state.world_rank, 5);
  EXPECT_EQ(state.pid, child);
  EXPECT_FALSE(state.end.has_value());
}

TEST(ProcessStates, ANumberThatIsUsedAgainIsAnotherProcess) {
  const std::uint64_t start = start_of_process(::getpid());
  EXPECT_GT(start, 0u);
  EXPECT_EQ(state_of_process(::getpid(), start), ProcessState::kLives);
  EXPECT_EQ(state_of_process(::getpid(), start - 1), ProcessState::kEnded);
  EXPECT_EQ(state_of_process(::getpid(), 0), ProcessState::kLives);
}

TEST_F(RankFiles, GarbageIsAnError) {
  { const RankFile rank_file(folder_, 2, 0); }
  const std::string bytes = read_text_file(path(0));
  const auto parse = [](const std::string& text) {
    return parse_rank_file(std::as_bytes(std::span(text)), "rank-00000");
  };
  EXPECT_NO_THROW(parse(bytes));
  expect_error([&] { parse(""); }, {"rank-00000", "not the file of a rank"});
  expect_error([&] { parse(bytes.substr(1)); }, {"not the file of a rank"});
  expect_error([&] { parse(std::string(bytes.size(), 'x')); }, {"not the file of a rank"});
  std::string other = bytes;
  other[8] = 99;  // the version of the format
  expect_error([&] { parse(other); }, {"another version"});
  // A file with any other damage is either read or refused with an error.
  for (std::size_t at = 16; at < bytes.size(); at += 61) {
    std::string damaged = bytes;
    std::fill(damaged.begin() + static_cast<std::ptrdiff_t>(at), damaged.end(), '\xff');
    try {
      const RankState state = parse(damaged);
      EXPECT_FALSE(name_of(state.section).empty());
      for (const RankState::Event& event : state.events) EXPECT_LT(event.group, state.groups.size());
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("damaged"));
    }
  }
  expect_error([&] { read_rank_file(folder_ / "missing"); }, {"missing"});
}

TEST_F(RankFiles, AFolderThatCannotBeIsAnError) {
  std::ofstream(folder_) << "a file";
  expect_error([&] { file(0); }, {"job.node_folder", folder_.string()});
  fs::remove(folder_);
  expect_error([&] { const RankFile rank_file(folder_ / "a" / "b", 1, 0); }, {"job.node_folder", "No such file"});
}

/// all_idle_ns() counts the time in which a rank waits for slower ranks. Of two ranks, the one that sleeps waits for
/// nobody. It also counts sections other than steps, whatever the rank does there.
TEST_F(RankFiles, CountTheTimeInWhichARankDoesNotCompute) {
  with_files(2, [](Ranks& ranks) {
    ranks.set_step(1);
    if (ranks.rank() == 1) {
      ranks.set_section(Section::kCheckpoint);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ranks.set_step(2);
    }
    ranks.world().barrier("a checkpoint");
    for (int i = 0; i < 10; ++i) {
      if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ranks.world().barrier("a step");
    }
  });
  EXPECT_GT(read_rank_file(path(0)).all_idle_ns(), 300'000'000);
  EXPECT_GT(read_rank_file(path(1)).all_idle_ns(), 100'000'000);
  EXPECT_LT(read_rank_file(path(1)).all_idle_ns(), 200'000'000);
}

/// Both ranks record the same operations of a group, with the same numbers.
TEST_F(RankFiles, RecordWhatMovesBetweenRanks) {
  with_files(3, [](Ranks& ranks) {
    ProcessGroup& world = ranks.world();
    ProcessGroup pair = world.split(world.rank() == 0 ? 0 : 1, -world.rank(), "pair");  // ranks 2 and 1
    std::vector<float> numbers(100, 1.0f);
    const Tensor x(numbers.data(), {100}, DType::kFloat32, Device::kCpu);
    world.all_reduce(x, "x").wait();
    if (pair.size() == 2) pair.broadcast(x, 0, "x").wait();
    if (world.rank() == 1) world.send(x, 2, 0, "x").wait();
    if (world.rank() == 2) world.receive(x, 1, 0, "x").wait();
  });
  const RankState one = read_rank_file(path(1)), two = read_rank_file(path(2));
  ASSERT_EQ(one.groups.size(), 2u);
  ASSERT_EQ(two.groups.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(one.groups[i].id, two.groups[i].id);
    EXPECT_EQ(one.groups[i].sequence, two.groups[i].sequence);
  }
  EXPECT_NE(one.groups[0].id, one.groups[1].id);
  EXPECT_EQ(one.groups[0].axis, "world");
  EXPECT_EQ(one.groups[1].axis, "pair");
  EXPECT_EQ(one.groups[1].rank, 1);
  EXPECT_EQ(one.groups[1].size, 2);
  const auto last = [](const RankState& state, FlightKind kind) {
    const auto found = std::find_if(state.events.rbegin(), state.events.rend(),
                                    [&](const RankState::Event& event) { return event.kind == kind; });
    EXPECT_NE(found, state.events.rend());
    return *found;
  };
  for (const RankState* state : {&one, &two}) {
    const RankState::Event sum = last(*state, FlightKind::kAllReduce);
    EXPECT_EQ(sum.group, 0u);
    EXPECT_EQ(sum.bytes, 400u);
    EXPECT_EQ(sum.sequence, state->groups[0].sequence);
    EXPECT_GT(sum.begin_ns, 0);
    EXPECT_GE(sum.end_ns, sum.begin_ns);
    EXPECT_EQ(last(*state, FlightKind::kBroadcast).group, 1u);
    EXPECT_FALSE(state->is_waiting());
  }
  EXPECT_EQ(last(one, FlightKind::kSend).peer, 2);
  EXPECT_EQ(last(two, FlightKind::kReceive).peer, 1);
  EXPECT_EQ(last(two, FlightKind::kReceive).sequence, 0u);
}

/// The ring keeps the last events. A reader that reads while they are written gets only whole events.
TEST_F(RankFiles, AReaderGetsWholeEvents) {
  RankFile rank_file(folder_, 2, 0);
  FlightRecorder recorder = rank_file.recorder();
  const std::uint16_t group = recorder.add_group(17, "world", 0, 2);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (std::size_t i = 1; !stop; ++i)
      recorder.end(recorder.begin(group, {.kind = FlightKind::kAllGather, .bytes = 3 * i}));
  });
  std::size_t num_events = 0;
  for (int i = 0; i < 300; ++i) {
    for (const RankState::Event& event : read_rank_file(path(0)).events) {
      ASSERT_EQ(event.bytes, 3 * event.number);
      ASSERT_EQ(event.sequence, event.number);
      ++num_events;
    }
  }
  stop = true;
  writer.join();
  EXPECT_GT(num_events, 0u);
  const RankState state = read_rank_file(path(0));
  ASSERT_EQ(state.events.size(), kMaxFlightEvents);
  EXPECT_EQ(state.events.front().number + kMaxFlightEvents, state.events.back().number + 1);
}

/// The debug model on 4 ranks starts 60 to 200 operations in a step of about a second. Even 1000 operations of 1 us
/// each take only 0.1 % of the step.
TEST_F(RankFiles, AnEventTakesLessThanAMicrosecond) {
  RankFile rank_file(folder_, 2, 0);
  FlightRecorder recorder = rank_file.recorder();
  const std::uint16_t group = recorder.add_group(17, "world", 0, 2);
  constexpr int kEvents = 100'000;
  double best = 1e9;
  for (int repetition = 0; repetition < 5; ++repetition) {
    const std::int64_t begin = monotonic_ns();
    for (int i = 0; i < kEvents; ++i)
      recorder.end(recorder.begin(group, {.kind = FlightKind::kAllGather, .bytes = 64}));
    best = std::min(best, static_cast<double>(monotonic_ns() - begin) / kEvents);
  }
  std::printf("flight recorder: %.0f ns per event\n", best);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers take most of the time";
#endif
  EXPECT_LT(best, 1000.0);
}

/// Tests the whole path: a rank stays away from the third operation, and the files name that rank.
TEST_F(RankFiles, ARankThatStaysAwayIsTheCulprit) {
  std::mutex mutex;
  Culprit culprit;
  try {
    with_files(
        4,
        [&](Ranks& ranks) {
          ProcessGroup half = ranks.world().split(ranks.rank() % 2, ranks.rank(), "half");
          ranks.world().barrier("step 1");
          half.barrier("step 1");
          if (ranks.rank() == 3) {
            std::this_thread::sleep_for(std::chrono::milliseconds(600));
            const std::lock_guard lock(mutex);
            std::vector<RankState> states;
            for (int rank = 0; rank < 4; ++rank) states.push_back(read_rank_file(path(rank)));
            culprit = find_culprit(states, 4);
          }
          half.barrier("step 2");
          ranks.world().barrier("step 2");
        },
        5.0);
  } catch (const RankFailure&) {
    FAIL() << "slower than the timeout";
  }
  // Ranks 0 and 2 wait for all ranks, and rank 1 waits for rank 3.
  EXPECT_THAT(culprit.ranks, ::testing::ElementsAre(3));
  EXPECT_EQ(culprit.sure, Certainty::kCertain);
  EXPECT_THAT(culprit.reason, HasSubstr("rank 3 waits for nobody"));
  EXPECT_THAT(culprit.reason, HasSubstr("wait for it in all-reduce"));
}

}  // namespace
}  // namespace tessera
