// Declares an operator's implementations for CPUs and GPUs, and calls the one for the device that it runs on.
//
//   TESSERA_BACKENDS(convert)          // Declares both implementations with the contract's type.
//   void convert(const Context& op, const Tensor& source, const Tensor& target) {
//     ... checks ...
//     TESSERA_RUN(convert, op, source, target);
//   }
#pragma once

#include <array>
#include <optional>
#include <type_traits>

#include "ops/runtime/context.h"
#include "ops/runtime/kernel_profile.h"
#include "tensor/step_record.h"

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

// Libraries with sources for GPUs are compiled with this definition.
#ifdef TESSERA_HAS_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

/// Calls see(tensor) for every tensor of an operand: a tensor, a pair or struct of tensors, or an option without any.
template <typename Operand, typename See>
void for_each_tensor(const Operand& x, const See& see) {
  const auto all = [&](const auto&... parts) { (for_each_tensor(parts, see), ...); };
  if constexpr (std::is_same_v<Operand, Tensor>) {
    if (x.defined()) see(x);
  } else if constexpr (requires { x.plain; }) {
    all(x.plain, x.rows, x.columns);
  } else if constexpr (requires { x.elements; }) {
    all(x.elements, x.scales);
  } else if constexpr (requires { x.wide_rows; }) {
    all(x.rows, x.columns, x.wide_rows, x.wide_columns);
  } else if constexpr (requires { x.k_rope; }) {
    all(x.q, x.kv, x.k_rope, x.doc_start_T);
  } else if constexpr (std::is_same_v<Operand, std::array<Tensor, 2>>) {
    all(x[0], x[1]);
  } else if constexpr (requires { x.kv_a; }) {
    all(x.kv_a, x.norm_weight_C, x.q, x.wkv_b, x.q_latent, x.cos_PM, x.sin_PM);
  } else if constexpr (requires { x.cache_SPN; }) {
    all(x.q, x.q_latent, x.wkv_b, x.cache_SPN, x.slot_T, x.position_T);
  } else if constexpr (requires { x.w13_E2FD; }) {
    all(x.w13_E2FD, x.w2_EDF, x.shared_w13_2ID, x.shared_w2_DI, x.expert_ids_TK, x.weights_TK, x.counts_E);
  } else if constexpr (requires { x.scores_TE; }) {
    all(x.scores_TE, x.expert_ids_TK, x.weights_TK, x.counts_E, x.balance_f_BE);
  }
}

/// Records a call in the context's StepRecord, if there is one, from its construction to its destruction.
class RecordedCall {
 public:
  template <typename... Operands>
  RecordedCall(const Context& op, const char* name, const Operands&... operands)
      : record_(op.record), is_timed_(!op.measuring() && op.target() == Device::kCpu) {
    if (record_ == nullptr) return;
    RecordedOperator* call = record_->begin(name);
    if (call == nullptr) return;
    call->is_beside = op.is_beside;
    (note(operands, *call), ...);
    if (!op.measuring() && op.target() == Device::kCuda) {
      profiled_.emplace(static_cast<std::int64_t>(record_->operators().size()) - 1);
    }
  }
  ~RecordedCall() {
    if (record_ != nullptr) record_->end(is_timed_);
  }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

 private:
  template <typename Operand>
  void note(const Operand& x, RecordedOperator& call) const {
    if constexpr (std::is_same_v<Operand, Write>) {
      call.accumulates |= x == Write::kAccumulate;
    } else if constexpr (std::is_same_v<Operand, bool>) {
      // A product's flag comes after its operand: transpose_a after the first tensor, transpose_b after the second.
      (call.operands.size() == 1 ? call.transposes_a : call.transposes_b) = x;
    } else if constexpr (requires { x.queries_per_seq(); }) {
      call.sequence = x.seq_len;
    } else {
      for_each_tensor(x, [&](const Tensor& tensor) { record_->add_operand(call, tensor); });
    }
  }

  StepRecord* record_;
  bool is_timed_;
  std::optional<cuda::ProfiledRegion> profiled_;
};

namespace cuda {

/// Records an operator's name and operands, so that the message of a failure can list them (runtime.h). Afterwards,
/// finish() checks that the operator's launches were accepted.
class RunningOperator {
 public:
  template <typename... Operands>
  RunningOperator(const Context& op, const char* name, const Operands&... operands) : op_(op) {
    if (op.measuring()) return;
    begin(name);
    (for_each_tensor(operands, [this](const Tensor& tensor) { note(tensor); }), ...);
  }
  void finish() const {
    if (!op_.measuring()) check_launches();
  }

 private:
  void begin(const char* name) const;
  void note(const Tensor& operand) const;
  void check_launches() const;

  const Context& op_;
};

}  // namespace cuda

template <auto* kCpu, auto* kCuda, typename... Operands>
auto run_backend(const char* name, const Context& op, const Operands&... operands) {
  const RecordedCall recorded(op, name, operands...);
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
