// A network plugin for NCCL 2.28 (plugin interface 11). It stands in for a network that GPUs can use by themselves
// (GIN, in NCCL's proxy mode), on machines that have none. So tests of such transfers run on the GPUs of one machine.
//
// The ranks are threads of one process, and each has its own GPU. NCCL's progress thread reads what kernels ask for,
// and calls put_signal() and test() here. A payload is an asynchronous copy on a stream of the sender's GPU, one stream
// per receiver. A signal is written behind it, on one stream of the receiver's GPU. Signals are counted on the host,
// and written in the order in which they are counted.
//
// NCCL also wants a network for its own messages. This one is never used, because NVLink connects the GPUs.
#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device/net_device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

// ---- NCCL's interface

constexpr int kHostMemory = 1, kGpuMemory = 2;
constexpr std::uint32_t kIncrement = 1;
constexpr int kProxyVersion = 100;

using DeviceHandle = ncclNetDeviceHandle_v11_t;

struct VirtualDevice {
  int count, devices[4];
};

struct Properties {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory_kinds, registers_globally, forces_flush, megabits_per_second, port;
  float latency;
  int max_groups, max_receives;
  ncclNetDeviceType device_type;
  int device_version;
  VirtualDevice virtual_device;
  std::size_t max_message, max_collective;
  int max_requests;
};

struct NetPlugin {
  const char* name;
  ncclResult_t (*init)(void** context, std::uint64_t group, void* config, void* log, void* profiler);
  ncclResult_t (*devices)(int* count);
  ncclResult_t (*properties)(int device, Properties*);
  void* transfers[13];  // listen to closeListen
  void* others[3];      // getDeviceMr, irecvConsumed, makeVDevice
  ncclResult_t (*finalize)(void* context);
  void* set_attributes;
};

struct GinPlugin {
  const char* name;
  ncclResult_t (*init)(void** context, std::uint64_t group, void* log);
  ncclResult_t (*devices)(int* count);
  ncclResult_t (*properties)(int device, Properties*);
  ncclResult_t (*listen)(void* context, int device, void* handle, void** listener);
  ncclResult_t (*connect)(void* context, void* handles[], int size, int rank, void* listener, void** connection);
  void* create_context;  // not called in proxy mode
  ncclResult_t (*add_memory)(void* connection, void* data, std::size_t, int kind, std::uint64_t flags, void** handle,
                             void** device_handle);
  void* add_dma_buffer;
  ncclResult_t (*remove_memory)(void* connection, void* handle);
  ncclResult_t (*destroy_context)(void*);
  ncclResult_t (*close)(void* connection);
  ncclResult_t (*close_listener)(void* listener);
  ncclResult_t (*put)(void* connection, std::uint64_t from, void* source, std::size_t num_bytes, std::uint64_t to,
                      void* target, std::uint32_t rank, void** request);
  ncclResult_t (*put_signal)(void* connection, std::uint64_t from, void* source, std::size_t num_bytes,
                             std::uint64_t to, void* target, std::uint32_t rank, std::uint64_t signal, void* signals,
                             std::uint64_t value, std::uint32_t operation, void** request);
  ncclResult_t (*test)(void* connection, void* request, int* done);
  ncclResult_t (*progress)(void* connection);
  ncclResult_t (*last_error)(void* context, bool* has_error);
  ncclResult_t (*finalize)(void* context);
};
static_assert(sizeof(Properties) == 0x70 && sizeof(NetPlugin) == 0xb0 && sizeof(GinPlugin) == 0x98);

// ---- CUDA

ncclResult_t failed(const char* what, const char* why) {
  std::fprintf(stderr, "gin_plugin: %s: %s\n", what, why);
  return ncclInternalError;
}

#define TRY_CUDA(call)                                                           \
  do {                                                                           \
    const cudaError_t result = (call);                                           \
    if (result != cudaSuccess) return failed(#call, cudaGetErrorString(result)); \
  } while (false)

#define TRY(call)                                                                 \
  do {                                                                            \
    if (const ncclResult_t result = (call); result != ncclSuccess) return result; \
  } while (false)

/// Returns the driver's function of this name, or null.
void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

/// TRY_DRIVER(cuMemSetAccess, operands...) calls the driver's function.
#define TRY_DRIVER(name, ...)                                                                               \
  do {                                                                                                      \
    static const auto function = reinterpret_cast<decltype(&::name)>(driver_function(#name));               \
    if (function == nullptr || function(__VA_ARGS__) != CUDA_SUCCESS) return failed(#name, "driver error"); \
  } while (false)

/// Makes a GPU the current one in a scope, and lets calls pass while another thread records a graph.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~OnDevice() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
    cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Makes a stream of high priority. Others share queues of the driver with kernels that wait.
ncclResult_t make_stream(cudaStream_t* stream) {
  int lowest = 0, highest = 0;
  TRY_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  TRY_CUDA(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest));
  return ncclSuccess;
}

// ---- groups of ranks

struct Memory {
  std::byte* begin;
  std::size_t size;
  int kind;
  bool is_registered;
};

struct Rank {
  ~Rank() {
    const OnDevice current(device);
    cudaStreamDestroy(signals);
  }
  int device = 0;
  cudaStream_t signals = nullptr;
  std::mutex mutex;                            // of all that follows
  std::deque<Memory> memory;                   // a handle is a place here, from 1 on
  std::map<std::byte*, std::uint64_t> values;  // of signals
};

struct Group {
  explicit Group(int size) : ranks(static_cast<std::size_t>(size)) {}
  std::deque<Rank> ranks;
  std::mutex mutex;
  std::condition_variable came;
  std::size_t num_here = 0;
};

std::mutex groups_mutex;
std::map<std::uint64_t, std::weak_ptr<Group>> groups;
std::uint64_t num_listeners = 0;

struct Request {
  std::size_t receiver = 0;
  cudaEvent_t copied = nullptr;     // on the sender's GPU
  cudaEvent_t signalled = nullptr;  // on the receiver's
  bool has_signal = false;
};

/// Only NCCL's progress thread of the rank puts and tests.
struct Connection {
  std::shared_ptr<Group> group;
  int rank = 0;
  std::vector<cudaStream_t> streams;        // per receiver
  std::vector<std::vector<Request*>> free;  // per receiver
  std::vector<std::unique_ptr<Request>> requests;

  Rank& own() const { return group->ranks[static_cast<std::size_t>(rank)]; }
};

/// Lets the GPUs of all ranks reach memory of rank `own`.
ncclResult_t share(Group& group, const Rank& own, std::byte* begin, std::size_t size) {
  for (std::byte* at = begin; at < begin + size;) {
    CUdeviceptr base = 0;
    std::size_t num_bytes = 0;
    TRY_DRIVER(cuMemGetAddressRange, &base, &num_bytes, reinterpret_cast<CUdeviceptr>(at));
    for (const Rank& rank : group.ranks) {
      if (rank.device == own.device) continue;
      const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = rank.device},
                                   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      unsigned long long flags = 0;
      TRY_DRIVER(cuMemGetAccess, &flags, &access.location, base);
      if (flags != access.flags) TRY_DRIVER(cuMemSetAccess, base, num_bytes, &access, 1);
    }
    at = reinterpret_cast<std::byte*>(base) + num_bytes;
  }
  return ncclSuccess;
}

/// Returns `num_bytes` of a rank's registered memory on its GPU, or null.
std::byte* find(Rank& rank, void* handle, std::uint64_t offset, std::size_t num_bytes) {
  const std::lock_guard lock(rank.mutex);
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number == 0 || number > rank.memory.size()) return nullptr;
  const Memory& memory = rank.memory[number - 1];
  const bool has_bytes = offset <= memory.size && num_bytes <= memory.size - offset;
  return memory.is_registered && memory.kind == kGpuMemory && has_bytes ? memory.begin + offset : nullptr;
}

ncclResult_t take_request(Connection& connection, std::size_t receiver, Request** request) {
  std::vector<Request*>& free = connection.free[receiver];
  if (free.empty()) {
    auto made = std::make_unique<Request>();
    made->receiver = receiver;
    {
      const OnDevice device(connection.own().device);
      TRY_CUDA(cudaEventCreateWithFlags(&made->copied, cudaEventDisableTiming));
    }
    const OnDevice device(connection.group->ranks[receiver].device);
    TRY_CUDA(cudaEventCreateWithFlags(&made->signalled, cudaEventDisableTiming));
    free.push_back(made.get());
    connection.requests.push_back(std::move(made));
  }
  *request = free.back();
  free.pop_back();
  return ncclSuccess;
}

/// Writes the grown signal behind the request's copy.
ncclResult_t send_signal(Request& request, Rank& receiver, std::byte* signal, std::uint64_t value) {
  const OnDevice device(receiver.device);
  const std::lock_guard lock(receiver.mutex);
  TRY_CUDA(cudaStreamWaitEvent(receiver.signals, request.copied, 0));
  const std::uint64_t sum = receiver.values[signal] += value;
  TRY_DRIVER(cuStreamWriteValue64, receiver.signals, reinterpret_cast<CUdeviceptr>(signal), sum,
             CU_STREAM_WRITE_VALUE_DEFAULT);
  TRY_CUDA(cudaEventRecord(request.signalled, receiver.signals));
  return ncclSuccess;
}

// ---- GIN

char name[] = "tessera_test";
int context;

ncclResult_t one_device(int* count) {
  *count = 1;
  return ncclSuccess;
}

ncclResult_t properties_of(ncclNetDeviceType type, int version, Properties* properties) {
  *properties = {.name = name,
                 .guid = 1,
                 .memory_kinds = kHostMemory | kGpuMemory,
                 .megabits_per_second = 100'000,
                 .port = 1,
                 .max_groups = 1 << 16,
                 .max_receives = 1,
                 .device_type = type,
                 .device_version = version,
                 .virtual_device = {.count = 1, .devices = {}},
                 .max_message = std::size_t{1} << 30,
                 .max_collective = std::size_t{1} << 30,
                 .max_requests = 1};
  return ncclSuccess;
}

ncclResult_t init(void** result, std::uint64_t /*group*/, void* /*log*/) {
  *result = &context;
  return ncclSuccess;
}

ncclResult_t gin_properties(int /*device*/, Properties* properties) {
  return properties_of(NCCL_NET_DEVICE_GIN_PROXY, kProxyVersion, properties);
}

ncclResult_t listen(void* /*context*/, int /*device*/, void* handle, void** listener) {
  const std::lock_guard lock(groups_mutex);
  ++num_listeners;
  std::memcpy(handle, &num_listeners, sizeof num_listeners);
  *listener = &context;
  return ncclSuccess;
}

ncclResult_t succeed(void*) { return ncclSuccess; }

/// The handle of the first rank names the group.
ncclResult_t connect(void* /*context*/, void* handles[], int size, int rank, void* /*listener*/, void** made) {
  std::uint64_t number = 0;
  std::memcpy(&number, handles[0], sizeof number);
  auto connection = std::make_unique<Connection>();
  connection->rank = rank;
  connection->free.resize(static_cast<std::size_t>(size));
  {
    const std::lock_guard lock(groups_mutex);
    connection->group = groups[number].lock();
    if (connection->group == nullptr) groups[number] = connection->group = std::make_shared<Group>(size);
  }
  Group& group = *connection->group;
  TRY_CUDA(cudaGetDevice(&connection->own().device));
  for (int receiver = 0; receiver < size; ++receiver) {
    TRY(make_stream(&connection->streams.emplace_back()));
  }
  TRY(make_stream(&connection->own().signals));
  std::unique_lock lock(group.mutex);
  ++group.num_here;
  group.came.notify_all();
  const bool are_all_here =
      group.came.wait_for(lock, std::chrono::seconds(30), [&] { return group.num_here == group.ranks.size(); });
  if (!are_all_here) return failed("connect", "not all ranks came within 30 s");
  *made = connection.release();
  return ncclSuccess;
}

ncclResult_t add_memory(void* to, void* data, std::size_t size, int kind, std::uint64_t /*flags*/, void** handle,
                        void** device_handle) {
  Connection& connection = *static_cast<Connection*>(to);
  Rank& own = connection.own();
  if (kind == kGpuMemory) {
    const OnDevice device(own.device);
    TRY(share(*connection.group, own, static_cast<std::byte*>(data), size));
  }
  const std::lock_guard lock(own.mutex);
  own.memory.push_back({.begin = static_cast<std::byte*>(data), .size = size, .kind = kind, .is_registered = true});
  *handle = *device_handle = reinterpret_cast<void*>(own.memory.size());
  return ncclSuccess;
}

ncclResult_t remove_memory(void* from, void* handle) {
  Rank& own = static_cast<Connection*>(from)->own();
  const std::lock_guard lock(own.mutex);
  own.memory[reinterpret_cast<std::uintptr_t>(handle) - 1].is_registered = false;
  return ncclSuccess;
}

ncclResult_t put_signal(void* to, std::uint64_t from, void* source, std::size_t num_bytes, std::uint64_t offset,
                        void* target, std::uint32_t rank, std::uint64_t signal_offset, void* signals,
                        std::uint64_t value, std::uint32_t operation, void** taken) {
  Connection& connection = *static_cast<Connection*>(to);
  Rank& receiver = connection.group->ranks[rank];
  Request* request = nullptr;
  TRY(take_request(connection, rank, &request));
  {
    const OnDevice device(connection.own().device);
    cudaStream_t stream = connection.streams[rank];
    if (num_bytes > 0) {
      const std::byte* data = find(connection.own(), source, from, num_bytes);
      std::byte* copy = find(receiver, target, offset, num_bytes);
      if (data == nullptr || copy == nullptr) return failed("put", "not in registered memory of GPUs");
      TRY_CUDA(cudaMemcpyPeerAsync(copy, receiver.device, data, connection.own().device, num_bytes, stream));
    }
    TRY_CUDA(cudaEventRecord(request->copied, stream));
  }
  request->has_signal = signals != nullptr;
  if (request->has_signal) {
    std::byte* signal = find(receiver, signals, signal_offset, sizeof(std::uint64_t));
    if (signal == nullptr) return failed("signal", "not in registered memory of GPUs");
    TRY(send_signal(*request, receiver, signal, operation == kIncrement ? 1 : value));
  }
  *taken = request;
  return ncclSuccess;
}

ncclResult_t put(void* to, std::uint64_t from, void* source, std::size_t num_bytes, std::uint64_t offset, void* target,
                 std::uint32_t rank, void** request) {
  return put_signal(to, from, source, num_bytes, offset, target, rank, 0, nullptr, 0, 0, request);
}

ncclResult_t test(void* of, void* which, int* done) {
  Connection& connection = *static_cast<Connection*>(of);
  auto* request = static_cast<Request*>(which);
  const OnDevice device(connection.own().device);
  const cudaError_t status = cudaEventQuery(request->has_signal ? request->signalled : request->copied);
  *done = status == cudaSuccess ? 1 : 0;
  if (status == cudaErrorNotReady) return ncclSuccess;
  TRY_CUDA(status);
  connection.free[request->receiver].push_back(request);
  return ncclSuccess;
}

ncclResult_t close(void* which) {
  const std::unique_ptr<Connection> connection(static_cast<Connection*>(which));
  const OnDevice device(connection->own().device);
  for (const auto& request : connection->requests) {
    TRY_CUDA(cudaEventDestroy(request->copied));
    TRY_CUDA(cudaEventDestroy(request->signalled));
  }
  for (cudaStream_t stream : connection->streams) TRY_CUDA(cudaStreamDestroy(stream));
  return ncclSuccess;
}

ncclResult_t no_error(void* /*context*/, bool* has_error) {
  *has_error = false;
  return ncclSuccess;
}

// ---- the network that is not used

ncclResult_t init_net(void** result, std::uint64_t group, void* /*config*/, void* log, void* /*profiler*/) {
  return init(result, group, log);
}

ncclResult_t net_properties(int /*device*/, Properties* properties) {
  return properties_of(NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, properties);
}

/// Stands for every transfer. NCCL's functions have other operands, which this one leaves alone.
ncclResult_t refuse() { return failed("a message of NCCL's", "NVLink does not connect the GPUs"); }

}  // namespace

extern "C" {

[[gnu::visibility("default")]] extern const NetPlugin ncclNetPlugin_v11;
[[gnu::visibility("default")]] extern const GinPlugin ncclGinPlugin_v11;

const NetPlugin ncclNetPlugin_v11 = [] {
  NetPlugin plugin{.name = name,
                   .init = init_net,
                   .devices = one_device,
                   .properties = net_properties,
                   .transfers = {},
                   .others = {},
                   .finalize = succeed,
                   .set_attributes = nullptr};
  for (void*& transfer : plugin.transfers) transfer = reinterpret_cast<void*>(refuse);
  plugin.transfers[4] = nullptr;  // regMrDmaBuf: there are no such buffers
  return plugin;
}();

const GinPlugin ncclGinPlugin_v11 = {.name = name,
                                     .init = init,
                                     .devices = one_device,
                                     .properties = gin_properties,
                                     .listen = listen,
                                     .connect = connect,
                                     .create_context = nullptr,
                                     .add_memory = add_memory,
                                     .add_dma_buffer = nullptr,
                                     .remove_memory = remove_memory,
                                     .destroy_context = succeed,
                                     .close = close,
                                     .close_listener = succeed,
                                     .put = put,
                                     .put_signal = put_signal,
                                     .test = test,
                                     .progress = succeed,
                                     .last_error = no_error,
                                     .finalize = succeed};

}  // extern "C"
