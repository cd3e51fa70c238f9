// The parameters of a model: their table (params/parameter_table.h) and their memory.
//
// A parameter has a float32 master weight, a float32 gradient and the optimizer's tensors. When computing in bfloat16,
// it also has a rounded copy that layers read, unless they read its quantized form only. Each of these is one flat
// buffer, with this rank's parts of the parameters one behind the other. For parameters that are not sharded, layers
// read and write these buffers. For others, they read and write the slots of their units (params/unit_slots.h).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "params/unit_slots.h"

namespace tessera {

class Parameters {
 public:
  /// Without a mesh all parameters are on one rank.
  explicit Parameters(std::shared_ptr<Mesh> mesh = nullptr, const StorageOptions& options = {});

  Mesh& mesh() const { return table_->mesh(); }

  /// Starts a new FSDP unit. Parameters that are added after this call are gathered and released together. The
  /// constructor starts the first unit.
  UnitId begin_unit() { return table_->begin_unit(); }
  /// Says that the last unit holds a matrix of the vocabulary, which may be far larger than the layers' units.
  void mark_vocabulary() { table_->mark_vocabulary(); }
  bool is_of_vocabulary(UnitId unit) const { return table_->is_of_vocabulary(unit); }
  UnitId unit(ParamId id) const { return table_->place(id).unit; }
  std::size_t num_units() const { return table_->num_units(); }
  /// Adds a parameter, whose name must be new. Must not be called after allocate().
  ParamId add(ParamSpec spec);
  /// Adds float32 numbers that are part of the model's state but are not trained (the experts' biases). They start at
  /// 0, and every rank holds all of them. Returns the buffer's id. Ids of buffers count from 0, apart from those of
  /// parameters, and only buffer() and buffer_spec() take them.
  ParamId add_buffer(std::string name, Shape shape) { return table_->add_buffer(std::move(name), shape); }

  std::size_t size() const { return table_->size(); }
  std::size_t num_buffers() const { return table_->num_buffers(); }
  const ParamSpec& spec(ParamId id) const { return table_->spec(id); }
  const ParamSpec& buffer_spec(ParamId id) const { return table_->buffer_spec(id); }
  const Shape& local_shape(ParamId id) const { return table_->place(id).local; }
  /// Returns which part of the parameter the local tensor is.
  Slice slice(ParamId id) const { return table_->slice(id); }

  /// Returns the bytes that allocate() takes.
  std::size_t num_bytes(DType compute) const;
  /// Allocates all buffers. `compute` is the type that layers read, float32 or bfloat16. With `cuda`, which must
  /// outlive this, they are on that GPU.
  void allocate(DType compute, cuda::Runtime* cuda = nullptr);
  /// Allocates only what layers read, for inference on one rank. There are no gradients and no optimizer state. There
  /// are masters only when computing in float32. `cuda` is as in allocate().
  void allocate_weights(DType compute, cuda::Runtime* cuda = nullptr);
  /// Sets the type that layers compute in. The tensors stay on Device::kMeta.
  void allocate_meta(DType compute);
  DType compute_dtype() const { return compute_; }

  /// Returns what layers read: the local tensor of the master weight, or of its bfloat16 copy. If the parameter is
  /// sharded, its unit must be acquired. Must not be called for parameters without a copy.
  Tensor weight(ParamId id) const;
  /// Says that layers read these parameters in quantized form only. None of them is sharded. When computing in
  /// bfloat16, they get no copy. Must be called before allocate().
  void leave_out_copies(std::span<const ParamId> ids);
  bool has_copy(ParamId id) const {
    return compute_ != DType::kBFloat16 || sharded(id) || !left_out_.contains(flat_range(id).begin);
  }
  /// Calls visit(range) for each range of the flat buffers without parameters that leave_out_copies() named.
  template <typename Visit>
  void for_each_range_of_others(Visit&& visit) const {
    left_out_.for_each_other(table_->flat_size(), visit);
  }
  /// Returns weight(id). Of a parameter without a copy, returns the rounded master in op's scratch memory.
  Tensor rounded_weight(const Context& op, ParamId id) const;
  /// Returns what layers add to: the local tensor of the gradient. If the parameter is sharded, its unit's gradients
  /// must be acquired.
  Tensor gradient(ParamId id) const;
  /// Starts the sums of a step. Gradients are then 0, except those of GEMMs' weights that are not sharded. These keep
  /// what they held until the first product assigns them.
  void clear_gradients();
  /// Returns how the next product writes to the gradient of a GEMM's weight. Must be called once per product.
  Write gradient_write(ParamId id) { return first_writes_.next(id); }
  Tensor buffer(ParamId id) const;

  /// Returns whether layers read and write the parameter in slots.
  bool sharded(ParamId id) const { return table_->sharded(id); }
  /// Returns the slot of the unit, which must be acquired. It is below num_slots().
  std::size_t slot(UnitId unit) const { return slots_.slot(unit); }
  std::size_t num_slots() const { return slots_.num_slots(); }
  /// Returns where each slot begins in memory that holds `sizes` for each unit, and last the memory's size.
  std::vector<std::int64_t> slot_begins(std::span<const std::int64_t> sizes) const { return slots_.slot_begins(sizes); }

  /// Starts to gather a unit's weights, if they are not there and a slot is free.
  void prefetch(UnitId unit) { slots_.prefetch(unit); }
  /// Gathers a unit's weights, if they are not there. Returns true if they were not there before the call (or before
  /// the prefetch).
  bool acquire(UnitId unit) { return slots_.acquire(unit); }
  void release(UnitId unit) { slots_.release(unit); }
  /// Gets a slot for a unit's gradients. It may hold what this step's micro-batches have added up so far. Otherwise the
  /// gradients are 0, except those of GEMMs' weights, which the first product assigns. Without products all are 0.
  void acquire_gradients(UnitId unit, bool with_products = true) {
    slots_.acquire_gradients(unit, with_products, first_writes_);
  }
  /// Starts to add the unit's gradients to the shards, unless they stay until finish_gradients().
  void release_gradients(UnitId unit) { slots_.release_gradients(unit, first_writes_); }
  /// Completes all sums, after the last micro-batch. The sums are then in the shards of all replicas.
  void finish_gradients();
  /// Discards gathered weights, after the masters have changed.
  void forget_gathered() { slots_.forget_gathered(); }

  // The next functions return this rank's numbers of a parameter: views of a range of the flattened local tensor.
  using Range = ParameterTable::Range;
  Range shard_range(ParamId id) const { return table_->shard_range(id); }
  /// Returns where these numbers lie in the flat buffers.
  Range flat_range(ParamId id) const;
  Tensor master_shard(ParamId id) const { return shard(all_masters(), id); }
  Tensor gradient_shard(ParamId id) const { return shard(all_gradients(), id); }
  Tensor optimizer_shard(std::size_t i, ParamId id) const { return shard(optimizer_tensor(i), id); }
  /// Returns the local tensor of a parameter that is not sharded.
  Tensor master(ParamId id) const;

  // The next two functions return this rank's numbers of all parameters at once, [total]. The gaps between parameters
  // are 0.
  Tensor all_gradients() const { return flat(gradients_, DType::kFloat32); }
  Tensor all_masters() const { return flat(masters_, DType::kFloat32); }
  /// Returns what the optimizer keeps, one tensor per entry of optimizer_tensors().
  const OptimizerTensors& optimizer_tensors() const { return optimizer_tensors_; }
  Tensor optimizer_tensor(std::size_t i) const { return flat(optimizer_state_[i], optimizer_tensors_[i].dtype); }
  /// Returns the bfloat16 copies of a range of the flat buffers, in which all parameters have one. Undefined when
  /// computing in float32.
  Tensor shadows(const Range& range) const;
  /// Returns all buffers as one tensor, in the order in which they were added.
  Tensor all_buffers() const;

  /// Draws the masters, each number by (seed, parameter's name, index), and rounds the copies.
  void initialise(std::uint64_t seed);
  /// Rounds the masters to the bfloat16 copies. Must be called after the masters were loaded.
  void refresh_shadows(const Context& op) const;
  /// Sets a parameter's numbers from `offset` of the flattened whole on, in the masters and in the copies. It sets
  /// those that this rank has.
  void set(ParamId id, std::int64_t offset, std::span<const float> numbers);
  /// Calls fill(target), which must set the numbers of one of this rank's tensors. `target` is the tensor itself, if
  /// that is on the host and in float32. Otherwise it is memory of the host that is then rounded and copied to the
  /// tensor.
  void fill(const Tensor& tensor, const std::function<void(float*)>& fill) const;
  /// Copies the numbers of one of this rank's tensors to a tensor of the same type and shape on the host.
  void read(const Tensor& from, const Tensor& to) const;
  /// Sets the numbers of one of this rank's tensors from bytes of its type.
  void assign(const Tensor& to, std::span<const std::byte> bytes) const;

 private:
  /// Returns a context for operators on the parameters. They need no scratch memory.
  Context context() const;
  void write(std::span<const float> numbers, const Tensor& tensor) const;
  Tensor flat(const Buffer& buffer, DType dtype) const;
  /// Returns this rank's numbers of a parameter from a flat buffer.
  Tensor shard(const Tensor& all, ParamId id) const;
  /// Returns the numbers that layers read. Of copies, those of parameters without one are left out.
  Tensor all_weights() const;

  std::unique_ptr<ParameterTable> table_;  // stays where it is when this is moved
  OptimizerTensors optimizer_tensors_;
  LeftOut left_out_;  // of leave_out_copies()
  DType compute_ = DType::kFloat32;
  Device device_ = Device::kMeta;
  cuda::Runtime* cuda_ = nullptr;
  std::unique_ptr<Arena> no_scratch_;
  Buffer masters_, gradients_, shadows_, buffers_;
  std::vector<Buffer> optimizer_state_;
  FirstWrites first_writes_;
  UnitSlots slots_;
};

}  // namespace tessera
