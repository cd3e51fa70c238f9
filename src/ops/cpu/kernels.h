// The CPU's hot kernels: packed block GEMMs, quantizers, and what is built on the GEMMs (dense and grouped products,
// MLA attention). They are compiled once per instruction set, and one set of them is chosen at run time. This header is
// the same for all instruction sets.
//
// A kernel does one task in one thread. The operators (ops/*_cpu.cc) check operands and cut the work into tasks by
// problem size. They give each task the scratch memory of one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mx/block.h"

namespace tessera::cpu {

/// The types of numbers. Kernels read and write bfloat16 as its bits.
enum class Element : std::uint8_t { kFloat32, kBFloat16 };

struct AttentionShape {
  std::int64_t seq_len, num_heads;
  std::int64_t dim_nope, dim_rope, dim_v;
  float scale;
  /// A range [begin, end) of a sequence's tokens that are queries. The rows of the ranges follow one another.
  struct Range {
    std::int64_t begin, end;
  };
  int num_ranges;
  Range ranges[2];
};

/// Holds operands as in ops/attention/mla_attention.h. All are float32 or all are bfloat16, except lse and partial
/// sums.
struct AttentionForward {
  AttentionShape shape;
  const void *q, *kv, *k_rope;
  const std::int32_t* doc_start;
  void* o;
  float* lse;
};

struct AttentionBackward {
  AttentionShape shape;
  const void *q, *kv, *k_rope;
  const std::int32_t* doc_start;
  const void* o;
  const float* lse;
  const void* d_o;
  void *d_q, *d_kv;
  /// Each head's gradient of the shared k_rope, [sequences · heads, seq_len, dim_rope]. The caller must sum over the
  /// heads.
  float* d_k_rope_per_head;
};

/// Describes c [m, n] (= or +=) op(a) · op(b), where op transposes if asked to. Consecutive rows in memory are
/// `stride_*` numbers apart. If a is bfloat16, b must be, too. If b is packed, it is what KernelTable::pack_right
/// wrote.
struct Gemm {
  std::int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  std::int64_t stride_a, stride_b, stride_c;
  bool transpose_a, transpose_b, accumulate;
  Element element_a, element_b, element_c;
  bool is_b_packed = false;
};

/// The columns of a packed b from any multiple of this number on are a valid packed b by themselves.
inline constexpr std::int64_t kColumnStep = 32;

/// The side of a tile that is quantized at once.
inline constexpr std::int64_t kQuantizeSide = 128;

/// Describes a part of a matrix. It begins at multiples of kQuantizeSide, and its sides are at most kQuantizeSide.
struct QuantizeTile {
  /// Describes where one orientation goes (mx/quantized.h). If `elements` is null, it is not wanted. Strides count
  /// elements and scales.
  struct Output {
    std::uint8_t* elements;
    std::int64_t elements_stride;
    void* scales;
    std::int64_t scales_stride;
    mx::Format format;
    /// The largest magnitude of the numbers that share a scale, as bits, for each line of the tile. It is given where a
    /// block is larger than the tile, and otherwise null.
    const std::uint32_t* amax = nullptr;
  };
  const void* x;
  std::int64_t stride;
  std::int64_t rows, columns;
  const void* next;                  // the next tile, of the same size, which is prefetched meanwhile; may be null
  bool stream;                       // if true, writes bypass the caches, because the outputs do not fit into them
  Output along_rows, along_columns;  // along_columns is transposed: its blocks run along x's columns
};

/// Describes `count` numbers of a row, from its beginning. `out` is float32 or bfloat16.
struct DequantizeRow {
  const std::uint8_t* elements;
  const void* scales;
  mx::Format format;
  std::int64_t count;
  void* out;
};

struct KernelTable {
  const char* name;
  /// These return the bytes of scratch memory of one thread.
  std::size_t (*attention_forward_scratch)(const AttentionShape&, Element);
  std::size_t (*attention_backward_scratch)(const AttentionShape&, Element);
  std::size_t (*gemm_scratch)(const Gemm&);
  /// Returns the bytes of a packed column of b. Columns are packed in panels. kColumnStep is a multiple of a panel's
  /// width.
  std::int64_t (*packed_column)(const Gemm&);
  /// Packs all n columns of b, and columns of zeros up to the end of the last panel.
  void (*pack_right)(const Gemm&, std::byte* packed);
  /// These compute one head of one sequence.
  void (*attention_forward)(const AttentionForward&, Element, std::int64_t seq, std::int64_t head, std::byte* scratch);
  void (*attention_backward)(const AttentionBackward&, Element, std::int64_t seq, std::int64_t head,
                             std::byte* scratch);
  void (*gemm)(const Gemm&, std::byte* scratch);
  void (*quantize_tile)(const QuantizeTile&, Element);
  void (*dequantize_row)(const DequantizeRow&, Element);
};

/// Returns the best table that this processor can run, or the one that use_kernels has set.
const KernelTable& kernels();

/// Makes all operators use this table, or the best one again if it is null. It is for tests and measurements, and must
/// be called while no operator runs.
void use_kernels(const KernelTable* table);

/// Returns the table named "baseline", "avx512" or "avx512_bf16", or null if this processor cannot run it. It is for
/// tests and measurements.
const KernelTable* kernels_named(const char* name);

}  // namespace tessera::cpu
