#include "comm/process_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "comm/transport/planned_transport.h"
#include "comm/tree_operations.h"
#include "tensor/arena.h"

namespace tessera {
namespace {

/// MPI guarantees tags up to 2¹⁵ - 1. The lower half is for collectives, and each has its own tag while it is under
/// way.
constexpr int kFirstUserTag = 1 << 14;
/// Sums are computed in pieces of this many bytes per rank: large enough for the full bandwidth, small for scratch
/// memory.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
/// Up to this size an all-reduce gathers the ranks' whole buffers in ⌈log₂ P⌉ rounds, and every rank adds them itself.
/// Above it, each rank sums a range, and sends the sum to the others.
constexpr std::size_t kGatheredSumBytes = std::size_t{16} << 10;
/// With more ranks than this, parts of up to kSmallPart bytes are gathered and summed in rounds: log₂ P messages of a
/// rank, not P - 1.
constexpr int kFewRanks = 16;
constexpr std::size_t kSmallPart = std::size_t{4} << 10;

/// Holds a range [begin, end) of a buffer, in bytes.
struct Range {
  std::size_t begin, end;
  std::size_t size() const { return end - begin; }
};

std::byte* bytes_of(const Tensor& x) { return static_cast<std::byte*>(x.raw()); }

constexpr std::size_t kBlock = 1024;  // numbers that loops take at a time

/// Computes out (= or +=) the sum of parts[r] over r, in the order of r. A part has `num_bytes`.
template <typename T, typename Out>
void add_parts(std::span<const std::byte* const> parts, std::size_t num_bytes, Write write, std::byte* out) {
  std::array<float, kBlock> sums;
  const std::size_t count = num_bytes / sizeof(T);
  Out* target = reinterpret_cast<Out*>(out);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const T* part = reinterpret_cast<const T*>(parts[r]) + begin;
      for (std::size_t i = 0; i < size; ++i) {
        sums[i] = r == 0 ? static_cast<float>(part[i]) : sums[i] + static_cast<float>(part[i]);
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      Out& number = target[begin + i];
      number = Out(write == Write::kAssign ? sums[i] : static_cast<float>(number) + sums[i]);
    }
  }
}

/// Rounds float32 numbers to bfloat16. These fill the first half of the same memory.
void round_in_place(std::byte* numbers, std::size_t count) {
  std::array<float, kBlock> block;
  std::array<BFloat16, kBlock> rounded;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    std::memcpy(block.data(), numbers + begin * sizeof(float), size * sizeof(float));
    for (std::size_t i = 0; i < size; ++i) rounded[i] = BFloat16(block[i]);
    std::memcpy(numbers + begin * sizeof(BFloat16), rounded.data(), size * sizeof(BFloat16));
  }
}

/// Holds the type in which the numbers of a sum are sent, and that of the sum.
struct SumTypes {
  DType sent, sum;
};

using AddParts = void (*)(std::span<const std::byte* const>, std::size_t, Write, std::byte*);

AddParts add_parts_of(SumTypes types) {
  constexpr DType kWide = DType::kFloat32, kNarrow = DType::kBFloat16;
  if (types.sent == kWide && types.sum == kWide) return add_parts<float, float>;
  if (types.sent == kNarrow && types.sum == kWide) return add_parts<BFloat16, float>;
  TESSERA_CHECK(types.sent == kNarrow && types.sum == kNarrow, "a sum of {}", name_of(types.sent));
  return add_parts<BFloat16, BFloat16>;
}

/// Computes this rank's range of a sum. The other ranks send their parts of that range piece by piece; two pieces are
/// under way at once.
class RangeSum {
 public:
  /// Sums the ranks' buffers `in`, which are cut into `ranges`, one per rank. `out` receives this rank's range.
  RangeSum(Transport& transport, int tag, std::byte* in, std::vector<Range> ranges, SumTypes types, Write write,
           std::byte* out)
      : transport_(transport),
        tag_(tag),
        in_(in),
        ranges_(std::move(ranges)),
        write_(write),
        out_(out),
        types_(types),
        add_(add_parts_of(types)),
        slots_{Slot{{}, Messages(transport)}, Slot{{}, Messages(transport)}},
        sends_(transport) {
    std::size_t longest = 0;
    for (const Range& range : ranges_) longest = std::max(longest, range.size());
    num_pieces_ = (longest + kPieceBytes - 1) / kPieceBytes;
    const auto size = static_cast<std::size_t>(transport.size());
    const std::size_t own = std::min(kPieceBytes, ranges_[static_cast<std::size_t>(transport.rank())].size());
    for (Slot& slot : slots_) slot.received.resize(size * own);
    own_piece_ = own;
    for (std::size_t piece = 0; piece < std::min(num_pieces_, slots_.size()); ++piece) start(piece);
  }

  bool advance() {
    sends_.test();
    for (; next_ < num_pieces_; ++next_) {
      if (!slots_[next_ % slots_.size()].receives.test()) return false;
      add(next_);
      if (next_ + slots_.size() < num_pieces_) start(next_ + slots_.size());
    }
    return sends_.test();
  }

  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const {
    for (const Slot& slot : slots_) slot.receives.find_missing(senders, receivers);
    sends_.find_missing(senders, receivers);
  }

 private:
  struct Slot {
    std::vector<std::byte> received;  // one piece per rank
    Messages receives;
  };

  Range piece_of(std::size_t rank, std::size_t piece) const {
    const Range& range = ranges_[rank];
    return {std::min(range.end, range.begin + piece * kPieceBytes),
            std::min(range.end, range.begin + (piece + 1) * kPieceBytes)};
  }

  void start(std::size_t piece) {
    Slot& slot = slots_[piece % slots_.size()];
    const auto own_rank = static_cast<std::size_t>(transport_.rank());
    const std::size_t own = piece_of(own_rank, piece).size();
    for (std::size_t rank = 0; rank < ranges_.size(); ++rank) {
      if (rank == own_rank) continue;
      const Range theirs = piece_of(rank, piece);
      const int peer = static_cast<int>(rank);
      if (own > 0) slot.receives.receive(slot.received.data() + rank * own_piece_, own, peer, tag_);
      if (theirs.size() > 0) sends_.send(in_ + theirs.begin, theirs.size(), peer, tag_);
    }
  }

  void add(std::size_t piece) {
    const auto own_rank = static_cast<std::size_t>(transport_.rank());
    const Range own = piece_of(own_rank, piece);
    std::vector<const std::byte*> parts;
    for (std::size_t rank = 0; rank < ranges_.size(); ++rank) {
      parts.push_back(rank == own_rank ? in_ + own.begin
                                       : slots_[piece % slots_.size()].received.data() + rank * own_piece_);
    }
    const std::size_t first = (own.begin - ranges_[own_rank].begin) / size_of(types_.sent);
    add_(parts, own.size(), write_, out_ + first * size_of(types_.sum));
  }

  Transport& transport_;
  int tag_;
  std::byte* in_;
  std::vector<Range> ranges_;
  Write write_;
  std::byte* out_;
  SumTypes types_;
  AddParts add_;
  std::size_t num_pieces_ = 0, own_piece_ = 0, next_ = 0;
  std::array<Slot, 2> slots_;
  Messages sends_;
};

class ReduceScatter : public Operation {
 public:
  ReduceScatter(std::string name, RangeSum sum) : Operation(std::move(name)), sum_(std::move(sum)) {}
  bool advance() override { return sum_.advance(); }
  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const override {
    sum_.find_missing(senders, receivers);
  }

 private:
  RangeSum sum_;
};

/// Sums each range on its rank, then sends the ranges to all ranks.
class AllReduce : public Operation {
 public:
  AllReduce(std::string name, Transport& transport, int tag, std::byte* x, const std::vector<Range>& ranges,
            DType dtype)
      : Operation(std::move(name)),
        transport_(transport),
        tag_(tag),
        x_(x),
        ranges_(ranges),
        sum_(transport, tag, x, ranges, {dtype, dtype}, Write::kAssign,
             x + ranges[static_cast<std::size_t>(transport.rank())].begin),
        messages_(transport) {}

  bool advance() override {
    if (!summed_) {
      if (!sum_.advance()) return false;
      summed_ = true;
      const Range own = ranges_[static_cast<std::size_t>(transport_.rank())];
      messages_.send_to_others(x_ + own.begin, own.size(), tag_);
      for (int peer = 0; peer < transport_.size(); ++peer) {
        const Range theirs = ranges_[static_cast<std::size_t>(peer)];
        if (peer == transport_.rank() || theirs.size() == 0) continue;
        messages_.receive(x_ + theirs.begin, theirs.size(), peer, tag_);
      }
    }
    return messages_.test();
  }
  void find_missing(std::vector<int>& senders, std::vector<int>& receivers) const override {
    if (!summed_) return sum_.find_missing(senders, receivers);
    messages_.find_missing(senders, receivers);
  }

 private:
  Transport& transport_;
  int tag_;
  std::byte* x_;
  std::vector<Range> ranges_;
  RangeSum sum_;
  bool summed_ = false;
  Messages messages_;
};

/// Gathers a small buffer from all ranks, and lets every rank compute the whole sum.
class SmallAllReduce : public GatherInRounds {
 public:
  SmallAllReduce(std::string name, Transport& transport, int tag, std::span<std::byte> x, DType dtype)
      : GatherInRounds(std::move(name), transport, tag, x), x_(x), num_ranks_(transport.size()), dtype_(dtype) {}

  bool advance() override {
    if (!GatherInRounds::advance()) return false;
    std::vector<const std::byte*> parts;
    for (int rank = 0; rank < num_ranks_; ++rank) parts.push_back(part(rank).data());
    add_parts_of({dtype_, dtype_})(parts, x_.size(), Write::kAssign, x_.data());
    return true;
  }

 private:
  std::span<std::byte> x_;
  int num_ranks_;
  DType dtype_;
};

/// Gathers small parts from all ranks into `out`, in the order of ranks.
class SmallAllGather : public GatherInRounds {
 public:
  SmallAllGather(std::string name, Transport& transport, int tag, std::span<const std::byte> own, std::byte* out)
      : GatherInRounds(std::move(name), transport, tag, own), num_ranks_(transport.size()), out_(out) {}

  bool advance() override {
    if (!GatherInRounds::advance()) return false;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const std::span<const std::byte> of_rank = part(rank);
      std::memcpy(out_ + static_cast<std::size_t>(rank) * of_rank.size(), of_rank.data(), of_rank.size());
    }
    return true;
  }

 private:
  int num_ranks_;
  std::byte* out_;
};

/// Exchanges small parts of all ranks, and sums those of this rank.
class SmallReduceScatter : public ExchangeInRounds {
 public:
  SmallReduceScatter(std::string name, Transport& transport, int tag, std::span<const std::byte> in, SumTypes types,
                     Write write, std::byte* out)
      : ExchangeInRounds(std::move(name), transport, tag, in),
        num_ranks_(transport.size()),
        types_(types),
        write_(write),
        out_(out) {}

  bool advance() override {
    if (!ExchangeInRounds::advance()) return false;
    std::vector<const std::byte*> parts;
    for (int rank = 0; rank < num_ranks_; ++rank) parts.push_back(part_from(rank).data());
    add_parts_of(types_)(parts, part_from(0).size(), write_, out_);
    return true;
  }

 private:
  int num_ranks_;
  SumTypes types_;
  Write write_;
  std::byte* out_;
};

/// Says whether parts of this size are gathered and summed in rounds.
bool in_rounds(int num_ranks, std::size_t part_bytes) {
  return num_ranks > kFewRanks && 0 < part_bytes && part_bytes <= kSmallPart;
}

/// Cuts whole numbers into equal ranges; the last ones may be shorter or empty.
std::vector<Range> even_ranges(std::int64_t count, std::size_t number_size, int size) {
  std::vector<Range> ranges;
  const std::int64_t part = (count + size - 1) / size;
  for (int rank = 0; rank < size; ++rank) {
    const auto begin = static_cast<std::size_t>(std::min(count, rank * part));
    const auto end = static_cast<std::size_t>(std::min(count, (rank + 1) * part));
    ranges.push_back({begin * number_size, end * number_size});
  }
  return ranges;
}

/// Returns the bytes of an index of x's first dim.
std::size_t row_bytes(const Tensor& x) {
  std::int64_t count = 1;
  for (int i = 1; i < x.num_dims(); ++i) count *= x.dim(i);
  return static_cast<std::size_t>(count) * size_of(x.dtype());
}

void copy(const std::byte* from, std::size_t num_bytes, std::byte* to) {
  if (from != to && num_bytes > 0) std::memcpy(to, from, num_bytes);
}

}  // namespace

Work& Work::operator=(Work&& other) noexcept {
  std::swap(progress_, other.progress_);
  std::swap(operation_, other.operation_);
  std::swap(computation_, other.computation_);
  std::swap(end_, other.end_);
  std::swap(record_, other.record_);
  std::swap(recorded_, other.recorded_);
  return *this;
}

Work::~Work() {
  if (operation_ == nullptr && computation_ == nullptr) return;
  if (std::uncaught_exceptions() > 0) {
    if (operation_ != nullptr) progress_->abandon(operation_);
    return;
  }
  spdlog::critical("{} was never waited for", operation_ == nullptr ? "an operation of the GPU" : operation_->name());
  std::terminate();
}

void Work::wait() {
  if (record_ != nullptr) return std::exchange(record_, nullptr)->end_transfer(recorded_);
  if (computation_ != nullptr) return std::exchange(computation_, nullptr)->wait(end_);
  if (operation_ == nullptr) return;
  const std::shared_ptr<Operation> operation = std::move(operation_);
  try {
    progress_->wait(*operation);
  } catch (...) {
    progress_->abandon(operation);
    throw;
  }
}

ProcessGroup::ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis)
    : ProcessGroup(std::move(transport), progress, std::move(axis), 1) {
  std::vector<int> ranks(static_cast<std::size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  world_ranks_ = std::make_shared<const std::vector<int>>(std::move(ranks));
}

ProcessGroup::ProcessGroup(std::unique_ptr<Transport> transport, Progress& progress, std::string axis, std::uint64_t id)
    : transport_(std::move(transport)), progress_(&progress), axis_(std::move(axis)), id_(id) {
  if (size() > 1) flight_group_ = progress.recorder().add_group(id_, axis_, rank(), size());
}

ProcessGroup ProcessGroup::planned(int rank, int size, std::string axis) {
  ProcessGroup group;
  group.transport_ = std::make_unique<PlannedTransport>(rank, size);
  group.axis_ = std::move(axis);
  return group;
}

std::string ProcessGroup::title(std::string_view operation, std::string_view name) const {
  return fmt::format("{} of {} ({})", operation, name, axis_);
}

int ProcessGroup::next_tag() { return std::exchange(num_collectives_, (num_collectives_ + 1) % kFirstUserTag); }

Work ProcessGroup::note(const char* kind, std::size_t num_bytes) const {
  if (step_record_ == nullptr || size() == 1) return {};
  return {*step_record_, step_record_->begin_transfer({.kind = kind,
                                                       .axis = axis_,
                                                       .num_ranks = size(),
                                                       .bytes = static_cast<double>(num_bytes),
                                                       .choices = {},
                                                       .pass = {}})};
}

std::uint64_t ProcessGroup::record(const FlightRecorder::NewEvent& event) const {
  return progress_ == nullptr ? 0 : progress_->recorder().begin(flight_group_, event);
}

int ProcessGroup::world_rank(int rank) const {
  return world_ranks_ == nullptr ? -1 : (*world_ranks_)[static_cast<std::size_t>(rank)];
}

Work ProcessGroup::start(std::shared_ptr<Operation> operation, const FlightRecorder::NewEvent& event) {
  TESSERA_CHECK(progress_ != nullptr, "{} of ranks that are planned only", operation->name());
  operation->set_identity(world_ranks_, record(event));
  progress_->start(operation);
  return {*progress_, std::move(operation)};
}

bool ProcessGroup::on_gpu(const Tensor& x) const {
  if (x.device() != Device::kCuda) return false;
  TESSERA_CHECK(gpu_ != nullptr, "{}: a GPU's tensor {}, but no GPUs in a group of {}", axis_, x.shape().to_string(),
                size());
  return true;
}

namespace {
/// Returns a view of the id as int32 words, because only tensors can be broadcast and sent.
Tensor words_of(cuda::GpuGroup::Id& id) {
  return {id.data(), {static_cast<std::int64_t>(sizeof id / sizeof(std::int32_t))}, DType::kInt32, Device::kCpu};
}
}  // namespace

void ProcessGroup::use_gpu(const cuda::Stream& computation, const cuda::Stream& calls) {
  if (size() == 1) return;
  cuda::GpuGroup::Id id{};  // rank 0 makes it
  if (rank() == 0) id = cuda::GpuGroup::make_id();
  broadcast(words_of(id), 0, "NCCL's id").wait();
  gpu_ = std::make_unique<cuda::GpuGroup>(id, rank(), size(), computation, calls, *progress_);
}

void ProcessGroup::wait_for_gpu(const cuda::Event& event, std::string_view name, const std::function<void()>& check) {
  TESSERA_CHECK(gpu_ != nullptr && progress_ != nullptr);
  const auto passed = [&] {
    if (event.passed()) return true;
    gpu_->check();
    if (check) check();
    return false;
  };
  try {
    progress_->wait_until(
        std::string(name), passed, [&] { return gpu_->describe(); }, [&] { return gpu_->position(); });
  } catch (const std::exception& error) {
    abort_gpu(error);
    throw;
  }
}

void ProcessGroup::abort_gpu(const std::exception& error) noexcept {
  if (gpu_ == nullptr) return;
  progress_->call_failure_handler(error);
  gpu_->abort();
}

Work ProcessGroup::all_gather(const Tensor& in, const Tensor& out, std::string_view name) {
  TESSERA_CHECK(in.is_contiguous() && out.is_contiguous() && in.dtype() == out.dtype() &&
                    out.num_elements() == in.num_elements() * size(),
                "{} {}", in.shape().to_string(), out.shape().to_string());
  if (in.device() == Device::kMeta) return note("all_gather", out.num_bytes());
  if (on_gpu(in)) {
    record({.kind = FlightKind::kAllGather, .bytes = in.num_bytes(), .on_gpu = true});
    return work_of(gpu_->all_gather(in, out, title("all-gather", name)));
  }
  const std::size_t part = in.num_bytes();
  copy(bytes_of(in), part, bytes_of(out) + static_cast<std::size_t>(rank()) * part);
  if (size() == 1) return {};
  const FlightRecorder::NewEvent event{.kind = FlightKind::kAllGather, .bytes = part};
  const int tag = next_tag();
  if (in_rounds(size(), part)) {
    return start(std::make_shared<SmallAllGather>(title("all-gather", name), *transport_, tag,
                                                  std::span(bytes_of(in), part), bytes_of(out)),
                 event);
  }
  auto exchange = std::make_shared<Exchange>(title("all-gather", name), *transport_);
  exchange->messages.send_to_others(bytes_of(in), part, tag);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || part == 0) continue;
    exchange->messages.receive(bytes_of(out) + static_cast<std::size_t>(peer) * part, part, peer, tag);
  }
  return start(std::move(exchange), event);
}

Work ProcessGroup::reduce_scatter(const Tensor& in, const Tensor& out, Write write, std::string_view name) {
  TESSERA_CHECK(in.is_contiguous() && out.is_contiguous() && in.dtype() == out.dtype() &&
                    in.num_elements() == out.num_elements() * size(),
                "{} {}", in.shape().to_string(), out.shape().to_string());
  if (in.device() == Device::kMeta) return note("reduce_scatter", in.num_bytes());
  if (on_gpu(in)) {
    record({.kind = FlightKind::kReduceScatter, .bytes = in.num_bytes(), .on_gpu = true});
    return work_of(gpu_->reduce_scatter(in, out, write, title("reduce-scatter", name)));
  }
  if (size() == 1) {
    const std::byte* part = bytes_of(in);
    add_parts_of({in.dtype(), out.dtype()})(std::span(&part, 1), in.num_bytes(), write, bytes_of(out));
    return {};
  }
  return start_reduce_scatter({bytes_of(in), in.num_bytes()}, in.dtype(), out, write, name);
}

Work ProcessGroup::start_reduce_scatter(std::span<std::byte> in, DType sent, const Tensor& out, Write write,
                                        std::string_view name) {
  const SumTypes types{sent, out.dtype()};
  const FlightRecorder::NewEvent event{.kind = FlightKind::kReduceScatter, .bytes = in.size()};
  const int tag = next_tag();
  if (in_rounds(size(), in.size() / static_cast<std::size_t>(size()))) {
    return start(std::make_shared<SmallReduceScatter>(title("reduce-scatter", name), *transport_, tag, in, types, write,
                                                      bytes_of(out)),
                 event);
  }
  std::vector<Range> ranges = even_ranges(out.num_elements() * size(), size_of(sent), size());
  return start(std::make_shared<ReduceScatter>(
                   title("reduce-scatter", name),
                   RangeSum(*transport_, tag, in.data(), std::move(ranges), types, write, bytes_of(out))),
               event);
}

Work ProcessGroup::reduce_scatter_as_bfloat16(const Tensor& in, const Tensor& out, Write write, std::string_view name) {
  if (size() == 1) return reduce_scatter(in, out, write, name);
  TESSERA_CHECK(in.is_contiguous() && out.is_contiguous() && in.dtype() == DType::kFloat32 &&
                    out.dtype() == DType::kFloat32 && in.num_elements() == out.num_elements() * size(),
                "{} {}", in.shape().to_string(), out.shape().to_string());
  const std::size_t num_bytes = in.num_bytes() / 2;
  if (in.device() == Device::kMeta) return note("all_to_all", num_bytes);
  if (on_gpu(in)) {
    record({.kind = FlightKind::kReduceScatter, .bytes = num_bytes, .on_gpu = true});
    return work_of(gpu_->reduce_scatter_as_bfloat16(in, out, write, title("reduce-scatter", name)));
  }
  round_in_place(bytes_of(in), static_cast<std::size_t>(in.num_elements()));
  return start_reduce_scatter({bytes_of(in), num_bytes}, DType::kBFloat16, out, write, name);
}

Work ProcessGroup::all_reduce(const Tensor& x, std::string_view name) {
  TESSERA_CHECK(x.is_contiguous());
  if (size() == 1 || x.num_bytes() == 0) return {};
  if (x.device() == Device::kMeta) return note("all_reduce", x.num_bytes());
  if (on_gpu(x)) {
    record({.kind = FlightKind::kAllReduce, .bytes = x.num_bytes(), .on_gpu = true});
    return work_of(gpu_->all_reduce(x, title("all-reduce", name)));
  }
  const FlightRecorder::NewEvent event{.kind = FlightKind::kAllReduce, .bytes = x.num_bytes()};
  if (x.num_bytes() <= kGatheredSumBytes) {
    return start(std::make_shared<SmallAllReduce>(title("all-reduce", name), *transport_, next_tag(),
                                                  std::span(bytes_of(x), x.num_bytes()), x.dtype()),
                 event);
  }
  return start(std::make_shared<AllReduce>(title("all-reduce", name), *transport_, next_tag(), bytes_of(x),
                                           even_ranges(x.num_elements(), size_of(x.dtype()), size()), x.dtype()),
               event);
}

Work ProcessGroup::all_to_all(const Tensor& in, const Tensor& out, std::string_view name) {
  TESSERA_CHECK(in.dim(0) % size() == 0, "{} for {} ranks", in.shape().to_string(), size());
  const std::vector<std::int64_t> rows(static_cast<std::size_t>(size()), in.dim(0) / size());
  return all_to_all_v(in, rows, out, rows, name);
}

Work ProcessGroup::all_to_all_v(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                                std::span<const std::int64_t> out_rows, std::string_view name) {
  const auto ranks = static_cast<std::size_t>(size()), own = static_cast<std::size_t>(rank());
  TESSERA_CHECK(in.is_contiguous() && out.is_contiguous() && in.dtype() == out.dtype() && in_rows.size() == ranks &&
                out_rows.size() == ranks && in_rows[own] == out_rows[own]);
  if (in.device() == Device::kMeta) return note("all_to_all", in.num_bytes());
  const std::size_t row = row_bytes(in);
  TESSERA_CHECK(row == row_bytes(out), "{} {}", in.shape().to_string(), out.shape().to_string());
  TESSERA_CHECK(std::accumulate(in_rows.begin(), in_rows.end(), std::int64_t{0}) <= in.dim(0) &&
                    std::accumulate(out_rows.begin(), out_rows.end(), std::int64_t{0}) <= out.dim(0),
                "{} {}", in.shape().to_string(), out.shape().to_string());
  if (on_gpu(in)) {
    record({.kind = FlightKind::kAllToAll, .bytes = in.num_bytes(), .on_gpu = true});
    return work_of(gpu_->all_to_all_v(in, in_rows, out, out_rows, row, title("all-to-all", name)));
  }
  const auto parts = [&](const Tensor& x, std::span<const std::int64_t> rows) {
    std::vector<std::span<std::byte>> result;
    std::byte* begin = bytes_of(x);
    for (const std::int64_t count : rows) {
      result.emplace_back(begin, static_cast<std::size_t>(count) * row);
      begin += result.back().size();
    }
    return result;
  };
  return start_all_to_all(parts(in, in_rows), parts(out, out_rows), in.num_bytes(), name);
}

Work ProcessGroup::all_to_all_counted(const Tensor& in, const Tensor& num_sent_P, const Tensor& out,
                                      const Tensor& num_received_P, std::string_view name) {
  TESSERA_CHECK(in.is_contiguous() && out.is_contiguous() && in.dtype() == out.dtype() && in.shape() == out.shape() &&
                    in.dim(0) % size() == 0,
                "{} {} for {} ranks", in.shape().to_string(), out.shape().to_string(), size());
  for (const Tensor& counts : {num_sent_P, num_received_P}) {
    TESSERA_CHECK(counts.dtype() == DType::kInt32 && counts.num_elements() == size());
  }
  if (in.device() == Device::kMeta) return all_to_all(in, out, name);
  if (on_gpu(in)) {
    if (!gpu_->is_open_for_counted()) return all_to_all(in, out, name);
    record({.kind = FlightKind::kAllToAll, .bytes = in.num_bytes(), .on_gpu = true});
    return work_of(gpu_->all_to_all_counted(in, num_sent_P, out, num_received_P, title("all-to-all", name)));
  }
  const std::int64_t part_rows = in.dim(0) / size();
  const auto parts = [&](const Tensor& x, const Tensor& counts) {
    std::vector<std::span<std::byte>> result;
    for (int peer = 0; peer < size(); ++peer) {
      const std::int64_t count = counts.data<std::int32_t>()[peer];
      TESSERA_CHECK(0 <= count && count <= part_rows, "{} of {} rows", count, part_rows);
      result.emplace_back(bytes_of(x) + static_cast<std::size_t>(peer * part_rows) * row_bytes(x),
                          static_cast<std::size_t>(count) * row_bytes(x));
    }
    return result;
  };
  return start_all_to_all(parts(in, num_sent_P), parts(out, num_received_P), in.num_bytes(), name);
}

void ProcessGroup::open_counted(std::size_t num_bytes) {
  if (gpu_ == nullptr || size() == 1) return;
  float num_open = gpu_->open_counted(num_bytes) ? 1.0f : 0.0f;
  all_reduce(Tensor(&num_open, {1}, DType::kFloat32, Device::kCpu), "connections for counted rows").wait();
  if (num_open == static_cast<float>(size())) return;
  close_counted();
  if (world_rank(rank()) == 0) {
    spdlog::warn(
        "{}: NCCL has no device-initiated network (GIN) here, or another version than this program was built "
        "with; so GPUs send each other whole parts of all-to-alls",
        axis_);
  }
}

void ProcessGroup::close_counted() {
  if (gpu_ != nullptr) gpu_->close_counted();
}

Work ProcessGroup::start_all_to_all(const std::vector<std::span<std::byte>>& in_P,
                                    const std::vector<std::span<std::byte>>& out_P, std::size_t num_bytes,
                                    std::string_view name) {
  const auto own = static_cast<std::size_t>(rank());
  TESSERA_CHECK(in_P[own].size() == out_P[own].size(), "{} {}", in_P[own].size(), out_P[own].size());
  copy(in_P[own].data(), in_P[own].size(), out_P[own].data());
  if (size() == 1) return {};
  auto exchange = std::make_shared<Exchange>(title("all-to-all", name), *transport_);
  const int tag = next_tag();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const std::span<std::byte> sent = in_P[static_cast<std::size_t>(peer)];
    const std::span<std::byte> received = out_P[static_cast<std::size_t>(peer)];
    if (!sent.empty()) exchange->messages.send(sent.data(), sent.size(), peer, tag);
    if (!received.empty()) exchange->messages.receive(received.data(), received.size(), peer, tag);
  }
  return start(std::move(exchange), {.kind = FlightKind::kAllToAll, .bytes = num_bytes});
}

Work ProcessGroup::broadcast(const Tensor& x, int root, std::string_view name) {
  TESSERA_CHECK(x.is_contiguous() && 0 <= root && root < size());
  if (size() == 1 || x.num_bytes() == 0) return {};
  if (x.device() == Device::kMeta) return note("broadcast", x.num_bytes());
  if (on_gpu(x)) {
    record({.kind = FlightKind::kBroadcast, .bytes = x.num_bytes(), .on_gpu = true});
    return work_of(gpu_->broadcast(x, root, title("broadcast", name)));
  }
  return start(std::make_shared<TreeBroadcast>(title("broadcast", name), *transport_, next_tag(), root,
                                               std::span(bytes_of(x), x.num_bytes())),
               {.kind = FlightKind::kBroadcast, .bytes = x.num_bytes()});
}

void ProcessGroup::open_links(std::span<const Link> links) {
  if (gpu_ == nullptr) return;
  barrier("ranks that open links");  // a hang in what follows can be ended only with the process
  const Buffer word(sizeof(std::int32_t), Device::kCuda);
  const Tensor greeting(word.data(), {1}, DType::kInt32, Device::kCuda);
  const auto open = [&](const Link& link, bool sends) {
    const int peer = sends ? link.to : link.from;
    cuda::GpuGroup::Id id{};
    if (sends) id = cuda::GpuGroup::make_id();
    constexpr std::string_view kId = "NCCL's id";
    (sends ? send(words_of(id), peer, link.tag, kId) : receive(words_of(id), peer, link.tag, kId)).wait();
    TESSERA_CHECK(!links_.contains(link.tag), "{} {}", axis_, link.tag);
    links_[link.tag] = {.peer = peer, .sends = sends, .gpu = gpu_->link(id, sends ? 0 : 1)};
    // The first message connects the two ranks, and the host waits for that: here, where both have arrived.
    (sends ? send(greeting, peer, link.tag, "nothing") : receive(greeting, peer, link.tag, "nothing")).wait();
  };
  try {
    for (const Link& link : links) {
      if (link.from == rank() || link.to == rank()) open(link, link.from == rank());
    }
    cuda::Event all;
    all.record(gpu_->computation());
    wait_for_gpu(all, "opening links");
  } catch (const std::exception& error) {
    abort_gpu(error);
    throw;
  }
}

cuda::GpuGroup& ProcessGroup::link_of(int tag, int peer, bool sends) const {
  const auto found = links_.find(tag);
  TESSERA_CHECK(found != links_.end() && found->second.peer == peer && found->second.sends == sends,
                "{}: no link {} {} with tag {}", axis_, sends ? "to" : "from", peer, tag);
  return *found->second.gpu;
}

Work ProcessGroup::send(const Tensor& x, int to, int tag, std::string_view name) {
  TESSERA_CHECK(x.is_contiguous() && 0 <= tag && tag <= kMaxTag && to != rank() && to < size(), "{} {}", to, tag);
  if (x.device() == Device::kMeta) return note("send", x.num_bytes());
  const std::string full_title = title(fmt::format("send to {} rank {}", axis_, to), name);
  const FlightRecorder::NewEvent event{
      .kind = FlightKind::kSend, .bytes = x.num_bytes(), .peer = world_rank(to), .on_gpu = on_gpu(x)};
  if (event.on_gpu) {
    record(event);
    return work_of(link_of(tag, to, true).send(x, 1, full_title));
  }
  auto exchange = std::make_shared<Exchange>(full_title, *transport_);
  exchange->messages.send(bytes_of(x), x.num_bytes(), to, kFirstUserTag + tag);
  return start(std::move(exchange), event);
}

Work ProcessGroup::receive(const Tensor& x, int from, int tag, std::string_view name) {
  TESSERA_CHECK(x.is_contiguous() && 0 <= tag && tag <= kMaxTag && from != rank() && from < size(), "{} {}", from, tag);
  if (x.device() == Device::kMeta) return note("receive", x.num_bytes());
  const std::string full_title = title(fmt::format("receive from {} rank {}", axis_, from), name);
  const FlightRecorder::NewEvent event{
      .kind = FlightKind::kReceive, .bytes = x.num_bytes(), .peer = world_rank(from), .on_gpu = on_gpu(x)};
  if (event.on_gpu) {
    record(event);
    return work_of(link_of(tag, from, false).receive(x, 0, full_title));
  }
  auto exchange = std::make_shared<Exchange>(full_title, *transport_);
  exchange->messages.receive(bytes_of(x), x.num_bytes(), from, kFirstUserTag + tag);
  return start(std::move(exchange), event);
}

std::vector<double> ProcessGroup::all_gather(std::span<const double> x, std::string_view name) {
  std::vector<double> all(x.begin(), x.end());
  if (size() == 1 || x.empty()) return all;
  const auto gather =
      std::make_shared<GatherInRounds>(title("all-gather", name), *transport_, next_tag(), std::as_bytes(x));
  start(gather, {.kind = FlightKind::kAllGather, .bytes = x.size_bytes()}).wait();
  all.resize(x.size() * static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    std::memcpy(all.data() + static_cast<std::size_t>(r) * x.size(), gather->part(r).data(), x.size_bytes());
  }
  return all;
}

void ProcessGroup::all_reduce(std::span<double> x, std::string_view name) {
  if (size() == 1 || x.empty()) return;
  start(std::make_shared<TreeAllReduce>(title("all-reduce", name), *transport_, next_tag(), x),
        {.kind = FlightKind::kAllReduce, .bytes = x.size_bytes()})
      .wait();
}

void ProcessGroup::barrier(std::string_view name) {
  if (size() == 1) return;
  double nothing = 0.0;
  start(std::make_shared<TreeAllReduce>(title("barrier", name), *transport_, next_tag(), std::span(&nothing, 1)),
        {.kind = FlightKind::kAllReduce, .bytes = sizeof nothing})
      .wait();
}

ProcessGroup ProcessGroup::split(int color, int order, std::string axis, Traffic traffic) {
  if (transport_ == nullptr) return {};
  std::unique_ptr<Transport> part;
  {
    const Progress::Watched watched(*progress_, title("creation", axis));
    part = transport_->split(color, order, axis);
  }
  // The ranks of a group make their splits in the same order, so they agree on this id.
  const std::array<std::uint64_t, 3> origin = {id_, ++num_splits_, static_cast<std::uint64_t>(color)};
  ProcessGroup group(std::move(part), *progress_, std::move(axis), checksum(std::as_bytes(std::span(origin))));
  const double own = world_rank(rank());
  const std::vector<double> ranks = group.all_gather(std::span(&own, 1), "ranks in the world");
  group.world_ranks_ = std::make_shared<const std::vector<int>>(ranks.begin(), ranks.end());
  if (gpu_ != nullptr) group.gpu_ = gpu_->split(color, order, group.size(), traffic);
  return group;
}

std::unique_ptr<SymmetricWindow> ProcessGroup::allocate_window(std::size_t num_bytes) {
  TESSERA_CHECK(transport_ != nullptr, "a window of a group without ranks to share it with");
  barrier("ranks that allocate a window");  // a hang in what follows can be ended only with the process
  const Progress::Watched watched(*progress_, title("allocation", "a window"));
  return gpu_ != nullptr ? gpu_->allocate_window(num_bytes) : transport_->allocate_window(num_bytes);
}

void ProcessGroup::wait_until(std::string_view operation, std::string_view name, int peer,
                              const std::function<bool()>& over, const std::function<std::string()>& missing) {
  if (over()) return;
  TESSERA_CHECK(progress_ != nullptr, "{} of {} waits, in a group of one rank", operation, name);
  const std::uint64_t event = record({.kind = FlightKind::kWindowWait, .bytes = 0, .peer = world_rank(peer)});
  progress_->wait_until(
      title(operation, name), over,
      [&] { return fmt::format("; a store of rank {} is missing{}", world_rank(peer), missing()); }, {}, event);
  progress_->recorder().end(event);
}

Progress::Seconds ProcessGroup::timeout() const {
  return progress_ == nullptr ? Progress::Seconds::max() : progress_->timeout();
}

void ProcessGroup::fail_late(std::string_view operation, std::string_view name, const std::string& missing) const {
  TESSERA_CHECK(progress_ != nullptr, "{} of {} waits, in a group of one rank", operation, name);
  progress_->fail_late(title(operation, name), missing);
}

}  // namespace tessera
