// Lists what this machine has for computing on GPUs: driver, libraries, GPUs, and the links between them. The list is
// for people.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

struct GpuInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
  std::size_t total_bytes = 0, free_bytes = 0;
  int num_nvlinks = -1;  // -1 means unknown
};

struct LibraryInfo {
  std::string name, version;
  /// Says why the library cannot be used, and how to fix that. It is empty if the library can be used.
  std::string problem;
};

struct Inventory {
  std::string driver;  // such as "580.159.04, for CUDA up to 13.0"; empty if there is none
  std::vector<LibraryInfo> libraries;
  std::vector<GpuInfo> gpus;
  /// Pairs of GPUs that cannot store to each other's memory.
  std::vector<std::pair<int, int>> without_peer_access;
};

/// Returns the inventory, which is empty in a build without CUDA. Never throws because something is missing.
Inventory take_inventory();

/// Returns the name of the GPU that this process uses. Throws Error where there is none.
std::string gpu_name();
/// Returns the names of all GPUs that this process sees. Empty where there is none.
std::vector<std::string> gpu_names();

/// Returns the dense bfloat16 TFLOP/s of a GPU of this name, from the vendor's data sheet. Returns 0 if the name is
/// unknown. A PCIe card has a different name and a different rate than the module.
constexpr double peak_tflops(std::string_view gpu_name) {
  if (gpu_name == "NVIDIA H100 80GB HBM3" || gpu_name == "NVIDIA H200") return 989.5;
  return gpu_name == "NVIDIA B200" ? 2250.0 : 0.0;
}

}  // namespace tessera::cuda
