// Python files for a Hugging Face folder whose model has no class in transformers: configuration and modeling code
// (src/checkpoint/transformers), which trust_remote_code runs.
#pragma once

#include <span>
#include <string_view>

namespace tessera {

struct RemoteCodeFile {
  std::string_view name;
  std::string_view content;
};

/// Returns all these files.
std::span<const RemoteCodeFile> remote_code_files();

}  // namespace tessera
