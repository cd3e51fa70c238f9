// NVIDIA's management library, which is loaded at run time. This file needs no GPU, no driver and none of their
// headers. Names, numbers and structures are those of nvml.h of CUDA 13 (NVML API reference).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "system/optional_library.h"

namespace tessera::nvml {

/// The status codes that NVML's functions return.
enum class Status : int {
  kSuccess = 0,
  kNotSupported = 3,
  kGpuIsLost = 15,
  kResetRequired = 16,
};

using Device = void*;

/// A GPU that NVML counts.
struct Slot {
  unsigned index = 0;
  Device device = nullptr;           // null: NVML gives no handle
  Status status = Status::kSuccess;  // of the question for the handle

  bool is_lost() const { return status == Status::kGpuIsLost || status == Status::kResetRequired; }
};

/// Has the layout of nvmlFieldValue_t.
struct FieldValue {
  unsigned id = 0, scope = 0;
  long long timestamp = 0, latency = 0;
  unsigned type = 0;  // of the value
  Status status = Status::kSuccess;
  std::uint64_t bits = 0;  // the value, in the lowest bytes
};
static_assert(sizeof(FieldValue) == 40);

/// Describes an XID, which is an error that the driver reports (NVIDIA, "XID errors").
struct XidEvent {
  Device device = nullptr;
  std::uint64_t xid = 0;
};

struct RemappedRows {
  bool is_pending = false, has_failed = false;
};

/// Holds what the GPU reports about the NVLink fabric that it is registered with.
struct Fabric {
  bool is_complete = false;  // the registration has ended
  int status = 0;            // of the registration; 0: success
  enum class Health : std::uint8_t { kUnknown = 0, kHealthy = 1, kUnhealthy = 2, kLimited = 3 } health = {};
};

/// Holds the library, initialized. Functions that it lacks count as not supported.
class Library {
 public:
  /// Throws Error if there is no library of this name or path, or if it cannot be initialized.
  explicit Library(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  /// Returns all GPUs in the order of their indices, also those without a handle. There are none if NVML counts none.
  std::vector<Slot> slots();

  // The functions below return nullopt if the GPU or the driver does not support a query, or if the GPU is lost.

  std::optional<double> temperature(Device device);  // degrees Celsius
  std::optional<double> power(Device device);        // watts
  std::optional<std::uint64_t> throttle_reasons(Device device);
  std::optional<std::uint64_t> uncorrected_errors(Device device);  // since the driver was loaded
  std::optional<RemappedRows> remapped_rows(Device device);
  /// Returns whether the GPU's SRAM has had more uncorrected errors than NVIDIA allows.
  std::optional<bool> is_sram_worn_out(Device device);
  std::optional<Fabric> fabric(Device device);
  std::optional<std::uint64_t> used_memory(Device device);        // bytes, without those that the driver keeps
  std::optional<std::vector<unsigned>> processes(Device device);  // ids of the processes that compute on it
  std::optional<bool> is_link_up(Device device, unsigned link);
  std::optional<std::int64_t> field(Device device, unsigned id, unsigned scope = 0);

  /// Returns whether the device is lost or must be reset, if a call for it has said so since the last take_lost().
  std::optional<Status> take_lost(Device device);
  /// Returns the XIDs of all devices since the last call.
  std::vector<XidEvent> take_xids();

 private:
  template <typename... Parameters>
  Status call(const char* name, Parameters... parameters);
  template <typename... Parameters>
  bool call_for(Device device, const char* name, Parameters... parameters);

  OptionalLibrary library_;
  std::map<std::string, void*, std::less<>> symbols_;  // by name; null: the library does not have it
  std::map<Device, Status> lost_;
  void* events_ = nullptr;  // nvmlEventSet_t
};

}  // namespace tessera::nvml
