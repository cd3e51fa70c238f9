// A transport that counts what its rank sends, separately for each group. Tests compare the counts with formulas, and
// `tessera bench world` shows how they grow.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "comm/transport/forwarding_transport.h"

namespace tessera {

/// Counts what one rank has sent so far, by its groups' names (ProcessGroup::axis).
class SentMessages {
 public:
  struct Count {
    std::int64_t messages = 0, bytes = 0;
    std::set<int> receivers;  // ranks of the group
  };

  void add(const std::string& axis, std::size_t num_bytes, int to) {
    const std::lock_guard lock(mutex_);
    Count& count = counts_[axis];
    count.receivers.insert(to);
    ++count.messages;
    count.bytes += static_cast<std::int64_t>(num_bytes);
  }
  Count of(const std::string& axis) const {
    const std::lock_guard lock(mutex_);
    const auto found = counts_.find(axis);
    return found == counts_.end() ? Count() : found->second;
  }
  /// Returns all counts, and begins anew.
  std::map<std::string, Count> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(counts_, {});
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Count> counts_;
};

class CountingTransport : public ForwardingTransport {
 public:
  /// `sent` must outlive this transport.
  CountingTransport(std::unique_ptr<Transport> transport, SentMessages& sent, std::string axis = "world")
      : ForwardingTransport(std::move(transport)), sent_(sent), axis_(std::move(axis)) {}

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    sent_.add(axis_, num_bytes, to);
    return transport().send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return std::make_unique<CountingTransport>(transport().split(color, order, axis), sent_, std::string(axis));
  }
  Bell* bell() const override { return transport().bell(); }

 private:
  SentMessages& sent_;
  std::string axis_;
};

}  // namespace tessera
