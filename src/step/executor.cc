#include "step/executor.h"

#include <algorithm>
#include <set>
#include <utility>

#include "ops/elementwise/elementwise.h"
#include "tensor/step_record.h"

namespace tessera {
namespace {

/// Names the pass of the operators that follow in the record, if there is one.
void name_pass(const Context& op, int stage, PipelinePass::Kind kind) {
  if (op.record == nullptr) return;
  const char* name = kind == PipelinePass::Kind::kForward          ? "forward"
                     : kind == PipelinePass::Kind::kBackwardWeight ? "weight gradients"
                                                                   : "backward";
  op.record->set_pass(fmt::format("stage {} {}", stage, name));
}

}  // namespace

Executor::Executor(Model& model, Mesh& mesh, PipelineSchedule schedule)
    : model_(model), mesh_(mesh), schedule_(std::move(schedule)) {
  TESSERA_CHECK(schedule_.num_ranks == mesh_.pp.size(), "{} {}", schedule_.num_ranks, mesh_.pp.size());
  const std::vector<int> num_slots = most_held(schedule_);
  if (splits_backward()) num_deferred_ = static_cast<std::size_t>(most_deferred(schedule_, mesh_.pp.rank()));
  for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
    if (!is_local(stage)) continue;
    check_order(stage);
    const int held = num_slots[static_cast<std::size_t>(stage)];
    const bool receives = stage > 0 && !is_local(stage - 1);
    stages_.push_back({.stage = stage,
                       .num_slots = static_cast<std::size_t>(held),
                       .num_inputs = static_cast<std::size_t>(receives ? num_input_buffers(held) : 0),
                       .num_outputs = static_cast<std::size_t>(num_output_buffers(schedule_, stage, held)),
                       .slots = {},
                       .inputs = {},
                       .outputs = {}});
  }
  TESSERA_CHECK(stages_.size() == model_.num_stages(), "{} {}", stages_.size(), model_.num_stages());
  open_links();
}

void Executor::check_order(int stage) const {
  int next_forward = 0, next_backward = 0;
  for (const PipelineAction& action : schedule_.actions[static_cast<std::size_t>(mesh_.pp.rank())]) {
    for_each_pass(action, [&](const PipelinePass& pass) {
      if (pass.stage != stage || pass.kind == PipelinePass::Kind::kBackwardWeight) return;
      int& next = pass.kind == PipelinePass::Kind::kForward ? next_forward : next_backward;
      TESSERA_CHECK(pass.micro_batch == next++, "{}", describe(pass));
    });
  }
}

void Executor::open_links() {
  std::set<std::pair<int, int>> pairs;
  for (int stage = 0; stage + 1 < schedule_.num_stages(); ++stage) {
    const int here = rank_of(stage), next = rank_of(stage + 1);
    if (here != next) pairs.insert({{here, next}, {next, here}});
  }
  std::vector<ProcessGroup::Link> links;
  for (const auto& [from, to] : pairs) links.push_back({.from = from, .to = to, .tag = tag_of(from, to)});
  if (!links.empty()) mesh_.pp.open_links(links);
}

Executor::LocalStage& Executor::local(int stage) {
  const auto found =
      std::find_if(stages_.begin(), stages_.end(), [&](const LocalStage& one) { return one.stage == stage; });
  TESSERA_CHECK(found != stages_.end(), "stage {}", stage);
  return *found;
}

bool Executor::splits_backward() const {
  for (const PipelineAction& action : schedule_.actions[static_cast<std::size_t>(mesh_.pp.rank())]) {
    if (action.pass.kind == PipelinePass::Kind::kBackwardWeight) return true;
  }
  return false;
}

StageSaved Executor::make_saved(const LocalStage& stage) const {
  StageSaved saved = model_.make_saved(index_of(stage), splits_backward());
  saved.sends_output = sends_output(stage.stage);
  return saved;
}

Tensor Executor::boundary(Arena& arena, const Batch& batch) const {
  if (!is_pipeline()) return {};
  return arena.allocate({batch.num_tokens() / mesh_.degrees.tp, model_.config().dim}, model_.options().compute);
}

void Executor::record_message(int to, const Tensor& x_tD) {
  if (0 <= to && to < schedule_.num_stages() && !is_local(to)) send(x_tD, to, {}).wait();
}

void Executor::run_alone(const Context& op, const LocalStage& stage, const Batch& batch, SiteProbe* probe, Arena& arena,
                         Arena& deferred, const Tensor& boundary_tD) {
  const LossScale scale{.per_token = 1.0, .per_sequence = 1.0};
  const ArenaScope scope(*op.arena);
  StageSaved saved = make_saved(stage);
  if (has_slots()) saved.arena = &arena;
  if (saved.deferred) saved.deferred->set_arena(&deferred);
  saved.x_tD = saved.out_tD = saved.d_tD = boundary_tD;
  name_pass(op, stage.stage, PipelinePass::Kind::kForward);
  model_.forward(op, index_of(stage), batch, scale, saved, probe);
  if (op.measuring()) record_message(stage.stage + 1, saved.out_tD);
  name_pass(op, stage.stage, PipelinePass::Kind::kBackward);
  model_.backward(op, index_of(stage), batch, scale, saved, probe);
  if (op.measuring()) record_message(stage.stage - 1, saved.d_tD);
  if (!saved.deferred) return;
  name_pass(op, stage.stage, PipelinePass::Kind::kBackwardWeight);
  model_.backward_weights(op, index_of(stage), batch, saved);
}

void Executor::measure(const Context& op, const Batch& batch, SiteProbe* probe) {
  Arena one_buffer(op.target());
  const Tensor boundary_tD = boundary(one_buffer, batch);
  buffer_bytes_ = std::max(buffer_bytes_, one_buffer.peak());
  for (LocalStage& stage : stages_) {
    Arena arena(op.target()), deferred(op.target());
    mesh_.set_record(op.record);
    run_alone(op, stage, batch, probe, arena, deferred, boundary_tD);
    mesh_.set_record(nullptr);
    stage.slot_bytes = std::max(stage.slot_bytes, arena.peak());
    deferred_bytes_ = std::max(deferred_bytes_, deferred.peak());
    const ArenaScope scope(*op.arena);
    Context unrecorded = op;
    unrecorded.record = nullptr;
    if (model_.options().pairs_passes) {
      Arena scratch(op.target()), kept(op.target());
      Context paired = unrecorded;
      paired.arena = &scratch;
      StageSaved saved = make_saved(stage);
      saved.arena = &kept;
      saved.x_tD = saved.out_tD = boundary_tD;
      model_.forward(paired, index_of(stage), batch, {.per_token = 1.0, .per_sequence = 1.0}, saved);
      paired_bytes_ = std::max(paired_bytes_, scratch.peak());
    }
    model_.evaluate(unrecorded, batch, {}, {}, {}, index_of(stage), boundary(*op.arena, batch));
  }
}

std::size_t Executor::num_bytes() const {
  std::size_t sum = num_deferred_ * deferred_bytes_ + paired_bytes_;
  for (const LocalStage& stage : stages_) {
    sum += stage.num_slots * stage.slot_bytes + (stage.num_inputs + stage.num_outputs) * buffer_bytes_;
  }
  return sum;
}

void Executor::allocate() {
  receives_ = posted_receives(schedule_, mesh_.pp.rank());
  if (paired_bytes_ > 0) paired_arena_ = Arena(paired_bytes_, model_.options().device);
  for (std::size_t i = 0; i < num_deferred_; ++i) {
    deferred_.push_back(std::make_unique<Arena>(deferred_bytes_, model_.options().device));
    free_deferred_.push_back(deferred_.back().get());
  }
  for (LocalStage& stage : stages_) {
    for (std::size_t i = 0; i < stage.num_slots; ++i) {
      auto slot = std::make_unique<Slot>();
      slot->saved = make_saved(stage);
      if (has_slots()) {
        slot->arena = Arena(stage.slot_bytes, model_.options().device);
        slot->saved.arena = &slot->arena;
      }
      stage.slots.push_back(std::move(slot));
    }
    for (auto [buffers, number] : {std::pair(&stage.inputs, stage.num_inputs), {&stage.outputs, stage.num_outputs}}) {
      while (buffers->size() < number) {
        buffers->push_back(std::make_unique<Buffer>());
        buffers->back()->arena = Arena(buffer_bytes_, model_.options().device);
      }
    }
  }
}

void Executor::warm_up(const Context& op, const Batch& batch, SiteProbe* probe) {
  model_.set_warms_up(true);
  std::vector<Context> contexts = {op};
  if (model_.options().pairs_passes) contexts.push_back(beside_calls(op));
  for (const Context& context : contexts) {
    for (const LocalStage& stage : stages_) {
      Arena none;
      Arena& arena = stage.slots.front()->arena;
      Arena& deferred = deferred_.empty() ? none : *deferred_.front();
      Buffer& buffer = *(stage.inputs.empty() ? stage.outputs : stage.inputs).front();
      run_alone(context, stage, batch, probe, arena, deferred, boundary(buffer.arena, batch));
      buffer.arena.release_to(0);
      arena.release_to(0);
      deferred.release_to(0);
    }
  }
  model_.set_warms_up(false);
}

Work Executor::send(const Tensor& x_tD, int stage, std::string_view name) {
  const int to = rank_of(stage);
  return mesh_.pp.send(x_tD, to, tag_of(mesh_.pp.rank(), to), name);
}

Work Executor::receive(const Tensor& x_tD, int stage, std::string_view name) {
  const int from = rank_of(stage);
  return mesh_.pp.receive(x_tD, from, tag_of(from, mesh_.pp.rank()), name);
}

template <typename Memory>
Memory* Executor::find(const std::vector<std::unique_ptr<Memory>>& all, int micro_batch) {
  for (const auto& one : all) {
    if (one->micro_batch == micro_batch) return one.get();
  }
  return nullptr;
}

template <typename Memory>
Memory& Executor::take(std::vector<std::unique_ptr<Memory>>& all, int micro_batch) {
  const auto free = std::find_if(all.begin(), all.end(), [](const auto& one) { return one->micro_batch == -1; });
  TESSERA_CHECK(free != all.end(), "no memory for micro-batch {}", micro_batch);
  std::rotate(free, free + 1, all.end());
  Memory& taken = *all.back();
  taken.sent.wait();
  taken.arena.release_to(0);
  taken.micro_batch = micro_batch;
  return taken;
}

void Executor::post(const PipelineMessage& message, const Batch& batch) {
  LocalStage& stage = local(message.stage);
  Buffer& buffer = take(message.is_gradient ? stage.outputs : stage.inputs, message.micro_batch);
  buffer.x_tD = boundary(buffer.arena, batch);
  buffer.received = message.is_gradient ? receive(buffer.x_tD, message.stage + 1, "gradients")
                                        : receive(buffer.x_tD, message.stage - 1, "activations");
}

void Executor::execute(const Context& op, const PipelinePass& pass, const Batch& batch, const LossScale& scale,
                       PhaseClock& clock, SiteProbe* probe) {
  LocalStage& stage = local(pass.stage);
  Slot* slot = pass.kind == PipelinePass::Kind::kForward ? &take(stage.slots, pass.micro_batch)
                                                         : find(stage.slots, pass.micro_batch);
  TESSERA_CHECK(slot != nullptr, "{}", describe(pass));
  Buffer* const input = find(stage.inputs, pass.micro_batch);
  StageSaved& saved = slot->saved;
  const bool is_first = pass.stage == 0;
  clock.begin();
  name_pass(op, pass.stage, pass.kind);
  switch (pass.kind) {
    case PipelinePass::Kind::kForward: {
      if (!is_first && is_local(pass.stage - 1)) {
        saved.x_tD =
            find(local(pass.stage - 1).slots, pass.micro_batch)->saved.out_tD;  // which stays until its backward
      }
      TESSERA_CHECK(input != nullptr || is_first || is_local(pass.stage - 1), "{}", describe(pass));
      if (input != nullptr) {
        input->received.wait();
        saved.x_tD = input->x_tD;
      }
      Buffer* const output = saved.sends_output ? &take(stage.outputs, pass.micro_batch) : nullptr;
      if (output != nullptr) saved.out_tD = boundary(output->arena, batch);
      model_.forward(op, index_of(stage), batch, scale, saved, probe);
      if (output != nullptr) {
        output->sent = send(saved.out_tD, pass.stage + 1, "activations");
        output->micro_batch = -1;
      }
      clock.end(&PhaseSeconds::forward);
      return;
    }
    case PipelinePass::Kind::kBackward:
    case PipelinePass::Kind::kBackwardInput: {
      const bool is_last = pass.stage + 1 == schedule_.num_stages();
      Buffer* const gradient = is_last ? nullptr : find(stage.outputs, pass.micro_batch);
      TESSERA_CHECK(gradient != nullptr || is_last, "{}", describe(pass));
      if (gradient != nullptr) {
        gradient->received.wait();
        saved.d_tD = gradient->x_tD;
      }
      if (saved.deferred) {
        TESSERA_CHECK(!free_deferred_.empty(), "{}", describe(pass));
        slot->deferred = free_deferred_.back();
        free_deferred_.pop_back();
        saved.deferred->set_arena(slot->deferred);
      }
      model_.backward(op, index_of(stage), batch, scale, saved, probe);
      if (!is_first && is_local(pass.stage - 1)) {
        Buffer& next = take(local(pass.stage - 1).outputs, pass.micro_batch);
        next.x_tD = boundary(next.arena, batch);
        copy(op, saved.d_tD, next.x_tD);
      } else if (!is_first) {
        model_.turns().wait_for_other();  // messages go in the schedule's order: the paired forward's first
        (gradient != nullptr ? gradient->sent : slot->sent) = send(saved.d_tD, pass.stage - 1, "gradients");
      }
      if (gradient != nullptr) gradient->micro_batch = -1;
      if (pass.kind == PipelinePass::Kind::kBackward && saved.deferred) {
        model_.backward_weights(op, index_of(stage), batch, saved);
      }
      break;
    }
    case PipelinePass::Kind::kBackwardWeight:
      model_.backward_weights(op, index_of(stage), batch, saved);
      break;
  }
  clock.end(&PhaseSeconds::backward);
  if (!frees_activations(pass)) return;
  slot->micro_batch = -1;
  if (input != nullptr) input->micro_batch = -1;
  if (slot->deferred != nullptr) {
    slot->deferred->release_to(0);
    free_deferred_.push_back(std::exchange(slot->deferred, nullptr));
  }
  mesh_.tokens.mark_gpu();  // shows progress while no message is sent
}

Context Executor::beside_calls(const Context& op) const {
  Context beside = op;
  if (op.cuda != nullptr) beside.cuda = &op.cuda->leaving(model_.num_sms_of_calls());
  return beside;
}

void Executor::execute_pair(const Context& op, const PipelineAction& action, std::span<const Batch> micro_batches,
                            const LossScale& scale, PhaseClock& clock) {
  const auto run = [&](const Context& own_op, const PipelinePass& pass) {
    execute(own_op, pass, micro_batches[static_cast<std::size_t>(pass.micro_batch)], scale, clock, nullptr);
  };
  using Row = TraceRecorder::Row;
  const auto set_row = [&](Row row) {
    if (op.trace != nullptr) op.trace->set_row(row);
  };
  const Context backward_op = beside_calls(op);
  Context forward_op = backward_op;
  forward_op.arena = &paired_arena_;
  model_.turns().run(
      [&] { run(forward_op, action.pass); },
      [&] {
        if (op.cuda != nullptr) op.cuda->use_device();  // this is another thread
        set_row(Row::kSecondPass);
        run(backward_op, *action.overlapped);
      },
      {.pause = [&](int pass) { clock.end(pass == 0 ? &PhaseSeconds::forward : &PhaseSeconds::backward); },
       .resume =
           [&](int pass) {
             set_row(pass == 0 ? Row::kHost : Row::kSecondPass);
             clock.begin();
           }});
  set_row(Row::kHost);
}

void Executor::run(const Context& op, std::span<const Batch> micro_batches, const LossScale& scale, PhaseClock& clock,
                   SiteProbe* probe, std::size_t num_probed) {
  TESSERA_CHECK(static_cast<int>(micro_batches.size()) == schedule_.num_micro_batches, "{} micro-batches, {} scheduled",
                micro_batches.size(), schedule_.num_micro_batches);
  const std::vector<PipelineAction>& actions = schedule_.actions[static_cast<std::size_t>(mesh_.pp.rank())];
  const auto batch_of = [&](int micro_batch) -> const Batch& {
    return micro_batches[static_cast<std::size_t>(micro_batch)];
  };
  const ArenaScope scope(*op.arena);
  const std::size_t empty = op.arena->used();
  for (std::size_t i = 0; i < actions.size(); ++i) {
    for (const PipelineMessage& message : receives_[i]) post(message, batch_of(message.micro_batch));
    const auto is_probed = [&](const PipelinePass& pass) {
      return probe != nullptr && pass.micro_batch < static_cast<int>(num_probed);
    };
    // With a probe, passes run one after the other.
    if (model_.options().pairs_passes && actions[i].overlapped && !is_probed(actions[i].pass) &&
        !is_probed(*actions[i].overlapped)) {
      execute_pair(op, actions[i], micro_batches, scale, clock);
      continue;
    }
    for_each_pass(actions[i], [&](const PipelinePass& pass) {
      execute(op, pass, batch_of(pass.micro_batch), scale, clock, is_probed(pass) ? probe : nullptr);
      if (!has_slots() && frees_activations(pass)) op.arena->release_to(empty);
    });
  }
  for (LocalStage& stage : stages_) {
    for (const auto& slot : stage.slots) slot->sent.wait();
    for (const auto& output : stage.outputs) output->sent.wait();
  }
}

LossSums Executor::evaluate(const Context& op, const Batch& batch, const BlockObserver& observer) {
  LossSums sums;
  const ArenaScope scope(*op.arena);
  const Tensor x_tD = boundary(*op.arena, batch);
  for (LocalStage& stage : stages_) {
    const int s = stage.stage;
    if (s > 0 && !is_local(s - 1)) receive(x_tD, s - 1, "activations").wait();
    const LossSums part = model_.evaluate(op, batch, observer, {}, {}, index_of(stage), x_tD);
    sums.main += part.main;
    sums.mtp += part.mtp;
    if (s + 1 < schedule_.num_stages() && !is_local(s + 1)) send(x_tD, s + 1, "activations").wait();
  }
  return sums;
}

}  // namespace tessera
