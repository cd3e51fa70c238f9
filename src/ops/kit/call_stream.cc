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

const Context& CallStream::begin() {
  if (main_ != nullptr) call_.cuda->stream().wait(before_);
  return call_;
}

void CallStream::join() {
  if (main_ != nullptr) {
    for (const cuda::Stream* stream : {&call_.cuda->stream(), &beside_.cuda->stream()}) {
      if (stream == main_) continue;  // nothing ran beside
      cuda::Fence end;
      end.record(*stream);
      main_->wait(end);
    }
  }
  hold_.reset();
}

}  // namespace tessera
