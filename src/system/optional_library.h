// Loads a shared library when it is first used, so that the program also starts on machines that lack it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace tessera {

/// Holds a library open until the process ends.
class OptionalLibrary {
 public:
  /// `name` is for people and `file` for the loader: "cuBLASLt", "libcublasLt.so.13". Throws Error if it is not found.
  OptionalLibrary(std::string name, const std::string& file)
      : name_(std::move(name)), handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    require(handle_ != nullptr, "{} not found: put the folder of {} on LD_LIBRARY_PATH ({})", name_, file, dlerror());
  }

  /// Returns the address of a symbol. Throws Error if the library does not have it.
  void* symbol(const char* symbol) const {
    void* found = dlsym(handle_, symbol);
    require(found != nullptr, "{} is older than this build's: it has no {}", name_, symbol);
    return found;
  }
  /// Returns the address of a symbol, or null if the library does not have it.
  void* find(const char* symbol) const { return dlsym(handle_, symbol); }

 private:
  std::string name_;
  void* handle_;
};

}  // namespace tessera
