// What all calls of a dispatcher and of its exchange have in common.
#pragma once

#include "ep/turns.h"
#include "ops/kit/call_stream.h"

namespace tessera::ep {

/// Runs body(call) as one call of a dispatcher or of its exchange. `call` is the context of the calls' stream, or `op`
/// if `forks` is false. The call takes its turn (ep/turns.h) if `turns` is not null. At its end, its scratch memory is
/// released.
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
