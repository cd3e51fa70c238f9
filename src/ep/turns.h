// Lets two passes of one rank run in turns, so that one computes while the other's tokens are on their way (DualPipe,
// arXiv 2412.19437, sec. 3.2.1). Each pass has a thread, and only one of them runs at a time.
//
// A pass makes calls of a dispatcher (ep/dispatcher.h). When a call has sent its tokens, it gives way: it pauses and
// lets the other pass run. That pass runs until it is about to make a call itself. Now the first pass runs again, and
// ends its call. Then the other pass begins its own call, which gives way to the first pass in turn. So calls do not
// overlap each other, and the passes compute between their calls by turns:
//
//   first    [compute] call ......... end [compute]           call ....
//   second                  [compute]               call ...       end [compute]
//
// The order depends only on the passes' calls, not on time. So all ranks whose passes make the same calls have the same
// order, also of other collectives. Calls that some of these ranks may make alone, those of later rounds, belong to the
// last call of the first round: they are made before it ends, and do not give way.
//
// On a GPU the threads only put work on streams. What the passes compute is on one stream, in the order of their turns.
// Calls and what a pass itself runs beside them are on others (ops/kit/call_stream.h), beside the other pass's work.
#pragma once

#include <array>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera {

class Turns {
 public:
  using Body = std::function<void()>;
  /// Functions that a pass calls before it lets the other one run, and when it goes on. `pass` is 0 or 1.
  struct Hooks {
    std::function<void(int pass)> pause, resume;
  };

  Turns() = default;
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  /// Runs both passes to their ends. `first` begins, on the calling thread. If one throws, or a hook does, the other
  /// throws at its next turn, and the first exception is rethrown when both have ended.
  void run(const Body& first, const Body& second, Hooks hooks = {});

  // The running pass calls the functions below. They do nothing outside run().

  /// Marks a call of the dispatcher while it exists. `turns` may be null. The constructor waits until the other pass's
  /// call has ended. A call within a call belongs to that one.
  class Call {
   public:
    explicit Call(Turns* turns) : turns_(turns) {
      if (turns_ != nullptr) turns_->enter();
    }
    ~Call() {
      if (turns_ != nullptr) turns_->leave(num_exceptions_ == std::uncaught_exceptions());
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Turns* turns_;
    int num_exceptions_ = std::uncaught_exceptions();
  };

  /// Returns whether the running pass is in a call. It is true outside run().
  bool in_call() const { return !is_active_ || passes_[static_cast<std::size_t>(running_)].num_calls > 0; }
  /// Lets the other pass run until it is to make a call, or ends. Must be called within a call.
  void give_way();
  /// Lets the other pass run to its end. Only one of the two passes may call it.
  void wait_for_other();

 private:
  enum class State { kReady, kAtCall, kWaitsForEnd, kEnded };
  struct Pass {
    State state = State::kReady;
    int num_calls = 0;  // those that it is in
  };

  // Only the running pass calls the functions below.
  Pass& own() { return passes_[static_cast<std::size_t>(running_)]; }
  Pass& other() { return passes_[static_cast<std::size_t>(1 - running_)]; }
  void enter();
  /// `succeeds` is false if the call ends by an exception.
  void leave(bool succeeds);
  /// Lets the other pass run, and returns when this one is to go on.
  void switch_over();
  /// Does the same, and calls the hooks before and after it. Keeps a hook's exception as the failure of the passes,
  /// because a call that ends may not throw.
  void pause() noexcept;
  /// Pauses, and throws if the other pass has failed.
  void let_other_run();
  /// Runs a pass to its end, unless the other one has failed.
  void run_pass(const Body& body);
  /// Runs the second passes of all run().
  void serve();

  // The running pass owns these members.
  bool is_active_ = false;
  std::array<Pass, 2> passes_;
  Hooks hooks_;
  std::exception_ptr error_;  // of the pass that failed first
  // The mutex guards the members below. Only the running pass changes running_.
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
  const Body* second_ = nullptr;  // what thread_ is to run
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tessera
