#include "base/file.h"

#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

using data::expect_error;
using data::Scratch;

TEST(AtomicFile, AppearsWithCommitOnly) {
  const Scratch scratch;
  const auto path = scratch / "file";
  data::write_file(path, "old");
  {
    AtomicFile file(path);
    file.write("new");
    EXPECT_EQ(read_text_file(path), "old");
  }
  EXPECT_EQ(read_text_file(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".tmp"));
  AtomicFile file(path);
  file.write("header ");
  file.write("body");
  file.write_at(0, std::as_bytes(std::span("HEADER", 6)));
  EXPECT_EQ(file.size(), 11u);
  file.commit();
  EXPECT_EQ(read_text_file(path), "HEADER body");
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".tmp"));
}

TEST(AtomicFile, FoldersThatAreNotThere) {
  expect_error([] { AtomicFile file("/nonexistent/file"); }, {"/nonexistent/file", "No such file"});
}

TEST(MappedFile, WhatCannotBeMapped) {
  const Scratch scratch;
  expect_error([&] { MappedFile file(scratch / "missing"); }, {"missing", "No such file"});
  expect_error([&] { MappedFile file(scratch.path()); }, {"not a regular file"});
  EXPECT_TRUE(MappedFile(data::write_file(scratch / "empty", "")).bytes().empty());
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
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);  // XXH3-64 of nothing
}

}  // namespace
}  // namespace tessera
