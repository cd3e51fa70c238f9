// Moves bytes from rank to rank. Process groups are built on it. A rank is a process under MPI (mpi_transport.h) or a
// thread of one process (thread_transport.h), so that sanitizers see all ranks at once.
//
// Only split(), split_by_node() and allocate_window() block. All ranks of a transport must call them together. send(),
// receive() and Request::test() throw Error if another rank or the network has failed (over MPI it is RankFailure). A
// message has no timeout. Whoever waits for it has one (comm/progress.h).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "comm/transport/bell.h"

namespace tessera {

/// Reports that another rank has died, or did not take part within the timeout.
class RankFailure : public Error {
 public:
  explicit RankFailure(const std::string& message) : Error(message, ExitStatus::kRankFailed) {}
};

/// Describes a send or receive that was started.
class Request {
 public:
  Request() = default;
  virtual ~Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  /// Returns true once the memory may be used again. Call it until it does.
  virtual bool test() = 0;
};

/// Holds memory of the same size on every rank, into which every rank may store. On GPUs it is an NCCL window.
class SymmetricWindow {
 public:
  SymmetricWindow() = default;
  virtual ~SymmetricWindow() = default;
  SymmetricWindow(const SymmetricWindow&) = delete;
  SymmetricWindow& operator=(const SymmetricWindow&) = delete;

  /// Returns the address of a rank's memory as this rank sees it. It is zeroed at first and aligned to kAlignment
  /// (tensor/arena.h).
  virtual std::byte* peer(int rank) const = 0;
  virtual std::size_t num_bytes() const = 0;
};

/// Describes the room in a folder whose files hold the memory of windows.
struct WindowRoom {
  std::string folder;
  std::size_t size = 0, available = 0;  // bytes
};

class Transport {
 public:
  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Starts to send bytes. Messages from one sender with one tag (0 or more) arrive in the order in which they were
  /// sent. The sizes of send and receive must agree. The memory must not change until the request is done.
  virtual std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) = 0;
  virtual std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) = 0;

  /// Returns the transport of the ranks with the same color, sorted by `order`. `axis` is the group's name
  /// (ProcessGroup::axis).
  virtual std::unique_ptr<Transport> split(int color, int order, std::string_view axis) = 0;
  /// Returns the transport of the ranks of this machine, which can reach each other's memory.
  virtual std::unique_ptr<Transport> split_by_node() = 0;
  /// Allocates a window. Throws Error if the ranks are not on one node, or there is not enough memory.
  virtual std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) = 0;
  /// Returns the room where this node's processes allocate windows, if that is a folder of limited size.
  virtual std::optional<WindowRoom> window_room() const { return std::nullopt; }

  /// Returns a bell that is rung after a message to this rank was sent or one from it was taken, in any group. Null
  /// means that a rank must poll its requests to learn that.
  virtual Bell* bell() const { return nullptr; }

  /// Ends all ranks at once after a failure, because they may wait for this one. `status` is the processes' exit
  /// status.
  virtual void abort(int status) = 0;
};

}  // namespace tessera
