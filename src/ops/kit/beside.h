// Operators that run at the same time as others.
//
//   Beside beside(op, num_sms);
//   some(beside.op(), ...);  // behind all that op was given before
//   others(op, ...);         // at the same time
//   beside.join();           // what op is given from here on is behind both
//
// So neither may read or overwrite what the other writes. In between the arena gives nothing back. On a CPU each runs
// when it is called.
#pragma once

#include <optional>

#include "ops/runtime/context.h"
#include "ops/runtime/runtime.h"

namespace tessera {

class Beside {
 public:
  /// num_sms: of the GPU's, those that the others want for themselves; 0: they run one after the other.
  Beside(const Context& op, int num_sms);

  const Context& op() const { return beside_; }
  void join();

 private:
  Context main_, beside_;
  std::optional<ArenaHold> hold_;
};

}  // namespace tessera
