#include "device/cuda.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "device/cuda_check.h"

namespace tessera::cuda {

namespace detail {
void call_failed(const char* file, int line, const char* call, cudaError_t status) {
  throw InternalError(
      fmt::format("{}:{}: {}: {} ({})", file, line, call, cudaGetErrorString(status), cudaGetErrorName(status)));
}
}  // namespace detail

bool is_built() { return true; }

const char* why_unavailable() {
  static const std::string reason = [] {
    // Streams that share one of the driver's queues, 8 by default, wait for each other. A message between GPUs could
    // then delay the work that the other rank needs to send it. The driver reads this variable when it starts.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    int driver = 0, devices = 0;
    if (const cudaError_t status = cudaDriverGetVersion(&driver); status != cudaSuccess || driver == 0) {
      return std::string("no NVIDIA driver is loaded: install one, or run on a CPU");
    }
    const auto text = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
    if (driver < CUDART_VERSION) {
      return fmt::format("the NVIDIA driver supports CUDA up to {}, this build needs {}: install a newer driver",
                         text(driver), text(CUDART_VERSION));
    }
    if (const cudaError_t status = cudaGetDeviceCount(&devices); status != cudaSuccess || devices == 0) {
      return fmt::format("no GPU can be used ({}): check nvidia-smi and CUDA_VISIBLE_DEVICES",
                         status == cudaSuccess ? "none found" : cudaGetErrorString(status));
    }
    int major = 0, minor = 0;
    TESSERA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    TESSERA_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    if (major < 9) return fmt::format("the GPU has compute capability {}.x; Hopper (9.0) or later is needed", major);
    // "90a-real, 100a-real": code for one of these runs on that capability alone.
    constexpr std::string_view kArchitectures = TESSERA_CUDA_ARCHITECTURES;
    if (kArchitectures.find(fmt::format("{}{}a", major, minor)) == kArchitectures.npos) {
      return fmt::format("the GPU has compute capability {}.{}; this build is for {} (CMAKE_CUDA_ARCHITECTURES)", major,
                         minor, kArchitectures);
    }
    return std::string();
  }();
  return reason.c_str();
}

int num_devices() {
  int devices = 0;
  if (available()) TESSERA_CUDA(cudaGetDeviceCount(&devices));
  return devices;
}

void use_device(int device) {
  require(device < num_devices(), "GPU {} of {}", device, num_devices());
  TESSERA_CUDA(cudaSetDevice(device));
}

std::byte* allocate_zeroed(std::size_t num_bytes) {
  require(available(), "no GPU: {}", why_unavailable());
  void* memory = nullptr;
  if (cudaMalloc(&memory, num_bytes) != cudaSuccess) {
    cudaGetLastError();  // clears the error, which the next check would report again
    constexpr double kGiB = 1ULL << 30;
    fail(
        "cannot allocate {:.2f} GiB of GPU memory, {:.2f} GiB are free; make the batch, the sequence or the model "
        "smaller",
        static_cast<double>(num_bytes) / kGiB, static_cast<double>(free_memory_bytes()) / kGiB);
  }
  TESSERA_CUDA(cudaMemset(memory, 0, num_bytes));
  TESSERA_CUDA(cudaDeviceSynchronize());
  return static_cast<std::byte*>(memory);
}

// Its errors are ignored: they cannot be mended, and the process may be about to end.
void free_memory(std::byte* memory) noexcept { cudaFree(memory); }

namespace {
struct MemoryInfo {
  std::size_t free = 0, total = 0;
};
MemoryInfo memory_info() {
  require(available(), "no GPU: {}", why_unavailable());
  MemoryInfo info;
  TESSERA_CUDA(cudaMemGetInfo(&info.free, &info.total));
  return info;
}
}  // namespace

std::size_t free_memory_bytes() { return memory_info().free; }
std::size_t total_memory_bytes() { return memory_info().total; }

std::byte* allocate_pinned(std::size_t num_bytes) {
  require(available(), "no GPU: {}", why_unavailable());
  void* memory = nullptr;
  TESSERA_CUDA(cudaMallocHost(&memory, num_bytes));
  std::memset(memory, 0, num_bytes);
  return static_cast<std::byte*>(memory);
}

void free_pinned(std::byte* memory) noexcept { cudaFreeHost(memory); }

const char* pin(std::byte* memory, std::size_t num_bytes) {
  const cudaError_t status = cudaHostRegister(memory, num_bytes, cudaHostRegisterPortable);
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the next check of a kernel launch would report
  return cudaGetErrorString(status);
}

void unpin(std::byte* memory) noexcept { cudaHostUnregister(memory); }

namespace {

/// Returns whether the stream's work is being recorded into a graph.
bool is_recorded(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TESSERA_CUDA(cudaStreamIsCapturing(stream.handle(), &status));
  return status == cudaStreamCaptureStatusActive;
}

}  // namespace

Stream::Stream(Priority priority) {
  require(available(), "no GPU: {}", why_unavailable());
  // CUDA's lowest priority is 0; higher priorities are negative numbers.
  TESSERA_CUDA(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, -static_cast<int>(priority)));
}

Stream::~Stream() {
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
}

Stream::Stream(Stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

bool Stream::is_recording() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TESSERA_CUDA(cudaStreamIsCapturing(handle_, &status));
  return status != cudaStreamCaptureStatusNone;
}

void Stream::synchronize() const { TESSERA_CUDA(cudaStreamSynchronize(handle_)); }

void Stream::wait(const Fence& fence) const { TESSERA_CUDA(cudaStreamWaitEvent(handle_, fence.handle_)); }

void Stream::wait(const Event& event) const {
  TESSERA_CUDA(cudaStreamWaitEvent(handle_, event.handle_, is_recorded(*this) ? cudaEventWaitExternal : 0u));
}

EventHandle::~EventHandle() {
  if (handle_ != nullptr) cudaEventDestroy(handle_);
}

EventHandle::EventHandle(EventHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

EventHandle& EventHandle::operator=(EventHandle&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

void Fence::record(const Stream& stream) {
  if (handle_ == nullptr) TESSERA_CUDA(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming));
  TESSERA_CUDA(cudaEventRecord(handle_, stream.handle()));
}

void Event::record(const Stream& stream) {
  if (handle_ == nullptr) TESSERA_CUDA(cudaEventCreate(&handle_));
  const unsigned flags = is_recorded(stream) ? cudaEventRecordExternal : cudaEventRecordDefault;
  TESSERA_CUDA(cudaEventRecordWithFlags(handle_, stream.handle(), flags));
}

const char* Event::wait() const {
  const cudaError_t status = cudaEventSynchronize(handle_);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

bool Event::passed() const { return cudaEventQuery(handle_) != cudaErrorNotReady; }

double Event::seconds_since(const Event& earlier) const {
  float milliseconds = 0.0f;
  TESSERA_CUDA(cudaEventElapsedTime(&milliseconds, earlier.handle_, handle_));
  return static_cast<double>(milliseconds) * 1e-3;
}

void copy_bytes(const Stream& stream, const void* source, std::size_t num_bytes, void* target) {
  TESSERA_CUDA(cudaMemcpyAsync(target, source, num_bytes, cudaMemcpyDefault, stream.handle()));
}

void call_on_host(const Stream& stream, void (*function)(void*), void* argument) {
  TESSERA_CUDA(cudaLaunchHostFunc(stream.handle(), function, argument));
}

}  // namespace tessera::cuda
