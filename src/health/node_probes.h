// Probes of what every node has: network, disks, memory, clock and the kernel's log. health/gpu_probe.h probes GPUs.
#pragma once

#include <sys/timex.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "health/probe.h"
#include "health/readings.h"

namespace tessera {

/// Holds the limits of what is allowed. docs/cluster.md lists every signal with its source and its limit.
struct NodeLimits {
  double network_errors_per_minute = 10.0;  // of an InfiniBand or RoCE port
  double ethernet_errors_per_minute = 100.0;
  double disk_errors_per_minute = 1.0;
  double free_share = 0.02;  // free part of a file system, of its files, and of memory
  double corrected_memory_errors_per_minute = 1.0;
  /// Most by which the clock may be off, by the kernel's estimate. It grows by 1 s between two looks of
  /// systemd-timesyncd, which may be 2048 s apart.
  double clock_error_seconds = 2.0;
  double clock_jump_seconds = 1.0;
  double leftover_bytes = 1e9;  // size of the files in /dev/shm of an idle node
};

/// Makes the probe of InfiniBand, RoCE and physical Ethernet ports. It reads /sys/class/infiniband and /sys/class/net.
std::unique_ptr<Probe> make_network_probe(const Sysroot& sysroot, const NodeLimits& limits = {});
/// Makes the probe of file systems that became read-only, disks with errors, and free room in `folders`.
std::unique_ptr<Probe> make_disk_probe(const Sysroot& sysroot, std::vector<std::filesystem::path> folders,
                                       const NodeLimits& limits = {});
/// Makes the probe of EDAC counters, available memory, and processes that were killed because memory ran out.
std::unique_ptr<Probe> make_memory_probe(const Sysroot& sysroot, const NodeLimits& limits = {});
/// Makes the probe of the clock: whether it is synchronized, and whether it jumps. `read_clock` is adjtimex(2).
std::unique_ptr<Probe> make_clock_probe(const NodeLimits& limits = {}, int (*read_clock)(timex*) = ::adjtimex);
/// Makes the probe of lines in /dev/kmsg about broken hardware. With another sysroot than "/", it is a file that grows.
std::unique_ptr<Probe> make_kernel_log_probe(const Sysroot& sysroot);

/// Makes the probe of what ended jobs have left on an idle node: processes of users (UID_MIN to UID_MAX of
/// /etc/login.defs) or of Tessera, and files in /dev/shm. Files that a run keeps there on purpose (/dev/shm/tessera-*)
/// are not leftovers.
std::unique_ptr<Probe> make_leftover_probe(const Sysroot& sysroot, const NodeLimits& limits = {});

/// Makes all probes that apply to every node. The one for leftovers applies only to idle nodes.
std::vector<std::unique_ptr<Probe>> make_node_probes(const Sysroot& sysroot, const NodeLimits& limits = {});

}  // namespace tessera
