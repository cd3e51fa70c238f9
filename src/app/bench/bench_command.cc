#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "app/bench/gpu_tables.h"
#include "app/cli/commands.h"
#include "app/cli/config_arguments.h"
#include "app/cli/on_ranks.h"
#include "app/cli/option_checks.h"
#include "app/cli/output_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/median.h"
#include "ops/cpu/kernels.h"
#include "ops/runtime/kernel_profile.h"
#include "plan/measure/calibrate.h"
#include "plan/measure/calibrate_ranks.h"
#include "plan/measure/random_steps.h"
#include "plan/measure/step_comparison.h"
#include "plan/run_forecast.h"
#include "run/rank_setup.h"
#include "run/record/metrics.h"
#include "run/world_run.h"
#include "step/training_step.h"
#include "system/progress_bar.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

const auto kLoaded = std::chrono::steady_clock::now();  // when the program was loaded

struct StepOptions {
  std::int64_t steps = 10;
  std::int64_t warmup = 3;
  std::string trace;
  bool kernels = false;
  std::string calibration, cluster, routing;
  std::string cpu_kernels;
};

double idle_share(const cuda::KernelSummary& summary) {
  return static_cast<double>(summary.span - summary.busy) / static_cast<double>(summary.span);
}

/// Prints what the GPU did in a step, in milliseconds, with a line per kernel.
void print_kernels(const cuda::KernelSummary& summary) {
  const auto ms = [](std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-6; };
  std::cerr << fmt::format("{:>9} {:>6} {:>6} {:>8}  kernel\n", "ms", "%", "runs", "idle ms");
  for (const cuda::KernelTime& kernel : summary.kernels) {
    std::cerr << fmt::format("{:9.3f} {:6.2f} {:6} {:8.3f}  {}\n", ms(kernel.nanoseconds),
                             100.0 * ms(kernel.nanoseconds) / ms(summary.span), kernel.num_runs, ms(kernel.idle_before),
                             kernel.name);
  }
  std::cerr << fmt::format("{:9.3f} ms from the first to the last, {:.3f} ms of them ({:.2f} %) idle\n",
                           ms(summary.span), ms(summary.span - summary.busy), 100.0 * idle_share(summary));
}

constexpr int kTimedSteps = 3;  // whose operators are compared with their predictions

/// Says what a step was predicted to take, and the operators of one that was made.
struct Compared {
  double predicted_seconds = 0.0;
  std::vector<ComparedOperators> operators;
  double other_seconds = 0.0;  // of what a GPU ran besides operators
};

/// Holds the rates of which a step is predicted: those of this CPU, or of a cluster of GPUs.
struct Rates {
  std::optional<Calibration> calibration = {};
  std::optional<Cluster> cluster = {};
  RoutingKind routing;  // on the cluster
};

Rates read_rates(const StepOptions& options, const JobConfig& config) {
  Rates rates{.routing = options.routing.empty() ? default_routing(config) : routing_kind(options.routing)};
  if (!options.calibration.empty()) rates.calibration = read_calibration(options.calibration);
  if (!options.cluster.empty()) rates.cluster = read_cluster(options.cluster);
  return rates;
}

Compared compare(const Rates& rates, const JobConfig& config, const Mesh& mesh, const RandomSteps::Timed& timed) {
  if (rates.calibration) {
    const auto predict = [&](const RecordedOperator& call) { return rates.calibration->time_of(call); };
    return {forecast_on_cpu(config, mesh.degrees, *rates.calibration).seconds,
            compare_operators(timed.operators, predict), 0.0};
  }
  const RunForecast forecast = forecast_run({config, Device::kCuda, mesh.degrees}, *rates.cluster, rates.routing);
  const auto predict = [&](const RecordedOperator& call) {
    OperatorTime time = rates.cluster->time_of(call);
    const auto pp = static_cast<std::size_t>(mesh.place.pp);
    if (is_product_or_attention(call.name)) time.seconds *= forecast.slowed_by_links[pp];
    return time;
  };
  return {forecast.seconds, compare_operators(timed.operators, predict), timed.other_seconds};
}

/// Prints predicted and measured times in milliseconds, with a line per group of operators.
void print_comparison(const Compared& compared, double step_seconds) {
  const auto print = [](std::string_view calls, double predicted, double measured, std::string_view name) {
    std::cerr << fmt::format("{:>8} {:>14.3f} {:>14.3f} {:>+14.3f}  {}\n", calls, predicted * 1e3, measured * 1e3,
                             (predicted - measured) * 1e3, name);
  };
  std::cerr << fmt::format("{:>8} {:>14} {:>14} {:>14}  {}\n", "calls", "predicted, ms", "measured, ms", "difference",
                           "operator");
  double predicted = 0.0, measured = 0.0;
  for (const ComparedOperators& group : compared.operators) {
    print(fmt::to_string(group.num_calls), group.predicted, group.measured, group.name);
    predicted += group.predicted;
    measured += group.measured;
  }
  print("", predicted, measured, "all operators of this rank");
  if (compared.other_seconds > 0.0) {
    std::cerr << fmt::format("{:>8} {:>14} {:>14.3f} {:>14}  what the GPU ran besides\n", "", "",
                             compared.other_seconds * 1e3, "");
  }
  print("", compared.predicted_seconds, step_seconds, "step");
}

JobConfig read_config(const StepOptions& options, const ConfigArguments& arguments) {
  constexpr std::int64_t kMost = 1'000'000'000;
  require(0 < options.steps && options.steps <= kMost && 0 <= options.warmup && options.warmup <= kMost,
          "--steps is {}, --warmup is {}; expected a number above 0, and 0 or more, up to {}", options.steps,
          options.warmup, kMost);
  require(options.calibration.empty() || options.cluster.empty(),
          "give one of --calibration, for a CPU, and --cluster, for GPUs");
  require(options.routing.empty() || !options.cluster.empty(), "--routing needs --cluster");
  JobConfig config = arguments.read();
  config.training.steps = options.warmup + options.steps;
  config.validate();
  return config;
}

/// Makes this process use the kernels of that name. An empty name keeps those of this processor.
void use_cpu_kernels(const std::string& name) {
  if (name.empty()) return;
  const cpu::KernelTable* table = cpu::kernels_named(name.c_str());
  require(table != nullptr,
          "--cpu-kernels is \"{}\"; expected baseline, or, if this processor has it, avx512 or avx512_bf16", name);
  cpu::use_kernels(table);
}

struct MeasuredSteps {
  double seconds, forward, backward;  // the median of the steps; the means of their phases
  double first_step_seconds;          // from the load of the program to the end of the first step
  double first_loss, last_loss;
};

/// Returns the line of JSON that reports the measured steps.
nlohmann::ordered_json line_of(const MeasuredSteps& measured, const JobConfig& config, const TrainingStep& step,
                               std::int64_t num_data_ranks, int num_ranks) {
  const double tokens_per_second =
      static_cast<double>(config.sequences_per_step(num_data_ranks) * config.training.seq_len) / measured.seconds;
  const double flop = flop_per_token(config.model.args, step.whole_model().count_parameters(), config.training.seq_len);
  const double tflops = tokens_per_second * flop * 1e-12 / num_ranks, peak = peak_tflops(config, step.device());
  return {{"dtype", config.training.mixed_precision_param == DType::kFloat32 ? "float32" : "bfloat16"},
          {"threads", num_threads()},
          {"ranks", num_ranks},
          {"tokens_per_s", tokens_per_second},
          {"tokens_per_s_per_rank", tokens_per_second / num_ranks},
          {"step_ms", measured.seconds * 1e3},
          {"forward_ms", measured.forward * 1e3},
          {"backward_ms", measured.backward * 1e3},
          {"first_step_s", measured.first_step_seconds},
          {"tflops", tflops},
          {"mfu", peak > 0.0 ? nlohmann::json(tflops / peak) : nlohmann::json()},
          {"loss_first", measured.first_loss},
          {"loss_last", measured.last_loss}};
}

/// Trains on random tokens. Rank 0 prints one line of JSON, in the same form as bench/reference/torch_train.py.
void bench_step(const StepOptions& options, const JobConfig& config, Ranks& ranks) {
  const std::shared_ptr<cuda::Runtime> cuda = join_gpus(config, ranks);
  const std::shared_ptr<Mesh> mesh = make_mesh(config, ranks);
  const Device device = cuda == nullptr ? Device::kCpu : Device::kCuda;
  require(!options.kernels || device == Device::kCuda, "--kernels lists what a GPU runs, but these steps run on a CPU");
  require(options.cluster.empty() || device == Device::kCuda, "--cluster has the rates of GPUs; this runs on a CPU");
  require(options.calibration.empty() || device == Device::kCpu,
          "--calibration is for steps on a CPU; --cluster has the rates of GPUs");
  set_threads(config, ranks);
  use_cpu_kernels(options.cpu_kernels);
  // These fail before the steps, and not after them.
  const Rates rates = read_rates(options, config);
  if (!options.trace.empty() && ranks.rank() == 0) output_file(options.trace, {});

  TrainingStep step(config, mesh, device, cuda);
  if (ranks.rank() == 0) step.warn_of_slow_operators();
  step.allocate();
  RandomSteps steps(step, config, *mesh);
  TraceRecorder trace;
  step.set_trace(&trace);
  std::vector<double> seconds;
  PhaseSeconds phases;
  double first_loss = 0.0, last_loss = 0.0, first_step_seconds = 0.0;
  auto ended = std::chrono::steady_clock::now();  // when the step before ended
  const auto finish = [&] {
    const StepResult result = step.finish();
    if (result.step > options.warmup) {
      seconds.push_back(std::chrono::duration<double>(result.ended - ended).count());
      phases += result.seconds;
    }
    ended = result.ended;
    if (result.step == 1) {
      first_loss = result.loss;
      first_step_seconds = std::chrono::duration<double>(result.ended - kLoaded).count();
    }
    last_loss = result.loss;
  };
  std::optional<cuda::KernelProfile> traced_kernels;
  for (std::int64_t i = 1; i <= config.training.steps; ++i) {
    if (!options.trace.empty() && i == config.training.steps) {
      while (step.num_started() > 0) finish();
      trace.start();
      if (device == Device::kCuda) traced_kernels.emplace();
    }
    steps.start();
    // A GPU gets this step before the host reads the results of the step before.
    if (step.num_started() == step.max_started()) finish();
  }
  while (step.num_started() > 0) finish();
  if (traced_kernels) add_to_trace(traced_kernels->finish(), trace);
  if (!options.trace.empty()) trace.write(options.trace);
  std::optional<cuda::KernelSummary> kernels;
  if (options.kernels) {
    // Runs two more steps, one after the other, and lists the second: before the first one the GPU waits for the host.
    cuda::KernelProfile profile;
    for (int i = 0; i < 2; ++i) steps.start();
    while (step.num_started() > 0) step.finish();
    const std::vector<cuda::KernelRun> runs = profile.finish();
    kernels = cuda::summarize(std::span(runs).subspan(runs.size() / 2));
    if (ranks.rank() == 0) print_kernels(*kernels);
  }
  std::optional<RandomSteps::Timed> timed;
  if (rates.calibration || rates.cluster) timed = steps.time_operators(kTimedSteps);
  if (ranks.rank() != 0) return;

  const MeasuredSteps measured = {.seconds = median(seconds),
                                  .forward = phases.forward / static_cast<double>(options.steps),
                                  .backward = phases.backward / static_cast<double>(options.steps),
                                  .first_step_seconds = first_step_seconds,
                                  .first_loss = first_loss,
                                  .last_loss = last_loss};
  nlohmann::ordered_json line = line_of(measured, config, step, mesh->num_data_ranks(), ranks.size());
  if (kernels) line["gpu_idle_share"] = idle_share(*kernels);
  if (timed) {
    const Compared compared = compare(rates, config, *mesh, *timed);
    print_comparison(compared, measured.seconds);
    line["predicted_ms"] = compared.predicted_seconds * 1e3;
  }
  std::cout << line.dump() << '\n' << std::flush;
}

void add_step_command(CLI::App& parent, int& status) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* command = parent.add_subcommand("step", "Time training steps on random tokens");
  const auto arguments = std::make_shared<ConfigArguments>(command);
  command->add_option("--steps", options->steps, "Steps that are timed")->transform(as_count(1))->capture_default_str();
  command->add_option("--warmup", options->warmup, "Steps before them")->transform(as_count())->capture_default_str();
  command->add_option("--trace", options->trace, "Write a Chrome trace of the last step to this file");
  command->add_flag("--kernels", options->kernels, "List on stderr what the GPU runs in a step");
  command->add_option("--calibration", options->calibration,
                      "Compare with what this file of `tessera bench calibrate` predicts");
  command->add_option("--cluster", options->cluster, "Compare with what this file of clusters/ predicts");
  command->add_option("--routing", options->routing, "How tokens choose experts: forced, uniform or groups");
  command->add_option("--cpu-kernels", options->cpu_kernels,
                      "Compute as a processor without newer instructions would: baseline (AVX2), avx512, avx512_bf16");
  command->footer(
      "Prints one line of JSON with the median step; under mpirun, of all ranks together. tflops and mfu are a "
      "rank's;\n"
      "mfu is of metrics.peak_tflops or, without it, of the GPU's dense bfloat16 rate, if that is known. Keys of the "
      "configuration as in `tessera train`.");
  command->callback([arguments, options, &status] {
    status = run_on_ranks([&] { return read_config(*options, *arguments); },
                          [&](const JobConfig& config, Ranks& ranks) {
                            bench_step(*options, config, ranks);
                            return 0;
                          });
  });
}

struct CalibrateCommand {
  std::string out = "calibration.json";
  CalibrateOptions options;
  bool on_gpu = false;

  /// Says where the ranks compute. Ranks that have finished wait long for others, which measure for themselves.
  JobConfig config() const {
    JobConfig config;
    config.training.device = on_gpu ? DeviceChoice::kCuda : DeviceChoice::kCpu;
    config.comm.init_timeout_seconds = 1800;
    return config;
  }

  /// All ranks measure their operators at the same time, because they share the machine. Rank 0 writes its own.
  void run(const JobConfig& config, Ranks& ranks) {
    require(ranks.size() == ranks.num_on_node(), "{} ranks on several nodes: those of one node can be measured",
            ranks.size());
    if (ranks.rank() == 0) output_file(out, {});
    const std::shared_ptr<cuda::Runtime> cuda = join_gpus(config, ranks);
    set_threads(config, ranks);
    if (on_gpu) {
      options.device = Device::kCuda;
    } else {
      options.world = &ranks.world();
    }
    std::optional<ProgressBar> bar;
    if (ranks.rank() == 0) {
      options.progress = [&bar](std::size_t done, std::size_t count) {
        if (!bar) bar.emplace("measuring", count, "models");
        bar->set(done);
      };
    }
    std::vector<RankValue> between_ranks;
    if (ranks.size() > 1) between_ranks = calibrate_ranks(ranks.world(), cuda.get());
    Calibration calibration = calibrate(options);
    if (bar) bar->clear();
    if (ranks.rank() != 0) return;
    for (RankValue& value : between_ranks) value.date = calibration.date;
    calibration.between_ranks = std::move(between_ranks);
    write_calibration(calibration, out);
    fmt::print("{}: {} classes of operators of {}{}\n", out, calibration.operators.size(), calibration.machine,
               on_gpu ? "" : fmt::format(" with {} threads", calibration.threads));
    for (const RankValue& value : calibration.between_ranks) {
      fmt::print("{:>28}{:>12.4g}  {} ({})\n", value.name, value.value, value.unit, value.source);
    }
  }
};

void add_calibrate_command(CLI::App& parent, int& status) {
  auto command = std::make_shared<CalibrateCommand>();
  CLI::App* app = parent.add_subcommand("calibrate", "Measure this machine's operators, for `tessera plan time`");
  app->add_flag("--gpu", command->on_gpu, "Measure the GPU, which needs 80 GB and CUPTI, and not the CPU");
  app->add_option("--out,--output", command->out, "Write the rates to this file")->capture_default_str();
  app->add_option("--steps", command->options.steps, "Steps of every small model that are timed in a round")
      ->transform(as_count(1, 1000))
      ->capture_default_str();
  app->add_option("--rounds", command->options.rounds, "Rounds of all models")
      ->transform(as_count(1, 1000))
      ->capture_default_str();
  app->footer(
      "Under mpirun, the ranks of a node also measure their transfers, what products lose beside these, and how much\n"
      "the slowest rank lags behind.");
  app->callback([command, &status] {
    require(!command->on_gpu || cuda::available(), "--gpu measures a GPU, but {}", cuda::why_unavailable());
    status = run_on_ranks([&] { return command->config(); },
                          [&](const JobConfig& config, Ranks& ranks) {
                            command->run(config, ranks);
                            return 0;
                          });
  });
}

struct WorldOptions {
  std::vector<int> ranks = {64, 256};
  std::string json;
};

void print_world(const WorldRun& run) {
  for (const WorldPhase& phase : run.phases) {
    fmt::print("{:>6} {:>8} {:>10} {:>10} {:>12} {:>10} {:>12} {:>9.2f}\n", run.num_ranks, phase.name,
               phase.host.receivers, phase.host.messages, phase.host.bytes, phase.tensors.messages, phase.tensors.bytes,
               phase.seconds);
  }
}

nlohmann::ordered_json json_of(const WorldRun& run) {
  nlohmann::ordered_json phases = nlohmann::ordered_json::array();
  for (const WorldPhase& phase : run.phases) {
    phases.push_back({{"phase", phase.name},
                      {"host_receivers", phase.host.receivers},
                      {"host_messages", phase.host.messages},
                      {"host_bytes", phase.host.bytes},
                      {"tensor_messages", phase.tensors.messages},
                      {"tensor_bytes", phase.tensors.bytes},
                      {"seconds", phase.seconds}});
  }
  return {{"ranks", run.num_ranks},
          {"phases", phases},
          {"checkpoint_files", run.num_files},
          {"manifest_bytes", run.manifest_bytes}};
}

/// Runs worlds from the smallest to the largest. Returns 1 if one grows too fast, else 0.
int bench_world(WorldOptions options) {
  std::ranges::sort(options.ranks);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("tessera_world_{}", getpid());
  spdlog::set_level(spdlog::level::err);  // each node would warn that so many ranks are slow here
  fmt::print("{:>6} {:>8} {:>10} {:>10} {:>12} {:>10} {:>12} {:>9}\n", "ranks", "phase", "receivers", "messages",
             "bytes", "tensors", "bytes", "s");
  struct Removal {
    std::filesystem::path folder;
    ~Removal() {
      std::error_code ignored;
      std::filesystem::remove_all(folder, ignored);
    }
  };
  const Removal removal{folder};
  std::optional<WorldRun> before;
  std::string lines;
  if (!options.json.empty()) output_file(options.json, {});
  int status = 0;
  for (const int num_ranks : options.ranks) {
    WorldRun run = run_world(num_ranks, folder / fmt::to_string(num_ranks));
    print_world(run);
    fmt::print("{:>6} a checkpoint has {} files, and a manifest of {} bytes\n", num_ranks, run.num_files,
               run.manifest_bytes);
    std::fflush(stdout);
    lines += json_of(run).dump() + '\n';
    if (before && before->num_ranks < num_ranks) {
      for (const std::string& phase : phases_that_grow_too_fast(*before, run)) {
        fmt::print("{}: a rank's receivers grow faster than the logarithm of the ranks, from {} to {}\n", phase,
                   before->num_ranks, num_ranks);
        status = 1;
      }
    }
    before = std::move(run);
  }
  if (!options.json.empty()) write_whole_file(options.json, lines);
  return status;
}

void add_world_command(CLI::App& parent, int& status) {
  auto options = std::make_shared<WorldOptions>();
  CLI::App* command = parent.add_subcommand("world", "Count what the ranks of a large world send");
  command->add_option("--ranks", options->ranks, "Numbers of ranks: 64,1024,4096")->delimiter(',');
  command->add_option("--json", options->json, "Write the counts to this file too, a line of JSON per world");
  command->footer(
      "Ranks are threads of this process, with a tiny model and the trainer, groups and checkpoints of a real run.\n"
      "Counts are of the busiest rank: to how many ranks it sends, and how much. \"tensors\" are what NCCL moves on\n"
      "GPUs. The exit status is 1 if receivers grow faster than the logarithm of the ranks.");
  command->callback([options, &status] { status = bench_world(*options); });
}

void add_table_command(CLI::App& parent, GpuTable table, const std::string& name, const std::string& help) {
  auto options = std::make_shared<GpuTableOptions>();
  CLI::App* command = parent.add_subcommand(name, help);
  command->add_option("--filter", options->filter, "Only rows whose names have this part");
  command->add_option("--json", options->json, "Write the rows to this file too, as lines of JSON");
  command->callback([table, options] { print_gpu_table(table, *options); });
}

}  // namespace

void add_bench_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("bench", "Time training steps, and operators on a GPU");
  add_step_command(*command, status);
  add_calibrate_command(*command, status);
  add_world_command(*command, status);
  add_table_command(*command, GpuTable::kGemm, "gemm", "Dense products on a GPU, in bfloat16 and in 8 bits");
  add_table_command(*command, GpuTable::kGrouped, "grouped", "Products of experts on a GPU, in bfloat16 and in 8 bits");
  add_table_command(*command, GpuTable::kAttention, "attention", "Multi-head latent attention on a GPU");
  add_table_command(*command, GpuTable::kQuantize, "quantize", "Quantizers on a GPU");
  add_table_command(*command, GpuTable::kOperators, "operators", "All other operators on a GPU");
  command->require_subcommand(1);
}

}  // namespace tessera
