#include "health/gpu_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "health/nvml.h"
#include "health/readings.h"

namespace tessera {
namespace {

constexpr unsigned kMaxLinks = 36;  // NVML_NVLINK_MAX_LINKS
constexpr unsigned kRecoveryAction = 230;
constexpr const char* kCountHelp = "GPUs that NVML counts";

constexpr std::array<std::uint64_t, 14> kHardXids = {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143};
constexpr std::array<std::uint64_t, 6> kProgramXids = {13, 31, 43, 45, 68, 69};

struct Counter {
  unsigned field;
  const char* name;
};
/// Error counters of an NVLink: those of Hopper, then those of Blackwell.
constexpr std::array kLinkCounters = {
    Counter{161, "replay"},          Counter{162, "recovery"},  Counter{163, "crc"},
    Counter{208, "receive errors"},  Counter{211, "integrity"}, Counter{213, "recovery, successful"},
    Counter{214, "recovery, failed"}};

/// A bit of nvmlClocksEventReason that means that a GPU with work is slowed down.
struct Throttle {
  std::uint64_t bit;
  const char* name;
};
constexpr std::array kThrottles = {Throttle{0x8, "hardware slowdown"}, Throttle{0x20, "software thermal slowdown"},
                                   Throttle{0x40, "hardware thermal slowdown"}, Throttle{0x80, "power brake"}};

class GpuProbe : public Probe {
 public:
  explicit GpuProbe(GpuProbeOptions options) : options_(std::move(options)) {}

  std::string_view name() const override { return "gpu"; }
  void forget() override {
    xids_.clear();
    uncorrected_.clear();
    rates_.clear();
  }

  ProbeResult look(double now) override {
    ProbeResult result;
    if (!nvml_ && !open(result)) return result;
    std::vector<nvml::Slot> slots = nvml_->slots();
    // A GPU that this process may not open is not its own.
    std::erase_if(slots, [](const nvml::Slot& slot) { return slot.device == nullptr && !slot.is_lost(); });
    const auto count = static_cast<int>(slots.size());
    result.measurements.push_back({.name = kGpuCountName, .help = kCountHelp, .value = 1.0 * count});
    most_ = std::max({most_, count, options_.expected_gpus});
    if (count < most_) {
      add(result, "gpuMissing", "", EvidenceKind::kHard, count, most_, "",
          fmt::format("{} of {} GPUs are there", count, most_));
    }
    for (const nvml::Slot& slot : slots) {
      const std::string gpu = name_of(slot);
      if (slot.device == nullptr) {
        add_lost(slot.status, gpu, result);
        continue;
      }
      names_[slot.device] = gpu;
      look_at(slot.device, gpu, now, result);
    }
    for (const nvml::XidEvent& event : nvml_->take_xids()) note_xid(event, now);
    std::erase_if(xids_, [&](const auto& item) {
      return evidence_of_xid(item.first.second) != EvidenceKind::kHard && now - item.second.last > kHoldSeconds;
    });
    for (const nvml::Slot& slot : slots) {
      const std::string gpu = name_of(slot);
      result.measurements.push_back({.name = "gpu_xid_total",
                                     .help = "XIDs since the daemon began",
                                     .labels = {{"gpu", gpu}},
                                     .value = 1.0 * num_xids_[gpu],
                                     .is_counter = true});
    }
    for (const auto& [key, seen] : xids_) {
      const auto& [gpu, xid] = key;
      add(result, "gpuXid", gpu, evidence_of_xid(xid), static_cast<double>(xid), 0.0, "",
          fmt::format("XID {}, {} times", xid, seen.count));
    }
    return result;
  }

 private:
  struct SeenXid {
    int count = 0;
    double last = 0.0;
  };

  static void add(ProbeResult& result, std::string signal, std::string part, EvidenceKind evidence, double value,
                  double limit, std::string unit, std::string detail) {
    result.findings.push_back(
        {std::move(signal), std::move(part), evidence, value, limit, std::move(unit), std::move(detail)});
  }

  bool open(ProbeResult& result) {
    try {
      nvml_.emplace(options_.library);
      return true;
    } catch (const Error& error) {
      result.measurements.push_back({.name = kGpuCountName, .help = kCountHelp, .value = 0.0});
      if (options_.expected_gpus == 0) {
        require(!has_nvidia(), "the node has NVIDIA's driver or GPUs, but {}", error.what());
        return false;
      }
      add(result, "gpuMissing", "", EvidenceKind::kHard, 0.0, options_.expected_gpus, "",
          fmt::format("{} GPUs are expected, but {}", options_.expected_gpus, error.what()));
      return false;
    }
  }

  /// Returns whether the kernel knows of NVIDIA's driver, or of a GPU without a display (PCI class 0302).
  bool has_nvidia() const {
    constexpr std::int64_t kNvidia = 0x10de, kComputes = 0x0302;
    if (options_.sysroot.exists("/proc/driver/nvidia")) return true;
    return std::ranges::any_of(options_.sysroot.names("/sys/bus/pci/devices"), [&](const std::string& device) {
      const std::string folder = "/sys/bus/pci/devices/" + device;
      return options_.sysroot.number(folder + "/vendor") == kNvidia &&
             options_.sysroot.number(folder + "/class").value_or(0) >> 8 == kComputes;
    });
  }

  static std::string name_of(const nvml::Slot& slot) { return fmt::format("GPU {}", slot.index); }

  static void add_lost(nvml::Status status, const std::string& gpu, ProbeResult& result) {
    add(result, "gpuLost", gpu, EvidenceKind::kHard, static_cast<double>(status), 0.0, "",
        status == nvml::Status::kGpuIsLost ? "the driver has lost it" : "it must be reset");
  }

  void note_xid(const nvml::XidEvent& event, double now) {
    const auto found = names_.find(event.device);
    const std::string gpu = found == names_.end() ? "GPU ?" : found->second;
    SeenXid& seen = xids_[{gpu, event.xid}];
    ++seen.count;
    seen.last = now;
    ++num_xids_[gpu];
  }

  void look_at(nvml::Device device, const std::string& gpu, double now, ProbeResult& result) {
    const auto measure = [&](const char* metric, const char* help, double value) {
      result.measurements.push_back({.name = metric, .help = help, .labels = {{"gpu", gpu}}, .value = value});
    };
    if (const auto temperature = nvml_->temperature(device)) {
      measure("gpu_temperature_celsius", "Temperature of the GPU", *temperature);
      if (*temperature > options_.limits.temperature) {
        add(result, "gpuTemperature", gpu, EvidenceKind::kAlert, *temperature, options_.limits.temperature, "C",
            fmt::format("{:g} C, {:g} are allowed", *temperature, options_.limits.temperature));
      }
    }
    if (const auto power = nvml_->power(device)) measure("gpu_power_watts", "Power that the GPU draws", *power);
    if (const auto reasons = nvml_->throttle_reasons(device)) {
      bool is_throttled = false;
      for (const Throttle& throttle : kThrottles) {
        if ((*reasons & throttle.bit) == 0) continue;
        is_throttled = true;
        add(result, "gpuThrottled", gpu, EvidenceKind::kAlert, static_cast<double>(*reasons), 0.0, "", throttle.name);
      }
      measure("gpu_throttled", "Whether heat or power slows the GPU down", is_throttled ? 1.0 : 0.0);
    }
    if (const auto errors = nvml_->uncorrected_errors(device)) {
      measure("gpu_uncorrected_errors", "Uncorrected ECC errors since the driver was loaded",
              static_cast<double>(*errors));
      if (const std::int64_t rise = uncorrected_.rise(gpu, static_cast<std::int64_t>(*errors)); rise > 0) {
        add(result, "gpuEcc", gpu, EvidenceKind::kHard, static_cast<double>(rise), 0.0, "",
            fmt::format("{} uncorrected memory errors", rise));
      }
    }
    if (const auto rows = nvml_->remapped_rows(device)) {
      if (rows->has_failed)
        add(result, "gpuRowRemap", gpu, EvidenceKind::kHard, 1.0, 0.0, "", "a row could not be remapped");
      if (rows->is_pending) {
        add(result, "gpuRowRemapPending", gpu, EvidenceKind::kSoft, 1.0, 0.0, "",
            "a row is remapped at the next reset");
      }
    }
    if (const auto action = nvml_->field(device, kRecoveryAction); action && *action != 0) {
      static constexpr std::array kActions = {
          "none",       "reset the GPU", "reboot the node",  "drain peer to peer", "drain and reset",
          "reset IMEX", "reset the bus", "reboot the system"};
      const char* text = *action > 0 && static_cast<std::size_t>(*action) < kActions.size()
                             ? kActions[static_cast<std::size_t>(*action)]
                             : "unknown";
      add(result, "gpuRecoveryAction", gpu, EvidenceKind::kHard, static_cast<double>(*action), 0.0, "",
          fmt::format("the driver asks for: {}", text));
    }
    if (nvml_->is_sram_worn_out(device).value_or(false)) {
      add(result, "gpuSram", gpu, EvidenceKind::kHard, 1.0, 0.0, "", "its SRAM has had more errors than NVIDIA allows");
    }
    look_at_fabric(device, gpu, result);
    look_at_links(device, gpu, now, result);
    if (options_.is_idle) look_for_leftovers(device, gpu, result);
    if (const auto lost = nvml_->take_lost(device)) add_lost(*lost, gpu, result);
  }

  void look_at_fabric(nvml::Device device, const std::string& gpu, ProbeResult& result) {
    const std::optional<nvml::Fabric> fabric = nvml_->fabric(device);
    if (!fabric) return;
    if (fabrics_.has_failed(gpu, fabric->is_complete && fabric->status == 0)) {
      add(result, "gpuFabric", gpu, EvidenceKind::kHard, fabric->status, 0.0, "",
          "it was registered with the NVLink fabric, and is not now");
    }
    if (fabric->health == nvml::Fabric::Health::kUnhealthy) {
      add(result, "gpuFabric", gpu, EvidenceKind::kHard, 1.0, 0.0, "", "the NVLink fabric is unhealthy");
    } else if (fabric->health == nvml::Fabric::Health::kLimited) {
      add(result, "gpuFabricLimited", gpu, EvidenceKind::kSoft, 1.0, 0.0, "", "the NVLink fabric has less capacity");
    }
  }

  /// Finds processes and memory that ended jobs have left on the GPU.
  void look_for_leftovers(nvml::Device device, const std::string& gpu, ProbeResult& result) {
    if (const auto pids = nvml_->processes(device); pids && !pids->empty()) {
      add(result, "leftoverProcess", gpu, EvidenceKind::kHard, static_cast<double>(pids->size()), 0.0, "",
          fmt::format("processes {} compute on an idle node", fmt::join(*pids, ", ")));
    }
    const double used = static_cast<double>(nvml_->used_memory(device).value_or(0));
    if (used > options_.limits.idle_memory_bytes) {
      add(result, "leftoverGpuMemory", gpu, EvidenceKind::kHard, used, options_.limits.idle_memory_bytes, "bytes",
          fmt::format("{:.1f} GB are in use on an idle node", 1e-9 * used));
    }
  }

  void look_at_links(nvml::Device device, const std::string& gpu, double now, ProbeResult& result) {
    int num_up = 0;
    for (unsigned link = 0; link < kMaxLinks; ++link) {
      const std::optional<bool> is_up = nvml_->is_link_up(device, link);
      if (!is_up) continue;
      const std::string part = fmt::format("{} link {}", gpu, link);
      num_up += *is_up ? 1 : 0;
      if (links_.has_failed(part, *is_up)) {
        add(result, "gpuLink", part, EvidenceKind::kHard, 0.0, 1.0, "", "the NVLink was up, and is down");
      }
      for (const Counter& counter : kLinkCounters) {
        const auto value = nvml_->field(device, counter.field, link);
        if (!value) continue;
        result.measurements.push_back(
            {.name = "gpu_link_errors_total",
             .help = "Error counters of an NVLink",
             .labels = {{"gpu", gpu}, {"link", std::to_string(link)}, {"counter", counter.name}},
             .value = static_cast<double>(*value),
             .is_counter = true});
        const double rate = rates_.per_minute(part + counter.name, static_cast<double>(*value), now);
        if (rate <= options_.limits.link_errors_per_minute) continue;
        add(result, "gpuLinkErrors", part, EvidenceKind::kSoft, rate, options_.limits.link_errors_per_minute,
            "per minute", fmt::format("{} rises by {:.0f} per minute", counter.name, rate));
      }
    }
    if (num_up > 0) {
      result.measurements.push_back(
          {.name = "gpu_links_up", .help = "NVLinks that are up", .labels = {{"gpu", gpu}}, .value = 1.0 * num_up});
    }
  }

  GpuProbeOptions options_;
  std::optional<nvml::Library> nvml_;
  int most_ = 0;                                                   // the most GPUs that were there at one time
  std::map<std::pair<std::string, std::uint64_t>, SeenXid> xids_;  // that are reported, by GPU and XID
  std::map<std::string, int> num_xids_;                            // counts in all, by GPU
  std::map<nvml::Device, std::string> names_;                      // also of GPUs that have lost their handle since
  CounterRises uncorrected_;
  KnownGood links_, fabrics_;
  CounterRates rates_;
};

}  // namespace

EvidenceKind evidence_of_xid(std::uint64_t xid) {
  if (std::ranges::find(kHardXids, xid) != kHardXids.end()) return EvidenceKind::kHard;
  return std::ranges::find(kProgramXids, xid) != kProgramXids.end() ? EvidenceKind::kAlert : EvidenceKind::kSoft;
}

std::unique_ptr<Probe> make_gpu_probe(const GpuProbeOptions& options) { return std::make_unique<GpuProbe>(options); }

}  // namespace tessera
