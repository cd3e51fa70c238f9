// Tests the probes of a node on a folder that stands in for the machine.
#include "health/node_probes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/unix_time.h"
#include "health/judge.h"
#include "tests/data/support.h"
#include "tests/health/findings.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using data::TemporaryFolder;

class NodeProbes : public ::testing::Test {
 protected:
  void set(const std::string& path, const std::string& text) const {
    const fs::path file = root_ / path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void remove(const std::string& path) const { fs::remove_all(root_ / path); }

  std::vector<std::string> look(Probe& probe) {
    result_ = probe.look(now_ += 5.0);
    return names_of(result_.findings);
  }

  TemporaryFolder scratch_;
  fs::path root_ = scratch_ / "root";
  Sysroot sysroot_{root_};
  double now_ = 0.0;
  ProbeResult result_;
};

constexpr const char* kPort = "sys/class/infiniband/mlx5_0/ports/1/";

TEST_F(NodeProbes, InfiniBand) {
  const auto probe = make_network_probe(sysroot_);
  EXPECT_THAT(look(*probe), IsEmpty());  // there is no port
  const auto set_port = [&](const std::string& name, const std::string& text) { set(kPort + name, text); };
  set_port("state", "4: ACTIVE\n");
  set_port("rate", "400 Gb/sec (4X NDR)\n");
  set_port("counters/symbol_error", "5\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set_port("rate", "200 Gb/sec (2X NDR)\n");
  EXPECT_THAT(look(*probe), ElementsAre("networkRate mlx5_0 port 1"));
  set_port("rate", "400 Gb/sec (4X NDR)\n");
  set_port("counters/symbol_error", "100\n");
  EXPECT_THAT(look(*probe), ElementsAre("networkErrors mlx5_0 port 1"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kSoft);
  now_ += 60.0;
  EXPECT_THAT(look(*probe), IsEmpty());  // the counter does not rise any more
  set_port("counters/port_xmit_discards", "0\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set_port("counters/port_xmit_discards", "1000000\n");
  EXPECT_THAT(look(*probe), IsEmpty());  // congestion is no error of the port
  set_port("state", "1: DOWN\n");
  EXPECT_THAT(look(*probe), ElementsAre("networkLink mlx5_0 port 1"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kHard);
  remove("sys/class/infiniband/mlx5_0");
  EXPECT_THAT(look(*probe), ElementsAre("networkLink mlx5_0 port 1"));
}

TEST_F(NodeProbes, AFewErrorsPerMinuteAreNoTrend) {
  const auto probe = make_network_probe(sysroot_);
  set(std::string(kPort) + "state", "4: ACTIVE\n");
  for (int poll = 0; poll < 100; ++poll) {  // 8 errors per minute, two at a time
    set(std::string(kPort) + "counters/symbol_error", std::to_string(poll / 3 * 2));
    EXPECT_THAT(look(*probe), IsEmpty()) << poll;
  }
  for (int poll = 0; poll < 12; ++poll) {  // 12 errors per minute
    set(std::string(kPort) + "counters/symbol_error", std::to_string(100 + poll));
    look(*probe);
  }
  EXPECT_THAT(names_of(result_.findings), ElementsAre("networkErrors mlx5_0 port 1"));
}

TEST_F(NodeProbes, APortWithoutACableIsNoFault) {
  const auto probe = make_network_probe(sysroot_);
  set(std::string(kPort) + "state", "1: DOWN\n");
  for (int i = 0; i < 3; ++i) EXPECT_THAT(look(*probe), IsEmpty());
}

TEST_F(NodeProbes, Ethernet) {
  const auto probe = make_network_probe(sysroot_);
  set("sys/class/net/eth0/device/vendor", "0x15b3\n");
  set("sys/class/net/eth0/flags", "0x1003\n");
  set("sys/class/net/eth0/operstate", "up\n");
  set("sys/class/net/veth1/flags", "0x1003\n");  // a container's interface, which comes and goes
  set("sys/class/net/veth1/operstate", "up\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("sys/class/net/eth0/operstate", "down\n");
  set("sys/class/net/veth1/operstate", "down\n");
  EXPECT_THAT(look(*probe), ElementsAre("networkLink eth0"));
  set("sys/class/net/eth0/flags", "0x1002\n");  // an operator took the interface down
  EXPECT_THAT(look(*probe), IsEmpty());
  remove("sys/class/net/eth0");
  remove("sys/class/net/veth1");
  EXPECT_THAT(look(*probe), ElementsAre("networkLink eth0"));
  // It may be a card that nobody needs.
  for (int i = 0; i < 2; ++i) EXPECT_THAT(look(*probe), ElementsAre("networkLink eth0"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kSoft);
  now_ += 700.0;
  EXPECT_THAT(look(*probe), IsEmpty());
}

TEST_F(NodeProbes, ErrorsOfAnInterfaceAreWatched) {
  const auto probe = make_network_probe(sysroot_);
  set("sys/class/net/eth0/device/vendor", "0x15b3\n");
  set("sys/class/net/eth0/flags", "0x1003\n");
  set("sys/class/net/eth0/operstate", "up\n");
  for (const char* counter : {"rx_errors", "tx_errors"}) {
    const std::string path = fmt::format("sys/class/net/eth0/statistics/{}", counter);
    for (const char* errors : {"7\n", "107\n"}) {  // 100 per minute are allowed
      set(path, errors);
      EXPECT_THAT(look(*probe), IsEmpty()) << counter;
    }
    set(path, "108\n");
    ASSERT_THAT(look(*probe), ElementsAre("ethernetErrors eth0")) << counter;
    EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kSoft) << counter;
    const auto exported = std::ranges::find_if(result_.measurements, [&](const Measurement& one) {
      return one.name == "ethernet_errors_total" && one.labels.at("counter") == counter;
    });
    ASSERT_NE(exported, result_.measurements.end()) << counter;
    EXPECT_EQ(exported->value, 108.0) << counter;
    probe->forget();
  }
}

TEST_F(NodeProbes, AVirtualFunctionThatMovesIntoAContainerIsNoFault) {
  const auto probe = make_network_probe(sysroot_);
  set("sys/class/net/eth0v1/device/physfn/vendor", "0x15b3\n");
  set("sys/class/net/eth0v1/flags", "0x1003\n");
  set("sys/class/net/eth0v1/operstate", "up\n");
  set("sys/class/infiniband/mlx5_1/device/physfn/vendor", "0x15b3\n");
  set("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  remove("sys/class/net/eth0v1");
  remove("sys/class/infiniband/mlx5_1");
  EXPECT_THAT(look(*probe), IsEmpty());
}

TEST_F(NodeProbes, Disks) {
  const auto probe = make_disk_probe(sysroot_, {});
  set("proc/mounts", "/dev/sda1 / ext4 rw,relatime 0 0\n/dev/sr0 /media iso9660 ro 0 0\n");
  set("sys/block/sda/device/ioerr_cnt", "0x0\n");
  set("sys/class/nvme/nvme0/state", "live\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("proc/mounts", "/dev/sda1 / ext4 ro,relatime 0 0\n/dev/sr0 /media iso9660 ro 0 0\n");
  set("sys/class/nvme/nvme0/state", "resetting\n");
  EXPECT_THAT(look(*probe), ElementsAre("diskReadOnly /", "diskState nvme0"));
  remove("sys/class/nvme/nvme0");
  EXPECT_THAT(look(*probe), ElementsAre("diskReadOnly /", "diskState nvme0"));
}

TEST_F(NodeProbes, ADiskThatIsGoneIsHardEvidenceOnlyWhileItIsMounted) {
  const auto probe = make_disk_probe(sysroot_, {});
  set("proc/mounts", "/dev/nvme1n1p2 /data ext4 rw 0 0\n");
  for (const char* disk : {"nvme0", "nvme1", "nvme11"}) set(fmt::format("sys/class/nvme/{}/state", disk), "live\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  // A RAID of two partitions, which is what is mounted.
  for (const char* disk : {"nvme2", "nvme3"}) {
    set(fmt::format("sys/class/nvme/{}/state", disk), "live\n");
    set(fmt::format("sys/block/{0}n1/{0}n1p1/holders/md0/dev", disk), "9:0\n");
  }
  EXPECT_THAT(look(*probe), IsEmpty());
  remove("sys/class/nvme/nvme3");
  remove("sys/block/nvme3n1");
  EXPECT_THAT(look(*probe), ElementsAre("diskState nvme3"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kHard);
  set("sys/class/nvme/nvme3/state", "live\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  remove("sys/class/nvme/nvme11");  // a volume that somebody has detached
  for (int i = 0; i < 2; ++i) EXPECT_THAT(look(*probe), ElementsAre("diskState nvme11"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kSoft);
  now_ += 700.0;
  EXPECT_THAT(look(*probe), IsEmpty());
  remove("sys/class/nvme/nvme1");
  for (int i = 0; i < 2; ++i) EXPECT_THAT(look(*probe), ElementsAre("diskState nvme1"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kHard);
  now_ += 700.0;
  EXPECT_THAT(look(*probe), ElementsAre("diskState nvme1"));
}

TEST_F(NodeProbes, AMountOverAnotherOneIsNoFault) {
  const auto probe = make_disk_probe(sysroot_, {});
  const std::string below = "/dev/sda1 /data ext4 rw,relatime 0 0\n";
  set("proc/mounts", below);
  EXPECT_THAT(look(*probe), IsEmpty());
  set("proc/mounts", below + "/dev/sr0 /data iso9660 ro,relatime 0 0\n/dev/sda1 /data ext4 ro,relatime 0 0\n");
  EXPECT_THAT(look(*probe), IsEmpty());
}

TEST_F(NodeProbes, ALongListOfMountsIsReadWhole) {
  const auto probe = make_disk_probe(sysroot_, {});
  std::string containers;
  for (int i = 0; i < 2000; ++i) containers += fmt::format("overlay /run/containers/{}/rootfs overlay rw 0 0\n", i);
  set("proc/mounts", containers + "/dev/sda1 /data ext4 rw,relatime 0 0\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("proc/mounts", containers + "/dev/sda1 /data ext4 ro,relatime 0 0\n");
  EXPECT_THAT(look(*probe), ElementsAre("diskReadOnly /data"));
}

TEST_F(NodeProbes, DiskErrorsAreCountedInHexadecimalToo) {
  const auto probe = make_disk_probe(sysroot_, {});
  set("sys/block/sda/device/ioerr_cnt", "0x1\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("sys/block/sda/device/ioerr_cnt", "0x2f\n");
  EXPECT_THAT(look(*probe), ElementsAre("diskErrors sda"));
}

TEST_F(NodeProbes, AFullDiskOnlyAlerts) {
  const auto probe = make_disk_probe(Sysroot("/"), {"/"}, {.free_share = 1.1});
  EXPECT_THAT(look(*probe), ElementsAre("diskFull /"));
  EXPECT_EQ(result_.findings.front().evidence, EvidenceKind::kAlert);
}

TEST_F(NodeProbes, Memory) {
  const auto probe = make_memory_probe(sysroot_);
  set("sys/devices/system/edac/mc/mc0/ue_count", "1\n");  // an error from before the daemon's start
  set("sys/devices/system/edac/mc/mc0/ce_count", "7\n");
  set("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 500 kB\n");
  set("proc/vmstat", "nr_free 5\noom_kill 3\n");
  EXPECT_THAT(look(*probe), IsEmpty());
  set("sys/devices/system/edac/mc/mc0/ue_count", "2\n");
  set("sys/devices/system/edac/mc/mc0/ce_count", "70\n");
  set("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 5 kB\n");
  set("proc/vmstat", "nr_free 5\noom_kill 4\n");
  EXPECT_THAT(look(*probe), ElementsAre("memoryCorrected mc0", "memoryLow", "memoryUncorrected mc0", "outOfMemory"));
  now_ += 60.0;
  EXPECT_THAT(look(*probe), ElementsAre("memoryLow", "memoryUncorrected mc0"));
  probe->forget();
  EXPECT_THAT(look(*probe), ElementsAre("memoryLow"));
  for (const char* errors : {"0\n", "1\n"}) set("sys/devices/system/edac/mc/mc0/ue_count", errors), look(*probe);
  EXPECT_THAT(look(*probe), ElementsAre("memoryLow", "memoryUncorrected mc0"));  // the counter began anew, and rose
}

TEST_F(NodeProbes, AClockThatNobodySynchronizesAlerts) {
  static timex state;
  static int status;
  const auto read = [](timex* to) {
    *to = state;
    return status;
  };
  const auto probe = make_clock_probe({}, read);
  const auto look_at = [&](int the_status, int flags, long most_error) {
    status = the_status;
    state = {};
    state.status = flags;
    state.maxerror = most_error;  // microseconds
    now_ = unix_time();           // no jump
    return names_of(probe->look(now_).findings);
  };
  EXPECT_THAT(look_at(TIME_OK, STA_PLL, 1'900'000), IsEmpty());
  EXPECT_THAT(look_at(TIME_OK, STA_PLL, 2'100'000), ElementsAre("clockOffset"));
  EXPECT_THAT(look_at(TIME_OK, STA_UNSYNC, 0), ElementsAre("clockOffset"));
  EXPECT_THAT(look_at(TIME_ERROR, 0, 0), ElementsAre("clockOffset"));
  EXPECT_THAT(look_at(-1, STA_UNSYNC, 2'100'000), IsEmpty());  // the process may not ask
}

TEST_F(NodeProbes, AClockThatJumpsAlertsForSomeTime) {
  const auto probe = make_clock_probe({.clock_jump_seconds = 1.0}, [](timex*) { return -1; });
  // The probe compares the time of day with this monotonic clock, which moves in the test instead.
  const double begin = unix_time();
  const auto look_at = [&](double monotonic) { return names_of(probe->look(monotonic).findings); };
  EXPECT_THAT(look_at(begin), IsEmpty());
  EXPECT_THAT(look_at(begin + 0.5), IsEmpty());
  EXPECT_THAT(look_at(begin + 3.0), ElementsAre("clockJump"));
  EXPECT_THAT(look_at(begin + 3.0), ElementsAre("clockJump"));  // so that a scrape sees it
  probe->forget();
  EXPECT_THAT(look_at(begin + 3.0), IsEmpty());
}

TEST_F(NodeProbes, LinesOfTheKernelsLogAreSignals) {
  set("dev/kmsg", "");
  const auto probe = make_kernel_log_probe(sysroot_);
  struct Case {
    const char *line, *signal;
    EvidenceKind evidence;
  };
  for (const Case& one :
       {Case{"EXT4-fs error (device sda1): bad block", "kernelDiskError", EvidenceKind::kSoft},
        Case{"I/O error, dev sda, sector 8", "kernelDiskError", EvidenceKind::kSoft},
        Case{"critical medium error, dev nvme0n1, sector 8", "kernelDiskError", EvidenceKind::kSoft},
        Case{"XFS (nvme0n1p1): Corruption detected. Unmount and run xfs_repair", "kernelDiskError",
             EvidenceKind::kSoft},
        Case{"XFS (sda1): Corruption of in-memory data (0x8) detected", "kernelDiskError", EvidenceKind::kSoft},
        Case{"INFO: task tessera:7 blocked for more than 120 seconds.", "kernelHungTask", EvidenceKind::kSoft},
        Case{"NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out", "kernelNetwork", EvidenceKind::kSoft},
        Case{"Out of memory: Killed process 7 (tessera)", "kernelOutOfMemory", EvidenceKind::kAlert}}) {
    std::ofstream(root_ / "dev/kmsg", std::ios::app) << "3,1,1,-;" << one.line << '\n';
    EXPECT_THAT(look(*probe), ElementsAre(one.signal)) << one.line;
    EXPECT_EQ(result_.findings.front().evidence, one.evidence) << one.line;
    probe->forget();
  }
}

TEST_F(NodeProbes, KernelLog) {
  set("dev/kmsg", "6,1,1,-;NVRM: Xid (PCI:0000:06:00): 79, of before the daemon\n");
  const auto probe = make_kernel_log_probe(sysroot_);
  EXPECT_THAT(look(*probe), IsEmpty());
  std::ofstream(root_ / "dev/kmsg", std::ios::app)
      << "6,2,2,-;eth0: link becomes ready\n3,3,3,-;NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus\n"
         "3,4,4,-;EXT4-fs error (device sda1): bad block\n";
  EXPECT_THAT(look(*probe), ElementsAre("kernelDiskError", "kernelXid XID 79"));
  // Findings stay for some time, so that two polls see them.
  EXPECT_THAT(look(*probe), ElementsAre("kernelDiskError", "kernelXid XID 79"));
  now_ += 700.0;
  EXPECT_THAT(look(*probe), IsEmpty());
}

TEST_F(NodeProbes, AnXidInTheKernelLogProvesAsMuchAsThatOfNvml) {
  set("dev/kmsg", "");
  const auto probe = make_kernel_log_probe(sysroot_);
  std::ofstream(root_ / "dev/kmsg", std::ios::app)
      << "3,1,1,-;NVRM: Xid (PCI:0000:06:00): 79, pid=7, GPU has fallen off the bus.\n"
         "3,2,2,-;NVRM: Xid (PCI:0000:06:00): 31, pid=7, name=python, MMU Fault\n"
         "3,3,3,-;NVRM: Xid (PCI:0000:06:00): 94, pid=7, Contained\n3,4,4,-;NVRM: Xid is odd\n";
  EXPECT_THAT(look(*probe), ElementsAre("kernelXid", "kernelXid XID 31", "kernelXid XID 79", "kernelXid XID 94"));
  std::map<std::string, EvidenceKind> evidence;
  for (const Finding& finding : result_.findings) evidence[finding.part] = finding.evidence;
  EXPECT_EQ(evidence.at("XID 79"), EvidenceKind::kHard);
  EXPECT_EQ(evidence.at("XID 31"), EvidenceKind::kAlert);
  EXPECT_EQ(evidence.at("XID 94"), EvidenceKind::kSoft);
  EXPECT_EQ(evidence.at(""), EvidenceKind::kSoft);
}

/// Returns the lines as the kernel's records, each with its priority, number, time and flag.
std::string records(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "2,1,1,-;" + line + "\n";
  return text;
}

// Reports of AMD's decoder (mce_amd.c), of Intel's processors (mce/core.c), and of firmware (cper.c) about PCIe, memory
// and processors.
const std::vector<std::vector<std::string>> kCorrectedReports = {
    {"mce: [Hardware Error]: Machine check events logged", "[Hardware Error]: Corrected error, no action required.",
     "[Hardware Error]: CPU:2 (17:31:0) MC17_STATUS[Over|CE|MiscV|AddrV|-|-|SyndV|CECC|-|-|Scrub]: 0xdc2041000000011b",
     "[Hardware Error]: Error Addr: 0x000000035e40f300",
     "[Hardware Error]: IPID: 0x0000009600050f00, Syndrome: 0x09fd00400a801203",
     "[Hardware Error]: Unified Memory Controller Ext. Error Code: 0, DRAM ECC error.",
     "EDAC MC0: 1 CE Cannot decode normalized address on mc#0csrow#1channel#2 (csrow:1 channel:2 page:0x0 offset:0x0)",
     "[Hardware Error]: cache level: L3/GEN, tx: GEN, mem-tx: RD"},
    {"mce: [Hardware Error]: Machine check events logged",
     "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 7: 8c00004000010090",
     "mce: [Hardware Error]: TSC 0 ADDR 2f4ec6d80 MISC 200401c089801086 ",
     "mce: [Hardware Error]: PROCESSOR 0:606a6 TIME 1764000000 SOCKET 0 APIC 0 microcode d0003a5"},
    {"{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0",
     "{1}[Hardware Error]: It has been corrected by h/w and requires no further action",
     "{1}[Hardware Error]: event severity: corrected", "{1}[Hardware Error]:  Error 0, type: corrected",
     "{1}[Hardware Error]:   section_type: PCIe error", "{1}[Hardware Error]:   port_type: 4, root port",
     "{1}[Hardware Error]:   version: 3.0", "{1}[Hardware Error]:   command: 0x0547, status: 0x4010",
     "{1}[Hardware Error]:   device_id: 0000:40:01.1", "{1}[Hardware Error]:   slot: 1",
     "{1}[Hardware Error]:   secondary_bus: 0x41", "{1}[Hardware Error]:   vendor_id: 0x1022, device_id: 0x14ab",
     "{1}[Hardware Error]:   class_code: 060400",
     "{1}[Hardware Error]:   bridge: secondary_status: 0x2000, control: 0x0012",
     "{1}[Hardware Error]:   aer_uncor_status: 0x00000000, aer_uncor_mask: 0x04500000",
     "{1}[Hardware Error]:   aer_uncor_severity: 0x004e2030"},
    {"{2}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1",
     "{2}[Hardware Error]: It has been corrected by h/w and requires no further action",
     "{2}[Hardware Error]: event severity: corrected", "{2}[Hardware Error]:  Error 0, type: corrected",
     "{2}[Hardware Error]:   section_type: IA32/X64 processor error",
     "{2}[Hardware Error]:   Error Structure Type: cache error",
     "{2}[Hardware Error]:   Check Information: 0x0000000000c000ff", "{2}[Hardware Error]:    Uncorrected: false"},
};
const std::vector<std::vector<std::string>> kUncorrectedReports = {
    {"mce: [Hardware Error]: Machine check events logged", "[Hardware Error]: Uncorrected, software restartable error.",
     "[Hardware Error]: CPU:1 (19:1:1) MC0_STATUS[-|UE|MiscV|AddrV|-|-|SyndV|UECC|-|Poison|-]: 0xbc002800000c0135",
     "[Hardware Error]: Error Addr: 0x00000001d0b4f240",
     "[Hardware Error]: Load Store Unit Ext. Error Code: 12, DC Data error type 1 and poison consumption."},
    {"[Hardware Error]: Deferred error, no action required.",
     "[Hardware Error]: CPU:0 (19:1:1) MC21_STATUS[-|-|MiscV|AddrV|-|-|SyndV|UECC|Deferred|-|-]: 0x9c2030000001011b",
     "[Hardware Error]: Unified Memory Controller Ext. Error Code: 1, DRAM ECC error."},
    {"mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 1: bd80000000100134",
     "mce: [Hardware Error]: RIP 33:<00000000004011d6> ", "mce: [Hardware Error]: TSC 1f2 ADDR 2f4ec6d80 MISC 86 "},
    {"{3}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 2",
     "{3}[Hardware Error]: event severity: recoverable", "{3}[Hardware Error]:  Error 0, type: recoverable",
     "{3}[Hardware Error]:   section_type: memory error", "{3}[Hardware Error]:   physical_address: 0x00000001d0b4f240",
     "{3}[Hardware Error]:   error_type: 3, multi-bit ECC"},
    {"{4}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0",
     "{4}[Hardware Error]: event severity: fatal", "{4}[Hardware Error]:  Error 0, type: fatal",
     "{4}[Hardware Error]:   section_type: PCIe error", "{4}[Hardware Error]:   port_type: 4, root port",
     "{4}[Hardware Error]:   aer_uncor_status: 0x00040000, aer_uncor_mask: 0x04500000"},
};

TEST_F(NodeProbes, CorrectedErrorsInTheKernelLogAreNoFinding) {
  set("dev/kmsg", "");
  const auto probe = make_kernel_log_probe(sysroot_);
  std::ofstream log(root_ / "dev/kmsg", std::ios::app);
  for (const std::vector<std::string>& report : kCorrectedReports) {
    log << records(report) << std::flush;
    EXPECT_THAT(look(*probe), IsEmpty()) << report.at(1);
  }
  for (const std::vector<std::string>& report : kUncorrectedReports) {
    log << records(report) << std::flush;
    EXPECT_THAT(look(*probe), ElementsAre("kernelHardwareError")) << report.front();
    probe->forget();
  }
}

TEST_F(NodeProbes, Leftovers) {
  const auto probe = make_leftover_probe(sysroot_, {.leftover_bytes = 1000});
  const auto set_process = [&](int pid, const std::string& name, int user, char state = 'S') {
    set(fmt::format("proc/{}/status", pid),
        fmt::format("Name:\t{0}\nState:\t{1} (x)\nUid:\t{2}\t{2}\n", name, state, user));
  };
  set_process(1, "systemd", 0);
  set_process(20, "sshd", 1000);
  set_process(21, "python3", 65534);
  set_process(24, "sshd-session", 1000);
  set_process(25, "slurmrestd", 64030);  // Debian's user slurm
  set_process(26, "service", 61200);     // a user that systemd made for a service
  set_process(22, "python3", 1000, 'Z');
  set_process(23, "tessera", 0);
  set("proc/23/cmdline", std::string("tessera\0health\0serve\0", 21));
  set("dev/shm/tessera-7/memory", std::string(5000, 'x'));
  set("dev/shm/small", std::string(1000, 'x'));
  EXPECT_THAT(look(*probe), IsEmpty());
  set_process(32, "python3", 1'200'345, 'R');  // a user of a directory
  EXPECT_THAT(look(*probe), ElementsAre("leftoverProcess process 32"));
  set_process(32, "python3", 1'200'345, 'Z');
  set_process(30, "python3", 1000, 'D');
  set_process(31, "tessera", 0);
  set("proc/31/cmdline", std::string("tessera\0train\0", 14));
  set("dev/shm/run7/memory/large", std::string(1000, 'x'));
  EXPECT_THAT(look(*probe),
              ElementsAre("leftoverMemory /dev/shm", "leftoverProcess process 30", "leftoverProcess process 31"));
  // The check does not report itself, nor the shell that started it.
  set_process(30, "python3", 1000, 'Z');
  set_process(40, "bash", 1000);
  EXPECT_THAT(look(*probe), Contains("leftoverProcess process 40"));
  set("proc/self/status", "Name:\ttessera\nPid:\t31\nPPid:\t40\nUid:\t0\n");
  set("proc/40/status", "Name:\tbash\nState:\tS (x)\nPid:\t40\nPPid:\t1\nUid:\t1000\t1000\n");
  EXPECT_THAT(look(*probe), ElementsAre("leftoverMemory /dev/shm"));
  remove("proc/self");
  set_process(40, "bash", 1000, 'Z');
  set("etc/login.defs", "# users\nUID_MIN 2000\nUID_MAX\t\t64000\n");
  EXPECT_THAT(look(*probe),
              ElementsAre("leftoverMemory /dev/shm", "leftoverProcess process 26", "leftoverProcess process 31"));
}

TEST_F(NodeProbes, FilesThatVanishOrHoldNonsenseAreNoFaults) {
  const auto network = make_network_probe(sysroot_), memory = make_memory_probe(sysroot_),
             disk = make_disk_probe(sysroot_, {"/nowhere"});
  const std::string huge(300'000, '9');
  for (const std::string& text : {std::string("4: ACTIVE"), std::string(), std::string("\0\xff garbage", 10), huge,
                                  std::string("-1"), std::string("99999999999999999999999")}) {
    for (const char* path : {"counters/symbol_error", "rate"}) set(std::string(kPort) + path, text);
    set(std::string(kPort) + "state", "4: ACTIVE");
    for (const char* path : {"sys/devices/system/edac/mc/mc0/ce_count", "proc/meminfo", "proc/vmstat", "proc/mounts",
                             "sys/block/sda/device/ioerr_cnt"}) {
      set(path, text);
    }
    for (Probe* probe : {network.get(), memory.get(), disk.get()}) EXPECT_NO_THROW(look(*probe)) << text.substr(0, 20);
  }
  remove("sys");
  remove("proc");
  for (Probe* probe : {memory.get(), disk.get()}) EXPECT_THAT(look(*probe), IsEmpty());
  EXPECT_THAT(look(*network), ElementsAre("networkLink mlx5_0 port 1"));  // the port was up before
}

/// Simulates an hour in which every sensor moves below its limit.
TEST_F(NodeProbes, NoiseMakesNoNodeBad) {
  std::vector<std::unique_ptr<Probe>> probes = make_node_probes(sysroot_);
  probes.pop_back();  // the probe of the kernel's log, which is missing here
  Judge judge("n1", {});
  set(std::string(kPort) + "state", "4: ACTIVE");
  set(std::string(kPort) + "rate", "400 Gb/sec");
  for (int poll = 0; poll < 720; ++poll) {
    const int minute = poll / 12;
    set(std::string(kPort) + "counters/symbol_error", std::to_string(minute / 2));
    set(std::string(kPort) + "counters/port_rcv_errors", std::to_string(minute / 3));
    set("sys/devices/system/edac/mc/mc0/ce_count", std::to_string(minute / 30));
    set("proc/meminfo", fmt::format("MemTotal: 1000 kB\nMemAvailable: {} kB\n", 30 + poll % 900));
    std::vector<Finding> findings;
    now_ += 5.0;
    for (const auto& probe : probes) {
      const ProbeResult result = probe->look(now_);
      findings.insert(findings.end(), result.findings.begin(), result.findings.end());
    }
    const NodeVerdict verdict = judge.judge(findings, now_);
    ASSERT_NE(verdict.level, HealthLevel::kBad) << poll << ": " << verdict.reason;
  }
}

TEST(ThisMachine, IsLookedAtWithoutAnError) {
  double now = 0.0;
  for (const auto& probe : make_node_probes(Sysroot())) {
    if (probe->name() == "kernel log") continue;  // this probe takes a privilege
    for (int i = 0; i < 2; ++i) EXPECT_NO_THROW(probe->look(now += 5.0)) << probe->name();
  }
}

}  // namespace
}  // namespace tessera
