#include "health/node_probes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/unix_time.h"
#include "health/gpu_probe.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Adds soft evidence that a part is gone which was well: somebody may have taken it away. `was` says how it was. The
/// part is no longer known.
void take_as_removed(KnownGood& known, HeldEvents& gone, Finding finding, std::string_view was, double now) {
  known.forget(finding.part);
  finding.evidence = EvidenceKind::kSoft;
  finding.limit = 1.0;
  finding.detail = fmt::format("{}, and is gone now", was);
  gone.add(std::move(finding), now);
}

/// Adds soft evidence if an error counter of a part rises faster than `limit`.
void judge_rate(const std::string& signal, const std::string& part, const std::string& counter, double rate,
                double limit, std::vector<Finding>& findings) {
  if (rate <= limit) return;
  findings.push_back({.signal = signal,
                      .part = part,
                      .evidence = EvidenceKind::kSoft,
                      .value = rate,
                      .limit = limit,
                      .unit = "per minute",
                      .detail = fmt::format("{} rises by {:.0f} per minute, {:g} are allowed", counter, rate, limit)});
}

class NetworkProbe : public Probe {
 public:
  NetworkProbe(Sysroot sysroot, const NodeLimits& limits) : sysroot_(std::move(sysroot)), limits_(limits) {}

  std::string_view name() const override { return "network"; }
  void forget() override {
    rates_.clear();
    gone_.clear();
  }

  ProbeResult look(double now) override {
    ProbeResult result;
    std::set<std::string> ports_there;
    for (const std::string& device : sysroot_.names("/sys/class/infiniband")) {
      if (is_virtual_function(fmt::format("/sys/class/infiniband/{}", device))) continue;
      const std::string ports = fmt::format("/sys/class/infiniband/{}/ports", device);
      for (const std::string& port : sysroot_.names(ports)) {
        const std::string part = fmt::format("{} port {}", device, port);
        ports_there.insert(part);
        look_at_port(part, fmt::format("{}/{}", ports, port), now, result);
      }
    }
    for (const std::string& part : ports_.missing(ports_there))
      judge_link(ports_, part, false, "gone", result.findings);
    std::set<std::string> interfaces_there;
    for (const std::string& interface : sysroot_.names("/sys/class/net")) {
      interfaces_there.insert(interface);
      look_at_interface(interface, fmt::format("/sys/class/net/{}", interface), now, result);
    }
    for (const std::string& interface : interfaces_.missing(interfaces_there)) {
      // It may be a card that nobody needs, such as the one on USB by which a machine's controller is reached.
      take_as_removed(interfaces_, gone_, {.signal = "networkLink", .part = interface}, "the link was up", now);
    }
    gone_.append_to(result.findings, now);
    return result;
  }

 private:
  /// Returns whether a card is a virtual function of another one. It moves into a container and back.
  bool is_virtual_function(const std::string& folder) const { return sysroot_.exists(folder + "/device/physfn"); }

  static void judge_link(KnownGood& links, const std::string& part, bool is_up, const std::string& state,
                         std::vector<Finding>& findings) {
    if (!links.has_failed(part, is_up)) return;
    findings.push_back({.signal = "networkLink",
                        .part = part,
                        .evidence = EvidenceKind::kHard,
                        .value = 0.0,
                        .limit = 1.0,
                        .detail = fmt::format("the link was up, and is '{}' now", state)});
  }

  void look_at_port(const std::string& part, const std::string& folder, double now, ProbeResult& result) {
    const std::optional<std::string> state = sysroot_.text(folder + "/state");  // "4: ACTIVE"
    if (!state || state->empty()) return;
    const bool is_up = state->find("ACTIVE") != std::string::npos;
    judge_link(ports_, part, is_up, *state, result.findings);
    const std::map<std::string, std::string> labels = {{"port", part}};
    result.measurements.push_back(
        {.name = "infiniband_up", .help = "Whether the port is active", .labels = labels, .value = is_up ? 1.0 : 0.0});
    if (const auto rate = sysroot_.number(folder + "/rate"); rate && is_up) {  // "400 Gb/sec (4X NDR)"
      std::int64_t& highest = highest_rates_[part];
      highest = std::max(highest, *rate);
      if (*rate < highest) {
        result.findings.push_back({.signal = "networkRate",
                                   .part = part,
                                   .evidence = EvidenceKind::kSoft,
                                   .value = static_cast<double>(*rate),
                                   .limit = static_cast<double>(highest),
                                   .unit = "Gb/s",
                                   .detail = fmt::format("runs at {} Gb/s, and ran at {}", *rate, highest)});
      }
    }
    constexpr std::string_view kDiscards = "port_xmit_discards";  // congestion raises it, which is no error of the port
    constexpr std::array<std::string_view, 6> kCounters = {
        "symbol_error",    "link_error_recovery",         "link_downed",
        "port_rcv_errors", "local_link_integrity_errors", kDiscards};
    for (const std::string_view counter : kCounters) {
      const auto value = sysroot_.number(fmt::format("{}/counters/{}", folder, counter));
      if (!value) continue;
      result.measurements.push_back({.name = "infiniband_errors_total",
                                     .help = "Error counters of the port",
                                     .labels = {{"port", part}, {"counter", std::string(counter)}},
                                     .value = static_cast<double>(*value),
                                     .is_counter = true});
      if (counter == kDiscards) continue;
      const double rate = rates_.per_minute(fmt::format("{}{}", part, counter), static_cast<double>(*value), now);
      judge_rate("networkErrors", part, std::string(counter), rate, limits_.network_errors_per_minute, result.findings);
    }
  }

  void look_at_interface(const std::string& interface, const std::string& folder, double now, ProbeResult& result) {
    if (!sysroot_.exists(folder + "/device")) return;  // not a card, but a bridge or a container's end
    if (is_virtual_function(folder)) return;
    const std::optional<std::string> state = sysroot_.text(folder + "/operstate"),
                                     flags = sysroot_.text(folder + "/flags");  // "0x1003"
    if (!state || !flags) return;
    constexpr unsigned long kUp = 1;  // IFF_UP: somebody has enabled the interface
    const bool is_wanted = (std::strtoul(flags->c_str(), nullptr, 16) & kUp) != 0;
    if (is_wanted) judge_link(interfaces_, interface, *state == "up", *state, result.findings);
    result.measurements.push_back({.name = "ethernet_up",
                                   .help = "Whether the interface has a carrier",
                                   .labels = {{"interface", interface}},
                                   .value = *state == "up" ? 1.0 : 0.0});
    for (const char* counter : {"rx_errors", "tx_errors"}) {
      const auto value = sysroot_.number(fmt::format("{}/statistics/{}", folder, counter));
      if (!value) continue;
      result.measurements.push_back({.name = "ethernet_errors_total",
                                     .help = "Error counters of the interface",
                                     .labels = {{"interface", interface}, {"counter", counter}},
                                     .value = static_cast<double>(*value),
                                     .is_counter = true});
      const double rate = rates_.per_minute(interface + counter, static_cast<double>(*value), now);
      judge_rate("ethernetErrors", interface, counter, rate, limits_.ethernet_errors_per_minute, result.findings);
    }
  }

  Sysroot sysroot_;
  NodeLimits limits_;
  KnownGood ports_, interfaces_;
  HeldEvents gone_;  // interfaces
  std::map<std::string, std::int64_t> highest_rates_;
  CounterRates rates_;
};

class DiskProbe : public Probe {
 public:
  DiskProbe(Sysroot sysroot, std::vector<fs::path> folders, const NodeLimits& limits)
      : sysroot_(std::move(sysroot)), folders_(std::move(folders)), limits_(limits) {}

  std::string_view name() const override { return "disk"; }
  void forget() override {
    rates_.clear();
    gone_.clear();
  }

  ProbeResult look(double now) override {
    ProbeResult result;
    const std::set<std::string> mounted = look_at_mounts(result.findings);
    for (const std::string& disk : sysroot_.names("/sys/block")) {
      const auto errors = sysroot_.number(fmt::format("/sys/block/{}/device/ioerr_cnt", disk));
      if (!errors) continue;
      const double rate = rates_.per_minute(disk, static_cast<double>(*errors), now);
      judge_rate("diskErrors", disk, "ioerr_cnt", rate, limits_.disk_errors_per_minute, result.findings);
    }
    std::set<std::string> disks_there;
    for (const std::string& disk : sysroot_.names("/sys/class/nvme")) {
      const std::optional<std::string> state = sysroot_.text(fmt::format("/sys/class/nvme/{}/state", disk));
      if (!state || state->empty()) continue;
      disks_there.insert(disk);
      is_held_[disk] = has_holders(disk);
      judge_disk(disk, *state, result.findings);
    }
    for (const std::string& disk : disks_.missing(disks_there)) look_for_gone(disk, mounted, now, result.findings);
    gone_.append_to(result.findings, now);
    for (const fs::path& folder : folders_) look_at_room(folder, result);
    return result;
  }

 private:
  void judge_disk(const std::string& disk, const std::string& state, std::vector<Finding>& findings) {
    if (!disks_.has_failed(disk, state == "live")) return;
    findings.push_back({.signal = "diskState",
                        .part = disk,
                        .evidence = EvidenceKind::kHard,
                        .limit = 1.0,
                        .detail = fmt::format("the disk was live, and is '{}' now", state)});
  }

  /// Returns whether a disk, or a partition of it, is a part of a RAID, a logical volume or the like.
  bool has_holders(const std::string& disk) const {
    for (const std::string& block : sysroot_.names("/sys/block")) {
      if (!block.starts_with(disk + "n")) continue;
      const std::string folder = fmt::format("/sys/block/{}", block);
      if (!sysroot_.names(folder + "/holders").empty()) return true;
      for (const std::string& part : sysroot_.names(folder)) {
        if (part.starts_with(block) && !sysroot_.names(fmt::format("{}/{}/holders", folder, part)).empty()) return true;
      }
    }
    return false;
  }

  /// Judges a disk that is gone. If it was neither mounted nor a part of a volume, somebody may have detached it.
  void look_for_gone(const std::string& disk, const std::set<std::string>& mounted, double now,
                     std::vector<Finding>& findings) {
    const std::string device = fmt::format("/dev/{}n", disk);  // of "nvme0" the namespace "/dev/nvme0n1"
    if (is_held_[disk] ||
        std::ranges::any_of(mounted, [&](const std::string& name) { return name.starts_with(device); })) {
      return judge_disk(disk, "gone", findings);
    }
    take_as_removed(disks_, gone_, {.signal = "diskState", .part = disk}, "the disk was live and not in use", now);
  }

  /// Judges the mounts of devices. Returns the devices.
  std::set<std::string> look_at_mounts(std::vector<Finding>& findings) {
    std::set<std::string> devices;
    std::ifstream mounts(sysroot_ / "/proc/mounts");  // as long as it is: a node with many containers has many mounts
    std::map<std::pair<std::string, std::string>, bool> writable;  // by place and device
    for (std::string line; std::getline(mounts, line);) {
      std::istringstream words(line);
      std::string device, place, type, options;
      if (!(words >> device >> place >> type >> options) || !device.starts_with("/dev/")) continue;
      // A device may be mounted twice at a place. If it breaks, both are read-only.
      bool& is_writable = writable[{place, device}];
      is_writable = is_writable || !(options == "ro" || options.starts_with("ro,"));
    }
    for (const auto& [mount, is_writable] : writable) {
      const auto& [place, device] = mount;
      devices.insert(device);
      if (mounts_.has_failed(fmt::format("{} {}", device, place), is_writable)) {
        findings.push_back({.signal = "diskReadOnly",
                            .part = place,
                            .evidence = EvidenceKind::kHard,
                            .limit = 1.0,
                            .detail = fmt::format("the file system of {} was writable, and is read-only now", device)});
      }
    }
    return devices;
  }

  void look_at_room(const fs::path& folder, ProbeResult& result) {
    struct statvfs room {};
    if (::statvfs((sysroot_ / folder.string()).c_str(), &room) != 0 || room.f_blocks == 0) return;
    const double share = static_cast<double>(room.f_bavail) / static_cast<double>(room.f_blocks);
    const double files =
        room.f_files == 0 ? 1.0 : static_cast<double>(room.f_ffree) / static_cast<double>(room.f_files);
    result.measurements.push_back({.name = "disk_free_ratio",
                                   .help = "Free share of the file system",
                                   .labels = {{"folder", folder.string()}},
                                   .value = share});
    if (std::min(share, files) >= limits_.free_share) return;
    result.findings.push_back({.signal = "diskFull",
                               .part = folder.string(),
                               .evidence = EvidenceKind::kAlert,
                               .value = std::min(share, files),
                               .limit = limits_.free_share,
                               .detail = fmt::format("{:.1f} % of the bytes and {:.1f} % of the files are free",
                                                     100.0 * share, 100.0 * files)});
  }

  Sysroot sysroot_;
  std::vector<fs::path> folders_;
  NodeLimits limits_;
  KnownGood disks_, mounts_;
  std::map<std::string, bool> is_held_;  // whether a disk is a part of a volume, or was while it was there
  HeldEvents gone_;                      // disks
  CounterRates rates_;
};

/// Returns the word after a key at the beginning of a line, as files of /proc have them, or "" if there is none.
std::string word_behind(std::string_view key, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first, word;
    if (words >> first >> word && first == key) return word;
  }
  return "";
}

class MemoryProbe : public Probe {
 public:
  MemoryProbe(Sysroot sysroot, const NodeLimits& limits) : sysroot_(std::move(sysroot)), limits_(limits) {}

  std::string_view name() const override { return "memory"; }
  void forget() override {
    uncorrected_.clear();
    rates_.clear();
  }

  ProbeResult look(double now) override {
    ProbeResult result;
    for (const std::string& controller : sysroot_.names("/sys/devices/system/edac/mc")) {
      const std::string folder = fmt::format("/sys/devices/system/edac/mc/{}", controller);
      if (const auto errors = sysroot_.number(folder + "/ue_count")) {
        if (const std::int64_t rise = uncorrected_.rise(controller, *errors); rise > 0) {
          result.findings.push_back({.signal = "memoryUncorrected",
                                     .part = controller,
                                     .evidence = EvidenceKind::kHard,
                                     .value = static_cast<double>(rise),
                                     .detail = fmt::format("{} uncorrected memory errors", rise)});
        }
      }
      if (const auto errors = sysroot_.number(folder + "/ce_count")) {
        const double rate = rates_.per_minute(controller, static_cast<double>(*errors), now);
        judge_rate("memoryCorrected", controller, "ce_count", rate, limits_.corrected_memory_errors_per_minute,
                   result.findings);
        result.measurements.push_back({.name = "memory_corrected_errors_total",
                                       .help = "Memory errors that were corrected",
                                       .labels = {{"controller", controller}},
                                       .value = static_cast<double>(*errors),
                                       .is_counter = true});
      }
    }
    const std::string memory = sysroot_.text("/proc/meminfo").value_or("");
    const double total = number_behind("MemTotal:", memory), available = number_behind("MemAvailable:", memory);
    if (total > 0.0) {
      result.measurements.push_back({.name = "memory_available_ratio",
                                     .help = "Share of the memory that processes can have",
                                     .value = available / total});
      if (available / total < limits_.free_share) {
        result.findings.push_back(
            {.signal = "memoryLow",
             .evidence = EvidenceKind::kAlert,
             .value = available / total,
             .limit = limits_.free_share,
             .detail = fmt::format("{:.1f} % of the memory are left", 100.0 * available / total)});
      }
    }
    const std::string statistics = sysroot_.text("/proc/vmstat").value_or("");
    const double killed = number_behind("oom_kill", statistics);
    if (!statistics.empty() && rates_.per_minute("oom_kill", killed, now) > 0.0) {
      result.findings.push_back({.signal = "outOfMemory",
                                 .evidence = EvidenceKind::kAlert,
                                 .value = killed,
                                 .detail = "the kernel has killed a process for want of memory"});
    }
    return result;
  }

 private:
  /// Returns the number behind a key, or 0 if there is none.
  static double number_behind(std::string_view key, const std::string& text) {
    double value = 0.0;
    std::istringstream(word_behind(key, text)) >> value;
    return value;
  }

  Sysroot sysroot_;
  NodeLimits limits_;
  CounterRises uncorrected_;
  CounterRates rates_;
};

class LeftoverProbe : public Probe {
 public:
  LeftoverProbe(Sysroot sysroot, const NodeLimits& limits) : sysroot_(std::move(sysroot)), limits_(limits) {}

  std::string_view name() const override { return "leftovers"; }

  ProbeResult look(double) override {
    ProbeResult result;
    read_user_range();
    const std::set<std::string> own = own_processes();
    for (const std::string& pid : sysroot_.names("/proc")) {
      if (pid.find_first_not_of("0123456789") != std::string::npos || own.contains(pid)) continue;
      look_at_process(pid, result.findings);
    }
    look_at_shared_memory(result.findings);
    return result;
  }

 private:
  /// Returns whether a user is no service. Directories such as LDAP give people numbers beyond those of this machine.
  bool is_person(std::int64_t user) const {
    constexpr std::int64_t kLastOfMachine = 65'535;
    return (user >= first_user_ && user <= last_user_) || user > kLastOfMachine;
  }

  /// Reads which numbers people of this machine have. Services of systemd and of distributions have others.
  void read_user_range() {
    std::istringstream lines(sysroot_.text("/etc/login.defs").value_or(""));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string key;
      std::int64_t value = 0;
      if (!(words >> key >> value)) continue;
      if (key == "UID_MIN") first_user_ = value;
      if (key == "UID_MAX") last_user_ = value;
    }
  }

  /// Returns this process and those that started it, such as the shell of a person who checks the node.
  std::set<std::string> own_processes() const {
    std::set<std::string> pids;
    std::string pid = "self";
    for (std::string status; pid != "0"; pid = word_behind("PPid:", status)) {
      status = sysroot_.text("/proc/" + pid + "/status").value_or("");
      if (status.empty() || !pids.insert(word_behind("Pid:", status)).second) break;
    }
    return pids;
  }

  void look_at_process(const std::string& pid, std::vector<Finding>& findings) {
    const std::string status = sysroot_.text("/proc/" + pid + "/status").value_or("");
    const std::string command = word_behind("Name:", status), state = word_behind("State:", status);
    std::int64_t user = 0;
    std::istringstream(word_behind("Uid:", status)) >> user;
    constexpr std::array<std::string_view, 5> kOfSessions = {"systemd", "(sd-pam)", "sshd", "sshd-session",
                                                             "dbus-daemon"};
    constexpr std::array<std::string_view, 3> kOfRuns = {"tessera", "mpirun", "orted"};
    const bool is_of_user = is_person(user) && std::ranges::find(kOfSessions, command) == kOfSessions.end();
    const bool is_of_run = std::ranges::find(kOfRuns, command) != kOfRuns.end();
    if (state == "Z" || (!is_of_user && !is_of_run) || is_health_command(pid)) return;
    findings.push_back(
        {.signal = "leftoverProcess",
         .part = fmt::format("process {}", pid),
         .evidence = EvidenceKind::kHard,
         .value = static_cast<double>(user),
         .detail = fmt::format("'{}' of user {} runs on an idle node (state {})", command, user, state)});
  }

  /// Returns whether the process is a health daemon, or another check.
  bool is_health_command(const std::string& pid) const {
    const std::string line = sysroot_.text("/proc/" + pid + "/cmdline").value_or("");  // words, each before a zero
    return line.find(std::string_view("\0health\0", 8)) != std::string::npos;
  }

  /// Adds the size of a regular file. Anything else has none.
  static void add_file(const fs::path& path, double& num_bytes) {
    std::error_code unreadable;
    const std::uintmax_t size = fs::is_regular_file(path, unreadable) ? fs::file_size(path, unreadable) : 0;
    if (!unreadable) num_bytes += static_cast<double>(size);
  }

  void look_at_shared_memory(std::vector<Finding>& findings) const {
    double num_bytes = 0.0;
    std::error_code unreadable;
    for (const std::string& name : sysroot_.names("/dev/shm")) {
      if (name.starts_with("tessera-")) continue;
      const fs::path path = sysroot_ / ("/dev/shm/" + name);
      add_file(path, num_bytes);
      for (fs::recursive_directory_iterator entry(path, unreadable), end; !unreadable && entry != end;
           entry.increment(unreadable)) {
        add_file(entry->path(), num_bytes);
      }
    }
    if (num_bytes <= limits_.leftover_bytes) return;
    findings.push_back({.signal = "leftoverMemory",
                        .part = "/dev/shm",
                        .evidence = EvidenceKind::kHard,
                        .value = num_bytes,
                        .limit = limits_.leftover_bytes,
                        .unit = "bytes",
                        .detail = fmt::format("files of {:.1f} GB lie on an idle node", 1e-9 * num_bytes)});
  }

  Sysroot sysroot_;
  NodeLimits limits_;
  std::int64_t first_user_ = 1000, last_user_ = 60'000;  // if login.defs does not say
};

class ClockProbe : public Probe {
 public:
  ClockProbe(const NodeLimits& limits, int (*read_clock)(timex*)) : limits_(limits), read_clock_(read_clock) {}

  std::string_view name() const override { return "clock"; }
  void forget() override { jumps_.clear(); }

  ProbeResult look(double now) override {
    ProbeResult result;
    timex state{};
    if (const int status = read_clock_(&state); status >= 0) {
      const double unit = (state.status & STA_NANO) != 0 ? 1e-9 : 1e-6,
                   offset = static_cast<double>(state.offset) * unit;
      result.measurements.push_back(
          {.name = "clock_offset_seconds", .help = "Offset of the clock, as the kernel knows it", .value = offset});
      // The kernel limits `offset` to 0.5 s, so a large one shows only in the largest error that it estimates.
      const double most = 1e-6 * static_cast<double>(state.maxerror);
      const bool is_free = status == TIME_ERROR || (state.status & STA_UNSYNC) != 0;
      if (is_free || most > limits_.clock_error_seconds) {
        result.findings.push_back(
            {.signal = "clockOffset",
             .evidence = EvidenceKind::kAlert,
             .value = most,
             .limit = limits_.clock_error_seconds,
             .unit = "s",
             .detail = is_free ? "nobody synchronizes the clock, as the kernel knows (chrony needs rtcsync)"
                               : fmt::format("the clock may be off by {:.3f} s", most)});
      }
    }
    const double difference = unix_time() - now;
    if (difference_ && std::abs(difference - *difference_) > limits_.clock_jump_seconds) {
      jumps_.add({.signal = "clockJump",
                  .evidence = EvidenceKind::kAlert,
                  .value = difference - *difference_,
                  .limit = limits_.clock_jump_seconds,
                  .unit = "s",
                  .detail = fmt::format("the clock jumped by {:.1f} s", difference - *difference_)},
                 now);
    }
    difference_ = difference;
    jumps_.append_to(result.findings, now);
    return result;
  }

 private:
  NodeLimits limits_;
  int (*read_clock_)(timex*);
  std::optional<double> difference_;  // between the time of day and a monotonic clock
  HeldEvents jumps_;
};

class KernelLogProbe : public Probe {
 public:
  explicit KernelLogProbe(const Sysroot& sysroot)
      : descriptor_(::open((sysroot / "/dev/kmsg").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (descriptor_ >= 0) ::lseek(descriptor_, 0, SEEK_END);
  }
  ~KernelLogProbe() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  KernelLogProbe(const KernelLogProbe&) = delete;
  KernelLogProbe& operator=(const KernelLogProbe&) = delete;

  std::string_view name() const override { return "kernel log"; }
  void forget() override { held_.clear(); }

  ProbeResult look(double now) override {
    require(descriptor_ >= 0, "cannot read /dev/kmsg: is this process allowed to? (CAP_SYSLOG)");
    ProbeResult result;
    std::array<char, 8192> record{};
    for (int num_records = 0; num_records < 10'000; ++num_records) {
      const ssize_t size = ::read(descriptor_, record.data(), record.size());
      if (size < 0 && errno == EPIPE) continue;  // records were overwritten before they were read
      if (size <= 0) break;
      const std::string_view text(record.data(), static_cast<std::size_t>(size));
      for (std::size_t begin = 0; begin < text.size();) {  // a file and a record with a dictionary have several lines
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        judge_line(text.substr(begin, end - begin), now);
        begin = end + 1;
      }
    }
    held_.append_to(result.findings, now);
    return result;
  }

 private:
  struct Pattern {
    std::string_view text, signal;
    EvidenceKind evidence;
  };

  void judge_line(std::string_view line, double now) {
    static constexpr std::array kPatterns = {
        Pattern{"NVRM: Xid", "kernelXid", EvidenceKind::kSoft},
        Pattern{"[Hardware Error]", "kernelHardwareError", EvidenceKind::kSoft},
        Pattern{"EXT4-fs error", "kernelDiskError", EvidenceKind::kSoft},
        Pattern{"I/O error", "kernelDiskError", EvidenceKind::kSoft},
        Pattern{"critical medium error", "kernelDiskError", EvidenceKind::kSoft},
        Pattern{"Corruption detected", "kernelDiskError", EvidenceKind::kSoft},           // XFS
        Pattern{"Corruption of in-memory data", "kernelDiskError", EvidenceKind::kSoft},  // XFS
        Pattern{"blocked for more than", "kernelHungTask", EvidenceKind::kSoft},
        Pattern{"NETDEV WATCHDOG", "kernelNetwork", EvidenceKind::kSoft},
        Pattern{"Out of memory: Killed", "kernelOutOfMemory", EvidenceKind::kAlert},
    };
    const std::string_view message = line.substr(line.find(';') + 1);  // the whole line if there is no ';'
    for (const Pattern& pattern : kPatterns) {
      if (message.find(pattern.text) == message.npos) continue;
      if (pattern.signal == "kernelHardwareError" && !is_uncorrected(message)) return;
      constexpr std::size_t kShown = 160;
      const std::uint64_t xid = pattern.signal == "kernelXid" ? xid_of(message) : 0;
      // The XIDs that follow a fatal one must not take its place.
      held_.add({.signal = std::string(pattern.signal),
                 .part = xid == 0 ? "" : fmt::format("XID {}", xid),
                 .evidence = xid == 0 ? pattern.evidence : evidence_of_xid(xid),
                 .detail = fmt::format("the kernel said: {}", message.substr(0, kShown))},
                now);
      return;
    }
  }

  /// Returns the XID of "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus", or 0 if there is none.
  static std::uint64_t xid_of(std::string_view message) {
    constexpr std::string_view kBeforeNumber = "): ";
    const std::size_t at = message.find(kBeforeNumber, message.find("NVRM: Xid"));
    std::uint64_t xid = 0;
    if (at != message.npos) {
      std::from_chars(message.data() + at + kBeforeNumber.size(), message.data() + message.size(), xid);
    }
    return xid;
  }

  /// Returns whether a line about the hardware says that an error was not corrected. A report has many lines, and one
  /// of them says this. The words are those of the kernel's mce/core.c, mce_amd.c and cper.c. The rate of corrected
  /// errors counts as EDAC has it.
  static bool is_uncorrected(std::string_view message) {
    static constexpr std::array<std::string_view, 8> kWords = {
        "Machine Check Exception",  // Intel: an error interrupted the processor
        "Uncorrected, software",    // AMD
        "System Fatal error",       // AMD
        "Deferred error",           // AMD: it could not be corrected, and nobody has used the data yet
        "severity: recoverable",    // firmware: it was not corrected, and the kernel may go on
        "type: recoverable",        // firmware, of one part of the report
        "severity: fatal",          // firmware
        "type: fatal",              // firmware
    };
    return std::ranges::any_of(kWords, [&](std::string_view word) { return message.find(word) != message.npos; });
  }

  int descriptor_;
  HeldEvents held_;
};

}  // namespace

std::unique_ptr<Probe> make_network_probe(const Sysroot& sysroot, const NodeLimits& limits) {
  return std::make_unique<NetworkProbe>(sysroot, limits);
}
std::unique_ptr<Probe> make_disk_probe(const Sysroot& sysroot, std::vector<fs::path> folders,
                                       const NodeLimits& limits) {
  return std::make_unique<DiskProbe>(sysroot, std::move(folders), limits);
}
std::unique_ptr<Probe> make_memory_probe(const Sysroot& sysroot, const NodeLimits& limits) {
  return std::make_unique<MemoryProbe>(sysroot, limits);
}
std::unique_ptr<Probe> make_clock_probe(const NodeLimits& limits, int (*read_clock)(timex*)) {
  return std::make_unique<ClockProbe>(limits, read_clock);
}
std::unique_ptr<Probe> make_kernel_log_probe(const Sysroot& sysroot) {
  return std::make_unique<KernelLogProbe>(sysroot);
}

std::unique_ptr<Probe> make_leftover_probe(const Sysroot& sysroot, const NodeLimits& limits) {
  return std::make_unique<LeftoverProbe>(sysroot, limits);
}

std::vector<std::unique_ptr<Probe>> make_node_probes(const Sysroot& sysroot, const NodeLimits& limits) {
  std::vector<std::unique_ptr<Probe>> probes;
  probes.push_back(make_network_probe(sysroot, limits));
  probes.push_back(make_disk_probe(sysroot, {"/", "/tmp", "/dev/shm"}, limits));
  probes.push_back(make_memory_probe(sysroot, limits));
  if (sysroot.is_real()) probes.push_back(make_clock_probe(limits));
  probes.push_back(make_kernel_log_probe(sysroot));
  return probes;
}

}  // namespace tessera
