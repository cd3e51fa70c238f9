#include "ops/runtime/kernel_profile.h"

#include <cuda.h>
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
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

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET};
constexpr std::size_t kBufferBytes = std::size_t{8} << 20;

// These are global, because CUPTI's callbacks take no argument of the caller. They run on a thread of CUPTI.
std::mutex mutex;
std::vector<KernelRun> recorded;

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
      {std::move(name), static_cast<std::int64_t>(activity->start), static_cast<std::int64_t>(activity->end)});
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
      default:
        break;
    }
  }
  std::free(buffer);
}

}  // namespace

KernelProfile::KernelProfile() {
  recorded.clear();
  std::uint64_t here = 0;
  TESSERA_CUPTI(cuptiGetTimestamp, &here);
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(TraceRecorder::Clock::now().time_since_epoch());
  offset_ = now.count() - static_cast<std::int64_t>(here);
  TESSERA_CUPTI(cuptiActivityRegisterCallbacks, &give_buffer, &take_buffer);
  for (const CUpti_ActivityKind kind : kKinds) TESSERA_CUPTI(cuptiActivityEnable, kind);
}

KernelProfile::~KernelProfile() { stop(); }

void KernelProfile::stop() {
  const auto disable = reinterpret_cast<decltype(&::cuptiActivityDisable)>(cupti_symbol("cuptiActivityDisable"));
  for (const CUpti_ActivityKind kind : kKinds) disable(kind);
}

std::vector<KernelRun> KernelProfile::finish() {
  TESSERA_CUPTI(cuptiActivityFlushAll, std::uint32_t{0});
  stop();
  const std::lock_guard lock(mutex);
  for (KernelRun& run : recorded) run.begin += offset_, run.end += offset_;
  std::sort(recorded.begin(), recorded.end(), [](const KernelRun& a, const KernelRun& b) { return a.begin < b.begin; });
  return std::exchange(recorded, {});
}

}  // namespace tessera::cuda
