#include "system/output_folder.h"

#include <utility>

#include "base/error.h"
#include "base/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Returns the first entry of `folder` that is not part of this kind, or an empty path if there is none.
fs::path find_foreign_entry(const fs::path& folder, const OutputKind& kind) {
  for (const fs::directory_entry& entry : entries_of(folder)) {
    const fs::path name = name_without_temporary(entry.path().filename());
    if (!kind.is_part(name) || !entry.is_regular_file()) return entry.path();
  }
  return {};
}

/// Ends a replacement of `output` that was cut short between two renames, or before the old folder was deleted.
void end_replacement(const fs::path& output, const OutputKind& kind) {
  const fs::path replaced = output.string() + kReplacedSuffix;
  if (!path_exists(replaced)) return;
  // A folder of someone else is left alone.
  if (!fs::is_directory(replaced) || !find_foreign_entry(replaced, kind).empty()) return;
  path_exists(output) ? remove_tree(replaced) : rename_path(replaced, output);
}

/// Returns the absolute path without "." or a trailing slash, so that callers can append a suffix to its name.
fs::path absolute_folder(const fs::path& output) {
  require(!output.empty(), "no output folder given");
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(fs::absolute(output), error);
  if (error) throw SystemError(fmt::format("look for the output folder '{}'", output.string()), error.value());
  return folder.has_filename() ? folder : folder.parent_path();
}

}  // namespace

void check_output(const fs::path& output, const OutputKind& kind, bool overwrite) {
  const fs::path folder = absolute_folder(output);
  if (!path_exists(folder)) return;
  require(fs::is_directory(folder), "output '{}': expected a folder, or a name for one; it is a file", output.string());
  if (entries_of(folder).empty()) return;
  require(overwrite, "output '{}': there is {} already; --force replaces {}", output.string(),
          path_exists(folder / kind.marker) ? kind.name : "something", kind.name);
  const fs::path foreign = find_foreign_entry(folder, kind);
  require(foreign.empty(), "output '{}': it holds '{}', which is not part of {}: not replaced", output.string(),
          foreign.filename().string(), kind.name);
  require(path_exists(folder / kind.marker), "output '{}': it holds no {}, so it is not {}: not replaced",
          output.string(), kind.marker, kind.name);
}

OutputFolder::OutputFolder(const fs::path& output, const OutputKind& kind, bool overwrite)
    : output_(absolute_folder(output)), path_(output_.string() + ".tmp"), kind_(kind), overwrite_(overwrite) {
  create_folder(output_.parent_path());
  lock_.emplace(path_.string() + ".lock", fmt::format("output '{}'", output_.string()),
                FileLock::Options{.at_end = FileLock::AtEnd::kRemoveFile});
  end_replacement(output_, kind_);
  check_output(output_, kind_, overwrite_);
  if (path_exists(path_)) {
    const fs::path foreign = fs::is_directory(path_) ? find_foreign_entry(path_, kind) : path_;
    require(foreign.empty(), "'{}' is in the way: it is needed for the time of writing", foreign.string());
    remove_tree(path_);
  }
  create_folder(path_);
}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void OutputFolder::commit() {
  const fs::path complete = std::exchange(path_, {});  // if this fails, the complete folder stays
  try {
    check_output(output_, kind_, overwrite_);  // again: hours may have passed since the first check
  } catch (const Error& error) {
    throw Error(fmt::format("{}. What was made is complete, in '{}': rename that folder, because the next attempt "
                            "deletes it",
                            error.what(), complete.string()),
                error.status());
  }
  replace_folder(complete, output_);
}

}  // namespace tessera
