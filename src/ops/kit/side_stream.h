// A second stream, for operators that run at the same time as others.
#pragma once

#include <optional>

#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"

namespace tessera {

/// Runs operators beside those of the main stream.
///
///   SideStream side(op, num_sms);
///   some(side.op(), ...);  // follows all that ran on `op` before
///   others(op, ...);       // runs at the same time
///   side.join();           // what runs on `op` from here on follows both
///
/// Neither may read or overwrite what the other writes. Until join(), the arena takes no memory back. On a CPU, each
/// operator runs when it is called.
class SideStream {
 public:
  /// `num_sms` is the number of SMs that the main stream's operators keep for themselves. With 0, the operators of
  /// both streams run one after the other.
  SideStream(const Context& op, int num_sms);

  /// Returns the context of the operators that run on the side.
  const Context& op() const { return side_; }
  /// Makes the main stream wait for the side.
  void join();

 private:
  Context main_, side_;
  std::optional<ArenaHold> hold_;
};

}  // namespace tessera
