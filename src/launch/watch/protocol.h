// The messages between a launcher and the monitors of its nodes.
//
//   from a monitor: {"say": "hello", "version": "0.1.0+6a74773", "health": null}
//                   {"say": "beat", "attempt": 3, "ranks": [...],              several times a second
//                    "health": {"is_bad": true, "reason": "[node_problem] gpuXid: GPU 3: ...",   of its health daemon
//                               "active_check": 1764000000.0}}   when the last one passed
//                   {"say": "evidence", "attempt": 3, "processes": [2, ...]}   ProcessState of each rank, and its file
//                   {"say": "ended", "attempt": 3, "left": [4712]}             processes that could not be ended
//                   {"say": "quit"}                  the last one
//   from the launcher: {"do": "watch", "attempt": 3}    and again as the answer to each beat
//                      {"do": "gather", "attempt": 3}   send the evidence
//                      {"do": "end", "attempt": 3}      end the ranks of this attempt and of all before
//                      {"do": "quit", "attempt": 3}     end all ranks, delete the node folder, and end
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "comm/observe/rank_file.h"
#include "launch/watch/run_watch.h"

namespace tessera {

inline constexpr std::chrono::milliseconds kBetweenBeats{250};

/// The environment variable by which a monitor finds the processes of an attempt: "<run id>:<attempt>".
inline constexpr const char* kAttemptVariable = "TESSERA_ATTEMPT";

RankReport report_of(const RankState& state);
nlohmann::json to_json(const RankReport& report);
/// Reads what to_json() makes. Throws Error for other JSON.
RankReport report_from_json(const nlohmann::json& json);

}  // namespace tessera
