#include "step/training_step.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "comm/together.h"
#include "config/resolve_recipes.h"
#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"

namespace tessera {
namespace {

ModelOptions model_options(const JobConfig& config, std::shared_ptr<Mesh> mesh, const PipelineSchedule& schedule,
                           Device device) {
  const auto& parallelism = config.parallelism;
  ModelOptions options{.device = device,
                       .compute = config.training.mixed_precision_param,
                       .optimizer = Optimizer::state_tensors(config),
                       .recompute = config.activation_checkpoint.mode,
                       .force_load_balance = config.debug.moe_force_load_balance,
                       .seq_len = config.training.seq_len,
                       .max_tokens = config.micro_batch_size() * config.training.seq_len / mesh->sequence.size(),
                       .dispatch_backend = parallelism.expert_parallel_comm_backend,
                       .capacity_factor = parallelism.expert_parallel_capacity_factor,
                       .dispatch_sms = static_cast<int>(parallelism.expert_parallel_num_sms),
                       .dispatch_forward = parallelism.expert_parallel_a2a_dispatch_fwd_precision,
                       .combine_backward = parallelism.expert_parallel_a2a_combine_bwd_precision};
  const bool is_pipeline = mesh->degrees.pp > 1;
  // A stage reads its weights once per micro-batch: by default they are gathered once per step then.
  const std::string& reshard = parallelism.fsdp_reshard_after_forward;
  options.keep_gathered = reshard == "never" || (reshard == "default" && is_pipeline);
  options.keep_gradients = is_pipeline && parallelism.pipeline_parallel_reduce_gradients == "step";
  options.reduce = config.training.mixed_precision_reduce;
  options.keep_quantized = config.quantize.keep_weights;
  // Between GPUs of one domain, tokens move so fast that passes in turns take longer (docs/performance.md).
  const bool is_slow = device == Device::kCpu || mesh->degrees.num_ep_domains() > 1;
  const bool is_wanted = is_pipeline ? parallelism.pipeline_parallel_expert_parallel_overlap &&
                                           (is_slow || parallelism.expert_parallel_overlap)
                                     : parallelism.expert_parallel_overlap;
  options.pairs_passes = is_wanted && mesh->ep.size() > 1 && pairs_passes(schedule, mesh->pp.rank());
  const std::vector<StageModules> stages = config.pipeline_stages(mesh->degrees);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (schedule.rank_of_stage[s] == mesh->place.pp) options.stages.push_back(stages[s]);
  }
  options.mesh = std::move(mesh);
  return options;
}

std::shared_ptr<Mesh> or_one_rank(std::shared_ptr<Mesh> mesh) {
  return mesh != nullptr ? std::move(mesh) : std::make_shared<Mesh>();
}

}  // namespace

ModelOptions model_options(const JobConfig& config) {
  const auto mesh = std::make_shared<Mesh>();
  return model_options(config, mesh, config.pipeline_schedule(mesh->degrees), Device::kCpu);
}

TrainingStep::TrainingStep(const JobConfig& config, const std::shared_ptr<Mesh>& mesh, Device device,
                           std::shared_ptr<cuda::Runtime> cuda)
    : TrainingStep(config, or_one_rank(mesh), config.pipeline_schedule(or_one_rank(mesh)->degrees), device,
                   std::move(cuda)) {}

TrainingStep::TrainingStep(const JobConfig& config, std::shared_ptr<Mesh> mesh, const PipelineSchedule& schedule,
                           Device device, std::shared_ptr<cuda::Runtime> cuda)
    : config_(config),
      cuda_(std::move(cuda)),
      mesh_(std::move(mesh)),
      whole_(config.model.args, {.seq_len = 1}),
      model_(config.model.args, model_options(config, mesh_, schedule, device)),
      executor_(model_, *mesh_, schedule),
      arena_(device),
      optimizer_(config),
      reduction_(*mesh_, whole_),
      spikes_(config.training.max_loss_spike),
      faults_(config, *mesh_) {
  TESSERA_CHECK(device == Device::kCpu || cuda_ != nullptr || mesh_->degrees.num_ranks() == 1 || mesh_->is_planned);
  if (device == Device::kCuda && cuda_ == nullptr && cuda::available()) cuda_ = cuda::make_runtime();
  // Without a runtime, a GPU's step is only measured.
  if (cuda_ != nullptr) cuda_->set_deterministic(config.debug.deterministic);
  model_.parameters().allocate_meta(config.training.mixed_precision_param);
  // Without a GPU, the step is measured as on a Hopper, as operators are.
  const bool is_hopper = device == Device::kCuda && (cuda_ == nullptr || cuda_->compute_capability() == 9);
  const Recipes recipes = is_hopper ? on_hopper(config.recipes()) : config.recipes();
  model_.set_precisions(context(), resolve_recipes(recipes, model_.parameters(), whole_.parameters()));
  if (cuda_ != nullptr) {
    cuda_->leave_sms(mesh_->pp.sms_of_links());
    const std::int64_t dispatch_sms = config.parallelism.expert_parallel_num_sms;
    require(mesh_->ep.size() == 1 || dispatch_sms < cuda_->num_sms(),
            "parallelism.expert_parallel_num_sms is {}, but the GPU has {} multiprocessors for all operators",
            dispatch_sms, cuda_->num_sms());
  }
  measure();
}

Batch TrainingStep::make_batch() const {
  return Batch(config_.model.args, config_.micro_batch_size(), config_.training.seq_len,
               {.rank = mesh_->place.cp, .size = mesh_->degrees.cp}, cuda_ == nullptr ? Device::kCpu : device());
}

Context TrainingStep::context() {
  return {.arena = &arena_, .cuda = cuda_.get(), .trace = observers_.trace, .record = observers_.record};
}

void TrainingStep::measure() {
  const Batch batch = make_batch();
  const Context op = context();
  SqnrProbe probe;
  Parameters& parameters = model_.parameters();
  executor_.measure(op, batch, &probe);
  parameters.finish_gradients();
  model_.forget_gathered();
  Context recorded = op;
  recorded.record = &dry_run_.record;
  executor_.measure(recorded, batch, nullptr);
  mesh_->set_record(recorded.record);
  dry_run_.record.set_pass("reduction");
  parameters.finish_gradients();
  update_weights(recorded);
  mesh_->set_record(nullptr);
  model_.forget_gathered();
  const std::size_t gradients = parameters.all_gradients().num_bytes();
  std::size_t optimizer_state = 0;
  for (std::size_t i = 0; i < parameters.optimizer_tensors().size(); ++i) {
    optimizer_state += parameters.optimizer_tensor(i).num_bytes();
  }
  dry_run_.memory = {.weights = parameters.num_bytes(parameters.compute_dtype()) - gradients - optimizer_state +
                                model_.quantized_weights().num_bytes(),
                     .gradients = gradients,
                     .optimizer_state = optimizer_state,
                     .activations = arena_.peak() + executor_.num_bytes(),
                     .windows = model_.window_bytes(),
                     .batches = batch.num_bytes() * (device() == Device::kCuda ? kMaxStarted : 1) *
                                static_cast<std::size_t>(config_.micro_batches_per_step(mesh_->num_data_ranks()))};
}

void TrainingStep::warn_of_slow_operators() const {
  if (cuda_ == nullptr) return;
  for (const std::string& text : cuda_->slow_operators()) spdlog::warn("{}", text);
}

void TrainingStep::allocate() {
  TESSERA_CHECK(!mesh_->is_planned);
  if (device() == Device::kCuda && cuda_ == nullptr) cuda_ = cuda::make_runtime();
  optimizer_.allocate(device());
  optimizer_.allow_steps(cuda_.get());
  if (cuda_ != nullptr) {
    for (cuda::Event& read : gpu_.state_read_done()) read.record(cuda_->stream());
    for (Started& started : started_.slots) {
      started.numbers = Buffer::pinned(sizeof(AdamWStep));
      started.squares_and_sums = Buffer::pinned((1 + model_.sums().host().size()) * sizeof(double));
    }
  }
  model_.allocate(cuda_.get());
  model_.parameters().initialise(static_cast<std::uint64_t>(config_.debug.seed));
  arena_ = Arena(arena_.peak(), device());
  executor_.allocate();
  refresh_weights();
}

void TrainingStep::refresh_weights() { model_.refresh_weights(context()); }

void TrainingStep::start(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr) {
  or_abort([&] { begin_step(step, micro_batches, measure_sqnr); });
}

void TrainingStep::begin_step(std::int64_t step, std::span<const Batch> micro_batches, bool measure_sqnr) {
  TESSERA_CHECK(started_.size < max_started(), "{} steps started", started_.size);
  if (started_.size++ == 0) started_.oldest = step;
  TESSERA_CHECK(step + 1 == started_.oldest + static_cast<std::int64_t>(started_.size), "step {}", step);
  Started& now = started_.at(step);
  now.micro_batches = micro_batches;
  now.probe.reset();
  if (measure_sqnr) now.probe.emplace();
  now.result = {};
  StepResult& result = now.result;
  result.step = step;
  std::int64_t num_sequences = 0, num_tokens = 0;
  double num_valid = 0.0;
  for (const Batch& batch : micro_batches) {
    // Tensor-parallel ranks have the same labels, so only one of them counts.
    if (mesh_->place.tp == 0) num_valid += static_cast<double>(batch.num_valid());
    num_sequences += batch.num_seqs();
    num_tokens += batch.num_tokens();
  }
  mesh_->tokens.all_reduce(std::span(&num_valid, 1), "the number of valid positions");
  num_sequences *= mesh_->num_data_ranks();
  result.num_tokens = num_tokens * mesh_->tokens.size() / mesh_->degrees.tp;
  now.scale = {.per_token = 1.0 / std::max(num_valid, 1.0), .per_sequence = 1.0 / static_cast<double>(num_sequences)};

  result.learning_rate = optimizer_.learning_rate(step);
  now.largest_loss = static_cast<float>(spikes_.largest() / now.scale.per_token);
  now.is_poisoned = faults_.hits(step);
  const AdamWStep numbers = optimizer_.numbers(step, now.largest_loss);
  if (cuda_ != nullptr) return start_on_gpu(now, numbers);
  optimizer_.set_numbers(numbers);
  now.cpu_clock.reset();
  now.clock = &now.cpu_clock;
  run_step(now, now.cpu_clock);
}

template <typename Body>
auto TrainingStep::or_abort(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const FailedStep&) {  // on all ranks
    throw;
  } catch (const std::exception& error) {
    for (ProcessGroup* group : {&mesh_->tokens, &mesh_->model}) group->abort_gpu(error);
    throw;
  }
}

void TrainingStep::start_on_gpu(Started& started, const AdamWStep& numbers) {
  const cuda::Stream& stream = cuda_->stream();
  if (started_.size == 1) gpu_.start_idle(stream);
  // What evaluations have gathered since is of older weights, and no part of a graph.
  model_.forget_gathered();
  optimizer_.upload_numbers(stream, numbers, started.numbers);
  for (const Batch& batch : started.micro_batches) batch.upload(stream);
  if (executor_.needs_warm_up() && !gpu_.has_recorded()) warm_up(started.micro_batches.front());
  // A graph fixes these values. All else that differs from step to step is in memory. The first step of a key runs
  // without a graph, because it may load kernels, which cannot be recorded.
  GpuSteps::GraphKey key{.per_token = started.scale.per_token, .batches = {}};
  for (const Batch& batch : started.micro_batches) key.batches.push_back(batch.inputs(device()).raw());
  GpuSteps::Recorded& run = gpu_.recorded(key, stream);
  started.clock = &run.clock;
  const auto update_all = [&] {
    run.clock.reset();
    run_step(started, run.clock);
  };
  if (!run.has_run || observers_.record != nullptr || started.probe || started.is_poisoned || model_.waits_for_gpu()) {
    run.graph = {};
    model_.set_loads_kernels(!run.has_run);
    update_all();
    model_.set_loads_kernels(false);
    run.has_run = true;
  } else {
    if (!run.graph.defined()) run.graph = cuda::Graph(stream, update_all);
    run.graph.launch(stream);
  }
  auto* numbers_of_step = reinterpret_cast<double*>(started.squares_and_sums.data());
  cuda::copy_bytes(stream, optimizer_.squares().tensor(device()).raw(), sizeof(double), numbers_of_step);
  model_.sums().download(stream, numbers_of_step + 1);
  started.done.record(stream);
}

void TrainingStep::warm_up(const Batch& batch) {
  SqnrProbe sqnr;
  FiniteProbe finite(model_.parameters());
  model_.parameters().clear_gradients();
  for (SiteProbe* probe :
       {static_cast<SiteProbe*>(nullptr), static_cast<SiteProbe*>(&sqnr), static_cast<SiteProbe*>(&finite)}) {
    executor_.warm_up(context(), batch, probe);
  }
}

void TrainingStep::wait_for_gpu(const Started& started) {
  const auto check = [&] { model_.check_dispatch(); };
  cuda_->wait(started.done, check);
  check();
  const auto* numbers = reinterpret_cast<const double*>(started.squares_and_sums.data());
  optimizer_.squares().host()[0] = numbers[0];
  const std::span<double> sums = model_.sums().host();
  std::copy_n(numbers + 1, sums.size(), sums.begin());
}

StepResult TrainingStep::finish() {
  return or_abort([&] { return finish_oldest(); });
}

StepResult TrainingStep::finish_oldest() {
  TESSERA_CHECK(started_.size > 0);
  StepResult result = collect_oldest();
  const std::string fault = fault_of(result);
  if (!fault.empty()) {
    result = repeat_oldest(fault);
  } else {
    if (const auto& probe = started_.at(started_.oldest).probe) {
      result.sqnr = probe->result(model_.parameters(), whole_.parameters());
    }
    drop_oldest();
  }
  if (!result.is_skipped) spikes_.add(result.loss);
  return result;
}

StepResult TrainingStep::collect_oldest() {
  Started& oldest = started_.at(started_.oldest);
  if (cuda_ != nullptr) wait_for_gpu(oldest);
  if (cuda_ != nullptr || mesh_->degrees.num_ranks() == 1) reduction_.collect(model_);

  StepResult result = std::move(oldest.result);
  result.seconds = oldest.clock->seconds();
  result.ended = cuda_ != nullptr ? gpu_.end(oldest.done) : Clock::now();
  const ModelConfig& model = config_.model.args;
  const LossScale& scale = oldest.scale;
  const LossSums losses = reduction_.all().losses();
  result.loss = losses.main * scale.per_token;
  if (model.num_mtp_modules > 0)
    result.mtp_loss = losses.mtp * scale.per_token / static_cast<double>(model.num_mtp_modules);
  for (std::size_t i = 0; i < whole_.num_moe_layers(); ++i) {
    result.balance_loss += reduction_.all().balance_loss(i) * scale.per_sequence;
    const std::span<const double> counts = reduction_.all().counts_E(i);
    const double mean = std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
    result.expert_load.push_back(*std::max_element(counts.begin(), counts.end()) / mean);
    result.expert_tokens.emplace_back(counts.begin(), counts.end());
  }
  result.later_rounds = reduction_.all().later_rounds() / static_cast<double>(mesh_->tokens.size() * mesh_->pp.size());
  result.total_loss = result.loss + static_cast<double>(model.mtp_loss_weight) * result.mtp_loss + result.balance_loss;
  result.grad_norm = std::sqrt(optimizer_.squares().host()[0]);
  return result;
}

std::string TrainingStep::fault_of(const StepResult& result) const {
  if (!std::isfinite(result.total_loss) || !std::isfinite(result.grad_norm)) {
    return fmt::format("loss {}, gradient norm {}", result.total_loss, result.grad_norm);
  }
  const Started& started = started_.at(result.step);
  // clip_gradients compares them so on the device.
  if (!(reduction_.all().losses().main > static_cast<double>(started.largest_loss))) return {};
  return fmt::format("loss {}, which is more than training.max_loss_spike = {} times the mean of the last {} steps'",
                     result.loss, config_.training.max_loss_spike, LossSpikes::kLossesOfMean);
}

void TrainingStep::drop_oldest() {
  started_.at(started_.oldest).probe.reset();
  ++started_.oldest;
  --started_.size;
}

StepResult TrainingStep::repeat_oldest(const std::string& fault) {
  const std::int64_t step = started_.oldest, end = step + static_cast<std::int64_t>(started_.size);
  std::array<bool, kMaxStarted> measures{};  // by step
  for (std::int64_t i = step; i < end; ++i) {
    measures[static_cast<std::size_t>(i) % kMaxStarted] = started_.at(i).probe.has_value();
  }
  const auto start_again = [&](std::int64_t i) {
    begin_step(i, started_.at(i).micro_batches, measures[static_cast<std::size_t>(i) % kMaxStarted]);
  };
  started_.size = 0;
  optimizer_.allow_steps(cuda_.get());
  start_again(step);
  StepResult result = collect_oldest();
  result.repeated_for = fault;
  const std::string again = fault_of(result);
  const bool is_spike = std::isfinite(result.total_loss) && std::isfinite(result.grad_norm);
  result.is_skipped = !again.empty() && is_spike && config_.training.skip_loss_spikes;
  if (!again.empty() && !result.is_skipped) {
    const Started& oldest = started_.at(step);
    const std::string place =
        is_spike ? "the batch may be bad (--training.skip_loss_spikes leaves such steps out)"
                 : fmt::format("first non-finite numbers in {}", find_non_finite(oldest.micro_batches, oldest.scale));
    const std::string message = fmt::format(
        "step {}: {}; made again from the same batches: {}; {}. A checkpoint, if there is one, is from before.", step,
        fault, again, place);
    started_.size = 0;
    optimizer_.allow_steps(cuda_.get());
    if (is_spike) throw SpikedStep(message, std::move(result));
    throw NonFiniteStep(message, std::move(result), !reduction_.own_is_finite());
  }
  if (started_.at(step).probe) result.sqnr = started_.at(step).probe->result(model_.parameters(), whole_.parameters());
  drop_oldest();
  if (result.is_skipped) optimizer_.allow_steps(cuda_.get());
  for (std::int64_t i = step + 1; i < end; ++i) start_again(i);
  return result;
}

void TrainingStep::run_step(Started& started, PhaseClock& clock) {
  const Context op = context();
  Parameters& parameters = model_.parameters();
  parameters.clear_gradients();
  model_.clear_sums(op);
  executor_.run(op, started.micro_batches, started.scale, clock, started.probe ? &*started.probe : nullptr, 1);
  parameters.finish_gradients();
  if (started.is_poisoned) FaultInjection::poison(op, model_);
  clock.begin();
  const TraceScope trace(observers_.trace, "optimizer");
  update_weights(op);
  clock.end(&PhaseSeconds::optimizer);
}

void TrainingStep::update_weights(const Context& op) {
  if (op.record != nullptr) op.record->set_pass("optimizer");
  const Parameters& parameters = model_.parameters();
  optimizer_.measure_gradients(op, parameters);
  if (mesh_->degrees.num_ranks() > 1) reduction_.reduce(op, model_, optimizer_.squares());
  if (cuda_ != nullptr && !op.measuring()) {
    for (const cuda::Event& read : gpu_.state_read_done()) cuda_->stream().wait(read);
  }
  optimizer_.clip(op, model_.sums().main_loss(op.device()));
  model_.update_expert_biases(op, optimizer_.finite_1(op));
  optimizer_.update(op, parameters, model_.quantized_weights());
  model_.forget_gathered();
}

double TrainingStep::evaluate(const Batch& batch) {
  return or_abort([&] {
    if (cuda_ != nullptr) batch.upload(cuda_->stream());
    const double loss = executor_.evaluate(context(), batch).main;
    if (cuda_ != nullptr) model_.check_dispatch();
    double numbers[] = {loss, mesh_->place.tp == 0 ? static_cast<double>(batch.num_valid()) : 0.0};
    mesh_->tokens.all_reduce(numbers, "a validation loss");
    mesh_->pp.all_reduce(std::span(numbers, 1), "a validation loss");  // of the stage that has it
    return numbers[0] / std::max(numbers[1], 1.0);
  });
}

std::string TrainingStep::find_non_finite(std::span<const Batch> micro_batches, const LossScale& scale) {
  const Context op = context();
  const Parameters& parameters = model_.parameters();
  std::string gradient, found;
  FiniteProbe probe(parameters);
  PhaseClock clock;
  // The passes run again, with the probe. They add to the gradients, so these are cleared first.
  model_.parameters().clear_gradients();
  // All passes run, whatever is found, because other ranks may find nothing and would wait for this one.
  executor_.run(op, micro_batches, scale, clock, &probe, micro_batches.size());
  model_.parameters().finish_gradients();
  found = probe.found();
  // The backward runs from the last parameter to the first.
  for (ParamId id = 0; id < parameters.size(); ++id) {
    if (!all_finite(op, parameters.gradient_shard(id))) gradient = "the gradient of " + parameters.spec(id).name;
  }
  for (const Batch& batch : micro_batches) {
    executor_.evaluate(op, batch, [&](const std::string& name, const Tensor& x_tD) {
      if (found.empty() && !all_finite(op, x_tD)) found = "the output of " + name;
    });
  }
  for (std::string* text : {&found, &gradient}) {
    *text = broadcast_first_text(mesh_->tokens, *text, "what is not finite");
    *text = broadcast_first_text(mesh_->pp, *text, "what is not finite");
    if (!text->empty()) return *text;
  }
  return "the sum of the losses, or of the gradients' squares";
}

}  // namespace tessera
