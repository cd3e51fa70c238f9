// One optimizer step: forward and backward of its micro-batches, gradient norm and clipping, expert-bias update, and
// the optimizer. The memory that it takes is known before anything is allocated.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "config/job_config.h"
#include "model/model.h"
#include "step/executor.h"
#include "step/fault_injection.h"
#include "step/gpu_steps.h"
#include "step/loss_spikes.h"
#include "step/optimizer.h"
#include "step/site_probes.h"
#include "step/step_reduction.h"
#include "tensor/step_record.h"

namespace tessera {

/// Holds the bytes that a run takes, by use.
struct MemoryPlan {
  std::size_t weights = 0;  // masters, bfloat16, quantized and gathered copies, expert biases
  std::size_t gradients = 0;
  std::size_t optimizer_state = 0;
  std::size_t activations = 0;  // the arena, and the executor's slots and arenas of deferred operands
  std::size_t windows = 0;      // where other ranks store what they send
  std::size_t batches = 0;      // index tensors of all micro-batches of the steps that may be started

  std::size_t total() const { return weights + gradients + optimizer_state + activations + windows + batches; }
  bool operator==(const MemoryPlan&) const = default;
};

struct StepResult {
  std::int64_t step = 0;
  double loss = 0.0;          // mean cross-entropy of the next token
  double mtp_loss = 0.0;      // mean over modules, before its weight
  double balance_loss = 0.0;  // coefficient included, mean over sequences
  double total_loss = 0.0;    // what is minimised
  double grad_norm = 0.0;     // before clipping
  double learning_rate = 0.0;
  std::int64_t num_tokens = 0;  // of all data ranks, whether their labels count or not
  PhaseSeconds seconds;         // by phase, without the phase that waits for data
  /// The time when the device had finished the step, which may be long before the host calls finish().
  std::chrono::steady_clock::time_point ended;
  /// The load of each MoE layer's most loaded expert, in tokens, divided by the mean load.
  std::vector<double> expert_load;
  /// The tokens of each MoE layer's experts.
  std::vector<std::vector<double>> expert_tokens;
  /// The number of rounds beyond the first of all dispatches (ep/dispatcher.h), averaged over the ranks.
  double later_rounds = 0.0;
  /// Says why the step was repeated, if it was: "loss nan, gradient norm nan". The numbers are those of the second
  /// time.
  std::string repeated_for;
  /// True if the step was left out (training.skip_loss_spikes). Its loss was a spike both times, and the weights did
  /// not change.
  bool is_skipped = false;
  /// Has one entry per GEMM site in low precision, for the first micro-batch of all data ranks, if asked for. All ranks
  /// have the same entries.
  std::vector<SiteSqnr> sqnr;
};

/// Reports a step that was not taken. It failed, and failed again when it was made anew from the same batches.
class FailedStep : public Error {
 public:
  FailedStep(const std::string& message, ExitStatus status, StepResult step_result)
      : Error(message, status), result(std::move(step_result)) {}
  StepResult result;
};

/// Reports a step whose loss is a spike (training.max_loss_spike).
class SpikedStep : public FailedStep {
 public:
  SpikedStep(const std::string& message, StepResult step_result)
      : FailedStep(message, ExitStatus::kLossSpike, std::move(step_result)) {}
};

/// Reports a step whose loss or gradient norm is not finite.
class NonFiniteStep : public FailedStep {
 public:
  NonFiniteStep(const std::string& message, StepResult step_result, bool began_here,
                ExitStatus status = ExitStatus::kNonFinite)
      : FailedStep(message, status, std::move(step_result)), begins_here(began_here) {}
  /// True if this rank's sum of losses, or its shards of the gradients, were not finite. A shard is a sum over the
  /// ranks that share it, so a gradient may have become so on another of these. On GPUs no rank knows this, and it is
  /// always true.
  bool begins_here;
};

/// Returns the options that a model of this configuration is built with on one rank.
ModelOptions model_options(const JobConfig& config);

class TrainingStep {
 public:
  /// Builds the model and measures the step. It allocates nothing of the plan. `config` must outlive this. Throws Error
  /// for a config that cannot work. With a mesh, all ranks must call this and all that follows together. Null means one
  /// rank. `device` is where the step runs, kCpu or kCuda. On kCuda it uses `cuda`, which several ranks must give. For
  /// one rank, or a mesh that is planned only, null means a new one. With a mesh that is planned only, the step is
  /// measured and nothing else.
  explicit TrainingStep(const JobConfig& config, const std::shared_ptr<Mesh>& mesh = nullptr,
                        Device device = Device::kCpu, std::shared_ptr<cuda::Runtime> cuda = nullptr);
  explicit TrainingStep(JobConfig&& config, const std::shared_ptr<Mesh>& mesh = nullptr, Device device = Device::kCpu,
                        std::shared_ptr<cuda::Runtime> cuda = nullptr) = delete;
  /// Does the same with the mesh's schedule (JobConfig::pipeline_schedule), which takes a while to make.
  TrainingStep(const JobConfig& config, std::shared_ptr<Mesh> mesh, const PipelineSchedule& schedule, Device device,
               std::shared_ptr<cuda::Runtime> cuda = nullptr);

  const MemoryPlan& memory_plan() const { return dry_run_.memory; }
  /// Returns the device that the step runs on.
  Device device() const { return model_.options().device; }
  /// Warns of operators that are slow on this GPU, and says why.
  void warn_of_slow_operators() const;
  /// Takes the planned memory and initialises the parameters.
  void allocate();

  /// Starts step `step` (from 1) over micro_batches_per_step() batches. On a GPU it returns before the step is made. Up
  /// to max_started() steps may be started and not finished. Each needs batches of its own, which must not change until
  /// finish(). `measure_sqnr` measures quantization errors, which costs as much as reading all operands once more. It
  /// must be the same on all ranks.
  void start(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr = false);
  /// Waits for the oldest started step. If its loss or gradient norm is not finite, or its loss is a spike, the step is
  /// repeated from the same batches. The cause may be a transient hardware fault. The steps after it are then repeated
  /// too. If the step fails again, throws NonFiniteStep, which names step and layer, or SpikedStep. The parameters are
  /// then those of before the step, and no started step is left.
  StepResult finish();
  std::size_t num_started() const { return started_.size; }
  std::size_t max_started() const { return cuda_ == nullptr ? 1 : kMaxStarted; }
  StepResult run(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr = false) {
    start(step, micro_batches, measure_sqnr);
    return finish();
  }

  /// Returns the event of a reader, which a GPU waits for before a step changes the training state. The reader records
  /// it, after what reads the state, before the step is started.
  cuda::Event& state_read_done(StateReader reader) { return gpu_.state_read_done()[static_cast<std::size_t>(reader)]; }

  /// Renews the copies of the weights that layers read, after the masters were changed from outside.
  void refresh_weights();

  /// Returns the mean cross-entropy, in nats, over the valid positions of all ranks' batches. MTP modules do not count.
  /// All ranks must call it together. When it returns, `batch` may be filled anew.
  double evaluate(const Batch& batch);

  Batch make_batch() const;
  Model& model() { return model_; }
  const Model& model() const { return model_; }
  /// Returns the model with all stages and all ranks' parts, for names and numbers. It is not run.
  const Model& whole_model() const { return whole_; }
  Context context();
  void set_trace(TraceRecorder* trace) { observers_.trace = trace; }
  /// Returns the operators and transfers of a step, which were recorded when it was measured: those of one micro-batch
  /// in every stage of this rank, those that complete the gradients (pass "reduction"), and those of the optimizer. The
  /// first write of a step to a gradient assigns; others accumulate.
  const StepRecord& dry_run() const { return dry_run_.record; }
  /// Records the operators of the steps that are started from now on, with their times on a CPU, or no longer if it is
  /// null. A GPU makes such steps without a recorded graph.
  void set_record(StepRecord* record) { observers_.record = record; }

 private:
  using Clock = std::chrono::steady_clock;

  void measure();
  /// Returns where a step's first non-finite number shows up: a GEMM site's operand, a block's output, or a parameter's
  /// gradient.
  std::string find_non_finite(std::span<const Batch> micro_batches, const LossScale& scale);

  /// Holds the state of a step between start() and finish().
  struct Started {
    StepResult result;
    std::span<const Batch> micro_batches;
    LossScale scale = {};
    float largest_loss = 0.0f;  // as in AdamWStep
    bool is_poisoned = false;   // one of its gradients becomes NaN (FaultInjection)
    std::optional<SqnrProbe> probe;
    PhaseClock cpu_clock;
    const PhaseClock* clock = nullptr;  // cpu_clock, or the graph's
    // Pinned memory for what the host and the GPU tell each other. `numbers` is the host's part of AdamWStep.
    // `squares_and_sums` are the gradients' squares and the model's sums.
    Buffer numbers, squares_and_sums;
    cuda::Event done;
  };
  static constexpr std::size_t kMaxStarted = 2;
  /// Holds the steps that are started and not finished.
  struct StartedSteps {
    std::array<Started, kMaxStarted> slots;  // by step
    std::int64_t oldest = 0;
    std::size_t size = 0;

    Started& at(std::int64_t step) { return slots[static_cast<std::size_t>(step) % kMaxStarted]; }
    const Started& at(std::int64_t step) const { return slots[static_cast<std::size_t>(step) % kMaxStarted]; }
  };

  /// Makes a step from zero gradients to new weights, which is all that a GPU can do without the host. If the step is
  /// not finite, or its loss is a spike, weights, moments and biases do not change.
  void run_step(Started& started, PhaseClock& clock);
  /// Makes the optimizer's part of a step, from the gradients to the copies of the new weights.
  void update_weights(const Context& op);
  /// Warms up the executor (Executor::warm_up), including the kernels that its probes launch.
  void warm_up(const Batch& batch);
  /// Returns what body() returns. If it throws on this rank, calls ProcessGroup::abort_gpu(), except for FailedStep,
  /// which all ranks throw.
  template <typename Body>
  auto or_abort(Body&& body) -> decltype(body());
  void begin_step(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr);
  StepResult finish_oldest();
  /// Returns the result of the oldest step, which must have ended.
  StepResult collect_oldest();
  /// Returns why a step was not taken, or an empty string if it was.
  std::string fault_of(const StepResult& result) const;
  /// Repeats the oldest step after a fault, and starts again those that were started behind it. Throws FailedStep.
  StepResult repeat_oldest(const std::string& fault);
  void drop_oldest();
  void start_on_gpu(Started& started, const AdamWStep& numbers);
  void wait_for_gpu(const Started& started);

  /// What is known of a step before it runs.
  struct DryRun {
    MemoryPlan memory;
    StepRecord record;
  };
  struct Observers {
    TraceRecorder* trace = nullptr;
    StepRecord* record = nullptr;
  };

  const JobConfig& config_;
  std::shared_ptr<cuda::Runtime> cuda_;  // null on CPUs, and when a plan is made without a GPU
  std::shared_ptr<Mesh> mesh_;
  Model whole_;
  Model model_;
  Executor executor_;
  Arena arena_;
  DryRun dry_run_;
  Optimizer optimizer_;
  StepReduction reduction_;
  LossSpikes spikes_;
  FaultInjection faults_;
  StartedSteps started_;
  GpuSteps gpu_{kMaxStarted};
  Observers observers_;
};

}  // namespace tessera
