// Probes NVIDIA GPUs through NVML. A feature that a GPU or a driver does not support is no fault.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "health/probe.h"
#include "health/readings.h"

namespace tessera {

struct GpuLimits {
  double temperature = 87.0;             // degrees Celsius
  double link_errors_per_minute = 10.0;  // of one NVLink counter
  double idle_memory_bytes = 1e9;        // bytes that may be in use on an idle GPU
};

struct GpuProbeOptions {
  std::string library = "libnvidia-ml.so.1";  // name or path
  int expected_gpus = 0;  // fewer are a fault, and so is a missing library; 0: as many as there ever were
  bool is_idle = false;   // no job should run, so whatever uses a GPU is left over
  GpuLimits limits = {};
  Sysroot sysroot = Sysroot();  // tells whether there are GPUs without the library
};

/// The measurement with the number of GPUs that NVML counts.
inline constexpr const char* kGpuCountName = "gpus";

/// Returns how much an XID proves (NVIDIA, "XID catalog"): hard if it asks to reset the GPU or to service the node, an
/// alert if a user's program may cause it, else soft.
EvidenceKind evidence_of_xid(std::uint64_t xid);

/// Makes the probe. Without the library, and without expected GPUs, it finds nothing. But it cannot look if the node
/// has NVIDIA's driver or GPUs for computing.
std::unique_ptr<Probe> make_gpu_probe(const GpuProbeOptions& options = {});

}  // namespace tessera
