// The base class of transports that wrap another one. By default it passes every call to the wrapped transport, except
// bell(). A wrapper may delay messages, and would have to ring the bell itself.
#pragma once

#include <memory>

#include "comm/transport/transport.h"

namespace tessera {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    return transport_->send(data, num_bytes, to, tag);
  }
  std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) override {
    return transport_->receive(data, num_bytes, from, tag);
  }
  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return transport_->split(color, order, axis);
  }
  std::unique_ptr<Transport> split_by_node() override { return transport_->split_by_node(); }
  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) override {
    return transport_->allocate_window(num_bytes);
  }
  std::optional<WindowRoom> window_room() const override { return transport_->window_room(); }
  void abort(int status) override { transport_->abort(status); }

 protected:
  /// Returns the wrapped transport.
  Transport& transport() const { return *transport_; }

 private:
  std::unique_ptr<Transport> transport_;
};

}  // namespace tessera
