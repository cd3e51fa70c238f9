// The messages between the ranks of a pipeline: in which order they are sent, and when each receive is posted.
//
// A rank sends activations and gradients of several stages to the same rank. If each of these had a connection of its
// own, a rank in the middle of a V would have eight, and the GPU's driver has too few queues for their streams. So
// there is one connection from a rank to another, and its messages are received in the order in which they are sent.
//
// No rank may then wait for ever, even where a send ends only after its receive was posted. A receive is posted as soon
// as all receives before it on its connection are and its memory is free:
// - a gradient goes to one of the buffers that the stage's outputs and their gradients share, and the stage's forward
//   must have run;
// - an activation goes to one of the stage's input buffers. There is one more of them than the stage holds
//   micro-batches: the gradient after which a micro-batch frees its buffer may come behind the next micro-batch's
//   activation on the same connection. The post does not wait for other memory of a micro-batch, whose messages may
//   not have arrived yet. If it did, two ranks of DualPipeV would wait for each other.
// The messages that an action needs are posted one action ahead, and with them what comes before them on their
// connection. Other activations wait, so that they take no buffer for long.
// tests/parallel/pipeline_messages_test.cc runs the posts of all kinds of schedules.
#pragma once

#include "parallel/pipeline_schedule.h"

namespace tessera {

/// Describes a message to a stage. It has the input of a forward, or the gradient of the stage's output.
struct PipelineMessage {
  bool is_gradient = false;
  int stage = 0;  // the one that receives it
  int micro_batch = 0;

  friend bool operator==(const PipelineMessage&, const PipelineMessage&) = default;
};

/// Returns the messages from one rank to another, in the order in which `from` sends them.
std::vector<PipelineMessage> messages_between(const PipelineSchedule& schedule, int from, int to);

/// Returns the number of a stage's buffers for inputs from another rank. It holds `held` micro-batches (most_held).
inline int num_input_buffers(int held) { return held + 1; }

/// Returns the number of buffers for outputs and for their gradients, of a stage that holds `held` micro-batches. An
/// output leaves its buffer when it has arrived. It has none if the next stage is on the same rank, where it stays with
/// its micro-batch. The number is 0 for the last stage.
int num_output_buffers(const PipelineSchedule& schedule, int stage, int held);
/// Returns how many of these may have gradients from another rank at once, from the post of the receive to the end of
/// the backward.
int num_gradient_buffers(const PipelineSchedule& schedule, int stage, int held);

/// Returns, for each of a rank's actions, the messages whose receives are posted before it.
std::vector<std::vector<PipelineMessage>> posted_receives(const PipelineSchedule& schedule, int rank);

}  // namespace tessera
