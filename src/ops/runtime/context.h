// What every operator gets besides its operands.
#pragma once

#include "system/trace.h"
#include "tensor/arena.h"

namespace tessera {

namespace cuda {
class Runtime;
}
class StepRecord;

struct Context {
  /// Arena for scratch and for the step's activations. Its target decides on which device operators run.
  Arena* arena = nullptr;
  /// The GPU's stream and libraries (ops/runtime/runtime.h). It is null on a CPU, and where a step for a GPU is
  /// measured without a GPU. On a GPU, operators return before their work is done.
  cuda::Runtime* cuda = nullptr;
  /// Recorder to which layers and the costly operators add their times. It may be null.
  TraceRecorder* trace = nullptr;
  /// Record of the operators and transfers of a step (tensor/step_record.h). It may be null.
  StepRecord* record = nullptr;
  /// Says that operators run beside a call of a dispatcher (ops/kit/call_stream.h).
  bool is_beside = false;
  /// Says that no operator writes weights, as in decoding. A GPU may then read them before the operators in front have
  /// ended. Weights are the right operands of products (ops/gemm/gemm.h), and the experts' matrices.
  bool weights_are_constant = false;

  /// Returns the device of the step's tensors: kMeta when measuring.
  Device device() const { return arena->device(); }
  /// Returns the device whose implementations run, even when measuring: kCpu or kCuda.
  Device target() const { return arena->target(); }
  /// Returns true if the step is only being measured.
  bool measuring() const { return device() == Device::kMeta; }
};

}  // namespace tessera
