// Kernels that write matrices plain, quantized along rows and quantized along columns in one pass over their inputs.
// This is the CUDA side of ops/kit/gemm_operand.h. The bytes are those of mx/block.h.
//
// A block of threads has a tile of kSide × kSide numbers. The tile holds all numbers that share a scale. Blocks of 256
// numbers lie in two tiles, or in four if they are squares. The thread blocks of these tiles form a cluster. Two tiles
// side by side may also belong to one thread block, which is faster. The steps are:
//   1. Compute: the Producer's numbers, rounded to T, go to `plain` and to shared memory. They are 0 beyond the matrix.
//   2. Maxima: for each output, a team of kTeamThreads finds the largest magnitudes of 32 numbers along rows and along
//      columns. Each thread has a patch of 8 × 8. If a block of numbers spans several tiles, the threads of these
//      tiles exchange their maxima.
//   3. Scales: each thread finds the scales of one line of the tile.
//   4. Cast: the patches are multiplied by the scales' inverses and become bytes. These pass through shared memory, so
//      that whole lines of 128 bytes are written. Smaller pieces would cost as much each as whole lines.
//
// A Producer defines how numbers are computed (T: float or __nv_bfloat16; kCount: numbers of a row at a time):
//   using Number = T;
//   static constexpr int kInFlight;              // rows whose inputs a thread has in flight
//   static constexpr int kBlocksPerSm;           // upper limit, which leaves each thread enough registers
//   template <int kCount> struct Input;          // the inputs of kCount numbers
//   load<kCount>(matrix, row, column) -> Input<kCount>
//   compute(input, columns, Lanes<T, kCount> (&out)[kOutputs], float& sum)
// It may have
//   static constexpr int kOutputs;               // matrices of one shape; 1 without it
//   static constexpr int kTeams;                 // per block: they compute together, and quantize one output each
//   static constexpr bool kSums;                 // whether compute() adds to sums over rows
//   template <int kCount> struct Columns;        // what is read once for all rows
//   columns<kCount>(column) -> Columns<kCount>
// Plain outputs may overwrite inputs, because a thread reads its inputs before it writes there. A Producer may also
// have
//   using Wide = void;
// Then memory receives the wide form (ops/kit/gemm_operand.h), with bfloat16 in place of the elements and without
// scales.
#pragma once

#include <cuda_fp8.h>

#include "ops/gemm/sm90/sm90_widen.cuh"
#include "ops/kit/gemm_operand.h"
#include "ops/kit/launch.cuh"

namespace tessera::cuda {

inline constexpr int kSide = 128;
inline constexpr int kTeamThreads = 256;
inline constexpr int kPatch = 8;                       // numbers of a patch along rows and along columns
inline constexpr int kThreadsAcross = kSide / kPatch;  // threads that compute one row, kPatch numbers each
inline constexpr int kBlocksPerLine = kSide / mx::kBlock;

// The properties of a Producer. Most have one output, one team, no sums and no columns, and leave these out.
template <typename Producer>
inline constexpr int kOutputsOf = 1;
template <typename Producer>
requires requires { Producer::kOutputs; }
inline constexpr int kOutputsOf<Producer> = Producer::kOutputs;

template <typename Producer>
inline constexpr int kTeamsOf = 1;
template <typename Producer>
requires requires { Producer::kTeams; }
inline constexpr int kTeamsOf<Producer> = Producer::kTeams;

template <typename Producer>
inline constexpr bool kHasSums = false;
template <typename Producer>
requires requires { Producer::kSums; }
inline constexpr bool kHasSums<Producer> = Producer::kSums;

template <typename Producer, int kCount>
struct ColumnsOf {
  using Type = int;
  __device__ static Type load(const Producer&, std::int64_t) { return 0; }
};
template <typename Producer, int kCount>
requires requires { typename Producer::template Columns<kCount>; }
struct ColumnsOf<Producer, kCount> {
  using Type = typename Producer::template Columns<kCount>;
  __device__ static Type load(const Producer& producer, std::int64_t column) {
    return producer.template columns<kCount>(column);
  }
};

/// Holds one orientation of an output as kernels see it. Without elements it is not written. Strides lead from line to
/// line.
struct TileOutput {
  std::uint8_t* elements = nullptr;
  void* scales = nullptr;
  std::int64_t stride = 0, scales_stride = 0;
  std::int64_t matrix_elements = 0, matrix_scales = 0;  // strides from matrix to matrix of a stack
  // Lines start at multiples of 16 elements (aligned) and of 4 scales (scales_aligned).
  bool aligned = false, scales_aligned = false;
  mx::Format format;
};

/// Holds a matrix in up to three output forms.
template <typename T>
struct TileOutputs {
  T* plain = nullptr;
  std::int64_t plain_stride = 0;
  TileOutput rows, columns;
};

template <typename Producer>
struct TileArgs {
  using T = typename Producer::Number;
  Producer producer;
  TileOutputs<T> outputs[kOutputsOf<Producer>];
  std::int64_t num_matrices = 1, num_rows = 0, length = 0;
  // The number of rows to compute. If it is null, all are computed.
  const std::int32_t* num_rows_1 = nullptr;
  // [tiles of a row, num_rows]: each row's sum over one tile. If it is null, no sums are written.
  float* sums = nullptr;
  dim3 cluster = {1, 1, 1};  // the tiles along rows, and along columns, whose numbers may share scales
};

/// Returns two numbers as two bytes, the first in the lower one. They are rounded to nearest even and saturated. NaN
/// becomes 0x7F.
__device__ inline std::uint32_t e4m3_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

__device__ inline uint2 e4m3_bytes(const float (&x)[kPatch]) {
  return {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
}

/// Holds the place of a tile in its matrix. `rows` and `columns` count what the matrix has from there on. They are
/// 2 · kSide if there are more.
struct TilePlace {
  std::int64_t matrix, first_row, first_column;
  int rows, columns;

  __device__ TilePlace(std::int64_t of_matrix, std::int64_t row, std::int64_t column, std::int64_t num_rows,
                       std::int64_t num_columns)
      : matrix(of_matrix),
        first_row(row),
        first_column(column),
        rows(static_cast<int>(min(num_rows - row, std::int64_t{2 * kSide}))),
        columns(static_cast<int>(min(num_columns - column, std::int64_t{2 * kSide}))) {}
  __device__ bool whole() const { return rows >= kSide && columns >= kSide; }
};

/// Holds 8 × 8 neighbouring numbers of a tile. A word is one float32 or two bfloat16, the first in the lower half.
template <typename T>
struct Patch {
  static constexpr int kPerWord = 4 / sizeof(T), kWords = kPatch / kPerWord;
  static constexpr std::uint32_t kMagnitude = kPerWord == 2 ? 0x7fff7fffu : 0x7fffffffu;
  std::uint32_t words[kPatch][kWords];

  __device__ void load(const T* tile) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kWords; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(tile + i * kSide + j * kPerWord);
        words[i][j] = four.x, words[i][j + 1] = four.y, words[i][j + 2] = four.z, words[i][j + 3] = four.w;
      }
    }
  }
  /// Returns number `index` of a line that is packed like a row. For a line of magnitudes, it has their bits.
  __device__ static float number(const std::uint32_t (&line)[kWords], int index) {
    if constexpr (kPerWord == 1) {
      return __uint_as_float(line[index]);
    } else {
      return __uint_as_float(index % 2 == 0 ? line[index / 2] << 16 : line[index / 2] & 0xffff0000u);
    }
  }
  __device__ uint2 row_bytes(int i, float factor) const {
    float x[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) x[j] = number(words[i], j) * factor;
    return e4m3_bytes(x);
  }
  __device__ uint2 column_bytes(int j, float factor) const {
    float x[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) x[i] = number(words[i], j) * factor;
    return e4m3_bytes(x);
  }
  __device__ static std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
    return kPerWord == 1 ? max(a, b) : __vmaxu2(a, b);
  }

  /// Computes the largest magnitude of each row and of each column. Both are packed like a row. Magnitudes compare as
  /// integers, with NaN above infinity.
  __device__ void amax(std::uint32_t (&of_rows)[kWords], std::uint32_t (&of_columns)[kWords]) const {
    std::uint32_t of_row[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const std::uint32_t magnitudes = words[i][j] & kMagnitude;
        of_row[i] = j == 0 ? magnitudes : larger(of_row[i], magnitudes);
        of_columns[j] = i == 0 ? magnitudes : larger(of_columns[j], magnitudes);
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      if constexpr (kPerWord == 1) {
        of_rows[j] = of_row[j];
      } else {
        of_rows[j] = __vmaxu2(__byte_perm(of_row[2 * j], of_row[2 * j + 1], 0x5410),
                              __byte_perm(of_row[2 * j], of_row[2 * j + 1], 0x7632));
      }
    }
  }
};

/// Describes the threads that quantize a tile together. A block has kTeams such teams.
template <int kTeams>
struct Team {
  __device__ static int index() { return kTeams == 1 ? 0 : threadIdx.x / kTeamThreads; }
  __device__ static unsigned thread() { return kTeams == 1 ? threadIdx.x : threadIdx.x % kTeamThreads; }
  __device__ static void sync() {
    if constexpr (kTeams == 1) {
      __syncthreads();
    } else {
      __barrier_sync_count(1 + index(), kTeamThreads);
    }
  }
};

/// Holds a value for each orientation (rows, columns), block of 32 along the line, and line. It is first the largest
/// magnitude of the block. Later it is the factor that multiplies the block's numbers. Both are stored as the bits of a
/// float32.
struct TileScales {
  std::uint32_t bits[2][kBlocksPerLine][kSide];
  std::uint32_t of_warp[kTeamThreads / kWarp];
  // What the other thread blocks of the cluster sent, for each orientation: the largest magnitude of each line, or of
  // each tile. Where a thread block has two tiles, each half writes its own rows' magnitudes here.
  std::uint32_t of_others[2][kSide];
  ptx::Barrier received[2];
};

/// Finds, for each of the 8 numbers of `amax`, the largest one of the lanes whose indices differ only in the bits
/// kFirst and 2 · kFirst. The lane with both bits 0 writes the 8 results to `slots`, as bits of float32.
template <typename T, int kFirst>
__device__ void put_amax(std::uint32_t (&amax)[Patch<T>::kWords], int lane, std::uint32_t* slots) {
#pragma unroll
  for (int j = 0; j < Patch<T>::kWords; ++j) {
    amax[j] = Patch<T>::larger(amax[j], __shfl_xor_sync(~0u, amax[j], kFirst));
    amax[j] = Patch<T>::larger(amax[j], __shfl_xor_sync(~0u, amax[j], 2 * kFirst));
  }
  if ((lane & 3 * kFirst) != 0) return;
  std::uint32_t bits[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) bits[i] = __float_as_uint(Patch<T>::number(amax, i));
  *reinterpret_cast<uint4*>(slots) = {bits[0], bits[1], bits[2], bits[3]};
  *reinterpret_cast<uint4*>(slots + 4) = {bits[4], bits[5], bits[6], bits[7]};
}

/// Returns whether all numbers of a tile share a scale in this orientation.
__device__ inline bool is_wide_square(const TileOutput& out) {
  return out.elements != nullptr && out.format.along >= mx::kWideBlock && out.format.across > 1;
}

/// Says where the tiles are whose numbers share scales with this one's.
struct TileNeighbours {
  dim3 cluster = {1, 1, 1};          // in this cluster
  TileScales* other_half = nullptr;  // or in the other half of this thread block
};

/// Holds what a thread block must know of its cluster, for one orientation of a tile.
struct TileCluster {
  std::uint32_t rank, beside;   // this block's rank, and the bit in which the next one along a line differs
  bool has_beside, has_across;  // whether the matrix has a tile there: along a line, and across the lines

  __device__ TileCluster(const TilePlace& place, dim3 cluster, bool along_columns)
      : rank(ptx::cluster_cta_rank()), beside(along_columns ? cluster.x : 1) {
    const bool in_row = blockIdx.x % 2 == 1 || place.columns > kSide;
    const bool in_column = blockIdx.y % 2 == 1 || place.rows > kSide;
    has_beside = along_columns ? in_column : in_row;
    has_across = along_columns ? in_row : in_column;
  }
};

/// Returns the largest magnitude of a row that continues in the tile of the other half. The threads of all rows of both
/// halves execute it, once.
__device__ inline std::uint32_t largest_of_halves(int row, std::uint32_t largest, TileScales& mine,
                                                  const TileScales& other) {
  constexpr int kBarrier = 3;  // after those of two teams
  mine.of_others[0][row] = largest;
  ptx::named_barrier_sync(kBarrier, 2 * kSide);
  return max(largest, other.of_others[0][row]);
}

// The next two functions send a largest magnitude to other thread blocks, and return the larger of it and of theirs.
// The threads of all lines of an orientation execute them. A team may do so once for each orientation.

/// Does it for a line that continues in the tile beside this one.
__device__ inline std::uint32_t largest_of_two(const TileCluster& cluster, int line, std::uint32_t largest,
                                               std::uint32_t* of_others, ptx::Barrier* received) {
  if (!cluster.has_beside) return largest;
  if (line == 0) ptx::mbarrier_arrive_expect_tx(received, kSide * sizeof(std::uint32_t));
  ptx::store_async_cluster(&of_others[line], largest, received, cluster.rank ^ cluster.beside);
  ptx::mbarrier_wait_cluster(received, 0);
  return max(largest, of_others[line]);
}

/// Does it for a tile of a square of four.
__device__ inline std::uint32_t largest_of_four(const TileCluster& cluster, int line, std::uint32_t largest,
                                                std::uint32_t* of_others, ptx::Barrier* received) {
  // Ranks of the other tiles differ in one bit for each direction.
  const bool exists[] = {true, cluster.has_beside, cluster.has_across, cluster.has_beside && cluster.has_across};
  const std::uint32_t across = cluster.beside ^ 3;
  const std::uint32_t bits[] = {0, cluster.beside, across, 3};
  if (line == 0) {
    const int count = exists[1] + exists[2] + exists[3];
    ptx::mbarrier_arrive_expect_tx(received, count * sizeof(std::uint32_t));
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      if (exists[i]) ptx::store_async_cluster(&of_others[i], largest, received, cluster.rank ^ bits[i]);
    }
  }
  ptx::mbarrier_wait_cluster(received, 0);
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (exists[i]) largest = max(largest, of_others[i]);
  }
  return largest;
}

/// Raises the amax of one line of a tile to that of all numbers that share a scale. All threads of the team call it
/// together. `along_columns` tells of which orientation the line is.
template <typename Team, typename T>
__device__ void widen_amax(const TileOutputs<T>& out, bool along_columns, int line, const TilePlace& place,
                           const TileNeighbours& neighbours, std::uint32_t (&amax)[kBlocksPerLine],
                           TileScales& scales) {
  const TileOutput& to = along_columns ? out.columns : out.rows;
  const mx::Format& format = to.format;
  std::uint32_t largest = max(max(amax[0], amax[1]), max(amax[2], amax[3]));
  if (is_wide_square(out.rows) || is_wide_square(out.columns)) {
    // Warps 0 to 3 have the lines of rows, and warps 4 to 7 those of columns.
    const int warp = Team::thread() / kWarp, first = warp / 4 * 4;
    const std::uint32_t of_warp = __reduce_max_sync(~0u, largest);
    if (Team::thread() % kWarp == 0) scales.of_warp[warp] = of_warp;
    Team::sync();
    if (format.across > 1) {
      largest = max(max(scales.of_warp[first], scales.of_warp[first + 1]),
                    max(scales.of_warp[first + 2], scales.of_warp[first + 3]));
    }
  }
  if (format.along >= mx::kWideBlock) {
    if (format.along == mx::kWidestBlock && neighbours.other_half != nullptr) {
      largest = largest_of_halves(line, largest, scales, *neighbours.other_half);
    } else if (format.along == mx::kWidestBlock && to.elements != nullptr &&
               neighbours.cluster.x * neighbours.cluster.y > 1) {
      const TileCluster others(place, neighbours.cluster, along_columns);
      std::uint32_t* of_others = scales.of_others[along_columns];
      ptx::Barrier* received = &scales.received[along_columns];
      largest = format.across > 1 ? largest_of_four(others, line, largest, of_others, received)
                                  : largest_of_two(others, line, largest, of_others, received);
    }
    for (std::uint32_t& each : amax) each = largest;
  } else if (format.across > 1) {
    // A warp has the 32 lines of each square.
    for (std::uint32_t& each : amax) each = __reduce_max_sync(~0u, each);
  }
}

/// Holds a block's scale, as a byte or as the bits of a float32, and the bits of its inverse.
struct TileScale {
  std::uint32_t bits, inverse;

  __device__ TileScale(const mx::Format& format, std::uint32_t amax) {
    constexpr std::uint32_t kNaN = 0x7fc00000u;
    const bool finite = amax < mx::kFloatInfinity;
    const float largest = mx::float_of(amax);
    if (format.scale_type == mx::ScaleType::kFloat32) {
      bits = finite ? mx::bits_of(mx::float_scale(largest)) : kNaN;
      inverse = finite ? mx::bits_of(mx::inverse_float_scale(largest)) : kNaN;
    } else {
      bits = finite ? mx::scale_byte(largest, format.mode) : mx::kScaleNaN;
      inverse = finite ? mx::bits_of(mx::inverse_of_scale(static_cast<std::uint8_t>(bits))) : kNaN;
    }
  }
};

/// Returns the scales of a line of the tile from its amax, as 4 bytes or as the bits of a float32. Writes their
/// inverses to `slots`.
__device__ inline std::uint32_t find_scales(const mx::Format& format, const std::uint32_t (&amax)[kBlocksPerLine],
                                            int line, std::uint32_t (*slots)[kSide]) {
  if (format.along >= mx::kWideBlock) {
    const TileScale scale(format, amax[0]);
#pragma unroll
    for (int b = 0; b < kBlocksPerLine; ++b) slots[b][line] = scale.inverse;
    return format.scale_type == mx::ScaleType::kFloat32 ? scale.bits : scale.bits * 0x01010101u;
  }
  std::uint32_t bytes = 0;
#pragma unroll
  for (int b = 0; b < kBlocksPerLine; ++b) {
    const TileScale scale(format, amax[b]);
    slots[b][line] = scale.inverse;
    bytes |= scale.bits << (8 * b);
  }
  return bytes;
}

/// Writes the result of find_scales() for line `line` of the tile to the output. The tile begins at first_line and
/// first_number of the output. `lines` and `numbers` limit it to the matrix.
__device__ inline void write_scales(std::uint32_t found, int line, const TileOutput& out, std::int64_t matrix,
                                    std::int64_t first_line, std::int64_t first_number, int lines, int numbers) {
  if (line >= lines) return;
  const mx::Format& format = out.format;
  if (format.scale_type == mx::ScaleType::kFloat32) {
    // True if the whole tile shares one scale.
    const bool shared = format.across > 1;
    if (shared && line > 0) return;
    auto* to = static_cast<std::uint32_t*>(out.scales) + matrix * out.matrix_scales;
    to[(shared ? first_line / kSide : first_line + line) * out.scales_stride + first_number / kSide] = found;
    return;
  }
  auto* to = static_cast<std::uint8_t*>(out.scales) + matrix * out.matrix_scales +
             (first_line + line) * out.scales_stride + first_number / mx::kBlock;
  if (out.scales_aligned && numbers > (kBlocksPerLine - 1) * mx::kBlock) {
    *reinterpret_cast<std::uint32_t*>(to) = found;
  } else {
#pragma unroll 1
    for (int b = 0; b * mx::kBlock < numbers && b < kBlocksPerLine; ++b) {
      to[b] = static_cast<std::uint8_t>(found >> (8 * b));
    }
  }
}

/// Returns the position of byte `number`, a multiple of 8, of line `line` in the staged bytes of a tile. 16 lanes write
/// 8 bytes each. They have no bank conflicts if they write 64 bytes of each of two lines that lie 8 apart, or 16 bytes
/// of each of 8 such lines. 8 lanes that read 16 bytes each of one line have none either.
__device__ inline int staged(int line, int number) {
  const unsigned group = static_cast<unsigned>(line) / kPatch;
  return line * kSide + (number ^ ((group & 1) << 6 | (group & 6) << 3));
}

/// The pieces of 16 bytes in which threads read staged bytes. A team reads kLinesAtOnce lines at a time.
inline constexpr int kPiece = 16, kPiecesPerLine = kSide / kPiece, kLinesAtOnce = kTeamThreads / kPiecesPerLine;

/// Writes a tile's bytes to the output. `lines` and `numbers` limit them to the matrix.
template <typename Team>
__device__ void write_staged(const std::uint8_t* bytes, const TileOutput& out, std::uint8_t* to, int lines,
                             int numbers) {
  const int first = Team::thread() / kPiecesPerLine, number = Team::thread() % kPiecesPerLine * kPiece;
  if (out.aligned && lines >= kSide && numbers >= kSide) {
    const int at = staged(first, number);
    to += first * out.stride + number;
#pragma unroll
    for (int i = 0; i < kSide / kLinesAtOnce; ++i, to += kLinesAtOnce * out.stride) {
      // This is staged(first + i * kLinesAtOnce, number) for fewer instructions: of the bits that staged() flips, 32
      // lines further on, one is different.
      static_assert(kLinesAtOnce == 32);
      const int piece = (at ^ i % 2 * 32) + i * kLinesAtOnce * kSide;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(bytes + piece);
    }
    return;
  }
#pragma unroll 1
  for (int line = first; line < kSide && line < lines; line += kLinesAtOnce) {
    const std::uint8_t* from = bytes + staged(line, number);
    std::uint8_t* piece = to + line * out.stride + number;
    if (out.aligned && number + kPiece <= numbers) {
      *reinterpret_cast<uint4*>(piece) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll 1
      for (int k = 0; k < kPiece && number + k < numbers; ++k) piece[k] = from[k];
    }
  }
}

/// Writes a tile in the wide form. `factors` are the inverses of the scales, by block and line.
template <typename Team>
__device__ void write_wide(const std::uint8_t* bytes, const std::uint32_t (*factors)[kSide], const TileOutput& out,
                           __nv_bfloat16* to, int lines, int numbers) {
  constexpr int kStep = 64;  // the numbers of four lanes
  const int first = Team::thread() / kPiecesPerLine, number = Team::thread() % kPiecesPerLine * kPiece;
#pragma unroll
  for (int line = first; line < first + kSide; line += kLinesAtOnce) {
    const float scale = __frcp_rn(__uint_as_float(factors[number / mx::kBlock][line]));
    uint4 places[2];
    sm90::widen_in_order(*reinterpret_cast<const uint4*>(bytes + staged(line, number)), sm90::scale_bf16x2(scale),
                         places);
    if (line >= lines || number / kStep * kStep >= numbers) continue;
    auto* piece = reinterpret_cast<uint4*>(to + line * out.stride + number);
    piece[0] = places[0];
    piece[1] = places[1];
  }
}

/// Writes a tile to its outputs. Its bytes are staged in shared memory, once row by row and once column by column.
template <bool kWidens, typename Team, typename T>
__device__ void write_tile(const std::uint8_t* row_bytes, const std::uint8_t* column_bytes, const TileOutputs<T>& out,
                           const TilePlace& place, const TileScales& scales) {
  if constexpr (kWidens) {
    const auto at = [&](const TileOutput& to, std::int64_t line, std::int64_t number) {
      return reinterpret_cast<__nv_bfloat16*>(to.elements) + place.matrix * to.matrix_elements + line * to.stride +
             number;
    };
    write_wide<Team>(row_bytes, scales.bits[0], out.rows, at(out.rows, place.first_row, place.first_column), place.rows,
                     place.columns);
    write_wide<Team>(column_bytes, scales.bits[1], out.columns, at(out.columns, place.first_column, place.first_row),
                     place.columns, place.rows);
    return;
  }
  if (out.rows.elements != nullptr) {
    write_staged<Team>(row_bytes, out.rows,
                       out.rows.elements + place.matrix * out.rows.matrix_elements + place.first_row * out.rows.stride +
                           place.first_column,
                       place.rows, place.columns);
  }
  if (out.columns.elements != nullptr) {
    write_staged<Team>(column_bytes, out.columns,
                       out.columns.elements + place.matrix * out.columns.matrix_elements +
                           place.first_column * out.columns.stride + place.first_row,
                       place.columns, place.rows);
  }
}

/// Quantizes both orientations of a tile in shared memory. It overwrites the tile.
template <bool kWidens, typename Team, typename T>
__device__ void quantize_tile(T* tile, const TileOutputs<T>& out, const TilePlace& place,
                              const TileNeighbours& neighbours, TileScales& scales) {
  // A warp has 32 rows × 64 columns, so each block of 32 numbers that shares a scale lies within one warp.
  const unsigned lane = Team::thread() % kWarp, warp = Team::thread() / kWarp;
  const int row = warp / 2 * 32 + lane / 8 * kPatch, column = warp % 2 * 64 + lane % 8 * kPatch;
  Patch<T> patch;
  patch.load(tile + row * kSide + column);
  std::uint32_t* of_row = &scales.bits[0][column / mx::kBlock][row];
  std::uint32_t* of_column = &scales.bits[1][row / mx::kBlock][column];
  {
    std::uint32_t of_rows[Patch<T>::kWords], of_columns[Patch<T>::kWords];
    patch.amax(of_rows, of_columns);
    if (out.rows.elements != nullptr) put_amax<T, 1>(of_rows, lane, of_row);
    if (out.columns.elements != nullptr) put_amax<T, 8>(of_columns, lane, of_column);
  }
  Team::sync();
  const bool along_columns = Team::thread() >= kSide;
  const int line = Team::thread() % kSide;
  const TileOutput& to = along_columns ? out.columns : out.rows;
  std::uint32_t found = 0;
  {
    std::uint32_t(*slots)[kSide] = scales.bits[along_columns];
    std::uint32_t amax[kBlocksPerLine];
#pragma unroll
    for (int b = 0; b < kBlocksPerLine; ++b) amax[b] = slots[b][line];
    widen_amax<Team>(out, along_columns, line, place, neighbours, amax, scales);
    if (to.elements != nullptr) found = find_scales(to.format, amax, line, slots);
  }
  Team::sync();
  if (!kWidens && to.elements != nullptr) {
    write_scales(found, line, to, place.matrix, along_columns ? place.first_column : place.first_row,
                 along_columns ? place.first_row : place.first_column, along_columns ? place.columns : place.rows,
                 along_columns ? place.rows : place.columns);
  }
  auto* row_bytes = reinterpret_cast<std::uint8_t*>(tile);
  std::uint8_t* column_bytes = row_bytes + kSide * kSide;
  // The lines of a patch are neighbours in staged bytes.
  const int in_rows = staged(row, column), in_columns = staged(column, row);
  float factors[kPatch];
  if (out.rows.elements != nullptr) {
    load_lanes(reinterpret_cast<const float*>(of_row), factors);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      *reinterpret_cast<uint2*>(row_bytes + in_rows + i * kSide) = patch.row_bytes(i, factors[i]);
    }
  }
  if (out.columns.elements != nullptr) {
    load_lanes(reinterpret_cast<const float*>(of_column), factors);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      *reinterpret_cast<uint2*>(column_bytes + in_columns + j * kSide) = patch.column_bytes(j, factors[j]);
    }
  }
  Team::sync();
  write_tile<kWidens, Team>(row_bytes, column_bytes, out, place, scales);
}

template <typename Producer, bool kQuantizes>
constexpr std::size_t tile_bytes() {
  return kQuantizes ? kOutputsOf<Producer> * kSide * kSide * sizeof(typename Producer::Number) : 0;
}

template <typename Producer, bool kQuantizes>
constexpr int tile_blocks_per_sm() {
  // An SM of Hopper has 228 KiB, of which each block takes 1 KiB for the system.
  constexpr std::size_t kShared = std::size_t{220} << 10, kMost = Producer::kBlocksPerSm;
  constexpr std::size_t kOfBlock = tile_bytes<Producer, kQuantizes>() + kTeamsOf<Producer> * sizeof(TileScales);
  return static_cast<int>(std::min(kMost, kShared / kOfBlock));
}

/// Computes a tile's numbers. Writes them to the plain outputs, and to shared memory if they are quantized. `thread` is
/// the thread's index among those of all teams that have this tile.
template <int kCount, bool kQuantizes, bool kWhole, typename Producer>
__device__ void compute_numbers(const TileArgs<Producer>& args, const TilePlace& place, unsigned thread,
                                typename Producer::Number* tiles) {
  using T = typename Producer::Number;
  constexpr int kParts = kPatch / kCount, kInFlight = Producer::kInFlight;
  constexpr int kRowsAtOnce = kTeamsOf<Producer> * kTeamThreads / kThreadsAcross;
  const int thread_row = thread / kThreadsAcross, first = static_cast<int>(thread % kThreadsAcross * kCount);
  // The threads of a row access neighbouring numbers.
  const auto column = [&](int part) { return first + part * kThreadsAcross * kCount; };
  const auto inside = [&](int row, int part) { return kWhole || (row < place.rows && column(part) < place.columns); };
  typename ColumnsOf<Producer, kCount>::Type of_columns[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (inside(0, part)) {
      of_columns[part] = ColumnsOf<Producer, kCount>::load(args.producer, place.first_column + column(part));
    }
  }
#pragma unroll 1
  for (int batch = 0; batch < kSide; batch += kInFlight * kRowsAtOnce) {
    typename Producer::template Input<kCount> inputs[kInFlight][kParts];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = thread_row + batch + i * kRowsAtOnce;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!inside(row, part)) continue;
        inputs[i][part] =
            args.producer.template load<kCount>(place.matrix, place.first_row + row, place.first_column + column(part));
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = thread_row + batch + i * kRowsAtOnce;
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = column(part);
        Lanes<T, kCount> out[kOutputsOf<Producer>] = {};
        if (inside(row, part)) args.producer.compute(inputs[i][part], of_columns[part], out, sum);
#pragma unroll
        for (int o = 0; o < kOutputsOf<Producer>; ++o) {
          const TileOutputs<T>& to = args.outputs[o];
          if (to.plain != nullptr && inside(row, part)) {
            put_lanes(out[o], to.plain + (place.first_row + row) * to.plain_stride + place.first_column + at);
          }
          if constexpr (kQuantizes) {
            *reinterpret_cast<Lanes<T, kCount>*>(tiles + (o * kSide + row) * kSide + at) = out[o];
          }
        }
      }
      if constexpr (kHasSums<Producer>) {
        if (args.sums == nullptr) continue;
#pragma unroll
        for (int lanes = kThreadsAcross / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (first == 0 && inside(row, 0)) args.sums[blockIdx.x * args.num_rows + place.first_row + row] = sum;
      }
    }
  }
}

template <int kCount, bool kQuantizes, typename Producer>
__device__ void compute_tile(const TileArgs<Producer>& args, const TilePlace& place, unsigned thread,
                             typename Producer::Number* tiles) {
  if (place.whole()) {
    compute_numbers<kCount, kQuantizes, true>(args, place, thread, tiles);
  } else {
    compute_numbers<kCount, kQuantizes, false>(args, place, thread, tiles);
  }
}

template <typename Producer, int kCount, bool kQuantizes>
__global__ void __launch_bounds__(kTeamsOf<Producer>* kTeamThreads, (tile_blocks_per_sm<Producer, kQuantizes>()))
    tile_kernel(const __grid_constant__ TileArgs<Producer> args) {
  using T = typename Producer::Number;
  extern __shared__ __align__(16) unsigned char shared[];
  T* tiles = reinterpret_cast<T*>(shared);

  const std::int64_t first_row = std::int64_t{blockIdx.y} * kSide, first_column = std::int64_t{blockIdx.x} * kSide;
  const std::int64_t num_computed = args.num_rows_1 == nullptr ? args.num_rows : *args.num_rows_1;
  __shared__ TileScales scales[kQuantizes ? kTeamsOf<Producer> : 1];
  const bool in_cluster = kQuantizes && args.cluster.x * args.cluster.y > 1;
  if (in_cluster) {
    if (threadIdx.x < 2 * kTeamsOf<Producer>) {
      ptx::mbarrier_init(&scales[threadIdx.x / 2].received[threadIdx.x % 2], 1);
      ptx::fence_mbarrier_init();
    }
    // Blocks send to each other only after cluster_wait(), when all barriers are initialized.
    ptx::cluster_arrive();
  }
  // A cluster may have blocks beyond the matrix.
  if (first_row >= num_computed || first_column >= args.length) {
    if (in_cluster) ptx::cluster_wait();
    return;
  }
  const TilePlace place(blockIdx.z, first_row, first_column, num_computed, args.length);
  compute_tile<kCount, kQuantizes>(args, place, threadIdx.x, tiles);
  if constexpr (kQuantizes) {
    using Team = cuda::Team<kTeamsOf<Producer>>;
    constexpr bool kWidens = requires { typename Producer::Wide; };
    __syncthreads();
    if (in_cluster) ptx::cluster_wait();
#pragma unroll 1
    for (int o = Team::index(); o < kOutputsOf<Producer>; o += kTeamsOf<Producer>) {
      const TileOutputs<T>& to = args.outputs[o];
      if (to.rows.elements == nullptr && to.columns.elements == nullptr) continue;
      quantize_tile<kWidens, Team>(tiles + o * kSide * kSide, to, place, {.cluster = args.cluster},
                                   scales[Team::index()]);
    }
  }
}

/// Returns whether tile_pair_kernel can take the place of tile_kernel.
template <typename Producer>
inline constexpr bool kCanPair = kTeamsOf<Producer> == 1 && kOutputsOf<Producer> == 1;

/// Does the same for two tiles side by side, where blocks of 256 run along rows only. Each half of the threads has a
/// tile. They wait less for each other than the blocks of a cluster do.
template <typename Producer, int kCount>
__global__ void __launch_bounds__(2 * kTeamThreads, (tile_blocks_per_sm<Producer, true>() + 1) / 2)
    tile_pair_kernel(const __grid_constant__ TileArgs<Producer> args) {
  static_assert(kCanPair<Producer>);
  using T = typename Producer::Number;
  using Team = cuda::Team<2>;
  constexpr bool kWidens = requires { typename Producer::Wide; };
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ TileScales scales[2];
  const int half = Team::index();
  T* tile = reinterpret_cast<T*>(shared) + half * kSide * kSide;

  const std::int64_t first_row = std::int64_t{blockIdx.y} * kSide;
  const std::int64_t pair_column = std::int64_t{blockIdx.x} * (2 * kSide), first_column = pair_column + half * kSide;
  const std::int64_t num_computed = args.num_rows_1 == nullptr ? args.num_rows : *args.num_rows_1;
  if (first_row >= num_computed || first_column >= args.length) return;
  const TilePlace place(blockIdx.z, first_row, first_column, num_computed, args.length);
  compute_tile<kCount, true>(args, place, Team::thread(), tile);
  Team::sync();
  const bool has_both = pair_column + kSide < args.length;
  quantize_tile<kWidens, Team>(tile, args.outputs[0], place, {.other_half = has_both ? &scales[1 - half] : nullptr},
                               scales[half]);
}

/// Describes a quantized x for kernels: its lines from `first_line` on, and the numbers of each line from
/// `first_number` on. Both must be multiples of the format's block.
inline TileOutput tile_output(const mx::Quantized& x, std::int64_t first_line = 0, std::int64_t first_number = 0) {
  if (!x.defined()) return {};
  const int last = x.elements.num_dims() - 1;
  const mx::Format& format = x.format;
  TESSERA_CHECK((format.along == mx::kBlock || format.along == mx::kWideBlock || format.along == mx::kWidestBlock) &&
                    (format.across == 1 || format.square()) &&
                    (format.scale_type == mx::ScaleType::kE8M0 || format.along == mx::kWideBlock),
                "blocks of {} x {}", format.across, format.along);
  const std::int64_t stride = x.elements.dim(last), scales_stride = x.scales.dim(last);
  const std::int64_t first_scale =
      first_line / format.scale_height() * scales_stride + first_number / format.scale_width();
  TileOutput out{.elements = x.element_bytes() + first_line * stride + first_number,
                 .scales = static_cast<std::byte*>(x.scales.raw()) +
                           static_cast<std::size_t>(first_scale) * size_of(x.scales.dtype()),
                 .stride = stride,
                 .scales_stride = scales_stride,
                 .matrix_elements = stride * x.elements.dim(last - 1),
                 .matrix_scales = scales_stride * x.scales.dim(last - 1),
                 .format = format};
  const auto divides = [](const void* address, std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(bytes) == 0;
  };
  out.aligned = divides(out.elements, 16) && stride % 16 == 0 && out.matrix_elements % 16 == 0;
  out.scales_aligned = divides(out.scales, kBlocksPerLine) && scales_stride % kBlocksPerLine == 0 &&
                       out.matrix_scales % kBlocksPerLine == 0;
  return out;
}

/// Describes a wide orientation of a weight with blocks of `format` for kernels.
inline TileOutput tile_output_wide(const Tensor& wide, const mx::Format& format) {
  const int last = wide.num_dims() - 1;
  return {.elements = static_cast<std::uint8_t*>(wide.raw()),
          .stride = wide.dim(last),
          .matrix_elements = wide.dim(last) * wide.dim(last - 1),
          .format = format};
}

/// Describes the columns of a matrix x from `first_column` on for kernels.
template <typename T>
TileOutputs<T> tile_outputs(const GemmOperand& x, std::int64_t first_column = 0) {
  TileOutputs<T> out{.rows = tile_output(x.rows, 0, first_column), .columns = tile_output(x.columns, first_column, 0)};
  if (x.plain.defined()) out.plain = numbers<T>(x.plain) + first_column, out.plain_stride = x.plain.stride();
  return out;
}

/// Returns the sides of the clusters, in tiles, in which the numbers of an output share scales.
template <typename T>
dim3 cluster_of(const TileOutputs<T>& out) {
  const auto has_widest = [](const TileOutput& x) {
    return x.elements != nullptr && x.format.along == mx::kWidestBlock;
  };
  const bool rows = has_widest(out.rows), columns = has_widest(out.columns);
  const bool squares = (rows && out.rows.format.across > 1) || (columns && out.columns.format.across > 1);
  return {rows || squares ? 2u : 1u, columns || squares ? 2u : 1u, 1};
}

template <typename Producer, int kCount, bool kQuantizes>
void launch_tile_kernel(const Context& op, const TileArgs<Producer>& all) {
  constexpr std::size_t kBytes = tile_bytes<Producer, kQuantizes>();
  TileArgs<Producer> args = all;
  int exchanges[kTeamsOf<Producer>] = {};
  for (int o = 0; o < kOutputsOf<Producer>; ++o) {
    const dim3 cluster = cluster_of(args.outputs[o]);
    if (cluster.x * cluster.y == 1) continue;
    const int team = o % kTeamsOf<Producer>;
    TESSERA_CHECK(++exchanges[team] == 1, "blocks of {} in two outputs of team {}", mx::kWidestBlock, team);
    args.cluster = {std::max(args.cluster.x, cluster.x), std::max(args.cluster.y, cluster.y), 1};
  }
  // Returns the number of tiles in one direction, in whole clusters. Some may lie beyond the matrix.
  const auto tiles_for = [&](std::int64_t size, unsigned in_cluster) {
    const std::int64_t side = std::int64_t{kSide} * in_cluster;
    return static_cast<unsigned>((size + side - 1) / side * in_cluster);
  };
  const dim3 grid(tiles_for(args.length, args.cluster.x), tiles_for(args.num_rows, args.cluster.y),
                  static_cast<unsigned>(args.num_matrices));
  const auto allow = [](auto* kernel, std::size_t bytes) {
    TESSERA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  };
  if constexpr (kQuantizes && kCanPair<Producer>) {
    if (args.cluster.x == 2 && args.cluster.y == 1) {
      const auto kernel = tile_pair_kernel<Producer, kCount>;
      allow(kernel, 2 * kBytes);
      kernel<<<dim3(grid.x / 2, grid.y, grid.z), 2 * kTeamThreads, 2 * kBytes, stream_of(op)>>>(args);
      return;
    }
  }
  const auto kernel = tile_kernel<Producer, kCount, kQuantizes>;
  if (kBytes > 0) allow(kernel, kBytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {args.cluster.x, args.cluster.y, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = {kTeamsOf<Producer> * kTeamThreads, 1, 1};
  config.dynamicSmemBytes = kBytes;
  config.stream = stream_of(op);
  config.attrs = &attribute;
  config.numAttrs = args.cluster.x * args.cluster.y > 1 ? 1 : 0;
  TESSERA_CUDA(cudaLaunchKernelEx(&config, kernel, args));
}

/// Does what quantize() does for the first num_rows_1[0] rows of x, and does not read the other rows. If num_rows_1 is
/// defined, x must be a matrix. If it is undefined, all rows are quantized.
void quantize_first_rows(const Context& op, const Tensor& x, const mx::Quantized& rows, const mx::Quantized& columns,
                         const Tensor& num_rows_1);

/// Launches the tile kernel. `in_lanes` tells whether inputs and plain outputs can be accessed kLanes numbers at a
/// time.
template <typename Producer>
void run_tiles(const Context& op, const TileArgs<Producer>& args, bool in_lanes) {
  if (args.num_rows == 0 || args.length == 0 || args.num_matrices == 0) return;
  bool quantizes = false;
  for (const auto& output : args.outputs) {
    quantizes = quantizes || output.rows.elements != nullptr || output.columns.elements != nullptr;
  }
  for_lanes(in_lanes, [&](auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    quantizes ? launch_tile_kernel<Producer, kCount, true>(op, args)
              : launch_tile_kernel<Producer, kCount, false>(op, args);
  });
}

}  // namespace tessera::cuda
