#include "launch/launcher.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <utility>

#include "base/error.h"
#include "base/exit_status.h"
#include "base/file.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "launch/incident.h"
#include "launch/ladder.h"
#include "launch/launch_files.h"
#include "launch/launch_record.h"
#include "launch/launch_state.h"
#include "launch/node_pool.h"
#include "launch/requests.h"
#include "launch/scheduler_client.h"
#include "launch/watch/channel.h"
#include "launch/watch/protocol.h"
#include "run/record/run_folder.h"
#include "run/record/run_info.h"
#include "run/restart_step.h"
#include "run/state/replica_check.h"
#include "system/file_lock.h"
#include "system/host_name.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// How many seconds a monitor may take to start on a busy machine. All monitors start at once.
constexpr double kMonitorStart = 30.0;
/// How many seconds lost nodes are tried once more at the end of a run. ssh gives a connection up after 5 s.
constexpr double kReaching = 6.0;
/// How many seconds a node that the scheduler has given may take to connect, before another one is asked for.
constexpr double kNewNodeComes = 300.0;
/// How many seconds evidence may take to arrive, and ranks may take to end.
constexpr double kGathering = 1.5, kEnding = 4.0;

/// The ranks of the attempt under way.
struct Attempt {
  pid_t process = 0;                      // mpirun, srun or the one rank; 0: none
  std::optional<int> status;              // of that process, once it has ended
  int signals_passed = 0;                 // of those that ask the launch to end
  bool stop_is_told = false;              // a message says that the run is asked to end
  std::optional<double> done_since = {};  // when all ranks had announced that they have done what they should
  bool have_started = false;              // this launcher has started ranks before
  std::optional<RunWatch> watch;          // not set between attempts
  std::vector<RankState> evidence;        // what the ranks' files said when something failed

  void reap() {
    int ended = 0;
    if (process != 0 && !status && waitpid(process, &ended, WNOHANG) == process) status = exit_status_of(ended);
  }
};

/// The incidents that are not over, and what they cost.
struct Recovery {
  std::optional<Incident> healing;       // set until the run is as far as before, or fails again
  std::int64_t step_before_failure = 0;  // the run has healed when it reaches this step again
  std::optional<double> requeued_at;  // Unix time when the launch before asked for a requeue; set until it has healed
  std::optional<Incident> differed;   // replicas differed; set until a replay has shown whose state was wrong
  std::vector<std::string> nodes_that_differed;  // the nodes of that attempt, in the order of ranks
  Stopwatch since_looked;                        // for that replay
  bool slow_is_told = false;                     // a warning says that a rank is slow and has no spare

  bool is_healing(const Incident& incident) const { return healing && healing->number == incident.number; }
  /// Ends the healing at Unix time `end`. Returns the incident, with what it has cost.
  Incident end_healing(double end) {
    const bool has_differed = differed && is_healing(*differed);
    Incident incident = *std::exchange(healing, std::nullopt);
    incident.seconds_lost = std::max(0.0, end - incident.lost_from);
    if (has_differed) differed = incident;
    return incident;
  }
};

class Launcher {
 public:
  Launcher(const LauncherOptions& options, const JobConfig& config, std::unique_ptr<Engine> engine,
           const volatile StopRequest& stop)
      : options_(options),
        config_(config),
        engine_(std::move(engine)),
        stop_(stop),
        channel_(engine_->is_one_machine()),
        ladder_(options.restarts_per_hour, !engine_->job().empty()),
        record_(config.job.dump_folder) {
    state().begin = unix_time();
    create_folder(dump_folder());
    identify();
    for (const std::string& name : engine_->nodes()) nodes_.add({.name = name});
    limit_nodes();
    if (!options_.prometheus_address.empty()) record_.serve(options_.prometheus_address);
  }

  ~Launcher() {
    for (LaunchNode& node : nodes_) node.close_monitor();
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    try {
      start_monitors();
      choose_nodes();
    } catch (const Error& error) {
      if (state().attempt == 0) {
        exit_status_ = static_cast<int>(error.status());
        finish("stopped");
        throw;
      }
      // A launch that goes on with a run leaves the run's name, and the copies in memory, to the next launch. That one
      // may reach the nodes.
      if (error.status() != ExitStatus::kWrongInput) throw;
      throw Error(error.what(), ExitStatus::kProgramError);
    }
    nodes_.keep_monitors(true);
    requests_.emplace(dump_folder());
    while (true) {
      std::optional<Failure> failure = run_attempt();
      if (!failure) return finish(exit_status_ == 0 ? "done" : "stopped");
      if (!heal(std::move(*failure))) return finish("stopped");
      // Storage that has failed takes no checkpoint.
      const bool can_save = memory_has_steps() && recovery_.healing->failure.kind != FailureKind::kStorageFailed;
      if (stop_.count > 1 || (stop_.count == 1 && !can_save)) {
        exit_status_ = 128 + stop_.signal;
        return finish("stopped");
      }
    }
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  LaunchState& state() { return record_.state(); }
  const LaunchState& state() const { return record_.state(); }
  fs::path dump_folder() const { return config_.job.dump_folder; }
  fs::path checkpoint_folder() const { return dump_folder() / config_.checkpoint.folder; }
  fs::path node_folder() const {
    return options_.node_folder.empty() ? fs::path("/dev/shm/tessera-" + state().run_id) : options_.node_folder;
  }

  /// Keeps only as many nodes as are asked for. A run that resumes may have lost nodes for which there were spares.
  void limit_nodes() {
    const auto num_active = static_cast<std::size_t>(options_.num_nodes);
    const std::size_t needed = num_active + static_cast<std::size_t>(options_.num_spares);
    const bool can_begin = state().attempt > 0 || options_.grows;
    if (can_begin && nodes_.size() >= num_active && nodes_.size() < needed) {
      spdlog::warn("the run begins with {} spares, fewer than --spares {}: the engine {} has {} nodes",
                   nodes_.size() - num_active, options_.num_spares, engine_->name(), nodes_.size());
      return;
    }
    require(nodes_.size() >= needed,
            "--nodes {} and --spares {} need {} nodes, but the engine {} has {}: give fewer, or start with more "
            "({})",
            options_.num_nodes, options_.num_spares, needed, engine_->name(), nodes_.size(),
            engine_->name() == "slurm" ? "sbatch -N" : "--hosts");
    if (nodes_.size() > needed) {
      spdlog::warn("{} of {} nodes are left out: --nodes {} and --spares {} need no more", nodes_.size() - needed,
                   nodes_.size(), options_.num_nodes, options_.num_spares);
    }
    nodes_.keep_first(needed);
  }

  /// Returns what the launch before has left in launch.json, or nullopt if there was none.
  std::optional<LaunchState> state_before() const {
    try {
      return read_launch_state(dump_folder());
    } catch (const Error& error) {
      if (error.status() != ExitStatus::kWrongInput) throw;
      fail("{}; move the file away to go on from the last checkpoint: copies in memory are then not found",
           error.what());
    }
  }

  /// Finds the run and the number of its last attempt, and locks the run.
  void identify() {
    const std::optional<LaunchState> before = state_before();
    const std::optional<RunIdentity> trained = read_run_identity(dump_folder());
    state().run_id = config_.job.run_id;
    if (state().run_id.empty() && before && !before->has_ended()) state().run_id = before->run_id;
    if (state().run_id.empty()) state().run_id = identify_run(config_, std::nullopt).id;
    const bool is_of_run = before && before->run_id == state().run_id;
    if (is_of_run) {
      state().attempt = before->attempt;
      state().begin = before->begin;
      state().incidents = before->incidents;
      state().seconds_lost = before->seconds_lost;
    }
    if (trained && trained->id == state().run_id) state().attempt = std::max(state().attempt, trained->attempt);
    for (const char ch : state().run_id) {
      require(
          std::isalnum(static_cast<unsigned char>(ch)) != 0 || std::string_view("-_.").find(ch) != std::string::npos,
          "job.run_id is '{}': with `tessera launch` it names folders, and may have letters, digits, '-', '_' "
          "and '.'",
          state().run_id);
    }
    state().host = host_name();
    state().pid = ::getpid();
    state().engine = engine_->name();
    state().endpoint = endpoint();
    state().num_steps = config_.training.steps;
    state().wanted_spares = options_.num_spares;
    const auto restarts = static_cast<int>(num_slurm_requeues());
    if (!engine_->job().empty()) state().job = {.id = engine_->job(), .restarts = restarts};
    lock_.emplace(
        dump_folder() / kLaunchLockName, fmt::format("the run in '{}'", dump_folder().string()),
        FileLock::Options{.owner = fmt::format("launch of run {}, requeued {} times", state().run_id, restarts),
                          .takes_over = [&](const std::string&) { return restarts > 0; }});
    if (!is_of_run) return;
    if (before->step > 0 && !before->has_ended()) take_over_from(*before);
    if (before->step > 0 && before->exit_status == static_cast<int>(ExitStatus::kRequeue)) {
      recovery_.requeued_at = before->time;
      recovery_.step_before_failure = before->step;
    }
    // A launch that was lost, or whose job was requeued, goes on from what it has saved. A launch by a person who asks
    // for checkpoint.load_step anew begins there.
    const bool goes_on = !before->has_ended() || was_requeued(*before);
    if (goes_on && before->load_step && before->load_step->load_step == config_.checkpoint.load_step) {
      state().load_step = before->load_step;
    }
  }

  /// Returns whether the scheduler has started this launcher's job again since `before` was written.
  bool was_requeued(const LaunchState& before) const {
    const auto &job = state().job, &earlier = before.job;
    return job && earlier && job->id == earlier->id && job->restarts > earlier->restarts;
  }

  /// Records an incident if the launcher before this one ended without a word: its loss is an incident of the run.
  void take_over_from(const LaunchState& lost) {
    const std::optional<double> noticed = read_launcher_loss(dump_folder(), lost);
    const bool is_requeued = was_requeued(lost);
    Incident incident{
        .number = ++state().incidents,
        .noticed_at = noticed.value_or(unix_time()),
        .lost_from = lost.time,
        .attempt = lost.attempt,
        .failure = {.kind = FailureKind::kLauncherLost,
                    .node = lost.host,
                    .sure = Certainty::kLikely,
                    .step = lost.step,
                    .evidence = {fmt::format(
                        "the last word of the launcher on {} (process {}) was that step {} had begun", lost.host,
                        lost.pid, lost.step)}},
        .decision = {is_requeued ? Action::kRequeue : Action::kRestart,
                     is_requeued ? fmt::format("job {} was requeued", lost.job->id) : "the run was launched again"},
        .last_step = lost.step};
    spdlog::warn("incident {}: {}", incident.number, describe(incident));
    record_.write_incident(incident);
    recovery_.step_before_failure = incident.last_step;
    recovery_.healing = std::move(incident);
  }

  std::string endpoint() const {
    const std::string address = engine_->is_one_machine()  ? "127.0.0.1"
                                : options_.address.empty() ? host_name()
                                                           : options_.address;
    return fmt::format("tcp://{}:{}", address, channel_.port());
  }

  void start_monitor(LaunchNode& node) {
    node.close_monitor();
    std::array<int, 2> pipe{};
    require(pipe2(pipe.data(), O_CLOEXEC) == 0, "cannot make a pipe: {}", std::strerror(errno));
    const CommandLine command =
        engine_->on_node(node.name, {options_.program, "monitor", "--node", node.name, "--connect", endpoint(),
                                     "--run-id", state().run_id, "--health-folder", options_.health_folder.string(),
                                     "--folder", node_folder().string()});
    try {
      node.monitor = spawn(command.front(), {command.begin() + 1, command.end()}, {.input = pipe[0]});
    } catch (const Error&) {
      for (const int end : pipe) close(end);
      throw;
    }
    node.input = pipe[1];
    const std::string line = channel_.key() + "\n";
    static_cast<void>(!::write(node.input, line.data(), line.size()));
    close(pipe[0]);  // only after the write: if the monitor had ended already, SIGPIPE would end this process
    node.next_try = now() + node.between_tries;
  }

  /// Starts all monitors. Throws Error unless all nodes get a monitor and are fit. A run that goes on only needs as
  /// many as train.
  void start_monitors() {
    write_state("starting");
    for (LaunchNode& node : nodes_) start_monitor(node);
    const Stopwatch watch;
    const auto is_decided = [](const LaunchNode& node) {
      return node.has_come || !node.problem.empty() || (node.monitor == 0 && node.closed > 0.0);
    };
    while (watch.seconds() < kMonitorStart && !std::ranges::all_of(nodes_, is_decided)) {
      pump();
      if (stop_.count > 0) {
        throw Error(fmt::format("stopped by signal {} before the ranks were started", stop_.signal),
                    static_cast<ExitStatus>(128 + stop_.signal));
      }
    }
    std::string missing;
    for (const LaunchNode& node : nodes_) {
      if (node.has_come && node.problem.empty()) continue;
      const std::string line = shell_line(engine_->on_node(node.name, {"true"}));
      missing += fmt::format("\n  {}: {}", node.name,
                             !node.problem.empty() ? node.problem
                             : node.monitor == 0
                                 ? fmt::format("its monitor ended with status {}; try: {}", node.last_status, line)
                                 : fmt::format("its monitor did not reach {} within {:g} s; check that the node can "
                                               "connect to this machine, or give --address",
                                               endpoint(), kMonitorStart));
    }
    const auto is_fit = [](const LaunchNode& node) { return node.has_come && node.problem.empty(); };
    const bool can_go_on = state().attempt > 0 && std::ranges::count_if(nodes_, is_fit) >= options_.num_nodes;
    require(missing.empty() || can_go_on, "not all of {} nodes are fit, no rank was started:{}", nodes_.size(),
            missing);
    if (!missing.empty()) spdlog::warn("the run goes on without nodes that are not fit yet:{}", missing);
    for (LaunchNode& node : nodes_) {
      if (!is_fit(node)) node.lose(now());
    }
    spdlog::info("run {}: {} of {} nodes train, {} ranks on each, {} in reserve", state().run_id, options_.num_nodes,
                 nodes_.size(), options_.ranks_per_node, nodes_.size() - static_cast<std::size_t>(options_.num_nodes));
  }

  /// Lets the first healthy nodes train. Throws Error if there are too few.
  void choose_nodes() {
    std::string sick;
    for (LaunchNode& node : nodes_) {
      if (!node.sickness.empty()) {
        sick += fmt::format("\n  {}: {}", node.name, node.sickness);
        node.drain(true);
      } else if (node.role == NodeRole::kSpare &&
                 nodes_.active().size() < static_cast<std::size_t>(options_.num_nodes)) {
        nodes_.activate(node);
      }
    }
    require(nodes_.active().size() == static_cast<std::size_t>(options_.num_nodes),
            "{} of {} nodes are well, and {} are to train, no rank was started:{}\n"
            "After a repair run tessera health check --active there",
            nodes_.active().size(), nodes_.size(), options_.num_nodes, sick);
    if (!sick.empty()) spdlog::warn("nodes that are not well are left out:{}", sick);
  }

  /// Handles the messages that arrive within 50 ms, and looks after processes.
  void pump() {
    std::optional<Message> message = channel_.receive(milliseconds(50));
    for (const std::string& name : channel_.take_disconnected()) {
      if (LaunchNode* node = nodes_.find(name); node != nullptr && node->closed == 0.0) node->closed = now();
    }
    for (; message; message = channel_.receive(milliseconds(0))) hear(*message);
    nodes_.reap(now());
    attempt_.reap();
    scheduler_.reap();
    for (LaunchNode& node : nodes_) look_after(node);
    if (options_.grows && nodes_.keeps_monitors()) grow();
    if (requests_) {
      for (const std::string& name : requests_->take_undrained()) undrain(name);
    }
    if (record_.is_old()) write_state(state().state);
  }

  void hear(const Message& message) {
    LaunchNode* node = nodes_.find(message.node);
    if (node == nullptr) return;
    const std::string what = message.body.value("say", "");
    node->seen = now();
    node->closed = 0.0;
    if (what == "hello" || what == "beat") take_health(*node, message.body);
    if (what == "hello") {
      const std::string other_version = message.body.value("version", "");
      const std::string problem =
          other_version == version()
              ? ""
              : fmt::format("it runs Tessera {}, this is {}: install the same program", other_version, version());
      if (!problem.empty() && nodes_.keeps_monitors()) spdlog::warn("{}: {}", node->name, problem);
      node->problem = problem;
      node->has_come = true;
      node->between_tries = kBetweenTries;
      if (node->role == NodeRole::kDrained && node->sickness.empty()) node->role = NodeRole::kLost;
      channel_.send({node->name, {{"do", "watch"}, {"attempt", state().attempt}}});
    } else if (what == "beat") {
      answer_beat(*node, message);
    } else if (what == "evidence" && message.body.value("attempt", std::int64_t{0}) == state().attempt) {
      take_evidence(*node, message);
    } else if (what == "ended") {
      const auto left = message.body.value("left", std::vector<int>());
      if (left.empty()) node->ended = std::max(node->ended, message.body.value("attempt", std::int64_t{0}));
    }
  }

  /// Records what the node's health daemon reports. A silent daemon reports nothing new.
  void take_health(LaunchNode& node, const nlohmann::json& message) {
    const nlohmann::json health = message.value("health", nlohmann::json());
    if (!health.is_object()) return;
    node.sickness = health.value("is_bad", false) ? health.value("reason", "it is bad") : "";
    node.active_check = health.value("active_check", 0.0);
    if (!node.sickness.empty()) return note_sick_if_drained(node);
    node.is_sickness_told = false;
    if (node.role != NodeRole::kDrained) return;
    if (!node.check_before_drain) node.check_before_drain = node.active_check;  // the daemon was silent at the drain
    if (*node.active_check <= *node.check_before_drain) return;
    spdlog::info("{} has passed its active check: it is a spare once its old ranks have ended", node.name);
    // A node that was drained with the daemon's reason is returned by `tessera health act`.
    if (!node.is_drained_as_sick) scheduler_.tell(engine_->undrain(node.name, node.drain_reason));
    return_node(node);
  }

  /// Hands a slow node's drain over to its health daemon, if the node's active check has found the cause.
  void note_sick_if_drained(LaunchNode& node) {
    if (node.role != NodeRole::kDrained || node.is_drained_as_sick) return;
    node.is_drained_as_sick = true;
    spdlog::warn("{} is sick: {}", node.name, node.sickness);
    scheduler_.tell(engine_->drain(node.name, node.sickness));
  }

  /// Starts the active check on a node that was slow. Its health daemon reads the result.
  void check_node(LaunchNode& node) {
    CommandLine check = {options_.program, "health", "check", "--active", "--folder", options_.health_folder.string(),
                         "--node",         node.name};
    if (!options_.health_rates.empty()) check.insert(check.end(), {"--rates", options_.health_rates.string()});
    spdlog::info("{} was slow: its active check begins", node.name);
    scheduler_.tell(engine_->on_node(node.name, check));
  }

  /// Makes a drained node a spare as soon as nothing of its old ranks is left.
  void return_node(LaunchNode& node) {
    node.role = NodeRole::kLost;
    node.is_drained_as_sick = false;
    ladder_.forget_failures(node.name);
  }

  void answer_beat(LaunchNode& node, const Message& message) {
    if (!node.problem.empty() && node.role != NodeRole::kActive) return;  // its monitor ends, and is started again
    if (node.role == NodeRole::kLost) {
      // The node is back after a reboot, a broken link or a freeze. Nothing of what it did before may be left.
      if (node.ended < state().attempt - 1) {
        channel_.send({node.name, {{"do", "end"}, {"attempt", state().attempt - 1}}});
        return;
      }
      if (!node.has_come) return;
      node.role = NodeRole::kSpare;
      spdlog::info("{} is {}, as a spare", node.name, std::exchange(node.is_new, false) ? "there" : "back");
    }
    if (attempt_.watch && message.body.value("attempt", std::int64_t{0}) == state().attempt) {
      std::vector<RankReport> reports;
      for (const nlohmann::json& rank : message.body.value("ranks", nlohmann::json::array())) {
        reports.push_back(report_from_json(rank));
      }
      attempt_.watch->report(node.name, reports, now());
    }
    channel_.send({node.name, {{"do", "watch"}, {"attempt", state().attempt}}});
  }

  void take_evidence(LaunchNode& node, const Message& message) {
    node.has_evidence = true;
    const auto processes = message.body.value("processes", std::vector<int>());
    for (std::size_t i = 0; i < std::min(processes.size(), message.files.size()); ++i) {
      try {
        RankState state = parse_rank_file(std::as_bytes(std::span(message.files[i])), "of " + node.name);
        state.process = static_cast<ProcessState>(processes[i]);
        attempt_.evidence.push_back(std::move(state));
      } catch (const Error& error) {
        spdlog::warn("{}", error.what());
      }
    }
  }

  /// Asks the scheduler for a node while too few are fit, one at a time. A scheduler that does not answer must not stop
  /// a run.
  void grow() {
    try {
      if (scheduler_.is_asking()) {
        take_new_node();
      } else {
        ask_for_node();
      }
    } catch (const Error& error) {
      const double seconds = scheduler_.note_refused(now());
      spdlog::warn("no node could be asked for, the next try is in {:.0f} s: {}", seconds, error.what());
    }
  }

  void ask_for_node() {
    const auto is_fit = [](const LaunchNode& node) {
      const bool is_awaited = node.is_new && now() - node.given < kNewNodeComes;
      return (node.role == NodeRole::kActive || node.role == NodeRole::kSpare || is_awaited) && node.sickness.empty();
    };
    const auto num_fit = std::ranges::count_if(nodes_, is_fit);
    if (num_fit >= options_.num_nodes + options_.num_spares || !scheduler_.may_ask(now())) return;
    const std::optional<CommandLine> ask = engine_->grow();
    if (!ask) {
      scheduler_.never_ask();
      return;
    }
    spdlog::info("{} nodes are fit and {} are wanted: the scheduler is asked for one", num_fit,
                 options_.num_nodes + options_.num_spares);
    scheduler_.ask(*ask);
  }

  void take_new_node() {
    const std::optional<int> status = scheduler_.take_answer();
    if (!status) return;
    bool is_new = false;  // decides, not the status: salloc may end with 1 although the job has grown
    for (const std::string& name : engine_->grown_nodes()) {
      if (nodes_.find(name) != nullptr) continue;
      is_new = true;
      spdlog::info("{} was added: it is a spare once its monitor has come", name);
      nodes_.add({.name = name, .role = NodeRole::kLost, .is_new = true, .given = now()});
    }
    require(is_new, "the scheduler gave none (status {})", *status);
    scheduler_.note_granted(now());
  }

  void look_after(LaunchNode& node) {
    if (!nodes_.keeps_monitors()) return;
    if (node.monitor == 0 && now() > node.next_try) {
      try {
        start_monitor(node);
      } catch (const Error& error) {  // there are too many processes or descriptors for now
        spdlog::warn("the monitor of {} could not be started: {}", node.name, error.what());
        node.next_try = now() + 1.0;
      }
    }
    if (node.role == NodeRole::kActive && node.closed > 0.0 && now() - node.closed > kMonitorRestart &&
        attempt_.watch) {
      attempt_.watch->lose(
          node.name,
          fmt::format("its monitor's connection ended, and no new one could be made within {:g} s", kMonitorRestart));
    }
    if (node.role == NodeRole::kSpare && node.closed > 0.0 && now() - node.closed > kMonitorRestart) {
      node.lose(now());
      spdlog::warn("the spare {} is lost", node.name);
    }
  }

  /// Returns a drained node because an operator asks for it.
  void undrain(const std::string& name) {
    LaunchNode* node = nodes_.find(name);
    if (node == nullptr || node->role != NodeRole::kDrained) {
      spdlog::warn("tessera undrain '{}': {}", name,
                   node == nullptr ? "the run has no such node" : "the node is " + name_of(node->role));
      return;
    }
    spdlog::info("{} was returned by tessera undrain: it is a spare once its old ranks have ended", name);
    return_node(*node);
    scheduler_.tell(engine_->undrain(name, ""));
  }

  /// Returns the checkpoint.load_step of a restart, or nullopt for an attempt that begins as the launch was told.
  std::optional<std::int64_t> load_step_of_restart() {
    if (state().load_step) return restart_step(checkpoint_folder(), *state().load_step);
    if (config_.checkpoint.load_step >= 0) {
      state().load_step = begin_of_launch(checkpoint_folder(), config_.checkpoint.load_step);
    }
    return std::nullopt;
  }

  void start_ranks() {
    ++state().attempt;
    const std::optional<std::int64_t> load_step = load_step_of_restart();
    write_state("starting");
    for (const LaunchNode& node : nodes_) channel_.send({node.name, {{"do", "watch"}, {"attempt", state().attempt}}});
    CommandLine program = {options_.program};
    program.insert(program.end(), options_.arguments.begin(), options_.arguments.end());
    program.push_back("--job.run_id=" + state().run_id);
    program.push_back(fmt::format("--job.attempt={}", state().attempt));
    program.push_back("--job.node_folder=" + node_folder().string());
    if (config_.checkpoint.enable) program.emplace_back("--checkpoint.fallback");  // nobody is there to choose
    if (load_step) program.push_back(fmt::format("--checkpoint.load_step={}", *load_step));
    const CommandLine command =
        engine_->on_ranks(nodes_.active(), options_.ranks_per_node, {kAttemptVariable}, program);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    attempt_.status.reset();
    attempt_.signals_passed = 0;
    attempt_.stop_is_told = false;
    attempt_.done_since.reset();
    attempt_.process = spawn(
        command.front(), {command.begin() + 1, command.end()},
        {.input = nothing, .variables = {fmt::format("{}={}:{}", kAttemptVariable, state().run_id, state().attempt)}});
    close(nothing);
    attempt_.have_started = true;
    WatchOptions watch = options_.watch;
    watch.start_timeout = static_cast<double>(config_.comm.init_timeout_seconds);
    watch.other_timeout = static_cast<double>(config_.comm.train_timeout_seconds);
    attempt_.watch.emplace(watch, nodes_.active(), options_.ranks_per_node, now());
  }

  /// Returns what went wrong, or nullopt if the ranks have ended as they should.
  std::optional<Failure> run_attempt() {
    try {
      start_ranks();
    } catch (const Error& error) {
      if (!attempt_.have_started) throw;
      attempt_.watch.emplace(options_.watch, nodes_.active(), options_.ranks_per_node, now());
      const bool is_of_storage = error.status() == ExitStatus::kStorageFailed;
      return Failure{.kind = is_of_storage ? FailureKind::kStorageFailed : FailureKind::kProgramError,
                     .evidence = {fmt::format("the ranks could not be started: {}", error.what())}};
    }
    std::optional<double> ended;  // when the ranks' process ended
    while (true) {
      pump();
      if (stop_.count > 0 && !attempt_.status && attempt_.watch->step() == 0 && !memory_has_steps()) {
        spdlog::info("signal {}: no step has begun, so there is nothing to save", stop_.signal);
        end_ranks();
        exit_status_ = 128 + stop_.signal;
        return std::nullopt;
      }
      pass_signals();
      note_progress();
      if (std::optional<Failure> failure = find_wrong_state()) return failure;
      if (attempt_.status) {
        if (!ended) ended = now();
        const bool is_done = *attempt_.status == 0;
        if (is_done || (stop_.count > 0 && *attempt_.status > 128)) {
          // A run may be over before the monitors have reported its steps.
          const Stopwatch watch;
          while (recovery_.healing && watch.seconds() < kGathering) {
            pump();
            note_progress();
          }
          exit_status_ = is_done ? 0 : 128 + stop_.signal;
          return std::nullopt;
        }
      } else if (have_ended_without_starter()) {
        spdlog::warn("all ranks have done what they should, but {} does not end: it is killed",
                     engine_->is_one_machine() ? "the process that started them" : "mpirun or srun");
        end_ranks();
        exit_status_ = 0;
        return std::nullopt;
      }
      if (std::optional<Failure> failure = attempt_.watch->find(now())) {
        const bool can_wait = failure->kind == FailureKind::kRankSlow && nodes_.num_spares(now()) == 0;
        if (!can_wait) return settle(std::move(*failure));
        if (!recovery_.slow_is_told) spdlog::warn("{}; there is no spare for it", failure->evidence.front());
        recovery_.slow_is_told = true;
      }
      if (std::optional<Failure> failure = find_sick_node()) return failure;
      if (ended && now() - *ended > 2.0) {
        const std::optional<FailureKind> kind = kind_of_status(*attempt_.status);
        return Failure{
            .kind = kind.value_or(FailureKind::kProgramError),
            .step = attempt_.watch->step(),
            .evidence = {fmt::format("the ranks ended with status {}, and none of them said why", *attempt_.status)}};
      }
    }
  }

  /// Returns whether copies in memory may have steps that no checkpoint has, because the run is not as far as before.
  bool memory_has_steps() const {
    return (recovery_.healing || recovery_.requeued_at) && recovery_.step_before_failure > 0;
  }

  /// Passes the signals on that ask the run to end. mpirun and srun pass SIGUSR1 on to ranks that have started. So the
  /// first signal waits until the ranks have begun a step.
  void pass_signals() {
    for (; attempt_.signals_passed < stop_.count; ++attempt_.signals_passed) {
      const bool is_first = attempt_.signals_passed == 0;
      if (is_first && !std::exchange(attempt_.stop_is_told, true)) {
        spdlog::info("signal {}: the run saves and ends; a second one ends it at once", stop_.signal);
      }
      if (is_first && stop_.count == 1 && attempt_.watch->step() == 0) return;
      if (!attempt_.status) kill(attempt_.process, is_first ? SIGUSR1 : SIGKILL);
    }
  }

  /// Returns whether all ranks have announced their end for so long that the process that started them must hang.
  bool have_ended_without_starter() {
    if (!attempt_.watch->are_done()) return false;
    if (!attempt_.done_since) attempt_.done_since = now();
    return now() - *attempt_.done_since > static_cast<double>(config_.comm.init_timeout_seconds);
  }

  /// Returns a failure if a node that trains is called bad by its health daemon and there is a spare for it. It waits
  /// for the first steps: without copies in memory of this attempt, a restart would lose more than it saves.
  std::optional<Failure> find_sick_node() {
    for (LaunchNode& node : nodes_) {
      if (node.role != NodeRole::kActive || node.sickness.empty() || attempt_.watch->step() == 0) continue;
      if (nodes_.num_spares(now()) > 0) {
        return Failure{.kind = FailureKind::kNodeSick,
                       .node = node.name,
                       .sure = Certainty::kCertain,
                       .step = attempt_.watch->step(),
                       .evidence = {fmt::format("the health daemon of {} said: {}", node.name, node.sickness)}};
      }
      if (!std::exchange(node.is_sickness_told, true)) {
        spdlog::warn("{} is sick ({}), and there is no spare for it", node.name, node.sickness);
      }
    }
    return std::nullopt;
  }

  /// Finds the rank that had the wrong state after replicas differed and the run went back. The replay reports it.
  std::optional<Failure> find_wrong_state() {
    if (!recovery_.differed || recovery_.since_looked.seconds() < 0.5) return std::nullopt;
    recovery_.since_looked = {};
    const std::optional<WrongState> found = find_replayed_state(dump_folder(), state().attempt);
    if (!found) return std::nullopt;
    std::optional<Incident> differed = std::exchange(recovery_.differed, std::nullopt);
    if (found->ranks.empty()) return std::nullopt;
    Incident& incident = recovery_.is_healing(*differed) ? *recovery_.healing : *differed;
    Failure& failure = incident.failure;
    failure.rank = static_cast<int>(found->ranks.front());
    // The rank may have moved to another node since.
    failure.node = recovery_.nodes_that_differed.at(static_cast<std::size_t>(*failure.rank) /
                                                    static_cast<std::size_t>(options_.ranks_per_node));
    failure.sure = Certainty::kCertain;
    failure.evidence.push_back(fmt::format("the replay of step {} gives another state than rank {} on {} had",
                                           found->step, *failure.rank, failure.node));
    record_.write_incident(incident);
    if (nodes_.find(failure.node)->role != NodeRole::kActive) {
      spdlog::warn("{}; it trains no more", failure.evidence.back());
      return std::nullopt;
    }
    if (nodes_.num_spares(now()) > 0) return failure;
    spdlog::warn("{}; there is no spare for it", failure.evidence.back());
    return std::nullopt;
  }

  /// Waits briefly for other signs of the same event: a lost node explains a rank that hangs.
  Failure settle(Failure failure) {
    if (failure.kind == FailureKind::kRankSlow || failure.kind == FailureKind::kNodeLost) return failure;
    const Stopwatch watch;
    while (watch.seconds() < 0.2) {
      pump();
      if (std::optional<Failure> later = attempt_.watch->find(now())) failure = std::move(*later);
    }
    // If a rank hangs on a node whose monitor is silent, the node is the cause.
    for (const LaunchNode& node : nodes_) {
      if (node.role != NodeRole::kActive || now() - node.seen < 1.0 || failure.rank) continue;
      failure.evidence.push_back(fmt::format("{} has been silent for {:.1f} s", node.name, now() - node.seen));
      failure.kind = FailureKind::kNodeLost;
      failure.node = node.name;
      failure.sure = Certainty::kLikely;
      break;
    }
    return failure;
  }

  void note_progress() {
    const std::int64_t step = attempt_.watch->step();
    state().step_seconds = attempt_.watch->step_seconds();
    if (step == 0) return;
    ladder_.note_training();
    state().step = step;
    if (state().load_step) state().load_step->has_trained = true;
    if (step >= recovery_.step_before_failure) end_requeue(unix_time());
    if (state().state != "training" && (!recovery_.healing || recovery_.healing->resumed_step)) write_state("training");
    if (!recovery_.healing) return;
    if (!recovery_.healing->resumed_step) {
      recovery_.healing->resumed_step = attempt_.watch->first_step() - 1;
      spdlog::info("the run goes on after step {}, {:.1f} s after the failure was noticed",
                   *recovery_.healing->resumed_step, unix_time() - recovery_.healing->noticed_at);
    }
    if (step >= recovery_.step_before_failure) end_healing(unix_time());
  }

  /// Counts what the scheduler's requeue has cost until `end`, when the run is as far as before, or has failed again.
  void end_requeue(double end) {
    if (recovery_.requeued_at) state().seconds_lost += std::max(0.0, end - *recovery_.requeued_at);
    recovery_.requeued_at.reset();
  }

  /// Counts what the incident has cost until `end`, when the run is as far as before, or has failed again.
  void end_healing(double end) {
    const Incident incident = recovery_.end_healing(end);
    state().seconds_lost += *incident.seconds_lost;
    record_.write_incident(incident);
  }

  /// Ends the attempt, finds out who is to blame, and prepares the next attempt. Returns false if there is none.
  bool heal(Failure failure) {
    const double noticed = unix_time();
    const std::int64_t last_step = attempt_.watch->step();
    recovery_.step_before_failure = std::max(recovery_.step_before_failure, last_step);
    if (recovery_.healing) end_healing(noticed);
    end_requeue(noticed);
    gather_evidence();
    blame(failure);
    Incident incident{.number = ++state().incidents,
                      .noticed_at = noticed,
                      .lost_from = noticed,
                      .attempt = state().attempt,
                      .failure = std::move(failure),
                      .last_step = last_step};
    incident.decision = ladder_.decide(incident.failure, nodes_.num_spares(now()), now());
    end_ranks();
    if (incident.decision.action == Action::kReplace) incident.spare = promote_spare(incident.failure);
    spdlog::warn("incident {}: {}", incident.number, describe(incident));
    record_.write_incident(incident);
    write_state("recovering");
    attempt_.watch.reset();
    const Action action = incident.decision.action;
    if (incident.failure.kind == FailureKind::kWeightsDiffer && !incident.failure.rank) {
      recovery_.differed = incident;
      recovery_.nodes_that_differed = nodes_.active();
    }
    recovery_.healing = std::move(incident);
    if (action == Action::kRestart || action == Action::kReplace) {
      pause(recovery_.healing->decision.pause_seconds);
      return true;
    }
    exit_status_ = static_cast<int>(recovery_.healing->decision.status);
    return false;
  }

  /// Waits until the next attempt may begin, or until someone asks the launch to end.
  void pause(double seconds) {
    if (seconds > 0.0) spdlog::info("the next attempt begins in {:g} s", seconds);
    const Stopwatch watch;
    while (watch.seconds() < seconds && stop_.count == 0) pump();
  }

  void gather_evidence() {
    attempt_.evidence.clear();
    for (LaunchNode& node : nodes_) {
      node.has_evidence = node.role != NodeRole::kActive || now() - node.seen > 1.0;
      if (!node.has_evidence) channel_.send({node.name, {{"do", "gather"}, {"attempt", state().attempt}}});
    }
    const Stopwatch watch;
    while (watch.seconds() < kGathering && !std::ranges::all_of(nodes_, &LaunchNode::has_evidence)) pump();
  }

  void blame(Failure& failure) const {
    if (failure.kind == FailureKind::kNodeLost || failure.kind == FailureKind::kRankSlow ||
        failure.kind == FailureKind::kNodeSick) {
      return;
    }
    const int world_size = static_cast<int>(nodes_.active().size()) * options_.ranks_per_node;
    const Culprit culprit = find_culprit(attempt_.evidence, world_size);
    if (culprit.ranks.empty()) return;
    failure.evidence.push_back(culprit.reason);
    // Evidence that holds for all ranks points at none of them.
    if (failure.rank || (culprit.ranks.size() == static_cast<std::size_t>(world_size) && world_size > 1)) return;
    failure.rank = culprit.ranks.front();
    failure.node = attempt_.watch->node_of(*failure.rank);
    failure.sure = culprit.sure;
  }

  void end_ranks() {
    for (const LaunchNode& node : nodes_) channel_.send({node.name, {{"do", "end"}, {"attempt", state().attempt}}});
    if (attempt_.process != 0 && !attempt_.status) kill(-attempt_.process, SIGKILL);
    const auto is_over = [&](const LaunchNode& node) {
      return node.role != NodeRole::kActive || node.ended >= state().attempt || now() - node.seen > 1.0;
    };
    const Stopwatch watch;
    do {
      pump();
    } while (watch.seconds() < kEnding && !(attempt_.status && std::ranges::all_of(nodes_, is_over)));
    attempt_.process = 0;
  }

  /// Puts a spare in the place of the blamed node. Returns the spare's name.
  std::string promote_spare(const Failure& failure) {
    LaunchNode& bad = *nodes_.find(failure.node);
    LaunchNode* const spare = nodes_.find_spare(now());
    if (spare == nullptr) return "";  // the spare was lost a moment ago, so the same nodes are tried
    const bool is_checked =
        failure.kind == FailureKind::kRankSlow && bad.active_check.has_value() && bad.ended >= state().attempt;
    if (failure.kind == FailureKind::kNodeLost) {
      bad.lose(now());
    } else {
      bad.drain(failure.kind == FailureKind::kNodeSick);
    }
    nodes_.replace(bad, *spare);
    // A sick node is drained with the daemon's reason, because the daemon returns nodes that are drained for it.
    bad.drain_reason = failure.kind == FailureKind::kNodeSick
                           ? bad.sickness
                           : fmt::format("{} {}: run {}", kReasonPrefix, signal_of(failure.kind), state().run_id);
    scheduler_.tell(engine_->drain(bad.name, bad.drain_reason));
    if (is_checked) check_node(bad);
    return spare->name;
  }

  void write_state(const std::string& name) { record_.write_state(name, nodes_.states(now())); }

  /// Tries once more to reach lost nodes. They may be back, with old files in their memory.
  void reach_lost_nodes() {
    const auto is_settled = [](const LaunchNode& node) {
      const bool was_tried_in_vain = node.monitor == 0 && node.next_try > now();
      return node.role != NodeRole::kLost || was_tried_in_vain;
    };
    for (LaunchNode& node : nodes_) {
      if (node.role != NodeRole::kLost) continue;
      node.lose(now());  // the old connection may still wait for a node that was away
      node.next_try = 0.0;
    }
    const Stopwatch watch;
    while (watch.seconds() < kReaching && !std::ranges::all_of(nodes_, is_settled)) pump();
  }

  int finish(const std::string& last_state) {
    scheduler_.withdraw();
    reach_lost_nodes();
    nodes_.keep_monitors(false);
    const bool is_taken_over = exit_status_ == static_cast<int>(ExitStatus::kTakenOver);
    const bool is_over = exit_status_ != static_cast<int>(ExitStatus::kRequeue) && !is_taken_over;
    if (is_over) {  // the next launch needs the ranks' files and the copies in memory
      for (const LaunchNode& node : nodes_) channel_.send({node.name, {{"do", "quit"}, {"attempt", state().attempt}}});
      const Stopwatch watch;
      const auto has_quit = [](const LaunchNode& node) { return node.monitor == 0 || now() - node.seen > 1.0; };
      while (watch.seconds() < 3.0 && !std::ranges::all_of(nodes_, has_quit)) pump();
    }
    state().exit_status = exit_status_;
    if (!is_taken_over) write_state(last_state);  // else the file is the other launcher's
    if (state().incidents > 0) {
      spdlog::info("{} incidents, {:.1f} s lost: effective training time {:.1f} %", state().incidents,
                   state().seconds_lost, 100.0 * state().effective_training_time());
    }
    if (exit_status_ > static_cast<int>(ExitStatus::kSignal)) {
      spdlog::info("stopped by signal {}", stop_.signal);
    } else if (last_state == "stopped" && recovery_.healing) {
      spdlog::error("stopped: {}", recovery_.healing->decision.reason);
    }
    return exit_status_;
  }

  const LauncherOptions& options_;
  const JobConfig& config_;
  std::unique_ptr<Engine> engine_;
  const volatile StopRequest& stop_;
  LauncherChannel channel_;
  Ladder ladder_;
  std::optional<FileLock> lock_;
  NodePool nodes_;
  Attempt attempt_;
  Recovery recovery_;
  SchedulerClient scheduler_;
  int exit_status_ = 0;
  std::optional<RequestInbox> requests_;  // set once all monitors have connected
  LaunchRecord record_;                   // last, so that its writing ends first
};

}  // namespace

int launch(const LauncherOptions& options, const JobConfig& config, std::unique_ptr<Engine> engine,
           const volatile StopRequest& stop) {
  return Launcher(options, config, std::move(engine), stop).run();
}

}  // namespace tessera
