// Leads from an operator's contract to its implementation for the device that it runs on.
//
//   TESSERA_BACKENDS(convert)          // Declares both implementations with the contract's type.
//   void convert(const Context& op, const Tensor& source, const Tensor& target) {
//     ... checks ...
//     TESSERA_RUN(convert, op, source, target);
//   }
#pragma once

#include <type_traits>

#include "ops/runtime/context.h"

/// Declares cpu::operation and cuda::operation with the type of tessera::operation.
#define TESSERA_BACKENDS(operation)         \
  namespace cpu {                           \
  decltype(::tessera::operation) operation; \
  }                                         \
  namespace cuda {                          \
  decltype(::tessera::operation) operation; \
  }

/// Calls the implementation of the context's target with the context and the operands.
#define TESSERA_RUN(operation, ...) \
  ::tessera::run_backend<&::tessera::cpu::operation, &::tessera::cuda::operation>(#operation, __VA_ARGS__)

namespace tessera {

#ifdef TESSERA_HAS_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

namespace cuda {

/// Records an operator's name and operands, so that the message of a failure can list them (runtime.h). Afterwards,
/// finish() checks that the operator's launches were accepted.
class RunningOperator {
 public:
  template <typename... Operands>
  RunningOperator(const Context& op, const char* name, const Operands&... operands) : op_(op) {
    if (op.measuring()) return;
    begin(name);
    (note(operands), ...);
  }
  void finish() const {
    if (!op_.measuring()) check_launches();
  }

 private:
  void begin(const char* name) const;
  void note(const Tensor& operand) const;
  template <typename Other>
  void note(const Other& operand) const {
    if constexpr (requires { operand.plain; }) {
      note(operand.plain);
      note(operand.rows.elements);
    } else if constexpr (requires { operand.elements; }) {
      note(operand.elements);
    } else if constexpr (requires { operand.q; }) {
      note(operand.q);
    }
  }
  void check_launches() const;

  const Context& op_;
};

}  // namespace cuda

template <auto* kCpu, auto* kCuda, typename... Operands>
auto run_backend(const char* name, const Context& op, const Operands&... operands) {
  if (op.target() == Device::kCuda) {
    TESSERA_CHECK(kHasCuda, "{} in a build without CUDA", name);
    if constexpr (kHasCuda) {
      const cuda::RunningOperator running(op, name, operands...);
      if constexpr (std::is_void_v<decltype(kCuda(op, operands...))>) {
        kCuda(op, operands...);
        return running.finish();
      } else {
        const auto result = kCuda(op, operands...);
        running.finish();
        return result;
      }
    }
  }
  return kCpu(op, operands...);
}

}  // namespace tessera
