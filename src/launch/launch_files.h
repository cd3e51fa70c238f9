// Names of the files that a launcher leaves in a run's folder.
#pragma once

namespace tessera {

inline constexpr const char* kLaunchStateName = "launch.json";  // what the launcher does (launch/launch_state.h)
inline constexpr const char* kLauncherLossName = "launcher-lost.json";  // from `tessera watch` (launch/launch_state.h)
inline constexpr const char* kLaunchLockName = "launch.lock";           // locked while a launcher runs
inline constexpr const char* kIncidentsFolderName = "incidents";        // holds N.json (launch/incident.h)
inline constexpr const char* kRequestsFolderName = "launch_requests";   // requests of operators (launch/requests.h)

}  // namespace tessera
