// The transport of a rank that exists only in a plan. It has a rank and a size, and fails a check if it is asked to
// communicate. Objects built on it can still be measured, because measuring communicates with nobody.
#pragma once

#include "base/error.h"
#include "comm/transport/transport.h"

namespace tessera {

class PlannedTransport : public Transport {
 public:
  PlannedTransport(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::unique_ptr<Request> send(const std::byte*, std::size_t, int to, int) override { fail_without(to); }
  std::unique_ptr<Request> receive(std::byte*, std::size_t, int from, int) override { fail_without(from); }
  std::unique_ptr<Transport> split(int, int, std::string_view) override { fail_without(rank_); }
  std::unique_ptr<Transport> split_by_node() override { fail_without(rank_); }
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t) override { fail_without(rank_); }
  void abort(int) override { fail_without(rank_); }

 private:
  [[noreturn]] void fail_without(int rank) const {
    TESSERA_CHECK(false, "rank {} of {} is planned only, and does nothing", rank, size_);
  }

  int rank_, size_;
};

}  // namespace tessera
