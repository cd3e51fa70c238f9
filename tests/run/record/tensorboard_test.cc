#include "run/record/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/support.h"
#include "tests/full_disk.h"
#include "tests/unprivileged.h"

namespace tessera {
namespace {

using data::TemporaryFolder;

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);              // the usual check value
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);    // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);  // RFC 3720, B.4
}

/// tests/reference/tensorboard_events.py has written the same events with TensorBoard's own writer.
TEST(TensorBoard, WritesTheBytesThatTensorBoardWrites) {
  const TemporaryFolder scratch;
  double now = 1700000000.25;
  TensorBoardWriter writer(scratch / "tb", 3, [&] { return now; });
  now += 1.5;
  writer.write(3, {{"loss_metrics/global_avg_loss", 7.25}, {"lr", 2.2e-4}});
  now += 1.5;
  writer.write(1000000, {{"expert_load_max_over_mean/layers.1.moe", 1.0625}});
  EXPECT_THAT(writer.path().filename().string(), ::testing::StartsWith("events.out.tfevents.1700000000."));
  EXPECT_EQ(read_text_file(writer.path()),
            read_text_file(std::string(TESSERA_TEST_DATA) + "/golden/tensorboard.tfevents"));
}

TEST(TensorBoard, AFolderThatCannotBe) {
  const TemporaryFolder scratch;
  data::write_file(scratch / "file", "x");
  expect_error([&] { TensorBoardWriter(scratch / "file", 1); }, {"file"});
  std::filesystem::permissions(scratch.path(), std::filesystem::perms{0333});  // it can be entered, but not listed
  expect_error(
      [&] {
        const Unprivileged nobody;
        TensorBoardWriter(scratch.path(), 1);
      },
      {"cannot read the folder", scratch.path().string()});
  std::filesystem::permissions(scratch.path(), std::filesystem::perms::all);
}

TEST(TensorBoard, AFullDiskIsAFailureOfStorage) {
  const TemporaryFolder scratch;
  TensorBoardWriter writer(scratch / "tb", 1);
  const FullDisk full(std::filesystem::file_size(writer.path()));
  try {
    writer.write(1, {{"lr", 2.2e-4}});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), ExitStatus::kStorageFailed) << error.what();
  }
}

// TensorBoard reads files in the order of their names, so a later file needs a later name, whatever the clock says.
TEST(TensorBoard, AResumedRunWritesALaterFile) {
  const TemporaryFolder scratch;
  std::vector<std::string> names;
  for (const double now : {1700000005.0, 1700000005.0, 1600000000.0, 1700000009.0}) {
    const TensorBoardWriter writer(scratch.path(), 1, [&] { return now; });
    names.push_back(writer.path().filename().string().substr(0, std::string("events.out.tfevents.1700000005").size()));
  }
  EXPECT_THAT(names, ::testing::ElementsAre("events.out.tfevents.1700000005", "events.out.tfevents.1700000006",
                                            "events.out.tfevents.1700000007", "events.out.tfevents.1700000009"));
}

}  // namespace
}  // namespace tessera
