// The exit statuses of the program, its ranks and its launcher: how a process says to whoever started it what is to be
// done next. The same table is in docs/resilience.md.
#pragma once

namespace tessera {

enum class ExitStatus : int {
  kDone = 0,
  kProgramError = 1,    // an error of the program or of the machine
  kWrongInput = 2,      // what was given cannot work, and a restart does not help
  kRankFailed = 70,     // another rank has died or did not come: restart
  kNonFinite = 71,      // a step is not finite, also when it was made again: other hardware
  kWeightsDiffer = 72,  // weights that ranks share differ: roll back to the copy that was verified
  kTakenOver = 73,      // a later attempt of the run has taken over: never restart this one
  kStorageFailed = 74,  // storage is full or failed: restart
  kRequeue = 75,        // the launcher asks the scheduler to requeue the job
  kHold = 93,           // the launcher has stopped, with a report, and the job is held
  kSignal = 128,        // plus the signal's number: ended as a signal asked
};

}  // namespace tessera
