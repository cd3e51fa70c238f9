// `tessera plan` shows what a way to train would cost, before any machine is used.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "app/cli/commands.h"
#include "app/cli/config_arguments.h"
#include "app/cli/launch_line.h"
#include "app/cli/option_checks.h"
#include "app/cli/output_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "device/cuda.h"
#include "parallel/pipeline_picture.h"
#include "plan/layout_search.h"
#include "plan/report/plan_page.h"
#include "plan/run_forecast.h"
#include "run/memory_advice.h"
#include "run/record/metrics.h"
#include "run/state/snapshot.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Throws Error, which says what `asker` needs, unless this build plans CUDA's operators.
void require_plans_for_gpus(std::string_view asker) {
  require(cuda::is_built(),
          "{} plans for GPUs. It needs none, but a build with CUDA: `make install PRESET=release` makes one where "
          "nvcc 12.8 or newer is on the PATH",
          asker);
}

/// Returns the degrees of a mesh of so many ranks. Throws Error, which names --ranks, if they are too few.
MeshDegrees degrees_on(const JobConfig& job, int num_ranks) {
  const std::int64_t needed = fewest_ranks(job.mesh_degrees());
  require(needed <= num_ranks, "--ranks is {}, but the mesh needs {} ranks{}; expected --ranks {}", num_ranks, needed,
          job.mesh_degrees().dp_shard == -1 ? " or a multiple of that" : "", needed);
  const MeshDegrees degrees = resolve(job.mesh_degrees(), num_ranks);
  job.validate_on(degrees);
  return degrees;
}

struct ScheduleCommand {
  std::string kind;
  int num_ranks = 0, num_micro_batches = 0, stages_per_rank = 0, max_deferred = kNoLimit;
  bool has_stages_per_rank = false;
  PipelineCosts costs;
  std::string svg;

  void run() const {
    const std::filesystem::path picture = svg.empty() ? std::filesystem::path() : output_file(svg, {});
    const PipelineScheduleKind schedule_kind = pipeline_schedule_kind(kind);
    const PipelineSchedule schedule = make_pipeline_schedule(
        schedule_kind, num_ranks, has_stages_per_rank ? stages_per_rank : min_stages_per_rank(schedule_kind),
        num_micro_batches, max_deferred);
    const PipelineTiming timing = simulate(schedule, costs);
    if (!picture.empty()) write_whole_file(picture, to_svg(schedule, timing));
    fmt::print("{}, {} ranks, stages per rank: {}, {} micro-batches\n\n{}\n", name_of(schedule.kind),
               schedule.num_ranks, schedule.stages_per_rank, schedule.num_micro_batches, to_text(schedule, timing));
    fmt::print("makespan {:g}, bubble {:.1f} %\n\n{:<8}{:>8}{:>24}\n", timing.makespan,
               100.0 * timing.mean_bubble_fraction(), "rank", "bubble", "activations at most");
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      fmt::print("{:<8}{:>6.1f} %{:>24}\n", rank, 100.0 * timing.bubble_fraction[rank], timing.peak_in_flight[rank]);
    }
  }
};

void add_schedule_command(CLI::App& parent) {
  auto command = std::make_shared<ScheduleCommand>();
  CLI::App* app = parent.add_subcommand(
      "schedule", "Draw a pipeline schedule, with its time, its bubble and the activations that it holds");
  app->add_option("--schedule", command->kind, "1F1B, Interleaved1F1B, ZBVZeroBubble or DualPipeV")->required();
  app->add_option("--ranks", command->num_ranks, "Ranks of the pipeline")
      ->required()
      ->transform(as_count(1, kMaxRanks));
  app->add_option("--micro-batches", command->num_micro_batches, "Micro-batches of a step")
      ->required()
      ->transform(as_count(1));
  app->add_option("--max-deferred", command->max_deferred,
                  "Backwards whose weight gradients a rank may defer at once (default: any number)")
      ->transform(as_count(1));
  CLI::Option* stages_per_rank = app->add_option("--stages-per-rank", command->stages_per_rank,
                                                 "Stages on each rank (default: the fewest that the schedule takes)")
                                     ->transform(as_count(1));
  const auto add_cost = [&](const char* option, std::vector<double>& values, const std::string& what) {
    app->add_option(option, values, what + " in one stage: a number, or one per stage, with commas")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(is_number(1e-9, 1e9))
        ->capture_default_str();
  };
  add_cost("--forward", command->costs.forward, "Time of a micro-batch's forward");
  add_cost("--backward-input", command->costs.backward_input, "Time of its input gradient");
  add_cost("--backward-weight", command->costs.backward_weight, "Time of its weight gradients");
  app->add_option("--overlapped", command->costs.overlapped,
                  "Time of a forward and a backward that overlap, as a part of the sum of both")
      ->check(is_number(1e-9, 1e9))
      ->capture_default_str();
  app->add_option("--communication", command->costs.communication, "Time of a message from rank to rank")
      ->check(is_number(0.0, 1e9))
      ->capture_default_str();
  app->add_option("--svg,--out,--output", command->svg, "Also draw it into this file");
  app->callback([command, stages_per_rank] {
    command->has_stages_per_rank = stages_per_rank->count() > 0;
    command->run();
  });
}

struct MemoryCommand {
  int num_ranks = 1;
  double available_gib = 0.0;

  void run(const JobConfig& job) const {
    job.validate();
    const MeshDegrees degrees = degrees_on(job, num_ranks);
    const PlannedRun planned{job, job.training.device == DeviceChoice::kCuda ? Device::kCuda : Device::kCpu, degrees};
    require(planned.device == Device::kCpu || cuda::is_built(),
            "training.device is cuda, but {}; --device cpu plans for a CPU", cuda::why_unavailable());
    if (num_ranks > 1) fmt::print("a rank of {}: {}\n\n", num_ranks, describe(degrees));
    print_table(planned);
    if (num_ranks > 1 && planned.device == Device::kCuda) {
      fmt::print("\nNot counted: CUDA's own memory on each GPU, and what NCCL takes for its communicators.\n");
    }
    print_copies(planned);
    if (available_gib <= 0.0) return;
    const auto available = static_cast<std::size_t>(available_gib * static_cast<double>(1ULL << 30));
    const auto plans = memory_plans(planned, job.activation_checkpoint.mode, job.micro_batch_size());
    if (std::all_of(plans.begin(), plans.end(), [&](const MemoryPlan& plan) { return plan.total() <= available; })) {
      fmt::print("\nfits {}\n", format_gib(available));
    } else {
      fmt::print("\ndoes not fit {}:\n{}\n", format_gib(available), memory_advice(planned, 0, available));
    }
  }

  /// Prints how much of the host's memory copies of the state take, which the table does not count.
  static void print_copies(const PlannedRun& planned) {
    const JobConfig& job = planned.config;
    const bool saves_copy = job.checkpoint.enable && Snapshot::is_taken(job, planned.device);
    const bool keeps_copies = job.checkpoint.memory_interval > 0;
    if (!saves_copy && !keeps_copies) return;
    const auto plans = memory_plans(planned, job.activation_checkpoint.mode, job.micro_batch_size());
    std::size_t state = 0;  // masters (as large as gradients) and moments
    for (const MemoryPlan& plan : plans) state = std::max(state, plan.gradients + plan.optimizer_state);
    if (saves_copy) {
      fmt::print(
          "\nThe copy that a checkpoint is written from takes up to {} more of the node's memory for each rank of the "
          "first replica, until it is written.\n",
          format_gib(Snapshot::peak_bytes(state, planned.device)));
    }
    if (!keeps_copies) return;
    const bool is_sent = planned.degrees.num_ranks() > 1 && planned.degrees.dp_replicate == 1;
    fmt::print(
        "\nCopies in memory (checkpoint.memory_interval) take {} more of the node's memory for each rank: two of its "
        "state{}.\n",
        format_gib((is_sent ? 4 : 2) * state), is_sent ? ", and two of the state of a rank on another node" : "");
  }

  static bool uses_windows(const PlannedRun& planned) {
    return planned.degrees.ep > 1 &&
           planned.config.parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect;
  }

  /// Prints a line per mode or, for a pipeline, per mode and pipeline rank.
  static void print_table(const PlannedRun& planned) {
    const bool is_pipeline = planned.degrees.pp > 1, has_windows = uses_windows(planned);
    const auto print_line = [&](std::string_view mode, std::string_view rank, std::string_view weights,
                                std::string_view gradients, std::string_view moments, std::string_view activations,
                                std::string_view windows, std::string_view all) {
      fmt::print("{:>10}", mode);
      if (is_pipeline) fmt::print("{:>15}", rank);
      fmt::print("{:>12}{:>12}{:>12}{:>24}", weights, gradients, moments, activations);
      if (has_windows) fmt::print("{:>12}", windows);
      fmt::print("{:>12}\n", all);
    };
    print_line("mode", "pipeline rank", "weights", "gradients", "moments", "activations, scratch", "windows", "in all");
    for (const auto& [name, mode] : recompute_modes()) {
      const auto plans = memory_plans(planned, mode, planned.config.micro_batch_size());
      for (std::size_t rank = 0; rank < plans.size(); ++rank) {
        const MemoryPlan& plan = plans[rank];
        print_line(name, std::to_string(rank), format_gib(plan.weights), format_gib(plan.gradients),
                   format_gib(plan.optimizer_state), format_gib(plan.activations + plan.batches),
                   format_gib(plan.windows), format_gib(plan.total()));
      }
    }
  }
};

void add_memory_command(CLI::App& parent) {
  auto command = std::make_shared<MemoryCommand>();
  CLI::App* app = parent.add_subcommand("memory", "Where the memory of a rank goes, by recomputation");
  const auto arguments = std::make_shared<ConfigArguments>(app);
  app->add_option("--ranks", command->num_ranks, "Ranks of the run, which need not be there")
      ->transform(as_count(1, kMaxRanks))
      ->capture_default_str();
  app->add_option("--available", command->available_gib, "GiB that a rank has: also says what would fit")
      ->check(is_number(1e-6, 1e9));
  app->footer(
      "Keys of the configuration as in `tessera train`. The plan is for CPUs unless --device is cuda; a GPU need not "
      "be\n"
      "there, and is taken for a Hopper. On a CPU the program's own memory is not counted.");
  app->callback([command, arguments] { command->run(arguments->read()); });
}

/// Reads a cluster that executes this program's steps, or those of the engine that a file describes.
Cluster cluster_with_engine(const std::string& cluster, const std::string& engine, const JobConfig& job) {
  Cluster machine = read_cluster(cluster);
  require(job.training.device != DeviceChoice::kCpu, "--cluster has the rates of GPUs, and training.device is cpu");
  if (!engine.empty()) use_engine(engine, job.model.args, machine);
  return machine;
}

/// Options that say how tokens choose experts.
struct RoutingOptions {
  std::string kind, loads;

  void add_to(CLI::App& app) {
    app.add_option("--routing", kind,
                   "How tokens choose experts: forced, uniform or groups (default: as the configuration says)");
    app.add_option("--loads", loads,
                   "Loads of experts that a run has recorded: its folder or expert_loads.json (default: equal loads)");
  }
  bool is_default() const { return kind.empty() && loads.empty(); }
  RoutingKind kind_for(const JobConfig& job) const { return kind.empty() ? default_routing(job) : routing_kind(kind); }
  std::optional<ExpertLoads> recorded(const JobConfig& job) const {
    if (loads.empty()) return std::nullopt;
    ExpertLoads result = read_expert_loads(loads);
    busiest_rank(result, job);  // throws Error if they are another model's
    return result;
  }
};

/// Returns a pointer to the loads, or null if there are none.
const ExpertLoads* pointer_to(const std::optional<ExpertLoads>& loads) { return loads ? &*loads : nullptr; }

void print_loads(const ExpertLoads& loads, const JobConfig& job) {
  const BusiestRank busiest = busiest_rank(loads, job);
  fmt::print("loads of step {}: the busiest rank has {:.2f} times the mean of its group, and {:.2f} in {}\n",
             loads.step, busiest.mean, busiest.most, busiest.layer);
  const double factor = job.parallelism.expert_parallel_capacity_factor;
  if (factor > 0.0 && busiest.most > factor) {
    fmt::print("that is more than parallelism.expert_parallel_capacity_factor, {:g}: later rounds are not counted\n",
               factor);
  }
}

std::vector<ValidatedRun> validation_of(const std::string& path) {
  return path.empty() ? std::vector<ValidatedRun>() : read_validation(path);
}

void write_page(const std::filesystem::path& path, const JobConfig& job, const MeshDegrees& degrees,
                const Cluster& machine, const RunForecast& forecast, const std::vector<FoundLayout>& layouts,
                const std::vector<ValidatedRun>& validation) {
  write_whole_file(path,
                   plan_page({.title = fmt::format("{} on {} {}", job.model.flavor, degrees.num_ranks(), machine.name),
                              .layout = describe(degrees),
                              .forecast = forecast,
                              .cluster = machine,
                              .layouts = layouts,
                              .validation = validation}));
}

struct TimeCommand {
  std::string calibration, cluster, engine, html, validation;
  RoutingOptions routing;
  int num_ranks = 1;
  double tokens_of_run = 0.0;
  double hours_between_failures = 0.0, restart_minutes = 2.0;
  std::optional<double> minutes_between_checkpoints;  // without a value: those of the configuration
  bool json = false;

  void run(JobConfig job) const {
    require(calibration.empty() != cluster.empty(),
            "give one of --calibration, for steps on this CPU, and --cluster, for GPUs");
    const bool needs_cluster = !engine.empty() || !html.empty() || !routing.is_default() || tokens_of_run > 0.0;
    require(!needs_cluster || !cluster.empty(), "--engine, --html, --loads, --routing and --tokens need --cluster");
    job.validate();
    if (cluster.empty()) return run_on_cpu(job, degrees_on(job, num_ranks));
    const Cluster machine = cluster_with_engine(cluster, engine, job);
    degrees_on(job, num_ranks);  // throws Error with the number of ranks that the mesh needs
    set_ranks_per_domain(job, num_ranks, machine);
    run_on(machine, job, degrees_on(job, num_ranks));
  }

  /// Returns the minutes between copies of the state from which a run goes on: in memory, or else on disk.
  double minutes_between(const JobConfig& job, double step_seconds) const {
    if (minutes_between_checkpoints) return *minutes_between_checkpoints;
    require(job.checkpoint.enable,
            "--hours-between-failures needs checkpoint.enable, or --minutes-between-checkpoints: a run without "
            "checkpoints begins again");
    const std::int64_t in_memory = job.checkpoint.memory_interval, on_disk = job.checkpoint.interval;
    return static_cast<double>(in_memory > 0 ? std::min(in_memory, on_disk) : on_disk) * step_seconds / 60.0;
  }

  /// Returns the part of the time that trains, if failures come at random (a Poisson process). To get from one
  /// checkpoint to the next takes (e^(t/m) - 1)(m + r) on average: t is the time between them, m that between failures,
  /// and r the restart (Young and Daly's model).
  double effective_part(double minutes) const {
    if (hours_between_failures == 0.0) return 1.0;
    const double failures_between_checkpoints = minutes / (60.0 * hours_between_failures);
    const double training =
        minutes == 0.0 ? 1.0 : failures_between_checkpoints / std::expm1(failures_between_checkpoints);
    return training / (1.0 + restart_minutes / (60.0 * hours_between_failures));
  }

  /// Holds what the whole run takes and costs.
  struct WholeRun {
    double minutes_between_checkpoints, effective_part, days, dollars;
  };
  /// `rate` is in tokens per second and GPU, `dollars` the price of 10^9 tokens.
  WholeRun whole_run(const JobConfig& job, double step_seconds, double rate, double dollars) const {
    const double minutes = hours_between_failures > 0.0 ? minutes_between(job, step_seconds) : 0.0;
    const double part = effective_part(minutes);
    require(part > 1e-6, "a failure every {:g} hours and a checkpoint every {:.0f} minutes: this run never ends",
            hours_between_failures, minutes);
    return {minutes, part, tokens_of_run / rate / num_ranks / 86400.0 / part, dollars * tokens_of_run * 1e-9 / part};
  }

  void run_on_cpu(const JobConfig& job, const MeshDegrees& degrees) const {
    require(job.training.device != DeviceChoice::kCuda,
            "--calibration is for steps on a CPU; --cluster has the rates of GPUs");
    const RunForecast forecast = forecast_on_cpu(job, degrees, read_calibration(calibration));
    if (json) return fmt::print("{}\n", json_text(json_of(forecast.step, forecast.seconds, forecast.tokens)));
    print_lines(forecast.step);
    fmt::print("step {:.1f} ms, {:.0f} tokens/s\n", forecast.seconds * 1e3, forecast.tokens / forecast.seconds);
  }

  void run_on(const Cluster& machine, const JobConfig& job, const MeshDegrees& degrees) const {
    require_plans_for_gpus("--cluster");
    const std::optional<ExpertLoads> loads = routing.recorded(job);
    const std::filesystem::path page = html.empty() ? std::filesystem::path() : output_file(html, {});
    const std::vector<ValidatedRun> validated = validation_of(validation);
    const RunForecast forecast =
        forecast_run({job, Device::kCuda, degrees}, machine, {routing.kind_for(job), pointer_to(loads)}, !page.empty());
    if (!page.empty()) write_page(page, job, degrees, machine, forecast, {}, validated);
    const double rate = forecast.tokens_per_second_per_gpu();
    const double mfu = rate * forecast.flop_per_token / machine.peak_flop_per_second;
    // Dollars per hour, over tokens per second and GPU.
    const double dollars = machine.dollars_per_gpu_hour / 3600.0 / rate * 1e9;
    const double memory = static_cast<double>(forecast.memory.total()) + machine.reserved_bytes;
    if (json) {
      nlohmann::ordered_json result = json_of(forecast.step, forecast.seconds, forecast.tokens);
      result["tokens_per_s_per_gpu"] = rate;
      result["mfu"] = mfu;
      result["memory_bytes"] = memory;
      result["dollars_per_1e9_tokens"] = dollars;
      result["spread"] = forecast.step.error_seconds() / forecast.step.seconds;
      if (tokens_of_run > 0.0) {
        const WholeRun whole = whole_run(job, forecast.seconds, rate, dollars);
        result["days"] = whole.days;
        result["dollars"] = whole.dollars;
      }
      return fmt::print("{}\n", json_text(result));
    }
    if (num_ranks > 1) fmt::print("{} x {}: {}\n\n", num_ranks, machine.name, describe(degrees));
    print_lines(forecast.step);
    print_summary(forecast, machine);
    if (loads) print_loads(*loads, job);
    fmt::print("step {:.1f} ms, {:.0f} tokens/s per GPU, MFU {:.1f} % (TorchTitan's count; {:.0f} TFLOP/s executed)\n",
               forecast.seconds * 1e3, rate, 100.0 * mfu, forecast.executed_flop / forecast.seconds * 1e-12);
    const double spread = forecast.step.error_seconds() / forecast.step.seconds;
    fmt::print("between {:.0f} and {} tokens/s per GPU, by the errors of the operators' rates alone\n",
               rate / (1.0 + spread), spread < 1.0 ? fmt::format("{:.0f}", rate / (1.0 - spread)) : "any number of");
    fmt::print("memory {} of {}, with {} for CUDA and NCCL{}\n", format_gib(static_cast<std::size_t>(memory)),
               format_gib(static_cast<std::size_t>(machine.memory_bytes)),
               format_gib(static_cast<std::size_t>(machine.reserved_bytes)),
               memory > machine.memory_bytes ? ": DOES NOT FIT" : "");
    fmt::print("${:.2f} per 10^9 tokens at ${:.2f} per GPU and hour\n", dollars, machine.dollars_per_gpu_hour);
    if (tokens_of_run > 0.0) {
      const WholeRun whole = whole_run(job, forecast.seconds, rate, dollars);
      fmt::print("{:.3g} tokens: {:.1f} days, ${:.3g}, without validation and saves\n", tokens_of_run, whole.days,
                 whole.dollars);
      if (hours_between_failures > 0.0) {
        fmt::print(
            "with a failure every {:g} hours and a checkpoint every {:.1f} minutes, {:.1f} % of that time trains: "
            "{:.0f} GPU hours are lost\n",
            hours_between_failures, whole.minutes_between_checkpoints, 100.0 * whole.effective_part,
            tokens_of_run / rate / 3600.0 * (1.0 / whole.effective_part - 1.0));
      }
    }
  }

  /// Prints a line per pass and operator of the pipeline's slowest rank.
  static void print_lines(const StepForecast& forecast) {
    const RankForecast& rank = forecast.ranks[forecast.slowest];
    fmt::print("{:<26}{:<32}{:>8}{:>12}{:>8}{:>10}{:>12}\n", "pass", "operator or transfer", "calls", "ms", "%",
               "GFLOP/s", "hidden, ms");
    const auto percent = [&](double seconds) { return 100.0 * seconds / forecast.seconds; };
    for (const ForecastLine& line : rank.lines) {
      const std::string rate = line.flop > 0.0 ? fmt::format("{:.1f}", line.flop / line.seconds * 1e-9) : "";
      const std::string hidden = line.is_transfer ? fmt::format("{:.3f}", line.hidden_seconds * 1e3) : "";
      fmt::print("{:<26}{:<32}{:>8}{:>12.3f}{:>8.1f}{:>10}{:>12}{}\n", line.pass_of_stage(), line.name, line.num_calls,
                 line.seconds * 1e3, percent(line.seconds), rate, hidden, line.is_extrapolated ? "  extrapolated" : "");
    }
    if (rank.host_seconds > 0.0) {
      fmt::print("{:<26}{:<32}{:>8}{:>12.3f}{:>8.1f}\n", "", "the host, besides", "", rank.host_seconds * 1e3,
                 percent(rank.host_seconds));
    }
    fmt::print("\n");
  }

  static void print_summary(const RunForecast& forecast, const Cluster& machine) {
    const std::vector<StepPart> parts = parts_of_step(forecast, machine);
    for (const StepPart& part : parts) {
      fmt::print("{:<40}{:>12.3f} ms{:>8.1f} %\n", part.name, part.seconds * 1e3,
                 100.0 * part.seconds / forecast.seconds);
    }
    const auto most = std::ranges::max_element(parts.begin() + 1, parts.end(), {}, &StepPart::seconds);
    fmt::print("above the peak, most of it: {}\n", most->name);
    fmt::print("rates: {}\n", machine.path.string());
    if (!machine.engine.name.empty()) fmt::print("engine: {}, {}\n", machine.engine.name, machine.engine.source);
  }

  static nlohmann::ordered_json json_of(const StepForecast& forecast, double seconds, double tokens) {
    const RankForecast& rank = forecast.ranks[forecast.slowest];
    nlohmann::ordered_json lines = nlohmann::ordered_json::array();
    for (const ForecastLine& line : rank.lines) {
      lines.push_back({{"pass", line.pass_of_stage()},
                       {line.is_transfer ? "transfer" : "operator", line.name},
                       {"calls", line.num_calls},
                       {"ms", line.seconds * 1e3},
                       {"hidden_ms", line.hidden_seconds * 1e3},
                       {"flop", line.flop},
                       {"extrapolated", line.is_extrapolated}});
    }
    return {{"step_ms", seconds * 1e3},
            {"tokens_per_s", tokens / seconds},
            {"host_ms", rank.host_seconds * 1e3},
            {"passes_ms", forecast.passes_seconds * 1e3},
            {"bubble_ms", rank.bubble_seconds * 1e3},
            {"gather_ms", rank.gather_seconds * 1e3},
            {"reduction_ms", rank.reduction_seconds * 1e3},
            {"optimizer_ms", rank.optimizer_seconds * 1e3},
            {"operators", lines}};
  }
};

void add_page_options(CLI::App& app, std::string& html, std::string& validation) {
  CLI::Option* page = app.add_option("--html", html, "Also write a page to this file");
  app.add_option("--validation", validation, "Show in it the errors that bench/forecast_gpu.py --out wrote")
      ->needs(page);
}

void add_time_command(CLI::App& parent) {
  auto command = std::make_shared<TimeCommand>();
  CLI::App* app = parent.add_subcommand("time", "How long a step takes, on this CPU or on a cluster that is not there");
  const auto arguments = std::make_shared<ConfigArguments>(app);
  app->add_option("--calibration", command->calibration, "The file that `tessera bench calibrate` wrote");
  app->add_option("--cluster", command->cluster, "A file of clusters/: the rates of a kind of GPU");
  app->add_option("--engine", command->engine, "A file of engines/: how another program's step differs from ours");
  app->add_option("--ranks", command->num_ranks, "GPUs of the run, which need not be there")
      ->transform(as_count(1, kMaxRanks))
      ->capture_default_str();
  command->routing.add_to(*app);
  CLI::Option* tokens =
      app->add_option("--tokens", command->tokens_of_run,
                      "With --cluster: tokens of the whole run, such as 1T; also says days and dollars")
          ->transform(as_count(1, 1'000'000'000'000'000'000));
  CLI::Option* failures = app->add_option("--hours-between-failures", command->hours_between_failures,
                                          "Of the whole run: with --tokens, says what failures cost")
                              ->check(is_number(1e-3, 1e9))
                              ->needs(tokens);
  app->add_option("--minutes-between-checkpoints", command->minutes_between_checkpoints,
                  "Default: checkpoint.interval or memory_interval, in steps of this length")
      ->check(is_number(0.0, 1e6))
      ->needs(failures);
  app->add_option("--restart-minutes", command->restart_minutes, "From a failure to the next step")
      ->check(is_number(0.0, 1e6))
      ->capture_default_str()
      ->needs(failures);
  app->add_flag("--json", command->json, "Print one line of JSON");
  add_page_options(*app, command->html, command->validation);
  app->footer("Keys of the configuration as in `tessera train`. Nothing is trained.");
  app->callback([command, arguments] { command->run(arguments->read()); });
}

struct SearchCommand {
  std::string cluster, engine, out, html, validation;
  RoutingOptions routing;
  bool replaces = false;
  std::vector<std::string> precisions;   // empty: the configuration's and those of the cluster
  std::vector<double> capacity_factors;  // empty: the configuration's, 1.1 and 1.5
  int num_ranks = 1, num_rows = 10;

  void run(const JobConfig& job) const {
    job.validate();
    require_plans_for_gpus("`tessera plan search`");
    const std::vector<ValidatedRun> validated = validation_of(validation);
    const Cluster machine = cluster_with_engine(cluster, engine, job);
    require(replaces || out.empty() || !path_exists(out), "'{}' exists; --force replaces it", out);
    const std::filesystem::path toml = out.empty() ? std::filesystem::path() : output_file(out, {});
    const std::filesystem::path page = html.empty() ? std::filesystem::path() : output_file(html, {});
    const std::optional<ExpertLoads> loads = routing.recorded(job);
    const Routing choices{routing.kind_for(job), pointer_to(loads)};
    const auto begin = std::chrono::steady_clock::now();
    const FoundLayouts found = search_layouts({.job = job,
                                               .num_ranks = num_ranks,
                                               .cluster = machine,
                                               .routing = choices,
                                               .precisions = searched_precisions(job, machine),
                                               .capacity_factors = searched_factors(job),
                                               .num_shown = num_rows,
                                               .num_threads = num_threads()});
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print("{} x {}: {} layouts fit, {} do not; {:.1f} s\n\n", num_ranks, machine.name, found.fitting.size(),
               found.num_too_large, seconds);
    require(!found.fitting.empty(), "no layout fits the {} of a GPU: use more GPUs{}",
            format_gib(static_cast<std::size_t>(machine.memory_bytes)),
            job.optimizer.state_dtype == DType::kFloat32 ? ", or bfloat16 moments (optimizer.state_dtype)" : "");
    const double best = found.fitting.front().tokens_per_second_per_gpu;
    print_head();
    for (std::size_t i = 0; i < std::min(found.fitting.size(), static_cast<std::size_t>(num_rows)); ++i) {
      print_row(found.fitting[i], best);
    }
    fmt::print(
        "\n= is within {:.0f} % of the fastest, less than the plan's error. *: weights are quantized for each pass. "
        "Memory is\nwith the least capacity factor, {}{}, and capacity is the largest that fits. Layouts that no other "
        "one beats in both\nspeed and memory:\n\n",
        100.0 * kError, capacity_text(std::ranges::min(searched_factors(job), gives_less_room)),
        loads ? " or the least one with room for the loads" : "");
    print_head();
    for (const FoundLayout& layout : frontier(found.fitting)) print_row(layout, best);
    JobConfig fastest = found.fitting.front().config;
    const MeshDegrees degrees = resolve(fastest.mesh_degrees(), num_ranks);
    fmt::print("\nThe fastest would gain:\n");
    for (const Sensitivity& one : sensitivities({fastest, Device::kCuda, degrees}, machine, choices)) {
      fmt::print("{:>7.1f} %  {}\n", 100.0 * one.gain, one.change);
    }
    if (!page.empty()) {
      const RunForecast forecast = forecast_run({fastest, Device::kCuda, degrees}, machine, choices, true);
      write_page(page, fastest, degrees, machine, forecast, found.fitting, validated);
    }
    if (toml.empty()) return;
    write_whole_file(toml, config_table(fastest).to_toml());
    fmt::print("\nThe fastest is in {}.\n", toml.string());
  }

  static constexpr double kError = 0.03;  // of a plan: docs/planner.md

  std::vector<std::string> searched_precisions(const JobConfig& job, const Cluster& machine) const {
    std::vector<std::string> all;
    const auto add = [&](const std::string& name) {
      if (std::ranges::count(all, name) == 0) all.push_back(name);
    };
    for (const std::string& name : precisions) {
      require(std::ranges::count(machine.precisions, name) > 0, "--precisions: {} has no kernels for '{}', but for {}",
              machine.name, name, fmt::join(machine.precisions, ", "));
      add(name);
    }
    if (!all.empty()) return all;
    const std::string own = precision_of(job);
    if (own == kConfiguredPrecision || std::ranges::count(machine.precisions, own) > 0) add(own);
    for (const std::string& name : machine.precisions) add(name);
    return all;
  }

  std::vector<double> searched_factors(const JobConfig& job) const {
    if (!capacity_factors.empty()) return capacity_factors;
    return {job.parallelism.expert_parallel_capacity_factor, 1.1, 1.5};
  }

  static void print_head() { print_cells({std::begin(kLayoutTitles), std::end(kLayoutTitles)}, ""); }

  void print_row(const FoundLayout& layout, double best) const {
    print_cells(layout_row(layout, num_ranks), layout.tokens_per_second_per_gpu >= (1.0 - kError) * best ? " =" : "");
  }

  static void print_cells(const std::vector<std::string>& cells, const char* mark) {
    constexpr std::size_t kWidths[std::size(kLayoutTitles)] = {4, 5, 5, 5, 7, 17, 10, 16, 9, 10, 19, 16};
    constexpr std::size_t kFirstText = 5;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      fmt::print("{}", i == kFirstText ? "  " : i > kFirstText + 3 ? " " : "");
      const std::string fill(kWidths[i] - std::min(kWidths[i], cells[i].size()), ' ');
      const bool is_text = i >= kFirstText && i < kFirstText + 3;  // schedule, recompute and precision
      fmt::print("{}{}", is_text ? cells[i] : fill, is_text ? fill : cells[i]);
    }
    fmt::print("{}\n", mark);
  }
};

void add_search_command(CLI::App& parent) {
  auto command = std::make_shared<SearchCommand>();
  CLI::App* app =
      parent.add_subcommand("search", "Which layouts fit a cluster that is not there, and which of them are fastest");
  const auto arguments = std::make_shared<ConfigArguments>(app);
  app->add_option("--cluster", command->cluster, "A file of clusters/: the rates of a kind of GPU")->required();
  app->add_option("--engine", command->engine, "A file of engines/: how another program's step differs from ours");
  app->add_option("--ranks", command->num_ranks, "GPUs of the run")->required()->transform(as_count(1, kMaxRanks));
  command->routing.add_to(*app);
  app->add_option("--precisions", command->precisions,
                  "Precisions to search: bf16, mxfp8, fp8_blockwise (default: the configuration's and the cluster's)")
      ->delimiter(',');
  app->add_option("--capacity-factors", command->capacity_factors,
                  "Values of parallelism.expert_parallel_capacity_factor (default: the configuration's, 1.1 and 1.5)")
      ->delimiter(',')
      ->check(is_number(0.0, 1e6));
  app->add_option("--rows", command->num_rows, "Layouts to print")->transform(as_count(1, 1000))->capture_default_str();
  app->add_option("--out,--output", command->out, "Write the configuration of the fastest layout to this file");
  app->add_flag("--force", command->replaces, "Replace that file if it exists");
  add_page_options(*app, command->html, command->validation);
  app->footer(
      "Keys of the configuration as in `tessera train`. Searched are the degrees of pipeline, tensor and expert\n"
      "parallelism, the schedule, the micro-batch, recomputation, precisions and capacity factors. "
      "training.global_batch_size stays as it is.");
  app->callback([command, arguments] { command->run(arguments->read()); });
}

}  // namespace

void add_plan_commands(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Look at what a run would do, before it runs");
  command->require_subcommand(1);
  add_schedule_command(*command);
  add_memory_command(*command);
  add_time_command(*command);
  add_search_command(*command);
}

}  // namespace tessera
