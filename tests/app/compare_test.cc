// Tests `tessera compare` as a child process: finished runs, runs that it starts, and input that it refuses.
#include <fstream>
#include <thread>

#include "compare/comparison.h"
#include "compare/launcher.h"
#include "tests/app/process.h"
#include "tests/compare/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::Process;
using compare_test::Noise;
using compare_test::PlantedRun;
using data::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Compare : public ::testing::Test {
 protected:
  Finished compare(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "compare");
    arguments.push_back("--out=" + report().string());
    return Process(scratch_, arguments).finish();
  }
  fs::path report() const { return scratch_ / "out" / "report.html"; }
  nlohmann::json json() const { return nlohmann::json::parse(read_text_file(scratch_ / "out" / "report.json")); }
  std::string verdict() const { return json()["sides"][1]["verdict"]["verdict"]; }

  /// Writes planted runs with the seeds 1 to `seeds` and returns their folder. A run's losses are the baseline's times
  /// `factor(seed, step)`.
  std::string side(const std::string& name, std::int64_t seeds,
                   const std::function<double(std::int64_t, std::int64_t)>& factor) {
    for (std::int64_t seed = 1; seed <= seeds; ++seed) {
      PlantedRun run{.seed = seed, .steps = 1000};
      run.loss = [&](double loss, std::int64_t step) { return loss * factor(seed, step); };
      run.write(scratch_ / name / ("seed-" + std::to_string(seed)));
    }
    return scratch_ / name;
  }

  /// Writes a dataset and the configuration of a model that trains in a moment. Returns the configuration's path.
  std::string config() {
    data::make_dataset(scratch_, 400, 3000, 0.1);
    return data::write_file(scratch_ / "tiny.toml", fmt::format(R"(
[model.args]
vocab_size = 258
dim = 32
n_layers = 2
n_heads = 2
[training]
dataset_path = "{}"
local_batch_size = 2
seq_len = 32
steps = 6
num_threads = 1
[checkpoint]
enable = true
)",
                                                                (scratch_ / "dataset").string()));
  }

  /// Waits until a run has logged a step, but not for ever.
  static void wait_for_steps(const fs::path& run) {
    const fs::path metrics = run / "metrics.jsonl";
    for (int i = 0; i < 15000 && !(fs::exists(metrics) && fs::file_size(metrics) > 0); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  TemporaryFolder scratch_;
};

TEST_F(Compare, PlantedCases) {
  const Noise noise(21);
  const std::string base = side("base", 4, [](auto, auto) { return 1.0; });
  const std::string same = side("same", 4, [](auto, auto) { return 1.0; });
  Finished finished = compare({base, same});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("same against base: equivalent: the same losses at every step"),
                                     HasSubstr("Peak memory"), HasSubstr(report().string())));
  EXPECT_EQ(verdict(), "equivalent");

  const std::string noisy = side("noisy", 4, [&](auto seed, auto step) { return 1.0 + 0.01 * noise(seed, step); });
  finished = compare({base, noisy});
  EXPECT_EQ(finished.status, 0);
  EXPECT_THAT(finished.output, HasSubstr("noisy against base: equivalent (difference"));

  const std::string diverging = side("diverging", 4, [&](auto seed, auto step) {
    return 1.0 + 0.02 * static_cast<double>(step) / 1000.0 + 0.002 * noise(seed, step);
  });
  finished = compare({base, noisy, "slow=" + diverging});
  EXPECT_EQ(finished.status, 0);
  EXPECT_THAT(finished.output,
              AllOf(HasSubstr("noisy against base: equivalent"), HasSubstr("slow against base: worse by 1.9")));
  EXPECT_EQ(json()["sides"].size(), 3u);

  finished = compare({base + "/seed-1," + base + "/seed-3", "low=" + noisy + "/seed-1," + noisy + "/seed-3"});
  EXPECT_THAT(finished.output, HasSubstr("low against base: not enough evidence: "));

  const std::string broken = side("broken", 4, [](auto seed, auto step) {
    return seed == 3 && step == 1000 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
  });
  finished = compare({base, broken});
  EXPECT_EQ(finished.status, 0);
  EXPECT_THAT(finished.output, HasSubstr("broken against base: worse: the loss is not finite at step 1000 (seed 3)"));
}

/// The exit status is 0, as with every verdict. The JSON says how much evidence there is and how much would be enough.
TEST_F(Compare, TooShortToSay) {
  const auto short_side = [&](const std::string& name, double factor) {
    for (std::int64_t seed = 1; seed <= 3; ++seed) {
      PlantedRun run{
          .seed = seed, .steps = 10, .config = {{"training.seq_len", "32"}, {"model.args.vocab_size", "258"}}};
      run.config["training.global_batch_size"] = "1";
      run.loss = [&](double loss, std::int64_t) { return loss * factor; };
      run.write(scratch_ / name / ("seed-" + std::to_string(seed)));
    }
    return (scratch_ / name).string();
  };
  const Finished finished = compare({short_side("base", 1.0), short_side("other", 1.0001)});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("other against base: too short to say: 320 tokens (enough: 100000), 0 "
                                               "steps after the warm-up (enough: 100)"),
                                     HasSubstr("Below ln(vocabulary)")));
  EXPECT_EQ(verdict(), "too short to say");
  const nlohmann::json evidence = json()["sides"][1]["verdict"]["evidence"];
  EXPECT_EQ(evidence["enough"], false);
  EXPECT_EQ(evidence["tokens"], (nlohmann::json{{"found", 320.0}, {"needed", 100'000.0}}));
  EXPECT_EQ(evidence["steps_after_warmup"], (nlohmann::json{{"found", 0}, {"needed", 100}}));
  EXPECT_GT(evidence["loss_fall"]["needed"], 0.3);
  const nlohmann::json learned = json()["runs"][0]["learned"];
  EXPECT_EQ(learned["tokens"], 320.0);
  EXPECT_NEAR(learned["uniform_loss"].get<double>(), std::log(258.0), 1e-12);
}

TEST_F(Compare, BadInputExitsWithTwoAndWritesNoReport) {
  const std::string base = side("base", 1, [](auto, auto) { return 1.0; });
  const auto refused = [&](const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    const Finished finished = compare(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
    EXPECT_FALSE(fs::exists(report()));
  };
  PlantedRun{.config = {{"model.args.dim", "512"}}}.write(scratch_ / "other");
  PlantedRun{.steps = 1000, .last_step = 10}.write(scratch_ / "unfinished");
  PlantedRun{.steps = 1000}.write(scratch_ / "old");
  fs::remove(scratch_ / "old" / "run.json");
  PlantedRun{.seed = 2, .steps = 1000}.write(scratch_ / "seed");
  refused({base}, {"2"});
  refused({base, scratch_ / "nowhere"}, {"nowhere"});
  refused({base, scratch_ / "other"}, {"model.args.dim", "256", "512", "training.steps", "1000", "200"});
  refused({base, scratch_ / "unfinished"}, {"unfinished", "step 10", "1000"});
  refused({base, scratch_ / "old"}, {"run.json", "tessera train"});
  refused({base, scratch_ / "seed"}, {"seed", "debug.seed 1", "2"});
  refused({base, "x=" + base, "y=" + base, "x=" + std::string(scratch_ / "seed")},
          {"two sides are called 'x'", "first=" + base, "second=" + std::string(scratch_ / "seed")});
  refused({base, "b=" + base}, {"on two sides, 'base' and 'b'"});
  refused({base, "b=" + base, "--json=" + std::string(scratch_ / "out" / "." / "report.html")}, {"report.html"});
  refused({base, "b=" + base, "--margin=0"}, {"margin"});
  refused({base, "b=" + base, "--json=" + report().string()}, {"report.html"});
  refused({base, "b=/nonexistent.toml"}, {"/nonexistent.toml"});
  refused({base, "b=" + base, "--json=" + base + "/seed-1/run.json"}, {"run.json", "belongs to a run"});
  refused({base, "b=x.toml stray"}, {"stray"});
}

TEST_F(Compare, TrainsWhatIsNotThere) {
  const std::string tiny = config(), runs = scratch_ / "runs";
  const std::vector<std::string> arguments = {
      "bf16=" + tiny, "fp32=" + tiny + " --training.mixed_precision_param=float32", "--seeds=2", "--runs=" + runs};
  Finished finished = compare(arguments);
  ASSERT_EQ(finished.status, 0) << finished.output;
  // Both sides train their first seed before either trains its second.
  const std::size_t first = finished.output.find("run 2 of 4: fp32, seed 1: training"),
                    second = finished.output.find("run 3 of 4: bf16, seed 2: training");
  EXPECT_LT(first, second) << finished.output;
  EXPECT_NE(second, std::string::npos);
  EXPECT_EQ(json()["seeds"], 2);
  // 6 steps of 2 x 32 tokens are too few for a verdict.
  EXPECT_EQ(verdict(), "too short to say");
  EXPECT_THAT(finished.output, HasSubstr("fp32 against bf16: too short to say: 384 tokens (enough: 100000), 0 steps"));
  EXPECT_EQ(json()["differences"][0]["key"], "training.mixed_precision_param");
  EXPECT_THAT(read_text_file(fs::path(runs) / "bf16" / "seed-1" / "train.log"), HasSubstr("step 6"));

  // The same command finds all runs and trains none. A comparison of the runs' folders gives the same report.
  finished = compare(arguments);
  EXPECT_EQ(finished.status, 0);
  EXPECT_THAT(finished.output, AllOf(Not(HasSubstr("training, log")), HasSubstr("is there")));
  const nlohmann::json started = json();
  EXPECT_EQ(compare({runs + "/bf16", runs + "/fp32"}).status, 0);
  EXPECT_EQ(json()["sides"], started["sides"]);

  // One side is finished and the other is to be trained. The trained side takes the seeds of the finished one.
  finished = compare({runs + "/bf16/seed-2", "again=" + tiny, "--runs=" + runs});
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_THAT(finished.output,
              AllOf(HasSubstr("run 1 of 1: again, seed 2"), HasSubstr("so far the losses are the same")));

  // A run that lost its last metrics and its checkpoint resumes, here from the start.
  const fs::path half = fs::path(runs) / "again" / "seed-2";
  const std::string metrics = read_text_file(half / "metrics.jsonl");
  data::write_file(half / "metrics.jsonl", metrics.substr(0, metrics.size() / 2));
  fs::remove_all(half / "checkpoint");
  finished = compare({runs + "/bf16/seed-2", "again=" + tiny, "--runs=" + runs});
  EXPECT_THAT(finished.output, AllOf(HasSubstr("again, seed 2: training"), HasSubstr("the losses are the same")));

  // The command does not take another run in a folder of the same name for the planned one.
  finished = compare(
      {"bf16=" + tiny + " --optimizer.lr=0.01", "x=" + tiny + " --optimizer.lr=0.01", "--seeds=1", "--runs=" + runs});
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output, AllOf(HasSubstr("bf16/seed-1"), HasSubstr("another run"), HasSubstr("optimizer.lr")));
}

TEST_F(Compare, ChecksBeforeItTrains) {
  const std::string tiny = config();
  const Finished finished = compare({"a=" + tiny, "b=" + tiny + " --training.steps=7"});
  EXPECT_EQ(finished.status, 2);
  EXPECT_THAT(finished.output,
              AllOf(HasSubstr("training.steps"), HasSubstr("6"), HasSubstr("7"), Not(HasSubstr("run 1"))));
}

/// The command finds all of these mistakes before it starts the first run.
TEST_F(Compare, ChecksRunsAndRecipesBeforeItTrains) {
  const std::string tiny = config(), runs = scratch_ / "runs";
  const auto refused = [&](const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    const Finished finished = compare(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
    EXPECT_THAT(finished.output, Not(HasSubstr("run 1")));
    EXPECT_FALSE(fs::exists(scratch_ / "out" / "report-runs"));
  };
  const std::string start = "a=" + tiny;
  refused({start, "b=" + tiny + " --training.mixed_precision_param=float32", "--margin=0"}, {"margin"});
  const std::string unwritable = (scratch_ / std::string(252, 'r')).string();  // too long with ".tmp"
  refused({start, "b=" + tiny + " --training.mixed_precision_param=float32", "--json=" + unwritable},
          {"cannot create"});
  refused({start, "b=" + tiny + " --model.converters=quantize.linear.mx --quantize.linear.mx.filter_fqns=nothing"},
          {"nothing"});
  refused({start, "b=" + tiny + " --parallelism.tensor_parallel_degree=2"}, {"tensor_parallel_degree"});
  PlantedRun{.steps = 1000, .last_step = 10}.write(scratch_ / "unfinished");
  refused({scratch_ / "unfinished", start}, {"is not finished"});
  // Another run is in the folder of the last planned run.
  PlantedRun{.seed = 2}.write(fs::path(runs) / "b" / "seed-2");
  refused({start, "b=" + tiny + " --training.mixed_precision_param=float32", "--seeds=2", "--runs=" + runs},
          {"b/seed-2", "another run"});
}

/// The program trains normally. It then edits the metrics of one run as if its loss had become infinite.
TEST_F(Compare, ARunThatBreaksDownDoesNotEndTheComparison) {
  const std::string tiny = config();
  const fs::path program = app_test::write_script(scratch_ / "program.sh", fmt::format(R"('{}' "$@" || exit $?
for word in "$@"; do
  case "$word" in --job.dump_folder=*/low/seed-1)
    metrics="${{word#*=}}/metrics.jsonl"
    head -n 3 "$metrics" | sed '3s/"loss":[^,]*/"loss":null/' > "$metrics.new" && mv "$metrics.new" "$metrics"
    exit 71  # ExitStatus::kNonFinite
  esac
done
)",
                                                                                       TESSERA_BINARY));
  const volatile StopRequest none;
  const LaunchOptions options{.folder = scratch_ / "runs", .num_seeds = 2, .program = program};
  const std::string low = "low=" + tiny + " --training.mixed_precision_param=float32";
  std::vector<SideSpec> specs = {parse_side("base=" + tiny), parse_side(low)};
  EXPECT_EQ(train_missing_runs(specs, options, none), 0);
  EXPECT_TRUE(fs::exists(scratch_ / "runs" / "low" / "seed-2" / "metrics.jsonl"));
  const Comparison comparison = compare_sides(read_sides(specs), kDefaultMargin);
  EXPECT_EQ(comparison.sides[1].verdict->text, "worse: the loss is not finite at step 3 (seed 1)");
  // The second call does not train the broken run again.
  const std::string log = read_text_file(scratch_ / "runs" / "low" / "seed-1" / "train.log");
  specs = {parse_side("base=" + tiny), parse_side(low)};
  EXPECT_EQ(train_missing_runs(specs, options, none), 0);
  EXPECT_EQ(read_text_file(scratch_ / "runs" / "low" / "seed-1" / "train.log"), log);
  // A broken run cannot be the baseline: it leaves nothing to compare with.
  specs = {parse_side(low), parse_side("base=" + tiny)};
  expect_error([&] { train_missing_runs(specs, options, none); }, {"baseline", "step 3 of seed 1"});
}

TEST_F(Compare, AMistypedSideNamesWhatWasMeant) {
  const std::string tiny = config();
  const auto refused = [&](const std::vector<std::string>& words, const std::vector<std::string>& parts) {
    std::vector<std::string> arguments = {"a=" + tiny};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const Finished finished = compare(arguments);
    EXPECT_EQ(finished.status, 2) << finished.output;
    for (const std::string& part : parts) EXPECT_THAT(finished.output, HasSubstr(part));
  };
  refused({"b=" + tiny + " --training.stpes=7"}, {"'training.stpes'", "did you mean 'training.steps'?"});
  refused({"b=" + tiny + " -training.steps=7"}, {"'-training.steps=7'", "did you mean '--training.steps=7'?"});
  refused({"b=" + tiny + " training.steps=7"}, {"did you mean '--training.steps=7'?"});
  refused({"b=" + tiny + " --training.steps 7"}, {"unexpected '7'", "did you mean '--training.steps=7'?"});
  refused({"b=" + tiny + " --training.steps=7 \"--training.seq_len=8"}, {"a quote is not closed"});
  refused({"b=tiny.tml"}, {"there is no folder 'tiny.tml'", "a configuration (.toml)"});
  refused({"b=" + tiny, "--training.steps=7"},
          {"'--training.steps=7' belongs to no side", "in quotes", "\"b=" + tiny + " --training.steps=7\""});
  refused({"b=" + tiny, "--sead=7"}, {"unknown option '--sead'", "--help"});
}

TEST_F(Compare, OutputIsAnotherNameOfOut) {
  const std::string base = side("base", 1, [](auto, auto) { return 1.0; });
  const std::string other = side("other", 1, [](auto, auto) { return 1.0; });
  const Finished finished =
      Process(scratch_, {"compare", base, other, "--output=" + (scratch_ / "alias.html").string()}).finish();
  EXPECT_EQ(finished.status, 0) << finished.output;
  EXPECT_TRUE(fs::exists(scratch_ / "alias.html"));
}

TEST_F(Compare, LongConfigurationsAreSides) {
  const std::string list(400, 'x'), other = list + "y";
  const SideSpec side = parse_side("low=a.toml --model.converters=" + list);
  EXPECT_EQ(side.label, "low");
  const std::string label = parse_side("a.toml --model.converters=" + list).label;
  EXPECT_LE(label.size(), 60u);
  EXPECT_NE(parse_side("a.toml --model.converters=" + other).label, label);
}

TEST_F(Compare, ConfigurationsWithSpacesAreQuoted) {
  const SideSpec side = parse_side(R"(a="/my runs/a.toml" "--job.description=two words" --training.steps=2)");
  EXPECT_EQ(side.label, "a");
  EXPECT_EQ(side.config, "/my runs/a.toml");
  EXPECT_EQ(side.overrides, (std::vector<std::string>{"--job.description=two words", "--training.steps=2"}));
}

TEST_F(Compare, TheCommandInTheReportCanBeRunAgain) {
  const std::string base = side("base", 1, [](auto, auto) { return 1.0; });
  const std::string odd = side("it's $HOME", 1, [](auto, auto) { return 1.0; });
  const fs::path other = scratch_ / "other.json";
  ASSERT_EQ(compare({base, "b=" + odd, "--json=" + other.string()}).status, 0);
  const std::string command = nlohmann::json::parse(read_text_file(other))["command"];
  EXPECT_THAT(command, HasSubstr("'b=" + (scratch_ / "it'\\''s $HOME").string() + "'"));
  EXPECT_THAT(command, HasSubstr(" --json " + other.string()));
}

/// The first signal asks the child to save, and the child removes its handler. The second signal ends the child.
TEST_F(Compare, EverySignalReachesTheChild) {
  StopRequest request;
  volatile StopRequest& stop = request;
  const std::filesystem::path log = scratch_ / "child.log";
  const std::string script = "trap 'trap - INT; echo saving' INT; echo ready; while :; do sleep 0.02; done";
  const pid_t child = spawn("/bin/sh", {"-c", script}, {.log = log});
  std::thread sender([&] {
    const auto wait_for_text = [&](const std::string& text) {
      for (int i = 0; i < 6000 && read_text_file(log).find(text) == std::string::npos; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    };
    wait_for_text("ready");
    stop.signal = SIGINT;
    stop.count = 1;
    wait_for_text("saving");
    stop.count = 2;
  });
  EXPECT_EQ(wait_for(child, stop), 128 + SIGINT);
  sender.join();
  EXPECT_EQ(read_text_file(log), "ready\nsaving\n");
}

TEST_F(Compare, ARunThatFailsShowsItsLog) {
  const std::string tiny = config();
  fs::resize_file(scratch_ / "dataset" / "train-00000.tokens", 100);
  const Finished finished = compare({"a=" + tiny, "b=" + tiny, "--seeds=1"});
  EXPECT_EQ(finished.status, 2) << finished.output;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("'a' with debug.seed = 1 failed with exit status 2"),
                                     HasSubstr("report-runs/a/seed-1/train.log"), HasSubstr("train-00000.tokens")));
}

TEST_F(Compare, ASignalWithoutCheckpointsDoesNotClaimToSave) {
  const std::string side = config() + " --training.steps=100000 --checkpoint.enable=false";
  const fs::path run = scratch_ / "out" / "report-runs" / "a" / "seed-1";
  const Process process(scratch_, {"compare", "a=" + side, "b=" + side, "--seeds=1", "--out=" + report().string()});
  wait_for_steps(run);
  process.send(SIGINT);
  const Finished stopped = process.finish();
  EXPECT_EQ(stopped.status, 128 + SIGINT) << stopped.output;
  EXPECT_THAT(stopped.output, AllOf(HasSubstr("the run ends; a second signal ends it at once"),
                                    HasSubstr("the same command trains this run from step 1 again")));
}

/// A terminal that closes (SIGHUP) has the same effect as SIGTERM.
TEST_F(Compare, ASignalSavesAndTheSameCommandGoesOn) {
  const std::string tiny = config();
  for (const auto& [signal, told] : {std::pair{SIGINT, SIGINT}, {SIGHUP, SIGTERM}}) {
    fs::remove_all(scratch_ / "out");
    const std::vector<std::string> arguments = {"compare", "a=" + tiny + " --training.steps=60 --model.args.n_layers=4",
                                                "b=" + tiny + " --training.steps=60 --model.args.n_layers=4",
                                                "--seeds=1", "--out=" + report().string()};
    const fs::path run = scratch_ / "out" / "report-runs" / "a" / "seed-1";
    {
      const Process process(scratch_, arguments);
      wait_for_steps(run);
      process.send(signal);
      const Finished stopped = process.finish();
      ASSERT_EQ(stopped.status, 128 + told) << stopped.output;
      EXPECT_THAT(stopped.output, AllOf(HasSubstr("the run saves and ends; a second signal ends it at once"),
                                        HasSubstr("the same command goes on")));
    }
    EXPECT_TRUE(fs::exists(run / "checkpoint"));
    EXPECT_THAT(read_text_file(run / "train.log"), HasSubstr(fmt::format("stopped by signal {}", told)));
    const Finished finished = Process(scratch_, arguments).finish();
    ASSERT_EQ(finished.status, 0) << finished.output;
    EXPECT_THAT(read_text_file(run / "train.log"), HasSubstr("resumed from"));
    EXPECT_THAT(finished.output, AllOf(HasSubstr("b against a: too short to say: 3840 tokens"),
                                       HasSubstr("so far the losses are the same")));
  }
}

}  // namespace
}  // namespace tessera
