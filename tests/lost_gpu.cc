// A library that ends a process's use of its GPU, as a GPU does that fails: from then on each call of CUDA returns an
// error. CUDA loads it into every process if CUDA_INJECTION64_PATH names it (CUPTI's documentation, "Injection").
//
// TESSERA_LOST_GPU is a folder. Once it has a file that is named after the process, a kernel traps on the GPU that the
// process uses. tests/gpu_faults.py writes that file.
#include <cuda.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

namespace {

constexpr const char* kKernel = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry trap_if(.param .u32 condition) {
  .reg .u32 %condition;
  .reg .pred %traps;
  ld.param.u32 %condition, [condition];
  setp.ne.u32 %traps, %condition, 0;
  @%traps trap;
  ret;
}
)";

void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "lost_gpu: %s: error %d\n", call, static_cast<int>(result));
  std::abort();  // a fault that cannot be injected must not look like one that was healed
}
#define CHECK(call) check(call, #call)

/// Waits until the process uses a GPU, and returns that GPU's primary context.
CUcontext context_in_use() {
  int num_gpus = 0;
  while (cuDeviceGetCount(&num_gpus) != CUDA_SUCCESS) wait_a_little();  // while CUDA is being initialised
  for (;; wait_a_little()) {
    for (CUdevice gpu = 0; gpu < num_gpus; ++gpu) {
      unsigned flags = 0;
      int is_in_use = 0;
      CHECK(cuDevicePrimaryCtxGetState(gpu, &flags, &is_in_use));
      if (is_in_use == 0) continue;
      CUcontext context = nullptr;
      CHECK(cuDevicePrimaryCtxRetain(&context, gpu));
      return context;
    }
  }
}

void launch(CUfunction kernel, CUstream stream, unsigned condition) {
  void* params[] = {&condition};
  CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr));
}

void trap_when_asked(const std::filesystem::path& request) {
  CHECK(cuCtxSetCurrent(context_in_use()));
  CUmodule module = nullptr;
  CUfunction kernel = nullptr;
  CUstream stream = nullptr;
  CHECK(cuModuleLoadData(&module, kKernel));
  CHECK(cuModuleGetFunction(&kernel, module, "trap_if"));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  launch(kernel, stream, 0);  // loads the kernel: later, that could wait for an idle GPU
  while (!std::filesystem::exists(request)) wait_a_little();
  launch(kernel, stream, 1);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): CUDA looks for this name
extern "C" int InitializeInjection() {
  if (const char* folder = std::getenv("TESSERA_LOST_GPU"))
    std::thread(trap_when_asked, std::filesystem::path(folder) / std::to_string(getpid())).detach();
  return 1;
}
