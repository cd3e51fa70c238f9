// Tests `tessera data` as a child process: mistakes of users, signals, and two writers of one folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <set>

#include "data/prepare.h"
#include "system/file_lock.h"
#include "tests/app/process.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::obeying_permissions;
using app_test::Process;
using data::TemporaryFolder;
using data::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class DataCommands : public ::testing::Test {
 protected:
  /// Runs the program with these arguments. "@" in an argument stands for the test's folder.
  Finished run(const std::vector<std::string>& arguments, rlim_t max_file_bytes = RLIM_INFINITY,
               const std::vector<std::string>& launcher = {}) const {
    return Process(scratch_, in_scratch(arguments), max_file_bytes, launcher).finish();
  }
  std::vector<std::string> in_scratch(std::vector<std::string> arguments) const {
    for (std::string& argument : arguments) {
      if (const std::size_t at = argument.find('@'); at != std::string::npos) {
        argument.replace(at, 1, scratch_.path().string() + "/");
      }
    }
    return arguments;
  }
  /// Returns the names in the test's folder, except the file of the program's output.
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(scratch_.path())) names.insert(entry.path().filename());
    names.erase("log.txt");
    return names;
  }
  /// Writes 300 MB of documents into a small compressed file. Preparing them takes some seconds.
  void write_long_input() const {
    std::string lines;
    for (int i = 0; i < 1000; ++i) lines += fmt::format("{{\"text\": \"{}\"}}\n", std::string(300, 'x'));
    const std::string member = data::gzipped(lines);
    std::string members;
    for (int i = 0; i < 1000; ++i) members += member;
    write_file(scratch_ / "long.jsonl.gz", members);
  }
  void wait_for(const std::string& name) const {
    for (int i = 0; i < 600 && !fs::exists(scratch_ / name); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ASSERT_TRUE(fs::exists(scratch_ / name));
  }

  TemporaryFolder scratch_;
};

struct DataMistake {
  const char* name;
  std::function<void(const TemporaryFolder&)> prepare;
  std::vector<std::string> arguments;
  std::vector<std::string> parts;  // parts of the message
  rlim_t max_file_bytes = RLIM_INFINITY;
  ExitStatus status = ExitStatus::kWrongInput;
};

std::vector<DataMistake> mistakes() {
  const auto text = [](const TemporaryFolder& scratch) { write_file(scratch / "a.txt", "some text\n"); };
  const auto file = [](const std::string& name, const std::string& content) {
    return [=](const TemporaryFolder& scratch) { write_file(scratch / name, content); };
  };
  const auto prepare = [](const std::string& input, const std::string& tokenizer = "bytes",
                          const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"data",        "prepare", "--input", input,
                                          "--tokenizer", tokenizer, "--out",   "@out"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const auto train = [](const std::string& input, const std::string& vocab_size) {
    return std::vector<std::string>{"data",  "tokenizer", "--input",      input,
                                    "--out", "@a.model",  "--vocab-size", vocab_size};
  };
  std::string lines;
  for (int i = 0; i < 20'000; ++i) lines += fmt::format("{{\"text\": \"document {}\"}}\n", i);
  return {
      {"no such input", text, prepare("@b.txt"), {"b.txt", "no such file or folder"}},
      {"no such tokenizer", text, prepare("@a.txt", "byte"), {"'byte'", "expected 'bytes'", "tokenizer.json"}},
      {"a text as the tokenizer", text, prepare("@a.txt", "@a.txt"), {"a.txt", "not a SentencePiece model"}},
      {"JSON that is no tokenizer",
       [=](const TemporaryFolder& scratch) {
         text(scratch);
         write_file(scratch / "config.json", "{\"layers\": 3}");
       },
       prepare("@a.txt", "@config.json"),
       {"config.json", "$.model"}},
      {"a folder without files",
       [](const TemporaryFolder& scratch) { fs::create_directories(scratch / "texts"); },
       prepare("@texts"),
       {"texts", "no files of text"}},
      {"a folder of images",
       file("texts/a.png", std::string("\x89PNG\r\n\x1A\n\0\0", 10)),
       prepare("@texts"),
       {"a.png", "a PNG image", "expected text in UTF-8, JSON lines", "--skip-unknown"}},
      {"Parquet",
       file("a.parquet", std::string("PAR1\0", 5)),
       prepare("@a.parquet"),
       {"Parquet", "not read yet", "pandas"}},
      {"Parquet for a tokenizer",
       file("a.parquet", std::string("PAR1\0", 5)),
       train("@a.parquet", "300"),
       {"Parquet", "not read yet", "pandas"}},
      {"zstd", file("a.jsonl.zst", "\x28\xB5\x2F\xFD"), prepare("@a.jsonl.zst"), {"zstd", "zstd -dc IN.zst | gzip"}},
      {"Latin-1", file("a.txt", "caf\xE9 au lait"), prepare("@a.txt"), {"a.txt", "not UTF-8", "iconv -f WINDOWS-1252"}},
      {"UTF-16",
       file("a.txt", std::string("\xFF\xFEh\0i\0", 6)),
       prepare("@a.txt"),
       {"a.txt", "UTF-16", "iconv -f UTF-16"}},
      {"a truncated gzip",
       [=](const TemporaryFolder& scratch) {
         const std::string whole = data::gzipped(lines);
         write_file(scratch / "a.jsonl.gz", whole.substr(0, whole.size() / 2));
       },
       prepare("@a.jsonl.gz"),
       {"a.jsonl.gz", "cut short or damaged"}},
      {"a name that says gzip",
       file("a.txt.gz", "plain"),
       prepare("@a.txt.gz"),
       {"a.txt.gz", "only its name calls gzip", "rename it"}},
      {"JSON lines without text",
       file("a.jsonl", "{\"content\": \"x\"}\n"),
       prepare("@a.jsonl"),
       {"a.jsonl'", "without \"text\"", "{\"content\": \"x\"}"}},
      {"a JSON array",
       file("a.json", "[{\"text\": \"x\"}]\n"),
       prepare("@a.json"),
       {"a.json'", "holds an array", "jq -c '.[]'"}},
      {"a JSON array over several lines",
       file("a.json", "[\n  {\"text\": \"x\"}\n]\n"),
       prepare("@a.json"),
       {"a.json'", "holds an array", "jq -c '.[]'"}},
      {"JSON lines that are called text",
       file("a.txt", "{\"text\": \"x\"}\n"),
       prepare("@a.txt"),
       {"JSON lines", "NAME.jsonl"}},
      {"white space alone",
       file("a.txt", " \n"),
       prepare("@a.txt"),
       {"no document with text", "empty, or white space alone: 1"}},
      {"an output that is a file",
       [=](const TemporaryFolder& scratch) {
         text(scratch);
         write_file(scratch / "out", "kept");
       },
       prepare("@a.txt"),
       {"out", "expected a folder", "it is a file"}},
      {"an output that exists",
       [=](const TemporaryFolder& scratch) {
         text(scratch);
         write_file(scratch / "out/precious.txt", "kept");
       },
       prepare("@a.txt", "bytes", {"--force"}),
       {"precious.txt", "not replaced"}},
      {"an output within the input",
       file("texts/a.txt", "text"),
       {"data", "prepare", "--input", "@texts", "--tokenizer", "bytes", "--output", "@texts/out"},
       {"texts/out", "within the input folder", "outside"}},
      {"a model that exists",
       [=](const TemporaryFolder& scratch) {
         text(scratch);
         write_file(scratch / "a.model", "kept");
       },
       train("@a.txt", "300"),
       {"a.model", "it exists", "--force"}},
      {"a folder below a file",
       text,
       {"data", "prepare", "--input", "@a.txt", "--tokenizer", "bytes", "--out", "@a.txt/out"},
       {"a.txt", "is a file; expected a folder"}},
      {"a vocabulary too large for the text",
       text,
       train("@a.txt", "32k"),
       {"32000 pieces", "10 bytes", "at most", "smaller vocabulary"}},
      {"a vocabulary too small", text, train("@a.txt", "100"), {"100", "more than 259"}},
      {"a count with an unknown unit", text, train("@a.txt", "32x"), {"--vocab-size", "'32x'", "as in 32k, 1.5M"}},
      {"a negative count",
       text,
       prepare("@a.txt", "bytes", {"--shard-tokens=-5"}),
       {"--shard-tokens", "-5 is out of range: expected 1 to"}},
      {"more threads than any machine has",
       text,
       prepare("@a.txt", "bytes", {"--threads=5000"}),
       {"--threads", "5000 is out of range: expected 1 to 4096"}},
      {"all for validation",
       text,
       prepare("@a.txt", "bytes", {"--val-fraction=1"}),
       {"validation fraction 1", "[0, 1)"}},
      {"an unknown option", text, prepare("@a.txt", "bytes", {"--shard-token=5"}), {"--shard-token"}},
      {"a full disk",
       file("a.jsonl", lines),
       prepare("@a.jsonl"),
       {"cannot write", "train-00000.tokens"},
       100'000,
       ExitStatus::kStorageFailed},
  };
}

TEST_F(DataCommands, MistakesEndWithTwoAndAReason) {
  for (const DataMistake& mistake : mistakes()) {
    for (const std::string& name : names()) fs::remove_all(scratch_ / name);
    mistake.prepare(scratch_);
    const std::set<std::string> before = names();
    const Finished finished = run(mistake.arguments, mistake.max_file_bytes);
    EXPECT_EQ(finished.status, static_cast<int>(mistake.status)) << mistake.name << ": " << finished.output;
    for (const std::string& part : mistake.parts) EXPECT_THAT(finished.output, HasSubstr(part)) << mistake.name;
    EXPECT_THAT(finished.output, Not(HasSubstr("Internal"))) << mistake.name;
    EXPECT_EQ(names(), before) << mistake.name;
  }
}

TEST_F(DataCommands, FilesWithoutPermission) {
  const auto launcher = obeying_permissions();
  if (!launcher) GTEST_SKIP() << "this root ignores permissions, and may not give that up";
  fs::permissions(write_file(scratch_ / "a.txt", "text"), fs::perms::none);
  const auto prepare = [&](const char* input, const char* output) {
    return run({"data", "prepare", "--input", input, "--tokenizer", "bytes", "--out", output}, RLIM_INFINITY,
               *launcher);
  };
  const Finished unreadable = prepare("@a.txt", "@out");
  EXPECT_EQ(unreadable.status, 2);
  EXPECT_THAT(unreadable.output, AllOf(HasSubstr("a.txt"), HasSubstr("Permission denied")));
  write_file(scratch_ / "b.txt", "text");
  fs::create_directory(scratch_ / "locked");
  fs::permissions(scratch_ / "locked", fs::perms::owner_read | fs::perms::owner_exec);
  const Finished unwritable = prepare("@b.txt", "@locked/out");
  EXPECT_EQ(unwritable.status, 2);
  EXPECT_THAT(unwritable.output, AllOf(HasSubstr("locked/out"), HasSubstr("Permission denied")));
}

TEST_F(DataCommands, BothNamesOfTheOutputAndUnitsWork) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += fmt::format("word{} and another{}\n", i * i, i);
  write_file(scratch_ / "a.txt", text);
  for (const std::string name : {"--out", "--output"}) {
    const Finished trained = run({"data", "tokenizer", "--input", "@a.txt", name, "@" + name + ".model", "--vocab-size",
                                  "0.3k", "--sample-bytes=64Ki"});
    EXPECT_EQ(trained.status, 0) << trained.output;
    EXPECT_THAT(trained.output, HasSubstr("300 pieces"));
    const Finished prepared = run({"data", "prepare", "--input", "@a.txt", "--tokenizer", "@" + name + ".model", name,
                                   "@" + name, "--val-fraction=0", "--shard-tokens=1M"});
    EXPECT_EQ(prepared.status, 0) << prepared.output;
  }
}

TEST_F(DataCommands, SkippedFilesAreCountedByKind) {
  write_file(scratch_ / "in/a.txt", "text");
  write_file(scratch_ / "in/README.md", "# About");
  write_file(scratch_ / "in/blank.txt", "\n\n");
  for (const char* name : {"in/b.png", "in/c.png"}) write_file(scratch_ / name, "\x89PNG\r\n\x1A\n");
  const Finished finished = run({"data", "prepare", "--input", "@in", "--tokenizer", "bytes", "--out", "@out",
                                 "--skip-unknown", "--val-fraction=0"});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("2 of 4 files cannot be read (a PNG image: 2)"), HasSubstr("in/b.png"),
                                     HasSubstr("1 file is left out"), HasSubstr("README.md"),
                                     HasSubstr("1 documents are left out: they are empty"), HasSubstr("blank.txt")));
  EXPECT_EQ(data::all_tokens(scratch_ / "out", "train"), (std::vector<std::int32_t>{256, 't', 'e', 'x', 't', 257}));
}

TEST_F(DataCommands, ASecondTokenizerOfOneOutputIsRefused) {
  write_file(scratch_ / "text.txt", "one\n\ntwo\n\nthree\n");
  const std::vector<std::string> arguments = {"data",         "tokenizer", "--input",  "@text.txt",
                                              "--vocab-size", "300",       "--output", "@small.model"};
  {
    const FileLock first(scratch_ / "small.model.lock", "the first one");
    const Finished second = run(arguments);
    EXPECT_EQ(second.status, 2);
    EXPECT_THAT(second.output, HasSubstr("is in use"));
    EXPECT_EQ(names().count("small.model"), 0u);
  }
  run(arguments);
  EXPECT_EQ(names().count("small.model.lock"), 0u);
}

TEST_F(DataCommands, ASecondWriterIsRefusedAndASignalLeavesNothing) {
  write_long_input();
  const std::vector<std::string> arguments =
      in_scratch({"data", "prepare", "--input", "@long.jsonl.gz", "--tokenizer", "bytes", "--out", "@out"});
  for (const int signal : {SIGINT, SIGTERM}) {
    const Process first(scratch_, arguments);
    wait_for("out.tmp");
    data::PrepareOptions second;
    second.inputs = {write_file(scratch_ / "a.txt", "text")};
    second.tokenizer = "bytes";
    second.output = scratch_ / "out";
    second.val_fraction = 0;
    expect_error([&] { data::prepare_dataset(second); }, {"out", "in use", "process ", "out.tmp.lock"});
    EXPECT_TRUE(fs::exists(scratch_ / "out.tmp"));
    first.send(signal);
    const Finished finished = first.finish(std::chrono::seconds(20));
    EXPECT_EQ(finished.status, 128 + signal) << finished.output;
    EXPECT_THAT(finished.output, AllOf(HasSubstr("stopped by"), HasSubstr("is not written")));
    EXPECT_EQ(names(), (std::set<std::string>{"a.txt", "long.jsonl.gz"}));
    EXPECT_NO_THROW(data::prepare_dataset(second));
    fs::remove_all(second.output);
  }
}

TEST_F(DataCommands, WhatAKilledWriterLeftIsCleaned) {
  write_long_input();
  const std::vector<std::string> arguments = {"data",        "prepare", "--input", "@long.jsonl.gz",
                                              "--tokenizer", "bytes",   "--out",   "@out"};
  const Process first(scratch_, in_scratch(arguments));
  wait_for("out.tmp");
  first.send(SIGKILL);
  EXPECT_EQ(first.finish().status, 128 + SIGKILL);
  EXPECT_EQ(names(), (std::set<std::string>{"long.jsonl.gz", "out.tmp.lock", "out.tmp"}));
  write_file(scratch_ / "a.txt", "text");
  EXPECT_EQ(
      run({"data", "prepare", "--input", "@a.txt", "--tokenizer", "bytes", "--out", "@out", "--val-fraction=0"}).status,
      0);
  EXPECT_EQ(names(), (std::set<std::string>{"a.txt", "long.jsonl.gz", "out"}));
}

/// Errors about the datasets of a run name the configuration's key for the dataset.
TEST_F(DataCommands, ErrorsAboutARunsDataNameTheKey) {
  data::make_dataset(scratch_, 400, 3000, 0.1);
  const auto refused = [&](const std::vector<std::string>& more, const std::vector<std::string>& parts) {
    const Finished finished = Process(scratch_, app_test::small_run(scratch_, more)).finish();
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
  };
  const std::string none = scratch_ / "none";
  const std::string remedy = "`tessera data prepare --input TEXTS --tokenizer TOKENIZER --output ";
  refused({"--training.dataset_path=" + none},
          {"training.dataset_path: dataset '" + none, "no such folder", remedy + none});
  refused({"--training.dataset_path=" + none, "--model.args.eos_id=2"}, {"training.dataset_path: dataset '" + none});
  refused({"--validation.enable", "--validation.dataset_path=" + none},
          {"validation.dataset_path: dataset '" + none, remedy + none});
  data::flip_bit(scratch_ / "dataset" / "dataset.json", 100, 1);
  refused({}, {"training.dataset_path: '" + (scratch_ / "dataset").string(), remedy});
}

}  // namespace
}  // namespace tessera
