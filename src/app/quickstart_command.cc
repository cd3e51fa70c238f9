// `tessera quickstart` runs the commands of a first project, one after the other, in one folder. Every stage prints the
// command that it runs as a child process, so that people can run it themselves.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cli/signals.h"
#include "app/quickstart_text.h"
#include "base/error.h"
#include "base/file.h"
#include "base/stopwatch.h"
#include "base/text.h"
#include "comm/transport/mpi_transport.h"
#include "system/child_process.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "quickstart.toml";  // marks a folder that quickstart has made
constexpr int kNumStages = 6;

/// Returns a path as a string of TOML and JSON.
std::string quoted(const fs::path& path) { return nlohmann::json(path.string()).dump(); }

/// Returns the configuration of a model with 2 million parameters, whose steps take some 0.1 s on two cores.
std::string config_text(const fs::path& folder, std::int64_t num_steps) {
  return fmt::format(
      R"(# Made by `tessera quickstart`. docs/config.md explains every key.

[job]
dump_folder = {}

[model.args]
vocab_size = 1024
dim = 128
inter_dim = 384
moe_inter_dim = 96
n_layers = 4
n_heads = 4
num_experts = 8
num_shared_experts = 1
top_k = 2
kv_lora_rank = 64
qk_nope_head_dim = 32
qk_rope_head_dim = 32
v_head_dim = 32

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = {}

[training]
dataset_path = {}
device = "cpu"
local_batch_size = 8
seq_len = 128
steps = {}

[validation]
enable = true
freq = {}
steps = 4

[checkpoint]
enable = true
interval = {}
keep_latest_k = 1

[metrics]
log_freq = {}
)",
      quoted(folder / "run"), std::max<std::int64_t>(1, num_steps / 20), quoted(folder / "data"), num_steps,
      std::max<std::int64_t>(1, num_steps / 4), num_steps, std::max<std::int64_t>(1, num_steps / 20));
}

/// Ends quickstart before its last stage, because of a child's exit status or a signal.
class Ended : public std::exception {
 public:
  explicit Ended(int status) : status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

class Quickstart {
 public:
  Quickstart(const std::string& out, double seconds, bool opens_report)
      : folder_(out), seconds_(seconds), opens_report_(opens_report) {}

  /// Runs all stages. Returns the exit status.
  int run() {
    require(!launched_by_mpi(), "quickstart is one process; start it without mpirun or srun");
    const bool is_new = !fs::exists(folder_) || (fs::is_directory(folder_) && fs::is_empty(folder_));
    require(is_new || fs::exists(folder_ / kConfigName),
            "'{}' exists and was not made by quickstart; expected a new folder (--out FOLDER)", folder_.string());
    require(is_utf8(folder_.string()), "--out is '{}', which is not UTF-8: a configuration cannot have that name",
            printable(folder_.string()));
    require(is_new || read_text_file(folder_ / kConfigName).find(quoted(folder_ / "run")) != std::string::npos,
            "'{}' was made under another name or from another folder, which its configuration has: go there, or take "
            "another --out",
            folder_.string());
    create_folder(folder_);
    if (fs::exists(folder_ / kTimingName)) keep_seconds();
    if (!is_new) std::cout << fmt::format("'{}' is there: what is done is not done again\n", folder_.string());
    if (is_new) write_whole_file(folder_ / kConfigName, config_text(folder_, 100));
    try {
      run_stages();
    } catch (const Ended& ended) {
      if (stop_.count == 0) return ended.status();
      std::cout << fmt::format("\nstopped; `tessera quickstart --out {} --seconds {:g}` goes on from here\n",
                               shell_word(folder_.string()), seconds_);
      return 128 + stop_.signal;
    }
    return 0;
  }

 private:
  void run_stages() {
    const std::string config = folder_ / kConfigName, run = folder_ / "run";
    begin_stage("what this machine computes with");
    start({"doctor"});

    begin_stage("data: Tessera's own documentation, a tokenizer of 1024 pieces, token shards");
    prepare_data();

    begin_stage(fmt::format("training for about {:.0f} s", seconds_));
    if (!fs::exists(folder_ / kTimingName)) measure();
    start({"train", config});

    begin_stage("a sample of what the model writes (so short a training gives words, and little sense)");
    start({"generate", "--checkpoint", run, "--prompt", "The experts of a layer", "--max-new-tokens", "60",
           "--temperature", "0.7", "--top-k", "40"});

    begin_stage("does MXFP8 cost anything? two short runs, in bfloat16 and in MXFP8");
    const std::string html = folder_ / "compare.html";
    const std::string short_run =
        fmt::format("{} --training.steps={} --lr_scheduler.warmup_steps=2 --optimizer.lr=1e-3 --checkpoint.no-enable",
                    quoted_config(config), steps_in(seconds_ / 10.0));
    start({"compare", "bf16=" + short_run,
           "mxfp8=" + short_run + " --model.converters=quantize.linear.mx,quantize.grouped_mm.mx", "--seeds=1", "--out",
           html});
    std::cout << "One short run per side cannot tell; docs/results.md has runs that are long enough.\n";

    begin_stage("the run's report");
    start({"report", run});
    if (opens_report_) open_report(folder_ / "run" / "report.html");
    say_what_is_next(config, run);
  }

  void begin_stage(const std::string& what) {
    std::cout << fmt::format("\n[{}/{}] {}\n", ++stage_, kNumStages, what) << std::flush;
  }

  /// Runs this program with these arguments. Throws Ended unless it succeeds.
  void start(const std::vector<std::string>& arguments, const fs::path& log = {}) {
    std::cout << "$ tessera " << shell_line(arguments) << '\n' << std::flush;
    if (stop_.count != 0) throw Ended(128 + stop_.signal);
    const int status = wait_for(spawn("/proc/self/exe", arguments, {.log = log}), stop_);
    if (status != 0 || stop_.count != 0) throw Ended(status);
  }

  void prepare_data() {
    const fs::path text = folder_ / "text.jsonl", model = folder_ / "tokenizer.model", dataset = folder_ / "data";
    if (!fs::exists(text)) write_whole_file(text, documents());
    if (!fs::exists(model)) {
      start({"data", "tokenizer", "--input", text, "--vocab-size", "1024", "--output", model});
    }
    if (!fs::exists(dataset)) {
      start({"data", "prepare", "--input", text, "--tokenizer", model, "--val-fraction", "0.1", "--output", dataset});
    }
  }

  /// Returns a line of JSON per section of the documentation.
  static std::string documents() {
    std::string lines;
    for (std::string_view page : quickstart_pages()) {
      while (!page.empty()) {
        const std::size_t end = std::min(page.find("\n## ", 1), page.size());
        lines += nlohmann::json({{"text", page.substr(0, end)}}).dump() + "\n";
        page.remove_prefix(std::min(end + 1, page.size()));
      }
    }
    return lines;
  }

  /// Measures how long a step takes, and sets the configuration to as many steps as fit the time.
  void measure() {
    const fs::path log = folder_ / "timing.log";
    fs::remove(log);
    start({"bench", "step", folder_ / kConfigName, "--steps=8", "--warmup=2"}, log);
    const std::string output = read_text_file(log);
    write_whole_file(folder_ / kTimingName, output.substr(output.find('{')));
    nlohmann::json timed = timing();
    timed["seconds"] = seconds_;
    write_whole_file(folder_ / kTimingName, timed.dump() + "\n");
    const std::int64_t num_steps = steps_in(seconds_);
    std::cout << fmt::format("a step takes {:.0f} ms: {} steps\n", step_ms(), num_steps);
    write_whole_file(folder_ / kConfigName, config_text(folder_, num_steps));
  }

  /// Takes the time to train from the start that measured the steps. The runs there have been made for that time.
  void keep_seconds() {
    const double before = timing().value("seconds", seconds_);
    if (before != seconds_) {
      std::cout << fmt::format(
          "its runs are of --seconds {:g}, as at its first start; another --out takes other ones\n", before);
    }
    seconds_ = before;
  }

  /// Returns what `tessera bench step` has measured, and the time to train.
  nlohmann::json timing() const {
    auto timing = nlohmann::json::parse(read_text_file(folder_ / kTimingName), nullptr, false);
    const auto is_number = [&](const char* key) { return timing[key].is_number(); };
    require(timing.is_object() && timing.contains("step_ms") && is_number("step_ms") &&
                (!timing.contains("seconds") || is_number("seconds")),
            "'{}' is damaged; remove it, and quickstart measures again", (folder_ / kTimingName).string());
    return timing;
  }

  double step_ms() const { return timing()["step_ms"].get<double>(); }

  std::int64_t steps_in(double seconds) const {
    constexpr double kFewest = 20, kMost = 10'000;
    return std::llround(std::clamp(seconds * 1e3 / step_ms(), kFewest, kMost));
  }

  /// Returns a configuration's path as a word of a side of `tessera compare`.
  static std::string quoted_config(const std::string& path) {
    return path.find(' ') == path.npos ? path : "\"" + path + "\"";
  }

  static void open_report(const fs::path& path) {
    const bool has_display = std::getenv("DISPLAY") != nullptr || std::getenv("WAYLAND_DISPLAY") != nullptr;
    const std::string command = fmt::format("xdg-open {} >/dev/null 2>&1", shell_word(path.string()));
    // NOLINTNEXTLINE(bugprone-command-processor): the path is quoted
    if (!has_display || std::system(command.c_str()) != 0) {
      std::cout << fmt::format("there is no display to open it on: {}\n", path.string());
    }
  }

  void say_what_is_next(const std::string& config, const std::string& run) const {
    std::cout << fmt::format(
        "\nAll of it is in '{}'; it took {:.0f} s. What next:\n"
        "  tessera train {} --training.steps={}   # go on from here\n"
        "  tessera generate --checkpoint {} --prompt 'A rank' --max-new-tokens 100 --seed 1\n"
        "  tessera data prepare --input MY_TEXTS --tokenizer {} --output data/mine\n"
        "  tessera plan memory --model.flavor=16B --ranks 8 --available 80\n"
        "  tessera train --list-keys   # every key of the configuration\n",
        folder_.string(), watch_.seconds(), shell_word(config), 2 * steps_in(seconds_), shell_word(run),
        shell_word((folder_ / "tokenizer.model").string()));
  }

  static constexpr const char* kTimingName = "timing.json";
  fs::path folder_;
  const volatile StopRequest& stop_ = count_stop_signals();
  double seconds_;
  bool opens_report_;
  int stage_ = 0;
  Stopwatch watch_;
};

}  // namespace

void add_quickstart_command(CLI::App& app, int& status) {
  struct Options {
    std::string out = "quickstart";
    double seconds = 60.0;
    bool opens_report = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("quickstart", "See what Tessera does: data, training, text, a report, in minutes");
  command->add_option("--out,--output", options->out, "Folder of all that it makes")->capture_default_str();
  command->add_option("--seconds", options->seconds, "Time to train, about")
      ->check(is_number(1.0, 1e5))
      ->capture_default_str();
  command->add_flag("--open", options->opens_report, "Show the report in the browser");
  command->footer(
      "It needs no GPU and no network, and takes about two minutes on two cores. Started again, it goes on where it\n"
      "was stopped.");
  command->callback(
      [options, &status] { status = Quickstart(options->out, options->seconds, options->opens_report).run(); });
}

}  // namespace tessera
