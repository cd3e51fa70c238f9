#include "device/cuda_graph.h"

#include <cuda_runtime.h>

#include <utility>

#include "device/cuda_check.h"

#if CUDART_VERSION < 13000  // CUDA 13 has these functions under their plain names
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#define cudaGraphAddNode cudaGraphAddNode_v2
#define cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_v2
#endif

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

namespace {
/// The graph that a stream is recording, and the nodes that its next node follows.
struct Recording {
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* last = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t num_last = 0;

  explicit Recording(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    TESSERA_CUDA(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &last, &edges, &num_last));
    TESSERA_CHECK(status == cudaStreamCaptureStatusActive, "no graph is being recorded");
  }
};

}  // namespace

GraphLoop::GraphLoop(const Stream& recording) : recording_(recording.handle()) {
  TESSERA_CUDA(cudaGraphConditionalHandleCreate(&condition_, Recording(recording_).graph));
}

void GraphLoop::record(const Stream& body, const std::function<void()>& run) {
  cudaGraphNodeParams parameters = {};
  parameters.type = cudaGraphNodeTypeConditional;
  parameters.conditional.handle = condition_;
  parameters.conditional.type = cudaGraphCondTypeWhile;
  parameters.conditional.size = 1;
  const Recording before(recording_);
  cudaGraphNode_t loop = nullptr;
  TESSERA_CUDA(cudaGraphAddNode(&loop, before.graph, before.last, before.edges, before.num_last, &parameters));
  TESSERA_CUDA(cudaStreamBeginCaptureToGraph(body.handle(), parameters.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                             cudaStreamCaptureModeThreadLocal));
  cudaGraph_t recorded = nullptr;  // belongs to the loop's node
  try {
    run();
  } catch (...) {
    cudaStreamEndCapture(body.handle(), &recorded);
    throw;
  }
  TESSERA_CUDA(cudaStreamEndCapture(body.handle(), &recorded));
  TESSERA_CUDA(cudaStreamUpdateCaptureDependencies(recording_, &loop, nullptr, 1, cudaStreamSetCaptureDependencies));
}

void Graph::launch(const Stream& stream) const { TESSERA_CUDA(cudaGraphLaunch(executable_, stream.handle())); }

}  // namespace tessera::cuda
