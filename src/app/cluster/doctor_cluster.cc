#include "app/cluster/doctor_cluster.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <future>
#include <iostream>

#include "app/cli/on_ranks.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "launch/cluster_doctor.h"
#include "launch/engines/slurm.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRanksHaveMet = "ranks have met";
constexpr int kAsking = 30, kStarting = 300;  // seconds for a node to answer, and for all ranks to meet

NodeFacts ask(const Engine& engine, const std::string& node, const CommandLine& program) {
  const std::string line = shell_line(engine.on_node(node, program));
  NodeFacts facts;
  try {
    const double before = unix_time();
    const std::string answer = output_of(line, kAsking);
    const double after = unix_time();
    const std::size_t begin = answer.find('{'), end = answer.rfind('}');  // the shell may print more
    require(begin != answer.npos && end != answer.npos, "'{}' printed no answer: {}", line, answer.substr(0, 200));
    const nlohmann::json json = parse_json(answer.substr(begin, end + 1 - begin), "the answer of " + node);
    facts = node_facts_from_json(json);
    facts.clock_ahead = json.value("time", 0.0) - 0.5 * (before + after);
    facts.clock_uncertainty = 0.5 * (after - before);
  } catch (const Error& error) {
    std::string why = error.what();
    std::erase(why, '\r');
    std::ranges::replace(why, '\n', ' ');  // ssh prints several lines; a finding is one line
    facts.problem = fmt::format("it cannot be asked: {}. Try: {}", why, shell_line(engine.on_node(node, {"true"})));
  }
  facts.name = node;
  return facts;
}

/// Files by which nodes recognize that a folder is the same one. The destructor removes them.
class Tokens {
 public:
  explicit Tokens(const std::vector<fs::path>& folders)
      : folders_(folders), name_(fmt::format(".tessera-doctor-{}", static_cast<std::int64_t>(1e6 * unix_time()))) {}
  /// Writes the files. Returns the errors of the folders that cannot be written.
  std::vector<std::string> write() const {
    std::vector<std::string> errors;
    for (const fs::path& folder : folders_) {
      try {
        write_whole_file(folder / name_, "");
      } catch (const Error& error) {
        errors.push_back(
            fmt::format("this machine cannot write into the folder '{}': {}", folder.string(), error.what()));
      }
    }
    return errors;
  }
  ~Tokens() {
    std::error_code error;
    for (const fs::path& folder : folders_) fs::remove(folder / name_, error);
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;
  const std::string& name() const { return name_; }

 private:
  const std::vector<fs::path>& folders_;
  std::string name_;
};

void print(const char* what, const std::string& text) { std::cout << fmt::format("{:<5} {}\n", what, text); }

/// Starts the ranks once. Returns whether they started and met.
bool start_ranks(const Engine& engine, const std::vector<std::string>& nodes, int ranks_per_node,
                 const std::string& program) {
  const std::string line = shell_line(engine.on_ranks(nodes, ranks_per_node, {}, {program, "doctor", "--meet-ranks"}));
  const std::size_t num_ranks = nodes.size() * static_cast<std::size_t>(ranks_per_node);
  try {
    const Stopwatch watch;
    const std::string output = output_of(line, kStarting);
    // Ranks that do not find each other say each that one rank has met.
    const std::string expected = fmt::format("\n{} {}\n", num_ranks, kRanksHaveMet);
    require(("\n" + output).find(expected) != std::string::npos, "'{}' printed: {}", line, output.substr(0, 500));
    print("ok", fmt::format("{} ranks on {} nodes started and met within {:.1f} s", num_ranks, nodes.size(),
                            watch.seconds()));
    return true;
  } catch (const Error& error) {
    print("bad", fmt::format("{} ranks on {} nodes did not start: {}", num_ranks, nodes.size(), error.what()));
    return false;
  }
}

}  // namespace

int examine_cluster(const ClusterDoctorOptions& options) {
  const std::unique_ptr<Engine> engine = make_engine(options.engine);
  const std::vector<std::string> nodes = engine->nodes();
  const std::string program = fs::read_symlink("/proc/self/exe").string();
  const Tokens tokens(options.folders);
  const std::vector<std::string> unwritten = tokens.write();
  CommandLine question = {program, "doctor", "--node-facts", tokens.name()};
  for (const fs::path& folder : options.folders) question.insert(question.end(), {"--folder", folder.string()});
  std::vector<std::future<NodeFacts>> answers;
  for (const std::string& node : nodes) {
    answers.push_back(std::async(std::launch::async, [&, node] { return ask(*engine, node, question); }));
  }
  std::vector<NodeFacts> facts;
  std::vector<std::string> reached;
  for (std::future<NodeFacts>& answer : answers) {
    facts.push_back(answer.get());
    if (facts.back().problem.empty()) reached.push_back(facts.back().name);
  }
  bool is_well = unwritten.empty();
  print(reached.size() == nodes.size() ? "ok" : "bad",
        fmt::format("engine {}: {} of {} nodes answer", engine->name(), reached.size(), nodes.size()));
  for (const std::string& error : unwritten) print("bad", error);
  for (const ClusterFinding& finding : compare_nodes(facts, version())) {
    const bool is_bad = finding.severity == Severity::kBad;
    is_well = is_well && !is_bad;
    print(is_bad ? "bad" : "warn", fmt::format("{}: {}", finding.nodes, finding.text));
  }
  if (!reached.empty()) is_well = start_ranks(*engine, reached, options.ranks_per_node, program) && is_well;
  return is_well ? 0 : 1;
}

void print_node_facts(const std::vector<fs::path>& folders, const std::string& token) {
  std::cout << json_text(to_json(take_node_facts(folders, token))) << '\n';
}

void meet_ranks() {
  run_on_ranks([] { return JobConfig(); },
               [](const JobConfig&, Ranks& ranks) {
                 ranks.world().barrier("tessera doctor");
                 if (ranks.rank() == 0) std::cout << fmt::format("{} {}\n", ranks.size(), kRanksHaveMet) << std::flush;
                 return 0;
               });
}

}  // namespace tessera
