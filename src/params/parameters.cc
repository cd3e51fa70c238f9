#include "params/parameters.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// Parameters and shards start at multiples of this many numbers, so that both the float32 and the bfloat16 views are
/// aligned.
constexpr std::int64_t kAlignmentInNumbers = kAlignment / sizeof(BFloat16);

std::int64_t align_up(std::int64_t count) {
  return (count + kAlignmentInNumbers - 1) / kAlignmentInNumbers * kAlignmentInNumbers;
}

/// Bytes or numbers that a thread copies at a time.
constexpr std::int64_t kGrain = 1 << 16;

std::size_t bytes_of(std::int64_t count, DType dtype) { return static_cast<std::size_t>(count) * size_of(dtype); }

/// The slot of a unit, or null.
template <typename Slots>
auto find(Slots& slots, UnitId unit) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.unit == unit; });
  return found == slots.end() ? nullptr : &*found;
}

}  // namespace

Parameters::Parameters(std::shared_ptr<Mesh> mesh, const StorageOptions& options)
    : mesh_(mesh != nullptr ? std::move(mesh) : std::make_shared<Mesh>()), options_(options) {}

UnitId Parameters::begin_unit() { return num_units_++; }

ParamId Parameters::add(ParamSpec spec) {
  TESSERA_CHECK(device_ == Device::kMeta);
  for (const ParamSpec& other : specs_) TESSERA_CHECK(other.name != spec.name, "{} added twice", spec.name);
  const UnitId unit = num_units_ - 1;
  auto bucket = std::find_if(buckets_.begin(), buckets_.end(),
                             [&](const Bucket& b) { return b.unit == unit && b.axis == spec.cut.axis; });
  if (bucket == buckets_.end()) bucket = buckets_.insert(bucket, {.unit = unit, .axis = spec.cut.axis});
  const ParamId id = specs_.size();
  specs_.push_back(std::move(spec));
  places_.push_back({.unit = unit,
                     .bucket = static_cast<std::size_t>(bucket - buckets_.begin()),
                     .offset = bucket->size,
                     .local = slice(id).local()});
  bucket->size += align_up(places_[id].local.num_elements());
  lay_out();
  return id;
}

void Parameters::lay_out() {
  total_ = slot_size_ = 0;
  std::int64_t unit_size = 0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {  // a unit's lie one behind the other
    Bucket& bucket = buckets_[i];
    if (i == 0 || buckets_[i - 1].unit != bucket.unit) unit_size = 0;
    const std::int64_t ranks = group(bucket).size();
    bucket.shard_size = align_up((bucket.size + ranks - 1) / ranks);
    bucket.flat_offset = total_;
    total_ += bucket.shard_size;
    bucket.slot_offset = unit_size;
    if (sharded(bucket)) unit_size += ranks * bucket.shard_size;
    slot_size_ = std::max(slot_size_, unit_size);
  }
  slots_.resize(slot_size_ == 0 ? 0 : num_weight_slots());
  gradient_slots_.resize(slot_size_ == 0 ? 0 : options_.keep_gradients ? num_units_ : options_.num_slots);
}

ParamId Parameters::add_buffer(std::string name, Shape shape) {
  buffer_offsets_.push_back(buffer_total_);
  buffer_total_ += align_up(shape.num_elements());
  buffer_specs_.push_back({.name = std::move(name), .shape = shape, .init = {}});
  return buffer_specs_.size() - 1;
}

Slice Parameters::slice(ParamId id) const {
  const ParamSpec& spec = specs_[id];
  Slice slice{.global = spec.shape, .dim = spec.cut.dim, .blocks = spec.cut.blocks};
  if (spec.cut.axis == Cut::Axis::kTensor) slice.part = mesh_->place.tp, slice.parts = mesh_->degrees.tp;
  if (spec.cut.axis == Cut::Axis::kExperts) slice.part = mesh_->place.ep, slice.parts = mesh_->degrees.ep;
  return slice;
}

ProcessGroup& Parameters::group(const Bucket& bucket) const {
  switch (bucket.axis) {
    case Cut::Axis::kTensor:
      return mesh_->shard_of_cut;
    case Cut::Axis::kExperts:
      return mesh_->shard_of_experts;
    case Cut::Axis::kNone:
      break;
  }
  return mesh_->shard_of_whole;
}

bool Parameters::sharded(ParamId id) const { return sharded(buckets_[places_[id].bucket]); }

bool Parameters::sharded_unit(UnitId unit) const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [&](const Bucket& bucket) { return bucket.unit == unit && sharded(bucket); });
}

std::size_t Parameters::num_bytes(DType compute) const {
  return 2 * bytes_of(total_, DType::kFloat32) + 2 * bytes_of(total_, options_.moments) +
         (compute == DType::kBFloat16 ? bytes_of(total_, compute) : 0) + bytes_of(buffer_total_, DType::kFloat32) +
         slots_.size() * bytes_of(slot_size_, compute) + gradient_slots_.size() * bytes_of(slot_size_, DType::kFloat32);
}

void Parameters::allocate(DType compute, cuda::Runtime* cuda) {
  compute_ = compute;
  cuda_ = cuda;
  device_ = cuda == nullptr ? Device::kCpu : Device::kCuda;
  no_scratch_ = Arena(0, device_);
  for (Buffer* buffer : {&masters_, &gradients_}) *buffer = Buffer(bytes_of(total_, DType::kFloat32), device_);
  for (Buffer* buffer : {&first_moments_, &second_moments_}) {
    *buffer = Buffer(bytes_of(total_, options_.moments), device_);
  }
  if (compute == DType::kBFloat16) shadows_ = Buffer(bytes_of(total_, compute), device_);
  buffers_ = Buffer(bytes_of(buffer_total_, DType::kFloat32), device_);
  gathered_ = Buffer(slots_.size() * bytes_of(slot_size_, compute), device_);
  summed_ = Buffer(gradient_slots_.size() * bytes_of(slot_size_, DType::kFloat32), device_);
  to_assign_.assign(size(), false);
}

void Parameters::allocate_weights(DType compute) {
  TESSERA_CHECK(slots_.empty());
  compute_ = compute;
  device_ = Device::kCpu;
  (compute == DType::kBFloat16 ? shadows_ : masters_) = Buffer(bytes_of(total_, compute));
  buffers_ = Buffer(bytes_of(buffer_total_, DType::kFloat32));
}

void Parameters::allocate_meta(DType compute) { compute_ = compute; }

Tensor Parameters::flat(const Buffer& buffer, DType dtype) const {
  return Tensor(buffer.data(), {total_}, dtype, device_);
}

Parameters::Range Parameters::shard_range(ParamId id) const {
  const Place& place = places_[id];
  const Bucket& bucket = buckets_[place.bucket];
  const std::int64_t size = place.local.num_elements();
  const std::int64_t shard_begin = group(bucket).rank() * bucket.shard_size - place.offset;
  return {std::clamp<std::int64_t>(shard_begin, 0, size),
          std::clamp<std::int64_t>(shard_begin + bucket.shard_size, 0, size)};
}

Tensor Parameters::shard(const Tensor& all, ParamId id) const {
  const Place& place = places_[id];
  const Bucket& bucket = buckets_[place.bucket];
  const Range range = shard_range(id);
  const std::int64_t in_bucket = place.offset + range.begin - group(bucket).rank() * bucket.shard_size;
  const std::int64_t begin = range.begin == range.end ? 0 : bucket.flat_offset + in_bucket;
  return all.rows(begin, begin + range.end - range.begin);
}

Tensor Parameters::master(ParamId id) const {
  TESSERA_CHECK(!sharded(id), "{}", specs_[id].name);
  return master_shard(id).reshape(places_[id].local);
}

Tensor Parameters::in_slot(const Buffer& buffer, DType dtype, std::size_t slot, std::int64_t offset,
                           Shape shape) const {
  std::byte* data = buffer.data();
  if (data != nullptr) data += bytes_of(static_cast<std::int64_t>(slot) * slot_size_ + offset, dtype);
  return Tensor(data, shape, dtype, device_);
}

Tensor Parameters::weight(ParamId id) const {
  const Place& place = places_[id];
  const Bucket& bucket = buckets_[place.bucket];
  if (sharded(bucket)) {
    const std::size_t at = device_ == Device::kMeta ? 0 : slot(bucket.unit);
    return in_slot(gathered_, compute_, at, bucket.slot_offset + place.offset, place.local);
  }
  const Buffer& buffer = compute_ == DType::kBFloat16 ? shadows_ : masters_;
  return in_slot(buffer, compute_, 0, bucket.flat_offset + place.offset, place.local);
}

Tensor Parameters::gradient(ParamId id) const {
  const Place& place = places_[id];
  const Bucket& bucket = buckets_[place.bucket];
  if (!sharded(bucket)) return in_slot(gradients_, DType::kFloat32, 0, bucket.flat_offset + place.offset, place.local);
  std::size_t at = 0;
  if (device_ != Device::kMeta) {
    const Slot* slot = find(gradient_slots_, bucket.unit);
    TESSERA_CHECK(slot != nullptr && slot->in_use, "{}", specs_[id].name);
    at = static_cast<std::size_t>(slot - gradient_slots_.data());
  }
  return in_slot(summed_, DType::kFloat32, at, bucket.slot_offset + place.offset, place.local);
}

bool Parameters::is_assigned_in(std::optional<UnitId> unit, ParamId id) const {
  if (specs_[id].gemm == GemmKind::kNone) return false;
  return unit ? sharded(id) && places_[id].unit == *unit : !sharded(id);
}

void Parameters::start_sums(const Tensor& sums, std::optional<UnitId> unit) {
  std::vector<Range> kept;
  for (ParamId id = 0; id < size(); ++id) {
    if (!is_assigned_in(unit, id)) continue;
    to_assign_[id] = true;
    const Bucket& bucket = buckets_[places_[id].bucket];
    const std::int64_t begin = (unit ? bucket.slot_offset : bucket.flat_offset) + places_[id].offset;
    kept.push_back({begin, begin + places_[id].local.num_elements()});
  }
  std::ranges::sort(kept, {}, &Range::begin);
  kept.push_back({sums.dim(0), sums.dim(0)});
  std::int64_t end = 0;  // of the range before
  for (const Range& range : kept) {
    if (range.begin > end) set_zero(context(), sums.rows(end, range.begin));
    end = range.end;
  }
}

void Parameters::clear_gradients() {
  // Passes that no step follows, of a warm-up or a search for what is not finite, leave sums behind.
  for (Slot& slot : gradient_slots_) slot.clear();
  to_assign_.assign(size(), false);
  start_sums(all_gradients(), std::nullopt);
}

void Parameters::require_assigned(std::optional<UnitId> unit) const {
  for (ParamId id = 0; id < size(); ++id) {
    TESSERA_CHECK(!is_assigned_in(unit, id) || !to_assign_[id], "no product has assigned the gradient of {}",
                  specs_[id].name);
  }
}

Write Parameters::gradient_write(ParamId id) {
  if (!to_assign_[id]) return Write::kAccumulate;
  to_assign_[id] = false;
  return Write::kAssign;
}

Tensor Parameters::buffer(ParamId id) const {
  return in_slot(buffers_, DType::kFloat32, 0, buffer_offsets_[id], buffer_specs_[id].shape);
}

Tensor Parameters::all_buffers() const { return {buffers_.data(), {buffer_total_}, DType::kFloat32, device_}; }

Tensor Parameters::all_shadows() const {
  return compute_ == DType::kBFloat16 ? flat(shadows_, DType::kBFloat16) : Tensor();
}

void Parameters::Slot::wait() {
  for (Work& one : work) one.wait();
  work.clear();
}

void Parameters::Slot::clear() {
  TESSERA_CHECK(!in_use);
  wait();
  unit.reset();
}

std::size_t Parameters::slot(UnitId unit) const {
  const Slot* slot = find(slots_, unit);
  TESSERA_CHECK(slot != nullptr && slot->in_use, "unit {}", unit);
  return static_cast<std::size_t>(slot - slots_.data());
}

void Parameters::start_gathering(UnitId unit, std::size_t slot) {
  slots_[slot].unit = unit;
  slots_[slot].fresh = true;
  const Tensor all = flat(compute_ == DType::kBFloat16 ? shadows_ : masters_, compute_);
  for (const Bucket& bucket : buckets_) {
    if (bucket.unit != unit || !sharded(bucket)) continue;
    const std::int64_t size = bucket.shard_size * group(bucket).size();
    slots_[slot].work.push_back(group(bucket).all_gather(
        all.rows(bucket.flat_offset, bucket.flat_offset + bucket.shard_size),
        in_slot(gathered_, compute_, slot, bucket.slot_offset, {size}), fmt::format("the weights of unit {}", unit)));
  }
}

void Parameters::prefetch(UnitId unit) {
  if (device_ == Device::kMeta || !sharded_unit(unit) || find(slots_, unit) != nullptr) return;
  auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.unit; });
  if (free == slots_.end() && !options_.keep_gathered) {
    free =
        std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.in_use && slot.work.empty(); });
  }
  if (free != slots_.end()) start_gathering(unit, static_cast<std::size_t>(free - slots_.begin()));
}

bool Parameters::acquire(UnitId unit) {
  if (device_ == Device::kMeta || !sharded_unit(unit)) return false;
  prefetch(unit);
  Slot* slot = find(slots_, unit);
  TESSERA_CHECK(slot != nullptr, "no slot for unit {}", unit);
  slot->wait();
  slot->in_use = true;
  return std::exchange(slot->fresh, false);
}

void Parameters::release(UnitId unit) {
  if (device_ == Device::kMeta || !sharded_unit(unit)) return;
  slots_[slot(unit)].in_use = false;
}

void Parameters::forget_gathered() {
  for (Slot& slot : slots_) slot.clear();
}

void Parameters::acquire_gradients(UnitId unit, bool with_products) {
  if (device_ == Device::kMeta || !sharded_unit(unit)) return;
  // The slot of the same unit's last sum, so that its sums enter the shards one after the other; or one that is free.
  Slot* free = find(gradient_slots_, unit);
  if (options_.keep_gradients && free != nullptr) {
    TESSERA_CHECK(!free->in_use, "the gradients of unit {}", unit);
    free->in_use = true;
    return;
  }
  for (const bool empty : {true, false}) {
    for (Slot& slot : gradient_slots_) {
      if (free == nullptr && !slot.in_use && (!empty || !slot.unit)) free = &slot;
    }
  }
  TESSERA_CHECK(free != nullptr && !free->in_use, "no slot for the gradients of unit {}", unit);
  free->wait();
  free->unit = unit;
  free->in_use = true;
  std::int64_t used = 0;
  for (const Bucket& bucket : buckets_) {
    if (bucket.unit == unit && sharded(bucket)) used = bucket.slot_offset + group(bucket).size() * bucket.shard_size;
  }
  const auto slot = static_cast<std::size_t>(free - gradient_slots_.data());
  const Tensor sums = in_slot(summed_, DType::kFloat32, slot, 0, {used});
  with_products ? start_sums(sums, unit) : set_zero(context(), sums);
}

void Parameters::release_gradients(UnitId unit) {
  if (device_ == Device::kMeta || !sharded_unit(unit)) return;
  Slot* slot = find(gradient_slots_, unit);
  TESSERA_CHECK(slot != nullptr && slot->in_use, "unit {}", unit);
  slot->in_use = false;
  if (!options_.keep_gradients) start_reducing(*slot);
}

void Parameters::start_reducing(Slot& slot) {
  require_assigned(slot.unit);
  for (const Bucket& bucket : buckets_) {
    if (bucket.unit != slot.unit || !sharded(bucket)) continue;
    const std::int64_t size = bucket.shard_size * group(bucket).size();
    slot.work.push_back(group(bucket).reduce_scatter(
        in_slot(summed_, DType::kFloat32, static_cast<std::size_t>(&slot - gradient_slots_.data()), bucket.slot_offset,
                {size}),
        all_gradients().rows(bucket.flat_offset, bucket.flat_offset + bucket.shard_size), Write::kAccumulate,
        fmt::format("the gradients of unit {}", bucket.unit)));
  }
}

void Parameters::finish_gradients() {
  require_assigned(std::nullopt);
  if (options_.keep_gradients) {
    for (UnitId unit = 0; unit < num_units_; ++unit) {
      if (Slot* slot = find(gradient_slots_, unit)) start_reducing(*slot);
    }
  }
  for (Slot& slot : gradient_slots_) slot.clear();
  mesh_->dp_replicate.all_reduce(all_gradients(), "the gradients of the replicas").wait();
}

template <typename Visit>
void Parameters::for_each_run(ParamId id, Visit&& visit) const {
  const Place& place = places_[id];
  const Bucket& bucket = buckets_[place.bucket];
  const Range range = shard_range(id);
  const std::int64_t flat_of_local = bucket.flat_offset + place.offset - group(bucket).rank() * bucket.shard_size;
  slice(id).for_each_run(range.begin, range.end, [&](std::int64_t local, std::int64_t global, std::int64_t count) {
    visit(flat_of_local + local, global, count);
  });
}

void Parameters::set(ParamId id, std::int64_t offset, std::span<const float> numbers) {
  const auto end = offset + static_cast<std::int64_t>(numbers.size());
  TESSERA_CHECK(0 <= offset && end <= specs_[id].shape.num_elements(), "{} [{}, {})", specs_[id].name, offset, end);
  for_each_run(id, [&](std::int64_t flat_begin, std::int64_t global, std::int64_t count) {
    const std::int64_t first = std::max(global, offset), last = std::min(global + count, end);
    if (first >= last) return;
    const float* source = numbers.data() + (first - offset);
    const std::int64_t target = flat_begin + (first - global), end_of_target = target + (last - first);
    if (masters_.data() != nullptr) {
      const Tensor masters = all_masters().rows(target, end_of_target);
      write({source, static_cast<std::size_t>(last - first)}, masters);
      if (compute_ == DType::kBFloat16) convert(context(), masters, all_shadows().rows(target, end_of_target));
    } else if (compute_ == DType::kBFloat16) {
      std::transform(source, source + (last - first), all_shadows().data<BFloat16>() + target,
                     [](float number) { return BFloat16(number); });
    }
  });
}

Context Parameters::context() const { return {.arena = &no_scratch_, .cuda = cuda_}; }

void Parameters::write(std::span<const float> numbers, const Tensor& tensor) const {
  TESSERA_CHECK(tensor.num_elements() == static_cast<std::int64_t>(numbers.size()) && tensor.is_contiguous());
  std::span<const std::byte> bytes = std::as_bytes(numbers);
  std::vector<BFloat16> rounded;
  if (tensor.dtype() == DType::kBFloat16) {
    rounded.resize(numbers.size());
    parallel_ranges(tensor.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::transform(numbers.begin() + begin, numbers.begin() + end, rounded.begin() + begin,
                     [](float number) { return BFloat16(number); });
    });
    bytes = std::as_bytes(std::span(rounded));
  }
  assign(tensor, bytes);
}

void Parameters::assign(const Tensor& to, std::span<const std::byte> bytes) const {
  TESSERA_CHECK(to.is_contiguous() && to.num_bytes() == bytes.size());
  if (cuda_ == nullptr) {
    std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(to.raw()));
    return;
  }
  cuda::copy_bytes(cuda_->stream(), bytes.data(), bytes.size(), to.raw());
  cuda_->synchronize();
}

void Parameters::fill(const Tensor& tensor, const std::function<void(float*)>& fill) const {
  if (cuda_ == nullptr && tensor.dtype() == DType::kFloat32) return fill(tensor.data<float>());
  std::vector<float> numbers(static_cast<std::size_t>(tensor.num_elements()));
  fill(numbers.data());
  write(numbers, tensor);
}

void Parameters::read(const Tensor& from, const Tensor& to) const {
  TESSERA_CHECK(from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() && from.shape() == to.shape());
  if (cuda_ != nullptr) return cuda_->fetch(from, to.raw());
  const auto* bytes = static_cast<const std::byte*>(from.raw());
  auto* target = static_cast<std::byte*>(to.raw());
  parallel_ranges(static_cast<std::int64_t>(from.num_bytes()), kGrain,
                  [&](std::int64_t begin, std::int64_t end) { std::copy(bytes + begin, bytes + end, target + begin); });
}

void Parameters::initialise(std::uint64_t seed) {
  for (ParamId id = 0; id < specs_.size(); ++id) {
    const ParamSpec& spec = specs_[id];
    const int num_dims = spec.shape.num_dims();
    InitPattern pattern{.first = spec.init, .second = spec.init, .run = spec.shape.num_elements()};
    if (spec.init_up) {  // of each matrix the rows of gate, then those of up
      pattern.second = *spec.init_up;
      pattern.run = spec.shape[num_dims - 1] * spec.shape[num_dims - 2] / 2;
    }
    for_each_run(id, [&](std::int64_t flat_begin, std::int64_t global, std::int64_t count) {
      draw_initial(context(), Philox(seed, stream_of(spec.name)), pattern, global,
                   all_masters().rows(flat_begin, flat_begin + count));
    });
  }
  refresh_shadows();
}

void Parameters::refresh_shadows() {
  if (compute_ != DType::kBFloat16) return;
  convert(context(), all_masters().reshape({total_ / kAlignmentInNumbers, kAlignmentInNumbers}),
          all_shadows().reshape({total_ / kAlignmentInNumbers, kAlignmentInNumbers}));
}

}  // namespace tessera
