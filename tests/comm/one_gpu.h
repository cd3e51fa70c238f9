// Ranks that are threads and share one GPU.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "comm/transport.h"
#include "tensor/arena.h"

namespace tessera::comm_test {

/// Groups that are split from this one have windows in the memory of the one GPU that all ranks use.
class OneGpuTransport : public Transport {
 public:
  explicit OneGpuTransport(std::unique_ptr<Transport> transport, bool is_split = false)
      : transport_(std::move(transport)), is_split_(is_split) {}

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    return transport_->send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) override {
    return transport_->receive(data, num_bytes, from, tag);
  }
  std::unique_ptr<Transport> split(int color, int order) override {
    return std::make_unique<OneGpuTransport>(transport_->split(color, order), true);
  }
  std::unique_ptr<Transport> split_by_node() override { return transport_->split_by_node(); }
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) override {
    if (!is_split_) return transport_->allocate_window(num_bytes);
    return std::make_unique<Window>(*transport_, num_bytes);
  }
  void abort(int status) override { transport_->abort(status); }

 private:
  class Window : public SymmetricWindow {
   public:
    Window(Transport& transport, std::size_t num_bytes)
        : memory_(num_bytes, Device::kCuda),
          addresses_(transport.allocate_window(static_cast<std::size_t>(transport.size()) * sizeof(Address))),
          rank_(transport.rank()) {
      for (int peer = 0; peer < transport.size(); ++peer) address(peer, rank_) = memory_.data();
      for (int peer = 0; peer < transport.size(); ++peer) {
        while (address(rank_, peer) == nullptr) std::this_thread::yield();
      }
    }
    std::byte* peer(int rank) const override { return address(rank_, rank); }
    std::size_t num_bytes() const override { return memory_.size(); }

   private:
    using Address = std::atomic<std::byte*>;
    Address& address(int at, int of) const { return reinterpret_cast<Address*>(addresses_->peer(at))[of]; }

    Buffer memory_;
    std::unique_ptr<SymmetricWindow> addresses_;
    int rank_;
  };

  std::unique_ptr<Transport> transport_;
  bool is_split_;
};

}  // namespace tessera::comm_test
