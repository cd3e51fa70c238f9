// The field table: what parameters a model has, written once. It drives allocation, initialisation, sharding, the
// optimizer, checkpoints and tests.
//
// Per parameter there are a float32 master weight, a float32 gradient and AdamW's two moments (float32 or bfloat16),
// and, when computing in bfloat16, a rounded copy that the layers read. Each of the five is one flat buffer with the
// parameters one behind the other.
//
// Sharding (FSDP, arXiv 2304.11277). Tensor and expert parallelism cut a parameter along a dim (Cut); what a rank holds
// then is the local tensor. Parameters of a unit (a block of the model) that are cut alike are a bucket, and the flat
// buffers hold this rank's 1/n of every bucket, n being the ranks that have the same local tensors (parallel/mesh.h).
// Where n is 1 layers read and write the flat buffers. Else acquire() gathers a unit's weights into a slot, and
// release_gradients() adds the gradients that layers have summed in a slot to the shards of all. There are fewer slots
// than units, if a unit is to be gathered again for the backward.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/elementwise/init.h"
#include "ops/runtime/context.h"
#include "parallel/mesh.h"
#include "parallel/slice.h"

namespace tessera {

/// Whether a parameter is the weight of a GEMM that a recipe may run in low precision: y = x · wᵀ for all rows, or with
/// an expert's own matrix for its rows.
enum class GemmKind : std::uint8_t { kNone, kLinear, kGrouped };

/// How tensor or expert parallelism cuts a parameter.
struct Cut {
  enum class Axis : std::uint8_t { kNone, kTensor, kExperts };
  Axis axis = Axis::kNone;
  int dim = 0;
  std::int64_t blocks = 1;  // as in Slice
};

struct ParamSpec {
  std::string name;
  Shape shape;  // of the whole parameter
  Init init;
  /// For w13: the distribution of the up rows, the second half of the last dim but one. `init` is then that of the gate
  /// rows.
  std::optional<Init> init_up = std::nullopt;
  GemmKind gemm = GemmKind::kNone;
  Cut cut = {};
};

using ParamId = std::size_t;
/// An FSDP unit: parameters that are gathered and released together.
using UnitId = std::size_t;

/// What is kept for each parameter, and how the units of a model share memory.
struct StorageOptions {
  /// Type of AdamW's moments: float32 or bfloat16 ([optimizer] state_dtype).
  DType moments = DType::kFloat32;
  /// Keeps a unit's weights gathered until the step's end, in a slot of their own. Otherwise they may be freed when
  /// released ([parallelism] fsdp_reshard_after_forward).
  bool keep_gathered = false;
  /// Sums a unit's gradients over a step's micro-batches in a slot of their own; finish_gradients() adds them to the
  /// shards once. Otherwise they are added for every micro-batch.
  bool keep_gradients = false;
  /// The number of slots for weights, and for gradients, that units share.
  std::size_t num_slots = 2;
};

class Parameters {
 public:
  /// Without a mesh all parameters are on one rank.
  explicit Parameters(std::shared_ptr<Mesh> mesh = nullptr, const StorageOptions& options = {});

  Mesh& mesh() const { return *mesh_; }

  /// Starts a new FSDP unit: parameters added after this call are gathered and released together. The constructor
  /// starts the first one.
  UnitId begin_unit();
  UnitId unit(ParamId id) const { return places_[id].unit; }
  std::size_t num_units() const { return num_units_; }
  /// Adds a parameter, whose name must be new. Must not be called after allocate().
  ParamId add(ParamSpec spec);
  /// Adds float32 numbers that are part of the model's state but are not trained (the experts' biases). They start at
  /// 0, and every rank holds all of them.
  ParamId add_buffer(std::string name, Shape shape);

  std::size_t size() const { return specs_.size(); }
  std::size_t num_buffers() const { return buffer_specs_.size(); }
  const ParamSpec& spec(ParamId id) const { return specs_[id]; }
  const ParamSpec& buffer_spec(ParamId id) const { return buffer_specs_[id]; }
  const Shape& local_shape(ParamId id) const { return places_[id].local; }
  /// Returns which part of the parameter the local tensor is.
  Slice slice(ParamId id) const;

  /// Bytes that allocate() takes.
  std::size_t num_bytes(DType compute) const;
  /// Allocates all buffers. `compute`: the type that layers read, float32 or bfloat16. With `cuda`, which must outlive
  /// this, on that GPU.
  void allocate(DType compute, cuda::Runtime* cuda = nullptr);
  /// Allocates only what layers read, for inference on one rank: no gradients, no moments, and masters only when
  /// computing in float32.
  void allocate_weights(DType compute);
  /// Sets the type that layers compute in. The tensors stay on Device::kMeta.
  void allocate_meta(DType compute);
  DType compute_dtype() const { return compute_; }

  /// Returns what layers read: the local tensor of the master weight, or of its bfloat16 copy. If the parameter is
  /// sharded, its unit must be acquired.
  Tensor weight(ParamId id) const;
  /// Returns what layers add to: the local tensor of the gradient. If the parameter is sharded, its unit's gradients
  /// must be acquired.
  Tensor gradient(ParamId id) const;
  /// Starts the sums of a step. Gradients are then 0, except those of GEMMs' weights that are not sharded: these keep
  /// what they held, until the first product assigns them.
  void clear_gradients();
  /// Returns how the next product enters the gradient of a GEMM's weight. Must be called once per product.
  Write gradient_write(ParamId id);
  Tensor buffer(ParamId id) const;

  /// True if layers read and write the parameter in slots.
  bool sharded(ParamId id) const;
  /// Returns the slot of the unit, which must be acquired; below num_slots().
  std::size_t slot(UnitId unit) const;
  std::size_t num_slots() const { return slots_.size(); }

  /// Starts to gather a unit's weights, if they are not there and a slot is free.
  void prefetch(UnitId unit);
  /// Gathers a unit's weights, if they are not there. Returns true if they were not there before the call (or before
  /// the prefetch).
  bool acquire(UnitId unit);
  void release(UnitId unit);
  /// Gets a slot for a unit's gradients. They are 0, except those of GEMMs' weights, which the first product assigns
  /// (without products all are 0); or they are what this step's micro-batches have added up so far.
  void acquire_gradients(UnitId unit, bool with_products = true);
  /// Starts to add the unit's gradients to the shards, unless they stay until finish_gradients().
  void release_gradients(UnitId unit);
  /// Completes all sums, after the last micro-batch. Then they are in the shards of all replicas.
  void finish_gradients();
  /// Discards gathered weights, after the masters have changed.
  void forget_gathered();

  // This rank's numbers of a parameter: views of a range of the flattened local tensor.
  struct Range {
    std::int64_t begin = 0, end = 0;
  };
  Range shard_range(ParamId id) const;
  Tensor master_shard(ParamId id) const { return shard(all_masters(), id); }
  Tensor gradient_shard(ParamId id) const { return shard(all_gradients(), id); }
  Tensor first_moment_shard(ParamId id) const { return shard(all_first_moments(), id); }
  Tensor second_moment_shard(ParamId id) const { return shard(all_second_moments(), id); }
  /// Returns the local tensor of a parameter that is not sharded.
  Tensor master(ParamId id) const;

  /// This rank's numbers of all parameters at once, [total]. The gaps between parameters are 0.
  Tensor all_gradients() const { return flat(gradients_, DType::kFloat32); }
  Tensor all_masters() const { return flat(masters_, DType::kFloat32); }
  Tensor all_first_moments() const { return flat(first_moments_, options_.moments); }
  Tensor all_second_moments() const { return flat(second_moments_, options_.moments); }
  /// Returns the bfloat16 copies. Undefined when computing in float32.
  Tensor all_shadows() const;
  /// Returns all buffers as one tensor, in the order in which they were added.
  Tensor all_buffers() const;

  /// Draws the masters, each number by (seed, parameter's name, index), and rounds the copies.
  void initialise(std::uint64_t seed);
  /// Rounds the masters to the bfloat16 copies, after the masters were loaded.
  void refresh_shadows();
  /// Sets a parameter's numbers from `offset` of the flattened whole on, in the masters and in the copies, as far as
  /// this rank has them.
  void set(ParamId id, std::int64_t offset, std::span<const float> numbers);
  /// Calls fill(target), which must set the numbers of one of this rank's tensors. `target` is the tensor itself, or,
  /// if that is on a GPU or in bfloat16, memory of the host that is then copied there and rounded.
  void fill(const Tensor& tensor, const std::function<void(float*)>& fill) const;
  /// Copies the numbers of such a tensor to one of the same type and shape on the host.
  void read(const Tensor& from, const Tensor& to) const;
  /// Sets the numbers of such a tensor to those that the bytes, of its type, are.
  void assign(const Tensor& to, std::span<const std::byte> bytes) const;

 private:
  /// Parameters of one unit that are sharded in the same way.
  struct Bucket {
    UnitId unit;
    Cut::Axis axis;
    std::int64_t size = 0;         // numbers of the local tensors
    std::int64_t shard_size = 0;   // this rank's, a multiple of the alignment
    std::int64_t flat_offset = 0;  // of these in the flat buffers
    std::int64_t slot_offset = 0;  // of the gathered bucket in its unit's slot
  };
  struct Place {
    UnitId unit;
    std::size_t bucket;
    std::int64_t offset;  // in the gathered bucket
    Shape local;
  };
  /// Memory for a unit's gathered weights, or for its gradients. `work` is under way from or to it.
  struct Slot {
    std::optional<UnitId> unit;
    bool in_use = false, fresh = false;
    std::vector<Work> work;

    void wait();
    /// Waits for `work`, then frees the slot.
    void clear();
  };

  /// Returns a context for operators on the parameters. They need no scratch memory.
  Context context() const;
  void write(std::span<const float> numbers, const Tensor& tensor) const;
  ProcessGroup& group(const Bucket& bucket) const;
  bool sharded(const Bucket& bucket) const { return group(bucket).size() > 1; }
  bool sharded_unit(UnitId unit) const;
  /// Computes where buckets lie from their sizes.
  void lay_out();
  std::size_t num_weight_slots() const { return options_.keep_gathered ? num_units_ : options_.num_slots; }
  Tensor flat(const Buffer& buffer, DType dtype) const;
  /// Returns this rank's numbers of a parameter from a flat buffer.
  Tensor shard(const Tensor& all, ParamId id) const;
  Tensor in_slot(const Buffer& buffer, DType dtype, std::size_t slot, std::int64_t offset, Shape shape) const;
  void start_gathering(UnitId unit, std::size_t slot);
  void start_reducing(Slot& slot);
  /// Returns whether the next product assigns the parameter's gradient, in the unit's slot or, without a unit, in the
  /// flat buffer.
  bool is_assigned_in(std::optional<UnitId> unit, ParamId id) const;
  /// Sets sums there to 0, and marks those that the next product assigns.
  void start_sums(const Tensor& sums, std::optional<UnitId> unit);
  /// Throws InternalError if a gradient there has not been assigned.
  void require_assigned(std::optional<UnitId> unit) const;
  /// Calls visit(index in the flat buffers, index in the flattened whole, count) for this rank's numbers of a
  /// parameter.
  template <typename Visit>
  void for_each_run(ParamId id, Visit&& visit) const;

  std::shared_ptr<Mesh> mesh_;
  StorageOptions options_;
  std::vector<ParamSpec> specs_, buffer_specs_;
  std::vector<Place> places_;
  std::vector<Bucket> buckets_;
  std::size_t num_units_ = 1;
  std::int64_t total_ = 0, slot_size_ = 0;  // in numbers
  std::vector<std::int64_t> buffer_offsets_;
  std::int64_t buffer_total_ = 0;
  DType compute_ = DType::kFloat32;
  Device device_ = Device::kMeta;
  cuda::Runtime* cuda_ = nullptr;
  mutable Arena no_scratch_{0};
  Buffer masters_, gradients_, first_moments_, second_moments_, shadows_, buffers_;
  Buffer gathered_, summed_;
  std::vector<Slot> slots_, gradient_slots_;
  std::vector<bool> to_assign_;  // by id: no product of this step has entered the gradient yet
};

}  // namespace tessera
