// What every operator gets besides its operands, and the rules that all operators share.
#pragma once

#include "system/trace.h"
#include "tensor/arena.h"

namespace tessera {

namespace cuda {
class Runtime;
}

struct Context {
  /// Arena for scratch and for the step's activations. Its target decides where operators run.
  Arena* arena = nullptr;
  /// The GPU's stream and libraries (ops/runtime/runtime.h); null on a CPU. Operators on a GPU return before their work
  /// is done.
  cuda::Runtime* cuda = nullptr;
  /// Where layers and the costly operators record their times; may be null.
  TraceRecorder* trace = nullptr;

  /// Where the step's tensors are: kMeta when measuring.
  Device device() const { return arena->device(); }
  /// Whose implementation runs, also when measuring: kCpu or kCuda.
  Device target() const { return arena->target(); }
  /// True when the step is only being measured.
  bool measuring() const { return device() == Device::kMeta; }
};

}  // namespace tessera
