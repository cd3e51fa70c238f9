#include "health/link_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/median.h"
#include "base/stopwatch.h"
#include "health/copy_bytes.h"
#include "tensor/arena.h"

namespace tessera {
namespace {

constexpr std::int64_t kRows = 1024;  // rows of a message, which is a matrix

class LinkCheck {
 public:
  LinkCheck(ProcessGroup& world, const RankPlaces& places, cuda::Runtime* runtime, const LinkCheckOptions& options)
      : world_(world),
        places_(places),
        runtime_(runtime),
        options_(options),
        size_(world.size()),
        columns_(std::max<std::int64_t>(1, options.num_bytes / (4 * kRows * size_)) * size_),
        arena_(static_cast<std::size_t>(2 * kRows * columns_ * 4 + 4096),
               runtime == nullptr ? Device::kCpu : Device::kCuda),
        out_(arena_.allocate({kRows, columns_}, DType::kFloat32)),
        in_(arena_.allocate({kRows, columns_}, DType::kFloat32)) {}

  LinkReport run() {
    check_all_reduce();
    check_all_to_all();
    check_pairs();
    for (Finding& finding : judge_pairs(report_.pairs, places_, options_)) {
      report_.findings.push_back(std::move(finding));
    }
    return std::move(report_);
  }

 private:
  double num_bytes() const { return static_cast<double>(out_.num_bytes()); }

  void check_all_reduce() {
    fill(out_, 1.0f + static_cast<float>(world_.rank()));
    world_.all_reduce(out_, "link check").wait();
    const auto sum = 0.5f * static_cast<float>(size_ * (size_ + 1));
    note_wrong(count_other_than(out_, sum), "all-reduce");
    fill(out_, 0.0f);  // keeps the sums of the next calls small
    const double seconds = slowest([&] { world_.all_reduce(out_, "link check").wait(); });
    report_.all_reduce_gb_per_s = 2e-9 * num_bytes() * (size_ - 1) / size_ / seconds;
    judge_rate("allReduceSlow", report_.all_reduce_gb_per_s, options_.expected_all_reduce);
  }

  void check_all_to_all() {
    // Part r goes to rank r, so the tensor is cut along its first dim into as many parts as there are ranks.
    const Tensor from = out_.reshape({size_, kRows * columns_ / size_}), to = in_.reshape(from.shape());
    fill(from, static_cast<float>(world_.rank()));
    const double seconds = slowest([&] { world_.all_to_all(from, to, "link check").wait(); });
    std::int64_t num_wrong = 0;
    for (int rank = 0; rank < size_; ++rank) {
      num_wrong += count_other_than(to.rows(rank, rank + 1), static_cast<float>(rank));
    }
    note_wrong(num_wrong, "all-to-all");
    report_.all_to_all_gb_per_s = 1e-9 * num_bytes() * (size_ - 1) / size_ / seconds;
    judge_rate("allToAllSlow", report_.all_to_all_gb_per_s, options_.expected_all_to_all);
  }

  void check_pairs() {
    std::vector<double> mine(static_cast<std::size_t>(size_), 0.0), wrong = mine;
    fill(out_, 1.0f + static_cast<float>(world_.rank()));
    for (int round = 0; round < num_rounds(size_); ++round) {
      const std::optional<int> partner = partner_in_round(world_.rank(), round, size_);
      std::vector<std::int64_t> rows(static_cast<std::size_t>(size_), 0);
      if (partner) rows[static_cast<std::size_t>(*partner)] = kRows;
      const Tensor from = partner ? out_ : out_.rows(0, 0), to = partner ? in_ : in_.rows(0, 0);
      // This is one collective of all ranks, in which each rank waits only for its partner.
      const double seconds = median_seconds([&] { world_.all_to_all_v(from, rows, to, rows, "link check").wait(); });
      if (!partner) continue;
      const auto at = static_cast<std::size_t>(*partner);
      mine[at] = 1e-9 * num_bytes() / seconds;
      wrong[at] = static_cast<double>(count_other_than(in_, 1.0f + static_cast<float>(*partner)));
    }
    const std::vector<double> all = world_.all_gather(mine, "rates of pairs"),
                              all_wrong = world_.all_gather(wrong, "wrong numbers of pairs");
    for (std::size_t rank = 0; rank < mine.size(); ++rank) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(rank * mine.size());
      report_.pairs.emplace_back(begin, begin + size_);
      for (std::size_t other = 0; other < mine.size(); ++other) {
        const double num_wrong = all_wrong[rank * mine.size() + other];
        if (num_wrong == 0.0) continue;
        report_.findings.push_back({.signal = "linkWrong",
                                    .part = places_.describe(other) + " to " + places_.describe(rank),
                                    .evidence = EvidenceKind::kHard,
                                    .value = num_wrong,
                                    .detail = fmt::format("{:.0f} numbers arrived wrong", num_wrong)});
      }
    }
  }

  /// Runs the operation once, then repeatedly, and returns the median of its times on this rank.
  double median_seconds(const std::function<void()>& operation) {
    const auto run = [&] {
      operation();
      if (runtime_ != nullptr) runtime_->synchronize();
    };
    run();
    std::vector<double> seconds;
    for (int i = 0; i < options_.repeats; ++i) {
      const Stopwatch watch;
      run();
      seconds.push_back(watch.seconds());
    }
    return median(std::move(seconds));
  }

  /// Returns the time of the operation on the slowest rank.
  double slowest(const std::function<void()>& operation) {
    const double seconds = median_seconds(operation);
    return std::ranges::max(world_.all_gather(std::span(&seconds, 1), "the slowest rank"));
  }

  void fill(const Tensor& tensor, float value) const {
    const std::vector<float> values(static_cast<std::size_t>(tensor.num_elements()), value);
    copy_bytes(runtime_, values.data(), tensor.num_bytes(), tensor.raw());
  }

  std::int64_t count_other_than(const Tensor& tensor, float value) const {
    std::vector<float> values(static_cast<std::size_t>(tensor.num_elements()));
    copy_bytes(runtime_, tensor.raw(), tensor.num_bytes(), values.data());
    return static_cast<std::int64_t>(values.size()) - std::ranges::count(values, value);
  }

  void note_wrong(std::int64_t num_wrong, const char* operation) {
    auto sum = static_cast<double>(num_wrong);
    world_.all_reduce(std::span(&sum, 1), "wrong numbers");
    if (sum == 0.0) return;
    report_.findings.push_back({.signal = "linkWrong",
                                .evidence = EvidenceKind::kHard,
                                .value = sum,
                                .detail = fmt::format("an {} of all ranks gave {:.0f} wrong numbers", operation, sum)});
  }

  void judge_rate(const char* signal, double rate, double expected) {
    if (expected == 0.0 || rate >= options_.slow_share * expected) return;
    report_.findings.push_back(
        {.signal = signal,
         .evidence = EvidenceKind::kHard,
         .value = rate,
         .limit = options_.slow_share * expected,
         .unit = "GB/s",
         .detail = fmt::format("{:.3g} GB/s, which is {:.0f} % of what is expected", rate, 100.0 * rate / expected)});
  }

  ProcessGroup& world_;
  const RankPlaces& places_;
  cuda::Runtime* runtime_;
  const LinkCheckOptions& options_;
  int size_;
  std::int64_t columns_;  // a multiple of the number of ranks
  Arena arena_;
  Tensor out_, in_;
  LinkReport report_;
};

struct Pair {
  int first, second;
  double rate;  // the lower rate of the two directions
};

/// Finds the slow pairs among pairs that should be equal: those within nodes, or those between nodes.
void judge_class(const std::vector<Pair>& pairs, double expected, const RankPlaces& places, double slow_share,
                 std::vector<Finding>& findings) {
  if (expected == 0.0) {
    if (pairs.size() < 3) return;  // with two pairs, nothing says which one is slow
    // The upper quartile is expected. If one of three nodes is slow, two of three pairs are slow.
    std::vector<double> rates;
    for (const Pair& pair : pairs) rates.push_back(pair.rate);
    const std::size_t at = (3 * (rates.size() - 1) + 2) / 4;
    std::ranges::nth_element(rates, rates.begin() + static_cast<std::ptrdiff_t>(at));
    expected = rates[at];
  }
  const double limit = slow_share * expected;
  const auto add = [&](std::string part, double rate, const std::string& where) {
    findings.push_back({.signal = "linkSlow",
                        .part = std::move(part),
                        .evidence = EvidenceKind::kHard,
                        .value = rate,
                        .limit = limit,
                        .unit = "GB/s",
                        .detail = fmt::format("{:.3g} GB/s{}, {:.3g} are expected", rate, where, expected)});
  };
  std::vector<int> num_slow(places.nodes.size(), 0), num_pairs = num_slow;
  std::vector<double> best(places.nodes.size(), 0.0);  // best rate among a rank's slow pairs
  for (const Pair& pair : pairs) {
    for (const int rank : {pair.first, pair.second}) {
      const auto at = static_cast<std::size_t>(rank);
      ++num_pairs[at];
      if (pair.rate >= limit) continue;
      ++num_slow[at];
      best[at] = std::max(best[at], pair.rate);
    }
  }
  const auto is_slow = [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    return num_pairs[at] > 1 && 2 * num_slow[at] > num_pairs[at];
  };
  for (int rank = 0; rank < static_cast<int>(places.nodes.size()); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    if (is_slow(rank))
      add(places.describe(at), best[at], fmt::format(" to {} of {} ranks", num_slow[at], num_pairs[at]));
  }
  for (const Pair& pair : pairs) {
    if (pair.rate >= limit || is_slow(pair.first) || is_slow(pair.second)) continue;
    const auto first = static_cast<std::size_t>(pair.first), second = static_cast<std::size_t>(pair.second);
    add(places.describe(first) + " - " + places.describe(second), pair.rate, "");
  }
}

}  // namespace

std::string RankPlaces::describe(std::size_t rank) const { return fmt::format("rank {} on {}", rank, hosts[rank]); }

std::optional<int> partner_in_round(int rank, int round, int num_ranks) {
  // The circle method: one rank stands still, and the others walk around it.
  const int last = num_rounds(num_ranks);  // the rank that stands still; with an odd number of ranks it does not exist
  int partner = last;
  if (rank == last) {
    partner = round;
  } else if (rank != round) {
    partner = ((2 * round - rank) % last + last) % last;
  }
  return partner < num_ranks ? std::optional(partner) : std::nullopt;
}

std::vector<Finding> judge_pairs(const PairRates& pairs, const RankPlaces& places, const LinkCheckOptions& options) {
  std::vector<Pair> inside, between;
  for (std::size_t a = 0; a < pairs.size(); ++a) {
    for (std::size_t b = a + 1; b < pairs.size(); ++b) {
      const Pair pair{static_cast<int>(a), static_cast<int>(b), std::min(pairs[a][b], pairs[b][a])};
      (places.nodes[a] == places.nodes[b] ? inside : between).push_back(pair);
    }
  }
  std::vector<Finding> findings;
  judge_class(inside, options.expected_pair_inside, places, options.slow_share, findings);
  judge_class(between, options.expected_pair_between, places, options.slow_share, findings);
  return findings;
}

LinkReport check_links(ProcessGroup& world, const RankPlaces& places, cuda::Runtime* runtime,
                       const LinkCheckOptions& options) {
  return LinkCheck(world, places, runtime, options).run();
}

}  // namespace tessera
