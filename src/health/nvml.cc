#include "health/nvml.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/error.h"

namespace tessera::nvml {
namespace {

constexpr unsigned long long kXidEvent = 0x8;  // nvmlEventTypeXidCriticalError

/// The layout of nvmlEventData_t.
struct EventData {
  Device device = nullptr;
  unsigned long long type = 0, data = 0;
  unsigned gpu_instance = 0, compute_instance = 0;
};

/// Returns the number with which NVML's structures begin: their size and version.
template <typename Structure>
constexpr unsigned version_of(unsigned version) {
  return static_cast<unsigned>(sizeof(Structure)) | (version << 24);
}

/// The layout of nvmlGpuFabricInfo_v3_t.
struct FabricInfo {
  unsigned version = version_of<FabricInfo>(3);
  std::array<unsigned char, 16> cluster = {};
  int status = 0;
  unsigned clique = 0;
  unsigned char state = 0;
  unsigned mask = 0;
  unsigned char summary = 0;
};
static_assert(sizeof(FabricInfo) == 40);

/// The layout of nvmlEccSramErrorStatus_v1_t.
struct SramErrors {
  unsigned version = version_of<SramErrors>(1);
  std::array<unsigned long long, 11> counts = {};
  unsigned is_exceeded = 0;
};
static_assert(sizeof(SramErrors) == 104);

/// The layout of nvmlMemory_v2_t.
struct MemoryInfo {
  unsigned version = version_of<MemoryInfo>(2);
  unsigned long long total = 0, reserved = 0, free = 0, used = 0;
};
static_assert(sizeof(MemoryInfo) == 40);

/// The layout of nvmlProcessInfo_v2_t.
struct ProcessInfo {
  unsigned pid = 0;
  unsigned long long used_memory = 0;
  unsigned gpu_instance = 0, compute_instance = 0;
};
static_assert(sizeof(ProcessInfo) == 24);

}  // namespace

template <typename... Parameters>
Status Library::call(const char* name, Parameters... parameters) {
  auto symbol = symbols_.find(name);
  if (symbol == symbols_.end()) symbol = symbols_.emplace(name, library_.find(name)).first;
  if (symbol->second == nullptr) return Status::kNotSupported;
  return reinterpret_cast<Status (*)(Parameters...)>(symbol->second)(parameters...);
}

template <typename... Parameters>
bool Library::call_for(Device device, const char* name, Parameters... parameters) {
  const Status status = call(name, device, parameters...);
  if (status == Status::kGpuIsLost || status == Status::kResetRequired) lost_[device] = status;
  return status == Status::kSuccess;
}

Library::Library(const std::string& path) : library_("NVML", path) {
  const Status status = call("nvmlInit_v2");
  require(status == Status::kSuccess, "NVML cannot start (nvmlInit_v2: {}): is NVIDIA's driver loaded?",
          static_cast<int>(status));
  if (call("nvmlEventSetCreate", &events_) != Status::kSuccess) events_ = nullptr;
  if (events_ == nullptr) return;
  for (const Slot& slot : slots()) {
    if (slot.device != nullptr) call("nvmlDeviceRegisterEvents", slot.device, kXidEvent, events_);
  }
}

Library::~Library() {
  if (events_ != nullptr) call("nvmlEventSetFree", events_);
  call("nvmlShutdown");
}

std::vector<Slot> Library::slots() {
  constexpr unsigned kMost = 64;  // guards against a library that reports a wrong count
  unsigned count = 0;
  std::vector<Slot> slots;
  if (call("nvmlDeviceGetCount_v2", &count) != Status::kSuccess) return slots;
  for (unsigned i = 0; i < std::min(count, kMost); ++i) {
    Slot& slot = slots.emplace_back(Slot{.index = i});
    slot.status = call("nvmlDeviceGetHandleByIndex_v2", i, &slot.device);
    if (slot.status != Status::kSuccess) slot.device = nullptr;
  }
  return slots;
}

std::optional<double> Library::temperature(Device device) {
  unsigned value = 0;
  constexpr int kOfGpu = 0;
  if (!call_for(device, "nvmlDeviceGetTemperature", kOfGpu, &value)) return std::nullopt;
  return value;
}

std::optional<double> Library::power(Device device) {
  unsigned milliwatts = 0;
  if (!call_for(device, "nvmlDeviceGetPowerUsage", &milliwatts)) return std::nullopt;
  return 1e-3 * milliwatts;
}

std::optional<std::uint64_t> Library::throttle_reasons(Device device) {
  unsigned long long reasons = 0;
  if (!call_for(device, "nvmlDeviceGetCurrentClocksEventReasons", &reasons)) return std::nullopt;
  return reasons;
}

std::optional<std::uint64_t> Library::uncorrected_errors(Device device) {
  constexpr int kUncorrected = 1, kVolatile = 0;
  unsigned long long count = 0;
  if (!call_for(device, "nvmlDeviceGetTotalEccErrors", kUncorrected, kVolatile, &count)) return std::nullopt;
  return count;
}

std::optional<RemappedRows> Library::remapped_rows(Device device) {
  unsigned corrected = 0, uncorrected = 0, is_pending = 0, has_failed = 0;
  if (!call_for(device, "nvmlDeviceGetRemappedRows", &corrected, &uncorrected, &is_pending, &has_failed)) {
    return std::nullopt;
  }
  return RemappedRows{.is_pending = is_pending != 0, .has_failed = has_failed != 0};
}

std::optional<bool> Library::is_sram_worn_out(Device device) {
  SramErrors errors;
  if (!call_for(device, "nvmlDeviceGetSramEccErrorStatus", &errors)) return std::nullopt;
  return errors.is_exceeded != 0;
}

std::optional<Fabric> Library::fabric(Device device) {
  constexpr unsigned char kNotSupported = 0, kCompleted = 3;  // NVML_GPU_FABRIC_STATE
  FabricInfo info;
  if (!call_for(device, "nvmlDeviceGetGpuFabricInfoV", &info) || info.state == kNotSupported) return std::nullopt;
  Fabric fabric{.is_complete = info.state == kCompleted, .status = info.status};
  if (info.summary <= static_cast<unsigned char>(Fabric::Health::kLimited)) {
    fabric.health = static_cast<Fabric::Health>(info.summary);
  }
  return fabric;
}

std::optional<std::uint64_t> Library::used_memory(Device device) {
  MemoryInfo info;
  if (!call_for(device, "nvmlDeviceGetMemoryInfo_v2", &info)) return std::nullopt;
  return info.used;
}

std::optional<std::vector<unsigned>> Library::processes(Device device) {
  std::array<ProcessInfo, 256> infos;
  auto count = static_cast<unsigned>(infos.size());
  if (!call_for(device, "nvmlDeviceGetComputeRunningProcesses_v3", &count, infos.data())) return std::nullopt;
  std::vector<unsigned> pids;
  for (std::size_t i = 0; i < std::min<std::size_t>(count, infos.size()); ++i) pids.push_back(infos[i].pid);
  return pids;
}

std::optional<bool> Library::is_link_up(Device device, unsigned link) {
  unsigned is_up = 0;
  if (!call_for(device, "nvmlDeviceGetNvLinkState", link, &is_up)) return std::nullopt;
  return is_up != 0;
}

std::optional<std::int64_t> Library::field(Device device, unsigned id, unsigned scope) {
  FieldValue value{.id = id, .scope = scope};
  if (!call_for(device, "nvmlDeviceGetFieldValues", 1, &value) || value.status != Status::kSuccess) return std::nullopt;
  enum Type : unsigned { kDouble, kUint, kUlong, kUint64, kInt64, kInt };  // nvmlValueType_t
  switch (value.type) {
    case kDouble:
      return static_cast<std::int64_t>(std::bit_cast<double>(value.bits));
    case kUint:
      return static_cast<std::uint32_t>(value.bits);
    case kUlong:
    case kUint64:
    case kInt64:
      return static_cast<std::int64_t>(value.bits);
    case kInt:
      return static_cast<std::int32_t>(value.bits);
    default:
      return std::nullopt;
  }
}

std::optional<Status> Library::take_lost(Device device) {
  const auto found = lost_.extract(device);
  return found.empty() ? std::nullopt : std::optional(found.mapped());
}

std::vector<XidEvent> Library::take_xids() {
  std::vector<XidEvent> events;
  constexpr int kMost = 1000;
  for (int i = 0; i < kMost && events_ != nullptr; ++i) {
    EventData data;
    if (call("nvmlEventSetWait_v2", events_, &data, 0u) != Status::kSuccess) break;
    if (data.type == kXidEvent) events.push_back({data.device, data.data});
  }
  return events;
}

}  // namespace tessera::nvml
