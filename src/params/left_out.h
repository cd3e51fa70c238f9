// Places of numbers in a buffer that lacks some ranges of the flat buffers (params/parameters.h).
#pragma once

#include <algorithm>
#include <vector>

#include "params/parameter_table.h"

namespace tessera {

class LeftOut {
 public:
  using Range = ParameterTable::Range;

  LeftOut() = default;
  /// `ranges` lie one behind the other in the flat buffers.
  explicit LeftOut(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
    for (const Range& range : ranges_) {
      sizes_before_.push_back(size_);
      size_ += range.end - range.begin;
    }
  }

  /// Returns the number of numbers that are left out.
  std::int64_t size() const { return size_; }
  /// Returns the place of a number of the flat buffers. If the number is left out, returns the place of the next one
  /// that is not.
  std::int64_t place(std::int64_t flat) const {
    const auto next = std::ranges::upper_bound(ranges_, flat, {}, &Range::begin);
    if (next == ranges_.begin()) return flat;
    const auto last = static_cast<std::size_t>(next - ranges_.begin()) - 1;
    return std::max(flat, ranges_[last].end) - sizes_before_[last] - (ranges_[last].end - ranges_[last].begin);
  }
  bool contains(std::int64_t flat) const { return place(flat) == place(flat + 1); }
  /// Calls visit(range) for what is not left out of the first `flat_size` numbers.
  template <typename Visit>
  void for_each_other(std::int64_t flat_size, Visit&& visit) const {
    std::int64_t begin = 0;
    for (const Range& range : ranges_) {
      if (begin < range.begin) visit(Range{begin, range.begin});
      begin = range.end;
    }
    if (begin < flat_size) visit(Range{begin, flat_size});
  }

 private:
  std::vector<Range> ranges_;
  std::vector<std::int64_t> sizes_before_;  // of the ranges before each
  std::int64_t size_ = 0;
};

}  // namespace tessera
