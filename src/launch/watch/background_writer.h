// Files that a process replaces now and then, and for which it must not wait: the storage may hang.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace tessera {

class BackgroundWriter {
 public:
  BackgroundWriter();
  /// Waits for what is to be written, but not longer than 2 s.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// The file will hold `text`, or what it is given after this. A failure is warned of.
  void write(const std::filesystem::path& path, std::string text);

 private:
  struct State;  // shared with the thread, which stays behind if the storage hangs
  std::shared_ptr<State> state_;
};

}  // namespace tessera
