// Runs the passes of a schedule on this rank, and plans the memory that they take. Without a pipeline the schedule has
// one stage. Each micro-batch then goes forward and backward before the next begins, or its forward overlaps with the
// backward of the one before (make_overlapped_schedule). With a pipeline, activations go to the next stage's rank, and
// gradients to the rank of the stage before, while this rank goes on.
//
// A stage's forward keeps tensors of a micro-batch in a slot, which has an arena for them. A stage has as many slots as
// it holds micro-batches at once. Without a pipeline, and with one slot, the tensors lie in the step's arena.
// Backwards that defer weight gradients keep more tensors, in further arenas. A rank has as many of these as it defers
// backwards at once. What crosses to or from another rank has buffers of its own (parallel/pipeline_messages.h): inputs
// until their micro-batch's weight gradients are computed, outputs until they have arrived, and their gradients.
//
// A forward and a backward that the schedule pairs run in turns, if the model can do that (ModelOptions::pairs_passes):
// each computes while the other's tokens are on their way (ep/turns.h). The forward then has scratch memory of its own.
// On a GPU, operators of both leave SMs for calls of the dispatcher.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "device/phase_clock.h"
#include "model/model.h"
#include "parallel/pipeline_messages.h"

namespace tessera {

class Executor {
 public:
  /// The stages that the schedule gives this rank must be those of `model`. Model and mesh must outlive the executor.
  Executor(Model& model, Mesh& mesh, PipelineSchedule schedule);

  /// Measures all passes of a micro-batch and an evaluation: the memory of the slots, and in op's arena what passes
  /// need besides.
  void measure(const Context& op, const Batch& batch, SiteProbe* probe);
  /// Returns the bytes that allocate() takes, which are not in op's arena. Must be called after measure().
  std::size_t num_bytes() const;
  void allocate();
  /// Returns whether warm_up() must be called before the first run(), on a GPU.
  bool needs_warm_up() const { return is_pipeline(); }
  /// Runs the same passes once for each stage by itself. Gradients and sums are meaningless after it. CUDA loads a
  /// kernel at its first launch, which may wait until the GPU is idle. The GPU is never idle while a message waits for
  /// another rank. So all kernels must be loaded before that.
  void warm_up(const Context& op, const Batch& batch, SiteProbe* probe);

  /// Runs the passes of all micro-batches, of which there must be as many as the schedule has. Adds to the gradients
  /// and to the model's sums. `probe` observes the first num_probed micro-batches.
  void run(const Context& op, std::span<const Batch> micro_batches, const LossScale& scale, PhaseClock& clock,
           SiteProbe* probe, std::size_t num_probed);
  /// Runs the forward only, stage by stage. Returns the summed losses of this rank's tokens, or 0 without the head.
  LossSums evaluate(const Context& op, const Batch& batch, const BlockObserver& observer = {});

 private:
  /// Holds the memory of a micro-batch in a stage. It serves another micro-batch only after what it sends has arrived.
  struct Slot {
    Arena arena;  // unused without has_slots()
    StageSaved saved;
    Arena* deferred = nullptr;  // one of deferred_, which it holds from the backward to the weight gradients
    int micro_batch = -1;       // -1: free
    Work sent;
  };
  /// Holds a tensor that crosses the boundary of a stage from or to another rank.
  struct Buffer {
    Arena arena;
    Tensor x_tD;
    int micro_batch = -1;  // -1: free
    Work received, sent;
  };
  struct LocalStage {
    int stage;
    std::size_t num_slots = 0, slot_bytes = 0;
    // The buffers of outputs also serve their gradients. An input is in use from the post of its receive until the
    // weight gradients of its micro-batch are computed. An output is in use for its forward only, because the next use
    // waits until it has arrived. A gradient is in use from the post of its receive, or from the next stage's backward,
    // to the end of its own.
    std::size_t num_inputs = 0, num_outputs = 0;
    std::vector<std::unique_ptr<Slot>> slots;
    std::vector<std::unique_ptr<Buffer>> inputs, outputs;
  };

  bool is_pipeline() const { return schedule_.num_stages() > 1; }
  /// Returns whether slots have memory of their own.
  bool has_slots() const { return is_pipeline() || stages_.front().num_slots > 1; }
  int rank_of(int stage) const { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  bool is_local(int stage) const { return rank_of(stage) == mesh_.pp.rank(); }
  LocalStage& local(int stage);
  /// Checks that a stage's forwards, and its backwards, take micro-batches in order. Messages rely on it.
  void check_order(int stage) const;
  /// Opens the links to the ranks of neighbouring stages.
  void open_links();
  std::size_t index_of(const LocalStage& stage) const { return static_cast<std::size_t>(&stage - stages_.data()); }
  bool splits_backward() const;
  /// Returns whether a stage's output goes to another rank.
  bool sends_output(int stage) const { return stage + 1 < schedule_.num_stages() && !is_local(stage + 1); }
  /// Returns the slot or buffer of a micro-batch, or null if it has none.
  template <typename Memory>
  static Memory* find(const std::vector<std::unique_ptr<Memory>>& all, int micro_batch);
  /// Takes the free slot or buffer that was used least recently, and makes it the last one. Operators that are launched
  /// from now on run after what was sent from that memory has arrived, so they may overwrite it.
  template <typename Memory>
  static Memory& take(std::vector<std::unique_ptr<Memory>>& all, int micro_batch);
  StageSaved make_saved(const LocalStage& stage) const;
  /// Returns a new tensor for a stage's input. It is undefined without a pipeline.
  Tensor boundary(Arena& arena, const Batch& batch) const;
  /// Runs all passes of a micro-batch in one stage. What its forward keeps goes to `arena`, or to op's arena without
  /// has_slots(). What it needs for deferred weight gradients goes to `deferred`. Both must be empty. boundary_tD is
  /// the input, the output and its gradient.
  void run_alone(const Context& op, const LocalStage& stage, const Batch& batch, SiteProbe* probe, Arena& arena,
                 Arena& deferred, const Tensor& boundary_tD);
  /// Records the message that a pass sends to the stage with number `to`, if another rank has that stage.
  void record_message(int to, const Tensor& x_tD);
  /// Starts to receive a message. `batch` is its micro-batch.
  void post(const PipelineMessage& message, const Batch& batch);
  /// Sends to the rank of another stage.
  Work send(const Tensor& x_tD, int stage, std::string_view name);
  /// Starts to receive from the rank of another stage.
  Work receive(const Tensor& x_tD, int stage, std::string_view name);
  /// Returns the tag of all messages from a rank to a neighbour.
  int tag_of(int from, int to) const { return 2 * from + (to == (from + 1) % schedule_.num_ranks ? 0 : 1); }
  void execute(const Context& op, const PipelinePass& pass, const Batch& batch, const LossScale& scale,
               PhaseClock& clock, SiteProbe* probe);
  /// Returns the context of operators that run beside the dispatcher's calls.
  Context beside_calls(const Context& op) const;
  /// Runs the two passes of an action in turns.
  void execute_pair(const Context& op, const PipelineAction& action, std::span<const Batch> micro_batches,
                    const LossScale& scale, PhaseClock& clock);

  Model& model_;
  Mesh& mesh_;
  PipelineSchedule schedule_;
  std::vector<std::vector<PipelineMessage>>
      receives_;  // by action: those that are posted before it; from allocate() on
  std::vector<LocalStage> stages_;
  std::size_t num_deferred_ = 0, deferred_bytes_ = 0, buffer_bytes_ = 0;
  std::vector<std::unique_ptr<Arena>> deferred_;
  std::vector<Arena*> free_deferred_;
  std::size_t paired_bytes_ = 0;
  Arena paired_arena_;  // scratch memory of a paired forward
};

}  // namespace tessera
