#include "ops/kit/beside.h"

namespace tessera {
namespace {

/// Makes later work on the second context's stream wait for all earlier work on the first one's.
void order(const Context& first, const Context& second) {
  cuda::Fence fence;
  fence.record(first.cuda->stream());
  second.cuda->stream().wait(fence);
}

}  // namespace

Beside::Beside(const Context& op, int num_sms) : main_(op), beside_(op) {
  if (num_sms == 0 || op.target() != Device::kCuda) return;
  hold_.emplace(*op.arena);
  if (op.measuring()) return;
  beside_.cuda = &op.cuda->beside(num_sms);
  order(main_, beside_);
}

void Beside::join() {
  if (beside_.cuda != main_.cuda) order(beside_, main_);
  hold_.reset();
}

}  // namespace tessera
