#include "comm/gpu_group.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

#include "comm/counted_exchange.h"
#include "comm/gpu_group_kernels.h"
#include "comm/nccl_library.h"
#include "comm/registered_memory.h"
#include "device/cuda_check.h"
#include "system/optional_library.h"
#include "tensor/arena.h"

namespace tessera::cuda {

void* nccl_symbol(const char* name) {
  static const OptionalLibrary library = [] {
    OptionalLibrary found("NCCL", "libnccl.so.2");
    int version = 0;
    reinterpret_cast<decltype(&::ncclGetVersion)>(found.symbol("ncclGetVersion"))(&version);
    require(version >= NCCL_VERSION_CODE, "NCCL {}.{}.{} is too old: this build needs {}.{}.{} or newer",
            version / 10000, version / 100 % 100, version % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    return found;
  }();
  return library.symbol(name);
}

void nccl_failed(const char* call, ncclResult_t status) {
  const std::string message =
      fmt::format("{}: NCCL: {} ({}); NCCL_DEBUG=WARN tells more", call,
                  TESSERA_NCCL_FUNCTION(ncclGetErrorString)(status), TESSERA_NCCL_FUNCTION(ncclGetLastError)(nullptr));
  if (status == ncclRemoteError) throw RankFailure(message);  // another rank has ended, or the network to it has failed
  // A call that NCCL does not accept fails again. The GPU, the network or the system may not.
  const bool is_of_call = status == ncclInvalidArgument || status == ncclInvalidUsage;
  throw Error(message, is_of_call ? ExitStatus::kWrongInput : ExitStatus::kProgramError);
}

namespace {

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    default:
      break;
  }
  TESSERA_CHECK(false, "a sum of {}", name_of(dtype));
}

/// Returns NCCL's configuration of a group. If `shares` is set, groups that are split from this one use its resources:
/// NCCL asks the parent.
ncclConfig_t group_config(bool shares) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.splitShare = shares ? 1 : 0;
  return config;
}

ncclComm_t connect(const GpuGroup::Id& id, int rank, int size, ncclConfig_t config, Progress& progress) {
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof unique);
  ncclComm_t communicator = nullptr;
  const Progress::Watched watched(progress, fmt::format("NCCL's connection of {} ranks", size));
  TESSERA_NCCL(ncclCommInitRankConfig, &communicator, size, unique, rank, &config);
  return communicator;
}

/// Makes a stream of high priority, because the other ranks wait for its work, too.
std::shared_ptr<const Stream> new_stream() { return std::make_shared<const Stream>(Priority::kHigh); }

class GpuWindow : public SymmetricWindow {
 public:
  GpuWindow(ncclComm_t communicator, std::shared_ptr<const bool> aborted, const Stream& stream, int size,
            std::size_t num_bytes)
      : memory_(communicator, std::move(aborted), stream, num_bytes),
        num_bytes_(num_bytes),
        peers_(peers_of_window(stream, memory_.window(), size)) {}

  std::byte* peer(int rank) const override { return peers_[static_cast<std::size_t>(rank)]; }
  std::size_t num_bytes() const override { return num_bytes_; }

 private:
  RegisteredMemory memory_;
  std::size_t num_bytes_;
  std::vector<std::byte*> peers_;
};

}  // namespace

/// Holds the state that all groups split from one group share.
struct GpuGroup::Family {
  Family(const Stream& main, const Stream& of_calls, Progress& group_progress)
      : computation(main), calls(of_calls), progress(group_progress) {}

  const Stream &computation, &calls;
  Progress& progress;
  std::mutex mutex;
  std::vector<const Member*> members;
  std::map<std::string, std::uint32_t> ids;  // id of each operation's title, from 1 on
  bool aborted = false;
  // Allocated at once: a later allocation of GPU memory would wait for operations, which wait for other ranks.
  static constexpr std::size_t kMaxNotes = 4096;
  Buffer counts{kMaxNotes * sizeof(std::uint32_t), Device::kCuda};
  std::size_t num_counts = 0;
  Note mark{new_count()};  // counts the marks that the computation has passed

  std::uint32_t* new_count() {
    const std::lock_guard lock(mutex);
    TESSERA_CHECK(num_counts < kMaxNotes, "{} groups of GPUs", num_counts / 2);
    return reinterpret_cast<std::uint32_t*>(counts.data()) + num_counts++;
  }

  std::uint32_t id_of(const std::string& title) {
    const std::lock_guard lock(mutex);
    return ids.try_emplace(title, static_cast<std::uint32_t>(ids.size() + 1)).first->second;
  }
};

struct GpuGroup::Member {
  explicit Member(Family& family) : begun(family.new_count()), ended(family.new_count()) {}

  ncclComm_t communicator = nullptr;
  int rank = 0, size = 1;
  Traffic traffic = Traffic::kWeights;
  std::shared_ptr<const Stream> stream;
  std::unique_ptr<CountedExchange> exchange;
  Note begun, ended;  // their values are operations' ids
};

GpuGroup::Id GpuGroup::make_id() {
  ncclUniqueId unique;
  TESSERA_NCCL(ncclGetUniqueId, &unique);
  Id id;
  static_assert(sizeof id == sizeof unique);
  std::memcpy(id.data(), &unique, sizeof unique);
  return id;
}

GpuGroup::GpuGroup(const Id& id, int rank, int size, const Stream& computation, const Stream& calls, Progress& progress)
    : GpuGroup(std::make_shared<Family>(computation, calls, progress),
               connect(id, rank, size, group_config(true), progress), rank, size, Traffic::kWeights, new_stream()) {}

GpuGroup::GpuGroup(std::shared_ptr<Family> family, void* communicator, int rank, int size, Traffic traffic,
                   std::shared_ptr<const Stream> stream)
    : family_(std::move(family)), member_(std::make_unique<Member>(*family_)) {
  member_->communicator = static_cast<ncclComm_t>(communicator);
  member_->rank = rank;
  member_->size = size;
  member_->traffic = traffic;
  member_->stream = std::move(stream);
  const std::lock_guard lock(family_->mutex);
  family_->members.push_back(member_.get());
}

GpuGroup::~GpuGroup() {
  parents_.clear();
  counted_.reset();
  if (member_->exchange != nullptr) {
    const Progress::Watched watched(family_->progress, "the end of connections for counted rows");
    member_->exchange.reset();
  }
  const std::lock_guard lock(family_->mutex);
  std::erase(family_->members, member_.get());
  // After a failure, ncclCommDestroy might wait for other ranks, which do not know of the failure yet.
  if (family_->aborted || std::uncaught_exceptions() > 0) return;
  const Progress::Watched watched(family_->progress, "the end of NCCL's connections");
  TESSERA_NCCL_FUNCTION(ncclCommDestroy)(member_->communicator);
}

std::unique_ptr<GpuGroup> GpuGroup::split(int color, int order, int size, Traffic traffic) {
  if (traffic == member_->traffic) return split_communicator(color, order, size, traffic, member_->stream, true);
  std::unique_ptr<GpuGroup>& parent = parents_[traffic];
  if (parent == nullptr) {
    parent = split_communicator(0, member_->rank, member_->size, traffic, new_stream(), /*shares=*/false);
  }
  // A group of one rank has no groups of several.
  return parent == nullptr ? nullptr : parent->split(color, order, size, traffic);
}

std::unique_ptr<GpuGroup> GpuGroup::split_communicator(int color, int order, int size, Traffic traffic,
                                                       std::shared_ptr<const Stream> stream, bool shares) const {
  ncclConfig_t config = group_config(shares);
  ncclComm_t communicator = nullptr;
  const Progress::Watched watched(family_->progress, fmt::format("NCCL's split of {} ranks", member_->size));
  TESSERA_NCCL(ncclCommSplit, member_->communicator, size == 1 ? NCCL_SPLIT_NOCOLOR : color, order, &communicator,
               &config);
  if (communicator == nullptr) return nullptr;
  int rank = 0;
  TESSERA_NCCL(ncclCommUserRank, communicator, &rank);
  return std::unique_ptr<GpuGroup>(new GpuGroup(family_, communicator, rank, size, traffic, std::move(stream)));
}

std::unique_ptr<GpuGroup> GpuGroup::link(const Id& id, int rank) const {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 1;
  return std::unique_ptr<GpuGroup>(
      new GpuGroup(family_, connect(id, rank, 2, config, family_->progress), rank, 2, member_->traffic, new_stream()));
}

template <typename Put>
Fence GpuGroup::put(const std::string& title, Put&& put_operation) {
  const Member& own = *member_;
  const std::uint32_t id = family_->id_of(title);
  Fence operands_are_there, end;
  operands_are_there.record(computation());
  own.stream->wait(operands_are_there);
  own.begun.put(*own.stream, id);
  {
    const Progress::Watched watched(family_->progress, title);  // the first operation that needs a connection makes it
    put_operation(own.communicator, own.stream->handle());
  }
  own.ended.put(*own.stream, id);
  end.record(*own.stream);
  return end;
}

Fence GpuGroup::all_gather(const Tensor& in, const Tensor& out, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    TESSERA_NCCL(ncclAllGather, in.raw(), out.raw(), in.num_bytes(), ncclUint8, communicator, stream);
  });
}

Fence GpuGroup::reduce_scatter(const Tensor& in, const Tensor& out, Write write, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    const Tensor own(static_cast<std::byte*>(in.raw()) + static_cast<std::size_t>(member_->rank) * out.num_bytes(),
                     out.shape(), out.dtype(), out.device());
    const Tensor& sum = write == Write::kAssign ? out : own;
    TESSERA_NCCL(ncclReduceScatter, in.raw(), sum.raw(), static_cast<std::size_t>(out.num_elements()),
                 type_of(in.dtype()), ncclSum, communicator, stream);
    if (write == Write::kAccumulate) put_sum(*member_->stream, own, out);
  });
}

// Each part of `in` holds this rank's rounded numbers in its first half. Its second half receives the numbers that the
// part's rank sends.
Fence GpuGroup::reduce_scatter_as_bfloat16(const Tensor& in, const Tensor& out, Write write, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    put_rounding(*member_->stream, in, member_->size);
    const std::size_t half = out.num_bytes() / 2;
    TESSERA_NCCL(ncclGroupStart);
    for (int peer = 0; peer < member_->size; ++peer) {
      if (peer == member_->rank) continue;
      std::byte* part = static_cast<std::byte*>(in.raw()) + static_cast<std::size_t>(peer) * out.num_bytes();
      TESSERA_NCCL(ncclSend, part, half, ncclUint8, peer, communicator, stream);
      TESSERA_NCCL(ncclRecv, part + half, half, ncclUint8, peer, communicator, stream);
    }
    TESSERA_NCCL(ncclGroupEnd);
    put_sum_of_rounded(*member_->stream, in, member_->rank, out, write);
  });
}

Fence GpuGroup::all_reduce(const Tensor& x, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    TESSERA_NCCL(ncclAllReduce, x.raw(), x.raw(), static_cast<std::size_t>(x.num_elements()), type_of(x.dtype()),
                 ncclSum, communicator, stream);
  });
}

Fence GpuGroup::all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                             std::span<const std::int64_t> out_rows, std::size_t row_bytes, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    const auto* from = static_cast<const std::byte*>(in.raw());
    auto* to = static_cast<std::byte*>(out.raw());
    TESSERA_NCCL(ncclGroupStart);
    for (int peer = 0; peer < member_->size; ++peer) {
      const auto at = static_cast<std::size_t>(peer);
      const std::size_t sent = static_cast<std::size_t>(in_rows[at]) * row_bytes,
                        received = static_cast<std::size_t>(out_rows[at]) * row_bytes;
      if (sent > 0) TESSERA_NCCL(ncclSend, from, sent, ncclUint8, peer, communicator, stream);
      if (received > 0) TESSERA_NCCL(ncclRecv, to, received, ncclUint8, peer, communicator, stream);
      from += sent;
      to += received;
    }
    TESSERA_NCCL(ncclGroupEnd);
  });
}

bool GpuGroup::is_open_for_counted() const { return counted_ != nullptr && counted_->member_->exchange != nullptr; }

bool GpuGroup::open_counted(std::size_t num_bytes) {
  TESSERA_CHECK(counted_ == nullptr, "graphs may have recorded the buffers of the exchange that is open");
  // NCCL connects the ranks of a set of shared resources once, so this takes a communicator of its own.
  counted_ = split_communicator(0, member_->rank, member_->size, member_->traffic, member_->stream, /*shares=*/false);
  const Progress::Watched watched(family_->progress, "NCCL's connection for counted rows");
  counted_->member_->exchange =
      CountedExchange::open(counted_->member_->communicator, std::shared_ptr<const bool>(family_, &family_->aborted),
                            *member_->stream, num_bytes);
  return counted_->member_->exchange != nullptr;
}

Fence GpuGroup::all_to_all_counted(const Tensor& in, const Tensor& num_sent_P, const Tensor& out,
                                   const Tensor& num_received_P, const std::string& title) {
  return counted_->put(
      title, [&](ncclComm_t, cudaStream_t) { counted_->member_->exchange->put(in, num_sent_P, out, num_received_P); });
}

Fence GpuGroup::broadcast(const Tensor& x, int root, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    TESSERA_NCCL(ncclBroadcast, x.raw(), x.raw(), x.num_bytes(), ncclUint8, root, communicator, stream);
  });
}

Fence GpuGroup::send(const Tensor& x, int to, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    TESSERA_NCCL(ncclSend, x.raw(), x.num_bytes(), ncclUint8, to, communicator, stream);
  });
}

Fence GpuGroup::receive(const Tensor& x, int from, const std::string& title) {
  return put(title, [&](ncclComm_t communicator, cudaStream_t stream) {
    TESSERA_NCCL(ncclRecv, x.raw(), x.num_bytes(), ncclUint8, from, communicator, stream);
  });
}

std::unique_ptr<SymmetricWindow> GpuGroup::allocate_window(std::size_t num_bytes) {
  const int reachable = num_reachable(member_->communicator);
  require(reachable == member_->size,
          "this GPU reaches the memory of {} of the {} GPUs of its group: direct expert parallelism needs all of them "
          "to be linked by NVLink; set parallelism.expert_parallel_ranks_per_domain to as many as are, or "
          "parallelism.expert_parallel_comm_backend = \"standard\"",
          reachable, member_->size);
  return std::make_unique<GpuWindow>(member_->communicator, std::shared_ptr<const bool>(family_, &family_->aborted),
                                     *member_->stream, member_->size, num_bytes);
}

const Stream& GpuGroup::computation() const {
  return member_->traffic == Traffic::kExperts ? family_->calls : family_->computation;
}

void GpuGroup::check() const {
  const std::lock_guard lock(family_->mutex);
  if (family_->aborted) return;
  for (const Member* member : family_->members) {
    ncclResult_t status = ncclSuccess;
    TESSERA_NCCL(ncclCommGetAsyncError, member->communicator, &status);
    if (status != ncclSuccess && status != ncclInProgress) nccl_failed("an operation between GPUs", status);
  }
}

std::uint64_t GpuGroup::position() const {
  const std::lock_guard lock(family_->mutex);
  std::uint64_t position = Note::count_of(family_->mark.seen());
  for (const Member* member : family_->members) {
    for (const Note* note : {&member->begun, &member->ended}) position += Note::count_of(note->seen());
  }
  return position;
}

void GpuGroup::mark() const { family_->mark.put(family_->computation, 0); }

std::string GpuGroup::describe() const {
  const std::lock_guard lock(family_->mutex);
  std::string text;
  for (const Member* member : family_->members) {
    const std::uint64_t begun = member->begun.seen();
    if (Note::count_of(begun) == Note::count_of(member->ended.seen())) continue;
    for (const auto& [title, id] : family_->ids) {
      if (id == Note::value_of(begun)) text += (text.empty() ? "; the GPU is in " : ", ") + title;
    }
  }
  return text;
}

void GpuGroup::abort() noexcept {
  const std::lock_guard lock(family_->mutex);
  if (family_->aborted) return;
  family_->aborted = true;
  for (const Member* member : family_->members) TESSERA_NCCL_FUNCTION(ncclCommAbort)(member->communicator);
}

}  // namespace tessera::cuda
