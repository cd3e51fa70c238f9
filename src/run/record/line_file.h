// A file of lines that a run writes as it goes, such as metrics.jsonl.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Appends lines to a file. If storage fails for a while, it keeps them until they can be written.
class LineFile {
 public:
  /// Opens the file, or creates it. Throws Error if it cannot.
  explicit LineFile(std::filesystem::path path);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Throws Error if the file was deleted, if too many lines wait, or if writing fails for another reason than storage.
  void append(const std::string& line);

 private:
  std::filesystem::path path_;
  int descriptor_;
  std::string unwritten_;            // lines that storage has not taken yet
  bool storage_has_failed_ = false;  // a warning says so
};

}  // namespace tessera
