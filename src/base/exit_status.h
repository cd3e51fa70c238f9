// The exit statuses of the program, its ranks and its launcher. A status tells whoever started the process what to do
// next. docs/resilience.md has the same table.
#pragma once

namespace tessera {

/// Says why a process ended.
enum class ExitStatus : int {
  kDone = 0,
  kProgramError = 1,    // the program or the machine failed
  kWrongInput = 2,      // the input cannot work, and a restart does not help
  kRankFailed = 70,     // another rank died or did not arrive: restart
  kNonFinite = 71,      // a step is not finite, even after it was repeated: use other hardware
  kWeightsDiffer = 72,  // weights that ranks share differ: roll back to the copy that was verified
  kTakenOver = 73,      // a later attempt of the run has taken over: never restart this one
  kStorageFailed = 74,  // storage is full or failed: restart
  kRequeue = 75,        // the launcher asks the scheduler to requeue the job
  kLossSpike = 76,      // a step's loss is a spike, even after it was repeated: hardware is not at fault
  kHold = 93,           // the launcher has stopped with a report, and the job is held
  kSignal = 128,        // plus the signal's number: that signal ended the process, or asked it to end
};

}  // namespace tessera
