// A transport that counts the bytes that its rank sends, separately for each group.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "comm/process_group.h"
#include "tests/comm/forwarding_transport.h"

namespace tessera::comm_test {

/// Counts the bytes that one rank has sent through each of its transports so far.
class SentBytes {
 public:
  std::shared_ptr<std::atomic<std::int64_t>> add() {
    counters_.push_back(std::make_shared<std::atomic<std::int64_t>>(0));
    return counters_.back();
  }
  /// Returns the counter of this group's transport, or null for a group of one rank. All ranks of the group call it
  /// together. The transport is the one whose counter a barrier changes.
  std::shared_ptr<const std::atomic<std::int64_t>> of(ProcessGroup& group) const {
    const auto values = [&] {
      std::vector<std::int64_t> all;
      for (const auto& counter : counters_) all.push_back(counter->load());
      return all;
    };
    const std::vector<std::int64_t> before = values();
    group.barrier("whose transport is it");
    const std::vector<std::int64_t> after = values();
    const auto moved = std::mismatch(before.begin(), before.end(), after.begin()).first - before.begin();
    if (moved == static_cast<std::ptrdiff_t>(counters_.size())) return nullptr;
    return counters_[static_cast<std::size_t>(moved)];
  }

 private:
  std::vector<std::shared_ptr<std::atomic<std::int64_t>>> counters_;
};

class CountingTransport : public ForwardingTransport {
 public:
  /// `sent` must outlive this transport.
  CountingTransport(std::unique_ptr<Transport> transport, SentBytes& sent)
      : ForwardingTransport(std::move(transport)), sent_(sent), counter_(sent.add()) {}

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    counter_->fetch_add(static_cast<std::int64_t>(num_bytes));
    return transport().send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Transport> split(int color, int order) override {
    return std::make_unique<CountingTransport>(transport().split(color, order), sent_);
  }

 private:
  SentBytes& sent_;
  std::shared_ptr<std::atomic<std::int64_t>> counter_;
};

}  // namespace tessera::comm_test
