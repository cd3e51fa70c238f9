#include "system/output_folder.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using data::TemporaryFolder;
using data::write_file;

constexpr OutputKind kKind = {.name = "a thing", .marker = "marker", .is_part = [](const fs::path& name) {
                                return name == "marker" || name == "part";
                              }};

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(OutputFolder, HasOneWriterAtATime) {
  const TemporaryFolder scratch;
  {
    OutputFolder folder(scratch / "sub/out", kKind);
    write_file(folder.path() / "part", "of the first");
    expect_error([&] { OutputFolder(scratch / "sub/out/", kKind); },
                 {"out", "in use", fmt::format("process {} on ", getpid()), "out.tmp.lock"});
    EXPECT_EQ(read_text_file(folder.path() / "part"), "of the first");
    write_file(folder.path() / "marker", "");
    folder.commit(false);
    // The folder stays in use until the object ends, so that nobody replaces what it has made.
    expect_error([&] { OutputFolder(scratch / "sub/out", kKind); }, {"in use"});
  }
  EXPECT_EQ(names_in(scratch / "sub"), std::vector<std::string>{"out"});
  EXPECT_EQ(names_in(scratch / "sub/out"), (std::vector<std::string>{"marker", "part"}));
}

TEST(OutputFolder, AWriterThatFailedLeavesNothing) {
  const TemporaryFolder scratch;
  {
    const OutputFolder folder(scratch / "out", kKind);
    write_file(folder.path() / "part", "");
  }
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

TEST(OutputFolder, WhatAKilledWriterLeftIsRemoved) {
  const TemporaryFolder scratch;
  const pid_t child = fork();
  if (child == 0) {
    const OutputFolder folder(scratch / "out", kKind);
    std::ofstream(folder.path() / "part") << "half";
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(names_in(scratch.path()), (std::vector<std::string>{"out.tmp", "out.tmp.lock"}));
  {
    const OutputFolder folder(scratch / "out", kKind);
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{});
  }
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

}  // namespace
}  // namespace tessera
