// A transport that delays each message by a random time, so that messages arrive in many orders.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "comm/transport/forwarding_transport.h"
#include "tensor/philox.h"

namespace tessera::comm_test {

class DelayedTransport : public ForwardingTransport {
 public:
  DelayedTransport(std::unique_ptr<Transport> transport, std::uint64_t seed, double longest_in_ms = 2.0)
      : ForwardingTransport(std::move(transport)),
        seed_(seed),
        longest_in_ms_(longest_in_ms),
        random_(seed * 1000 + static_cast<std::uint64_t>(rank()), stream_of("test.delay")) {}

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    const std::lock_guard lock(mutex_);  // operations may start while others progress in the background
    const double ms = longest_in_ms_ * (random_.words(num_sends_++)[0] * 0x1p-32);
    auto request = std::make_unique<DelayedSend>();
    request->transport = &transport();
    request->data = data;
    request->num_bytes = num_bytes;
    request->to = to;
    request->tag = tag;
    // A message never leaves before an earlier message with the same receiver and tag.
    auto& last = last_[{to, tag}];
    request->leaves = std::max(last, Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                        std::chrono::duration<double, std::milli>(ms)));
    request->before = std::move(previous_[{to, tag}]);
    request->left = std::make_shared<bool>(false);
    previous_[{to, tag}] = request->left;
    last = request->leaves;
    return request;
  }

  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    return std::make_unique<DelayedTransport>(transport().split(color, order, axis), seed_ + 1, longest_in_ms_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct DelayedSend : Request {
    Transport* transport = nullptr;
    const std::byte* data = nullptr;
    std::size_t num_bytes = 0;
    int to = 0, tag = 0;
    Clock::time_point leaves;
    std::shared_ptr<bool> before, left;
    std::unique_ptr<Request> request;

    bool test() override {
      if (request == nullptr) {
        if (Clock::now() < leaves || (before != nullptr && !*before)) return false;
        request = transport->send(data, num_bytes, to, tag);
        *left = true;
      }
      return request->test();
    }
  };

  std::mutex mutex_;
  std::uint64_t seed_;
  double longest_in_ms_;
  Philox random_;
  std::uint64_t num_sends_ = 0;
  std::map<std::pair<int, int>, Clock::time_point> last_;
  std::map<std::pair<int, int>, std::shared_ptr<bool>> previous_;
};

}  // namespace tessera::comm_test
