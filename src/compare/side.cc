#include "compare/side.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "run/record/run_info.h"

namespace tessera {
namespace {

constexpr const char* kAbsent = "(absent)";

/// Returns whether a key says where a run writes and reads. The data itself is identified by its checksums.
bool is_place(const std::string& key) {
  constexpr std::string_view kPlaces[] = {"training.dataset", "training.dataset_path", "validation.dataset",
                                          "validation.dataset_path", "model.hf_assets_path"};
  return key.starts_with("job.") || std::ranges::find(kPlaces, key) != std::end(kPlaces);
}

/// Returns everything that is known of a run before its first step, by key. A key that the run's program did not know
/// yet has the default.
std::map<std::string, std::string> identity_of(const RunRecord& run) {
  static const std::map<std::string, std::string> defaults = config_values({});
  std::map<std::string, std::string> identity = run.config;
  identity.insert(defaults.begin(), defaults.end());
  for (const auto& [split, checksum] : run.dataset) identity["dataset." + split] = checksum;
  return identity;
}

/// Returns a line per key whose values differ, with each value and the first run that has it; "" if there is none.
std::string differing_lines(const std::vector<const RunRecord*>& runs,
                            const std::function<bool(const std::string&)>& may_differ) {
  std::set<std::string> keys;
  std::vector<std::map<std::string, std::string>> identities;
  for (const RunRecord* run : runs) {
    for (const auto& [key, value] : identities.emplace_back(identity_of(*run))) keys.insert(key);
  }
  std::string lines;
  for (const std::string& key : keys) {
    if (may_differ(key)) continue;
    std::vector<std::pair<std::string, const RunRecord*>> values;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto found = identities[i].find(key);
      const std::string value = found == identities[i].end() ? kAbsent : found->second;
      const bool known = std::any_of(values.begin(), values.end(), [&](const auto& v) { return v.first == value; });
      if (!known) values.emplace_back(value, runs[i]);
    }
    if (values.size() < 2) continue;
    lines += fmt::format("\n  {}:", printable(key));
    for (const auto& [value, run] : values) {
      lines += fmt::format("  {} in '{}'", printable(value), run->folder.string());
    }
  }
  return lines;
}

std::string seeds_of(const Side& side) {
  std::vector<std::int64_t> seeds;
  for (const RunRecord& run : side.runs) seeds.push_back(run.seed());
  return fmt::format("{}", fmt::join(seeds, ", "));
}

}  // namespace

bool may_differ_between_sides(const std::string& key) {
  // The weights that a run starts from matter, unlike the place of its checkpoints.
  if (key.starts_with("checkpoint.initial_load")) return false;
  if (is_place(key)) return true;
  for (const char* prefix : {"metrics.", "checkpoint.", "profiling.", "comm.", "quantize.", "activation_checkpoint.",
                             "parallelism.", "validation."}) {
    if (key.starts_with(prefix)) return true;
  }
  for (const char* name : {"model.converters", "model.print_after_conversion", "model.flavor", "dataset.val",
                           "training.mixed_precision_param", "training.mixed_precision_reduce", "optimizer.state_dtype",
                           "training.num_threads", "debug.seed"}) {
    if (key == name) return true;
  }
  return false;
}

Side make_side(std::string label, std::vector<RunRecord> runs) {
  TESSERA_CHECK(!runs.empty(), "side '{}'", label);
  std::vector<const RunRecord*> pointers;
  for (const RunRecord& run : runs) {
    require_unchanged(run);
    require(run.ended(), "'{}' is not finished: its last whole line is of step {}, training.steps is {}",
            run.folder.string(), run.last_step(), run.num_steps());
    pointers.push_back(&run);
  }
  const std::string lines = differing_lines(pointers, [](const std::string& key) {
    return is_place(key) || key.starts_with("comm.") || key == "debug.seed";
  });
  require(lines.empty(), "the runs of side '{}' may differ in their seed only, but they differ in{}", label, lines);
  std::sort(runs.begin(), runs.end(), [](const RunRecord& a, const RunRecord& b) { return a.seed() < b.seed(); });
  for (std::size_t i = 1; i < runs.size(); ++i) {
    require(runs[i].seed() != runs[i - 1].seed(),
            "side '{}' has two runs with debug.seed = {}: '{}' and '{}'; expected one run per seed", label,
            runs[i].seed(), runs[i - 1].folder.string(), runs[i].folder.string());
  }
  return {std::move(label), std::move(runs)};
}

void require_comparable(const std::vector<Side>& sides) {
  std::vector<const RunRecord*> runs;
  for (const Side& side : sides) {
    for (const RunRecord& run : side.runs) runs.push_back(&run);
  }
  const std::string lines = differing_lines(runs, may_differ_between_sides);
  require(lines.empty(), "these runs cannot be compared: they differ in more than precision{}", lines);
  for (const Side& side : sides) {
    require(seeds_of(side) == seeds_of(sides[0]),
            "sides are compared seed by seed: '{}' has debug.seed {}, '{}' has {}; expected the same on both",
            sides[0].label, seeds_of(sides[0]), side.label, seeds_of(side));
  }
}

void require_sound_baseline(const Side& baseline) {
  for (const RunRecord& run : baseline.runs) {
    const auto broken = run.broken();
    if (!broken) continue;
    fail("the baseline's {} is not finite at step {} of seed {}: there is nothing to compare with", broken->what,
         broken->step, run.seed());
  }
}

void require_unchanged(const RunRecord& run) {
  std::string lines;
  for (const auto& [key, values] : run.changed) {
    std::vector<std::string> shown;
    for (const std::string& value : values) shown.push_back(printable(value));
    lines += fmt::format("\n  {}:  {}", printable(key), fmt::join(shown, ", then "));
  }
  require(lines.empty(), "'{}' was resumed with another configuration, so no configuration stands for it{}",
          run.folder.string(), lines);
}

bool is_of_machine(const std::string& key) { return key == "program" || key == "processor" || key == "threads"; }

void require_same_run(const RunRecord& found, const RunRecord& expected) {
  const std::string lines = differing_lines({&found, &expected}, is_place);
  require(lines.empty(),
          "'{}' holds another run than the one to be started; remove it, or choose another folder for the runs. They "
          "differ in{}",
          found.folder.string(), lines);
}

std::vector<Difference> differences_of(const std::vector<Side>& sides) {
  std::set<std::string> keys = {"program", "processor", "threads", "data ranks"};
  std::vector<std::map<std::string, std::string>> identities;
  for (const Side& side : sides) {
    const RunRecord& run = side.runs.front();
    auto& identity = identities.emplace_back(identity_of(run));
    identity["program"] = run.program;
    identity["processor"] = run.processor;
    identity["threads"] = std::to_string(run.threads);
    identity["data ranks"] = std::to_string(run.num_data_ranks);
    for (const auto& [key, value] : identity) keys.insert(key);
  }
  std::vector<Difference> differences;
  for (const std::string& key : keys) {
    if (is_place(key) || key == "debug.seed") continue;
    Difference difference{.key = key, .values = {}};
    for (const auto& identity : identities) {
      const auto found = identity.find(key);
      difference.values.push_back(found == identity.end() ? kAbsent : found->second);
    }
    const auto& values = difference.values;
    if (std::any_of(values.begin(), values.end(), [&](const std::string& v) { return v != values[0]; })) {
      differences.push_back(std::move(difference));
    }
  }
  return differences;
}

}  // namespace tessera
