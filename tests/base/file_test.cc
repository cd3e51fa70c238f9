#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "system/file_lock.h"
#include "tests/data/support.h"
#include "tests/log_of.h"
#include "tests/unprivileged.h"

namespace {
/// Files and folders that were flushed, in order. The functions below replace those of the C library.
std::vector<std::filesystem::path> flushed;
bool exchanges = true;
/// The error codes with which fstat, pread and rename fail once. They succeed if it is 0.
int fstat_fails = 0, pread_fails = 0, rename_fails = 0;

/// Returns whether a call fails, and sets errno then.
bool fails_once(int& reason) {
  if (reason == 0) return false;
  errno = std::exchange(reason, 0);
  return true;
}
}  // namespace
extern "C" int fstat(int descriptor, struct stat* status) noexcept {
  return fails_once(fstat_fails) ? -1 : fstatat(descriptor, "", status, AT_EMPTY_PATH);
}
extern "C" ssize_t pread(int descriptor, void* bytes, size_t size, off_t offset) {
  return fails_once(pread_fails) ? -1 : static_cast<ssize_t>(syscall(SYS_pread64, descriptor, bytes, size, offset));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  return fails_once(rename_fails) ? -1 : renameat(AT_FDCWD, from, AT_FDCWD, to);
}
extern "C" int fsync(int descriptor) {
  flushed.push_back(std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", descriptor)));
  return 0;
}
extern "C" int renameat2(int, const char* from, int, const char* to, unsigned int flags) noexcept {
  if (exchanges) return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
  errno = EINVAL;
  return -1;
}

namespace tessera {
namespace {

using data::TemporaryFolder;

TEST(AtomicFile, IsFlushedBeforeItHasItsNameAndItsFolderAfter) {
  const TemporaryFolder scratch;
  AtomicFile file(scratch / "file");
  file.write("new");
  flushed.clear();
  file.commit();
  ASSERT_EQ(flushed.size(), 2u);
  EXPECT_EQ(name_without_temporary(flushed[0]), "file");
  EXPECT_EQ(flushed[1], scratch.path());
}

TEST(AtomicFile, WritersOfOnePathDoNotShareATemporaryFile) {
  const TemporaryFolder scratch;
  const auto path = scratch / "file", others = data::write_file(scratch / "file.tmp", "mine");
  AtomicFile first(path), second(path);
  first.write("first, which is longer");
  second.write("second");
  first.commit();
  EXPECT_EQ(read_text_file(path), "first, which is longer");
  second.commit();
  EXPECT_EQ(read_text_file(path), "second");
  EXPECT_EQ(read_text_file(others), "mine");
}

TEST(AtomicFile, TemporaryFilesAreKnownByTheirNames) {
  EXPECT_EQ(name_without_temporary("a.tokens.123-4.tmp"), "a.tokens");
  for (const char* name : {"a.tokens", "a.tmp", "a.123.tmp", "a.123-.tmp", "a.1-x.tmp", "a.123-4", "123-4.tmp"}) {
    EXPECT_EQ(name_without_temporary(name), name);
  }
}

/// Replaces the folder on file systems that can exchange two names, and on those that cannot.
TEST(ReplaceFolder, PutsTheWholeInThePlaceOfTheOld) {
  for (const bool can : {true, false}) {
    exchanges = can;
    const TemporaryFolder scratch;
    data::write_file(scratch / "new/file", "new");
    data::write_file(scratch / "old/file", "old");
    flushed.clear();
    replace_folder(scratch / "new", scratch / "old");
    EXPECT_EQ(read_text_file(scratch / "old/file"), "new");
    EXPECT_FALSE(std::filesystem::exists(scratch / "new"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.path()), {}), 1);
    EXPECT_EQ(flushed, std::vector<std::filesystem::path>{scratch.path()});
  }
  exchanges = true;
}

TEST(AtomicFile, AppearsWithCommitOnly) {
  const TemporaryFolder scratch;
  const auto path = scratch / "file";
  data::write_file(path, "old");
  {
    AtomicFile file(path);
    file.write("new");
    EXPECT_EQ(read_text_file(path), "old");
  }
  EXPECT_EQ(read_text_file(path), "old");
  EXPECT_EQ(entries_of(scratch.path()).size(), 1u);
  AtomicFile file(path);
  file.write("header ");
  file.write("body");
  file.write_at(0, std::as_bytes(std::span("HEADER", 6)));
  EXPECT_EQ(file.size(), 11u);
  file.commit();
  EXPECT_EQ(read_text_file(path), "HEADER body");
  EXPECT_EQ(entries_of(scratch.path()).size(), 1u);
}

TEST(AtomicFile, WritesWithinTheFileOnly) {
  const TemporaryFolder scratch;
  AtomicFile file(scratch / "file");
  file.write("four");
  EXPECT_THROW(file.write_at(1, std::as_bytes(std::span("four", 4))), InternalError);
  EXPECT_FALSE(std::filesystem::exists(scratch / "file"));
  file.commit();
  EXPECT_EQ(read_text_file(scratch / "file"), "four");
}

/// The new folder is in its place, so the caller must not hear of an error.
TEST(ReplaceFolder, SucceedsEvenIfTheOldFolderStays) {
  for (const bool can_exchange : {true, false}) {
    exchanges = can_exchange;
    const TemporaryFolder scratch;
    std::filesystem::permissions(scratch.path(), std::filesystem::perms::all);
    data::write_file(scratch / "old/locked/file", "old");
    data::write_file(scratch / "new/file", "new");
    std::filesystem::permissions(scratch / "old/locked", std::filesystem::perms{0555});
    const std::string log = log_of([&] {
      const Unprivileged nobody;
      EXPECT_NO_THROW(replace_folder(scratch / "new", scratch / "old"));
      spdlog::default_logger()->flush();
    });
    exchanges = true;
    EXPECT_EQ(read_text_file(scratch / "old/file"), "new");
    const std::filesystem::path left = scratch / (can_exchange ? "new" : "old.replaced");
    EXPECT_NE(log.find("cannot delete '" + left.string()), std::string::npos) << log;
    std::filesystem::permissions(left / "locked", std::filesystem::perms::all);
  }
}

TEST(CreateFolder, IsDurable) {
  const TemporaryFolder scratch;
  flushed.clear();
  create_folder(scratch / "a/b/c");
  EXPECT_EQ(flushed, (std::vector<std::filesystem::path>{scratch / "a/b", scratch / "a", scratch.path()}));
  flushed.clear();
  create_folder(scratch / "a/b/c");
  EXPECT_TRUE(flushed.empty());
}

/// The status tells a launcher whether a restart can help.
TEST(SystemError, HasTheStatusOfItsReason) {
  for (const int reason : {ENOSPC, EDQUOT, EIO, EROFS, ESTALE, ESHUTDOWN, ECONNABORTED}) {
    EXPECT_EQ(SystemError("x", reason).status(), ExitStatus::kStorageFailed) << reason;
  }
  for (const int reason : {EACCES, ENOENT, EPERM, ELOOP}) {
    EXPECT_EQ(SystemError("x", reason).status(), ExitStatus::kWrongInput) << reason;
  }
}

TEST(EntriesOf, OnlyAMissingFolderHasNone) {
  const TemporaryFolder scratch;
  data::write_file(scratch / "folder/file", "");
  ASSERT_EQ(entries_of(scratch / "folder").size(), 1u);
  EXPECT_EQ(entries_of(scratch / "folder").front().path(), scratch / "folder/file");
  EXPECT_TRUE(entries_of(scratch / "missing").empty());
  EXPECT_TRUE(entries_of(scratch / "folder/file").empty());
  std::filesystem::create_symlink("loop", scratch / "loop");
  expect_error([&] { entries_of(scratch / "loop"); }, {"cannot read the folder", "loop", "Too many levels"});
  expect_error([&] { path_exists(scratch / "loop"); }, {"cannot look for", "loop", "Too many levels"});
  EXPECT_FALSE(path_exists(scratch / "folder/file/below"));
}

TEST(AtomicFile, FoldersThatAreNotThere) {
  const TemporaryFolder scratch;
  expect_error([&] { AtomicFile file(scratch / "missing/file"); }, {"missing/file", "No such file"});
}

TEST(AtomicFile, ReplacesFilesOnly) {
  const TemporaryFolder scratch;
  expect_error([] { AtomicFile file("/dev/null"); }, {"/dev/null", "no regular file"});
  expect_error([&] { AtomicFile file(scratch.path()); }, {"no regular file"});
  // A write through a symbolic link replaces the link's target, not the link.
  const auto target = data::write_file(scratch / "target", "old");
  std::filesystem::create_symlink(target, scratch / "link");
  AtomicFile file(scratch / "link");
  file.write("new");
  file.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(scratch / "link"));
  EXPECT_EQ(read_text_file(target), "new");
}

TEST(AtomicFile, WritesThroughLinksToFilesThatAreNotThereYet) {
  const TemporaryFolder scratch;
  std::filesystem::create_directories(scratch / "other");
  std::filesystem::create_symlink("other/link", scratch / "link");
  std::filesystem::create_symlink("../target", scratch / "other/link");
  write_whole_file(scratch / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(scratch / "link"));
  EXPECT_TRUE(std::filesystem::is_symlink(scratch / "other/link"));
  EXPECT_EQ(read_text_file(scratch / "target"), "new");
  std::filesystem::create_symlink("loop", scratch / "loop");
  expect_error([&] { AtomicFile file(scratch / "loop"); }, {"cannot create", "loop", "Too many levels"});
}

TEST(ReadJsonFile, OnlyAMissingFileIsNone) {
  const TemporaryFolder scratch;
  EXPECT_EQ(read_json_file(scratch / "missing", "format", 1), std::nullopt);
  std::filesystem::create_symlink("loop", scratch / "loop");
  expect_error([&] { read_json_file(scratch / "loop", "format", 1); }, {"loop", "Too many levels"});
}

TEST(Printable, IsShortAndAscii) {
  EXPECT_EQ(printable("layers.0.\x1b[2J\xff"), "layers.0.\\x1b[2J\\xff");
  EXPECT_EQ(printable(std::string(1000, 'x')), std::string(200, 'x') + "...");
  expect_error([] { parse_json("{\"a\": \"\xc2\x9b[2J\" x}", "'file'"); }, {"not JSON", "\\xc2\\x9b[2J"});
  expect_error([] { parse_json("{\"\\u001b\": 1, \"\\u001b\": 2}", "'file'"); }, {"'\\x1b' occurs twice"});
  expect_error([] { require_plain_name("a\x1b", "'file'"); }, {"expected the name of a file", "'a\\x1b'"});
}

TEST(SumFile, IsTheChecksumOfTheWholeOrAnError) {
  const TemporaryFolder scratch;
  const std::string text((3 << 20) + 17, 'x');
  const auto path = data::write_file(scratch / "file", text);
  EXPECT_EQ(sum_file(path).size, text.size());
  EXPECT_EQ(sum_file(path).checksum, checksum(std::as_bytes(std::span(text))));
  EXPECT_EQ(sum_file(data::write_file(scratch / "empty", "")).checksum, checksum({}));
  expect_error([&] { sum_file(scratch.path()); }, {"not a regular file"});
  pread_fails = EIO;
  expect_error([&] { sum_file(path); }, {"cannot read", path.string(), "Input/output error"});
}

TEST(MappedFile, WhatCannotBeLookedAtMayBeARegularFile) {
  const TemporaryFolder scratch;
  const auto path = data::write_file(scratch / "file", "text");
  fstat_fails = EIO;
  EXPECT_THROW(MappedFile{path}, SystemError);
  EXPECT_EQ(MappedFile(path).bytes().size(), 4u);
}

TEST(MappedFile, WhatCannotBeMapped) {
  const TemporaryFolder scratch;
  expect_error([&] { MappedFile file(scratch / "missing"); }, {"missing", "No such file"});
  expect_error([&] { MappedFile file(scratch.path()); }, {"not a regular file"});
  const std::filesystem::path pipe = scratch / "pipe";  // without a writer
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error([&] { MappedFile file(pipe); }, {pipe.string(), "not a regular file"});
  EXPECT_TRUE(MappedFile(data::write_file(scratch / "empty", "")).bytes().empty());
}

TEST(MappedFile, MovesAndOutlivesTheName) {
  const TemporaryFolder scratch;
  const auto path = data::write_file(scratch / "file", "content");
  MappedFile first(path);
  MappedFile second(std::move(first));
  EXPECT_TRUE(first.bytes().empty());  // NOLINT(bugprone-use-after-move): a moved-from file is empty
  MappedFile third;
  third = std::move(second);
  std::filesystem::remove(path);
  EXPECT_EQ(std::memcmp(third.bytes().data(), "content", 7), 0);
  EXPECT_EQ(third.path(), path);
}

TEST(Checksum, AnyPieces) {
  std::vector<std::byte> bytes(3000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i >> 3);
  const std::span<const std::byte> all(bytes);
  for (const std::size_t size : {1, 3, 16, 17, 128, 240, 241, 1024, 3000}) {  // XXH3 changes its algorithm around these
    for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, size / 2, size}) {
      Checksum pieces;
      pieces.update(all.first(cut));
      pieces.update({});
      pieces.update(all.first(size).subspan(cut));
      EXPECT_EQ(pieces.value(), checksum(all.first(size))) << size << " " << cut;
    }
    std::vector<std::byte> changed(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    changed.back() ^= std::byte{1};
    EXPECT_NE(checksum(changed), checksum(all.first(size)));
  }
}

TEST(Checksum, PiecesEqualTheWhole) {
  const std::string text(10'000, 'x');
  const auto bytes = std::as_bytes(std::span(text));
  Checksum pieces;
  for (std::size_t at = 0; at < bytes.size(); at += 999) {
    pieces.update(bytes.subspan(at, std::min<std::size_t>(999, bytes.size() - at)));
  }
  EXPECT_EQ(pieces.value(), checksum(bytes));
  EXPECT_NE(checksum(bytes), checksum(bytes.first(9'999)));
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);  // XXH3-64 of zero bytes
}

TEST(FileLock, IsHeldByOneObjectAtATime) {
  const TemporaryFolder scratch;
  const auto path = scratch / "lock";
  {
    const FileLock lock(path, "the folder 'x'");
    expect_error([&] { const FileLock second(path, "the folder 'x'"); },
                 {"the folder 'x' is in use", fmt::format("process {} on ", getpid()), path.string()});
  }
  EXPECT_NO_THROW(FileLock(path, "x"));
  expect_error([&] { const FileLock lock(scratch / "missing" / "lock", "x"); }, {"cannot open", "missing"});
}

/// A lock that cannot be looked at is not lost. A process that believed so would end for good.
TEST(FileLock, IsLostOnlyIfTheFileIsGoneOrAnother) {
  const TemporaryFolder scratch;
  const auto path = scratch / "lock";
  const FileLock lock(path, "x", {.at_end = FileLock::AtEnd::kRemoveFile});
  EXPECT_TRUE(lock.is_held());
  fstat_fails = EIO;
  expect_error([&] { lock.is_held(); }, {"cannot look at", path.string(), "Input/output error"});
  fstat_fails = EIO;
  expect_error([&] { const FileLock other(scratch / "other", "x"); }, {"cannot look at", "other"});
  fstat_fails = ESTALE;
  EXPECT_FALSE(lock.is_held());
  std::filesystem::rename(path, scratch / "moved");
  EXPECT_FALSE(lock.is_held());
  data::write_file(path, "");
  EXPECT_FALSE(lock.is_held());
  std::filesystem::remove(path);
  std::filesystem::create_symlink("lock", path);
  expect_error([&] { lock.is_held(); }, {"cannot look at", path.string(), "Too many levels"});
  // The destructor cannot tell either, and must not throw.
}

TEST(FileLock, IsTakenOverFromTheHolderThatWasAskedFor) {
  const TemporaryFolder scratch;
  const auto path = scratch / "lock";
  const FileLock first(path, "x", {.owner = "1"});
  std::optional<FileLock> third;
  std::vector<std::string> asked;
  // While attempt 2 decides, attempt 3 takes the lock over.
  const auto takes_over = [&](const std::string& owner) {
    asked.push_back(owner);
    if (owner == "1")
      third.emplace(path, "x", FileLock::Options{.owner = "3", .takes_over = [](auto&) { return true; }});
    return owner == "1";
  };
  expect_error([&] { const FileLock second(path, "x", {.owner = "2", .takes_over = takes_over}); }, {"in use: 3"});
  EXPECT_EQ(asked, (std::vector<std::string>{"1", "3"}));
  EXPECT_TRUE(third->is_held());
  EXPECT_FALSE(first.is_held());
  EXPECT_EQ(entries_of(scratch.path()).size(), 1u);
}

TEST(FileLock, ATakeoverThatFailsLeavesNothing) {
  const auto num_open = [] { return entries_of("/proc/self/fd").size(); };
  const TemporaryFolder scratch;
  const FileLock first(scratch / "lock", "x");
  const std::size_t before = num_open();
  rename_fails = EIO;
  expect_error(
      [&] { const FileLock second(scratch / "lock", "x", {.takes_over = [](const std::string&) { return true; }}); },
      {"cannot take over", "Input/output error"});
  EXPECT_EQ(num_open(), before);
  EXPECT_EQ(entries_of(scratch.path()).size(), 1u);
  EXPECT_TRUE(first.is_held());
}

}  // namespace
}  // namespace tessera
