// Messages between ranks that are under way together, as parts of one operation.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/progress.h"
#include "comm/transport/transport.h"

namespace tessera {

class Messages {
 public:
  explicit Messages(Transport& transport) : transport_(&transport) {}

  void send(const std::byte* data, std::size_t num_bytes, int to, int tag) {
    under_way_.push_back({transport_->send(data, num_bytes, to, tag), to, true});
  }
  void receive(std::byte* data, std::size_t num_bytes, int from, int tag) {
    under_way_.push_back({transport_->receive(data, num_bytes, from, tag), from, false});
  }
  /// Sends the same bytes to all other ranks.
  void send_to_others(const std::byte* data, std::size_t num_bytes, int tag) {
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peer != transport_->rank() && num_bytes > 0) send(data, num_bytes, peer, tag);
    }
  }
  /// Returns whether all messages have arrived.
  bool test() {
    std::erase_if(under_way_, [](const Message& message) { return message.request->test(); });
    return under_way_.empty();
  }
  /// Adds the peers whose messages have not arrived to `senders`, and those that have not taken one to `receivers`.
  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const {
    for (const Message& message : under_way_) (message.is_sent ? receivers : senders).push_back(message.peer);
  }

 private:
  struct Message {
    std::unique_ptr<Request> request;
    int peer;
    bool is_sent;
  };
  Transport* transport_;
  std::vector<Message> under_way_;
};

/// An operation that consists of messages only.
class Exchange : public Operation {
 public:
  Exchange(std::string name, Transport& transport) : Operation(std::move(name)), messages(transport) {}
  Messages messages;
  bool advance() override { return messages.test(); }
  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const override {
    messages.find_missing(senders, receivers);
  }
};

}  // namespace tessera
