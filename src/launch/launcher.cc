#include "launch/launcher.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <deque>
#include <limits>
#include <map>
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
#include "launch/launch_state.h"
#include "launch/requests.h"
#include "launch/watch/background_writer.h"
#include "launch/watch/channel.h"
#include "launch/watch/protocol.h"
#include "run/record/run_folder.h"
#include "run/record/run_info.h"
#include "run/state/replica_check.h"
#include "system/file_lock.h"
#include "system/host_name.h"
#include "system/metrics_server.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// How many seconds a monitor may take to start on a busy machine. All monitors start at once.
constexpr double kMonitorStart = 30.0;
/// How many seconds a node has for a new connection after that to its monitor has ended.
constexpr double kMonitorRestart = 2.0;
/// Seconds between two tries to reach a lost node: the first value, and the largest. The time grows with each try.
constexpr double kBetweenTries = 5.0, kLongestBetweenTries = 60.0;
/// How many seconds lost nodes are tried once more at the end of a run. ssh gives a connection up after 5 s.
constexpr double kReaching = 6.0;
/// How many seconds evidence may take to arrive, and ranks may take to end.
constexpr double kGathering = 1.5, kEnding = 4.0;
/// Seconds between two requests to the scheduler for a node: the first value, and the largest. Each refusal doubles it.
constexpr double kBetweenGrowing = 10.0, kLongestBetweenGrowing = 600.0;

enum class Role : std::uint8_t {
  kActive,
  kSpare,
  kLost,  // it was silent; it becomes a spare when it has a new monitor and has ended its old ranks
  /// It was blamed. It is not used until it was restarted, has passed an active check, or an operator returns it.
  kDrained,
};

std::string name_of(Role role) {
  constexpr std::array kNames = {"active", "spare", "lost", "drained"};
  return kNames[static_cast<std::size_t>(role)];
}

struct Node {
  std::string name;
  Role role = Role::kSpare;
  pid_t monitor = 0;  // process here that runs the monitor; 0: none
  int input = -1;     // standard input of that process; closing it ends the monitor
  bool has_come = false;
  double seen = 0.0;
  double closed = 0.0;    // when the connection ended; 0: it is open
  double next_try = 0.0;  // when a monitor may be started next
  double between_tries = kBetweenTries;
  int last_status = 0;       // exit status of the connection's process
  std::int64_t ended = 0;    // last attempt of which no process is left
  std::string problem = {};  // why the node cannot be used
  bool has_evidence = false;
  std::string sickness = {};                // why the health daemon calls it bad; empty: it does not
  std::optional<double> active_check = {};  // Unix time of the last that passed, by the daemon; not set: no word yet
  bool is_drained_as_sick = false;
  std::string drain_reason = {};                  // the reason that the scheduler was given
  std::optional<double> check_before_drain = {};  // active_check at the time of the drain
  bool is_new = false;            // the scheduler has given the node, but its monitor has not connected yet
  bool is_sickness_told = false;  // a warning says that it is sick and has no spare
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
        dump_folder_(config.job.dump_folder) {
    state_.begin = unix_time();
    create_folder(dump_folder_);
    identify();
    for (const std::string& name : engine_->nodes()) nodes_.push_back({.name = name});
    limit_nodes();
    if (!options_.prometheus_address.empty()) server_.emplace(options_.prometheus_address, "tessera_launch_");
    node_folder_ = options_.node_folder.empty() ? fs::path("/dev/shm/tessera-" + state_.run_id) : options_.node_folder;
  }

  ~Launcher() {
    for (Node& node : nodes_) close_monitor(node);
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    start_monitors();
    choose_nodes();
    keeps_monitors_ = true;
    requests_.emplace(dump_folder_);
    while (true) {
      std::optional<Failure> failure = run_attempt();
      if (!failure) return finish(exit_status_ == 0 ? "done" : "stopped");
      if (!heal(std::move(*failure))) return finish("stopped");
      if (stop_.count > 0) {
        exit_status_ = 128 + stop_.signal;
        return finish("stopped");
      }
    }
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  /// Keeps only as many nodes as are asked for. A run that resumes may have lost nodes for which there were spares.
  void limit_nodes() {
    const auto num_active = static_cast<std::size_t>(options_.num_nodes);
    const std::size_t needed = num_active + static_cast<std::size_t>(options_.num_spares);
    const bool can_begin = state_.attempt > 0 || options_.grows;
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
    nodes_.resize(needed);
  }

  /// Finds the run and the number of its last attempt, and locks the run.
  void identify() {
    const std::optional<LaunchState> before = read_launch_state(dump_folder_);
    const std::optional<RunIdentity> trained = read_run_identity(dump_folder_);
    state_.run_id = config_.job.run_id;
    if (state_.run_id.empty() && before && !before->has_ended()) state_.run_id = before->run_id;
    if (state_.run_id.empty()) state_.run_id = identify_run(config_, std::nullopt).id;
    if (before && before->run_id == state_.run_id) {
      state_.attempt = before->attempt;
      state_.begin = before->begin;
      state_.incidents = before->incidents;
      state_.seconds_lost = before->seconds_lost;
    }
    if (trained && trained->id == state_.run_id) state_.attempt = std::max(state_.attempt, trained->attempt);
    for (const char ch : state_.run_id) {
      require(
          std::isalnum(static_cast<unsigned char>(ch)) != 0 || std::string_view("-_.").find(ch) != std::string::npos,
          "job.run_id is '{}': with `tessera launch` it names folders, and may have letters, digits, '-', '_' "
          "and '.'",
          state_.run_id);
    }
    state_.host = host_name();
    state_.pid = ::getpid();
    state_.engine = engine_->name();
    state_.endpoint = endpoint();
    state_.num_steps = config_.training.steps;
    const auto restarts = static_cast<int>(num_slurm_requeues());
    if (!engine_->job().empty()) state_.job = {.id = engine_->job(), .restarts = restarts};
    lock_.emplace(
        dump_folder_ / kLaunchLockName, fmt::format("the run in '{}'", dump_folder_.string()),
        FileLock::Options{.owner = fmt::format("launch of run {}, requeued {} times", state_.run_id, restarts),
                          .takes_over = [&](const std::string&) { return restarts > 0; }});
    const bool had_trained = before && before->run_id == state_.run_id && before->step > 0;
    if (had_trained && !before->has_ended()) take_over_from(*before);
  }

  /// Records an incident if the launcher before this one ended without a word: its loss is an incident of the run.
  void take_over_from(const LaunchState& lost) {
    const std::optional<double> noticed = read_launcher_loss(dump_folder_, lost);
    const bool is_requeued = state_.job && lost.job && state_.job->id == lost.job->id;
    Incident incident{
        .number = ++state_.incidents,
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
    write_incident(incident);
    step_before_failure_ = incident.last_step;
    healing_ = std::move(incident);
  }

  std::string endpoint() const {
    const std::string address = engine_->is_one_machine()  ? "127.0.0.1"
                                : options_.address.empty() ? host_name()
                                                           : options_.address;
    return fmt::format("tcp://{}:{}", address, channel_.port());
  }

  void start_monitor(Node& node) {
    close_monitor(node);
    std::array<int, 2> pipe{};
    require(pipe2(pipe.data(), O_CLOEXEC) == 0, "cannot make a pipe: {}", std::strerror(errno));
    const CommandLine command =
        engine_->on_node(node.name, {options_.program, "monitor", "--node", node.name, "--connect", endpoint(),
                                     "--run-id", state_.run_id, "--health-folder", options_.health_folder.string(),
                                     "--folder", node_folder_.string()});
    node.monitor = spawn(command.front(), {command.begin() + 1, command.end()}, {.input = pipe[0]});
    node.input = pipe[1];
    const std::string line = channel_.key() + "\n";
    static_cast<void>(!::write(node.input, line.data(), line.size()));
    close(pipe[0]);  // only after the write: if the monitor had ended already, SIGPIPE would end this process
    node.next_try = now() + node.between_tries;
  }

  static void close_monitor(Node& node) {
    if (node.input >= 0) close(node.input);
    node.input = -1;
    if (node.monitor > 0) {
      kill(-node.monitor, SIGTERM);
      waitpid(node.monitor, nullptr, WNOHANG);
    }
    node.monitor = 0;
  }

  /// Starts all monitors. Throws Error unless all nodes get a monitor and are fit.
  void start_monitors() {
    write_state("starting");
    for (Node& node : nodes_) start_monitor(node);
    const Stopwatch watch;
    const auto is_decided = [](const Node& node) {
      return node.has_come || !node.problem.empty() || (node.monitor == 0 && node.closed > 0.0);
    };
    while (watch.seconds() < kMonitorStart && !std::ranges::all_of(nodes_, is_decided)) {
      pump();
      if (stop_.count > 0) fail("stopped by signal {} before the ranks were started", stop_.signal);
    }
    std::string missing;
    for (const Node& node : nodes_) {
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
    require(missing.empty(), "not all of {} nodes are fit, no rank was started:{}", nodes_.size(), missing);
    spdlog::info("run {}: {} of {} nodes train, {} ranks on each, {} in reserve", state_.run_id, options_.num_nodes,
                 nodes_.size(), options_.ranks_per_node, nodes_.size() - static_cast<std::size_t>(options_.num_nodes));
  }

  /// Lets the first healthy nodes train. Throws Error if there are too few.
  void choose_nodes() {
    std::string sick;
    for (Node& node : nodes_) {
      if (!node.sickness.empty()) {
        sick += fmt::format("\n  {}: {}", node.name, node.sickness);
        drain(node, true);
      } else if (active_.size() < static_cast<std::size_t>(options_.num_nodes)) {
        node.role = Role::kActive;
        active_.push_back(node.name);
      }
    }
    require(active_.size() == static_cast<std::size_t>(options_.num_nodes),
            "{} of {} nodes are well, and {} are to train, no rank was started:{}\n"
            "After a repair run tessera health check --active there",
            active_.size(), nodes_.size(), options_.num_nodes, sick);
    if (!sick.empty()) spdlog::warn("nodes that are not well are left out:{}", sick);
  }

  static void drain(Node& node, bool as_sick) {
    node.role = Role::kDrained;
    node.ended = 0;
    node.is_drained_as_sick = as_sick;
    node.check_before_drain = node.active_check;
  }

  Node* find_node(const std::string& name) {
    const auto found = std::ranges::find(nodes_, name, &Node::name);
    return found == nodes_.end() ? nullptr : &*found;
  }

  int num_spares() const {
    return static_cast<int>(std::ranges::count_if(nodes_, [](const Node& node) { return is_ready(node); }));
  }
  static bool is_ready(const Node& node) {
    return node.role == Role::kSpare && node.sickness.empty() && node.has_come && node.closed == 0.0 &&
           now() - node.seen < kMonitorRestart;
  }

  /// Handles the messages that arrive within 50 ms, and looks after processes.
  void pump() {
    std::optional<Message> message = channel_.receive(milliseconds(50));
    for (const std::string& name : channel_.take_disconnected()) {
      if (Node* node = find_node(name); node != nullptr && node->closed == 0.0) node->closed = now();
    }
    for (; message; message = channel_.receive(milliseconds(0))) hear(*message);
    reap();
    for (Node& node : nodes_) look_after(node);
    if (options_.grows && keeps_monitors_) grow();
    if (requests_) {
      for (const std::string& name : requests_->take_undrained()) undrain(name);
    }
    if (since_written_.seconds() > 1.0) write_state(state_.state);
  }

  void hear(const Message& message) {
    Node* node = find_node(message.node);
    if (node == nullptr) return;
    const std::string what = message.body.value("say", "");
    node->seen = now();
    node->closed = 0.0;
    if (what == "hello" || what == "beat") take_health(*node, message.body);
    if (what == "hello") {
      const std::string other_version = message.body.value("version", "");
      if (other_version != version()) {
        node->problem =
            fmt::format("it runs Tessera {}, this is {}: install the same program", other_version, version());
      }
      node->has_come = true;
      node->between_tries = kBetweenTries;
      if (node->role == Role::kDrained && node->sickness.empty()) node->role = Role::kLost;
      channel_.send({node->name, {{"do", "watch"}, {"attempt", state_.attempt}}});
    } else if (what == "beat") {
      answer_beat(*node, message);
    } else if (what == "evidence" && message.body.value("attempt", std::int64_t{0}) == state_.attempt) {
      take_evidence(*node, message);
    } else if (what == "ended") {
      const auto left = message.body.value("left", std::vector<int>());
      if (left.empty()) node->ended = std::max(node->ended, message.body.value("attempt", std::int64_t{0}));
    }
  }

  /// Records what the node's health daemon reports. A silent daemon reports nothing new.
  void take_health(Node& node, const nlohmann::json& message) {
    const nlohmann::json health = message.value("health", nlohmann::json());
    if (!health.is_object()) return;
    node.sickness = health.value("is_bad", false) ? health.value("reason", "it is bad") : "";
    node.active_check = health.value("active_check", 0.0);
    if (!node.sickness.empty()) return note_sick_if_drained(node);
    node.is_sickness_told = false;
    if (node.role != Role::kDrained) return;
    if (!node.check_before_drain) node.check_before_drain = node.active_check;  // the daemon was silent at the drain
    if (!node.is_drained_as_sick && *node.active_check <= *node.check_before_drain) return;
    spdlog::info("{} has passed its active check: it is a spare once its old ranks have ended", node.name);
    // A node that was drained with the daemon's reason is returned by `tessera health act`.
    if (!node.is_drained_as_sick) tell_scheduler(engine_->undrain(node.name, node.drain_reason));
    return_node(node);
  }

  /// Hands a slow node's drain over to its health daemon, if the node's active check has found the cause.
  void note_sick_if_drained(Node& node) {
    if (node.role != Role::kDrained || node.is_drained_as_sick) return;
    node.is_drained_as_sick = true;
    spdlog::warn("{} is sick: {}", node.name, node.sickness);
    tell_scheduler(engine_->drain(node.name, node.sickness));
  }

  /// Starts the active check on a node that was slow. Its health daemon reads the result.
  void check_node(Node& node) {
    CommandLine check = {options_.program, "health", "check", "--active", "--folder", options_.health_folder.string(),
                         "--node",         node.name};
    if (!options_.health_rates.empty()) check.insert(check.end(), {"--rates", options_.health_rates.string()});
    spdlog::info("{} was slow: its active check begins", node.name);
    tell_scheduler(engine_->on_node(node.name, check));
  }

  /// Makes a drained node a spare as soon as nothing of its old ranks is left.
  void return_node(Node& node) {
    node.role = Role::kLost;
    node.is_drained_as_sick = false;
    ladder_.forget_failures(node.name);
  }

  /// Makes the node lost until a new monitor connects from it. An old monitor that was cut off may still be heard, but
  /// it ends when it finds its input closed.
  static void lose(Node& node) {
    close_monitor(node);
    node.role = Role::kLost;
    node.ended = 0;
    node.has_come = false;
    node.next_try = now() + node.between_tries;
  }

  void answer_beat(Node& node, const Message& message) {
    if (node.role == Role::kLost) {
      // The node is back after a reboot, a broken link or a freeze. Nothing of what it did before may be left.
      if (node.ended < state_.attempt - 1) {
        channel_.send({node.name, {{"do", "end"}, {"attempt", state_.attempt - 1}}});
        return;
      }
      if (!node.has_come) return;
      node.role = Role::kSpare;
      spdlog::info("{} is {}, as a spare", node.name, std::exchange(node.is_new, false) ? "there" : "back");
    }
    if (watch_ && message.body.value("attempt", std::int64_t{0}) == state_.attempt) {
      std::vector<RankReport> reports;
      for (const nlohmann::json& rank : message.body.value("ranks", nlohmann::json::array())) {
        reports.push_back(report_from_json(rank));
      }
      watch_->report(node.name, reports, now());
    }
    channel_.send({node.name, {{"do", "watch"}, {"attempt", state_.attempt}}});
  }

  void take_evidence(Node& node, const Message& message) {
    node.has_evidence = true;
    const auto processes = message.body.value("processes", std::vector<int>());
    for (std::size_t i = 0; i < std::min(processes.size(), message.files.size()); ++i) {
      try {
        RankState state = parse_rank_file(std::as_bytes(std::span(message.files[i])), "of " + node.name);
        state.process = static_cast<ProcessState>(processes[i]);
        evidence_.push_back(std::move(state));
      } catch (const Error& error) {
        spdlog::warn("{}", error.what());
      }
    }
  }

  /// Asks the scheduler for a node while too few are fit, one at a time. A scheduler that does not answer must not stop
  /// a run.
  void grow() {
    try {
      if (growth_ == 0) {
        ask_for_node();
      } else {
        take_new_node();
      }
    } catch (const Error& error) {
      delay_growth();
      spdlog::warn("no node could be asked for, the next try is in {:.0f} s: {}", between_growing_, error.what());
    }
  }

  void delay_growth() {
    between_growing_ = std::min(kLongestBetweenGrowing, 2.0 * between_growing_);
    next_growth_ = now() + between_growing_;
  }

  void ask_for_node() {
    const auto is_fit = [](const Node& node) {
      return (node.role == Role::kActive || node.role == Role::kSpare || node.is_new) && node.sickness.empty();
    };
    const auto num_fit = std::ranges::count_if(nodes_, is_fit);
    if (num_fit >= options_.num_nodes + options_.num_spares || now() < next_growth_) return;
    const std::optional<CommandLine> ask = engine_->grow();
    if (!ask) {
      next_growth_ = std::numeric_limits<double>::infinity();  // the engine has no scheduler
      return;
    }
    spdlog::info("{} nodes are fit and {} are wanted: the scheduler is asked for one", num_fit,
                 options_.num_nodes + options_.num_spares);
    growth_ = spawn(ask->front(), {ask->begin() + 1, ask->end()});
  }

  void take_new_node() {
    int status = 0;
    if (waitpid(growth_, &status, WNOHANG) != growth_) return;
    growth_ = 0;
    bool is_new = false;  // decides, not the status: salloc may end with 1 although the job has grown
    for (const std::string& name : engine_->grown_nodes()) {
      if (find_node(name) != nullptr) continue;
      is_new = true;
      spdlog::info("{} was added: it is a spare once its monitor has come", name);
      nodes_.push_back({.name = name, .role = Role::kLost, .is_new = true});
    }
    require(is_new, "the scheduler gave none (status {})", exit_status_of(status));
    between_growing_ = kBetweenGrowing;
    next_growth_ = now() + between_growing_;
  }

  void reap() {
    for (Node& node : nodes_) {
      int status = 0;
      if (node.monitor == 0 || waitpid(node.monitor, &status, WNOHANG) != node.monitor) continue;
      node.monitor = 0;
      node.last_status = exit_status_of(status);
      if (node.input >= 0) close(node.input);
      node.input = -1;
      if (node.closed == 0.0) node.closed = now();
      const bool is_expected = node.has_come && node.role != Role::kLost;
      node.next_try = is_expected ? now() : now() + node.between_tries;
      if (!is_expected) node.between_tries = std::min(kLongestBetweenTries, 1.5 * node.between_tries);
      if (keeps_monitors_ && node.role == Role::kActive) {
        spdlog::warn("the connection to the monitor of {} has ended (status {})", node.name, node.last_status);
      }
    }
    int status = 0;
    if (ranks_ != 0 && !ranks_status_ && waitpid(ranks_, &status, WNOHANG) == ranks_) {
      ranks_status_ = exit_status_of(status);
    }
    std::erase_if(scheduler_commands_, [](pid_t command) { return waitpid(command, nullptr, WNOHANG) != 0; });
  }

  void look_after(Node& node) {
    if (!keeps_monitors_) return;
    if (node.monitor == 0 && now() > node.next_try) start_monitor(node);
    if (node.role == Role::kActive && node.closed > 0.0 && now() - node.closed > kMonitorRestart && watch_) {
      watch_->lose(node.name, fmt::format("its monitor's connection ended, and no new one could be made within {:g} s",
                                          kMonitorRestart));
    }
    if (node.role == Role::kSpare && node.closed > 0.0 && now() - node.closed > kMonitorRestart) {
      lose(node);
      spdlog::warn("the spare {} is lost", node.name);
    }
  }

  /// Returns a drained node because an operator asks for it.
  void undrain(const std::string& name) {
    Node* node = find_node(name);
    if (node == nullptr || node->role != Role::kDrained) {
      spdlog::warn("tessera undrain '{}': {}", name,
                   node == nullptr ? "the run has no such node" : "the node is " + name_of(node->role));
      return;
    }
    spdlog::info("{} was returned by tessera undrain: it is a spare once its old ranks have ended", name);
    return_node(*node);
    tell_scheduler(engine_->undrain(name, ""));
  }

  void tell_scheduler(const std::optional<CommandLine>& command) {
    if (command) scheduler_commands_.push_back(spawn(command->front(), {command->begin() + 1, command->end()}));
  }

  void start_ranks() {
    ++state_.attempt;
    write_state("starting");
    for (const Node& node : nodes_) channel_.send({node.name, {{"do", "watch"}, {"attempt", state_.attempt}}});
    CommandLine program = {options_.program};
    program.insert(program.end(), options_.arguments.begin(), options_.arguments.end());
    program.push_back("--job.run_id=" + state_.run_id);
    program.push_back(fmt::format("--job.attempt={}", state_.attempt));
    program.push_back("--job.node_folder=" + node_folder_.string());
    if (config_.checkpoint.enable) program.emplace_back("--checkpoint.fallback");  // nobody is there to choose
    const CommandLine command = engine_->on_ranks(active_, options_.ranks_per_node, {kAttemptVariable}, program);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ranks_status_.reset();
    ranks_ = spawn(
        command.front(), {command.begin() + 1, command.end()},
        {.input = nothing, .variables = {fmt::format("{}={}:{}", kAttemptVariable, state_.run_id, state_.attempt)}});
    close(nothing);
    WatchOptions watch = options_.watch;
    watch.start_timeout = static_cast<double>(config_.comm.init_timeout_seconds);
    watch.other_timeout = static_cast<double>(config_.comm.train_timeout_seconds);
    watch_.emplace(watch, active_, options_.ranks_per_node, now());
  }

  /// Returns what went wrong, or nullopt if the ranks have ended as they should.
  std::optional<Failure> run_attempt() {
    start_ranks();
    std::optional<double> ended;  // when the ranks' process ended
    int told = 0;
    while (true) {
      pump();
      for (; told < stop_.count; ++told) {
        if (told == 0) spdlog::info("signal {}: the run saves and ends; a second one ends it at once", stop_.signal);
        kill(ranks_, told == 0 ? SIGUSR1 : SIGKILL);  // mpirun and srun pass SIGUSR1 on
      }
      note_progress();
      if (std::optional<Failure> failure = find_wrong_state()) return failure;
      if (ranks_status_) {
        if (!ended) ended = now();
        if (*ranks_status_ == 0 || (stop_.count > 0 && *ranks_status_ > 128)) {
          // A run may be over before the monitors have reported its steps.
          const Stopwatch watch;
          while (healing_ && watch.seconds() < kGathering) {
            pump();
            note_progress();
          }
          exit_status_ = stop_.count > 0 ? 128 + stop_.signal : 0;
          return std::nullopt;
        }
      }
      if (std::optional<Failure> failure = watch_->find(now())) {
        const bool can_wait = failure->kind == FailureKind::kRankSlow && num_spares() == 0;
        if (!can_wait) return settle(std::move(*failure));
        if (!slow_is_told_) spdlog::warn("{}; there is no spare for it", failure->evidence.front());
        slow_is_told_ = true;
      }
      if (std::optional<Failure> failure = find_sick_node()) return failure;
      if (ended && now() - *ended > 2.0) {
        const std::optional<FailureKind> kind = kind_of_status(*ranks_status_);
        return Failure{
            .kind = kind.value_or(FailureKind::kProgramError),
            .step = watch_->step(),
            .evidence = {fmt::format("the ranks ended with status {}, and none of them said why", *ranks_status_)}};
      }
    }
  }

  /// Returns a failure if a node that trains is called bad by its health daemon and there is a spare for it. It waits
  /// for the first steps: without copies in memory of this attempt, a restart would lose more than it saves.
  std::optional<Failure> find_sick_node() {
    for (Node& node : nodes_) {
      if (node.role != Role::kActive || node.sickness.empty() || watch_->step() == 0) continue;
      if (num_spares() > 0) {
        return Failure{.kind = FailureKind::kNodeSick,
                       .node = node.name,
                       .sure = Certainty::kCertain,
                       .step = watch_->step(),
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
    if (!differed_ || since_looked_.seconds() < 0.5) return std::nullopt;
    since_looked_ = {};
    const std::optional<WrongState> found = find_replayed_state(dump_folder_, state_.attempt);
    if (!found) return std::nullopt;
    Incident incident = *std::exchange(differed_, std::nullopt);
    if (found->ranks.empty()) return std::nullopt;
    Failure& failure = incident.failure;
    failure.rank = static_cast<int>(found->ranks.front());
    failure.node = watch_->node_of(*failure.rank);
    failure.sure = Certainty::kCertain;
    failure.evidence.push_back(fmt::format("the replay of step {} gives another state than rank {} on {} had",
                                           found->step, *failure.rank, failure.node));
    if (healing_ && healing_->number == incident.number) healing_->failure = failure;
    incident.resumed_step = watch_->first_step() - 1;
    incident.seconds_lost = last_seconds_lost_;
    write_incident(incident);
    if (num_spares() > 0) return failure;
    spdlog::warn("{}; there is no spare for it", failure.evidence.back());
    return std::nullopt;
  }

  /// Waits briefly for other signs of the same event: a lost node explains a rank that hangs.
  Failure settle(Failure failure) {
    if (failure.kind == FailureKind::kRankSlow || failure.kind == FailureKind::kNodeLost) return failure;
    const Stopwatch watch;
    while (watch.seconds() < 0.2) {
      pump();
      if (std::optional<Failure> later = watch_->find(now())) failure = std::move(*later);
    }
    // If a rank hangs on a node whose monitor is silent, the node is the cause.
    for (const Node& node : nodes_) {
      if (node.role != Role::kActive || now() - node.seen < 1.0 || failure.rank) continue;
      failure.evidence.push_back(fmt::format("{} has been silent for {:.1f} s", node.name, now() - node.seen));
      failure.kind = FailureKind::kNodeLost;
      failure.node = node.name;
      failure.sure = Certainty::kLikely;
      break;
    }
    return failure;
  }

  void note_progress() {
    const std::int64_t step = watch_->step();
    state_.step_seconds = watch_->step_seconds();
    if (step == 0) return;
    state_.step = step;
    if (state_.state != "training" && (!healing_ || healing_->resumed_step)) write_state("training");
    if (!healing_) return;
    if (!healing_->resumed_step) {
      healing_->resumed_step = watch_->first_step() - 1;
      spdlog::info("the run goes on after step {}, {:.1f} s after the failure was noticed", *healing_->resumed_step,
                   unix_time() - healing_->noticed_at);
    }
    if (step >= step_before_failure_) end_healing(unix_time());
  }

  /// Counts what the incident has cost until `end`, when the run is as far as before, or has failed again.
  void end_healing(double end) {
    last_seconds_lost_ = std::max(0.0, end - healing_->lost_from);
    healing_->seconds_lost = last_seconds_lost_;
    state_.seconds_lost += last_seconds_lost_;
    write_incident(*healing_);
    healing_.reset();
  }

  /// Ends the attempt, finds out who is to blame, and prepares the next attempt. Returns false if there is none.
  bool heal(Failure failure) {
    const double noticed = unix_time();
    const std::int64_t last_step = watch_->step();
    step_before_failure_ = std::max(step_before_failure_, last_step);
    if (healing_) end_healing(noticed);
    gather_evidence();
    blame(failure);
    Incident incident{.number = ++state_.incidents,
                      .noticed_at = noticed,
                      .lost_from = noticed,
                      .attempt = state_.attempt,
                      .failure = std::move(failure),
                      .last_step = last_step};
    incident.decision = ladder_.decide(incident.failure, num_spares(), now());
    end_ranks();
    if (incident.decision.action == Action::kReplace) incident.spare = promote_spare(incident.failure);
    spdlog::warn("incident {}: {}", incident.number, describe(incident));
    write_incident(incident);
    write_state("recovering");
    watch_.reset();
    const Action action = incident.decision.action;
    if (incident.failure.kind == FailureKind::kWeightsDiffer && !incident.failure.rank) differed_ = incident;
    healing_ = std::move(incident);
    if (action == Action::kRestart || action == Action::kReplace) return true;
    exit_status_ = static_cast<int>(healing_->decision.status);
    return false;
  }

  void gather_evidence() {
    evidence_.clear();
    for (Node& node : nodes_) {
      node.has_evidence = node.role != Role::kActive || now() - node.seen > 1.0;
      if (!node.has_evidence) channel_.send({node.name, {{"do", "gather"}, {"attempt", state_.attempt}}});
    }
    const Stopwatch watch;
    while (watch.seconds() < kGathering && !std::ranges::all_of(nodes_, &Node::has_evidence)) pump();
  }

  void blame(Failure& failure) const {
    if (failure.kind == FailureKind::kNodeLost || failure.kind == FailureKind::kRankSlow ||
        failure.kind == FailureKind::kNodeSick) {
      return;
    }
    const int world_size = static_cast<int>(active_.size()) * options_.ranks_per_node;
    const Culprit culprit = find_culprit(evidence_, world_size);
    if (culprit.ranks.empty()) return;
    failure.evidence.push_back(culprit.reason);
    // Evidence that holds for all ranks points at none of them.
    if (failure.rank || (culprit.ranks.size() == static_cast<std::size_t>(world_size) && world_size > 1)) return;
    failure.rank = culprit.ranks.front();
    failure.node = watch_->node_of(*failure.rank);
    failure.sure = culprit.sure;
  }

  void end_ranks() {
    for (const Node& node : nodes_) channel_.send({node.name, {{"do", "end"}, {"attempt", state_.attempt}}});
    if (ranks_ != 0 && !ranks_status_) kill(-ranks_, SIGKILL);
    const auto is_over = [&](const Node& node) {
      return node.role != Role::kActive || node.ended >= state_.attempt || now() - node.seen > 1.0;
    };
    const Stopwatch watch;
    do {
      pump();
    } while (watch.seconds() < kEnding && !(ranks_status_ && std::ranges::all_of(nodes_, is_over)));
    ranks_ = 0;
  }

  /// Puts a spare in the place of the blamed node. Returns the spare's name.
  std::string promote_spare(const Failure& failure) {
    Node& bad = *find_node(failure.node);
    const auto spare = std::ranges::find_if(nodes_, [](const Node& node) { return is_ready(node); });
    if (spare == nodes_.end()) return "";  // the spare was lost a moment ago, so the same nodes are tried
    const bool is_checked =
        failure.kind == FailureKind::kRankSlow && bad.active_check.has_value() && bad.ended >= state_.attempt;
    if (failure.kind == FailureKind::kNodeLost) {
      lose(bad);
    } else {
      drain(bad, failure.kind == FailureKind::kNodeSick);
    }
    spare->role = Role::kActive;
    *std::ranges::find(active_, bad.name) = spare->name;
    // A sick node is drained with the daemon's reason, because the daemon returns nodes that are drained for it.
    bad.drain_reason = failure.kind == FailureKind::kNodeSick
                           ? bad.sickness
                           : fmt::format("{} {}: run {}", kReasonPrefix, signal_of(failure.kind), state_.run_id);
    tell_scheduler(engine_->drain(bad.name, bad.drain_reason));
    if (is_checked) check_node(bad);
    return spare->name;
  }

  void write_incident(const Incident& incident) {
    if (counted_incident_ < incident.number) {
      counted_incident_ = incident.number;
      ++incidents_by_kind_[std::string(name_of(incident.failure.kind))];
    }
    create_folder(dump_folder_ / kIncidentsFolderName);
    writer_.write(dump_folder_ / kIncidentsFolderName / fmt::format("{}.json", incident.number),
                  json_text(to_json(incident), 2) + "\n");
  }

  void write_state(const std::string& name) {
    since_written_ = {};
    state_.state = name;
    state_.time = unix_time();
    state_.nodes.clear();
    for (const Node& node : nodes_) {
      state_.nodes.push_back({node.name, name_of(node.role), node.has_come ? now() - node.seen : 0.0});
    }
    writer_.write(dump_folder_ / kLaunchStateName, json_text(to_json(state_), 2) + "\n");
    if (server_) server_->publish(measurements_of(state_, incidents_by_kind_));
  }

  /// Tries once more to reach lost nodes. They may be back, with old files in their memory.
  void reach_lost_nodes() {
    const auto is_settled = [](const Node& node) {
      return node.role != Role::kLost || (node.monitor == 0 && node.next_try > now());  // the launcher tried it in vain
    };
    for (Node& node : nodes_) {
      if (node.role != Role::kLost) continue;
      lose(node);  // the old connection may still wait for a node that was away
      node.next_try = 0.0;
    }
    const Stopwatch watch;
    while (watch.seconds() < kReaching && !std::ranges::all_of(nodes_, is_settled)) pump();
  }

  int finish(const std::string& state) {
    if (growth_ != 0) kill(-growth_, SIGTERM);
    reach_lost_nodes();
    keeps_monitors_ = false;
    const bool is_over = exit_status_ != static_cast<int>(ExitStatus::kRequeue);
    if (is_over) {  // a launch that is requeued needs the copies in memory
      for (const Node& node : nodes_) channel_.send({node.name, {{"do", "quit"}, {"attempt", state_.attempt}}});
      const Stopwatch watch;
      const auto has_quit = [](const Node& node) { return node.monitor == 0 || now() - node.seen > 1.0; };
      while (watch.seconds() < 3.0 && !std::ranges::all_of(nodes_, has_quit)) pump();
    }
    state_.exit_status = exit_status_;
    write_state(state);
    if (state_.incidents > 0) {
      spdlog::info("{} incidents, {:.1f} s lost: effective training time {:.1f} %", state_.incidents,
                   state_.seconds_lost, 100.0 * state_.effective_training_time());
    }
    if (exit_status_ > static_cast<int>(ExitStatus::kSignal)) {
      spdlog::info("stopped by signal {}", stop_.signal);
    } else if (state == "stopped" && healing_) {
      spdlog::error("stopped: {}", healing_->decision.reason);
    }
    return exit_status_;
  }

  const LauncherOptions& options_;
  const JobConfig& config_;
  std::unique_ptr<Engine> engine_;
  const volatile StopRequest& stop_;
  LauncherChannel channel_;
  Ladder ladder_;
  fs::path dump_folder_, node_folder_;
  std::optional<FileLock> lock_;
  LaunchState state_;
  Stopwatch since_written_;
  std::deque<Node> nodes_;           // a deque: adding nodes must not move those that are referred to
  std::vector<std::string> active_;  // names, in the order of ranks
  std::optional<RunWatch> watch_;    // watches the current attempt
  std::vector<RankState> evidence_;
  std::optional<Incident> healing_;       // set until the run is as far as before, or fails again
  std::int64_t step_before_failure_ = 0;  // the run has healed when it reaches this step again
  std::optional<Incident> differed_;      // replicas differed; set until a replay has shown whose state was wrong
  Stopwatch since_looked_;
  double last_seconds_lost_ = 0.0;
  bool keeps_monitors_ = false;  // a monitor that ends is started again; only after all have connected
  bool slow_is_told_ = false;
  pid_t ranks_ = 0;  // mpirun, srun or the one rank
  std::optional<int> ranks_status_;
  std::vector<pid_t> scheduler_commands_;  // commands that are still running
  pid_t growth_ = 0;                       // the process that asks for a node; 0: none
  double next_growth_ = 0.0, between_growing_ = kBetweenGrowing;
  int exit_status_ = 0;
  std::optional<RequestInbox> requests_;  // set once all monitors have connected
  std::optional<MetricsServer> server_;
  std::map<std::string, int> incidents_by_kind_;  // counted by this launcher
  int counted_incident_ = 0;
  BackgroundWriter writer_;  // last, so that it ends first, while everything else exists
};

}  // namespace

int launch(const LauncherOptions& options, const JobConfig& config, std::unique_ptr<Engine> engine,
           const volatile StopRequest& stop) {
  return Launcher(options, config, std::move(engine), stop).run();
}

}  // namespace tessera
