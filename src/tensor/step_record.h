// Records what a step does, in the order in which the host starts it: the operators, with the shapes and types of their
// operands, and the transfers between ranks. A dry run gives the same record as a run, so what a step will cost can be
// reckoned before it runs (docs/planner.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

/// Describes one call of an operator.
struct RecordedOperator {
  /// Describes an operand. A quantized operand counts as two: its elements and its scales.
  struct Operand {
    Shape shape;
    DType dtype;
    /// The part of the numbers that a balanced load uses. Rows of experts have room for other loads: StepRecord::Rows.
    double used = 1.0;
    bool has_expert_rows = false;
    bool operator==(const Operand&) const = default;
  };
  std::string name;               // "gemm"
  std::vector<Operand> operands;  // in the order of the operator's parameters; undefined ones are left out
  bool accumulates = false;       // adds to its output
  bool transposes_a = false;      // of gemm: the left operand is [K, M]
  bool transposes_b = false;      // of gemm: the right operand is [N, K]
  std::int64_t sequence = 0;      // of attention: the tokens of a sequence; otherwise 0
  bool is_beside = false;         // runs beside the transfer that follows it
  std::string pass;               // the pass that it belongs to: StepRecord::set_pass
  std::string layer = {};         // of operands with rows of experts: their MoE layer
  double seconds = 0.0;           // its duration; 0 in a dry run, and on a GPU without a profile

  /// Compares all but the layer and the duration.
  bool is_same_call(const RecordedOperator& other) const {
    return name == other.name && operands == other.operands && accumulates == other.accumulates &&
           transposes_a == other.transposes_a && transposes_b == other.transposes_b && sequence == other.sequence &&
           is_beside == other.is_beside && pass == other.pass;
  }
};

/// Describes one transfer between the ranks of a group.
struct RecordedTransfer {
  /// The operation's name in ProcessGroup ("all_gather"), or the call's in Dispatcher ("combine"). A
  /// reduce_scatter_as_bfloat16 is an all_to_all: that is how its numbers move.
  std::string kind;
  std::string axis;   // of the group: ProcessGroup::axis
  int num_ranks = 1;  // of the group
  /// The bytes of all ranks' parts together: of the gathered tensor, of the tensor whose sum is scattered, of what a
  /// rank sends in an all-to-all or a message. A dispatcher's call has the bytes of a row per token of this rank.
  double bytes = 0.0;
  /// Of a dispatcher's call. The number of ranks that get a token's row depends on them.
  struct Choices {
    std::int64_t num_experts = 0, top_k = 0;
    bool operator==(const Choices&) const = default;
  } choices;
  std::string layer = {};  // of a dispatcher's call: the MoE layer
  std::string pass;
  /// The numbers of operators that were recorded when the transfer began, and when the step waited for its end. Those
  /// in between run beside it.
  std::size_t begin = 0, end = 0;

  bool operator==(const RecordedTransfer&) const = default;
};

class StepRecord {
 public:
  const std::vector<RecordedOperator>& operators() const { return operators_; }
  const std::vector<RecordedTransfer>& transfers() const { return transfers_; }

  /// Names the pass of what follows: "stage 0 forward".
  void set_pass(std::string pass) { pass_ = std::move(pass); }

  /// Begins an operator. Returns null inside another operator, whose own calls are not recorded.
  RecordedOperator* begin(const char* name);
  /// Ends the operator that the last begin() started.
  void end(bool is_timed);
  /// Adds to the duration of the operator at that index.
  void add_seconds(std::size_t idx, double seconds) { operators_.at(idx).seconds += seconds; }
  /// Adds `tensor` to the operands of `call`.
  void add_operand(RecordedOperator& call, const Tensor& tensor) const;

  /// Begins a transfer, sets its pass and position, and returns its index. It ends at once, unless end_transfer() is
  /// called later.
  std::size_t begin_transfer(RecordedTransfer transfer);
  void end_transfer(std::size_t idx) { transfers_[idx].end = operators_.size(); }

  /// Says, until it is destroyed, that dims of size `capacity` are rows of an MoE layer's experts, of which a balanced
  /// load uses `expected`. `record` may be null.
  class Rows {
   public:
    Rows(StepRecord* record, std::string_view layer, std::int64_t capacity, double expected);
    ~Rows();
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;

   private:
    StepRecord* record_;
    std::string layer_before_;
    std::int64_t capacity_before_ = 0;
    double used_before_ = 1.0;
  };

 private:
  std::vector<RecordedOperator> operators_;
  std::vector<RecordedTransfer> transfers_;
  std::string pass_;
  int depth_ = 0;
  std::int64_t row_capacity_ = -1;  // none
  double used_rows_ = 1.0;
  std::string layer_of_rows_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace tessera
