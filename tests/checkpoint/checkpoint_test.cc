#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "tests/data/support.h"
#include "tests/full_disk.h"
#include "tests/unprivileged.h"

namespace {
bool disk_is_broken = false;
}
/// Replaces the C library's.
extern "C" ssize_t pread(int descriptor, void* bytes, size_t size, off_t offset) {
  if (!disk_is_broken) return static_cast<ssize_t>(syscall(SYS_pread64, descriptor, bytes, size, offset));
  errno = EIO;
  return -1;
}

namespace tessera {
namespace {

using data::TemporaryFolder;

class CheckpointTest : public ::testing::Test {
 protected:
  void save(std::int64_t step, nlohmann::json state = nlohmann::json::object()) {
    const auto write = [&](const std::filesystem::path& path) {
      const TensorPiece tensor{"w", Piece::whole(shape()),
                               Tensor(numbers_.data(), shape(), DType::kFloat32, Device::kCpu)};
      return write_shard(path, {.step = step}, std::span(&tensor, 1));
    };
    save_checkpoint(scratch_.path(), {{.name = "model.safetensors", .write = write}},
                    {.step = step, .state = std::move(state)});
  }
  /// Returns the first number of the checkpoint's tensor.
  float load(std::int64_t step) {
    return ShardFiles(checkpoint_path(scratch_.path(), step), kModelShards, step, 1).at("w", shape()).from(0).front();
  }
  Shape shape() const { return {static_cast<std::int64_t>(numbers_.size())}; }

  std::vector<float> numbers_ = std::vector<float>(1 << 16, 1.0f);
  TemporaryFolder scratch_;
};

TEST_F(CheckpointTest, RoundTrip) {
  save(3, {{"answer", 42}});
  const CheckpointManifest manifest = verify_checkpoint(scratch_ / "step-3");
  EXPECT_EQ(manifest.step, 3);
  EXPECT_EQ(manifest.num_shards, 1);
  EXPECT_EQ(manifest.files.size(), 1u);
  EXPECT_EQ(manifest.state["answer"], 42);
  EXPECT_EQ(load(3), 1.0f);
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save(3);
  numbers_[0] = 7.0f;
  save(3);
  verify_checkpoint(scratch_ / "step-3");
  EXPECT_EQ(load(3), 7.0f);
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(3));
}

TEST_F(CheckpointTest, PruningKeepsTheNewestAndClearsLeftovers) {
  for (const std::int64_t step : {1, 2, 10}) save(step);
  std::filesystem::create_directories(scratch_ / "step-11.partial");
  std::filesystem::create_directories(scratch_ / "step-12");  // without a manifest it is not a checkpoint
  prune_checkpoints(scratch_.path(), {}, {.newest = 2});
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(2, 10));
  EXPECT_THAT(steps_of_folders(scratch_.path()), ::testing::Contains(12));
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "step-11.partial"));
}

/// A process of attempt 1 may wake up while attempt 2 saves. It deletes no folder of attempt 2.
TEST_F(CheckpointTest, PruningSparesTheSavesOfLaterAttempts) {
  const Saver first{.run = "a", .attempt = 1}, second{.run = "a", .attempt = 2}, third{.run = "a", .attempt = 3};
  const auto partial = [&](const Saver& saver) { return partial_path(scratch_.path(), 7, saver); };
  const auto make_all = [&] {
    const std::vector<Saver> savers = {
        {}, first, second, third, {.run = "b", .attempt = 9}, {.run = "a-b", .attempt = 9}};
    for (const Saver& saver : savers) std::filesystem::create_directories(partial(saver));
  };
  const auto folders_after = [&](const Saver& saver) {
    make_all();
    prune_checkpoints(scratch_.path(), saver);
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(scratch_.path())) paths.push_back(entry.path());
    return paths;
  };
  EXPECT_EQ(partial(second).filename(), "step-7.partial-a-2");
  EXPECT_THAT(folders_after(first), ::testing::UnorderedElementsAre(partial(second), partial(third)));
  EXPECT_THAT(folders_after(second), ::testing::ElementsAre(partial(third)));
  EXPECT_THAT(folders_after({.run = "c", .attempt = 1}), ::testing::IsEmpty());
  make_all();
  EXPECT_THAT(steps_of_folders(scratch_.path()), ::testing::IsEmpty());
}

TEST_F(CheckpointTest, PruningSparesWhatWasSavedLast) {
  for (const std::int64_t step : {4, 8, 5}) save(step);  // step 5 is from a run that went back to step 4
  prune_checkpoints(scratch_.path(), {}, {.newest = 1, .last_saved = 5});
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(5, 8));
}

TEST_F(CheckpointTest, PruningDoesNotCountWhatWasPassedOver) {
  for (const std::int64_t step : {2, 4, 6, 8}) save(step);
  prune_checkpoints(scratch_.path(), {}, {.newest = 1, .not_counted = {6, 8}});
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(4, 6, 8));
}

TEST_F(CheckpointTest, TheNewestOneIsFoundUnlessItIsDamaged) {
  expect_error([&] { find_checkpoint(scratch_.path()); }, {"is no checkpoint", "step-N", "config.json"});
  for (const std::int64_t step : {2, 10}) save(step);
  EXPECT_EQ(find_checkpoint(scratch_.path()), scratch_ / "step-10");
  EXPECT_EQ(find_checkpoint(scratch_ / "step-2"), scratch_ / "step-2");
  std::filesystem::remove(scratch_ / "step-10" / "manifest.json");
  expect_error([&] { find_checkpoint(scratch_.path()); }, {"step-10' has no manifest.json", "step-2'"});
  EXPECT_EQ(find_checkpoint(scratch_ / "step-2"), scratch_ / "step-2");
  std::filesystem::remove(scratch_ / "step-2" / "manifest.json");
  expect_error([&] { find_checkpoint(scratch_.path()); }, {"step-10'", "no other checkpoint"});
}

// A run's checkpoint.folder may have any name.
TEST_F(CheckpointTest, TheFolderOfARunIsEnough) {
  save(3);
  const std::filesystem::path run = scratch_ / "run";
  const auto move_to = [&](const std::filesystem::path& folder) {
    std::filesystem::create_directories(folder);
    std::filesystem::rename(scratch_ / "step-3", folder / "step-3");
  };
  std::filesystem::create_directories(run / "logs");
  expect_error([&] { find_checkpoint(run); }, {"run' is no checkpoint"});
  move_to(run / "states");
  EXPECT_EQ(find_checkpoint(run), run / "states" / "step-3");
  save(3);
  move_to(run / "backup");
  expect_error([&] { find_checkpoint(run); }, {"run/backup' and '", "run/states' hold checkpoints"});
  save(3);
  move_to(run / "checkpoint");
  EXPECT_EQ(find_checkpoint(run), run / "checkpoint" / "step-3");
}

/// Many disks have a lost+found that only root may read.
TEST_F(CheckpointTest, FoldersBesideItThatCannotBeReadAreNamedOnlyIfNothingIsFound) {
  save(3);
  const std::filesystem::path run = scratch_ / "run";
  std::filesystem::create_directories(run / "states");
  std::filesystem::create_directories(run / "lost+found");
  std::filesystem::permissions(run / "lost+found", std::filesystem::perms::none);
  {
    const Unprivileged nobody;
    expect_error([&] { find_checkpoint(run); }, {"is no checkpoint", "run/lost+found", "Permission denied"});
  }
  std::filesystem::rename(scratch_ / "step-3", run / "states/step-3");
  {
    const Unprivileged nobody;
    EXPECT_EQ(find_checkpoint(run), run / "states/step-3");
  }
  std::filesystem::permissions(run / "lost+found", std::filesystem::perms::all);
}

/// Folders that people have made beside the checkpoints are neither counted nor deleted.
TEST_F(CheckpointTest, OtherFoldersAreLeftAlone) {
  const std::vector<std::string> others = {
      "step-0020",         "step-+7",          "step--7",        "step-old.partial-notes",  "step-3.partial-notes",
      "step-3.partial.7",  "step-03.partial",  "step-.partial",  "step-3.partial-run-new",  "step-old.deleted",
      "step-007.replaced", "step-x-3.partial", "step-.replaced", "step-3.partial-run--1.0", "step-3.0.deleted"};
  for (const std::string& name : others) {
    std::filesystem::create_directories(scratch_ / name);
    data::write_file(scratch_ / name / "manifest.json", "{}");
  }
  for (const char* name : {"step-99", "step-98.deleted", "step-97.partial"}) data::write_file(scratch_ / name, "text");
  for (const std::int64_t step : {5, 10, 15, 20}) save(step);
  prune_checkpoints(scratch_.path(), {.run = "run", .attempt = 1}, {.newest = 3});
  EXPECT_THAT(steps_of_folders(scratch_.path()), ::testing::ElementsAre(10, 15, 20));
  for (const std::string& name : others) EXPECT_TRUE(std::filesystem::exists(scratch_ / name)) << name;
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "step-98.deleted"));
}

/// "There is no checkpoint" must not be the answer if the folder cannot be read: a run would begin at step 1.
TEST_F(CheckpointTest, AFolderThatCannotBeReadIsAnError) {
  save(3);
  EXPECT_THAT(steps_of_folders(scratch_ / "missing"), ::testing::IsEmpty());
  EXPECT_THAT(steps_of_folders(scratch_ / "step-3" / "manifest.json" / "below"), ::testing::IsEmpty());
  std::filesystem::permissions(scratch_.path(), std::filesystem::perms{0333});  // it can be entered, but not listed
  {
    const Unprivileged nobody;
    const std::vector<std::string> parts = {"cannot read the folder", scratch_.path().string(), "Permission denied"};
    expect_error([&] { steps_of_folders(scratch_.path()); }, parts);
    expect_error([&] { checkpoint_steps(scratch_.path()); }, parts);
    expect_error([&] { prune_checkpoints(scratch_.path(), {}); }, parts);
    expect_error([&] { find_checkpoint(scratch_.path()); }, parts);
  }
  std::filesystem::permissions(scratch_.path(), std::filesystem::perms::all);
}

/// An unreadable checkpoint may be whole, so nothing says that it is damaged.
TEST_F(CheckpointTest, ACheckpointThatCannotBeReadIsNotCalledDamaged) {
  for (const std::int64_t step : {1, 2, 3}) save(step);
  std::filesystem::permissions(scratch_ / "step-3", std::filesystem::perms::none);
  {
    const Unprivileged nobody;
    const std::string message =
        expect_error([&] { find_checkpoint(scratch_.path()); }, {"step-3/manifest.json", "Permission denied"});
    EXPECT_EQ(message.find("damaged"), std::string::npos) << message;
    expect_error([&] { read_checkpoint_manifest(scratch_ / "step-3"); }, {"manifest.json", "Permission denied"});
    expect_error([&] { checkpoint_steps(scratch_.path()); }, {"step-3/manifest.json", "Permission denied"});
  }
  std::filesystem::permissions(scratch_ / "step-3", std::filesystem::perms::all);
}

/// A read error is no damage: the file may be whole on a disk that works again.
TEST_F(CheckpointTest, AFileWhoseDiskFailsIsNotCalledDamaged) {
  save(3);
  disk_is_broken = true;
  EXPECT_THROW(verify_checkpoint(scratch_ / "step-3"), SystemError);
  disk_is_broken = false;
  EXPECT_NO_THROW(verify_checkpoint(scratch_ / "step-3"));
}

/// Covers file systems on which replace_folder() cannot exchange two folders in one step. The test cuts the replacement
/// short at each of its renames.
TEST_F(CheckpointTest, PruningEndsAReplacementThatWasCutShort) {
  save(3);
  std::filesystem::rename(scratch_ / "step-3", scratch_ / "step-3.replaced");
  prune_checkpoints(scratch_.path(), {});
  EXPECT_EQ(load(3), 1.0f);
  std::filesystem::create_directories(scratch_ / "step-3.replaced");
  std::filesystem::create_directories(scratch_ / "step-2.deleted");
  prune_checkpoints(scratch_.path(), {});
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "step-3.replaced"));
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "step-2.deleted"));
  EXPECT_EQ(load(3), 1.0f);
}

// write() fails half-way, as it does on a full disk.
TEST_F(CheckpointTest, ASaveThatFailsLeavesThePreviousCheckpoint) {
  save(1);
  {
    const FullDisk full(100'000);  // the tensor takes 262,144 bytes
    expect_error([&] { save(2); }, {"cannot write"});
  }
  EXPECT_THAT(checkpoint_steps(scratch_.path()), ::testing::ElementsAre(1));
  EXPECT_NO_THROW(verify_checkpoint(scratch_ / "step-1"));
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(scratch_.path())) ++entries;
  EXPECT_EQ(entries, 1u);
}

TEST_F(CheckpointTest, ADigitOfTheManifestThatChangedIsNoticed) {
  save(1);
  const auto path = scratch_ / "step-1/manifest.json";
  const std::string text = read_text_file(path);
  int num_digits = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] < '0' || text[i] > '9') continue;
    std::string changed = text;
    changed[i] = text[i] == '1' ? '2' : '1';
    data::write_file(path, changed);
    expect_error([&] { read_checkpoint_manifest(scratch_ / "step-1"); }, {path.string()});
    ++num_digits;
  }
  EXPECT_GT(num_digits, 20);
}

// Manifests that no save writes. Each of them once crashed the reader, or made it open a file outside of the
// checkpoint.
TEST_F(CheckpointTest, ManifestsThatLie) {
  save(1);
  const auto path = scratch_ / "step-1/manifest.json";
  const std::string deep = std::string(300'000, '[') + std::string(300'000, ']');
  const auto refused = [&](const std::string& version, const std::string& listed, const std::string& state,
                           const std::string& part, int num_shards = 1) {
    std::string text = fmt::format(
        R"({{"format": "tessera-checkpoint", "version": {}, "step": 1, "num_shards": {}, "files": {}, "state": {}}})",
        version, num_shards, listed, state);
    if (text.size() < deep.size()) {
      auto json = nlohmann::ordered_json::parse(text);
      json[kChecksumField] = checksum_of_rest(json);
      text = json.dump();
    }
    data::write_file(path, text);
    expect_error([&] { verify_checkpoint(scratch_ / "step-1"); }, {path.string(), part});
  };
  const auto files = [](const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) {
      text += fmt::format(R"({}"{}": {{"bytes": 0, "xxh3_64": "0000000000000000"}})", text.empty() ? "" : ", ", name);
    }
    return "{" + text + "}";
  };
  refused("1", "{}", "1", "version 1, expected");
  refused(deep, "{}", "1", "nested deeper");
  refused("3", "{}", deep, "nested deeper");
  refused("3", "5", "1", "expected an object");
  refused("3", R"({"model.safetensors": 5})", "1", "expected an object");
  refused("3", R"({"model.safetensors": {"bytes": 1e300, "xxh3_64": "0000000000000000"}})", "1", "a whole number");
  refused("3", R"({"model.safetensors": {"bytes": -1, "xxh3_64": "0000000000000000"}})", "1", "a whole number");
  for (const char* sum : {"", "0x1", "-1", "123", "11112222333344445"}) {
    refused("3", fmt::format(R"({{"model.safetensors": {{"bytes": 1, "xxh3_64": "{}"}}}})", sum), "1", "hexadecimal");
  }
  for (const char* name : {"", ".", "..", "../step-1/model.safetensors", "/dev/null", "model.safetensors\\u0000x"}) {
    refused("3", files({name}), "1", "expected the name of a file");
  }
  // The number of shards differs from the number of files.
  refused("3", files({"model.safetensors"}), "1", "too large", 2);
  refused("3", files({"model.safetensors"}), "1", "'model-00000-of-00000.safetensors'", 0);
  refused("3", files({"model-00000-of-00002.safetensors", "tokenizer.model"}), "1", "'model-00001-of-00002", 2);
  refused("3", files({"model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors", "model.safetensors"}),
          "1", "3 shards of the model", 2);
  refused("3", files({"model.safetensors", "optimizer-00000-of-00002.safetensors"}), "1", "'optimizer.safetensors'");
  refused("3", files({"tokenizer.model"}), "1", "'model.safetensors'");
}

}  // namespace
}  // namespace tessera
