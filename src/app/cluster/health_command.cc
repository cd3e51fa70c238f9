#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "device/cuda.h"
#include "health/active_check.h"
#include "health/drain.h"
#include "health/gpu_probe.h"
#include "health/judge.h"
#include "health/node_probes.h"
#include "health/peer_rates.h"
#include "health/probe_runner.h"
#include "launch/engines/slurm.h"
#include "ops/runtime/inventory.h"
#include "run/record/run_info.h"
#include "system/child_process.h"
#include "system/file_lock.h"
#include "system/host_name.h"
#include "system/metrics_server.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLastingFolder = "/var/lib/tessera-health";  // outlives a boot
constexpr const char* kLedgerName = "ledger.jsonl";
constexpr const char* kDrainedName = "drained.txt";  // holds the reason for which we drained the node
constexpr double kProbeLimit = 2.0;

struct HealthOptions {
  std::string sysroot = "/", folder = kHealthFolder, ledger, node = host_name(), address, rates;
  GpuProbeOptions gpu;
  double period = 5.0, probe_limit = kProbeLimit;
  bool is_active = false, is_before_job = false, on_cpu = false, as_json = false, for_slurm = false, for_npd = false;
  ActiveCheckOptions active;
  int max_drained = 1;
};

std::vector<std::unique_ptr<Probe>> make_probes(const HealthOptions& options) {
  std::vector<std::unique_ptr<Probe>> probes = make_node_probes(Sysroot(options.sysroot));
  GpuProbeOptions gpu = options.gpu;
  gpu.sysroot = Sysroot(options.sysroot);
  probes.push_back(make_gpu_probe(gpu));
  if (options.gpu.is_idle) probes.push_back(make_leftover_probe(Sysroot(options.sysroot)));
  return probes;
}

/// Returns the folder of what must outlive a boot. The daemon's own folder is in memory by default.
fs::path lasting_folder(const HealthOptions& options) {
  return options.folder == kHealthFolder ? kLastingFolder : options.folder;
}

/// Returns what evidence makes of a node.
std::string_view level_of(EvidenceKind evidence) {
  return evidence == EvidenceKind::kHard ? "bad" : evidence == EvidenceKind::kSoft ? "suspect" : "alert";
}

std::string finding_line(const Finding& finding) {
  return fmt::format("  {:<8} {}{}{}: {}\n", level_of(finding.evidence), finding.signal,
                     finding.part.empty() ? "" : ", ", finding.part, finding.detail);
}

/// Returns how many GPUs the node has: as many as NVML counts, or as are expected. Returns nullopt if that is unknown.
std::optional<int> count_gpus(const HealthOptions& options, const std::vector<ProbeRunner::Outcome>& outcomes) {
  std::optional<int> count;
  if (options.gpu.expected_gpus > 0) count = options.gpu.expected_gpus;
  for (const ProbeRunner::Outcome& outcome : outcomes) {
    for (const Measurement& measurement : outcome.result.measurements) {
      if (measurement.name == kGpuCountName) count = std::max(count.value_or(0), static_cast<int>(measurement.value));
    }
  }
  return count;
}

/// Returns how many of `num_gpus` GPUs CUDA shows to this process. Slurm's Prolog gets CUDA_VISIBLE_DEVICES with the
/// GPUs of the job. The list ends at the first word that names no GPU, such as -1.
int visible_gpus(int num_gpus) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return num_gpus;
  int num_visible = 0;
  std::istringstream words(visible);
  for (std::string word; std::getline(words >> std::ws, word, ',');) {
    const bool is_index = !word.empty() && word.front() >= '0' && word.front() <= '9';
    if (!is_index && !word.starts_with("GPU-") && !word.starts_with("MIG-")) break;
    ++num_visible;
  }
  return std::min(num_gpus, num_visible);
}

/// Runs the active checks, and compares the rates with the expected ones or with those of the node's peers. CUDA should
/// be able to use `num_gpus` GPUs. A node without any is checked on its CPU. The rates are recorded if these GPUs are
/// all of the node's. Throws Error if there are GPUs, and this program has no CUDA.
ProbeResult check_actively(const HealthOptions& options, int num_gpus, bool checks_all) {
  ActiveCheckOptions active = options.active;
  active.device = !options.on_cpu && (num_gpus > 0 || cuda::available()) ? Device::kCuda : Device::kCpu;
  active.num_gpus = num_gpus;
  require(active.device == Device::kCpu || cuda::is_built(), "the active check of GPUs: {}", cuda::why_unavailable());
  const bool has_gpu = active.device == Device::kCuda && cuda::available();
  const std::string processor = has_gpu ? cuda::gpu_name() : processor_name();
  if (!options.rates.empty()) {
    if (const std::optional<ActiveRates> peers = find_peer_rates(options.rates, options.node, processor)) {
      if (active.expected_gemm_tflops == 0.0) active.expected_gemm_tflops = peers->gemm_tflops;
      if (active.expected_copy_gb_per_s == 0.0) active.expected_copy_gb_per_s = peers->copy_gb_per_s;
    }
  }
  ProbeResult result = run_active_checks(active);
  // A sick node's rates are no measure for others.
  if (!options.rates.empty() && result.findings.empty() && checks_all) {
    ActiveRates rates{.processor = processor};
    for (const Measurement& measurement : result.measurements) {
      if (measurement.name == kGemmRateName) rates.gemm_tflops = measurement.value;
      if (measurement.name == kCopyRateName) rates.copy_gb_per_s = measurement.value;
    }
    try {
      write_rates(options.rates, options.node, rates);
    } catch (const Error& error) {  // a full or broken disk elsewhere says nothing about this node
      spdlog::warn("the node's rates are not recorded: {}", error.what());
    }
  }
  return result;
}

/// Returns the daemon's verdict as what a probe finds. The daemon knows what has changed, which one look cannot see.
ProbeRunner::Outcome ask_daemon(const HealthOptions& options) {
  ProbeRunner::Outcome outcome{.probe = "daemon"};
  try {
    const std::optional<NodeVerdict> verdict = read_verdict(options.folder);
    require(verdict && verdict->is_fresh(unix_time()), "there is no verdict of the last {:g} s in '{}'",
            NodeVerdict::kFreshSeconds, options.folder);
    if (verdict->level == HealthLevel::kOk) return outcome;
    const bool is_bad = verdict->level == HealthLevel::kBad;
    std::set<std::string> signals;
    for (const NodeVerdict::Item& item : verdict->items) signals.insert(item.finding.signal);
    outcome.result.findings.push_back(
        {.signal = "verdict",
         .evidence = is_bad ? EvidenceKind::kHard : EvidenceKind::kSoft,
         .detail = is_bad ? verdict->reason : fmt::format("{}", fmt::join(signals, ", "))});
  } catch (const Error& error) {
    outcome.failure = error.what();
  }
  return outcome;
}

/// Tells the daemon what the active check has found. A check that passes counts only if it has checked all GPUs.
void report_active_check(const HealthOptions& options, const std::vector<Finding>& findings, bool checks_all) {
  // A job that begins is no repair, so its check must not return a bad node, nor forget what happened on another one.
  if (options.is_before_job && findings.empty()) return;
  if (!fs::is_directory(options.folder)) return;  // no daemon is there
  if (!checks_all && findings.empty()) {
    spdlog::warn(
        "this check returns no node: the number of GPUs is unknown (--gpus says it), or CUDA_VISIBLE_DEVICES hides "
        "some");
    return;
  }
  try {
    write_active_check(options.folder, unix_time(), findings);
  } catch (const Error& error) {
    spdlog::warn("the daemon does not learn of this check: {}", error.what());
  }
}

/// Runs all probes once, and the active checks if the options ask for them. Returns 1 if something is bad.
int check_node(const HealthOptions& options) {
  ProbeRunner runner(make_probes(options), options.probe_limit);
  std::vector<ProbeRunner::Outcome> outcomes = runner.look(0.0);
  outcomes.push_back(ask_daemon(options));
  // After a repair the active check decides, because the daemon waits for it.
  if (options.is_active && !options.is_before_job) {
    for (Finding& finding : outcomes.back().result.findings) finding.evidence = EvidenceKind::kAlert;
  }
  const std::optional<int> num_gpus = count_gpus(options, outcomes);
  const int num_visible = visible_gpus(num_gpus.value_or(0));
  const bool checks_all = options.on_cpu || num_visible == num_gpus;
  if (options.is_active) {
    outcomes.push_back({.probe = "active check", .result = check_actively(options, num_visible, checks_all)});
  }
  bool is_bad = false;
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  std::string text;
  for (const ProbeRunner::Outcome& outcome : outcomes) {
    const std::vector<Finding>& findings = outcome.result.findings;
    is_bad = is_bad || std::ranges::count(findings, EvidenceKind::kHard, &Finding::evidence) > 0;
    text += fmt::format("{:<12} {}\n", outcome.probe,
                        !outcome.failure.empty() ? "unknown: " + outcome.failure
                        : findings.empty()       ? fmt::format("ok, {} readings", outcome.result.measurements.size())
                                                 : fmt::format("{} findings", findings.size()));
    for (const Finding& finding : findings) text += finding_line(finding);
    json.push_back({{"probe", outcome.probe}, {"failure", outcome.failure}});
    NodeVerdict items;
    for (const Finding& finding : findings) items.items.push_back({finding, 0.0});
    json.back()["findings"] = to_json(items)["findings"];
    for (const Measurement& measurement : outcome.result.measurements) {
      nlohmann::ordered_json reading = {{"name", measurement.name}};
      for (const auto& [label, value] : measurement.labels) reading[label] = value;
      reading["value"] = json_number(measurement.value);
      json.back()["readings"].push_back(std::move(reading));
    }
  }
  std::cout << (options.as_json ? json_text(json, 2) + "\n" : text) << std::flush;
  if (options.is_active) report_active_check(options, outcomes.back().result.findings, checks_all);
  return is_bad ? 1 : 0;
}

class Daemon {
 public:
  explicit Daemon(const HealthOptions& options)
      : options_(options),
        lock_(made_folder(options) / "serve.lock", fmt::format("the folder '{}'", options.folder), {}),
        ledger_(ledger_path(options)),
        judge_(options.node, ledger_.read()),
        boot_id_(Sysroot(options.sysroot).text("/proc/sys/kernel/random/boot_id").value_or("")),
        runner_(make_probes(options), options.probe_limit) {
    resume();
    if (!options.address.empty()) server_.emplace(options.address, "tessera_node_");
  }

  int run() {
    const volatile StopRequest& stop = count_stop_signals();
    spdlog::info("health of {}: every {:g} s, verdicts in '{}'", options_.node, options_.period, options_.folder);
    while (stop.count == 0) {
      const Stopwatch watch;
      poll();
      while (stop.count == 0 && watch.seconds() < options_.period) {
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(0.2, options_.period - watch.seconds())));
      }
    }
    return 0;
  }

 private:
  static fs::path made_folder(const HealthOptions& options) {
    create_folder(options.folder);
    return options.folder;
  }

  static fs::path ledger_path(const HealthOptions& options) {
    if (!options.ledger.empty()) return options.ledger;
    return lasting_folder(options) / kLedgerName;
  }

  /// Continues from the last verdict, unless the machine has booted since.
  void resume() {
    try {
      const std::optional<NodeVerdict> before = read_verdict(options_.folder);
      if (!before || boot_id_.empty() || before->boot_id != boot_id_) return;
      judge_.resume(*before);
      bad_since_in_ledger_ = before->bad_since;
    } catch (const Error& error) {
      spdlog::warn("what was wrong before is unknown: {}", error.what());
    }
  }

  void poll() {
    const bool has_passed = take_active_check();
    std::vector<Finding> findings = active_findings_;
    std::map<std::string, std::string> failures;  // by probe
    bool is_complete = true;                      // whether all probes have looked that could look before
    const std::vector<ProbeRunner::Outcome> outcomes = runner_.look(clock_.seconds(), has_passed);
    for (const ProbeRunner::Outcome& outcome : outcomes) {
      findings.insert(findings.end(), outcome.result.findings.begin(), outcome.result.findings.end());
      if (outcome.failure.empty()) {
        could_look_.insert(outcome.probe);
      } else {
        failures[outcome.probe] = outcome.failure;
        is_complete = is_complete && !could_look_.contains(outcome.probe);
      }
    }
    for (const auto& [probe, failure] : failures) {
      if (!failures_.contains(probe)) spdlog::warn("a probe cannot look: {}: {}", probe, failure);
    }
    for (const auto& [probe, failure] : failures_) {
      if (!failures.contains(probe)) spdlog::info("the probe can look again: {}", probe);
    }
    failures_ = std::move(failures);
    NodeVerdict verdict = judge_.judge(findings, unix_time(), is_complete);
    verdict.boot_id = boot_id_;
    if (verdict.level != level_) {
      spdlog::log(verdict.level == HealthLevel::kOk ? spdlog::level::info : spdlog::level::warn, "{} is {}{}{}",
                  options_.node, name_of(verdict.level), verdict.reason.empty() ? "" : ": ", verdict.reason);
    }
    try {
      write_verdict(options_.folder, verdict);
      if (verdict.level == HealthLevel::kBad && verdict.bad_since != bad_since_in_ledger_) {
        ledger_.add(verdict);
        bad_since_in_ledger_ = verdict.bad_since;
      }
    } catch (const Error& error) {  // a full disk: the daemon goes on, and tries again
      spdlog::warn("{}", error.what());
    }
    level_ = verdict.level;
    if (server_) publish(verdict, outcomes);
  }

  void publish(const NodeVerdict& verdict, const std::vector<ProbeRunner::Outcome>& outcomes) {
    std::vector<Measurement> numbers = {
        {"health_level", "0 ok, 1 suspect, 2 bad", {}, static_cast<double>(verdict.level)},
        {"health_time_seconds", "Unix time of the verdict", {}, verdict.time},
        {"bad_total",
         "How often the node became bad, as the ledger has it",
         {},
         static_cast<double>(judge_.times_bad()),
         true}};
    for (const NodeVerdict::Item& item : verdict.items) {
      numbers.push_back({"finding",
                         "1 for each thing that is wrong",
                         {{"signal", item.finding.signal},
                          {"part", item.finding.part},
                          {"evidence", std::string(name_of(item.finding.evidence))}},
                         1.0});
    }
    for (const ProbeRunner::Outcome& outcome : outcomes) {
      const std::map<std::string, std::string> labels = {{"probe", outcome.probe}};
      numbers.push_back(
          {"probe_failed", "Whether the probe could not look", labels, outcome.failure.empty() ? 0.0 : 1.0});
      numbers.push_back({"probe_seconds", "Seconds that the probe took", labels, outcome.seconds});
      const std::vector<Measurement>& readings = outcome.result.measurements;
      numbers.insert(numbers.end(), readings.begin(), readings.end());
    }
    server_->publish(numbers);
  }

  double time_of_last_check() const {
    try {
      const std::optional<ActiveCheckResult> found = read_active_check(options_.folder);
      return found ? found->time : 0.0;
    } catch (const Error&) {  // take_active_check() tells of it
      return 0.0;
    }
  }

  /// Returns whether an active check has passed since the last poll.
  bool take_active_check() {
    try {
      const std::optional<ActiveCheckResult> found = read_active_check(options_.folder);
      if (!found || found->time == active_check_) return false;
      active_check_ = found->time;
      active_findings_ = found->findings;
      if (!found->findings.empty()) return false;
      spdlog::info("an active check has passed");
      judge_.pass_active_check(found->time);
      return true;
    } catch (const Error& error) {
      spdlog::warn("{}", error.what());
      return false;
    }
  }

  const HealthOptions& options_;
  FileLock lock_;
  HealthLedger ledger_;
  double bad_since_in_ledger_ = 0.0;  // of the last verdict that was added to the ledger
  Judge judge_;
  std::string boot_id_;
  ProbeRunner runner_;
  std::optional<MetricsServer> server_;
  Stopwatch clock_;
  HealthLevel level_ = HealthLevel::kOk;
  std::map<std::string, std::string> failures_;  // of the last poll, by probe
  std::set<std::string> could_look_;             // probes that have looked at least once
  /// The time of the last check that was read. Checks before the daemon's start do not count. Times are compared for
  /// equality, because a clock may be set back.
  double active_check_ = time_of_last_check();
  std::vector<Finding> active_findings_;  // findings of that check
};

/// Reports the daemon's verdict to Slurm. Ends within a second if Slurm answers as fast.
int act_for_slurm(const HealthOptions& options, const std::optional<NodeVerdict>& verdict) {
  if (!verdict) return 0;
  const fs::path record = lasting_folder(options) / kDrainedName;
  create_folder(record.parent_path());
  std::optional<std::string> own_reason;
  std::error_code missing;
  if (fs::exists(record, missing)) own_reason = read_text_file(record);
  const SchedulerNode now = find_slurm_node(options.node);
  // The launcher of a run may have drained the node for our reason already.
  const bool is_bad = verdict->level == HealthLevel::kBad;
  if (is_bad && now.is_drained && now.reason == verdict->reason && own_reason != now.reason) {
    write_whole_file(record, now.reason);
  }
  switch (decide(*verdict, now, own_reason, options.max_drained, unix_time())) {
    case DrainAction::kDrain:
      drain_slurm_node(options.node, verdict->reason);
      write_whole_file(record, verdict->reason);
      std::cout << fmt::format("drained {}: {}\n", options.node, verdict->reason);
      break;
    case DrainAction::kUndrain:
      undrain_slurm_node(options.node);
      fs::remove(record, missing);
      std::cout << fmt::format("returned {}: an active check has passed\n", options.node);
      break;
    case DrainAction::kLimited:
      std::cout << fmt::format("{} should be drained ({}), but {} nodes are, and --max-drained is {}\n", options.node,
                               verdict->reason, now.num_drained, options.max_drained);
      break;
    case DrainAction::kNone:
      break;
  }
  return 0;
}

/// Answers node-problem-detector as its plugin. The exit status is 0 for a healthy node, 1 for a problem and 2 for
/// unknown. node-problem-detector reads one line of 80 bytes at most.
int act_for_npd(const std::optional<NodeVerdict>& verdict) {
  constexpr std::size_t kLongest = 80;
  if (!verdict || !verdict->is_fresh(unix_time())) {
    std::cout << "no verdict: does tessera health serve run on this node?\n";
    return 2;
  }
  const bool is_bad = verdict->level == HealthLevel::kBad;
  std::cout << (is_bad ? verdict->reason : std::string(name_of(verdict->level))).substr(0, kLongest) << '\n';
  return is_bad ? 1 : 0;
}

int act(const HealthOptions& options) {
  require(options.for_slurm != options.for_npd, "expected one of --slurm and --npd");
  std::optional<NodeVerdict> verdict;
  try {
    verdict = read_verdict(options.folder);
  } catch (const Error& error) {  // a damaged file is never a reason to drain
    spdlog::warn("{}", error.what());
  }
  return options.for_slurm ? act_for_slurm(options, verdict) : act_for_npd(verdict);
}

void add_probe_options(CLI::App& command, HealthOptions& options) {
  command.add_option("--sysroot", options.sysroot, "Folder in place of /, for tests; default: /");
  command.add_option("--nvml", options.gpu.library, "NVIDIA's management library; default: libnvidia-ml.so.1");
  command.add_option("--gpus", options.gpu.expected_gpus, "GPUs that the node should have; default: those found first")
      ->transform(as_count());
  command.add_option("--probe-limit", options.probe_limit, "Seconds that a probe may take; default: 2")
      ->check(is_number(0.01, 1e4));
}

void add_folder_option(CLI::App& command, HealthOptions& options) {
  command.add_option("--folder", options.folder, fmt::format("Where the daemon writes; default: {}", kHealthFolder));
}

}  // namespace

void add_health_commands(CLI::App& app, int& status) {
  auto options = std::make_shared<HealthOptions>();
  CLI::App* health = app.add_subcommand("health", "Find sick nodes, and tell the scheduler of them");
  health->require_subcommand(1);

  CLI::App* check_command = health->add_subcommand("check", "Look at this node once; exit status 1 if it is bad");
  add_probe_options(*check_command, *options);
  add_folder_option(*check_command, *options);
  check_command->add_flag("--json", options->as_json, "Print JSON, with all readings");
  CLI::Option* active =
      check_command->add_flag("--active", options->is_active,
                              "Also multiply and copy for some seconds; a daemon takes a bad node back after that");
  check_command->add_flag("--check-on-cpu", options->on_cpu,
                          "With --active: check the CPU in place of the GPUs, for tests without CUDA");
  check_command->add_flag("--before-job", options->is_before_job,
                          "For a Prolog: a bad verdict counts, and a check that passes returns no node");
  check_command->add_flag("--idle", options->gpu.is_idle,
                          "No job runs here: processes of users, and GPU or shared memory that is in use, are bad");
  check_command->add_option("--rates", options->rates,
                            "Folder that all nodes see: what they reach with --active, by which each is judged");
  check_command->add_option("--node", options->node, "The node's name in --rates; default: the host's");
  check_command
      ->add_option("--expect-tflops", options->active.expected_gemm_tflops,
                   "What the node should reach with --active, in place of its peers' median; below 80 % is bad")
      ->check(is_number(0.0, 1e6));
  check_command
      ->add_option("--expect-copy", options->active.expected_copy_gb_per_s,
                   "GB/s that the node should copy with --active, in place of its peers' median; below 80 % is bad")
      ->check(is_number(0.0, 1e6));
  for (const char* of_active : {"--check-on-cpu", "--rates", "--expect-tflops", "--expect-copy"}) {
    check_command->get_option(of_active)->needs(active);
  }
  check_command->get_option("--node")->needs(check_command->get_option("--rates"));
  check_command->callback([options, &status] { status = check_node(*options); });

  CLI::App* serve = health->add_subcommand("serve", "The daemon of a node: looks every few seconds, writes a verdict");
  add_probe_options(*serve, *options);
  add_folder_option(*serve, *options);
  serve->add_option("--period", options->period, "Seconds between two looks; default: 5")
      ->check(is_number(0.01, 0.5 * NodeVerdict::kFreshSeconds));
  serve->add_option("--address", options->address, "HOST:PORT to serve metrics for Prometheus at; default: none");
  serve->add_option("--ledger", options->ledger,
                    fmt::format("File with what was wrong before; default: {} in {}, or in --folder if that is given",
                                kLedgerName, kLastingFolder));
  serve->add_option("--node", options->node, "The node's name; default: the host's");
  serve->callback([options, &status] { status = Daemon(*options).run(); });

  add_health_links_command(*health, status);

  CLI::App* act_command = health->add_subcommand("act", "Tell a scheduler what the daemon says");
  add_folder_option(*act_command, *options);
  CLI::Option* slurm =
      act_command->add_flag("--slurm", options->for_slurm, "Drain or return this node; for HealthCheckProgram");
  act_command->add_flag("--npd", options->for_npd, "Answer as a plugin of node-problem-detector");
  act_command
      ->add_option("--max-drained", options->max_drained,
                   "Drain no node while so many are drained for a [node_problem]; default: 1")
      ->transform(as_count())
      ->needs(slurm);
  act_command->add_option("--node", options->node, "The node's name; default: the host's")->needs(slurm);
  act_command->callback([options, &status] { status = act(*options); });
}

}  // namespace tessera
