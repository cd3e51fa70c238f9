#include "comm/ranks.h"

#include "base/file.h"
#include "comm/halves.h"

namespace tessera {

Ranks::Ranks(std::unique_ptr<RankFile> file) {
  if (file != nullptr) board_ = std::make_unique<RankBoard>(std::move(file));
}

Ranks::Ranks(std::unique_ptr<Transport> world, Progress::Seconds timeout, std::unique_ptr<RankFile> file) {
  board_ = std::make_unique<RankBoard>(*world, std::move(file));
  progress_ = std::make_unique<Progress>(board_.get(), timeout, world->bell());
  world_ = ProcessGroup(std::move(world), *progress_, "world");
}

void Ranks::set_timeout(Progress::Seconds timeout, std::string key) {
  if (progress_ != nullptr) progress_->set_timeout(timeout, std::move(key));
}

void Ranks::set_failure_handler(std::function<void(const std::exception&)> failure_handler) {
  if (progress_ != nullptr) progress_->set_failure_handler(std::move(failure_handler));
}

void Ranks::set_step(std::int64_t step) {
  if (board_ != nullptr) board_->set_step(step);
}

void Ranks::set_section(Section section) {
  if (board_ != nullptr) board_->set_section(section);
}

void Ranks::set_end(ExitStatus status, std::string_view message) {
  if (board_ != nullptr) board_->set_end(static_cast<int>(status), message);
}

std::vector<int> Ranks::first_ranks_on_nodes() {
  if (board_ == nullptr) return {0};
  const double own = board_->first_rank();
  const std::vector<double> all = world_.all_gather(std::span(&own, 1), "nodes of ranks");
  return {all.begin(), all.end()};
}

bool Ranks::may_report() { return board_ == nullptr || board_->take_report(); }

void Ranks::require_same(std::string_view text, std::string_view what) {
  std::vector<double> own;
  append_halves(checksum(std::as_bytes(std::span(text))), own);
  const std::vector<double> all = world_.all_gather(own, what);
  for (std::size_t rank = 1; rank < all.size() / 2; ++rank) {
    require(join_halves(&all[2 * rank]) == join_halves(all.data()),
            "rank {} was started with another {} than rank 0: all ranks need the same", rank, what);
  }
}

}  // namespace tessera
