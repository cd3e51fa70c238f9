#include "plan/operator_work.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"

namespace tessera {
namespace {

using Operand = RecordedOperator::Operand;

double bytes_of(const Operand& operand) {
  return static_cast<double>(operand.shape.num_elements()) * static_cast<double>(size_of(operand.dtype)) * operand.used;
}
double size(const Operand& operand, int dim) { return static_cast<double>(operand.shape[dim]); }

/// Says whether an operand holds the scales of the one before it, and is no operand of its own.
bool is_scales(const Operand& operand, const Operand& before) {
  return operand.dtype == DType::kFloat8E8M0 ||
         (before.dtype == DType::kFloat8E4M3 && operand.dtype == DType::kFloat32 &&
          operand.shape.num_elements() < before.shape.num_elements());
}

/// Returns the flop of a product: two per element of the output and index of the contraction. Of its operands, the
/// first is contracted along its last dim, or its first dim where both operands have the tokens first (wgrad).
double flop_of_product(const RecordedOperator& call) {
  const Operand& first = call.operands.front();
  const Operand& output = call.operands.back();
  const double outputs = static_cast<double>(output.shape.num_elements());
  if (call.name == "gemm") return 2.0 * outputs * size(first, call.transposes_a ? 0 : 1);
  if (!call.name.ends_with("_wgrad")) return 2.0 * outputs * size(first, 1);
  // The plain gradient is [T, M], and the quantized one [M, T].
  const double tokens = first.dtype == DType::kFloat8E4M3 ? size(first, 1) : size(first, 0);
  const double experts = call.name.starts_with("grouped_") ? size(output, 0) : 1.0;
  return 2.0 * outputs / experts * tokens;
}

/// Returns the part of a product's rows that is used.
double used_rows(const RecordedOperator& call) {
  const auto rows = std::ranges::find_if(call.operands, [](const Operand& operand) { return operand.used != 1.0; });
  return rows == call.operands.end() ? 1.0 : rows->used;
}

/// Returns the flop of the attention core over the causal half of the scores. q is [T, H · (nope + rope)], and the
/// output [T, H · v]. The forward makes 2 products, and the backward 5.
double flop_of_attention(const RecordedOperator& call) {
  const bool is_forward = call.name == "mla_attention_forward";
  const double scores = 0.5 * size(call.operands[0], 0) * static_cast<double>(call.sequence);
  const double qk = size(call.operands[0], 1), v = size(call.operands[4], 1);
  return 2.0 * scores * (is_forward ? qk + v : 3.0 * qk + 2.0 * v);
}

}  // namespace

bool is_product(std::string_view name) {
  return name == "gemm" || name.starts_with("linear_") || name.starts_with("grouped_linear_");
}

bool is_product_or_attention(std::string_view name) { return is_product(name) || name.starts_with("mla_attention"); }

OperatorWork work_of(const RecordedOperator& call) {
  OperatorWork work;
  work.amounts[OperatorWork::kCalls] = 1.0;
  if (call.operands.empty()) return work;
  const bool is_matrix_product = is_product(call.name);
  if (is_matrix_product) work.amounts[OperatorWork::kFlop] = flop_of_product(call) * used_rows(call);
  if (call.name.starts_with("mla_attention")) work.amounts[OperatorWork::kFlop] = flop_of_attention(call);
  std::size_t operand = 0;
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    if (i > 0 && !is_scales(call.operands[i], call.operands[i - 1])) ++operand;
    const std::size_t kind = is_matrix_product && operand < 2 ? OperatorWork::kLeftBytes + operand
                                                              : static_cast<std::size_t>(OperatorWork::kOtherBytes);
    // An embedding reads or adds to the tokens' rows of the table only. They have as many numbers as x, which counts.
    if (call.name.starts_with("embedding_") && i == (call.name.ends_with("_forward") ? 1 : 2)) continue;
    const bool is_read_too = call.accumulates && i + 1 == call.operands.size();
    work.amounts[kind] += (is_read_too ? 2.0 : 1.0) * bytes_of(call.operands[i]);
  }
  return work;
}

double contraction_of(const RecordedOperator& call) {
  if (call.operands.empty() || !is_product(call.name)) return 0.0;
  // Each expert's weight gradient is contracted over its own rows.
  const Operand& output = call.operands.back();
  const double outputs = static_cast<double>(output.shape.num_elements()) * output.used;
  return flop_of_product(call) * used_rows(call) / (2.0 * outputs);
}

std::string class_of(const RecordedOperator& call) {
  std::string result = call.name;
  if (call.name == "gemm") result += fmt::format(" {}{}", call.transposes_a ? 'T' : 'N', call.transposes_b ? 'T' : 'N');
  if (call.accumulates) result += " +=";
  for (const Operand& operand : call.operands) {
    result += ' ';
    result += name_of(operand.dtype);
  }
  return result;
}

}  // namespace tessera
