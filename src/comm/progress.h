// Runs operations between ranks while the rank computes. Any thread that waits advances all of them, and so does a
// background thread. A second thread checks that the other ranks live, and watches calls of other libraries that wait
// for ranks.
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
#include "comm/transport/bell.h"

namespace tessera {

/// Describes an operation that was started.
class Operation {
 public:
  explicit Operation(std::string name) : name_(std::move(name)) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Does what it can without waiting. Returns true when the operation is complete. One thread at a time calls it.
  virtual bool advance() = 0;
  /// Adds the ranks of the group that the operation waits for. `senders` are those whose messages have not arrived,
  /// `receivers` those that have not taken a message. One thread at a time calls it.
  virtual void find_missing(std::vector<int>& /*senders*/, std::vector<int>& /*receivers*/) const {}
  const std::string& name() const { return name_; }

  /// Sets what messages and the flight recorder need: the group's ranks in the world, and the recorder's event. 0 means
  /// that there is no event.
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

/// Measures how long a wait has lasted, without time in which this process was suspended. Ctrl-Z and `scontrol suspend`
/// stop all ranks of a run, and none of them counts as late then.
class WaitClock {
 public:
  using Clock = std::chrono::steady_clock;

  /// Restarts the clock.
  void restart() { begin_ = looked_ = Clock::now(); }
  /// Returns how long the wait has lasted. Call it several times a second, because a longer gap between calls does not
  /// count.
  Clock::duration elapsed();

 private:
  Clock::time_point begin_ = Clock::now(), looked_ = begin_;
};

class Progress {
 public:
  using Seconds = std::chrono::duration<double>;

  /// `board` may be null in a run of one rank. The timeout is comm.init_timeout_seconds until another one is set.
  /// `bell` is that of the transport of all operations (Transport::bell), and must outlive this. Without one, threads
  /// poll.
  Progress(RankBoard* board, Seconds timeout, Bell* bell = nullptr);
  ~Progress();

  /// Sets the timeout of waits. `key` is its key in the configuration, for messages.
  void set_timeout(Seconds timeout, std::string key) {
    timeout_ = timeout;
    timeout_key_ = std::move(key);
  }
  Seconds timeout() const { return timeout_; }
  /// Sets the failure handler: a function that reports an error and ends this rank at once. A thread calls it where it
  /// finds a RankFailure, because destroying objects first might wait for other ranks or for storage that hangs. The
  /// watching thread calls it when another rank has died, whatever this rank does, and when a Watched call does not
  /// end. Set it once, before ranks wait.
  void set_failure_handler(std::function<void(const std::exception&)> failure_handler);
  /// Calls the failure handler. Returns if none is set.
  void call_failure_handler(const std::exception& error) const {
    if (failure_handler_) failure_handler_(error);
  }
  /// Throws the RankFailure of a wait that the caller has found not to end within the timeout.
  [[noreturn]] void fail_late(const std::string& name, const std::string& missing) const;
  /// Advances the operation as far as possible. The rest happens in the background.
  void start(std::shared_ptr<Operation> operation);
  /// Waits until the operation is done. Throws RankFailure, or what the operation threw.
  void wait(Operation& operation);
  bool done(Operation& operation);
  /// Gives up an operation after a failure, because its memory is about to be freed. The operation gets some time to
  /// end. After that it is not advanced any more.
  void abandon(const std::shared_ptr<Operation>& operation) noexcept;
  /// Waits until over() is true, which other ranks' stores into a window cause, and advances started operations
  /// meanwhile. `name` says what is waited for, and `missing()` what has not arrived. Both are for the message of the
  /// RankFailure that it throws as wait() does. With `position()`, for a wait on many operations, the timeout counts
  /// from the last change of its value. `event` is the wait's event in the flight recorder.
  void wait_until(const std::string& name, const std::function<bool()>& over,
                  const std::function<std::string()>& missing, const std::function<std::uint64_t()>& position = {},
                  std::uint64_t event = 0);

  /// Returns the recorder of the operations between this rank and others.
  FlightRecorder& recorder() { return board_ == nullptr ? no_recorder_ : board_->recorder(); }

  /// Marks a call of another library that waits for other ranks and cannot be interrupted. NCCL and MPI connect ranks
  /// so. The watching thread calls the failure handler if a rank has died or the call does not end within the timeout.
  /// It passes the error that wait() would throw. Only one can exist at a time.
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
    bool is_on_board = false;  // the board shows the call once it takes long
  };

  struct Waiting;

  // The caller of the next three functions must hold mutex_.
  void advance_all();
  void advance(Operation& operation);
  std::string describe_missing(const Operation& operation);
  void run_in_background();
  /// Calls poll() until it returns true, with a pause() before each further call. The pause's argument is the time
  /// since the begin.
  void keep_polling(const std::string& name, std::uint64_t event, const std::function<bool()>& poll,
                    const std::function<void(WaitClock::Clock::duration)>& pause,
                    const std::function<std::string()>& missing, const std::function<std::uint64_t()>& position);
  /// Returns how long a wait goes on before it checks its timeout and the other ranks again.
  WaitClock::Clock::duration between_checks() const;
  /// Yields the core, or sleeps, by how long a wait has lasted.
  void pause_between_polls(WaitClock::Clock::duration waited) const;
  /// Returns why a wait that has lasted this long must end, or nullopt if it may go on.
  std::optional<RankFailure> failure_of_wait(const std::string& name, WaitClock::Clock::duration elapsed,
                                             const std::string& missing) const;
  RankFailure late(const std::string& name, const std::string& missing) const;
  RankFailure failure(const std::string& name, const std::string& reason, const std::string& missing) const;
  /// The caller must hold watch_.mutex.
  void start_watching();
  void watch();
  /// Returns why the watched call must end, or nullopt if it may go on or there is none.
  std::optional<RankFailure> failure_of_call();

  RankBoard* board_;
  Bell* bell_;  // null: none
  FlightRecorder no_recorder_;
  Seconds timeout_;
  std::string timeout_key_ = "comm.init_timeout_seconds";
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::shared_ptr<Operation>> pending_;
  std::exception_ptr error_;
  bool ending_ = false;
  int num_waiting_ = 0;     // threads that wait for the bell in wait(), and advance all operations meanwhile
  std::thread background_;  // started with the first operation that has to wait

  std::function<void(const std::exception&)> failure_handler_;
  struct Watch {
    std::mutex mutex;  // protects failure_handler_, and the members below
    std::condition_variable changes;
    std::optional<Call> call;
    bool is_idle = false;  // the thread waits until there is something to watch
    std::thread thread;    // started with the failure handler, or with the first watched call
  };
  Watch watch_;
};

}  // namespace tessera
