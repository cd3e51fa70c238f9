#include "comm/rank_board.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>

namespace tessera {
namespace {

/// The same clock on all processes of a node.
std::int64_t now_in_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A rank that waits says so several times a second.
constexpr std::int64_t kSilentMs = 1000;

enum class ProcessState : std::uint8_t { kLives, kStopped, kEnded };

ProcessState state_of(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return ProcessState::kEnded;
  // The state comes after the name, which is in parentheses.
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  const std::size_t end_of_name = stat.rfind(')');
  const char state = end_of_name != stat.npos && end_of_name + 2 < stat.size() ? stat[end_of_name + 2] : '?';
  if (state == 'Z' || state == 'X') return ProcessState::kEnded;  // its parent has not asked for its status yet
  return state == 'T' || state == 't' ? ProcessState::kStopped : ProcessState::kLives;
}

}  // namespace

/// Zeroed memory is an entry of a rank that has not come yet. The name may be read while it is written; then it is a
/// mixture of two.
struct RankBoard::Entry {
  std::atomic<std::int32_t> world_rank_plus_1;
  std::atomic<std::int32_t> pid;
  std::atomic<std::int64_t> step;
  std::atomic<std::int64_t> since_ms;
  std::atomic<std::int64_t> waiting_ms;  // when it said last that it waits; 0: it does not
  std::atomic<bool> reported;            // of the node's first rank: for all
  std::array<std::atomic<char>, 96> operation;
};

RankBoard::RankBoard(Transport& world)
    : node_(world.split_by_node()),
      window_(node_->allocate_window(sizeof(Entry))),
      own_(reinterpret_cast<Entry*>(window_->peer(node_->rank()))) {
  own_->pid.store(getpid());
  set_operation("starting");
  own_->world_rank_plus_1.store(world.rank() + 1);
}

RankBoard::~RankBoard() = default;

void RankBoard::set_step(std::int64_t step) { own_->step.store(step, std::memory_order_relaxed); }

void RankBoard::set_operation(std::string_view name) {
  const std::size_t length = std::min(name.size(), own_->operation.size() - 1);
  for (std::size_t i = 0; i < length; ++i) own_->operation[i].store(name[i], std::memory_order_relaxed);
  own_->operation[length].store('\0', std::memory_order_relaxed);
  own_->since_ms.store(now_in_ms(), std::memory_order_relaxed);
  own_->waiting_ms.store(0, std::memory_order_relaxed);
}

void RankBoard::set_waiting() { own_->waiting_ms.store(now_in_ms(), std::memory_order_relaxed); }

int RankBoard::first_rank() const { return entry(0).world_rank_plus_1.load() - 1; }

bool RankBoard::take_report() { return !reinterpret_cast<Entry*>(window_->peer(0))->reported.exchange(true); }

const RankBoard::Entry& RankBoard::entry(int node_rank) const {
  return *reinterpret_cast<const Entry*>(window_->peer(node_rank));
}

bool RankBoard::is_dead(const Entry& its) const {
  const pid_t pid = its.pid.load();
  return its.world_rank_plus_1.load() > 0 && pid != getpid() && state_of(pid) == ProcessState::kEnded;
}

std::optional<int> RankBoard::find_dead() const {
  for (int rank = 0; rank < node_->size(); ++rank) {
    if (is_dead(entry(rank))) return entry(rank).world_rank_plus_1.load() - 1;
  }
  return std::nullopt;
}

std::optional<int> RankBoard::find_dead_neighbour() const {
  const Entry& next = entry((node_->rank() + 1) % node_->size());
  return is_dead(next) ? std::optional(next.world_rank_plus_1.load() - 1) : std::nullopt;
}

std::vector<int> RankBoard::find_not_waiting() const {
  std::vector<int> found;
  for (int rank = 0; rank < node_->size(); ++rank) {
    if (now_in_ms() - entry(rank).waiting_ms.load() > kSilentMs) {
      found.push_back(entry(rank).world_rank_plus_1.load() - 1);
    }
  }
  return found;
}

std::string RankBoard::describe() const {
  std::string lines;
  for (int rank = 0; rank < node_->size(); ++rank) {
    const Entry& its = entry(rank);
    std::string operation;
    for (const auto& character : its.operation) {
      const char c = character.load(std::memory_order_relaxed);
      if (c == '\0') break;
      operation += c;
    }
    const ProcessState state = state_of(its.pid.load());
    const char* remark = state == ProcessState::kEnded     ? ", has died"
                         : state == ProcessState::kStopped ? ", is stopped"
                                                           : "";
    lines += fmt::format("\n  rank {} (process {}{}): step {}, for {:.1f} s in {}", its.world_rank_plus_1.load() - 1,
                         its.pid.load(), remark, its.step.load(),
                         1e-3 * static_cast<double>(now_in_ms() - its.since_ms.load()), operation);
  }
  return lines;
}

}  // namespace tessera
