// How bytes get from rank to rank: what process groups are built on. A rank is a process under MPI (mpi_transport.h),
// or a thread of one process (thread_transport.h), which is how sanitizers see all ranks at once.
//
// Nothing here blocks but split() and allocate_window(), which all ranks of a transport must call together.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace tessera {

/// A send or receive that was started.
class Request {
 public:
  Request() = default;
  virtual ~Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  /// True once the memory may be used again. Call it until it is.
  virtual bool test() = 0;
};

/// Memory of the same size on every rank, into which every rank may store (on GPUs: an NCCL window).
class SymmetricWindow {
 public:
  SymmetricWindow() = default;
  virtual ~SymmetricWindow() = default;
  SymmetricWindow(const SymmetricWindow&) = delete;
  SymmetricWindow& operator=(const SymmetricWindow&) = delete;

  /// A rank's memory, as this rank sees it. Zeroed at first, aligned to kAlignment (tensor/arena.h).
  virtual std::byte* peer(int rank) const = 0;
  virtual std::size_t num_bytes() const = 0;
};

/// A folder whose files are the memory of windows.
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

  /// Messages of one sender with one tag (0 or more) arrive in the order in which they were sent; sizes must agree.
  virtual std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) = 0;
  virtual std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) = 0;

  /// The ranks that gave the same color, in the order of `order`.
  virtual std::unique_ptr<Transport> split(int color, int order) = 0;
  /// The ranks that can reach each other's memory: those of one machine.
  virtual std::unique_ptr<Transport> split_by_node() = 0;
  /// Throws Error if the ranks are not of one node, or there is not that much memory.
  virtual std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) = 0;
  /// Where windows of this node's processes are, if that is a folder with a size of its own.
  virtual std::optional<WindowRoom> window_room() const { return std::nullopt; }

  /// Ends all ranks at once, after a failure: for those that wait for this one. `status`: the processes' exit status.
  virtual void abort(int status) = 0;
};

}  // namespace tessera
