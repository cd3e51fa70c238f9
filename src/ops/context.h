// What every operator is told besides its operands, and the rules that all operators share.
//
// An operator is a function declared in ops/<op>.h (the contract) and implemented in ops/<op>_cpu.cc. It checks its
// operands (TESSERA_CHECK), takes its scratch from the arena, and returns at once when only measuring.
// Write rule: outputs are assigned, gradients of parameters are accumulated (float32); exceptions are named per
// operand. Tensors are contiguous unless the contract says "strided": then consecutive rows may be apart.
#pragma once

#include "base/trace.h"
#include "tensor/arena.h"

namespace tessera {

class GemmLibrary;

struct Context {
  /// Scratch and activations of the step. Its device is where operators run.
  Arena* arena = nullptr;
  /// The GEMM library's compiled kernels (ops/gemm.h).
  GemmLibrary* gemm = nullptr;
  /// Where layers and the costly operators record their times; may be null.
  TraceRecorder* trace = nullptr;

  Device device() const { return arena->device(); }
  /// True when the step is only being measured.
  bool measuring() const { return device() == Device::kMeta; }
};

}  // namespace tessera
