// The memory and the collectives of FSDP (arXiv 2304.11277). Slots hold the units' gathered weights and their summed
// gradients. acquire() gathers the weights of a unit whose buckets are sharded into a slot. release_gradients() adds
// the gradients that layers have summed in a slot to the shards of all ranks. Units share a few slots, unless
// their weights stay gathered until the end of the step.
#pragma once

#include <optional>
#include <vector>

#include "params/first_writes.h"
#include "params/left_out.h"
#include "params/optimizer_state.h"
#include "params/slot_layout.h"

namespace tessera {

/// Says what is kept for each parameter, and how the units of a model share memory.
struct StorageOptions {
  /// What the optimizer keeps for each number.
  OptimizerTensors optimizer = adamw_tensors();
  /// Keeps a unit's weights gathered until the step's end, in a slot of their own. Otherwise they may be freed when
  /// released ([parallelism] fsdp_reshard_after_forward).
  bool keep_gathered = false;
  /// Sums a unit's gradients over a step's micro-batches in a slot of their own. finish_gradients() adds them to the
  /// shards once. Otherwise they are added for every micro-batch.
  bool keep_gradients = false;
  /// The type in which ranks send their gradients to be summed: float32, or bfloat16, whose sums are float32, too.
  DType reduce = DType::kFloat32;
  /// How many units' weights and gradients are in slots at once, if they share slots: one that is computed and one that
  /// is on its way.
  SlotLayout::Counts weights_at_once = {.layers = 2, .vocabulary = 1, .together = 2};
  SlotLayout::Counts gradients_at_once = weights_at_once;
};

class UnitSlots {
 public:
  UnitSlots(const ParameterTable& table, const StorageOptions& options) : table_(&table), options_(options) {}

  std::size_t num_slots() const { return weight_layout().num_slots(); }
  /// Returns where each slot of weights begins in memory that holds `sizes` for each unit, indexed by unit, and last
  /// the memory's size.
  std::vector<std::int64_t> slot_begins(std::span<const std::int64_t> sizes) const {
    return weight_layout().begins(sizes);
  }
  /// Returns the bytes of all slots, if layers compute in this type.
  std::size_t num_bytes(DType compute) const;
  /// Allocates the slots. What `op` refers to must outlive this. `weights` [flat size, but for what is left out] has
  /// the type that layers compute in and is what is gathered. Sums are added to `gradients` [flat size], float32.
  void allocate(const Context& op, const Tensor& weights, const LeftOut& left_out, const Tensor& gradients);

  /// Makes slots without memory, for a dry run. Its gathers and sums are transfers of tensors without numbers.
  void allocate_meta(DType compute);

  /// Starts to gather a unit's weights, if they are not there and a slot is free.
  void prefetch(UnitId unit);
  /// Gathers a unit's weights, if they are not there. Returns true if they were not there before the call (or before
  /// the prefetch). Throws InternalError if no slot is free (StorageOptions::weights_at_once).
  bool acquire(UnitId unit);
  void release(UnitId unit);
  /// Discards gathered weights.
  void forget_gathered();
  /// Returns the slot of the unit, which must be acquired. It is below num_slots().
  std::size_t slot(UnitId unit) const;

  /// Gets a slot for a unit's gradients and starts sums there. With products, the first product assigns the gradients
  /// of GEMMs' weights. Without products all start at 0. Throws InternalError if no slot is free.
  void acquire_gradients(UnitId unit, bool with_products, FirstWrites& first_writes);
  /// Starts to add the unit's gradients to the shards, unless they stay until finish_gradients().
  void release_gradients(UnitId unit, const FirstWrites& first_writes);
  /// Completes all sums, after the last micro-batch.
  void finish_gradients(const FirstWrites& first_writes);
  /// Drops the sums of passes that no step follows.
  void clear_gradients();

  // The next two functions return the local tensors of a sharded parameter. Its unit, or its unit's gradients, must be
  // acquired. Before allocate() the tensors are on Device::kMeta.
  Tensor weight(ParamId id, DType compute) const;
  Tensor gradient(ParamId id) const;

 private:
  /// Holds a unit's gathered weights, or its gradients. `work` is the communication that fills or empties it.
  struct Slot {
    std::optional<UnitId> unit;
    int num_users = 0;           // passes that have acquired it
    bool fresh = false;          // it was gathered, and not acquired since
    std::uint64_t released = 0;  // value of num_released_ at this slot's last release; 0: never
    std::vector<Work> work;

    void wait();
    /// Waits for `work`, then frees the slot.
    void clear();
  };

  /// Holds slots and their memory.
  struct Slots {
    SlotLayout layout;
    std::vector<std::int64_t> begins;  // in numbers
    std::vector<Slot> all;
    Buffer memory;

    std::span<Slot> of(UnitId unit);
    std::size_t index(const Slot& slot) const { return static_cast<std::size_t>(&slot - all.data()); }
  };

  /// Returns which slots there are for weights and for gradients.
  SlotLayout weight_layout() const { return layout(options_.keep_gathered, options_.weights_at_once); }
  SlotLayout gradient_layout() const { return layout(options_.keep_gradients, options_.gradients_at_once); }
  /// Returns a slot for each unit if `per_unit`, else slots that units share. There are none if no unit is sharded.
  SlotLayout layout(bool per_unit, const SlotLayout::Counts& at_once) const;
  bool moves(UnitId unit) const { return !weight_slots_.all.empty() && table_->sharded_unit(unit); }
  void make_slots(Slots& slots, SlotLayout layout) const;
  Tensor in_slot(const Slots& slots, DType dtype, std::size_t slot, std::int64_t offset, Shape shape) const;
  Tensor local_in_slot(const Slots& slots, DType dtype, std::size_t slot, ParamId id) const;
  void start_gathering(UnitId unit, Slot& slot);
  void start_reducing(Slot& slot, const FirstWrites& first_writes);

  const ParameterTable* table_;
  StorageOptions options_;
  bool is_allocated_ = false;
  Context op_{};
  Tensor weights_, gradients_;
  LeftOut left_out_;  // of weights_
  Slots weight_slots_, gradient_slots_;
  std::uint64_t num_released_ = 0;
};

}  // namespace tessera
