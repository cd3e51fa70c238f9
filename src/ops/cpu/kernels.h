// The CPU's hot kernels: packed block GEMMs, on them dense and grouped products and MLA attention, and quantizers. They
// are compiled once per instruction set and chosen at run time; what is here is the same for all.
//
// A kernel does one task in one thread; the operators (ops/*_cpu.cc) check operands, cut the work into tasks by problem
// size, and hand each task scratch memory for one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mx/block.h"

namespace tessera::cpu {

/// Kernels read and write bfloat16 as its bits.
enum class Element : std::uint8_t { kFloat32, kBFloat16 };

struct AttentionShape {
  std::int64_t seq_len, num_heads;
  std::int64_t dim_nope, dim_rope, dim_v;
  float scale;
  /// Queries: tokens [begin, end) of a sequence, one range behind the other.
  struct Range {
    std::int64_t begin, end;
  };
  int num_ranges;
  Range ranges[2];
};

/// Operands as in ops/attention/mla_attention.h, float32 or bfloat16 throughout but for lse and the partial sums.
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
  /// [sequences · heads, seq_len, dim_rope]: each head's gradient of the shared k_rope, to be summed.
  float* d_k_rope_per_head;
};

/// c [m, n] (= or +=) op(a) · op(b), where op transposes if asked to. Consecutive rows in memory are `stride_*` numbers
/// apart. A bfloat16 a needs a bfloat16 b.
struct Gemm {
  std::int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  std::int64_t stride_a, stride_b, stride_c;
  bool transpose_a, transpose_b, accumulate;
  Element element_a, element_b, element_c;
};

/// Side of a tile that is quantized at once: what shares a scale lies in one.
inline constexpr std::int64_t kQuantizeSide = 128;

/// Part of a matrix, beginning at multiples of kQuantizeSide, at most that large.
struct QuantizeTile {
  /// Where one orientation goes (mx/quantized.h); without elements it is not wanted. Strides in elements and in scales.
  struct Output {
    std::uint8_t* elements;
    std::int64_t elements_stride;
    void* scales;
    std::int64_t scales_stride;
  };
  const void* x;
  std::int64_t stride;
  std::int64_t rows, columns;
  const void* next;  // the tile that comes next, of the same size, to be fetched meanwhile; may be null
  bool stream;       // write past the caches: the outputs do not fit into them
  mx::Format format;
  Output along_rows, along_columns;  // the latter transposed: blocks run along x's columns
};

/// `count` numbers of a row, from its beginning; `out` float32 or bfloat16.
struct DequantizeRow {
  const std::uint8_t* elements;
  const void* scales;
  mx::Format format;
  std::int64_t count;
  void* out;
};

struct KernelTable {
  const char* name;
  /// Bytes of scratch memory of one thread.
  std::size_t (*attention_forward_scratch)(const AttentionShape&, Element);
  std::size_t (*attention_backward_scratch)(const AttentionShape&, Element);
  std::size_t (*gemm_scratch)(const Gemm&);
  /// One head of one sequence.
  void (*attention_forward)(const AttentionForward&, Element, std::int64_t seq, std::int64_t head, std::byte* scratch);
  void (*attention_backward)(const AttentionBackward&, Element, std::int64_t seq, std::int64_t head,
                             std::byte* scratch);
  void (*gemm)(const Gemm&, std::byte* scratch);
  void (*quantize_tile)(const QuantizeTile&, Element);
  void (*dequantize_row)(const DequantizeRow&, Element);
};

/// The best table that this processor runs, or what use_kernels has set.
const KernelTable& kernels();

/// Has all operators take this table; null: the best again. For tests and measurements, while no operator runs.
void use_kernels(const KernelTable* table);

/// Returns the table named "baseline", "avx512" or "avx512_bf16", or null if this processor cannot run it. It is for
/// tests and measurements.
const KernelTable* kernels_named(const char* name);

}  // namespace tessera::cpu
