#include "comm/rank_board.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"

namespace tessera {
namespace {

/// A rank that waits reports it several times a second, so a longer silence means that it does not wait.
constexpr std::int64_t kSilentNs = 1'000'000'000;
/// The number of ranks that a call of find_dead() checks. A node with GPUs rarely has more.
constexpr std::size_t kNumToCheck = 8;

}  // namespace

/// Holds a rank's part of the window.
struct RankBoard::Shared {
  RankEntry entry;               // used if the rank has no file
  SharedText<1024> file;         // path of the rank's file; empty: it has none
  std::atomic<bool> reported{};  // used in the part of the node's first rank, for all ranks
};

RankBoard::RankBoard(Transport& world, std::unique_ptr<RankFile> file)
    : file_(std::move(file)),
      node_(world.split_by_node()),
      window_(node_->allocate_window(sizeof(Shared))),
      rank_(node_->rank()) {
  const auto shared = [&](int rank) { return reinterpret_cast<Shared*>(window_->peer(rank)); };
  own_ = &shared(rank_)->entry;
  if (file_ != nullptr) {
    const std::string path = file_->path().string();
    require(path.size() < shared(rank_)->file.size(), "job.node_folder: the path '{}' is too long", path);
    put_text(path, shared(rank_)->file);
    file_->set_world_size(world.size());
    own_ = &file_->entry();
    recorder_ = file_->recorder();
  } else {
    own_->pid.store(getpid());
    own_->process_start.store(start_of_process(getpid()));
    set_operation("starting");
    own_->world_rank_plus_1.store(world.rank() + 1);
  }
  // The split returns when all ranks of the node have written their entries, or where these are.
  static_cast<void>(node_->split(0, rank_, "node"));
  for (int rank = 0; rank < node_->size(); ++rank) {
    const std::string path = get_text(shared(rank)->file);
    if (rank == rank_ || path.empty()) {
      entries_.push_back(rank == rank_ ? own_ : &shared(rank)->entry);
    } else {
      entries_.push_back(&entry_in(files_.emplace_back(path).bytes()));
    }
  }
}

RankBoard::RankBoard(std::unique_ptr<RankFile> file)
    : file_(std::move(file)), entries_{&file_->entry()}, own_(&file_->entry()), recorder_(file_->recorder()) {
  file_->set_world_size(1);
}

RankBoard::~RankBoard() = default;

void RankBoard::set_step(std::int64_t step) {
  std::int64_t none = 0;
  own_->first_step.compare_exchange_strong(none, step, kRelaxed);
  own_->step.store(step, kRelaxed);
  set_section(Section::kStep);
}

void RankBoard::set_section(Section section) {
  Section present = own_->section.load(kRelaxed);
  if (present == Section::kEnded) return;  // another thread has recorded the end, while this one still goes on
  const std::int64_t now = monotonic_ns(), before = own_->section_since_ns.exchange(now, kRelaxed);
  if (before != 0 && present != Section::kStep) own_->idle_ns.fetch_add(now - before, kRelaxed);
  own_->section.compare_exchange_strong(present, section, kRelaxed);  // fails only if the end has come
}

void RankBoard::set_operation(std::string_view name) {
  const std::int64_t now = monotonic_ns();
  put_text(name, own_->operation);
  own_->operation_since_ns.store(now, kRelaxed);
  own_->wait_seen_ns.store(0, kRelaxed);
  own_->awaited_event.store(0, kRelaxed);
  const std::int64_t begin = own_->wait_begin_ns.exchange(0, kRelaxed);
  if (begin != 0 && own_->section.load(kRelaxed) == Section::kStep) own_->idle_ns.fetch_add(now - begin, kRelaxed);
}

void RankBoard::set_waiting() {
  const std::int64_t now = monotonic_ns();
  own_->wait_seen_ns.store(now, kRelaxed);
  if (own_->wait_begin_ns.load(kRelaxed) == 0) own_->wait_begin_ns.store(now, kRelaxed);
}

void RankBoard::set_awaited(std::uint64_t event) { own_->awaited_event.store(event, kRelaxed); }

void RankBoard::set_stopped(std::int64_t from_ns, std::int64_t until_ns) {
  own_->stopped_from_ns.store(from_ns, kRelaxed);
  own_->stopped_until_ns.store(until_ns, kRelaxed);
}

void RankBoard::set_end(int exit_status, std::string_view message) { tessera::set_end(*own_, exit_status, message); }

int RankBoard::num_in_process() const {
  return static_cast<int>(std::ranges::count_if(
      entries_, [](const RankEntry* entry) { return entry->pid.load(std::memory_order_relaxed) == getpid(); }));
}

int RankBoard::first_rank() const { return entries_.front()->world_rank_plus_1.load() - 1; }

bool RankBoard::take_report() {
  return window_ == nullptr || !reinterpret_cast<Shared*>(window_->peer(0))->reported.exchange(true);
}

bool RankBoard::is_dead(const RankEntry& entry) {
  const pid_t pid = entry.pid.load();
  return entry.world_rank_plus_1.load() > 0 && pid != getpid() &&
         state_of_process(pid, entry.process_start.load()) == ProcessState::kEnded;
}

std::optional<int> RankBoard::find_dead() {
  for (std::size_t i = 0; i < std::min(kNumToCheck, entries_.size()); ++i) {
    const RankEntry& entry = *entries_[next_to_check_++ % entries_.size()];
    if (is_dead(entry)) return entry.world_rank_plus_1.load() - 1;
  }
  return std::nullopt;
}

std::optional<int> RankBoard::find_dead_neighbour() const {
  const RankEntry& next = *entries_[static_cast<std::size_t>((rank_ + 1) % num_ranks())];
  return is_dead(next) ? std::optional(next.world_rank_plus_1.load() - 1) : std::nullopt;
}

std::vector<int> RankBoard::find_not_waiting() const {
  std::vector<int> found;
  for (const RankEntry* entry : entries_) {
    if (monotonic_ns() - entry->wait_seen_ns.load() > kSilentNs) found.push_back(entry->world_rank_plus_1.load() - 1);
  }
  return found;
}

std::string RankBoard::describe() const {
  std::string lines;
  for (const RankEntry* entry : entries_) {
    const ProcessState state = state_of_process(entry->pid.load(), entry->process_start.load());
    const char* remark = state == ProcessState::kEnded     ? ", has died"
                         : state == ProcessState::kStopped ? ", is stopped"
                                                           : "";
    lines += fmt::format("\n  rank {} (process {}{}): step {}, for {:.1f} s in {}", entry->world_rank_plus_1.load() - 1,
                         entry->pid.load(), remark, entry->step.load(),
                         1e-9 * static_cast<double>(monotonic_ns() - entry->operation_since_ns.load()),
                         get_text(entry->operation));
  }
  return lines;
}

}  // namespace tessera
