#include "health/nvml.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace tessera::nvml {
namespace {

constexpr unsigned long long kXidEvent = 0x8;  // nvmlEventTypeXidCriticalError

/// nvmlEventData_t.
struct EventData {
  Device device = nullptr;
  unsigned long long type = 0, data = 0;
  unsigned gpu_instance = 0, compute_instance = 0;
};

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
  for (const Device device : devices()) call("nvmlDeviceRegisterEvents", device, kXidEvent, events_);
}

Library::~Library() {
  if (events_ != nullptr) call("nvmlEventSetFree", events_);
  call("nvmlShutdown");
}

std::vector<Device> Library::devices() {
  constexpr unsigned kMost = 64;  // a library that lies about it is not believed
  unsigned count = 0;
  std::vector<Device> devices;
  if (call("nvmlDeviceGetCount_v2", &count) != Status::kSuccess) return devices;
  for (unsigned i = 0; i < std::min(count, kMost); ++i) {
    Device device = nullptr;
    if (call("nvmlDeviceGetHandleByIndex_v2", i, &device) == Status::kSuccess) devices.push_back(device);
  }
  return devices;
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
  RemappedRows rows;
  unsigned is_pending = 0, has_failed = 0;
  if (!call_for(device, "nvmlDeviceGetRemappedRows", &rows.corrected, &rows.uncorrected, &is_pending, &has_failed)) {
    return std::nullopt;
  }
  rows.is_pending = is_pending != 0;
  rows.has_failed = has_failed != 0;
  return rows;
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
