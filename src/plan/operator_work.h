// What an operator's duration depends on: the multiplications and additions that it makes, and the bytes of its
// operands.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "tensor/step_record.h"

namespace tessera {

/// Holds the amounts of work of one call. The operands that bytes are counted of are those of RecordedOperator, in
/// their order. For products they are the left operand, the right one, and the rest with the output.
struct OperatorWork {
  static constexpr std::size_t kKinds = 5;
  enum Kind : std::size_t { kCalls, kFlop, kLeftBytes, kRightBytes, kOtherBytes };
  static constexpr std::array<const char*, kKinds> kNames = {"call", "flop", "left_byte", "right_byte", "other_byte"};

  std::array<double, kKinds> amounts{};

  double operator[](std::size_t kind) const { return amounts[kind]; }
  double bytes() const { return amounts[kLeftBytes] + amounts[kRightBytes] + amounts[kOtherBytes]; }
};

/// Returns the work of a call. An operator that is no product, and no attention, has no flop: its bytes decide. An
/// output that is added to counts twice, because it is also read.
OperatorWork work_of(const RecordedOperator& call);

/// Returns whether an operator of that name is a product of matrices.
bool is_product(std::string_view name);

/// Returns whether an operator of that name is a product of matrices or attention. All others are bound by memory.
bool is_product_or_attention(std::string_view name);

/// Returns whether a transfer is a dispatcher's call.
inline bool is_dispatch(const RecordedTransfer& transfer) { return transfer.choices.num_experts > 0; }

/// Returns the length of a product's contraction, or 0 of another operator. The length for a grouped weight gradient is
/// the mean over the experts.
double contraction_of(const RecordedOperator& call);

/// Returns the class of a call, within which durations depend on the work alone: the operator and its operands' types,
/// "linear_wgrad += bfloat16 bfloat16 float32".
std::string class_of(const RecordedOperator& call);

}  // namespace tessera
