// Checks files that commands will write as results.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Returns `path`, or `otherwise` if that is empty, and creates its folder. Throws Error unless a file can be written
/// there, so that a long command fails before its work.
std::filesystem::path output_file(const std::string& path, const std::filesystem::path& otherwise);

}  // namespace tessera
