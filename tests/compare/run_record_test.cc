// Tests how runs' folders are read, whole and damaged, and which runs may be compared.
#include "compare/run_record.h"

#include <gmock/gmock.h>

#include "compare/side.h"
#include "tests/compare/support.h"

namespace tessera {
namespace {

using compare_test::PlantedRun;
using data::TemporaryFolder;
using data::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(RunRecord, ReadsWhatATrainerWrites) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{.seed = 7, .steps = 50, .sqnr_layers = 3}.write(scratch / "run");
  write_file(folder / "metrics.jsonl", read_text_file(folder / "metrics.jsonl") +
                                           "{\"step\":50,\"validation_loss\":4.25}\n{\"step\":50,\"later\":1}\n");
  const RunRecord run = read_run(folder);
  EXPECT_EQ(run.seed(), 7);
  EXPECT_EQ(run.num_steps(), 50);
  EXPECT_TRUE(run.finished());
  EXPECT_EQ(run.losses.size(), 50u);
  EXPECT_EQ(run.dataset.at("train"), "0123456789abcdef");
  EXPECT_EQ(run.validation_losses.at(50), 4.25);
  EXPECT_EQ(run.peak_memory_bytes, 1e9);
  ASSERT_EQ(run.sqnr.size(), 50u);
  EXPECT_NEAR(run.sqnr[9].by_layer.at("x").at(2), 31.5 - 0.1 - 0.02, 1e-9);
  EXPECT_EQ(run.last_sqnr.size(), 9u);
  EXPECT_NEAR(run.last_sqnr.at("layers.1.moe.experts.w2").at("dy"), 31.5 - 0.05 - 0.02 - 1.0, 1e-9);
}

TEST(RunRecord, TokensPerStepAreOfAllRanks) {
  const TemporaryFolder scratch;
  const auto tokens = [&](const std::map<std::string, std::string>& config, int ranks) {
    const auto folder = PlantedRun{.steps = 1, .config = config}.write(scratch / "run");
    auto info = nlohmann::json::parse(read_text_file(folder / "run.json"));
    info["data_ranks"] = ranks;
    if (config.contains("training.seq_len")) info["config"].erase("lr_scheduler.warmup_steps");
    write_file(folder / "run.json", info.dump());
    return read_run(folder);
  };
  EXPECT_EQ(tokens({}, 2).tokens_per_step(), 4 * 512);
  EXPECT_EQ(tokens({{"training.global_batch_size", "-1"}}, 2).tokens_per_step(), 2 * 4 * 512);
  EXPECT_EQ(tokens({{"training.global_batch_size", "64"}}, 2).tokens_per_step(), 64 * 512);
  EXPECT_EQ(tokens({}, 1).warmup_steps(), 20);
  EXPECT_EQ(tokens({{"training.seq_len", "1024"}}, 1).warmup_steps(), 200);  // the default
  EXPECT_EQ(tokens({{"model.args.vocab_size", "1"}}, 1).uniform_loss(), std::nullopt);
  expect_error([&] { tokens({{"training.seq_len", "x"}}, 1).tokens_per_step(); }, {"training.seq_len", "'x'"});
}

TEST(RunRecord, SitesOutsideOfLayersAreTheirOwn) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{.steps = 1}.write(scratch / "run");
  write_file(folder / "metrics.jsonl",
             R"({"step":1,"loss":4,"grad_norm":1,"tokens_per_second":1,"memory_bytes":1,"quantization_sqnr_db":)"
             R"({"output":{"x":20},"layers.2.attention.wq":{"x":30},"layers.2.attention.wo":{"x":32,"w":null},)"
             R"("layersx":{"x":22}}})");  // complete, though no newline ends it
  const RunRecord run = read_run(folder);
  EXPECT_THAT(run.sqnr.at(0).by_layer.at("x"), ElementsAre(std::pair{-1, 21.0}, std::pair{2, 31.0}));
  EXPECT_FALSE(run.sqnr[0].by_layer.contains("w"));
}

TEST(RunRecord, WithoutRunJsonItSaysHowToGetOne) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{}.write(scratch / "run");
  std::filesystem::remove(folder / "run.json");
  expect_error([&] { read_run(folder); }, {"run.json", "tessera train", "job.dump_folder", "trained again"});
}

TEST(RunRecord, DamagedFilesAreNamed) {
  const TemporaryFolder scratch;
  const auto damaged = [&](const char* file, const std::string& content, const std::vector<std::string>& parts) {
    const auto folder = PlantedRun{.steps = 3}.write(scratch / "run");
    write_file(folder / file, content);
    std::vector<std::string> all = {(folder / file).string()};
    all.insert(all.end(), parts.begin(), parts.end());
    expect_error([&] { read_run(folder); }, all);
  };
  damaged("run.json", "", {"not JSON"});
  damaged("run.json", "[]", {"expected an object"});
  damaged("run.json", R"({"format": "other", "version": 1})", {"tessera-run", "other"});
  damaged("run.json", R"({"format": "tessera-run", "version": 2})", {"version"});
  damaged("run.json", R"({"format": "tessera-run", "version": 1})", {"config is missing"});
  damaged("run.json",
          R"({"format":"tessera-run","version":1,"config":{"training.steps":3},"dataset":{},"program":"",)"
          R"("processor":"","threads":1})",
          {"training.steps", "a string"});
  damaged("run.json",
          R"({"format":"tessera-run","version":1,"config":{"training.steps":"3x"},"dataset":{},"program":"",)"
          R"("processor":"","threads":1})",
          {"training.steps", "3x"});
  const std::string line = R"({"step":1,"loss":4,"grad_norm":1,"tokens_per_second":1,"memory_bytes":1})";
  damaged("metrics.jsonl", line + "\n{\"step\":2,\"lo\n" + line + "\n", {"line 2", "not JSON"});
  damaged("metrics.jsonl", line + "\n" + line + "\n", {"line 2", "step 1 comes after step 1"});
  damaged("metrics.jsonl", "{\"step\":\"1\"}\n", {"line 1", "step", "whole number"});
  damaged("metrics.jsonl", "{\"step\":1,\"loss\":\"4\"}\n", {"line 1", "loss", "a number"});
  damaged("metrics.jsonl", "{\"step\":1,\"loss\":4}\n", {"line 1", "grad_norm"});
  damaged("metrics.jsonl", line.substr(0, line.size() - 1) + ",\"quantization_sqnr_db\":{\"a\":3}}\n",
          {"line 1", "quantization_sqnr_db.a"});
}

TEST(RunRecord, ALineThatIsCutOffDoesNotCount) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{.steps = 20}.write(scratch / "run");
  const std::string metrics = read_text_file(folder / "metrics.jsonl");
  write_file(folder / "metrics.jsonl", metrics.substr(0, metrics.size() - 30));
  const RunRecord run = read_run(folder);
  EXPECT_EQ(run.last_step(), 19);
  expect_error([&] { make_side("a", {run}); }, {folder.string(), "not finished", "step 19", "training.steps is 20"});
}

TEST(RunRecord, FindsARunOrItsSubfolders) {
  const TemporaryFolder scratch;
  PlantedRun{}.write(scratch / "side/seed-2");
  PlantedRun{}.write(scratch / "side/seed-1");
  write_file(scratch / "side/notes/notes.txt", "x");
  EXPECT_THAT(find_runs(scratch / "side"), ElementsAre(scratch / "side/seed-1", scratch / "side/seed-2"));
  EXPECT_THAT(find_runs(scratch / "side/seed-1"), ElementsAre(scratch / "side/seed-1"));
  expect_error([&] { find_runs(scratch / "side/notes"); }, {"side/notes", "no run"});
  expect_error([&] { find_runs(scratch / "nowhere"); }, {"nowhere"});
}

class Sides : public ::testing::Test {
 protected:
  RunRecord run(const std::string& name, const PlantedRun& planted) { return read_run(planted.write(scratch_ / name)); }
  TemporaryFolder scratch_;
};

TEST_F(Sides, DifferencesInMoreThanPrecisionAreRefusedWithKeyAndValues) {
  const Side a = make_side("a", {run("a", {})});
  const auto refused = [&](const PlantedRun& planted, const std::vector<std::string>& parts) {
    const Side b = make_side("b", {run("b", planted)});
    const std::string message = expect_error([&] { require_comparable({a, b}); }, parts);
    EXPECT_THAT(message, HasSubstr(a.runs[0].folder.string()));
    EXPECT_THAT(message, HasSubstr(b.runs[0].folder.string()));
    EXPECT_THAT(message, Not(HasSubstr("job.dump_folder")));
  };
  refused({.config = {{"model.args.dim", "512"}}}, {"model.args.dim:  256 in", "512 in"});
  refused({.dataset = {{"train", "fedcba9876543210"}}}, {"dataset.train", "0123456789abcdef", "fedcba9876543210"});
  refused({.steps = 100}, {"training.steps", "200", "100"});
  refused({.config = {{"training.seq_len", "1024"}, {"optimizer.lr", "0.001"}}},
          {"training.seq_len", "512", "1024", "optimizer.lr", "0.0008", "0.001"});
  refused({.config = {{"checkpoint.initial_load_path", "\"other\""}}},
          {"checkpoint.initial_load_path", "\"\" in", "other"});
}

TEST_F(Sides, PrecisionPlacesAndParallelismMayDiffer) {
  const Side a = make_side("a", {run("a", {})});
  const Side b = make_side("b", {run("b", {.config = {{"model.converters", "[\"quantize.linear.mx\"]"},
                                                      {"training.mixed_precision_param", "\"float32\""},
                                                      {"quantize.linear.mx.recipe_name", "\"mxfp8_cublas_rceil\""},
                                                      {"training.dataset_path", "\"/elsewhere\""},
                                                      {"training.dataset", "\"c4\""},
                                                      {"model.hf_assets_path", "\"/assets\""},
                                                      {"parallelism.expert_parallel_degree", "8"},
                                                      {"activation_checkpoint.mode", "\"full\""},
                                                      {"checkpoint.enable", "true"},
                                                      {"metrics.log_freq", "1"},
                                                      {"optimizer.state_dtype", "\"bfloat16\""}}})});
  EXPECT_NO_THROW(require_comparable({a, b}));
  std::vector<std::string> keys;
  for (const Difference& difference : differences_of({a, b})) keys.push_back(difference.key);
  EXPECT_THAT(keys, ElementsAre("activation_checkpoint.mode", "checkpoint.enable", "metrics.log_freq",
                                "model.converters", "optimizer.state_dtype", "parallelism.expert_parallel_degree",
                                "quantize.linear.mx.recipe_name", "training.mixed_precision_param"));
  // Without a degree of data parallelism in the configuration, the number of ranks is a difference of its own.
  Side c = make_side("c", {run("c", {})});
  c.runs[0].num_data_ranks = 2;
  ASSERT_EQ(differences_of({a, c}).size(), 1u);
  EXPECT_THAT(differences_of({a, c})[0].values, ElementsAre("1", "2"));
  EXPECT_FALSE(is_of_machine(differences_of({a, c})[0].key));
}

TEST_F(Sides, WithinASideOnlySeedsDiffer) {
  EXPECT_NO_THROW(make_side("a", {run("1", {.seed = 1}), run("2", {.seed = 2})}));
  expect_error(
      [&] {
        make_side("a", {run("1", {.seed = 1}), run("2", {.seed = 1})});
      },
      {"two runs with debug.seed = 1", "'a'"});
  expect_error(
      [&] {
        make_side("a", {run("1", {}), run("2", {.seed = 2, .config = {{"model.converters", "[\"x\"]"}}})});
      },
      {"side 'a'", "model.converters", "[]", "[\"x\"]"});
}

TEST_F(Sides, SeedsAreTheSameOnBothSides) {
  const Side a = make_side("a", {run("2", {.seed = 2}), run("1", {.seed = 1})});
  const Side b = make_side("b", {run("3", {.seed = 2}), run("4", {.seed = 3})});
  expect_error([&] { require_comparable({a, b}); }, {"'a' has debug.seed 1, 2", "'b' has 2, 3"});
}

TEST_F(Sides, AStartedRunIsTheOneThatIsThere) {
  const RunRecord there = run("a", {.seed = 1});
  EXPECT_NO_THROW(require_same_run(there, run("b", {.seed = 1})));
  expect_error([&] { require_same_run(there, run("b", {.seed = 2})); }, {"debug.seed", there.folder.string()});
}

TEST(RunRecord, NumbersAndTextsThatNoTrainerWrites) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{.steps = 1}.write(scratch / "run");
  const std::string start = R"({"step":1,"loss":4,"grad_norm":1,"tokens_per_second":1,"memory_bytes":)";
  write_file(folder / "metrics.jsonl", start + R"(1,"quantization_sqnr_db":{"a":null,"b":{"x":3}}})");
  EXPECT_EQ(read_run(folder).last_sqnr.size(), 1u);
  write_file(folder / "metrics.jsonl", start + "1e300}");
  expect_error([&] { read_run(folder); }, {"memory_bytes", "whole number"});
  PlantedRun{.config = {{"training.steps", "\x1b[31m" + std::string(1000, '9')}}}.write(folder);
  const std::string message = expect_error([&] { read_run(folder); }, {"training.steps", "\\x1b[31m999", "..."});
  EXPECT_LT(message.size(), 600u);
}

TEST(RunRecord, ARunThatBreaksDownHasEnded) {
  const TemporaryFolder scratch;
  const auto at = [&](std::int64_t null_step, std::int64_t last_step) {
    PlantedRun planted{.steps = 20, .last_step = last_step};
    planted.loss = [&](double loss, std::int64_t step) { return step == null_step ? std::nan("") : loss; };
    return read_run(planted.write(scratch / "run"));
  };
  EXPECT_FALSE(at(-1, 20).broken());
  EXPECT_FALSE(at(-1, 9).ended());
  const RunRecord broken = at(9, 9);
  EXPECT_TRUE(broken.ended());
  EXPECT_FALSE(broken.finished());
  EXPECT_EQ(broken.broken()->step, 9);
  EXPECT_NO_THROW(make_side("a", {broken}));
  EXPECT_FALSE(at(5, 9).ended());
  // A step without a gradient norm is broken, too.
  std::string lines = read_text_file(PlantedRun{.steps = 20, .last_step = 9}.write(scratch / "norm") / "metrics.jsonl");
  const std::size_t field = lines.rfind("\"grad_norm\":") + std::string_view("\"grad_norm\":").size();
  lines.replace(field, lines.find_first_of(",}", field) - field, "null");
  data::write_file(scratch / "norm/metrics.jsonl", lines);
  const RunRecord without_norm = read_run(scratch / "norm");
  EXPECT_TRUE(without_norm.ended());
  EXPECT_STREQ(without_norm.broken()->what, "gradient norm");
  expect_error([&] { require_sound_baseline({"a", {broken}}); }, {"baseline", "loss", "step 9 of seed 1"});
}

TEST(RunRecord, ARunThatWasChangedOnItsWayIsRefused) {
  const TemporaryFolder scratch;
  const auto folder = PlantedRun{}.write(scratch / "run");
  auto info = nlohmann::json::parse(read_text_file(folder / "run.json"));
  info["changed"] = {{"optimizer.lr", {"0.0008", "0.0004 at step 101"}}};
  write_file(folder / "run.json", info.dump());
  expect_error([&] { make_side("a", {read_run(folder)}); },
               {folder.string(), "optimizer.lr:  0.0008, then 0.0004 at step 101"});
  info["changed"] = {{"optimizer.lr", 3}};
  write_file(folder / "run.json", info.dump());
  expect_error([&] { read_run(folder); }, {"changed.optimizer.lr", "array"});
}

TEST_F(Sides, AKeyThatAnOlderProgramDidNotKnowHasItsDefault) {
  const Side a = make_side("a", {run("a", {})});
  const Side b = make_side("b", {run("b", {.config = {{"training.max_norm", "1.0"}}})});
  EXPECT_NO_THROW(require_comparable({a, b}));
  EXPECT_TRUE(differences_of({a, b}).empty());
  const Side c = make_side("c", {run("c", {.config = {{"training.max_norm", "2.0"}}})});
  expect_error([&] { require_comparable({a, c}); }, {"training.max_norm:  1.0 in", "2.0 in"});
}

TEST_F(Sides, WhatIsPrintedCannotTalkToATerminal) {
  const Side a = make_side("a", {run("a", {})});
  const Side b = make_side("b", {run("b", {.config = {{"model.args.dim", "\x1b[2J\n256"}}})});
  const std::string message = expect_error([&] { require_comparable({a, b}); }, {"\\x1b[2J\\x0a256"});
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace tessera
