// Records the operators of a step, in the order in which the host starts them: their names, and the shapes and types of
// their operands. A dry run gives the same record as a run, so what a step will cost can be reckoned before it runs
// (docs/planner.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

/// Describes one call of an operator.
struct RecordedOperator {
  /// Describes an operand. A quantized operand counts as two: its elements and its scales.
  struct Operand {
    Shape shape;
    DType dtype;
    bool operator==(const Operand&) const = default;
  };
  std::string name;               // "gemm"
  std::vector<Operand> operands;  // in the order of the operator's parameters; undefined ones are left out
  bool accumulates = false;       // adds to its output
  bool transposes_a = false;      // of gemm: the left operand is [K, M]
  bool transposes_b = false;      // of gemm: the right operand is [N, K]
  std::int64_t sequence = 0;      // of attention: the tokens of a sequence; otherwise 0
  std::string pass;               // the pass that it belongs to: OperatorRecord::set_pass
  double seconds = 0.0;           // its duration on a CPU; 0 in a dry run and on GPUs

  /// Compares all but the duration.
  bool is_same_call(const RecordedOperator& other) const {
    return name == other.name && operands == other.operands && accumulates == other.accumulates &&
           transposes_a == other.transposes_a && transposes_b == other.transposes_b && sequence == other.sequence &&
           pass == other.pass;
  }
};

class OperatorRecord {
 public:
  const std::vector<RecordedOperator>& operators() const { return operators_; }
  void clear() { operators_.clear(); }

  /// Names the pass of the operators that follow: "stage 0 forward".
  void set_pass(std::string pass) { pass_ = std::move(pass); }

  /// Begins an operator. Returns null inside another operator, whose own calls are not recorded.
  RecordedOperator* begin(const char* name);
  /// Ends the operator that the last begin() started.
  void end(bool is_timed);

 private:
  std::vector<RecordedOperator> operators_;
  std::string pass_;
  int depth_ = 0;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace tessera
