#include "ops/kit/call_stream.h"

namespace tessera {

CallStream::CallStream(const Context& op, int num_sms, bool forks) : beside_(op), call_(op) {
  if (op.target() != Device::kCuda || !forks) return;
  if (num_sms > 0) hold_.emplace(*op.arena);
  beside_.is_beside = num_sms > 0;
  if (op.measuring() || &op.cuda->calls() == op.cuda) return;
  main_ = &op.cuda->stream();
  before_.record(*main_);
  call_.cuda = &op.cuda->calls();
  if (num_sms == 0) return;
  beside_.cuda = &op.cuda->beside(num_sms);
  beside_.cuda->stream().wait(before_);
}

const Context& CallStream::begin(bool goes_on) {
  if (main_ == nullptr) return call_;
  // Recorded here, and not in join(): another pass may put operators on the same stream in between.
  if (beside_.is_beside) beside_done_.record(beside_.cuda->stream());
  if (!goes_on) call_.cuda->stream().wait(before_);
  return call_;
}

void CallStream::join() {
  hold_.reset();
  if (main_ == nullptr) return;
  const cuda::Stream& call = call_.cuda->stream();
  if (beside_.is_beside) call.wait(beside_done_);
  cuda::Fence end;
  end.record(call);
  main_->wait(end);
}

}  // namespace tessera
