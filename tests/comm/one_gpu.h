// A transport for ranks that are threads and share one GPU.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "comm/transport/forwarding_transport.h"
#include "tensor/arena.h"

namespace tessera::comm_test {

/// Puts the windows of groups that are split from it into the memory of the one GPU that all ranks use.
class OneGpuTransport : public ForwardingTransport {
 public:
  explicit OneGpuTransport(std::unique_ptr<Transport> transport, bool is_split = false)
      : ForwardingTransport(std::move(transport)), is_split_(is_split) {}

  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return std::make_unique<OneGpuTransport>(transport().split(color, order, axis), true);
  }
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) override {
    if (!is_split_) return transport().allocate_window(num_bytes);
    return std::make_unique<Window>(transport(), num_bytes);
  }

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

  bool is_split_;
};

}  // namespace tessera::comm_test
