// A sequence of operators that is recorded once and then launched as a whole (CUDA programming guide, "CUDA graphs").
// The host's part of a step becomes one call. Memory that the operators use must keep its address.
#pragma once

#include <functional>

#include "device/cuda.h"

struct CUgraphExec_st;

namespace tessera::cuda {

class Graph {
 public:
  Graph() = default;
  /// Records the work that `run` puts on the stream, without running it. `run` must not wait for the GPU, allocate GPU
  /// memory or read what the GPU computes. Throws InternalError if it does.
  Graph(const Stream& stream, const std::function<void()>& run);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  bool defined() const { return executable_ != nullptr; }
  void launch(const Stream& stream) const;

 private:
  CUgraphExec_st* executable_ = nullptr;
};

/// Records a loop into the graph that is being recorded on a stream (CUDA programming guide, "Conditional Graph
/// Nodes"). A kernel before the loop and one at the end of its body say whether the body runs (again):
/// cudaGraphSetConditional(condition(), runs).
class GraphLoop {
 public:
  explicit GraphLoop(const Stream& recording);

  /// Returns the loop's cudaGraphConditionalHandle.
  unsigned long long condition() const { return condition_; }
  /// Records the work that `run` puts on the stream `body`, which must be idle. The loop follows all that is on the
  /// recording stream, and later work there follows the loop.
  void record(const Stream& body, const std::function<void()>& run);

 private:
  CUstream_st* recording_;
  unsigned long long condition_ = 0;
};

}  // namespace tessera::cuda
