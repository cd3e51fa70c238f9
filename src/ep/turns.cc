#include "ep/turns.h"

#include <utility>

#include "base/error.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Ends a pass because the other one has failed.
struct OtherFailed : std::exception {
  const char* what() const noexcept override { return "the pass beside this one has failed"; }
};

}  // namespace

Turns::~Turns() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Turns::run(const Body& first, const Body& second, Hooks hooks) {
  TESSERA_CHECK(!is_active_);
  const Body on_as_many_threads = [&second, count = num_threads()] {
    set_num_threads(count);
    second();
  };
  passes_ = {};
  hooks_ = std::move(hooks);
  error_ = nullptr;
  is_active_ = true;
  {
    const std::lock_guard lock(mutex_);
    second_ = &on_as_many_threads;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  run_pass(first);
  if (other().state != State::kEnded) switch_over();
  is_active_ = false;
  if (error_) std::rethrow_exception(error_);
}

void Turns::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ends_ || (running_ == 1 && second_ != nullptr); });
    if (ends_) return;
    const Body& second = *std::exchange(second_, nullptr);
    lock.unlock();
    run_pass(second);
    lock.lock();
    running_ = 0;
    changed_.notify_all();
  }
}

void Turns::run_pass(const Body& body) {
  try {
    if (!error_) body();
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
  own() = {.state = State::kEnded};
}

void Turns::switch_over() {
  std::unique_lock lock(mutex_);
  const int pass = running_;
  running_ = 1 - pass;
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == pass; });
}

void Turns::pause() noexcept {
  const int pass = running_;
  const auto call = [&](const std::function<void(int)>& hook) {
    try {
      if (hook) hook(pass);
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  };
  call(hooks_.pause);
  switch_over();
  call(hooks_.resume);
}

void Turns::let_other_run() {
  pause();
  if (error_) throw OtherFailed();
}

void Turns::enter() {
  if (!is_active_) return;
  if (other().num_calls > 0) {
    TESSERA_CHECK(own().num_calls == 0);
    own().state = State::kAtCall;
    let_other_run();
    own().state = State::kReady;
  }
  if (error_) throw OtherFailed();
  ++own().num_calls;
}

void Turns::leave(bool succeeds) {
  if (!is_active_) return;
  if (--own().num_calls > 0) return;
  if (succeeds && other().state == State::kAtCall) pause();
}

void Turns::give_way() {
  if (!is_active_) return;
  TESSERA_CHECK(own().num_calls > 0);
  if (other().state == State::kReady) let_other_run();
}

void Turns::wait_for_other() {
  if (!is_active_) return;
  own().state = State::kWaitsForEnd;
  while (other().state != State::kEnded) let_other_run();
  own().state = State::kReady;
}

}  // namespace tessera
