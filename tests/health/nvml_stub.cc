// A stand-in for libnvidia-ml.so.1 that answers from a text file, which it reads anew in each call. Tests use it to
// simulate faults of GPUs that do not exist. The file's name is in TESSERA_NVML_STUB. Its lines:
//   count 8                number of GPUs
//   sleep 5                seconds that every call takes
//   3 KEY VALUE            a value of GPU 3. The keys are: temperature, power (mW), throttle, ecc, remap.pending,
//                          remap.failure, link.N (1 up, 0 down), field.ID or field.ID.SCOPE, lost (15 or 16), xid,
//                          sram (1: worn out), fabric.state, fabric.status, fabric.health, memory (bytes in use),
//                          process (its id; a GPU may have several such lines),
//                          handle (the status with which NVML refuses its handle)
// A key that is missing is not supported. Each line `xid` is an event that occurs once.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0, kNotSupported = 3, kTimeout = 10;

struct Line {
  int gpu = 0;
  std::string key;
  long long value = 0;
};

std::vector<Line> lines() {
  std::vector<Line> found;
  const char* path = std::getenv("TESSERA_NVML_STUB");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    Line line;
    std::string first;
    words >> first;
    if (first == "count" || first == "sleep") {
      line.key = first;
    } else {
      line.gpu = static_cast<int>(std::strtol(first.c_str(), nullptr, 10));
      words >> line.key;
    }
    words >> line.value;
    found.push_back(line);
  }
  for (const Line& line : found) {
    if (line.key == "sleep") ::sleep(static_cast<unsigned>(line.value));
  }
  return found;
}

/// Returns a device's number. Its handle is that number plus one.
int gpu_of(void* device) { return static_cast<int>(reinterpret_cast<std::intptr_t>(device)) - 1; }

template <typename Value>
int answer(void* device, const std::string& key, Value* value) {
  int status = kNotSupported;
  for (const Line& line : lines()) {
    if (line.gpu != gpu_of(device)) continue;
    if (line.key == "lost" && line.value != 0) return static_cast<int>(line.value);
    if (line.key != key) continue;
    *value = static_cast<Value>(line.value);
    status = kSuccess;
  }
  return status;
}

struct FieldValue {
  unsigned id, scope;
  long long timestamp, latency;
  unsigned type;
  int status;
  long long value;
};

struct EventData {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

std::size_t num_xids_told = 0;

}  // namespace

extern "C" {
// NOLINTBEGIN(readability-identifier-naming): the names are NVML's

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 0;
  for (const Line& line : lines()) {
    if (line.key == "count") *count = static_cast<unsigned>(line.value);
  }
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  for (const Line& line : lines()) {
    if (line.gpu == static_cast<int>(index) && line.key == "handle") return static_cast<int>(line.value);
  }
  *device = reinterpret_cast<void*>(static_cast<std::intptr_t>(index) + 1);
  return kSuccess;
}

int nvmlDeviceGetTemperature(void* device, int, unsigned* value) { return answer(device, "temperature", value); }
int nvmlDeviceGetPowerUsage(void* device, unsigned* value) { return answer(device, "power", value); }
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* value) {
  return answer(device, "throttle", value);
}
int nvmlDeviceGetTotalEccErrors(void* device, int, int, unsigned long long* value) {
  return answer(device, "ecc", value);
}

int nvmlDeviceGetRemappedRows(void* device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failure) {
  *corrected = *uncorrected = *pending = *failure = 0;
  const int first = answer(device, "remap.pending", pending), second = answer(device, "remap.failure", failure);
  return first == kNotSupported ? second : first;
}

struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned mask;
  unsigned char summary;
};
int nvmlDeviceGetGpuFabricInfoV(void* device, FabricInfo* info) {
  answer(device, "fabric.status", &info->status);
  answer(device, "fabric.health", &info->summary);
  return info->version == (40 | (3 << 24)) ? answer(device, "fabric.state", &info->state) : kNotSupported;
}

struct SramErrors {
  unsigned version;
  unsigned long long counts[11];
  unsigned is_exceeded;
};
int nvmlDeviceGetSramEccErrorStatus(void* device, SramErrors* errors) {
  return answer(device, "sram", &errors->is_exceeded);
}

struct MemoryInfo {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(void* device, MemoryInfo* info) { return answer(device, "memory", &info->used); }

struct ProcessInfo {
  unsigned pid;
  unsigned long long used_memory;
  unsigned gpu_instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* infos) {
  const unsigned room = *count;
  *count = 0;
  for (const Line& line : lines()) {
    if (line.gpu == gpu_of(device) && line.key == "process" && *count < room) {
      infos[(*count)++] = {static_cast<unsigned>(line.value), 0, 0, 0};
    }
  }
  return kSuccess;
}

int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* is_up) {
  return answer(device, "link." + std::to_string(link), is_up);
}

int nvmlDeviceGetFieldValues(void* device, int count, FieldValue* values) {
  for (int i = 0; i < count; ++i) {
    const std::string key = "field." + std::to_string(values[i].id);
    values[i].type = 4;  // a signed 64-bit number
    values[i].status = answer(device, key + "." + std::to_string(values[i].scope), &values[i].value);
    if (values[i].status == kNotSupported) values[i].status = answer(device, key, &values[i].value);
  }
  return kSuccess;
}

int nvmlEventSetCreate(void** set) {
  *set = &num_xids_told;
  num_xids_told = 0;  // a new set does not report earlier events
  for (const Line& line : lines()) num_xids_told += line.key == "xid" ? 1 : 0;
  return kSuccess;
}
int nvmlEventSetFree(void*) { return kSuccess; }
int nvmlDeviceRegisterEvents(void*, unsigned long long, void*) { return kSuccess; }

int nvmlEventSetWait_v2(void*, EventData* data, unsigned) {
  std::size_t idx = 0;
  for (const Line& line : lines()) {
    if (line.key != "xid" || idx++ < num_xids_told) continue;
    ++num_xids_told;
    *data = {reinterpret_cast<void*>(static_cast<std::intptr_t>(line.gpu) + 1), 0x8,
             static_cast<unsigned long long>(line.value), 0, 0};
    return kSuccess;
  }
  return kTimeout;
}

// NOLINTEND(readability-identifier-naming)
}  // extern "C"
