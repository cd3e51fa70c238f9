// Functions for instructions of Hopper (sm_90a) for which CUDA C++ has no functions. These are mbarriers, tensor copies
// (TMA), fences and WGMMA. Most functions are one instruction. Source: PTX ISA 8.0 to 9.0, "mbarrier", "Tensor copy",
// "wgmma".
//
// Shared memory is accessed through two proxies: generic (st.shared, stmatrix) and async (TMA, WGMMA). TMA or WGMMA may
// read generic writes only after fence_proxy_async() in each writing thread and then a barrier.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <cstdio>

namespace tessera::ptx {

/// True if this code is compiled for sm_90a, the architecture that has these instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kIsSm90a = true;
#else
inline constexpr bool kIsSm90a = false;
#endif

/// Ends the kernel with an error and a message. A kernel that was built for another architecture calls it. Otherwise it
/// would return without having written, and that would look like a result.
__device__ inline void trap_on_other_architecture(const char* kernel) {
  if (threadIdx.x == 0 && blockIdx.x == 0) printf("tessera: kernel %s is for Hopper (sm_90a) only\n", kernel);
  __trap();
}

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Warps, blocks, clusters ---------------------------------------------------------------------------------------

/// Returns the index of this thread's warpgroup. The shuffle tells the compiler that it is the same for a whole warp.
__device__ inline int warpgroup_idx() { return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0); }

/// Moves registers between warpgroups. Both functions need a register cap at entry: __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ inline void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

/// Synchronizes `threads` threads of the block. __syncthreads uses the barrier with id 0.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives at such a barrier without waiting. `threads` counts all that arrive or synchronize.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline std::uint32_t cluster_cta_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
__device__ inline std::uint32_t cluster_idx() {
  std::uint32_t idx;
  asm volatile("mov.u32 %0, %%clusterid.x;\n" : "=r"(idx));
  return idx;
}
__device__ inline std::uint32_t num_clusters() {
  std::uint32_t count;
  asm volatile("mov.u32 %0, %%nclusterid.x;\n" : "=r"(count));
  return count;
}
/// Synchronizes all threads of all blocks of the cluster. Every thread must call it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
/// Do the same in two steps.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }

// --- Numbers -------------------------------------------------------------------------------------------------------

/// Compute 2^x and 1 / x to about 2 units in the last place. Denormal numbers count as 0.
__device__ inline float exp2_approx(float x) {
  float y = 0.0f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approx(float x) {
  float y = 0.0f;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- Fences and flags ----------------------------------------------------------------------------------------------

/// Orders earlier generic accesses before later accesses by TMA and WGMMA, for shared and global memory.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;\n" ::: "memory"); }
/// Does the same for shared memory only.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
/// Makes mbarrier_init visible to the cluster and to TMA. A cluster_sync (or __syncthreads) must follow.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

__device__ inline std::int32_t load_acquire_gpu(const std::int32_t* pointer) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
__device__ inline void store_release_gpu(std::int32_t* pointer, std::int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(pointer), "r"(value) : "memory");
}

/// These load with acquire, and store with release, memory that other GPUs also use.
__device__ inline std::uint64_t load_acquire_sys(const std::uint64_t* pointer) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(pointer) : "memory");
  return value;
}
__device__ inline void store_release_sys(std::uint64_t* pointer, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;\n" ::"l"(pointer), "l"(value) : "memory");
}
/// Returns a clock in nanoseconds that is the same on the whole GPU.
__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(now));
  return now;
}

/// Adds four float32 to four in global memory, each atomically. The address must be a multiple of 16 bytes.
__device__ inline void red_add_v4(float* pointer, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(pointer), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}

// --- mbarriers -----------------------------------------------------------------------------------------------------

using Barrier = std::uint64_t;

__device__ inline void mbarrier_init(Barrier* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
/// Arrives at the barrier at the same place in block `cta_rank` of the cluster, this block included. It orders no
/// generic accesses between blocks, because a cluster-wide release is a fence of the whole GPU for every arrival.
/// Buffers that TMA fills and WGMMA reads need no such order.
__device__ inline void mbarrier_arrive_cluster(Barrier* barrier, std::uint32_t cta_rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(shared_address(barrier)),
      "r"(cta_rank)
      : "memory");
}
/// Writes a word to the same place in block `cta_rank` of the cluster. It counts as 4 bytes for the barrier at the same
/// place of that block.
__device__ inline void store_async_cluster(std::uint32_t* shared, std::uint32_t value, Barrier* barrier,
                                           std::uint32_t cta_rank) {
  asm volatile(
      "{\n.reg .b32 to, of;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 of, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [of];\n}\n" ::"r"(shared_address(shared)),
      "r"(value), "r"(shared_address(barrier)), "r"(cta_rank)
      : "memory");
}
/// Arrives, and makes the phase wait for `bytes` more from TMA or from store_async_cluster.
__device__ inline void mbarrier_arrive_expect_tx(Barrier* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity is complete. A fresh barrier counts as having completed parity 1. The wait
/// acquires writes of the block and of TMA. A cluster-wide acquire would empty the L1 cache each time.
__device__ inline void mbarrier_wait(Barrier* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Does the same, and also acquires writes of other blocks of the cluster.
__device__ inline void mbarrier_wait_cluster(Barrier* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// --- Warps' matrix products -----------------------------------------------------------------------------------------

/// Loads four 8 × 8 matrices of 2-byte numbers from shared memory. Lane l passes the address of row l % 8 of matrix l /
/// 8. x[i] receives two numbers of matrix i, at row l / 4 and columns 2 (l % 4) and 2 (l % 4) + 1. With kTransposed,
/// each matrix is transposed first.
template <bool kTransposed>
__device__ inline void load_matrices(const __nv_bfloat16* at, std::uint32_t (&x)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
  }
}

/// Adds a · b to d, for a [16, 16], b [16, 8] and d [16, 8], all in the layouts of mma.m16n8k16.
__device__ inline void multiply_add(const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Tensor copies -------------------------------------------------------------------------------------------------
// Coordinates are in elements, innermost first. Where a box exceeds the tensor, it reads zeros and writes nothing. One
// thread issues a copy. Shared addresses are multiples of 128, or of 1024 with the 128-byte swizzle.

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

__device__ inline void tma_load_2d(void* shared, const CUtensorMap* map, Barrier* barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void tma_load_3d(void* shared, const CUtensorMap* map, Barrier* barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::
          "r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
/// Copies contiguous bytes. Their number and both addresses must be multiples of 16.
__device__ inline void bulk_load(void* shared, const void* from, std::uint32_t bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(shared)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// Copies to the same place in every block of `cta_mask`, and completes on the barrier at the same place of each.
__device__ inline void tma_load_2d_multicast(void* shared, const CUtensorMap* map, Barrier* barrier,
                                             std::uint16_t cta_mask, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5}], [%2], %3;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(cta_mask), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void tma_load_3d_multicast(void* shared, const CUtensorMap* map, Barrier* barrier,
                                             std::uint16_t cta_mask, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ inline void tma_store_2d(const CUtensorMap* map, const void* shared, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n" ::"l"(map),
               "r"(shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}
__device__ inline void tma_store_3d(const CUtensorMap* map, const void* shared, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
               "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
/// Adds to the numbers in global memory, each element atomically, in the tensor map's type.
__device__ inline void tma_reduce_add_3d(const CUtensorMap* map, const void* shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
      "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
/// Copies contiguous bytes. Their number and both addresses must be multiples of 16.
__device__ inline void bulk_store(void* to, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
/// Waits until at most kPending of this thread's groups still have to read their shared memory.
template <int kPending>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
/// Waits until at most kPending of this thread's groups still have to write.
template <int kPending>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// --- Matrices between registers and shared memory ------------------------------------------------------------------

/// Stores four 8x8 matrices of 16-bit elements from WGMMA's fragment layout. Lane l passes the address of the 16-byte
/// row l % 8 of matrix l / 8.
__device__ inline void stmatrix_x4(void* row, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(row)), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
/// Does the same, and transposes each matrix on the way.
__device__ inline void stmatrix_x4_transposed(void* row, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                              std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(row)),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// Packs two float32 as bfloat16, with `low` in the low half.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Multiplies two pairs of bfloat16. Subnormal numbers are kept.
__device__ inline std::uint32_t mul_bf16x2(std::uint32_t x, std::uint32_t y) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

// --- WGMMA ---------------------------------------------------------------------------------------------------------
// A warpgroup computes d[64, N] (+)= a[64, K] · b[K, N] with float32 sums. Its first warp's index is a multiple of 4. K
// is 16 for bfloat16 and 32 for e4m3. Warp w of the warpgroup holds rows 16w to 16w + 15. In it, lane l holds for each
// j < N / 8:
//   d[4j], d[4j + 1]:     row l / 4,     columns 8j + 2 (l % 4) + {0, 1}
//   d[4j + 2], d[4j + 3]: row l / 4 + 8, the same columns.
// If a is in registers (bfloat16), a[0] and a[1] hold rows l / 4 and l / 4 + 8 at K = 2 (l % 4) + {0, 1}. a[2] and a[3]
// hold the same rows at K + 8.

/// The dim of an operand that is contiguous in shared memory: K, or the other dim (M or N).
enum class Major { kK = 0, kMN = 1 };

/// Returns the descriptor of an operand in shared memory that TMA wrote with the 128-byte swizzle. `shared` starts at a
/// multiple of 1024 bytes, plus an offset along K.
/// - K-major: There is a row of 128 bytes per m or n. Groups of 8 rows lie 1024 bytes apart. A step of 32 bytes along K
///   adds 32 bytes to `shared`. `mn_stride_bytes` is not used.
/// - MN-major (bfloat16 only): There is a row of 64 m or n per k. Groups of 8 k lie 1024 bytes apart. The next 64 m or
///   n lie `mn_stride_bytes` further. A step of 16 along K adds 2048 bytes to `shared`.
template <Major kMajor>
__device__ inline std::uint64_t wgmma_descriptor(const void* shared, std::uint32_t mn_stride_bytes = 0) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  const std::uint64_t leading = kMajor == Major::kMN ? (mn_stride_bytes >> 4) & 0x3FFF : 1;
  return kSwizzle128 | kEightRows | leading << 16 | ((shared_address(shared) & 0x3FFFF) >> 4);
}
/// Returns the descriptor of the operand that lies `bytes` further.
__device__ inline std::uint64_t advance_descriptor(std::uint64_t descriptor, std::uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

/// Must be called before the first WGMMA, and again after other code has accessed the registers that WGMMA uses.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
/// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of d across this call.
template <int kCount>
__device__ inline void wgmma_touch(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Holds the instructions for one N. bf16<A, B>(d, a, b, accumulate) has both operands in shared memory, given by
/// descriptors. bf16_from_registers<B>(d, a[4], b, accumulate) has a in registers. e4m3(d, a, b, accumulate) has both
/// operands K-major. If accumulate is false, they assign d.
template <int kN>
struct Wgmma;

// Operand lists in the forms of the assembler and of the compiler.
#define TESSERA_SLOTS_64                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"   \
  "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
  "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TESSERA_SLOTS_128                                                                                          \
  TESSERA_SLOTS_64                                                                                                 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"      \
  "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define TESSERA_REGISTERS_8(d, i)                                                                         \
  "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), "+f"((d)[i + 4]), "+f"((d)[i + 5]), \
      "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define TESSERA_REGISTERS_32(d, i)                                                          \
  TESSERA_REGISTERS_8(d, i), TESSERA_REGISTERS_8(d, i + 8), TESSERA_REGISTERS_8(d, i + 16), \
      TESSERA_REGISTERS_8(d, i + 24)
#define TESSERA_REGISTERS_64(d) TESSERA_REGISTERS_32(d, 0), TESSERA_REGISTERS_32(d, 32)
#define TESSERA_REGISTERS_128(d) TESSERA_REGISTERS_64(d), TESSERA_REGISTERS_32(d, 64), TESSERA_REGISTERS_32(d, 96)

// Defines Wgmma<N> with COUNT accumulators. P0 to P6 are the operand slots after them.
#define TESSERA_DEFINE_WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                              \
  template <>                                                                                                   \
  struct Wgmma<N> {                                                                                             \
    static constexpr int kCount = COUNT;                                                                        \
    template <Major kA, Major kB>                                                                               \
    __device__ static void bf16(float (&d)[COUNT], std::uint64_t a, std::uint64_t b, bool accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                     \
                   ", 0;\n"                                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TESSERA_SLOTS_##COUNT           \
                   "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}\n"                                   \
                   : TESSERA_REGISTERS_##COUNT(d)                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),              \
                     "n"(static_cast<int>(kB)));                                                                \
    }                                                                                                           \
    template <Major kB>                                                                                         \
    __device__ static void bf16_from_registers(float (&d)[COUNT], const std::uint32_t (&a)[4], std::uint64_t b, \
                                               bool accumulate) {                                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                                     \
                   ", 0;\n"                                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TESSERA_SLOTS_##COUNT           \
                   "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}\n"             \
                   : TESSERA_REGISTERS_##COUNT(d)                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),     \
                     "n"(static_cast<int>(kB)));                                                                \
    }                                                                                                           \
    __device__ static void e4m3(float (&d)[COUNT], std::uint64_t a, std::uint64_t b, bool accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                     \
                   ", 0;\n"                                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TESSERA_SLOTS_##COUNT           \
                   "}, %" #P0 ", %" #P1 ", p, 1, 1;\n}\n"                                                       \
                   : TESSERA_REGISTERS_##COUNT(d)                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                        \
    }                                                                                                           \
  };

TESSERA_DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
TESSERA_DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef TESSERA_DEFINE_WGMMA
#undef TESSERA_REGISTERS_128
#undef TESSERA_REGISTERS_64
#undef TESSERA_REGISTERS_32
#undef TESSERA_REGISTERS_8
#undef TESSERA_SLOTS_128
#undef TESSERA_SLOTS_64

}  // namespace tessera::ptx
