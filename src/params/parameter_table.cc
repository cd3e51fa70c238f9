#include "params/parameter_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera {

ParameterTable::ParameterTable(std::shared_ptr<Mesh> mesh)
    : mesh_(mesh != nullptr ? std::move(mesh) : std::make_shared<Mesh>()) {}

ParamId ParameterTable::add(ParamSpec spec) {
  TESSERA_CHECK(names_.insert(spec.name).second, "{} added twice", spec.name);
  const UnitId unit = num_units() - 1;
  auto bucket = std::find_if(first_bucket_of_last_unit(), buckets_.end(),
                             [&](const Bucket& b) { return b.axis == spec.cut.axis; });
  if (bucket == buckets_.end()) bucket = buckets_.insert(bucket, {.unit = unit, .axis = spec.cut.axis});
  const ParamId id = specs_.size();
  specs_.push_back(std::move(spec));
  places_.push_back({.unit = unit,
                     .bucket = static_cast<std::size_t>(bucket - buckets_.begin()),
                     .offset = bucket->size,
                     .local = slice(id).local()});
  bucket->size += aligned_count(places_[id].local.num_elements());
  lay_out_last_unit();
  return id;
}

std::vector<ParameterTable::Bucket>::iterator ParameterTable::first_bucket_of_last_unit() {
  auto first = buckets_.end();
  while (first != buckets_.begin() && std::prev(first)->unit == num_units() - 1) --first;
  return first;
}

void ParameterTable::lay_out_last_unit() {
  auto bucket = first_bucket_of_last_unit();
  flat_size_ = bucket == buckets_.begin() ? 0 : std::prev(bucket)->flat_offset + std::prev(bucket)->shard_size;
  std::int64_t& unit_size = unit_sizes_.back();
  unit_size = 0;
  for (; bucket != buckets_.end(); ++bucket) {
    const std::int64_t ranks = group(*bucket).size();
    bucket->shard_size = aligned_count((bucket->size + ranks - 1) / ranks);
    bucket->flat_offset = flat_size_;
    flat_size_ += bucket->shard_size;
    bucket->slot_offset = unit_size;
    if (sharded(*bucket)) unit_size += ranks * bucket->shard_size;
  }
}

ParamId ParameterTable::add_buffer(std::string name, Shape shape) {
  buffer_offsets_.push_back(buffers_size_);
  buffers_size_ += aligned_count(shape.num_elements());
  buffer_specs_.push_back({.name = std::move(name), .shape = shape, .init = {}});
  return buffer_specs_.size() - 1;
}

Slice ParameterTable::slice(ParamId id) const {
  const ParamSpec& spec = specs_[id];
  Slice slice{.global = spec.shape, .dim = spec.cut.dim, .blocks = spec.cut.blocks};
  if (spec.cut.axis == Cut::Axis::kTensor) slice.part = mesh_->place.tp, slice.parts = mesh_->degrees.tp;
  if (spec.cut.axis == Cut::Axis::kExperts) slice.part = mesh_->place.ep, slice.parts = mesh_->degrees.ep;
  return slice;
}

ProcessGroup& ParameterTable::group(const Bucket& bucket) const {
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

bool ParameterTable::sharded_unit(UnitId unit) const { return unit_sizes_[unit] > 0; }

ParameterTable::Range ParameterTable::shard_range(ParamId id) const {
  const Bucket& home = bucket(id);
  const std::int64_t size = place(id).local.num_elements();
  const std::int64_t shard_begin = group(home).rank() * home.shard_size - place(id).offset;
  return {std::clamp<std::int64_t>(shard_begin, 0, size),
          std::clamp<std::int64_t>(shard_begin + home.shard_size, 0, size)};
}

}  // namespace tessera
