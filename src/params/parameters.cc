#include "params/parameters.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

/// A thread copies so many bytes or numbers at a time.
constexpr std::int64_t kGrain = 1 << 16;

}  // namespace

Parameters::Parameters(std::shared_ptr<Mesh> mesh, const StorageOptions& options)
    : table_(std::make_unique<ParameterTable>(std::move(mesh))),
      optimizer_tensors_(options.optimizer),
      no_scratch_(std::make_unique<Arena>(0)),
      first_writes_(*table_),
      slots_(*table_, options) {
  optimizer_state_.resize(optimizer_tensors_.size());
}

ParamId Parameters::add(ParamSpec spec) {
  TESSERA_CHECK(device_ == Device::kMeta);
  return table_->add(std::move(spec));
}

std::size_t Parameters::num_bytes(DType compute) const {
  const std::int64_t size = table_->flat_size();
  std::size_t optimizer = 0;
  for (const OptimizerTensor& tensor : optimizer_tensors_) optimizer += size_in_bytes(size, tensor.dtype);
  return 2 * size_in_bytes(size, DType::kFloat32) + optimizer +
         (compute == DType::kBFloat16 ? size_in_bytes(size - left_out_.size(), compute) : 0) +
         size_in_bytes(table_->buffers_size(), DType::kFloat32) + slots_.num_bytes(compute);
}

void Parameters::allocate(DType compute, cuda::Runtime* cuda) {
  const std::int64_t size = table_->flat_size();
  compute_ = compute;
  cuda_ = cuda;
  device_ = cuda == nullptr ? Device::kCpu : Device::kCuda;
  *no_scratch_ = Arena(0, device_);
  for (Buffer* buffer : {&masters_, &gradients_}) *buffer = Buffer(size_in_bytes(size, DType::kFloat32), device_);
  for (std::size_t i = 0; i < optimizer_state_.size(); ++i) {
    optimizer_state_[i] = Buffer(size_in_bytes(size, optimizer_tensors_[i].dtype), device_);
  }
  if (compute == DType::kBFloat16) shadows_ = Buffer(size_in_bytes(size - left_out_.size(), compute), device_);
  buffers_ = Buffer(size_in_bytes(table_->buffers_size(), DType::kFloat32), device_);
  slots_.allocate(context(), all_weights(), compute == DType::kBFloat16 ? left_out_ : LeftOut(), all_gradients());
  first_writes_.reset();
}

void Parameters::allocate_weights(DType compute, cuda::Runtime* cuda) {
  TESSERA_CHECK(num_slots() == 0 && left_out_.size() == 0);
  compute_ = compute;
  cuda_ = cuda;
  device_ = cuda == nullptr ? Device::kCpu : Device::kCuda;
  *no_scratch_ = Arena(0, device_);
  (compute == DType::kBFloat16 ? shadows_ : masters_) = Buffer(size_in_bytes(table_->flat_size(), compute), device_);
  buffers_ = Buffer(size_in_bytes(table_->buffers_size(), DType::kFloat32), device_);
}

void Parameters::allocate_meta(DType compute) {
  compute_ = compute;
  slots_.allocate_meta(compute);
}

Tensor Parameters::flat(const Buffer& buffer, DType dtype) const {
  return Tensor(buffer.data(), {table_->flat_size()}, dtype, device_);
}

Tensor Parameters::all_weights() const {
  if (compute_ != DType::kBFloat16) return all_masters();
  return Tensor(shadows_.data(), {table_->flat_size() - left_out_.size()}, compute_, device_);
}

Parameters::Range Parameters::flat_range(ParamId id) const {
  const ParameterTable::Bucket& bucket = table_->bucket(id);
  const Range range = shard_range(id);
  const std::int64_t in_bucket =
      table_->place(id).offset + range.begin - table_->group(bucket).rank() * bucket.shard_size;
  const std::int64_t begin = range.begin == range.end ? 0 : bucket.flat_offset + in_bucket;
  return {begin, begin + range.end - range.begin};
}

Tensor Parameters::shard(const Tensor& all, ParamId id) const {
  const auto [begin, end] = flat_range(id);
  return all.rows(begin, end);
}

Tensor Parameters::master(ParamId id) const {
  TESSERA_CHECK(!sharded(id), "{}", spec(id).name);
  return master_shard(id).reshape(local_shape(id));
}

void Parameters::leave_out_copies(std::span<const ParamId> ids) {
  TESSERA_CHECK(masters_.data() == nullptr);
  std::vector<Range> ranges;
  for (const ParamId id : ids) {
    TESSERA_CHECK(!sharded(id), "{}", spec(id).name);
    const auto [begin, end] = flat_range(id);
    ranges.push_back({begin, std::min(table_->flat_size(), aligned_count(end))});
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  left_out_ = LeftOut(std::move(ranges));
}

Tensor Parameters::rounded_weight(const Context& op, ParamId id) const {
  if (has_copy(id)) return weight(id);
  const Tensor rounded = op.arena->allocate(local_shape(id), compute_);
  convert(op, master(id), rounded);
  return rounded;
}

Tensor Parameters::weight(ParamId id) const {
  TESSERA_CHECK(has_copy(id), "{}", spec(id).name);
  if (sharded(id)) return slots_.weight(id, compute_);
  if (compute_ != DType::kBFloat16) return master(id);
  return shadows(flat_range(id)).reshape(local_shape(id));
}

Tensor Parameters::gradient(ParamId id) const {
  return sharded(id) ? slots_.gradient(id) : gradient_shard(id).reshape(local_shape(id));
}

void Parameters::clear_gradients() {
  slots_.clear_gradients();  // of passes that no step followed: a warm-up, a search for what is not finite
  first_writes_.reset();
  first_writes_.start(context(), all_gradients(), std::nullopt);
}

void Parameters::finish_gradients() {
  if (device_ != Device::kMeta) first_writes_.require_assigned(std::nullopt);
  slots_.finish_gradients(first_writes_);
  mesh().dp_replicate.all_reduce(all_gradients(), "the gradients of the replicas").wait();
}

Tensor Parameters::buffer(ParamId id) const {
  const std::int64_t begin = table_->buffer_offset(id);
  const Shape& shape = buffer_spec(id).shape;
  return all_buffers().rows(begin, begin + shape.num_elements()).reshape(shape);
}

Tensor Parameters::all_buffers() const { return {buffers_.data(), {table_->buffers_size()}, DType::kFloat32, device_}; }

Tensor Parameters::shadows(const Range& range) const {
  if (compute_ != DType::kBFloat16) return {};
  const std::int64_t begin = left_out_.place(range.begin), end = left_out_.place(range.end);
  TESSERA_CHECK(end - begin == range.end - range.begin, "[{}, {})", range.begin, range.end);
  return all_weights().rows(begin, end);
}

void Parameters::set(ParamId id, std::int64_t offset, std::span<const float> numbers) {
  const auto end = offset + static_cast<std::int64_t>(numbers.size());
  TESSERA_CHECK(0 <= offset && end <= spec(id).shape.num_elements(), "{} [{}, {})", spec(id).name, offset, end);
  table_->for_each_run(id, [&](std::int64_t flat_begin, std::int64_t global, std::int64_t count) {
    const std::int64_t first = std::max(global, offset), last = std::min(global + count, end);
    if (first >= last) return;
    const float* source = numbers.data() + (first - offset);
    const Range target{flat_begin + (first - global), flat_begin + (last - global)};
    const Tensor copies = has_copy(id) ? shadows(target) : Tensor();
    if (masters_.data() != nullptr) {
      const Tensor masters = all_masters().rows(target.begin, target.end);
      write({source, static_cast<std::size_t>(last - first)}, masters);
      if (copies.defined()) convert(context(), masters, copies);
    } else if (copies.defined()) {
      write({source, static_cast<std::size_t>(last - first)}, copies);
    }
  });
}

Context Parameters::context() const { return {.arena = no_scratch_.get(), .cuda = cuda_}; }

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
  for (ParamId id = 0; id < size(); ++id) {
    const ParamSpec& spec = this->spec(id);
    const int num_dims = spec.shape.num_dims();
    InitPattern pattern{.first = spec.init, .second = spec.init, .run = spec.shape.num_elements()};
    if (spec.init_up) {  // of each matrix the rows of gate, then those of up
      pattern.second = *spec.init_up;
      pattern.run = spec.shape[num_dims - 1] * spec.shape[num_dims - 2] / 2;
    }
    table_->for_each_run(id, [&](std::int64_t flat_begin, std::int64_t global, std::int64_t count) {
      draw_initial(context(), Philox(seed, stream_of(spec.name)), pattern, global,
                   all_masters().rows(flat_begin, flat_begin + count));
    });
  }
  refresh_shadows(context());
}

void Parameters::refresh_shadows(const Context& op) const {
  if (compute_ != DType::kBFloat16) return;
  for_each_range_of_others([&](const Range& range) {
    const Shape shape{(range.end - range.begin) / kAlignmentInNumbers, kAlignmentInNumbers};
    convert(op, all_masters().rows(range.begin, range.end).reshape(shape), shadows(range).reshape(shape));
  });
}

}  // namespace tessera
