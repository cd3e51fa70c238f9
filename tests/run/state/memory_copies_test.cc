// Tests runs that lose nodes, with threads as ranks and a folder in place of each node's memory. The runs resume from
// the copies in memory, with the losses of an undisturbed run.
#include "run/state/memory_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <map>

#include "base/log.h"
#include "comm/transport/forwarding_transport.h"
#include "run/state/copy_folder.h"
#include "run/trainer.h"
#include "tests/comm/ranks.h"
#include "tests/data/support.h"
#include "tests/log_of.h"
#include "tests/run/run_config.h"
#include "tests/step/short_run.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using data::TemporaryFolder;
using Losses = std::map<std::int64_t, std::pair<double, double>>;  // losses and gradient norms, by step

/// Holds back messages to partners, the only messages of the world that have tags, until `released`.
class HeldTransport : public ForwardingTransport {
 public:
  HeldTransport(std::unique_ptr<Transport> transport, const std::atomic<bool>& released)
      : ForwardingTransport(std::move(transport)), released_(released) {}

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    constexpr int kFirstUserTag = ProcessGroup::kMaxTag + 1;
    if (tag < kFirstUserTag) return transport().send(data, num_bytes, to, tag);
    return std::make_unique<HeldSend>(
        released_, [this, data, num_bytes, to, tag] { return transport().send(data, num_bytes, to, tag); });
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return transport().split(color, order, axis);
  }

 private:
  struct HeldSend : Request {
    HeldSend(const std::atomic<bool>& flag, std::function<std::unique_ptr<Request>()> start_it)
        : released(flag), start(std::move(start_it)) {}
    bool test() override {
      if (!released) return false;
      if (!request) request = start();
      return request->test();
    }
    const std::atomic<bool>& released;
    std::function<std::unique_ptr<Request>()> start;
    std::unique_ptr<Request> request;
  };

  const std::atomic<bool>& released_;
};

/// Thrown by a test to end a run as a fault does, without a last checkpoint.
struct Fault : std::runtime_error {
  Fault() : std::runtime_error("a fault") {}
};

struct Cluster {
  int num_ranks = 4;
  std::int64_t dp_replicate = 1;
  int ranks_per_node = 2;
};

class MemoryCopiesOnNodes : public ::testing::Test {
 protected:
  MemoryCopiesOnNodes() { data::make_dataset(scratch_, 400, 3000, 0.1); }

  JobConfig config(const std::vector<std::string>& overrides) const {
    static const std::string kToml = std::string(kShortRun) + R"(
[job]
run_id = "test"
[checkpoint]
enable = true
interval = 100
memory_interval = 1
)";
    std::vector<std::string> all = {fmt::format("--job.node_folder={}", (scratch_ / "node").string())};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return run_config(scratch_, kToml, all);
  }

  /// Returns the folder that stands in for a node's memory.
  fs::path node(int idx) const { return scratch_ / fmt::format("node{}", idx); }

  /// Trains and returns the losses. If `last_step` is above 0, all ranks fail after it, before its copy is taken. Every
  /// rank calls `at_step` after each step, also before its copy.
  Losses train(const Cluster& cluster, std::vector<std::string> overrides = {}, std::int64_t last_step = 0,
               const std::function<void(std::int64_t step, int rank, Trainer&)>& at_step = {},
               const std::atomic<bool>* released = nullptr) const {
    overrides.push_back(fmt::format("--training.global_batch_size={}", cluster.num_ranks));
    overrides.push_back(fmt::format("--parallelism.data_parallel_replicate_degree={}", cluster.dp_replicate));
    const JobConfig common = config(overrides);
    Losses losses;
    const auto run = [&] {
      run_rank_threads(cluster.num_ranks, [&](std::unique_ptr<Transport> transport) {
        if (released != nullptr) transport = std::make_unique<HeldTransport>(std::move(transport), *released);
        Ranks ranks(std::move(transport), Progress::Seconds(60.0));
        JobConfig own = common;
        own.job.node_folder = node(ranks.rank() / cluster.ranks_per_node);
        Trainer trainer(own, &ranks);
        trainer.set_step_callback([&](std::int64_t step, const StepResult& result) {
          if (ranks.rank() == 0) losses[step] = {result.total_loss, result.grad_norm};
          if (at_step) at_step(step, ranks.rank(), trainer);
          if (step != last_step) return;
          ranks.world().barrier("the end of the last step");  // all ranks have called back when the first one fails
          throw Fault();
        });
        trainer.run(no_signal_);
      });
    };
    if (last_step <= 0) {
      run();
    } else {
      EXPECT_ANY_THROW(run());
    }
    return losses;
  }

  /// Trains without a fault and without copies, in a separate folder.
  Losses undisturbed(const Cluster& cluster) const {
    return train(cluster, {fmt::format("--job.dump_folder={}", (scratch_ / "undisturbed").string()),
                           "--checkpoint.memory_interval=0"});
  }

  std::vector<fs::path> copies_of(int node_idx, std::int64_t attempt) const {
    std::vector<fs::path> found;
    for (const auto& entry :
         fs::directory_iterator(node(node_idx) / "memory" / "test" / fmt::format("attempt-{}", attempt))) {
      found.push_back(entry.path());
    }
    return found;
  }

  /// Returns the steps of the copies. Damaged and unfinished copies are left out.
  static std::map<fs::path, std::int64_t> steps_of(const std::vector<fs::path>& paths) {
    std::map<fs::path, std::int64_t> steps;
    for (const fs::path& path : paths) {
      try {
        const MappedFile file(path);
        if (const auto header = read_memory_copy(file.bytes(), path.string())) steps[path] = header->step;
      } catch (const Error&) {
        continue;
      }
    }
    return steps;
  }

  static void damage(const fs::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(kMemoryCopyHeaderBytes) + 1000);
    const char byte = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(kMemoryCopyHeaderBytes) + 1000);
    file.put(static_cast<char>(byte ^ 0x10));
  }

  const volatile std::sig_atomic_t no_signal_ = 0;
  TemporaryFolder scratch_;
};

void expect_same(const Losses& actual, const Losses& expected, std::int64_t first_step) {
  for (const auto& [step, numbers] : actual) EXPECT_EQ(numbers, expected.at(step)) << step;
  EXPECT_EQ(actual.begin()->first, first_step);
  EXPECT_EQ(actual.rbegin()->first, expected.rbegin()->first);
}

/// A later attempt, or copies, may be in a folder that cannot be read.
TEST(CopyFolder, OnlyAMissingFolderIsEmpty) {
  const TemporaryFolder scratch;
  const CopyFolder folder(scratch.path(), {.id = "test"});
  EXPECT_TRUE(folder.attempts().empty());
  fs::create_directories(scratch / "memory");
  fs::create_symlink("test", scratch / "memory/test");  // a link to itself
  expect_error([&] { static_cast<void>(folder.attempts()); }, {"memory/test", "Too many levels"});
  expect_error([&] { folder.require_no_later_attempt(); }, {"memory/test", "Too many levels"});
}

/// Sharded ranks on two and three nodes, and replicas on separate and on shared nodes, with and without shards.
const Cluster kClusters[] = {{2, 1, 1}, {4, 1, 2}, {3, 1, 1}, {5, 1, 2}, {2, 2, 1}, {4, 2, 2}, {4, 2, 1}, {4, 4, 2}};

TEST_F(MemoryCopiesOnNodes, ALostNodeChangesNoBit) {
  for (const Cluster& cluster : kClusters) {
    SCOPED_TRACE(fmt::format("{} ranks, {} replicas, {} per node", cluster.num_ranks, cluster.dp_replicate,
                             cluster.ranks_per_node));
    const Losses straight = undisturbed(cluster);
    ASSERT_EQ(straight.size(), 8u);
    train(cluster, {}, 5);
    fs::remove_all(node(0));
    // The copy of step 4 was in flight while step 5 ran.
    Losses healed = train(cluster);
    const std::int64_t first = healed.begin()->first;
    EXPECT_GE(first, 4);
    EXPECT_LE(first, 5);
    expect_same(healed, straight, first);
    for (const char* folder : {"outputs", "undisturbed"}) fs::remove_all(scratch_ / folder);
  }
}

const Cluster kSharded{4, 1, 2}, kReplicas{4, 2, 2}, kOneNode{2, 1, 2};

TEST_F(MemoryCopiesOnNodes, OnOtherAxes) {
  for (const char* axis : {"pipeline", "tensor", "expert", "context"}) {
    SCOPED_TRACE(axis);
    const std::vector<std::string> mesh = {fmt::format("--parallelism.{}_parallel_degree=2", axis),
                                           "--optimizer.state_dtype=bfloat16"};
    std::vector<std::string> plain = mesh;
    plain.insert(plain.end(), {"--checkpoint.memory_interval=0", "--job.dump_folder=" + (scratch_ / "plain").string()});
    const Losses straight = train(kSharded, plain);
    train(kSharded, mesh, 5);
    fs::remove_all(node(1));
    const Losses healed = train(kSharded, mesh);
    EXPECT_GE(healed.begin()->first, 4);
    expect_same(healed, straight, healed.begin()->first);
    for (const char* folder : {"outputs", "plain"}) fs::remove_all(scratch_ / folder);
  }
}

TEST_F(MemoryCopiesOnNodes, RanksThatDieLeaveTheirCopies) {
  const Losses straight = undisturbed(kOneNode);
  train(kOneNode, {}, 5);
  const Losses healed = train(kOneNode);
  expect_same(healed, straight, 5);
  EXPECT_FALSE(fs::exists(node(0) / "memory" / "test")) << "the run is done: its checkpoint has all";
}

TEST_F(MemoryCopiesOnNodes, NoStepIsLostWhenACopyWasTakenLast) {
  const Losses straight = undisturbed(kSharded);
  train(kSharded, {"--checkpoint.memory_interval=3"}, 8);
  fs::remove_all(node(1));
  expect_same(train(kSharded, {"--checkpoint.memory_interval=3"}), straight, 7);
}

TEST_F(MemoryCopiesOnNodes, ASlowPartnerDoesNotStopTheRun) {
  const Losses straight = undisturbed(kSharded);
  std::atomic<bool> released = false;
  Losses losses;
  const std::string log = log_of([&] {
    losses = train(
        kSharded, {}, 7,
        [&](std::int64_t step, int rank, Trainer&) {
          if (step == 5 && rank == 0) released = true;
        },
        &released);
  });
  for (const auto& [step, numbers] : losses) EXPECT_EQ(numbers, straight.at(step)) << step;
  EXPECT_EQ(losses.rbegin()->first, 7);
  EXPECT_THAT(log, testing::HasSubstr("the copy in memory of step 2 waits for the one before"));
  EXPECT_THAT(log, testing::Not(testing::HasSubstr("the copy in memory of step 3 waits"))) << "told once";
  // Copies went on when the messages arrived.
  fs::remove_all(node(0));
  const Losses healed = train(kSharded);
  EXPECT_GE(healed.begin()->first, 6);
  expect_same(healed, straight, healed.begin()->first);
}

TEST_F(MemoryCopiesOnNodes, ADamagedCopyIsNotLoaded) {
  const Losses straight = undisturbed(kSharded);
  train(kSharded, {}, 5);
  // The newest copy of rank 2 is damaged on both nodes that have it.
  for (int i = 0; i < 2; ++i) {
    const auto steps = steps_of(copies_of(i, 1));
    EXPECT_EQ(steps.size(), 8u) << "two of each of its ranks, and of those of the other node";
    for (const auto& [path, step] : steps) {
      if (step == 4 && path.filename().string().starts_with("rank-2.")) damage(path);
    }
  }
  Losses healed;
  const std::string log = log_of([&] { healed = train(kSharded); });
  expect_same(healed, straight, 4);
  EXPECT_THAT(log, testing::HasSubstr("the copy of rank 2 after step 4, is damaged"));
  EXPECT_THAT(log, testing::HasSubstr("the copies in memory of step 4 (attempt 1) are not whole: no node has those of "
                                      "1 of 4 ranks"));
  EXPECT_THAT(log, testing::HasSubstr("resumed from the copies in memory of step 3 (attempt 1)"));
}

TEST_F(MemoryCopiesOnNodes, ACutCopyAndALostNodeEndOnDisk) {
  const std::vector<std::string> saves = {"--checkpoint.interval=2"};
  const Losses straight = undisturbed(kSharded);
  train(kSharded, saves, 6);
  fs::remove_all(node(1));
  for (const auto& [path, step] : steps_of(copies_of(0, 1))) {
    if (path.filename().string().starts_with("rank-0.")) fs::resize_file(path, fs::file_size(path) - 4);
  }
  Losses healed;
  const std::string log = log_of([&] { healed = train(kSharded, saves); });
  expect_same(healed, straight, 5);
  EXPECT_THAT(log, testing::HasSubstr("is cut: it has"));
  EXPECT_THAT(log, testing::HasSubstr("step-4"));
}

TEST_F(MemoryCopiesOnNodes, ADamagedCheckpointFallsBackToTheCopies) {
  const std::vector<std::string> saves = {"--checkpoint.interval=4"};
  const Losses straight = undisturbed(kSharded);
  train(kSharded, saves, 5);  // copies of steps 3 and 4, a checkpoint of step 4
  const fs::path shard = scratch_ / "outputs" / "checkpoint" / "step-4" / "model-00001-of-00004.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  try {
    train(kSharded, saves);
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("The copies in memory of step 4 are whole: --checkpoint.fallback"));
  }
  Losses healed;
  const std::string log = log_of([&] {
    healed = train(kSharded, {"--checkpoint.interval=4", "--checkpoint.fallback"});
  });
  expect_same(healed, straight, 5);
  EXPECT_THAT(log, testing::HasSubstr("resumed from the copies in memory of step 4"));
}

TEST_F(MemoryCopiesOnNodes, ANewerCheckpointIsTaken) {
  const Losses straight = undisturbed(kSharded);
  const std::vector<std::string> seldom = {"--checkpoint.interval=4", "--checkpoint.memory_interval=3"};
  train(kSharded, seldom, 5);  // a copy of step 3, a checkpoint of step 4
  const std::string log = log_of([&] { expect_same(train(kSharded, seldom), straight, 5); });
  EXPECT_THAT(log, testing::HasSubstr("step-4"));
}

TEST_F(MemoryCopiesOnNodes, CopiesOfAnotherModelOrMeshAreNotLoaded) {
  train(kSharded, {}, 5);
  EXPECT_EQ(train(kSharded, {"--debug.seed=7"}, 5).begin()->first, 1);
  for (int i = 0; i < 2; ++i) fs::remove_all(node(i) / "memory" / "test" / "attempt-2");
  EXPECT_EQ(train({4, 2, 2}, {"--job.attempt=3"}, 3).begin()->first, 1);
}

/// A start with load_step gives the later steps up, even if it fails before its first copy.
TEST_F(MemoryCopiesOnNodes, CopiesAreForgottenAfterLoadStep) {
  const Losses straight = undisturbed(kOneNode);
  train(kOneNode, {"--checkpoint.interval=2"}, 6);  // a copy of step 5
  fs::remove_all(scratch_ / "outputs" / "checkpoint" / "step-4");
  train(kOneNode, {"--checkpoint.load_step=2"}, 3);
  expect_same(train(kOneNode), straight, 3);
}

TEST_F(MemoryCopiesOnNodes, AChangedCoefficientKeepsTheCopies) {
  train(kOneNode, {}, 5);
  const std::vector<std::string> changed = {"--model.args.load_balance_coeff=0.002",
                                            "--model.args.seq_balance_loss_coeff=0.001"};
  EXPECT_EQ(train(kOneNode, changed).begin()->first, 5);
}

TEST_F(MemoryCopiesOnNodes, AnAttemptWithFaultsOfItsOwn) {
  const Losses straight = undisturbed(kSharded);
  train(kSharded, {}, 4);
  fs::remove_all(node(0));
  train(kSharded, {}, 5);  // fails soon after its beginning, before its first copy is whole
  fs::remove_all(node(1));
  const Losses healed = train(kSharded);
  EXPECT_GE(healed.begin()->first, 3);
  expect_same(healed, straight, healed.begin()->first);
}

// The attempt was given up, and goes on when its node returns.
TEST_F(MemoryCopiesOnNodes, AnEarlierAttemptDoesNotWrite) {
  const auto later = node(1) / "memory" / "test" / "attempt-7";
  try {
    train(kSharded, {}, -1, [&](std::int64_t step, int, Trainer&) {
      if (step == 3) fs::create_directories(later);
    });
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("run test, attempt 1: attempt 7 has begun on this node"));
  }
  EXPECT_TRUE(fs::is_empty(later));
  for (const auto& [path, step] : steps_of(copies_of(1, 1))) EXPECT_LE(step, 2) << path;
  // An earlier attempt does not begin beside a later one either.
  EXPECT_THROW(train(kSharded, {"--job.attempt=2"}), Error);
  EXPECT_TRUE(fs::is_empty(later));
}

TEST_F(MemoryCopiesOnNodes, AStartThatFailsLeavesNothingInTheWay) {
  EXPECT_THROW(train(kOneNode, {"--checkpoint.initial_load_path=/nowhere"}), Error);
  EXPECT_FALSE(fs::exists(node(0) / "memory" / "test")) << "the memory is taken last";
  // A start that was killed has left its folder, but no run.json.
  fs::create_directories(node(0) / "memory" / "test" / "attempt-2");
  EXPECT_THROW(train(kOneNode, {"--job.attempt=2"}), Error);
  EXPECT_EQ(train(kOneNode).size(), 8u);
}

TEST_F(MemoryCopiesOnNodes, ReplicasThatDifferEndTheRun) {
  const Losses straight = undisturbed(kReplicas);
  for (const char* interval : {"--checkpoint.verify_interval=2", "--checkpoint.verify_interval=0"}) {
    SCOPED_TRACE(interval);
    for (const char* folder : {"outputs", "node0", "node1"}) fs::remove_all(scratch_ / folder);
    const auto flip = [](std::int64_t step, int rank, Trainer& trainer) {
      if (step != 4 || rank != 3) return;
      const Parameters& parameters = trainer.model().parameters();
      for (ParamId id = 0; id < parameters.size(); ++id) {
        if (parameters.spec(id).name != "layers.1.attention.wo.weight") continue;
        auto* bytes = static_cast<std::byte*>(parameters.optimizer_shard(1, id).raw());
        bytes[5] ^= std::byte{4};
      }
    };
    try {
      train(kReplicas, {interval}, -1, flip);
      ADD_FAILURE() << "expected a mismatch";
    } catch (const StateMismatch& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("step 4: layers.1.attention.wo.weight.exp_avg_sq differs between "
                                                   "ranks that hold the same weights (rank 1: "));
      EXPECT_THAT(error.what(), testing::HasSubstr(", rank 3: "));
    }
    // The copy of step 3 was compared before the flip.
    Losses healed;
    const std::string log = log_of([&] { healed = train(kReplicas, {interval}); });
    expect_same(healed, straight, 4);
    EXPECT_THAT(log, testing::HasSubstr("THE REPLAY OF STEP 4 SAYS WHICH STATE WAS WRONG"));
    std::ifstream file(scratch_ / "outputs" / kMismatchesName);
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0]["step"], 4);
    EXPECT_EQ(lines[0]["attempt"], 1);
    EXPECT_EQ(lines[1]["wrong_ranks"], nlohmann::json({3}));
  }
}

/// Another learning rate gives other states on all ranks. This is no replay, and says nothing about the mismatch.
TEST_F(MemoryCopiesOnNodes, OnlyAReplaySaysWhichReplicaWasWrong) {
  EXPECT_THROW(train(kReplicas, {}, -1,
                     [](std::int64_t step, int rank, Trainer& trainer) {
                       if (step == 4 && rank == 0) trainer.model().parameters().all_masters().data<float>()[0] += 1.0f;
                     }),
               StateMismatch);
  const std::string log = log_of([&] { train(kReplicas, {"--optimizer.lr=1e-5"}, 6); });
  EXPECT_THAT(log, testing::HasSubstr("differed at step 4"));
  EXPECT_THAT(log, testing::Not(testing::HasSubstr("SAYS WHICH STATE WAS WRONG")));
  for (int i = 0; i < 2; ++i) fs::remove_all(node(i));  // begins at step 1 again
  EXPECT_THAT(log_of([&] { train(kReplicas); }), testing::HasSubstr("THE REPLAY OF STEP 4 SAYS"));
}

// No checkpoint is saved of a state that differs between replicas, even without copies in memory.
TEST_F(MemoryCopiesOnNodes, ReplicasAreComparedBeforeASave) {
  const std::vector<std::string> overrides = {"--checkpoint.memory_interval=0", "--checkpoint.interval=2",
                                              "--checkpoint.verify_interval=100"};
  EXPECT_THROW(train(kReplicas, overrides, -1,
                     [](std::int64_t step, int rank, Trainer& trainer) {
                       if (step == 4 && rank == 0) trainer.model().parameters().all_masters().data<float>()[0] += 1.0f;
                     }),
               StateMismatch);
  EXPECT_EQ(checkpoint_steps(scratch_ / "outputs" / "checkpoint"), std::vector<std::int64_t>{2});
}

TEST_F(MemoryCopiesOnNodes, BiasesOfAStageAreComparedWithoutReplicas) {
  const std::string log = log_of([&] {
    EXPECT_THROW(train(kSharded, {"--checkpoint.verify_interval=1"}, -1,
                       [](std::int64_t step, int rank, Trainer& trainer) {
                         if (step == 2 && rank == 1) trainer.model().parameters().all_buffers().data<float>()[0] += 1.f;
                       }),
                 StateMismatch);
  });
  EXPECT_THAT(log, testing::HasSubstr("so flipped bits are not seen, but in the experts' biases"));
}

TEST_F(MemoryCopiesOnNodes, ChecksumsOfTheStateAreLogged) {
  const auto checksums = [&] {
    train(kReplicas, {"--checkpoint.verify_interval=4", "--job.overwrite"});
    std::map<std::int64_t, std::string> logged;
    std::ifstream file(scratch_ / "outputs" / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("state_checksum")) logged[json["step"]] = json["state_checksum"];
    }
    fs::remove_all(scratch_ / "outputs");
    return logged;
  };
  const auto once = checksums();
  EXPECT_EQ(once.size(), 2u);
  EXPECT_NE(once.at(4), once.at(8));
  EXPECT_EQ(checksums(), once);
}

TEST_F(MemoryCopiesOnNodes, WithoutRoomOrNameIsAnErrorBeforeTheFirstStep) {
  const auto error_of = [&](const std::vector<std::string>& overrides) -> std::string {
    try {
      Trainer trainer(config(overrides));
      return "none";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_THAT(error_of({"--job.run_id="}), testing::HasSubstr("job.run_id is empty"));
  EXPECT_THAT(error_of({"--job.node_folder="}), testing::HasSubstr("job.node_folder does not say"));
  fs::create_directories(scratch_ / "node/memory/test");
  fs::create_symlink("attempt-1", scratch_ / "node/memory/test/attempt-1");  // a link to itself
  EXPECT_THAT(error_of({"--job.attempt=1"}), testing::HasSubstr("cannot look for '"));
  EXPECT_THAT(error_of({"--checkpoint.enable=false"}), testing::HasSubstr("checkpoint.enable is false"));
  if (fs::space("/proc").available == 0) {
    // This file system has no room.
    EXPECT_THAT(error_of({"--job.node_folder=/proc"}), testing::HasSubstr("in '/proc' (job.node_folder)"));
  }
}

TEST(MemoryCopy, HeadersComeBack) {
  std::vector<std::byte> file(kMemoryCopyHeaderBytes + 4000, std::byte{3});
  std::fill_n(file.begin(), kMemoryCopyHeaderBytes, std::byte{0});
  EXPECT_FALSE(read_memory_copy(file, "x").has_value());
  const std::span<const std::byte> payload = std::span<const std::byte>(file).subspan(kMemoryCopyHeaderBytes);
  MemoryCopyHeader header{.run = "run",
                          .attempt = 2,
                          .step = 17,
                          .rank = 3,
                          .shard = 1,
                          .identity = "abc",
                          .loader = {.position = 99, .dataset_checksum = ~0ULL, .seed = 5, .seq_len = 16},
                          .config = "a = 1\n",
                          .payload_bytes = payload.size(),
                          .checksum = checksum_of_pieces(payload)};
  write_memory_copy_header(header, file.data());
  const auto read = read_memory_copy(file, "x");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->run, "run");
  EXPECT_EQ(read->attempt, 2);
  EXPECT_EQ(read->step, 17);
  EXPECT_EQ(read->shard, 1);
  EXPECT_EQ(read->loader, header.loader);
  EXPECT_EQ(read->config, header.config);
  // Damage of any byte is found.
  for (const std::size_t at : {std::size_t{3}, std::size_t{20}, std::size_t{40}, kMemoryCopyHeaderBytes + 3999}) {
    std::vector<std::byte> damaged = file;
    damaged[at] ^= std::byte{1};
    EXPECT_THROW(read_memory_copy(damaged, "x"), Error) << at;
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{100}, kMemoryCopyHeaderBytes, file.size() - 4}) {
    EXPECT_THROW(read_memory_copy(std::span<const std::byte>(file).first(size), "x"), Error) << size;
  }
  // A configuration that is too long for the header is left out.
  header.config.assign(kMemoryCopyHeaderBytes, 'x');
  write_memory_copy_header(header, file.data());
  EXPECT_EQ(read_memory_copy(file, "x")->config, "");
}

}  // namespace
}  // namespace tessera
