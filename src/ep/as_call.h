// What all calls of a dispatcher and of its exchange have in common.
#pragma once

#include "ep/turns.h"
#include "ops/kit/call_stream.h"

namespace tessera::ep {

/// Runs body(call) as a call, with the calls' context. `turns` may be null. If `forks` is false, the call runs on `op`.
/// Gives its scratch memory back.
template <typename Body>
void as_call(Turns* turns, const Context& op, bool forks, Body&& body) {
  const Turns::Call turn(turns);
  CallStream stream(op, /*num_sms=*/0, forks);
  {
    const ArenaScope scope(*op.arena);
    body(stream.begin());
  }
  stream.join();
}

}  // namespace tessera::ep
