// Tests mistakes with every command but `data`. Each ends with exit status 2 before the first step and leaves nothing
// in the output folder. The message says what was given, what was expected and what helps.
// tests/app/data_commands_test.cc tests mistakes with `tessera data`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "device/cuda.h"
#include "tests/app/process.h"
#include "tests/data/support.h"
#include "tests/data/tokenizer_json_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using app_test::Finished;
using app_test::obeying_permissions;
using app_test::Process;
using data::TemporaryFolder;
using data::write_file;
using ::testing::AnyOf;
using ::testing::HasSubstr;

using Arguments = std::vector<std::string>;

/// A command line with a mistake. In arguments and messages "@" stands for the test's folder, and "GOLDEN" for the
/// folder of the golden files. The test's folder holds "dataset", a dataset of bytes; "no_val", a dataset without a
/// validation split; and "run", a finished run of 2 steps.
struct Mistake {
  const char* name;
  Arguments arguments;
  Arguments parts;  // parts of the message
};

/// Returns the arguments of a correct run of the small model, followed by `wrong`.
Arguments train(const Arguments& wrong) {
  Arguments arguments = {"train",
                         "--training.dataset_path=@dataset",
                         "--job.dump_folder=@outputs",
                         "--model.args.vocab_size=258",
                         "--model.args.dim=32",
                         "--model.args.n_layers=2",
                         "--model.args.n_heads=2",
                         "--training.seq_len=32",
                         "--training.local_batch_size=2",
                         "--training.steps=2"};
  arguments.insert(arguments.end(), wrong.begin(), wrong.end());
  return arguments;
}

std::vector<Mistake> mistakes_with_words() {
  return {
      {"no command", {}, {"tessera needs a command: quickstart, train,", "--help"}},
      {"a command's typo", {"trian"}, {"'trian'", "did you mean 'train'?"}},
      {"no such command", {"evaluate"}, {"'evaluate'", "there are: quickstart, train, launch"}},
      {"a nested command's typo", {"data", "prepar"}, {"tessera data", "'prepar'", "did you mean 'prepare'?"}},
      {"half a command", {"plan"}, {"tessera plan needs a command: schedule, memory"}},
      {"an option's typo",
       {"generate", "--chekpoint", "@run", "--prompt", "x"},
       {"'--chekpoint'", "did you mean '--checkpoint'?"}},
      {"an option's typo, with '='",
       {"convert", "--to=hf", "--input=@run", "--outptu=@hf"},
       {"'--outptu'", "did you mean '--output'?", "`tessera convert --help`"}},
      {"no such option", {"report", "@run", "--format=pdf"}, {"'--format'", "`tessera report --help` lists all"}},
      {"an option's typo beside keys", train({"--print-confg"}), {"'--print-confg'", "did you mean '--print-config'?"}},
      {"an option's typo in plan",
       {"plan", "memory", "--avilable=20"},
       {"'--avilable'", "did you mean '--available'?"}},
      {"a key's typo", train({"--training.stepz=3"}), {"'training.stepz'", "did you mean 'training.steps'?"}},
      {"a section's typo", train({"--trainig.steps=3"}), {"'trainig.steps'", "did you mean 'training.steps'?"}},
      {"a key in another section", train({"--training.lr=1e-3"}), {"'training.lr'", "did you mean 'optimizer.lr'?"}},
      {"a key without its section", train({"--lr=1e-3"}), {"'lr'", "did you mean 'optimizer.lr'?"}},
      {"the same, with a typo", train({"--stpes=3"}), {"'stpes'", "did you mean 'training.steps'?"}},
      {"the same, and a space", train({"--steps", "3"}), {"'steps'", "did you mean 'training.steps'?"}},
      {"half a key", train({"--batch-size=3"}), {"'batch_size'", "did you mean 'training.local_batch_size'?"}},
      {"no such key", train({"--zzqqzz=3"}), {"'zzqqzz'", "expected section.name", "--list-keys"}},
      {"spaces around '='", train({"--training.steps", "=", "5"}), {"a space before '='", "--training.steps=VALUE"}},
      {"a space behind '='", train({"--training.steps=", "5"}), {"a space behind '='", "expected --training.steps=5"}},
      {"a space in a unit", train({"--training.steps=8 k"}), {"'8 k'", "a whole number, with a unit", "32k"}},
      {"a count that is not whole", train({"--training.steps=1e-3"}), {"'1e-3'", "a whole number, with a unit"}},
      {"below 0", train({"--training.steps=-5"}), {"training.steps is -5", "expected", "more than 0"}},
      {"a boolean for a number", train({"--optimizer.lr=true"}), {"'true'", "number", "4e-4"}},
      {"yes for true", train({"--validation.enable=yes"}), {"'yes'", "true or false"}},
      {"no such choice", train({"--training.mixed_precision_param=fp16"}), {"fp16", "expected one of", "bfloat16"}},
      {"no such shell", {"completion", "fish"}, {"fish", "bash,zsh", "`tessera completion --help`"}},
      {"a count with no such unit",
       {"plan", "memory", "--ranks=8x"},
       {"--ranks", "'8x' is not a count", "a whole number, with a unit", "`tessera plan memory --help`"}},
      {"a count out of range",
       {"generate", "--checkpoint=@run", "--prompt=x", "--max-new-tokens=0"},
       {"--max-new-tokens", "0 is out of range: expected 1 to"}},
      {"a GPU's plan by a program without CUDA, or nothing",
       {"plan", "memory", "--device=gpu"},
       {"training.device", "gpu", "expected one of", "cuda"}},
      {"a ranks' starter without ranks", {"doctor", "--starter-option=-v"}, {"--starter-option requires --cluster"}},
      {"rates without a check that measures", {"health", "check", "--rates=@rates"}, {"--rates requires --active"}},
      {"an expected rate without it", {"health", "check", "--expect-tflops=1"}, {"--expect-tflops requires --active"}},
      {"an expected copy without it", {"health", "check", "--expect-copy=1"}, {"--expect-copy requires --active"}},
      {"the CPU without it", {"health", "check", "--check-on-cpu"}, {"--check-on-cpu requires --active"}},
      {"checkpoints against no failures",
       {"plan", "time", "--minutes-between-checkpoints=5"},
       {"--minutes-between-checkpoints requires --hours-between-failures"}},
      {"restarts without failures",
       {"plan", "time", "--restart-minutes=5"},
       {"--restart-minutes requires --hours-between-failures"}},
      {"a node's name without rates", {"health", "check", "--node=n1"}, {"--node requires --rates"}},
      {"a node's name for a plugin", {"health", "act", "--npd", "--node=n1"}, {"--node requires --slurm"}},
      {"a batch of one prompt",
       {"generate", "--checkpoint=@run", "--prompt=x", "--batch-size=2"},
       {"--batch-size requires --prompts"}},
      {"no margin", {"compare", "a=@run", "b=@run", "--out=@r.html", "--margin=0"}, {"--margin: 0 is not a number"}},
      {"a fraction of more than all",
       {"data", "prepare", "--input=@run", "--tokenizer=bytes", "--output=@x", "--val-fraction=2"},
       {"--val-fraction: 2 is not a number from 0 to 1"}},
      {"a key before the training command",
       {"launch", "train", "--training.steps=100"},
       {"'--training.steps'", "go behind '--', as in -- train CONFIG --training.steps=VALUE"}},
      {"an option as a value",
       {"launch", "--starter-option", "--oversubscribe", "--", "train"},
       {"--starter-option needs a value", "--starter-option=--oversubscribe"}},
      {"more nodes without Slurm",
       {"launch", "--engine=local", "--grow", "--", "train", "--job.dump_folder=@outputs"},
       {"--grow asks Slurm for nodes, but the engine is local"}},
      {"TorchTitan's dry run",
       train({"--comm.mode=fake_backend"}),
       {"comm.mode", "fake_backend", "tessera plan memory"}},
      {"a split of no document", {"data", "inspect", "@dataset", "--split=val"}, {"--split requires --document"}},
      {"a missing option", {"generate", "--prompt=x"}, {"--checkpoint is required", "`tessera generate --help`"}},
  };
}

std::vector<Mistake> mistakes_with_files() {
  return {
      {"no such configuration", {"train", "@small.tml"}, {"no file", "small.tml", "did you mean '", "small.toml"}},
      {"a folder as configuration", {"train", "@dataset"}, {"dataset' is a folder", "expected a configuration"}},
      {"JSON as configuration", {"train", "@config.json"}, {"config.json", "JSON; expected TOML", "\"[training]\""}},
      {"YAML as configuration", {"train", "@config.yaml"}, {"config.yaml", "YAML; expected TOML", "\"steps = 100\""}},
      {"UTF-16", {"train", "@utf16.toml"}, {"utf16.toml", "UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"a binary file", {"train", "@dataset/train-00000.tokens"}, {"binary file", "expected a configuration in TOML"}},
      {"a key twice", {"train", "@twice.toml"}, {"twice.toml:3"}},
      {"a quoted number in TOML", {"train", "@quoted.toml"}, {"quoted.toml:2", "optimizer.lr", "\"1e-3\"", "number"}},
      {"no such dataset",
       train({"--training.dataset_path=@none"}),
       {"none'", "no such folder", "tessera data prepare"}},
      {"no dataset at all",
       train({"--training.dataset_path="}),
       {"training.dataset_path is empty", "tessera data prepare"}},
      {"text for a dataset",
       train({"--training.dataset_path=@config.json"}),
       {"training.dataset_path", "config.json': it is a file", "tessera data prepare"}},
      {"another folder for a dataset", train({"--training.dataset_path=@run"}), {"run'", "no dataset.json"}},
      {"another vocabulary's dataset",
       train({"--model.args.vocab_size=100"}),
       {"token id", "vocabulary size is 100", "258", "at least as large"}},
      {"longer than the dataset",
       train({"--training.seq_len=1000000"}),
       {"tokens, fewer than one sample", "1000001", "shorter sequence"}},
      {"no validation split",
       train({"--training.dataset_path=@no_val", "--validation.enable"}),
       {"no documents in its split 'val'", "a larger --val-fraction", "--validation.enable=false"}},
      {"longer than the validation split",
       train({"--training.seq_len=6000", "--validation.enable"}),
       {"split 'val'", "fewer than one sample", "larger --val-fraction"}},
      {"a file as output", train({"--job.dump_folder=@config.json"}), {"config.json' is a file", "expected a folder"}},
      {"a step of no checkpoint",
       train({"--checkpoint.enable", "--checkpoint.load_step=7"}),
       {"load_step is 7", "holds no"}},
      {"a step without checkpoints", train({"--checkpoint.load_step=7"}), {"load_step is 7", "checkpoint.enable"}},
      {"no such weights", train({"--checkpoint.initial_load_path=@none"}), {"none' is no checkpoint", "expected"}},
      {"Hugging Face files without the flag",
       train({"--checkpoint.initial_load_path=GOLDEN/hf/groups"}),
       {"hf/groups' is a folder of Hugging Face files", "initial_load_in_hf is false"}},
      {"the flag without the files", train({"--checkpoint.initial_load_in_hf"}), {"initial_load_path"}},
      {"the flag for a checkpoint",
       train({"--checkpoint.initial_load_path=@run", "--checkpoint.initial_load_in_hf"}),
       {"is a checkpoint of Tessera", "initial_load_in_hf is true"}},
      {"another model's weights",
       train({"--checkpoint.initial_load_path=@run", "--model.args.dim=64"}),
       {"model.args.dim = 32", "this run has 64"}},
      {"another model in a run's folder",
       train({"--checkpoint.enable", "--model.args.dim=64", "--job.dump_folder=@run"}),
       {"model.args.dim = 32", "this run has 64"}},
      {"a file that no command has",
       {"generate", "--checkpoint", "@none", "--prompt", "x"},
       {"none' is no checkpoint"}},
      {"another tokenizer",
       {"generate", "--checkpoint", "@run", "--prompt", "x", "--tokenizer", "@tokenizer.json"},
       {"tokenizer.json' has ", "with a tokenizer of 258", "leave --tokenizer out"}},
      {"a larger tokenizer than the model's",
       {"generate", "--checkpoint", "GOLDEN/hf/groups", "--prompt", "x", "--tokenizer", "@tokenizer.json"},
       {"tokenizer.json' has 262 tokens", "has 260", "expected the tokenizer that it was trained with"}},
      {"no prompt", {"generate", "--checkpoint", "@run"}, {"--prompt or --prompts is needed"}},
      {"no file of prompts", {"generate", "--checkpoint", "@run", "--prompts", "@none"}, {"none", "No such file"}},
      {"converting to what it is",
       {"convert", "--to=tessera", "--input=@run", "--out=@new"},
       {"is a checkpoint of Tessera already"}},
      {"converting into a file", {"convert", "--to=hf", "--input=@run", "--out=@config.json"}, {"expected a folder"}},
      {"converting to no known form", {"convert", "--to=onnx", "--input=@run", "--out=@new"}, {"onnx", "hf,tessera"}},
      {"a report of no run", {"report", "@dataset"}, {"dataset'", "run"}},
      {"a report into a folder", {"report", "@run", "--out=@dataset"}, {"is a folder; expected the name of a file"}},
      {"comparing a run with itself", {"compare", "@run", "@run", "--out=@c.html"}, {"'first=", "give them names"}},
      {"comparing with no run", {"compare", "@run", "@dataset", "--out=@c.html"}, {"holds no run", "metrics.jsonl"}},
      {"comparing one run", {"compare", "@run", "--out=@c.html"}, {"At least 2 required but received 1"}},
      {"quickstart in another's folder", {"quickstart", "--out=@run"}, {"was not made by quickstart", "--out FOLDER"}},
  };
}

std::vector<Mistake> mistakes_with_sizes() {
  return {
      {"no such model", train({"--model.name=llama"}), {"'llama'", "expected 'deepseek_v3'"}},
      {"no such flavor", train({"--model.flavor=7B"}), {"'7B'", "debugmodel, 16B, 236B, 671B"}},
      {"no such optimizer", train({"--optimizer.name=SGD"}), {"'SGD'", "expected 'AdamW'"}},
      {"a key that is not built", train({"--metrics.enable_wandb"}), {"Weights & Biases", "leave the key out"}},
      {"no such converter",
       train({"--model.converters=quantize.linear.mxfp8"}),
       {"'quantize.linear.mxfp8'", "quantize.linear.mx and quantize.grouped_mm.mx"}},
      {"MXFP8 of an odd size",
       train({"--model.converters=quantize.linear.mx", "--model.args.dim=48"}),
       {"blocks of 32 do not divide", "unaligned = \"bf16\""}},
      {"more experts than there are", train({"--model.args.top_k=9"}), {"top_k is 9", "num_experts = 8"}},
      {"batches that do not divide",
       train({"--training.global_batch_size=3"}),
       {"global_batch_size = 3", "local_batch_size = 2", "nearest that is: 4"}},
      {"a decay beyond the end", train({"--lr_scheduler.decay_ratio=3"}), {"decay_ratio is 3", "expected 0 to 1"}},
      {"very many threads", train({"--training.num_threads=100000"}), {"num_threads is 100000", "0 (from the cores)"}},
      {"tensor parallelism on one rank",
       train({"--parallelism.tensor_parallel_degree=2"}),
       {"1 rank was started", "needs 2 ranks", "-np 2 "}},
      {"a degree that does not divide the experts",
       train({"--parallelism.expert_parallel_degree=3"}),
       {"expert_parallel_degree is 3", "num_experts = 8", "nearest possible: 2 and 4"}},
      {"a degree that does not divide the heads",
       train({"--parallelism.tensor_parallel_degree=3"}),
       {"tensor_parallel_degree is 3", "n_heads = 2", "nearest possible: 2"}},
      {"a sequence that does not divide",
       train({"--parallelism.tensor_parallel_degree=2", "--training.seq_len=33"}),
       {"seq_len is 33", "32 and 34"}},
      {"too few micro-batches",
       train({"--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=DualPipeV",
              "--model.args.n_layers=8"}),
       {"the number of micro-batches is 2, expected 4 or more", "training.global_batch_size"}},
      {"more than the memory",
       train({"--model.args.n_layers=61", "--model.args.dim=7168", "--model.args.num_experts=256",
              "--model.args.moe_inter_dim=2048"}),
       {"the run needs", "of memory on this machine", "take more ranks"}},
      {"ranks below 1", {"plan", "memory", "--ranks=0"}, {"--ranks", "expected 1 to"}},
      {"a plan without the ranks of its mesh",
       {"plan", "memory", "--parallelism.tensor_parallel_degree=4"},
       {"--ranks is 1", "needs 4 ranks or a multiple", "expected --ranks 4"}},
      {"a plan of a degree of 0",
       {"plan", "memory", "--parallelism.tensor_parallel_degree=0", "--parallelism.expert_parallel_degree=0"},
       {"tensor_parallel_degree is 0", "nearest possible: 1"}},
      {"a launch of a degree of 0",
       {"launch", "--", "train", "--parallelism.tensor_parallel_degree=0", "--parallelism.expert_parallel_degree=0"},
       {"tensor_parallel_degree is 0", "nearest possible: 1"}},
      {"no such device", {"plan", "memory", "--device=tpu"}, {"tpu", "expected one of auto, cpu, cuda"}},
      {"no such schedule",
       {"plan", "schedule", "--schedule=GPipe", "--ranks=2", "--micro-batches=4"},
       {"'GPipe'", "1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV"}},
      {"no steps to time", {"bench", "step", "--steps=0"}, {"--steps", "0 is out of range: expected 1 to"}},
      {"no type of numbers", {"generate", "--checkpoint=@run", "--prompt=x", "--dtype=fp8"}, {"fp8", "bfloat16"}},
      {"no time to train", {"quickstart", "--seconds=0"}, {"--seconds", "from 1"}},
  };
}

class Mistakes : public ::testing::Test {
 protected:
  void SetUp() override {
    data::make_dataset(scratch_, 400, 3000, 0.1);
    write_file(scratch_ / "config.json", "{\"training\": {\"steps\": 3}}\n");
    write_file(scratch_ / "config.yaml", "# a comment\n\ntraining:\n  steps: 3\n");
    write_file(scratch_ / "utf16.toml", std::string("\xFF\xFE[\0t\0]\0", 8));
    write_file(scratch_ / "twice.toml", "[training]\nsteps = 3\nsteps = 4\n");
    write_file(scratch_ / "quoted.toml", "[optimizer]\nlr = \"1e-3\"\n");
    write_file(scratch_ / "small.toml", "[training]\nsteps = 3\n");
    write_file(scratch_ / "tokenizer.json", data::small_tokenizer().dump());
    write_file(scratch_ / "a.txt", std::string(1000, 'a'));
    const Arguments prepare = {"data",          "prepare",         "--input=@a.txt", "--tokenizer=bytes",
                               "--out=@no_val", "--val-fraction=0"};
    ASSERT_EQ(run(prepare).status, 0);
    const Finished trained = run(train({"--job.dump_folder=@run", "--checkpoint.enable"}));
    ASSERT_EQ(trained.status, 0) << trained.output;
  }

  std::string in_scratch(std::string text) const {
    if (const std::size_t at = text.find('@'); at != text.npos) text.replace(at, 1, scratch_.path().string() + "/");
    if (const std::size_t at = text.find("GOLDEN"); at != text.npos) {
      text.replace(at, 6, std::string(TESSERA_TEST_DATA) + "/golden");
    }
    return text;
  }
  Process start(Arguments arguments, const Arguments& launcher = {}) const {
    for (std::string& argument : arguments) argument = in_scratch(argument);
    return {scratch_, arguments, RLIM_INFINITY, launcher};
  }
  Finished run(const Arguments& arguments) const { return start(arguments).finish(); }

  void expect_refused(const std::vector<Mistake>& mistakes, const Arguments& launcher = {}) const {
    for (const Mistake& mistake : mistakes) {
      const Finished finished = start(mistake.arguments, launcher).finish();
      EXPECT_EQ(finished.status, 2) << mistake.name << '\n' << finished.output;
      for (const std::string& part : mistake.parts) EXPECT_THAT(finished.output, HasSubstr(part)) << mistake.name;
      EXPECT_FALSE(fs::exists(scratch_ / "outputs" / "metrics.jsonl")) << mistake.name;
      for (const char* made : {"new", "c.html"}) EXPECT_FALSE(fs::exists(scratch_ / made)) << mistake.name;
      fs::remove_all(scratch_ / "outputs");
    }
  }

  TemporaryFolder scratch_;
};

TEST_F(Mistakes, WithWordsAreTold) { expect_refused(mistakes_with_words()); }
TEST_F(Mistakes, WithFilesAreTold) { expect_refused(mistakes_with_files()); }
TEST_F(Mistakes, WithSizesAreTold) { expect_refused(mistakes_with_sizes()); }

TEST_F(Mistakes, AGpuThatIsNotThereIsTold) {
  if (cuda::available()) GTEST_SKIP() << "there is a GPU";
  expect_refused(
      {{"a GPU for training", train({"--device=cuda"}), {"training.device is cuda", cuda::why_unavailable()}},
       {"a GPU for a table", {"bench", "gemm"}, {"no GPU", cuda::why_unavailable()}}});
}

TEST_F(Mistakes, ADatasetWithoutPermissionIsTold) {
  const auto launcher = obeying_permissions();
  if (!launcher) GTEST_SKIP() << "this root ignores permissions, and may not give that up";
  fs::permissions(scratch_ / "dataset" / "train-00000.tokens", fs::perms::none);
  expect_refused({{"unreadable", train({}), {"train-00000.tokens", "Permission denied"}}}, *launcher);
}

TEST_F(Mistakes, TwoRunsInOneFolderAreTold) {
  const Process first = start(train({"--training.steps=1000000"}));
  first.wait_for_output("step ");
  fs::rename(scratch_ / "log.txt", scratch_ / "first_log.txt");  // the second run writes log.txt, too
  const Finished second = run(train({"--training.steps=1000000"}));
  EXPECT_EQ(second.status, 2) << second.output;
  EXPECT_THAT(second.output, AnyOf(HasSubstr("process"), HasSubstr("job.dump_folder")));
  first.send(SIGKILL);
  first.finish();
}

TEST_F(Mistakes, CtrlCEndsAConversionAndLeavesNothing) {
  ASSERT_EQ(run(train({"--job.dump_folder=@large", "--checkpoint.enable", "--model.args.vocab_size=200000",
                       "--training.steps=1"}))
                .status,
            0);
  const Arguments convert = {"convert", "--to=hf", "--input=@large", "--form=remote-code", "--out=@new"};
  int status = 0;
  for (int attempt = 0; attempt < 20 && status == 0; ++attempt) {  // the conversion may end before the signal arrives
    fs::remove_all(scratch_ / "new");
    const Process process = start(convert);
    for (int i = 0; i < 10'000 && !fs::exists(scratch_ / "new.tmp") && !fs::exists(scratch_ / "new"); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.send(SIGINT);
    status = process.finish().status;
  }
  EXPECT_EQ(status, 130);
  EXPECT_FALSE(fs::exists(scratch_ / "new"));
  EXPECT_FALSE(fs::exists(scratch_ / "new.tmp"));
}

/// The program accepts other spellings that people use. Each means the same as the documented one.
TEST_F(Mistakes, OtherSpellingsAreTaken) {
  const auto config = [&](const Arguments& more) {
    Arguments arguments = {"train", "--print-config"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = run(arguments);
    EXPECT_EQ(finished.status, 0) << finished.output;
    return finished.output;
  };
  const std::string expected = config({"--training.device=cpu", "--training.steps=10000"});
  EXPECT_EQ(config({"--device", "cpu", "--training.steps", "10k"}), expected);
  EXPECT_EQ(config({"--device=cuda", "--training.device", "cpu", "--training.steps=10k"}), expected);
  write_file(scratch_ / "units.toml", "[training]\nsteps = \"10k\"\ndevice = \"cpu\"\n");
  EXPECT_EQ(config({"@units.toml"}), expected);
  EXPECT_EQ(config({"--config", "@units.toml"}), expected);
  write_file(scratch_ / "bom.toml", "\xEF\xBB\xBF[training]\nsteps = 10000\ndevice = \"cpu\"\n");
  EXPECT_EQ(config({"@bom.toml"}), expected);
  const Finished svg = run({"plan", "schedule", "--schedule=1F1B", "--ranks=2", "--micro-batches=4", "--out=@a.svg"});
  EXPECT_EQ(svg.status, 0) << svg.output;
  EXPECT_TRUE(fs::exists(scratch_ / "a.svg"));
  const Arguments convert = {"convert", "--to=hf", "--input=@run", "--form=remote-code", "--out=@hf"};
  EXPECT_EQ(run(convert).status, 0);
  EXPECT_TRUE(fs::exists(scratch_ / "hf" / "config.json"));
}

TEST_F(Mistakes, BashCompletesCommandsOptionsKeysAndValues) {
  const Finished script = run({"completion", "bash"});
  ASSERT_EQ(script.status, 0);
  write_file(scratch_ / "completion.bash", script.output);
  write_file(scratch_ / "try.bash",
             "source \"$1\"\nshift\ncompopt() { :; }\nCOMP_WORDS=(\"$@\")\nCOMP_CWORD=$(($# - 1))\n_tessera\n"
             "echo \"${COMPREPLY[*]}\"\n");
  const auto completed = [&](const std::string& words) {
    const fs::path output = scratch_ / "completed.txt";
    // NOLINTNEXTLINE(bugprone-command-processor)
    EXPECT_EQ(std::system(fmt::format("bash '{}' '{}' {} > '{}'", (scratch_ / "try.bash").string(),
                                      (scratch_ / "completion.bash").string(), words, output.string())
                              .c_str()),
              0);
    return read_text_file(output);
  };
  EXPECT_EQ(completed("tessera tr"), "train\n");
  EXPECT_EQ(completed("tessera data ''"), "tokenizer prepare inspect\n");
  EXPECT_EQ(completed("tessera data prepare --in"), "--input=\n");
  EXPECT_EQ(completed("tessera train --training.st"), "--training.steps=\n");
  EXPECT_EQ(completed("tessera train --training.device = c"), "cpu cuda\n");
  EXPECT_EQ(completed("tessera train --checkpoint.enable ="), "true false\n");
  EXPECT_EQ(completed("tessera train my"), "\n");  // bash then completes file names
}

}  // namespace
}  // namespace tessera
