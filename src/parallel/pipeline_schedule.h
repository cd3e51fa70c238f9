// Pipeline-parallel schedules as plain data. They say what each rank does, and in which order.
//
// A model is cut into stages. Stage s feeds stage s + 1. A micro-batch goes forward through all of them, then backward
// in the opposite order. The backward of a stage has two halves. The first is the gradient of its input, for which
// stage s - 1 waits. The second is the gradients of its weights, for which no stage waits before the optimizer.
//
// A message is what one stage sends to the next. Forward it is a micro-batch's activation, and backward its gradient.
// Sends do not block. A rank receives the inputs of an action before it begins the action. Between two ranks,
// activations are needed in the order in which they are sent, and so are gradients. The two kinds together are not,
// except in k1F1B (pipeline_messages.h).
//
// Sources:
// - 1F1B (PipeDream-Flush): arXiv 2006.09503
// - interleaved 1F1B: Megatron-LM, arXiv 2104.04473, section 2.2
// - the split backward: arXiv 2401.10241
// - ZB-V: arXiv 2405.15362
// - DualPipe: DeepSeek-V3, arXiv 2412.19437, section 3.2.1. DualPipeV runs on half as many ranks: the forward of a
//   micro-batch goes through all ranks, turns round on the last one, and comes back.
#pragma once

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class PipelineScheduleKind { k1F1B, kInterleaved1F1B, kZBV, kDualPipeV };

/// Returns the kind's name in configurations, which is PyTorch's: "1F1B", "Interleaved1F1B", "ZBVZeroBubble",
/// "DualPipeV".
std::string_view name_of(PipelineScheduleKind kind);

/// Returns the kind with this name, in upper or lower case. "ZBV" is a name, too. For other names it throws Error,
/// which lists the names that exist.
PipelineScheduleKind pipeline_schedule_kind(std::string_view name);

/// Describes the work of one stage on one micro-batch.
struct PipelinePass {
  enum class Kind {
    kForward,
    kBackward,        // both gradients
    kBackwardInput,   // the gradient of the stage's input
    kBackwardWeight,  // the gradients of the stage's weights, some time after kBackwardInput
  };
  Kind kind = Kind::kForward;
  int stage = 0;
  int micro_batch = 0;

  friend bool operator==(const PipelinePass&, const PipelinePass&) = default;
};

/// Describes a pass: "forward of micro-batch 3 in stage 1".
std::string describe(const PipelinePass& pass);

/// Describes what a rank does at one time: a pass, or two passes that run together.
struct PipelineAction {
  PipelinePass pass;
  /// The whole backward of another micro-batch, which overlaps with `pass`. `pass` is then a forward. Each computes
  /// while the other communicates (DualPipe's F&B). Both begin when the inputs of both have arrived, and end together.
  std::optional<PipelinePass> overlapped = {};

  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

/// Calls visit(pass) for each of the action's passes.
template <typename Visit>
void for_each_pass(const PipelineAction& action, Visit&& visit) {
  visit(action.pass);
  if (action.overlapped) visit(*action.overlapped);
}

/// PipelineSchedule::max_deferred without a limit.
inline constexpr int kNoLimit = std::numeric_limits<int>::max();

struct PipelineSchedule {
  PipelineScheduleKind kind = PipelineScheduleKind::k1F1B;
  int num_ranks = 0;
  int stages_per_rank = 0;
  int num_micro_batches = 0;
  /// A rank defers the weight gradients of at most so many split backwards. They keep much memory.
  int max_deferred = kNoLimit;
  std::vector<int> rank_of_stage = {};                    // by stage
  std::vector<std::vector<PipelineAction>> actions = {};  // by rank, in order

  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
};

/// Returns the fewest stages per rank that the kind accepts: 1 for 1F1B, 2 for the others.
int min_stages_per_rank(PipelineScheduleKind kind);

/// Returns the schedule for P = num_ranks, v = stages_per_rank and M = num_micro_batches. Throws Error for numbers that
/// the kind does not accept, and names those that it does. Also throws it if max_deferred is below 1, or if there are
/// more than 2^20 forwards.
/// - k1F1B: v = 1. Stage s is on rank s.
/// - kInterleaved1F1B: v >= 2. Stage s is on rank s mod P. Groups of P micro-batches take turns on a rank's stages. If
///   P does not divide M, the max(1, floor(M / P)) groups are as equal as possible, the larger ones first.
/// - kZBV: v = 2. Rank r has the stages r and 2P - 1 - r. Backwards are split.
/// - kDualPipeV: v = 2, M >= 2P. Stages are placed as in kZBV. Forwards and backwards overlap in the steady state.
///   Backwards are split in the warm-up and at the end.
PipelineSchedule make_pipeline_schedule(PipelineScheduleKind kind, int num_ranks, int stages_per_rank,
                                        int num_micro_batches, int max_deferred = kNoLimit);

/// Returns whether the activations of a pass's stage and micro-batch are of no use after it.
inline bool frees_activations(const PipelinePass& pass) {
  return pass.kind == PipelinePass::Kind::kBackward || pass.kind == PipelinePass::Kind::kBackwardWeight;
}

/// Returns whether a pass computes the gradient of its stage's input, for which the stage before waits.
inline bool computes_input_gradient(const PipelinePass& pass) {
  return pass.kind == PipelinePass::Kind::kBackward || pass.kind == PipelinePass::Kind::kBackwardInput;
}

/// Returns the schedule of one rank with one stage in which each forward overlaps with the backward of the micro-batch
/// before. The rank then holds two micro-batches at once. num_micro_batches >= 1.
PipelineSchedule make_overlapped_schedule(int num_micro_batches);

/// Returns whether the schedule has passes of this rank overlap.
bool pairs_passes(const PipelineSchedule& schedule, int rank);

/// Returns the most micro-batches whose activations each stage holds at once.
std::vector<int> most_held(const PipelineSchedule& schedule);
/// Returns of how many passes a rank defers the weight gradients at once, from the input gradient to the weight
/// gradients. A whole backward counts as one.
int most_deferred(const PipelineSchedule& schedule, int rank);

}  // namespace tessera

/// Formats a pass as describe() does, and only if the text is needed.
template <>
struct fmt::formatter<tessera::PipelinePass> : fmt::formatter<std::string> {
  auto format(const tessera::PipelinePass& pass, format_context& context) const {
    return formatter<std::string>::format(tessera::describe(pass), context);
  }
};
