#include "app/cli/output_file.h"

#include "base/error.h"
#include "base/file.h"
#include "run/record/run_files.h"

namespace tessera {

namespace fs = std::filesystem;

fs::path output_file(const std::string& path, const fs::path& otherwise) {
  const fs::path output = path.empty() ? otherwise : fs::path(path);
  require(!fs::is_directory(output), "'{}' is a folder; expected the name of a file", output.string());
  for (const char* of_run : {kRunInfoName, kMetricsName}) {
    require(output.filename() != of_run || !fs::exists(output),
            "'{}' belongs to a run, and would be replaced; expected another name", output.string());
  }
  if (output.has_parent_path()) create_folder(output.parent_path());
  const AtomicFile can_be_created(output);
  return output;
}

}  // namespace tessera
