// Operations between ranks that go on while the rank computes: whoever waits moves all of them on, and so does a thread
// in the background. Another one looks whether other ranks live, and watches calls of other libraries that wait for
// ranks by themselves.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/rank_board.h"

namespace tessera {

/// Another rank has died, or did not come within the timeout.
class RankFailure : public Error {
 public:
  explicit RankFailure(const std::string& message) : Error(message, ExitStatus::kRankFailed) {}
};

/// A started operation.
class Operation {
 public:
  explicit Operation(std::string name) : name_(std::move(name)) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Does what can be done without waiting; true when all is done. Called by one thread at a time.
  virtual bool advance() = 0;
  /// Adds the ranks of the group that it waits for: `senders` of messages that have not come, `receivers` of those that
  /// were not taken. Called as advance().
  virtual void find_missing(std::vector<int>& /*senders*/, std::vector<int>& /*receivers*/) const {}
  const std::string& name() const { return name_; }

  /// For what is told of it: the group's ranks in the world, and its event in the flight recorder (0: none).
  void set_identity(std::shared_ptr<const std::vector<int>> world_ranks, std::uint64_t event) {
    world_ranks_ = std::move(world_ranks);
    event_ = event;
  }

 private:
  friend class Progress;
  std::string name_;
  bool done_ = false;
  std::shared_ptr<const std::vector<int>> world_ranks_;
  std::uint64_t event_ = 0;
};

/// How long a wait has lasted, without the time for which this process was suspended: Ctrl-Z and `scontrol suspend`
/// stop all ranks of a run, and none of them is late then.
class WaitClock {
 public:
  using Clock = std::chrono::steady_clock;

  /// Counts anew.
  void restart() { begin_ = looked_ = Clock::now(); }
  /// To be asked several times a second, since longer gaps do not count.
  Clock::duration elapsed();

 private:
  Clock::time_point begin_ = Clock::now(), looked_ = begin_;
};

class Progress {
 public:
  using Seconds = std::chrono::duration<double>;

  /// `board` may be null: a run of one rank. The timeout is comm.init_timeout_seconds until another one is set.
  Progress(RankBoard* board, Seconds timeout);
  ~Progress();

  /// `key`: of the configuration, for messages.
  void set_timeout(Seconds timeout, std::string key) {
    timeout_ = timeout;
    timeout_key_ = std::move(key);
  }
  Seconds timeout() const { return timeout_; }
  /// Tells of an error and ends this rank where it is. It is called where a RankFailure is found, since what would be
  /// destroyed behind it may wait: for other ranks, for storage that hangs. Another thread calls it when another rank
  /// has died, whatever this one does, and when a Watched call has no end. To be set once, before ranks wait.
  void set_way_out(std::function<void(const std::exception&)> way_out);
  /// Returns if there is none.
  void take_way_out(const std::exception& error) const {
    if (way_out_) way_out_(error);
  }
  /// Throws the RankFailure of a wait that did not end within the timeout, which someone else found out.
  [[noreturn]] void fail_late(const std::string& name, const std::string& missing) const;
  /// Moves it on as far as it goes; the rest happens behind.
  void start(std::shared_ptr<Operation> operation);
  /// Waits until the operation is done. Throws RankFailure, or what the operation threw.
  void wait(Operation& operation);
  bool done(Operation& operation);
  /// Gives up an operation after a failure, because its memory is about to be freed. The operation gets some time to
  /// end, and is not advanced any more.
  void abandon(const std::shared_ptr<Operation>& operation) noexcept;
  /// Until over() is true, for what other ranks store into a window; moves started operations on meanwhile. `name`:
  /// what is waited for, `missing()`: what of it is not there; both for the RankFailure that is thrown as above. With
  /// `position()`, for many operations at once, the timeout is of the time since its value has changed. `event`: of the
  /// flight recorder.
  void wait_until(const std::string& name, const std::function<bool()>& over,
                  const std::function<std::string()>& missing, const std::function<std::uint64_t()>& position = {},
                  std::uint64_t event = 0);

  /// Records the operations between this rank and others.
  FlightRecorder& recorder() { return board_ == nullptr ? no_recorder_ : board_->recorder(); }

  /// While it lives, the calling thread is in a call of another library that waits for other ranks and cannot be told
  /// to return: NCCL and MPI connect ranks so. If a rank has died or the call does not end within the timeout, the way
  /// out is called, with what wait() would throw. One at a time.
  class Watched {
   public:
    Watched(Progress& progress, std::string name);
    ~Watched();
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

   private:
    Progress& progress_;
  };

 private:
  struct Call {
    std::string name;
    WaitClock clock = {};
    bool is_on_board = false;  // the others are told once it takes long
  };

  // Under the lock.
  void advance_all();
  void advance(Operation& operation);
  std::string describe_missing(const Operation& operation);
  void run_in_background();
  /// Calls poll() until it returns true.
  void keep_polling(const std::string& name, std::uint64_t event, const std::function<bool()>& poll,
                    const std::function<std::string()>& missing, const std::function<std::uint64_t()>& position);
  /// Why a wait that has lasted so long must end; none if it need not yet.
  std::optional<RankFailure> failure_of_wait(const std::string& name, WaitClock::Clock::duration elapsed,
                                             const std::string& missing) const;
  RankFailure late(const std::string& name, const std::string& missing) const;
  RankFailure failure(const std::string& name, const std::string& reason, const std::string& missing) const;
  /// Under the lock.
  void start_watching();
  void watch();
  /// Why the watched call, if there is one, must end.
  std::optional<RankFailure> failure_of_call();

  RankBoard* board_;
  FlightRecorder no_recorder_;
  Seconds timeout_;
  std::string timeout_key_ = "comm.init_timeout_seconds";
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::shared_ptr<Operation>> pending_;
  std::exception_ptr error_;
  bool ending_ = false;
  std::thread background_;  // started with the first operation that has to wait

  std::function<void(const std::exception&)> way_out_;
  std::mutex watch_mutex_;  // of what follows
  std::condition_variable watch_ends_;
  std::optional<Call> watched_;
  std::thread watcher_;  // started with the way out, or with the first call
};

}  // namespace tessera
