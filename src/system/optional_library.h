// A library that is looked for when it is first used, so that the program starts where it is missing.
#pragma once

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace tessera {

/// Stays open to the end of the process.
class OptionalLibrary {
 public:
  /// `name` for people, `file` for the loader: "cuBLASLt", "libcublasLt.so.13". Throws Error where it is not found.
  OptionalLibrary(std::string name, const std::string& file)
      : name_(std::move(name)), handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    require(handle_ != nullptr, "{} not found: put the folder of {} on LD_LIBRARY_PATH ({})", name_, file, dlerror());
  }

  /// Throws Error if it has none.
  void* symbol(const char* symbol) const {
    void* found = dlsym(handle_, symbol);
    require(found != nullptr, "{} is older than this build's: it has no {}", name_, symbol);
    return found;
  }
  /// Null if it has none.
  void* find(const char* symbol) const { return dlsym(handle_, symbol); }

 private:
  std::string name_;
  void* handle_;
};

}  // namespace tessera
