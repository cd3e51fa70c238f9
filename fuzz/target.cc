#include "target.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace fs = std::filesystem;

namespace tessera::fuzz {
namespace {

class Folder {
 public:
  Folder() {
    const fs::path parent = fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    std::string name = (parent / "tessera-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) found("cannot make a folder " + name);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

const fs::path& input_folder() {
  static const Folder folder;
  return folder.path();
}

fs::path write_input(const std::string& name, std::string_view content) {
  const fs::path path = input_folder() / name;
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (descriptor < 0 || ::write(descriptor, content.data(), content.size()) != static_cast<ssize_t>(content.size())) {
    found("cannot write " + path.string());
  }
  ::close(descriptor);
  return path;
}

void found(const std::string& what) {
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

void touch(std::span<const std::byte> bytes) {
  unsigned sum = 0;
  for (const std::byte b : bytes) sum += static_cast<unsigned>(b);
  asm volatile("" : : "r"(sum));  // keeps the compiler from removing the reads
}

}  // namespace tessera::fuzz

// base/file.cc is compiled with these functions in place of mmap and munmap (CMakeLists.txt). A page ends after its
// file, so reading too far into it would go unnoticed. A heap block of exactly the file's size is guarded on both
// sides.
extern "C" void* fuzz_mmap(void*, std::size_t size, int, int, int descriptor, off_t) {
  void* copy = std::malloc(size);
  if (copy == nullptr || ::pread(descriptor, copy, size, 0) != static_cast<ssize_t>(size)) {
    std::free(copy);
    errno = ENOMEM;
    return reinterpret_cast<void*>(-1);  // equals MAP_FAILED
  }
  return copy;
}

extern "C" int fuzz_munmap(void* copy, std::size_t) {
  std::free(copy);
  return 0;
}
