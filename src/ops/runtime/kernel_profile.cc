#include "ops/runtime/kernel_profile.h"

#include <cuda.h>
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "system/optional_library.h"

namespace tessera::cuda {
namespace {

void* cupti_symbol(const char* name) {
  static const OptionalLibrary library("CUPTI", fmt::format("libcupti.so.{}", CUDA_VERSION / 1000));
  return library.symbol(name);
}

template <typename Function, typename... Args>
void call(const char* name, Function*, const Args&... args) {
  const CUptiResult status = reinterpret_cast<Function*>(cupti_symbol(name))(args...);
  require(status == CUPTI_SUCCESS, "CUPTI fails in {}: status {}", name, static_cast<int>(status));
}

#define TESSERA_CUPTI(name, ...) call(#name, &::name __VA_OPT__(, ) __VA_ARGS__)

// A region reaches a run by way of the call that launched it, so calls are recorded too.
constexpr CUpti_ActivityKind kKinds[] = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,    CUPTI_ACTIVITY_KIND_MEMCPY,  CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER};
constexpr CUpti_ExternalCorrelationKind kRegions = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
constexpr std::size_t kBufferBytes = std::size_t{8} << 20;

// These are global, because CUPTI's callbacks take no argument of the caller. They run on a thread of CUPTI.
std::mutex mutex;
/// A run, and the call that launched it.
struct Recorded {
  KernelRun run;
  std::uint32_t call;
};
std::vector<Recorded> recorded;
std::unordered_map<std::uint32_t, std::int64_t> region_of_call;
std::atomic<bool> is_recording = false;

std::string readable(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  for (const char* word : {"(anonymous namespace)::", "tessera::cuda::", "void "}) {
    for (std::size_t at = name.find(word); at != std::string::npos; at = name.find(word, at)) {
      name.erase(at, std::char_traits<char>::length(word));
    }
  }
  // Parameters begin at the first parenthesis outside the template's arguments.
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

template <typename Activity>
void note(std::string name, const CUpti_Activity* record) {
  const auto* activity = reinterpret_cast<const Activity*>(record);
  recorded.push_back(
      {{std::move(name), static_cast<std::int64_t>(activity->start), static_cast<std::int64_t>(activity->end)},
       activity->correlationId});
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *max_records = 0;  // as many as fit
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  const std::lock_guard lock(mutex);
  const auto next =
      reinterpret_cast<decltype(&::cuptiActivityGetNextRecord)>(cupti_symbol("cuptiActivityGetNextRecord"));
  for (CUpti_Activity* record = nullptr; next(buffer, valid, &record) == CUPTI_SUCCESS;) {
    switch (record->kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        note<CUpti_ActivityKernel10>(readable(reinterpret_cast<const CUpti_ActivityKernel10*>(record)->name), record);
        break;
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        note<CUpti_ActivityMemcpy6>("copy", record);
        break;
      case CUPTI_ACTIVITY_KIND_MEMSET:
        note<CUpti_ActivityMemset4>("fill", record);
        break;
      case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
        const auto* link = reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
        region_of_call[link->correlationId] = static_cast<std::int64_t>(link->externalId);
        break;
      }
      default:
        break;
    }
  }
  std::free(buffer);
}

}  // namespace

KernelProfile::KernelProfile() {
  recorded.clear();
  region_of_call.clear();
  std::uint64_t here = 0;
  TESSERA_CUPTI(cuptiGetTimestamp, &here);
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(TraceRecorder::Clock::now().time_since_epoch());
  offset_ = now.count() - static_cast<std::int64_t>(here);
  TESSERA_CUPTI(cuptiActivityRegisterCallbacks, &give_buffer, &take_buffer);
  for (const CUpti_ActivityKind kind : kKinds) TESSERA_CUPTI(cuptiActivityEnable, kind);
  is_recording = true;
}

KernelProfile::~KernelProfile() { stop(); }

void KernelProfile::stop() {
  is_recording = false;
  const auto disable = reinterpret_cast<decltype(&::cuptiActivityDisable)>(cupti_symbol("cuptiActivityDisable"));
  for (const CUpti_ActivityKind kind : kKinds) disable(kind);
}

std::vector<KernelRun> KernelProfile::finish() {
  TESSERA_CUPTI(cuptiActivityFlushAll, std::uint32_t{0});
  stop();
  const std::lock_guard lock(mutex);
  std::vector<KernelRun> runs;
  for (auto& [run, call] : std::exchange(recorded, {})) {
    run.begin += offset_;
    run.end += offset_;
    if (const auto found = region_of_call.find(call); found != region_of_call.end()) run.region = found->second;
    runs.push_back(std::move(run));
  }
  std::ranges::sort(runs, {}, &KernelRun::begin);
  return runs;
}

ProfiledRegion::ProfiledRegion(std::int64_t region) : is_noted_(is_recording) {
  if (is_noted_) TESSERA_CUPTI(cuptiActivityPushExternalCorrelationId, kRegions, static_cast<std::uint64_t>(region));
}

ProfiledRegion::~ProfiledRegion() {
  if (!is_noted_) return;
  std::uint64_t region = 0;
  reinterpret_cast<decltype(&::cuptiActivityPopExternalCorrelationId)>(
      cupti_symbol("cuptiActivityPopExternalCorrelationId"))(kRegions, &region);
}

}  // namespace tessera::cuda
