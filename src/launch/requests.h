// Requests of operators to a running launcher. `tessera undrain` creates the file launch_requests/NODE.undrain in the
// run's folder, and the launcher deletes it when it takes the request. Anyone who may write to that folder may ask.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// Receives the requests on the launcher's side.
class RequestInbox {
 public:
  /// Creates launch_requests in `dump_folder` and looks into it every second. It does that in a separate thread,
  /// because the storage may hang.
  explicit RequestInbox(const std::filesystem::path& dump_folder);
  ~RequestInbox();
  RequestInbox(const RequestInbox&) = delete;
  RequestInbox& operator=(const RequestInbox&) = delete;

  /// Returns the nodes that were requested since the last call. The names are file names, so they may be any text.
  std::vector<std::string> take_undrained();

 private:
  struct State;  // shared with the thread, which stays behind if the storage hangs
  std::shared_ptr<State> state_;
};

/// Asks the launcher of the run in `dump_folder` to use these drained nodes again, and waits until it has taken the
/// requests. Throws Error if no launcher runs there, or if a node is unknown or not drained. Also throws it if the
/// launcher does not answer within `patience` seconds, and then withdraws the requests.
void request_undrain(const std::filesystem::path& dump_folder, const std::vector<std::string>& nodes, double patience);

}  // namespace tessera
