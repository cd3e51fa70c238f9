#include "parallel/pipeline_messages.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"

namespace tessera {
namespace {

using Pass = PipelinePass::Kind;

/// Follows a rank's program, and posts receives.
class Receiver {
 public:
  Receiver(const PipelineSchedule& schedule, int rank) : schedule_(schedule), rank_(rank), held_(most_held(schedule)) {
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      if (rank_of(stage) != rank) continue;
      num_gradient_buffers_[stage] = num_gradient_buffers(schedule, stage, held_[static_cast<std::size_t>(stage)]);
    }
    for (int from = 0; from < schedule.num_ranks; ++from) {
      if (from != rank) connections_[from].messages = messages_between(schedule, from, rank);
    }
  }

  /// Posts what the pass needs, and what comes before it. Returns whether it could.
  bool post(const PipelinePass& pass) {
    const bool is_forward = pass.kind == Pass::kForward;
    if (!is_forward && !computes_input_gradient(pass)) return true;
    const int source = is_forward ? pass.stage - 1 : pass.stage + 1;
    if (source < 0 || source == schedule_.num_stages() || rank_of(source) == rank_) return true;
    // A stage takes micro-batches in order, so the number of its posts tells which they were.
    const int& num_posted = num_posted_[{!is_forward, pass.stage}];
    while (num_posted <= pass.micro_batch) {
      if (!post_next(connections_.at(rank_of(source)))) return false;
    }
    return true;
  }

  /// Posts the gradients that come next.
  void post_gradients() {
    for (auto& [from, connection] : connections_) {
      while (!connection.is_done() && connection.next()->is_gradient && post_next(connection)) continue;
    }
  }

  void execute(const PipelinePass& pass) {
    if (pass.kind == Pass::kForward) ++num_forwards_[pass.stage];
    if (computes_input_gradient(pass)) --num_gradients_[pass.stage];
    if (frees_activations(pass)) --num_inputs_[pass.stage];
  }

  std::vector<PipelineMessage> take() { return std::exchange(posted_, {}); }

 private:
  struct Connection {
    std::vector<PipelineMessage> messages;
    std::ptrdiff_t num_posted = 0;

    std::vector<PipelineMessage>::iterator next() { return messages.begin() + num_posted; }
    bool is_done() { return next() == messages.end(); }
  };

  int rank_of(int stage) const { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; }

  bool post_next(Connection& connection) {
    if (connection.is_done()) return false;
    const PipelineMessage& message = *connection.next();
    if (message.is_gradient) {
      int& num_gradients = num_gradients_[message.stage];
      if (message.micro_batch >= num_forwards_[message.stage]) return false;
      if (num_gradients == num_gradient_buffers_[message.stage]) return false;
      ++num_gradients;
    } else {
      int& num_inputs = num_inputs_[message.stage];
      if (num_inputs == num_input_buffers(held_[static_cast<std::size_t>(message.stage)])) return false;
      ++num_inputs;
    }
    posted_.push_back(message);
    ++num_posted_[{message.is_gradient, message.stage}];
    ++connection.num_posted;
    return true;
  }

  const PipelineSchedule& schedule_;
  int rank_;
  std::vector<int> held_;
  std::map<int, Connection> connections_;           // by the rank that sends
  std::map<int, int> num_inputs_, num_gradients_;   // buffers in use, by stage
  std::map<int, int> num_gradient_buffers_;         // by stage
  std::map<int, int> num_forwards_;                 // that have run, by stage
  std::map<std::pair<bool, int>, int> num_posted_;  // by kind (gradients: true) and stage
  std::vector<PipelineMessage> posted_;
};

}  // namespace

int num_output_buffers(const PipelineSchedule& schedule, int stage, int held) {
  if (stage + 1 == schedule.num_stages()) return 0;
  const int rank = schedule.rank_of_stage[static_cast<std::size_t>(stage)];
  if (schedule.rank_of_stage[static_cast<std::size_t>(stage) + 1] == rank) {
    // Gradients wait here for their backward, and one for the end of its send.
    int num_waiting = 0, most = 0;
    for (const PipelineAction& action : schedule.actions[static_cast<std::size_t>(rank)]) {
      for_each_pass(action, [&](const PipelinePass& pass) {
        if (!computes_input_gradient(pass)) return;
        if (pass.stage == stage + 1) most = std::max(most, ++num_waiting);
        if (pass.stage == stage) --num_waiting;
      });
    }
    return most + 1;
  }
  // Interleaved stages wait long until some outputs are received. For others two outputs and two gradients are enough:
  // with more, no rank would wait less (the test runs both).
  return schedule.kind == PipelineScheduleKind::kInterleaved1F1B ? held : std::min(held, 4);
}

int num_gradient_buffers(const PipelineSchedule& schedule, int stage, int held) {
  return held > num_output_buffers(schedule, stage, held) ? 2 : held;
}

std::vector<PipelineMessage> messages_between(const PipelineSchedule& schedule, int from, int to) {
  std::vector<PipelineMessage> messages;
  const auto is_at = [&](int stage) {
    return 0 <= stage && stage < schedule.num_stages() && schedule.rank_of_stage[static_cast<std::size_t>(stage)] == to;
  };
  for (const PipelineAction& action : schedule.actions[static_cast<std::size_t>(from)]) {
    for_each_pass(action, [&](const PipelinePass& pass) {
      if (pass.kind == Pass::kForward && is_at(pass.stage + 1)) {
        messages.push_back({.is_gradient = false, .stage = pass.stage + 1, .micro_batch = pass.micro_batch});
      }
      if (computes_input_gradient(pass) && is_at(pass.stage - 1)) {
        messages.push_back({.is_gradient = true, .stage = pass.stage - 1, .micro_batch = pass.micro_batch});
      }
    });
  }
  return messages;
}

std::vector<std::vector<PipelineMessage>> posted_receives(const PipelineSchedule& schedule, int rank) {
  Receiver receiver(schedule, rank);
  const std::vector<PipelineAction>& actions = schedule.actions[static_cast<std::size_t>(rank)];
  std::vector<std::vector<PipelineMessage>> posted;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    for_each_pass(actions[i], [&](const PipelinePass& pass) {
      TESSERA_CHECK(receiver.post(pass), "{}: its message cannot be received in order", describe(pass));
    });
    receiver.post_gradients();
    if (i + 1 < actions.size()) for_each_pass(actions[i + 1], [&](const PipelinePass& pass) { receiver.post(pass); });
    posted.push_back(receiver.take());
    for_each_pass(actions[i], [&](const PipelinePass& pass) { receiver.execute(pass); });
  }
  return posted;
}

}  // namespace tessera
