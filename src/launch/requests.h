// What operators ask of a running launcher: `tessera undrain` creates the file launch_requests/NODE.undrain in the
// run's folder, and the launcher deletes it when it takes the request. Whoever may write to that folder may ask.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// The launcher's side.
class RequestInbox {
 public:
  /// Creates launch_requests in `dump_folder` and looks into it every second. That is done on a thread of its own: the
  /// storage may hang.
  explicit RequestInbox(const std::filesystem::path& dump_folder);
  ~RequestInbox();
  RequestInbox(const RequestInbox&) = delete;
  RequestInbox& operator=(const RequestInbox&) = delete;

  /// Names of the nodes that were asked for since the last call. They come from file names: anything may be there.
  std::vector<std::string> take_undrained();

 private:
  struct State;  // shared with the thread, which stays behind if the storage hangs
  std::shared_ptr<State> state_;
};

/// Asks the launcher of the run in `dump_folder` to use these drained nodes again, and waits until it has taken the
/// requests. Throws Error if no launcher runs there, if a node is unknown or not drained, or if the launcher does not
/// answer within `patience` seconds; then the requests are withdrawn.
void request_undrain(const std::filesystem::path& dump_folder, const std::vector<std::string>& nodes, double patience);

}  // namespace tessera
