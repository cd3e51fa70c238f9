// Writes files that a process replaces now and then. The process never waits for them, because the storage may hang.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace tessera {

class BackgroundWriter {
 public:
  BackgroundWriter();
  /// Waits for pending writes, but at most 2 s.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  /// Makes the file hold `text`, unless a later call replaces it first. If writing fails, it logs a warning.
  void write(const std::filesystem::path& path, std::string text);

 private:
  struct State;  // shared with the thread, which stays behind if the storage hangs
  std::shared_ptr<State> state_;
};

}  // namespace tessera
