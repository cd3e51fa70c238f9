#include "model/parameters.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

/// Parameters start at multiples of this many numbers, so that both the float32 and the bfloat16 views are aligned.
constexpr std::int64_t kAlignmentInNumbers = kAlignment / sizeof(BFloat16);

std::int64_t align_up(std::int64_t count) {
  return (count + kAlignmentInNumbers - 1) / kAlignmentInNumbers * kAlignmentInNumbers;
}

void fill(const Init& init, const Philox& random, std::int64_t index, float& target) {
  if (init.std == 0.0f) {
    target = 1.0f;
    return;
  }
  const auto at = static_cast<std::uint64_t>(index);
  const double value = init.bound > 0.0f ? random.truncated_normal(at, init.bound / init.std) : random.normal(at);
  target = static_cast<float>(value * init.std);
}

}  // namespace

ParamId Parameters::add(ParamSpec spec) {
  TESSERA_CHECK(device_ == Device::kMeta);
  for (const ParamSpec& other : specs_) TESSERA_CHECK(other.name != spec.name, "{} added twice", spec.name);
  offsets_.push_back(total_);
  total_ += align_up(spec.shape.num_elements());
  specs_.push_back(std::move(spec));
  return specs_.size() - 1;
}

ParamId Parameters::add_buffer(std::string name, Shape shape) {
  buffer_offsets_.push_back(buffer_total_);
  buffer_total_ += align_up(shape.num_elements());
  buffer_specs_.push_back({.name = std::move(name), .shape = shape, .init = {}});
  return buffer_specs_.size() - 1;
}

std::size_t Parameters::num_bytes(DType compute) const {
  const auto numbers = static_cast<std::size_t>(total_);
  return numbers * 4 * sizeof(float) + (compute == DType::kBFloat16 ? numbers * sizeof(BFloat16) : 0) +
         static_cast<std::size_t>(buffer_total_) * sizeof(float);
}

void Parameters::allocate(DType compute) {
  compute_ = compute;
  device_ = Device::kCpu;
  const std::size_t num_bytes = static_cast<std::size_t>(total_) * sizeof(float);
  masters_ = Buffer(num_bytes);
  gradients_ = Buffer(num_bytes);
  first_moments_ = Buffer(num_bytes);
  second_moments_ = Buffer(num_bytes);
  if (compute == DType::kBFloat16) shadows_ = Buffer(static_cast<std::size_t>(total_) * sizeof(BFloat16));
  buffers_ = Buffer(static_cast<std::size_t>(buffer_total_) * sizeof(float));
}

void Parameters::allocate_weights(DType compute) {
  compute_ = compute;
  device_ = Device::kCpu;
  const std::size_t num_bytes = static_cast<std::size_t>(total_) * size_of(compute);
  (compute == DType::kBFloat16 ? shadows_ : masters_) = Buffer(num_bytes);
  buffers_ = Buffer(static_cast<std::size_t>(buffer_total_) * sizeof(float));
}

void Parameters::set(ParamId id, std::int64_t offset, std::span<const float> numbers) {
  const auto end = offset + static_cast<std::int64_t>(numbers.size());
  TESSERA_CHECK(0 <= offset && end <= specs_[id].shape.num_elements(), "{} [{}, {})", specs_[id].name, offset, end);
  if (masters_.data() != nullptr) std::copy(numbers.begin(), numbers.end(), master(id).data<float>() + offset);
  if (compute_ == DType::kBFloat16) {
    std::transform(numbers.begin(), numbers.end(), weight(id).data<BFloat16>() + offset,
                   [](float number) { return BFloat16(number); });
  }
}

void Parameters::allocate_meta(DType compute) { compute_ = compute; }

Tensor Parameters::view(const Buffer& buffer, ParamId id, DType dtype) const {
  std::byte* data = buffer.data();
  if (data != nullptr) data += static_cast<std::size_t>(offsets_[id]) * size_of(dtype);
  return Tensor(data, specs_[id].shape, dtype, device_);
}

Tensor Parameters::flat(const Buffer& buffer, DType dtype) const {
  return Tensor(buffer.data(), {total_}, dtype, device_);
}

Tensor Parameters::weight(ParamId id) const {
  return compute_ == DType::kBFloat16 ? view(shadows_, id, DType::kBFloat16) : master(id);
}

Tensor Parameters::buffer(ParamId id) const {
  std::byte* data = buffers_.data();
  if (data != nullptr) data += static_cast<std::size_t>(buffer_offsets_[id]) * sizeof(float);
  return Tensor(data, buffer_specs_[id].shape, DType::kFloat32, device_);
}

Tensor Parameters::all_shadows() const {
  return compute_ == DType::kBFloat16 ? flat(shadows_, DType::kBFloat16) : Tensor();
}

void Parameters::initialise(std::uint64_t seed) {
  for (ParamId id = 0; id < specs_.size(); ++id) {
    const ParamSpec& spec = specs_[id];
    const Philox random(seed, stream_of(spec.name));
    float* numbers = master(id).data<float>();
    const int num_dims = spec.shape.num_dims();
    // Numbers of one matrix's half: rows of gate, then rows of up.
    const std::int64_t half =
        spec.init_up ? spec.shape[num_dims - 1] * spec.shape[num_dims - 2] / 2 : spec.shape.num_elements();
    parallel_ranges(spec.shape.num_elements(), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const bool is_up = spec.init_up && i / half % 2 == 1;
        fill(is_up ? *spec.init_up : spec.init, random, i, numbers[i]);
      }
    });
  }
  refresh_shadows();
}

void Parameters::refresh_shadows() {
  if (compute_ != DType::kBFloat16) return;
  Arena no_scratch(0);
  convert({.arena = &no_scratch}, all_masters().reshape({total_ / kAlignmentInNumbers, kAlignmentInNumbers}),
          all_shadows().reshape({total_ / kAlignmentInNumbers, kAlignmentInNumbers}));
}

}  // namespace tessera
