// Probes of what every node has: network, disks, memory, clock and the kernel's log. GPUs: health/gpu_probe.h.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "health/probe.h"
#include "health/readings.h"

namespace tessera {

/// What is allowed. docs/cluster.md lists every signal with its source and its limit.
struct NodeLimits {
  double network_errors_per_minute = 10.0;  // of an InfiniBand or RoCE port
  double ethernet_errors_per_minute = 100.0;
  double disk_errors_per_minute = 1.0;
  double free_share = 0.02;  // of a file system, of its files, and of memory
  double corrected_memory_errors_per_minute = 1.0;
  double clock_offset_seconds = 0.5;  // of the kernel's estimate
  double clock_jump_seconds = 1.0;
  double leftover_bytes = 1e9;  // of files in /dev/shm of an idle node
};

/// InfiniBand, RoCE and physical Ethernet ports, from /sys/class/infiniband and /sys/class/net.
std::unique_ptr<Probe> make_network_probe(const Sysroot& sysroot, const NodeLimits& limits = {});
/// File systems that became read-only, disks with errors, and room in `folders`.
std::unique_ptr<Probe> make_disk_probe(const Sysroot& sysroot, std::vector<std::filesystem::path> folders,
                                       const NodeLimits& limits = {});
/// EDAC counters, available memory, and processes that were killed for want of it.
std::unique_ptr<Probe> make_memory_probe(const Sysroot& sysroot, const NodeLimits& limits = {});
/// Whether the clock is synchronized, and whether it jumps (adjtimex).
std::unique_ptr<Probe> make_clock_probe(const NodeLimits& limits = {});
/// Lines of /dev/kmsg that tell of broken hardware. With another sysroot than "/" it is a file that grows.
std::unique_ptr<Probe> make_kernel_log_probe(const Sysroot& sysroot);

/// What jobs that have ended left on an idle node: processes of users or of Tessera, and files in /dev/shm. What a run
/// keeps there on purpose (/dev/shm/tessera-*) is no leftover.
std::unique_ptr<Probe> make_leftover_probe(const Sysroot& sysroot, const NodeLimits& limits = {});

/// All that hold for every node: not the one for leftovers.
std::vector<std::unique_ptr<Probe>> make_node_probes(const Sysroot& sysroot, const NodeLimits& limits = {});

}  // namespace tessera
