// What there is for computing on GPUs: driver, libraries, GPUs, and the links between them. For people.
#pragma once

#include <string>
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

}  // namespace tessera::cuda
