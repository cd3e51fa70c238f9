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
    OutputFolder folder(scratch / "sub/out", kKind, false);
    write_file(folder.path() / "part", "of the first");
    expect_error([&] { OutputFolder(scratch / "sub/out/", kKind, false); },
                 {"out", "in use", fmt::format("process {} on ", getpid()), "out.tmp.lock"});
    EXPECT_EQ(read_text_file(folder.path() / "part"), "of the first");
    write_file(folder.path() / "marker", "");
    folder.commit();
    // The folder stays in use until the object ends, so that nobody replaces what it has made.
    expect_error([&] { OutputFolder(scratch / "sub/out", kKind, false); }, {"in use"});
  }
  EXPECT_EQ(names_in(scratch / "sub"), std::vector<std::string>{"out"});
  EXPECT_EQ(names_in(scratch / "sub/out"), (std::vector<std::string>{"marker", "part"}));
}

TEST(OutputFolder, AWriterThatFailedLeavesNothing) {
  const TemporaryFolder scratch;
  {
    const OutputFolder folder(scratch / "out", kKind, false);
    write_file(folder.path() / "part", "");
  }
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

TEST(OutputFolder, WhatAKilledWriterLeftIsRemoved) {
  const TemporaryFolder scratch;
  const pid_t child = fork();
  if (child == 0) {
    const OutputFolder folder(scratch / "out", kKind, false);
    std::ofstream(folder.path() / "part") << "half";
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(names_in(scratch.path()), (std::vector<std::string>{"out.tmp", "out.tmp.lock"}));
  {
    const OutputFolder folder(scratch / "out", kKind, false);
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{});
  }
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

/// What was made in hours is kept, even if something has come into its place meanwhile.
TEST(OutputFolder, ACompleteFolderIsKeptIfItsPlaceIsTaken) {
  const TemporaryFolder scratch;
  {
    OutputFolder folder(scratch / "out", kKind, true);
    write_file(folder.path() / "marker", "");
    write_file(scratch / "out/precious", "");
    expect_error([&] { folder.commit(); }, {"'precious'", "not replaced", "complete, in '", "out.tmp"});
  }
  EXPECT_EQ(names_in(scratch / "out.tmp"), std::vector<std::string>{"marker"});
  expect_error([&] { OutputFolder(scratch / "out", kKind, true); }, {"'precious'"});
  EXPECT_EQ(names_in(scratch / "out.tmp"), std::vector<std::string>{"marker"});
}

/// A program was killed while it replaced a folder, on a file system that cannot exchange two names.
TEST(OutputFolder, AReplacementThatWasCutShortEnds) {
  const TemporaryFolder scratch;
  const auto fill = [&](const std::string& name) { write_file(scratch / name / "marker", name); };
  fill("out.replaced");
  expect_error([&] { OutputFolder(scratch / "out", kKind, false); }, {"there is a thing already"});
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"out"});
  EXPECT_EQ(read_text_file(scratch / "out/marker"), "out.replaced");
  fill("out");
  fill("out.replaced");
  { const OutputFolder folder(scratch / "out", kKind, true); }
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"out"});
  EXPECT_EQ(read_text_file(scratch / "out/marker"), "out");
  write_file(scratch / "out.replaced/precious", "");
  { const OutputFolder folder(scratch / "out", kKind, true); }
  EXPECT_EQ(names_in(scratch / "out.replaced"), std::vector<std::string>{"precious"});
}

}  // namespace
}  // namespace tessera
