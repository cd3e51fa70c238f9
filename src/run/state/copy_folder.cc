#include "run/state/copy_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/parse_number.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAttemptPrefix = "attempt-";
constexpr std::string_view kFilePrefix = "rank-";

/// Returns the names of a folder's entries, sorted; none if there is no such folder. Throws Error if it cannot be read:
/// a later attempt, or copies, may be there.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : entries_of(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

}  // namespace

fs::path CopyFolder::of_attempt(std::int64_t attempt) const {
  return folder_ / fmt::format("{}{}", kAttemptPrefix, attempt);
}

fs::path CopyFolder::path_of(std::int64_t attempt, std::int64_t owner, std::int64_t slot) const {
  return of_attempt(attempt) / fmt::format("{}{}.{}", kFilePrefix, owner, slot);
}

std::vector<std::int64_t> CopyFolder::attempts() const {
  std::vector<std::int64_t> found;
  for (const std::string& name : names_in(folder_)) {
    if (!name.starts_with(kAttemptPrefix)) continue;
    const auto attempt = parse_number<std::int64_t>(std::string_view(name).substr(kAttemptPrefix.size()));
    if (attempt) found.push_back(*attempt);
  }
  return found;
}

std::vector<fs::path> CopyFolder::files_of(std::int64_t attempt) const {
  const fs::path folder = of_attempt(attempt);
  std::vector<fs::path> files;
  for (const std::string& name : names_in(folder)) files.push_back(folder / name);
  return files;
}

std::size_t CopyFolder::num_bytes() const {
  std::size_t sum = 0;
  for (const std::int64_t attempt : attempts()) {
    for (const fs::path& file : files_of(attempt)) {
      std::error_code missing;
      const std::uintmax_t size = fs::file_size(file, missing);
      sum += missing ? 0 : size;
    }
  }
  return sum;
}

void CopyFolder::require_no_later_attempt() const {
  for (const std::int64_t attempt : attempts()) {
    if (attempt <= run_.attempt) continue;
    throw Error(fmt::format("{}: attempt {} has begun on this node ('{}'); this process writes nothing more",
                            run_.describe(), attempt, of_attempt(attempt).string()),
                ExitStatus::kTakenOver);
  }
}

void CopyFolder::delete_earlier_attempts(const std::set<fs::path>& kept) const {
  for (const std::int64_t attempt : attempts()) {
    if (attempt >= run_.attempt) continue;
    bool is_empty = true;
    for (const fs::path& file : files_of(attempt)) {
      const bool stays = kept.contains(file);
      std::error_code gone;  // another rank may have removed it
      if (!stays) fs::remove(file, gone);
      is_empty = is_empty && !stays;
    }
    std::error_code gone;
    if (is_empty) fs::remove(of_attempt(attempt), gone);
  }
}

void CopyFolder::remove_if_empty() const {
  std::error_code others;  // their files may be left; the last rank removes the folder
  fs::remove(of_attempt(run_.attempt), others);
  fs::remove(folder_, others);
}

}  // namespace tessera
