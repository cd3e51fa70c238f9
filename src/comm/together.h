// Tasks that each rank does for itself but that must succeed or fail on all ranks together, such as reading or writing
// a file.
#pragma once

#include <functional>
#include <future>
#include <limits>
#include <string>
#include <string_view>

#include "comm/process_group.h"

namespace tessera {

/// Returns, on all ranks, the text of the first rank that has one. Returns "" if none has. `name` says what the text is
/// about.
std::string broadcast_first_text(ProcessGroup& group, const std::string& text, std::string_view name);

/// Calls `body`, which must not communicate, on all ranks of the group, and returns when all have succeeded. If it
/// throws Error on some ranks, all ranks throw the Error of the first of these, with its rank. Another exception leaves
/// on its rank alone, and the others wait until that rank ends the run. `name` says what is done.
void run_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body);

/// Waits until the tasks of all ranks have ended. A rank may have no task. Returns false on all ranks if that takes
/// longer than `seconds`.
bool wait_together(ProcessGroup& group, std::string_view name, const std::future<void>& task,
                   double seconds = std::numeric_limits<double>::infinity());

/// Does what run_together does, but calls `body` in another thread. Use it if `body` may take longer than the timeout
/// of waits between ranks, such as reading and checking large files. `body` must not use a GPU.
void run_long_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body);

/// Calls step() on every rank until it returns false, and throws Error as run_together does. The ranks vote every
/// second whether any of them goes on. If one has failed, all stop. So none waits for another longer than the timeout,
/// unless one step() takes that long. `step` must not communicate. It may use a GPU.
void run_steps_together(ProcessGroup& group, std::string_view name, const std::function<bool()>& step);

}  // namespace tessera
