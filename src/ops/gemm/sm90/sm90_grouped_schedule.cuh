// Decides which block computes which tile of a grouped matrix product, from offsets that only the device knows. Every
// thread of a cluster of two blocks walks the same list of work, so nothing is communicated.
//
// A tile is 128 indices of operand a by 256 of operand b. The blocks of a cluster take neighbouring tiles, and a
// changes fastest. Therefore b is usually the same for both blocks and is loaded once. Within an expert, tiles go in
// bands of kBand along a. So tiles that are computed at the same time share both operands in the L2 cache.
#pragma once

#include <cstdint>

#include "ops/gemm/sm90/sm90_grouped_gemm.h"
#include "ops/gemm/sm90/sm90_ring.cuh"
#include "ops/kit/ptx.cuh"

namespace tessera::cuda::sm90 {

inline constexpr int kTileA = 128, kTileB = 256;
inline constexpr int kBand = 16;

__host__ __device__ constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }

/// The work that a block does next. It is one tile, or a part of a tile's sum over K.
struct Work {
  int expert = 0;
  int row_begin = 0, row_end = 0;  // the expert's rows
  int a = 0, b = 0;                // first indices of the tile
  int k_begin = 0, k_count = 0;    // in steps
  bool b_is_shared = false;        // The cluster's blocks have the same b.
  // If false, the block computes the tile only because its partner needs it in the cluster.
  bool store = true;
  bool is_last_part = true;  // The last part of a sum is written first.
  bool is_first_part = true;
};

/// Lets the parts of a sum be written one after the other, the last part first. `parts_done` has a number per share,
/// block of a cluster and warpgroup. It is 0 at the start. After a part is written, it is the part's expert plus 1.
class PartTurn {
 public:
  __device__ PartTurn(std::int32_t* parts_done, int share, int warpgroup)
      : done_(parts_done + (share * kCluster + ptx::cluster_cta_rank()) * kConsumers + warpgroup) {}

  /// Waits until the part after this one is written. It is of the block of the same rank in the next share, whose
  /// cluster was started earlier, so the wait ends. One thread executes it.
  __device__ void await(const Work& work) const {
    while (ptx::load_acquire_gpu(done_ + kCluster * kConsumers) <= work.expert) {
    }
  }
  /// Tells that this part is written. One thread executes it.
  __device__ void pass(const Work& work) const { ptx::store_release_gpu(done_, work.expert + 1); }

 private:
  std::int32_t* done_;
};

struct TilePosition {
  int a, b;
};

/// Returns the position of tile `local` among num_a · num_b tiles.
__device__ inline TilePosition tile_position(int local, int num_a, int num_b) {
  const int band = local / (kBand * num_b);
  const int in_band = local - band * kBand * num_b;
  const int width = min(kBand, num_a - band * kBand);
  const int b = in_band / width;
  return {band * kBand + in_band - b * width, b};
}

/// Holds what the schedules need to know of the groups, in shared memory.
struct Groups {
  int offsets[kSm90MaxExperts + 1];
  int first[kSm90MaxExperts + 1];  // prefix sums of `count` over the experts

  /// Makes one group of all rows. The whole block executes it. count(rows) returns its number of tiles or of steps.
  template <typename Count>
  __device__ void set_one(int num_rows, Count count) {
    if (threadIdx.x < 2) {
      offsets[threadIdx.x] = threadIdx.x * num_rows;
      first[threadIdx.x] = threadIdx.x * count(num_rows);
    }
    __syncthreads();
  }
  /// Loads the offsets. The whole block executes it. count(rows) returns an expert's number of tiles or of steps.
  template <typename Count>
  __device__ void load(const std::int32_t* offsets_E1, int num_experts, Count count) {
    constexpr int kPerLane = kSm90MaxExperts / 32;
    for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) offsets[e] = offsets_E1[e];
    __syncthreads();
    if (threadIdx.x < 32) {
      const int begin = threadIdx.x * kPerLane;
      int sum = 0;
      for (int e = begin; e < min(begin + kPerLane, num_experts); ++e) sum += count(offsets[e + 1] - offsets[e]);
      int before = sum;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, before, distance);
        if (threadIdx.x >= distance) before += other;
      }
      before -= sum;
      for (int e = begin; e < min(begin + kPerLane, num_experts); ++e) {
        first[e] = before;
        before += count(offsets[e + 1] - offsets[e]);
      }
      if (begin < num_experts && begin + kPerLane >= num_experts) first[num_experts] = before;
    }
    __syncthreads();
  }
};

/// Schedules the forward and dgrad. The tiles of all experts form one list, dealt out in turn, since each tile costs
/// the same.
template <bool kTransposed, int kStepK>
class RowSchedule {
 public:
  static constexpr int kTileRows = kTransposed ? kTileB : kTileA, kTileColumns = kTransposed ? kTileA : kTileB;

  __device__ RowSchedule(const Groups& groups, int num_experts, int columns, int k)
      : groups_(groups),
        num_tiles_(groups.first[num_experts]),
        column_tiles_(ceil_div(columns, kTileColumns)),
        k_count_(ceil_div(k, kStepK)),
        rank_(ptx::cluster_cta_rank()),
        pair_(ptx::cluster_idx()),
        num_clusters_(ptx::num_clusters()) {}

  __device__ static void load(Groups& groups, const std::int32_t* offsets_E1, int num_experts, int columns) {
    const int column_tiles = ceil_div(columns, kTileColumns);
    groups.load(offsets_E1, num_experts, [&](int rows) { return ceil_div(rows, kTileRows) * column_tiles; });
  }
  __device__ static void set_one(Groups& groups, int num_rows, int columns) {
    const int column_tiles = ceil_div(columns, kTileColumns);
    groups.set_one(num_rows, [&](int rows) { return ceil_div(rows, kTileRows) * column_tiles; });
  }

  __device__ bool next(Work& work) {
    if (2 * pair_ >= num_tiles_) return false;
    const int tile = 2 * pair_ + rank_;
    pair_ += num_clusters_;
    // If a tile has no partner, both blocks compute it, and one stores it.
    const int real = min(tile, num_tiles_ - 1);
    while (real >= groups_.first[expert_ + 1]) ++expert_;
    work.expert = expert_;
    work.row_begin = groups_.offsets[expert_];
    work.row_end = groups_.offsets[expert_ + 1];
    const int row_tiles = ceil_div(work.row_end - work.row_begin, kTileRows);
    const int num_a = kTransposed ? column_tiles_ : row_tiles, num_b = kTransposed ? row_tiles : column_tiles_;
    const int first = groups_.first[expert_], end = groups_.first[expert_ + 1];
    const TilePosition mine = tile_position(real - first, num_a, num_b);
    const int other = tile ^ 1;
    work.store = tile < num_tiles_;
    work.a = mine.a * kTileA;
    work.b = mine.b * kTileB;
    work.b_is_shared = !work.store || other >= num_tiles_ ||
                       (other >= first && other < end && tile_position(other - first, num_a, num_b).b == mine.b);
    (kTransposed ? work.b : work.a) += work.row_begin;
    work.k_begin = 0;
    work.k_count = k_count_;
    return true;
  }

 private:
  const Groups& groups_;
  const int num_tiles_, column_tiles_, k_count_, rank_;
  int pair_, num_clusters_, expert_ = 0;
};

/// Schedules wgrad. All tiles of an expert sum over its rows, so costs differ between experts. Pairs of tiles are dealt
/// out in turn, expert by expert. A pair may cost more than 1 / kFineness of what a cluster does in total. Then the
/// pairs that do not make up a full turn are cut along K, into an equal share for each cluster.
///
/// The parts of a sum are written one after the other, the last part first. A cluster begins with the end of one sum
/// and ends with the beginning of the next. Thus the part that it must wait for was usually done long ago.
template <int kStepK>
class WgradSchedule {
 public:
  static constexpr int kFineness = 32;
  static constexpr int kMinPart = 1024 / kStepK;  // steps

  __device__ WgradSchedule(const Groups& groups, int num_experts, int num_a, int num_b, bool assign)
      : groups_(groups),
        num_experts_(num_experts),
        tiles_{num_a, num_b, ceil_div(num_a * num_b, 2)},
        assign_(assign),
        rank_(ptx::cluster_cta_rank()),
        num_clusters_(ptx::num_clusters()),
        // Shares go to clusters in descending order, so a part waits only for clusters that were started earlier.
        share_(num_clusters_ - 1 - static_cast<int>(ptx::cluster_idx())) {
    start_expert();
  }

  __device__ static void load(Groups& groups, const std::int32_t* offsets_E1, int num_experts) {
    groups.load(offsets_E1, num_experts, [](int rows) { return ceil_div(rows, kStepK); });
  }
  __device__ static void set_one(Groups& groups, int num_rows) {
    groups.set_one(num_rows, [](int rows) { return ceil_div(rows, kStepK); });
  }

  /// Returns the share of this cluster. It tells which parts of sums the cluster writes, and which part it waits for.
  __device__ int share() const { return share_; }

  __device__ bool next(Work& work) {
    while (expert_ < num_experts_) {
      work.expert = expert_;
      work.row_begin = groups_.offsets[expert_];
      work.row_end = groups_.offsets[expert_ + 1];
      if (pair_ < whole_pairs_) {
        set_pair(work, pair_, 0, steps_);
        pair_ += num_clusters_;
        return true;
      }
      if (unit_ < unit_end_) {
        const int split_pair = unit_ / steps_, k_begin = unit_ - split_pair * steps_;
        const int k_end = min(steps_, k_begin + unit_end_ - unit_);
        set_pair(work, whole_pairs_ + split_pair, k_begin, k_end);
        unit_ += k_end - k_begin;
        return true;
      }
      ++expert_;
      start_expert();
    }
    return false;
  }

 private:
  /// The tiles of an expert's product, the same for all experts. Two neighbours are a pair; the last may lack one.
  struct Tiles {
    int num_a, num_b, num_pairs;
  };

  __device__ void start_expert() {
    if (expert_ >= num_experts_) return;
    const int rows = groups_.offsets[expert_ + 1] - groups_.offsets[expert_];
    steps_ = ceil_div(rows, kStepK);
    unit_ = unit_end_ = 0;
    whole_pairs_ = tiles_.num_pairs;
    if (rows <= 0) {
      if (assign_) {
        // All rows of this step are masked, so it yields zeros.
        steps_ = 1;
      } else {
        whole_pairs_ = 0;
      }
    }
    const std::int64_t all_steps = std::int64_t{groups_.first[num_experts_]} * tiles_.num_pairs;
    if (std::int64_t{steps_} * num_clusters_ * kFineness > all_steps && steps_ > kMinPart) {
      whole_pairs_ = tiles_.num_pairs / num_clusters_ * num_clusters_;
      const int units = (tiles_.num_pairs - whole_pairs_) * steps_;
      const int part = max(ceil_div(units, num_clusters_), kMinPart);
      unit_ = min(share_ * part, units);
      unit_end_ = min(unit_ + part, units);
      pair_ = share_;
    } else {
      pair_ = share_ - turn_ + (share_ < turn_ ? num_clusters_ : 0);
      turn_ = (turn_ + whole_pairs_) % num_clusters_;
    }
  }

  __device__ void set_pair(Work& work, int pair, int k_begin, int k_end) {
    const int num_tiles = tiles_.num_a * tiles_.num_b;
    const int tile = 2 * pair + rank_;
    work.store = tile < num_tiles;
    const TilePosition mine = tile_position(min(tile, num_tiles - 1), tiles_.num_a, tiles_.num_b);
    const TilePosition other = tile_position(min(tile ^ 1, num_tiles - 1), tiles_.num_a, tiles_.num_b);
    work.a = mine.a * kTileA;
    work.b = mine.b * kTileB;
    work.b_is_shared = mine.b == other.b;
    work.k_begin = k_begin;
    work.k_count = k_end - k_begin;
    work.is_first_part = k_begin == 0;
    work.is_last_part = k_end == steps_;
  }

  const Groups& groups_;
  const int num_experts_;
  const Tiles tiles_;
  const bool assign_;
  const int rank_, num_clusters_, share_;
  // turn_ is the share that gets the first pair of the next expert whose pairs are all whole.
  int expert_ = 0, turn_ = 0;
  // A pair of the current expert takes steps_ steps. pair_ is this share's next pair of the whole_pairs_ that are not
  // cut. The steps of those that are cut are units. They are numbered through all of these pairs, and this share still
  // has unit_ to unit_end_ - 1.
  int steps_ = 0, pair_ = 0, whole_pairs_ = 0, unit_ = 0, unit_end_ = 0;
};

}  // namespace tessera::cuda::sm90
