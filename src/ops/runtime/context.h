// What every operator is told besides its operands, and the rules that all operators share.
//
// An operator is a function declared in ops/<op>.h (the contract). ops/<op>.cc checks its operands (TESSERA_CHECK) and
// calls the implementation of the device (ops/runtime/backends.h): tessera::cpu's in ops/<op>_cpu.cc or tessera::cuda's
// in ops/<op>_cuda.cu. That takes its scratch from the arena, and returns at once when only measuring. Write rule:
// outputs are assigned, gradients of parameters are accumulated (float32); exceptions are named per operand. Tensors
// are contiguous unless the contract says "strided": then consecutive rows may be apart.
#pragma once

#include "system/trace.h"
#include "tensor/arena.h"

namespace tessera {

namespace cuda {
class Runtime;
}

struct Context {
  /// Scratch and activations of the step. Its target is where operators run.
  Arena* arena = nullptr;
  /// The GPU's stream and libraries (ops/runtime/runtime.h), if operators run there. They return before it is done.
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
