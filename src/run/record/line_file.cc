#include "run/record/line_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

namespace tessera {
namespace {

/// The most bytes of lines that are kept while storage fails.
constexpr std::size_t kMostUnwritten = std::size_t{64} << 20;

}  // namespace

LineFile::LineFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) throw SystemError(fmt::format("open '{}'", path_.string()), errno);
}

LineFile::~LineFile() {
  if (!unwritten_.empty()) spdlog::warn("'{}' lacks its last lines: they could not be written", path_.string());
  ::close(descriptor_);
}

void LineFile::append(const std::string& line) {
  unwritten_ += line + '\n';
  while (!unwritten_.empty()) {
    const ssize_t size = ::write(descriptor_, unwritten_.data(), unwritten_.size());
    if (size >= 0) {
      unwritten_.erase(0, static_cast<std::size_t>(size));
    } else if (errno != EINTR) {
      const SystemError problem(fmt::format("write '{}'", path_.string()), errno);
      if (problem.status() != ExitStatus::kStorageFailed || unwritten_.size() > kMostUnwritten) throw problem;
      if (!std::exchange(storage_has_failed_, true)) {
        spdlog::warn("{}; training goes on, and lines are kept until they can be written", problem.what());
      }
      return;
    }
  }
  if (std::exchange(storage_has_failed_, false)) spdlog::info("'{}' has all lines again", path_.string());
  // A file that was deleted still takes lines. If the storage does not answer, that is no reason to end.
  std::error_code unreadable;
  const bool exists = std::filesystem::exists(path_, unreadable);
  require(exists || unreadable, "'{}' was deleted while the run wrote to it, so its lines are lost", path_.string());
}

}  // namespace tessera
