#include "ops/runtime/inventory.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <memory>

#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda_check.h"

namespace tessera::cuda {
namespace {

using LibraryHandle = std::unique_ptr<void, int (*)(void*)>;
LibraryHandle open_library(const char* file) { return {dlopen(file, RTLD_LAZY | RTLD_LOCAL), &dlclose}; }

template <typename Function>
Function* find(const LibraryHandle& library, const char* name) {
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library.get(), name));
}

/// Formats a version of cuBLAS, cuDNN or NCCL, which have two digits each for the minor version and the patch.
std::string version_text(long version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

std::string version_of_cuda(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

/// Describes a library whose version is returned by a function without arguments.
LibraryInfo library_info(const char* name, const std::string& file, const char* function, const char* package) {
  LibraryInfo info{.name = name, .version = {}, .problem = {}};
  const LibraryHandle library = open_library(file.c_str());
  if (auto* version = find<std::size_t()>(library, function)) {
    info.version = version_text(static_cast<long>(version()));
  } else {
    info.problem = fmt::format("{} not found: install {} and put its folder on LD_LIBRARY_PATH", file, package);
  }
  return info;
}

LibraryInfo nccl_info() {
  LibraryInfo info{.name = "NCCL", .version = {}, .problem = {}};
  const LibraryHandle library = open_library("libnccl.so.2");
  int version = 0;
  if (auto* get = find<int(int*)>(library, "ncclGetVersion"); get != nullptr && get(&version) == 0) {
    info.version = version_text(version);
  } else {
    info.problem = "libnccl.so.2 not found: install NCCL 2.28 or newer and put its folder on LD_LIBRARY_PATH";
  }
  return info;
}

/// Reads facts that only the driver's management library (NVML) knows. NVML's functions return 0 for success.
class Management {
 public:
  Management() : library_(open_library("libnvidia-ml.so.1")) {
    auto* init = find<int()>(library_, "nvmlInit_v2");
    usable_ = init != nullptr && init() == 0;
  }
  ~Management() {
    if (auto* shutdown = find<int()>(library_, "nvmlShutdown"); usable_ && shutdown != nullptr) shutdown();
  }

  std::string driver_version() const {
    std::array<char, 96> text{};
    auto* get = find<int(char*, unsigned)>(library_, "nvmlSystemGetDriverVersion");
    return usable_ && get != nullptr && get(text.data(), text.size()) == 0 ? text.data() : "";
  }
  int num_nvlinks(const char* pci_bus_id) const {
    using Handle = void*;
    constexpr unsigned kMaxLinks = 18;
    auto* by_bus = find<int(const char*, Handle*)>(library_, "nvmlDeviceGetHandleByPciBusId_v2");
    auto* state_of = find<int(Handle, unsigned, int*)>(library_, "nvmlDeviceGetNvLinkState");
    Handle gpu = nullptr;
    if (!usable_ || by_bus == nullptr || state_of == nullptr || by_bus(pci_bus_id, &gpu) != 0) return -1;
    int count = 0;
    for (unsigned link = 0; link < kMaxLinks; ++link) {
      int active = 0;
      count += state_of(gpu, link, &active) == 0 && active == 1 ? 1 : 0;
    }
    return count;
  }

 private:
  LibraryHandle library_;
  bool usable_ = false;
};

GpuInfo gpu_info(int device, const Management& management) {
  cudaDeviceProp properties{};
  TESSERA_CUDA(cudaGetDeviceProperties(&properties, device));
  GpuInfo info{.name = properties.name,
               .major = properties.major,
               .minor = properties.minor,
               .num_sms = properties.multiProcessorCount,
               .total_bytes = properties.totalGlobalMem};
  std::array<char, 32> bus_id{};
  TESSERA_CUDA(cudaDeviceGetPCIBusId(bus_id.data(), bus_id.size(), device));
  info.num_nvlinks = management.num_nvlinks(bus_id.data());
  TESSERA_CUDA(cudaSetDevice(device));
  std::size_t total = 0;
  TESSERA_CUDA(cudaMemGetInfo(&info.free_bytes, &total));
  return info;
}

std::string device_name(int device) {
  cudaDeviceProp properties{};
  TESSERA_CUDA(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

}  // namespace

std::string gpu_name() {
  require(available(), "no GPU: {}", why_unavailable());
  int device = 0;
  TESSERA_CUDA(cudaGetDevice(&device));
  return device_name(device);
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (int device = 0; device < num_devices(); ++device) names.push_back(device_name(device));
  return names;
}

Inventory take_inventory() {
  Inventory inventory;
  const Management management;
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) {
    const std::string version = management.driver_version();
    inventory.driver =
        fmt::format("{}{}for CUDA up to {}", version, version.empty() ? "" : ", ", version_of_cuda(driver));
  }
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = CUDART_VERSION;
  inventory.libraries.push_back({.name = "CUDA runtime", .version = version_of_cuda(runtime), .problem = {}});
  inventory.libraries.push_back(library_info("cuBLASLt", fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR),
                                             "cublasLtGetVersion", "CUDA's cuBLAS"));
  inventory.libraries.push_back(library_info("cuDNN", "libcudnn.so.9", "cudnnGetVersion", "cuDNN 9"));
  inventory.libraries.push_back(nccl_info());
  if (!available()) return inventory;
  int count = 0, current = 0;
  TESSERA_CUDA(cudaGetDeviceCount(&count));
  TESSERA_CUDA(cudaGetDevice(&current));
  for (int device = 0; device < count; ++device) inventory.gpus.push_back(gpu_info(device, management));
  TESSERA_CUDA(cudaSetDevice(current));
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      int forth = 0, back = 0;
      TESSERA_CUDA(cudaDeviceCanAccessPeer(&forth, a, b));
      TESSERA_CUDA(cudaDeviceCanAccessPeer(&back, b, a));
      if (forth == 0 || back == 0) inventory.without_peer_access.emplace_back(a, b);
    }
  }
  return inventory;
}

}  // namespace tessera::cuda
