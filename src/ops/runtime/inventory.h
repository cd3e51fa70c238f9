// What there is for computing on GPUs: driver, libraries, GPUs, and the links between them. For people.
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
  int num_nvlinks = -1;  // -1: unknown
};

struct LibraryInfo {
  std::string name, version;
  /// Why it cannot be used, and how to mend it; empty if it can.
  std::string problem;
};

struct Inventory {
  std::string driver;  // "580.159.04, for CUDA up to 13.0"; empty: none
  std::vector<LibraryInfo> libraries;
  std::vector<GpuInfo> gpus;
  /// Pairs of GPUs that cannot store to each other's memory.
  std::vector<std::pair<int, int>> without_peer_access;
};

/// Never throws for what is missing. Empty in a build without CUDA.
Inventory take_inventory();

/// Returns the name of the GPU that this process uses. Throws Error where there is none.
std::string gpu_name();
/// Returns the names of all GPUs that this process sees. Empty where there is none.
std::vector<std::string> gpu_names();

/// Dense bfloat16 TFLOP/s by the vendor's data sheet of a GPU with this name; 0 if it is not known. A PCIe card has
/// another name than the module, and another rate.
constexpr double peak_tflops(std::string_view gpu_name) {
  if (gpu_name == "NVIDIA H100 80GB HBM3" || gpu_name == "NVIDIA H200") return 989.5;
  return gpu_name == "NVIDIA B200" ? 2250.0 : 0.0;
}

}  // namespace tessera::cuda
