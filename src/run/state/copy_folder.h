// The files of a run's copies in memory on a node:
//   <node folder>/memory/<run id>/attempt-<attempt>/rank-<owner's rank>.<0 or 1>
// The ranks of a node share the folder, so files of other ranks may come and go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include "run/record/run_folder.h"

namespace tessera {

class CopyFolder {
 public:
  /// `node_folder` is job.node_folder. `run` is the run and the attempt of this process.
  CopyFolder(const std::filesystem::path& node_folder, RunIdentity run)
      : folder_(node_folder / "memory" / run.id), run_(std::move(run)) {}

  /// Returns the folder of an attempt. It need not exist.
  std::filesystem::path of_attempt(std::int64_t attempt) const;
  std::filesystem::path path_of(std::int64_t attempt, std::int64_t owner, std::int64_t slot) const;
  /// Returns the numbers of the attempts that have a folder.
  std::vector<std::int64_t> attempts() const;
  /// Returns the paths of an attempt's files, sorted.
  std::vector<std::filesystem::path> files_of(std::int64_t attempt) const;
  /// Returns the size of all attempts' files.
  std::size_t num_bytes() const;
  /// Throws Error, which ends the program with ExitStatus::kTakenOver, if a later attempt has a folder.
  void require_no_later_attempt() const;
  /// Deletes the files of earlier attempts except `kept`, and their folders if nothing is left in them.
  void delete_earlier_attempts(const std::set<std::filesystem::path>& kept) const;
  /// Deletes the folders of this attempt and of the run if other ranks have left nothing in them.
  void remove_if_empty() const;

 private:
  std::filesystem::path folder_;
  RunIdentity run_;
};

}  // namespace tessera
