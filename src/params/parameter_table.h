// The table of a model's parameters: names, shapes, initial numbers, and where each one lies. The layers' constructors
// write it once. Allocation, initialisation, sharding, the optimizer, checkpoints and tests read it.
//
// Tensor and expert parallelism cut a parameter along a dim (Cut). The part that a rank then holds is the local tensor.
// A unit is a block of the model. Parameters of a unit that are cut alike form a bucket. The flat buffers
// (params/parameters.h) hold this rank's 1/n of every bucket. n is the number of ranks that have the same local tensors
// (parallel/mesh.h).
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ops/elementwise/init.h"
#include "parallel/mesh.h"
#include "parallel/slice.h"

namespace tessera {

/// Says whether a parameter is the weight of a GEMM that a recipe may run in low precision.
enum class GemmKind : std::uint8_t {
  kNone,
  kLinear,   // y = x · wᵀ for all rows
  kGrouped,  // y = x · wᵀ, with an expert's own matrix for its rows
  kOutput,   // linear: the output projection, which recipes leave alone unless they are asked for it
};

/// Says how tensor or expert parallelism cuts a parameter.
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
  /// For w13, the distribution of the up rows, which are the second half of the last dim but one. `init` is then that
  /// of the gate rows.
  std::optional<Init> init_up = std::nullopt;
  GemmKind gemm = GemmKind::kNone;
  Cut cut = {};
};

using ParamId = std::size_t;
/// Identifies an FSDP unit: parameters that are gathered and released together.
using UnitId = std::size_t;

class ParameterTable {
 public:
  /// Describes parameters of one unit that are sharded in the same way. Sizes and offsets are in numbers.
  struct Bucket {
    UnitId unit;
    Cut::Axis axis;
    std::int64_t size = 0;         // of the local tensors
    std::int64_t shard_size = 0;   // this rank's part of them, a multiple of the alignment
    std::int64_t flat_offset = 0;  // of this part in the flat buffers
    std::int64_t slot_offset = 0;  // of the gathered bucket in its unit's slot
  };
  struct Placement {
    UnitId unit;
    std::size_t bucket;
    std::int64_t offset;  // in the gathered bucket
    Shape local;
  };
  struct Range {
    std::int64_t begin = 0, end = 0;
  };

  /// Without a mesh all parameters are on one rank.
  explicit ParameterTable(std::shared_ptr<Mesh> mesh);

  Mesh& mesh() const { return *mesh_; }

  /// Starts a new FSDP unit. Parameters that are added after this call are gathered and released together. The
  /// constructor starts the first unit.
  UnitId begin_unit() {
    unit_sizes_.push_back(0);
    return num_units() - 1;
  }
  std::size_t num_units() const { return unit_sizes_.size(); }
  /// Says that the last unit holds a matrix of the vocabulary, which may be far larger than the layers' units.
  void mark_vocabulary() { units_of_vocabulary_.insert(num_units() - 1); }
  bool is_of_vocabulary(UnitId unit) const { return units_of_vocabulary_.contains(unit); }
  /// Adds a parameter, whose name must be new.
  ParamId add(ParamSpec spec);
  /// Adds numbers that are part of the model's state but are not trained. Returns the buffer's id. Ids of buffers count
  /// from 0, apart from those of parameters, and only buffer_spec() and buffer_offset() take them.
  ParamId add_buffer(std::string name, Shape shape);

  std::size_t size() const { return specs_.size(); }
  std::size_t num_buffers() const { return buffer_specs_.size(); }
  const ParamSpec& spec(ParamId id) const { return specs_[id]; }
  const ParamSpec& buffer_spec(ParamId id) const { return buffer_specs_[id]; }
  std::int64_t buffer_offset(ParamId id) const { return buffer_offsets_[id]; }
  std::int64_t buffers_size() const { return buffers_size_; }
  const Placement& place(ParamId id) const { return places_[id]; }
  /// Returns which part of the parameter the local tensor is.
  Slice slice(ParamId id) const;

  const std::vector<Bucket>& buckets() const { return buckets_; }
  const Bucket& bucket(ParamId id) const { return buckets_[places_[id].bucket]; }
  /// Returns the ranks that the bucket is sharded over.
  ProcessGroup& group(const Bucket& bucket) const;
  bool sharded(const Bucket& bucket) const { return group(bucket).size() > 1; }
  bool sharded(ParamId id) const { return sharded(bucket(id)); }
  bool sharded_unit(UnitId unit) const;
  /// Returns the size of a flat buffer, in numbers. unit_sizes() returns those of the units' gathered buckets, indexed
  /// by unit.
  std::int64_t flat_size() const { return flat_size_; }
  const std::vector<std::int64_t>& unit_sizes() const { return unit_sizes_; }

  /// Returns which numbers of the flattened local tensor are this rank's.
  Range shard_range(ParamId id) const;
  /// Calls visit(index in the flat buffers, index in the flattened whole, count) for this rank's numbers of a
  /// parameter.
  template <typename Visit>
  void for_each_run(ParamId id, Visit&& visit) const {
    const Range range = shard_range(id);
    const std::int64_t flat_of_local =
        bucket(id).flat_offset + place(id).offset - group(bucket(id)).rank() * bucket(id).shard_size;
    slice(id).for_each_run(range.begin, range.end, [&](std::int64_t local, std::int64_t global, std::int64_t count) {
      visit(flat_of_local + local, global, count);
    });
  }

 private:
  std::vector<Bucket>::iterator first_bucket_of_last_unit();
  /// Computes where the buckets of the last unit lie from their sizes. Those before are complete.
  void lay_out_last_unit();

  std::shared_ptr<Mesh> mesh_;
  std::vector<ParamSpec> specs_, buffer_specs_;
  std::set<std::string> names_;
  std::vector<Placement> places_;
  std::vector<Bucket> buckets_;
  std::vector<std::int64_t> unit_sizes_ = {0};
  std::set<UnitId> units_of_vocabulary_;
  std::int64_t flat_size_ = 0;
  std::vector<std::int64_t> buffer_offsets_;
  std::int64_t buffers_size_ = 0;
};

/// Parameters and shards start at multiples of this many numbers. So both the float32 and the bfloat16 views are
/// aligned.
inline constexpr std::int64_t kAlignmentInNumbers = kAlignment / sizeof(BFloat16);
/// Returns `count` rounded up to such a multiple.
constexpr std::int64_t aligned_count(std::int64_t count) {
  return (count + kAlignmentInNumbers - 1) / kAlignmentInNumbers * kAlignmentInNumbers;
}

}  // namespace tessera
