#include "device/cuda_graph.h"

#include <cuda_runtime.h>

#include <utility>

#include "device/cuda_check.h"

namespace tessera::cuda {

Graph::Graph(const Stream& stream, const std::function<void()>& run) {
  cudaGraph_t graph = nullptr;
  TESSERA_CUDA(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
  try {
    run();
  } catch (...) {
    cudaStreamEndCapture(stream.handle(), &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  TESSERA_CUDA(cudaStreamEndCapture(stream.handle(), &graph));
  const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
  const cudaError_t destroyed = cudaGraphDestroy(graph);
  TESSERA_CUDA(status);
  TESSERA_CUDA(destroyed);
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

void Graph::launch(const Stream& stream) const { TESSERA_CUDA(cudaGraphLaunch(executable_, stream.handle())); }

}  // namespace tessera::cuda
