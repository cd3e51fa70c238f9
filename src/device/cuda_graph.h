// A sequence of operators, recorded once and then put on a stream as a whole: the host's part of a step becomes one
// call (CUDA programming guide, "CUDA graphs"). Memory that the operators use must stay where it is.
#pragma once

#include <functional>

#include "device/cuda.h"

struct CUgraphExec_st;

namespace tessera::cuda {

class Graph {
 public:
  Graph() = default;
  /// Records what `run` puts on the stream; none of it runs. `run` must not wait for the GPU, allocate there, or read
  /// what it computes. Throws InternalError if it does.
  Graph(const Stream& stream, const std::function<void()>& run);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  bool defined() const { return executable_ != nullptr; }
  void launch(const Stream& stream) const;

 private:
  CUgraphExec_st* executable_ = nullptr;
};

}  // namespace tessera::cuda
