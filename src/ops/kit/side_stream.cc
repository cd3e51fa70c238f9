#include "ops/kit/side_stream.h"

namespace tessera {
namespace {

/// Makes later work on the second context's stream wait for all earlier work on the first one's.
void order(const Context& first, const Context& second) {
  cuda::Fence fence;
  fence.record(first.cuda->stream());
  second.cuda->stream().wait(fence);
}

}  // namespace

SideStream::SideStream(const Context& op, int num_sms) : main_(op), side_(op) {
  if (num_sms == 0 || op.target() != Device::kCuda) return;
  hold_.emplace(*op.arena);
  side_.is_beside = true;
  if (op.measuring()) return;
  side_.cuda = &op.cuda->beside(num_sms);
  order(main_, side_);
}

void SideStream::join() {
  if (side_.cuda != main_.cuda) order(side_, main_);
  hold_.reset();
}

}  // namespace tessera
