#include <nccl_device.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>

#include "comm/counted_exchange.h"
#include "comm/registered_memory.h"
#include "device/cuda_check.h"
#include "tensor/arena.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 132;
constexpr std::int64_t kAlignment = 128;  // of the parts of buffers

/// Where rows are. All sizes are in bytes.
struct Layout {
  int rank, size;
  std::int64_t row;   // of a row
  std::int64_t part;  // of a rank's part of a tensor
  std::int64_t slot;  // of a rank's part of a buffer, which has none for its owner
  /// Returns where the part of rank `other` begins in the buffer of rank `owner`.
  __device__ std::int64_t slot_of(int owner, int other) const { return (other - (other > owner ? 1 : 0)) * slot; }
};

/// Copies bytes with all threads of the blocks of one row of the grid.
template <typename Word>
__device__ void copy_bytes(const std::byte* from, std::int64_t num_bytes, std::byte* to) {
  const auto* words = reinterpret_cast<const Word*>(from);
  auto* copies = reinterpret_cast<Word*>(to);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < num_bytes / static_cast<std::int64_t>(sizeof(Word)); i += std::int64_t{gridDim.x} * kThreads) {
    copies[i] = words[i];
  }
}

/// Row y of the grid packs the rows for rank y. The rows for this rank itself go directly to `out`.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Layout layout, const std::byte* in, const std::int32_t* num_sent_P, std::byte* buffer, std::byte* out) {
  const auto peer = static_cast<int>(blockIdx.y);
  std::byte* to = peer == layout.rank ? out + peer * layout.part : buffer + layout.slot_of(layout.rank, peer);
  copy_bytes<Word>(in + peer * layout.part, num_sent_P[peer] * layout.row, to);
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(Layout layout, const std::byte* buffer, const std::int32_t* num_received_P, std::byte* out) {
  const auto peer = static_cast<int>(blockIdx.y);
  if (peer == layout.rank) return;
  copy_bytes<Word>(buffer + layout.slot_of(layout.rank, peer), num_received_P[peer] * layout.row,
                   out + peer * layout.part);
}

/// Runs in one block, with a thread for each rank. Signal p says that rank p's rows are here, and signal size + p that
/// its buffer is empty. `num_before` counts the exchanges before this one.
__global__ void exchange_kernel(ncclDevComm comm, Layout layout, ncclWindow_t sent, ncclWindow_t received,
                                const std::int32_t* num_sent_P, const std::uint64_t* num_before) {
  const ncclGin network(comm, 0);
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer < layout.size && peer != layout.rank) {
    const ncclGin_SignalInc are_there{static_cast<ncclGinSignal_t>(layout.rank)};
    const std::int64_t num_bytes = num_sent_P[peer] * layout.row;
    network.waitSignal(ncclCoopThread(), static_cast<ncclGinSignal_t>(layout.size + peer), *num_before);
    if (num_bytes > 0) {
      network.put(ncclTeamWorld(comm), peer, received, static_cast<std::size_t>(layout.slot_of(peer, layout.rank)),
                  sent, static_cast<std::size_t>(layout.slot_of(layout.rank, peer)),
                  static_cast<std::size_t>(num_bytes), are_there);
    } else {
      network.signal(ncclTeamWorld(comm), peer, are_there);
    }
    network.waitSignal(ncclCoopThread(), static_cast<ncclGinSignal_t>(peer), *num_before + 1);
  }
  __syncthreads();
  network.flush(ncclCoopCta());  // the send buffer may be written again
}

/// Tells the other ranks that the receive buffer is empty, and counts the exchange.
__global__ void release_kernel(ncclDevComm comm, int rank, int size, std::uint64_t* num_before) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer < size && peer != rank) {
    const ncclGin network(comm, 0);
    network.signal(ncclTeamWorld(comm), peer, ncclGin_SignalInc{static_cast<ncclGinSignal_t>(size + rank)});
  }
  if (peer == 0) ++*num_before;
}

/// Waits until all others have taken what this rank has sent. Those are the last signals that come here. Rows come no
/// more either, because every exchange waits for the rows of all others itself. So nobody writes to this rank's memory
/// any more.
__global__ void end_kernel(ncclDevComm comm, int rank, int size, const std::uint64_t* num_before) {
  const ncclGin network(comm, 0);
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer < size && peer != rank) {
    network.waitSignal(ncclCoopThread(), static_cast<ncclGinSignal_t>(size + peer), *num_before);
  }
  __syncthreads();
  network.flush(ncclCoopCta());
}

/// Loads kernels now. Otherwise their first launch would load them, and might wait for a kernel that waits for other
/// ranks.
template <typename... Kernel>
void load(Kernel... kernel) {
  cudaFuncAttributes attributes{};
  for (const cudaError_t status : {cudaFuncGetAttributes(&attributes, kernel)...}) TESSERA_CUDA(status);
}

class GinExchange : public CountedExchange {
 public:
  GinExchange(ncclComm_t communicator, std::shared_ptr<const bool> aborted, const Stream& stream, std::int64_t slot)
      : communicator_(communicator), aborted_(std::move(aborted)), stream_(stream), slot_(slot) {
    TESSERA_NCCL(ncclCommUserRank, communicator, &rank_);
    TESSERA_NCCL(ncclCommCount, communicator, &size_);
    const std::size_t num_bytes = static_cast<std::size_t>(slot * (size_ - 1));
    sent_ = std::make_unique<RegisteredMemory>(communicator, aborted_, stream, num_bytes);
    received_ = std::make_unique<RegisteredMemory>(communicator, aborted_, stream, num_bytes);
    TESSERA_CUDA(cudaMemsetAsync(num_before_.data(), 0, sizeof(std::uint64_t), stream.handle()));
    load(pack_kernel<uint4>, pack_kernel<std::byte>, unpack_kernel<uint4>, unpack_kernel<std::byte>, exchange_kernel,
         release_kernel, end_kernel);
    stream.synchronize();
  }
  ~GinExchange() override {
    if (!connected_ || *aborted_ || std::uncaught_exceptions() > 0) return;
    try {
      end_kernel<<<1, num_threads(), 0, stream_.handle()>>>(comm_, rank_, size_, num_before());
      TESSERA_CUDA(cudaGetLastError());
      stream_.synchronize();
      TESSERA_NCCL(ncclDevCommDestroy, communicator_, &comm_);
    } catch (const std::exception& error) {  // the GPU or the network has failed, and the process ends
      spdlog::error("the end of an exchange between domains: {}", error.what());
    }
  }

  /// Returns whether NCCL has connected the ranks. Throws RankFailure if another rank has failed.
  bool connect() {
#ifdef NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER  // from NCCL 2.29 on
    ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
    ncclDevCommRequirements requirements{};
#endif
    requirements.ginForceEnable = true;  // also between GPUs that NVLink connects
    requirements.ginContextCount = 1;
    requirements.ginSignalCount = 2 * size_;
    const ncclResult_t result = TESSERA_NCCL_FUNCTION(ncclDevCommCreate)(communicator_, &requirements, &comm_);
    if (result == ncclRemoteError) nccl_failed("ncclDevCommCreate", result);
    connected_ = result == ncclSuccess;  // there is no code for "not supported"
    return connected_;
  }

  void put(const Tensor& in, const Tensor& num_sent_P, const Tensor& out, const Tensor& num_received_P) override {
    if (in.num_elements() == 0) return;  // on all ranks
    const auto part = static_cast<std::int64_t>(in.num_bytes()) / size_;
    TESSERA_CHECK(part <= slot_, "parts of {} bytes in buffers for {}", part, slot_);
    const Layout layout{.rank = rank_, .size = size_, .row = part / (in.dim(0) / size_), .part = part, .slot = slot_};
    const bool is_wide = (layout.row | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(in.raw()) |
                                                                 reinterpret_cast<std::uintptr_t>(out.raw()))) %
                             static_cast<std::int64_t>(sizeof(uint4)) ==
                         0;
    is_wide ? put_as<uint4>(layout, in, num_sent_P, out, num_received_P)
            : put_as<std::byte>(layout, in, num_sent_P, out, num_received_P);
  }

 private:
  template <typename Word>
  void put_as(const Layout& layout, const Tensor& in, const Tensor& num_sent_P, const Tensor& out,
              const Tensor& num_received_P) {
    const auto words = (layout.part + static_cast<std::int64_t>(sizeof(Word)) - 1) / sizeof(Word);
    const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(words / kThreads, 1, kMaxBlocks)),
                    static_cast<unsigned>(size_));
    const auto* num_sent = static_cast<const std::int32_t*>(num_sent_P.raw());
    auto* to = static_cast<std::byte*>(out.raw());
    pack_kernel<Word><<<grid, kThreads, 0, stream_.handle()>>>(layout, static_cast<const std::byte*>(in.raw()),
                                                               num_sent, sent_->data(), to);
    exchange_kernel<<<1, num_threads(), 0, stream_.handle()>>>(comm_, layout, sent_->window(), received_->window(),
                                                               num_sent, num_before());
    unpack_kernel<Word><<<grid, kThreads, 0, stream_.handle()>>>(
        layout, received_->data(), static_cast<const std::int32_t*>(num_received_P.raw()), to);
    release_kernel<<<1, num_threads(), 0, stream_.handle()>>>(comm_, rank_, size_, num_before());
    TESSERA_CUDA(cudaGetLastError());
  }

  unsigned num_threads() const { return static_cast<unsigned>((size_ + 31) / 32 * 32); }
  std::uint64_t* num_before() const { return reinterpret_cast<std::uint64_t*>(num_before_.data()); }

  ncclComm_t communicator_;
  std::shared_ptr<const bool> aborted_;
  const Stream& stream_;
  std::int64_t slot_;
  int rank_ = 0, size_ = 1;
  std::unique_ptr<RegisteredMemory> sent_, received_;
  Buffer num_before_{sizeof(std::uint64_t), Device::kCuda};
  ncclDevComm comm_{};
  bool connected_ = false;
};

}  // namespace

std::unique_ptr<CountedExchange> CountedExchange::open(ncclComm_t communicator, std::shared_ptr<const bool> aborted,
                                                       const Stream& stream, std::size_t num_bytes) {
  int version = 0, size = 1;
  TESSERA_NCCL(ncclGetVersion, &version);
  TESSERA_NCCL(ncclCommCount, communicator, &size);
  if (version != NCCL_VERSION_CODE) return nullptr;  // a kernel sees NCCL's structures
  const std::int64_t part = static_cast<std::int64_t>(num_bytes) / size;
  auto exchange = std::make_unique<GinExchange>(communicator, std::move(aborted), stream,
                                                (part + kAlignment - 1) / kAlignment * kAlignment);
  if (!exchange->connect()) return nullptr;
  return exchange;
}

}  // namespace tessera::cuda
