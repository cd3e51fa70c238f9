#include "run/state/replica_check.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "base/json.h"
#include "base/log.h"
#include "comm/halves.h"
#include "comm/together.h"

namespace tessera {
namespace {

/// Returns the last line of a file that is a whole JSON object, or null if there is none.
nlohmann::json last_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  nlohmann::json last;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json parsed = nlohmann::json::parse(line, nullptr, false);
    if (parsed.is_object()) last = std::move(parsed);
  }
  return last;
}

}  // namespace

std::optional<WrongState> find_replayed_state(const std::filesystem::path& dump_folder, std::int64_t attempt) {
  const nlohmann::json last = last_line(dump_folder / kMismatchesName);
  if (!last.is_object() || !last.contains("wrong_ranks") || last.value("attempt", std::int64_t{-1}) != attempt) {
    return std::nullopt;
  }
  return WrongState{.step = last.value("step", std::int64_t{0}),
                    .ranks = last.at("wrong_ranks").get<std::vector<std::int64_t>>()};
}

ReplicaCheck::ReplicaCheck(Ranks& ranks, Mesh& mesh, const TrainingState& state,
                           const std::filesystem::path& dump_folder, std::int64_t attempt, std::string identity)
    : ranks_(ranks),
      mesh_(mesh),
      state_(state),
      path_(dump_folder / kMismatchesName),
      attempt_(attempt),
      identity_(std::move(identity)) {
  if (ranks_.rank() == 0) open_ = find_open();
  double open_step = open_ ? static_cast<double>(open_->step) : 0.0;
  open_step = ranks_.world().all_gather(std::span(&open_step, 1), "an earlier mismatch of replicas").front();
  if (open_step > 0.0 && !open_) open_ = Open{.step = static_cast<std::int64_t>(open_step), .checksums = {}};
}

std::optional<ReplicaCheck::Open> ReplicaCheck::find_open() const {
  const nlohmann::json last = last_line(path_);
  if (!last.is_object() || last.contains("wrong_ranks")) return std::nullopt;
  try {
    const JsonFields fields(last, path_.string());
    Open open{.step = static_cast<std::int64_t>(fields.count("step", std::uint64_t{1} << 52)), .checksums = {}};
    if (fields.text("identity") != identity_) {
      spdlog::warn(
          "the replicas that differed at step {} ('{}') had another mesh, configuration or dataset, so this "
          "run does not show which was wrong",
          open.step, path_.string());
      return std::nullopt;
    }
    for (const auto& [rank, value] : fields.at("checksums").items()) {
      const nlohmann::json entry = {{"rank", rank}, {"checksum", value}};
      open.checksums.emplace_back(std::stoll(rank), JsonFields(entry, path_.string()).hex("checksum"));
    }
    return open;
  } catch (const std::exception& error) {  // another program wrote the line: there is nothing to explain
    spdlog::warn("'{}' cannot be read, so no replay will explain it: {}", path_.string(), error.what());
    return std::nullopt;
  }
}

std::int64_t ReplicaCheck::shard_of(std::int64_t rank) const {
  const std::int64_t inner = mesh_.degrees.dp_shard * mesh_.degrees.cp * mesh_.degrees.tp;
  return place_of(mesh_.degrees, rank).pp * inner + rank % inner;
}

std::uint64_t ReplicaCheck::compare(std::int64_t step, const TrainingState::Checksums& own) {
  std::vector<double> numbers;
  append_halves(own.all, numbers);
  append_halves(own.buffers, numbers);
  const std::vector<double> all = ranks_.world().all_gather(numbers, "checksums of the state");
  std::vector<std::uint64_t> states;  // by rank
  std::map<std::int64_t, std::vector<std::int64_t>> by_shard, by_stage;
  bool differs = false;
  for (std::int64_t rank = 0; rank < ranks_.size(); ++rank) {
    const double* state = all.data() + 4 * rank;
    states.push_back(join_halves(state));
    std::vector<std::int64_t>& same_state = by_shard[shard_of(rank)];
    std::vector<std::int64_t>& same_buffers = by_stage[place_of(mesh_.degrees, rank).pp];
    same_state.push_back(rank);
    same_buffers.push_back(rank);
    differs = differs || states.back() != states[static_cast<std::size_t>(same_state.front())];
    differs = differs || join_halves(state + 2) != join_halves(all.data() + 4 * same_buffers.front() + 2);
  }
  if (differs) {
    const std::string message = describe_mismatch(step);
    if (ranks_.rank() == 0) {
      nlohmann::ordered_json checksums;
      for (std::size_t rank = 0; rank < states.size(); ++rank) checksums[std::to_string(rank)] = to_hex(states[rank]);
      append(json_text(nlohmann::ordered_json{{"step", step},
                                              {"attempt", attempt_},
                                              {"identity", identity_},
                                              {"message", message},
                                              {"checksums", checksums}}));
    }
    ranks_.world().barrier("the record of what differs");  // rank 0 writes it before a rank ends the others
    throw StateMismatch(message);
  }
  if (explains(step)) {
    std::vector<std::int64_t> wrong;  // filled on rank 0, which has the file
    for (const auto& [rank, checksum] : open_->checksums) {
      if (rank >= 0 && rank < ranks_.size() && states[static_cast<std::size_t>(rank)] != checksum) {
        wrong.push_back(rank);
      }
    }
    if (ranks_.rank() == 0) {
      append(json_text(nlohmann::ordered_json{{"step", step}, {"attempt", attempt_}, {"wrong_ranks", wrong}}));
      warn_in_frame(fmt::format("THE REPLAY OF STEP {} SAYS WHICH STATE WAS WRONG", step),
                    fmt::format("Ranks held different states after this step, and the run went back. Made again, the "
                                "step gives another state than the one that these ranks had: {}.",
                                wrong.empty() ? "none" : fmt::format("{}", fmt::join(wrong, ", "))));
    }
    open_.reset();
  }
  std::vector<std::uint64_t> of_model;  // states of the shards of one replica
  for (const auto& [shard, ranks] : by_shard) of_model.push_back(states[static_cast<std::size_t>(ranks.front())]);
  return checksum(std::as_bytes(std::span(of_model)));
}

std::string ReplicaCheck::describe_mismatch(std::int64_t step) {
  const std::vector<TrainingState::Part> parts = state_.parts();
  // The ranks of each group have parts of the same names. All ranks of a stage share only the buffers, which come last.
  const auto find = [&](ProcessGroup& group, std::size_t first, std::string_view which) -> std::string {
    std::vector<double> numbers = {static_cast<double>(ranks_.rank())};
    for (std::size_t i = first; i < parts.size(); ++i) append_halves(parts[i].checksum, numbers);
    const std::vector<double> all = group.all_gather(numbers, "checksums of parameters");
    for (std::size_t i = first; i < parts.size(); ++i) {
      std::vector<std::string> values;
      bool differs = false;
      for (std::size_t begin = 0; begin < all.size(); begin += numbers.size()) {
        const std::uint64_t value = join_halves(all.data() + begin + 1 + 2 * (i - first));
        differs = differs || value != join_halves(all.data() + 1 + 2 * (i - first));
        values.push_back(fmt::format("rank {}: {}", static_cast<int>(all[begin]), to_hex(value)));
      }
      if (!differs) continue;
      return fmt::format(
          "step {}: {} differs between ranks that hold the same {} ({}). A bit has flipped in the memory of one of "
          "them, or its processor computes wrong numbers. The copies and checkpoints that there are were compared "
          "before they were kept: start the run again to go on from the newest",
          step, parts[i].name, which, fmt::join(values, ", "));
    }
    return {};
  };
  const auto num_buffers = static_cast<std::size_t>(std::ranges::count_if(parts, &TrainingState::Part::is_buffer));
  const std::string of_weights = find(mesh_.dp_replicate, 0, "weights"),
                    of_biases = find(mesh_.tokens, parts.size() - num_buffers, "expert biases");
  const std::string found =
      broadcast_first_text(ranks_.world(), of_weights.empty() ? of_biases : of_weights, "the state that differs");
  return found.empty()
             ? fmt::format("step {}: the states of ranks that hold the same differed, and do not any more", step)
             : found;
}

void ReplicaCheck::append(const std::string& line) const {
  std::ofstream file(path_, std::ios::app);
  file << line << '\n';
  file.flush();
  if (!file) spdlog::warn("cannot write '{}'", path_.string());
}

}  // namespace tessera
