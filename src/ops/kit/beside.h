// Runs operators at the same time as others.
//
//   Beside beside(op, num_sms);
//   some(beside.op(), ...);  // runs after everything that op got before
//   others(op, ...);         // run at the same time
//   beside.join();           // what op gets from here on runs after both
//
// Neither side may read or overwrite what the other side writes. Until join(), the arena releases nothing. On a CPU,
// each operator runs when it is called.
#pragma once

#include <optional>

#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"

namespace tessera {

class Beside {
 public:
  /// num_sms is the number of the GPU's SMs that the other operators need for themselves. If it is 0, nothing runs at
  /// the same time.
  Beside(const Context& op, int num_sms);

  const Context& op() const { return beside_; }
  void join();

 private:
  Context main_, beside_;
  std::optional<ArenaHold> hold_;
};

}  // namespace tessera
