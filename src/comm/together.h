// What the ranks of a group do each for itself, but must succeed in or fail in together: reading a file, writing one.
#pragma once

#include <functional>
#include <future>
#include <limits>
#include <string>
#include <string_view>

#include "comm/process_group.h"

namespace tessera {

/// The text of the group's first rank that has one, on all ranks; empty if none has. `name` says what it is about.
std::string first_text(ProcessGroup& group, const std::string& text, std::string_view name);

/// Calls `body`, which communicates with nobody, on all ranks of the group. Returns when all have succeeded; if it
/// threw Error on some, throws the Error of the first of these, with its rank, on all. `name` says what is done.
void run_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body);

/// Waits until the tasks of all ranks have ended; a rank may have none. False, on all ranks, if that takes longer than
/// so many seconds.
bool wait_together(ProcessGroup& group, std::string_view name, const std::future<void>& task,
                   double seconds = std::numeric_limits<double>::infinity());

/// The same as run_together, for a body that may take longer than ranks wait for each other (reading and checking large
/// files) and that does nothing on a GPU. It runs in another thread.
void run_long_together(ProcessGroup& group, std::string_view name, const std::function<void()>& body);

}  // namespace tessera
