#include "ops/elementwise/elementwise.h"
#include "ops/kit/launch.cuh"
#include "ops/kit/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;

template <typename From, typename To, int kCount>
__global__ void convert_kernel(const From* source, std::int64_t source_stride, To* target, std::int64_t target_stride,
                               std::int64_t num_rows, std::int64_t length) {
  for (std::int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    for (std::int64_t j = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount; j < length;
         j += std::int64_t{gridDim.x} * kThreads * kCount) {
      float x[kCount];
      load_lanes(source + row * source_stride + j, x);
      store_lanes(x, target + row * target_stride + j);
    }
  }
}

template <typename A, typename B, int kCount>
__global__ void add_kernel(const A* a, const B* b, A* sum, const A* c, std::int64_t size) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount; i < size;
       i += std::int64_t{gridDim.x} * kThreads * kCount) {
    float x[kCount], y[kCount], z[kCount] = {};
    load_lanes(a + i, x);
    load_lanes(b + i, y);
    if (c != nullptr) load_lanes(c + i, z);
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) x[lane] += c == nullptr ? y[lane] : y[lane] + z[lane];
    store_lanes(x, sum + i);
  }
}

/// Sums in one block, because the losses of a micro-batch's tokens are few.
__global__ void add_sum_kernel(const float* x, std::int64_t size, double* sum) {
  double mine = 0.0;
  for (std::int64_t i = threadIdx.x; i < size; i += kSumThreads) mine += x[i];
  __shared__ double slots[kSumThreads / kWarp];
  const double all = sum_of_block(mine, slots);
  if (threadIdx.x == 0) *sum += all;
}

__global__ void add_counts_kernel(const std::int32_t* x, std::int64_t size, double* sum) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    sum[i] += x[i];
  }
}

/// Copies words of one size. Each thread has several of them in flight.
template <typename Word>
__global__ void copy_kernel(const Word* source, Word* target, std::int64_t size) {
  constexpr int kInFlight = 4;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; first < size;
       first += kInFlight * step) {
    Word words[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * step < size) words[k] = source[first + k * step];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * step < size) target[first + k * step] = words[k];
    }
  }
}

template <typename T>
__global__ void all_finite_kernel(const T* x, std::int64_t stride, std::int64_t num_rows, std::int64_t length,
                                  std::int32_t* found) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_rows * length;
       i += std::int64_t{gridDim.x} * kThreads) {
    if (!isfinite(to_float(x[i / length * stride + i % length]))) *found = 1;
  }
}

/// Returns the same numbers as one row if there are no gaps between rows.
Tensor flat(const Tensor& x) { return x.is_contiguous() ? x.reshape({1, x.num_elements()}) : x; }

}  // namespace

void convert(const Context& op, const Tensor& source, const Tensor& target) {
  if (op.measuring() || source.num_elements() == 0) return;
  const bool both_flat = source.is_contiguous() && target.is_contiguous();
  const Tensor from = both_flat ? flat(source) : source, to = both_flat ? flat(target) : target;
  const std::int64_t num_rows = from.dim(0), length = row_length(from);
  constexpr std::int64_t kMaxGridRows = 65535;
  for_lanes(in_lanes(from, to), [&](auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    const dim3 grid(static_cast<unsigned>(grid_for(op, (length + kCount - 1) / kCount, kThreads)),
                    static_cast<unsigned>(std::min(num_rows, kMaxGridRows)));
    for_float_type(from.dtype(), [&]<typename From>(From) {
      for_float_type(to.dtype(), [&]<typename To>(To) {
        convert_kernel<From, To, kCount><<<grid, kThreads, 0, stream_of(op)>>>(
            numbers<From>(from), from.stride(), numbers<To>(to), to.stride(), num_rows, length);
      });
    });
  });
}

void add(const Context& op, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& c) {
  if (op.measuring() || a.num_elements() == 0) return;
  const std::int64_t size = a.num_elements();
  const bool fits = in_lanes(flat(a), flat(b), flat(sum)) && (!c.defined() || in_lanes(flat(c)));
  for_lanes(fits, [&](auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    for_float_type(a.dtype(), [&]<typename A>(A) {
      for_float_type(b.dtype(), [&]<typename B>(B) {
        launch_early(op, add_kernel<A, B, kCount>,
                     static_cast<unsigned>(grid_for(op, (size + kCount - 1) / kCount, kThreads)), kThreads, 0,
                     numbers<A>(a), numbers<B>(b), numbers<A>(sum), c.defined() ? numbers<A>(c) : nullptr, size);
      });
    });
  });
}

void add_sum(const Context& op, const Tensor& x_N, const Tensor& sum_1) {
  if (op.measuring()) return;
  add_sum_kernel<<<1, kSumThreads, 0, stream_of(op)>>>(numbers<const float>(x_N), x_N.dim(0), numbers<double>(sum_1));
}

void add_counts(const Context& op, const Tensor& x_N, const Tensor& sum_N) {
  if (op.measuring() || x_N.dim(0) == 0) return;
  add_counts_kernel<<<grid_for(op, x_N.dim(0), kThreads), kThreads, 0, stream_of(op)>>>(
      numbers<const std::int32_t>(x_N), x_N.dim(0), numbers<double>(sum_N));
}

// This does not use the driver's copy. As part of a graph, that copy runs on a copy engine, which reaches only two
// thirds of the memory's rate.
void copy(const Context& op, const Tensor& source, const Tensor& target) {
  if (op.measuring() || source.num_elements() == 0) return;
  const auto run = [&]<typename Word>(Word) {
    const auto size = static_cast<std::int64_t>(source.num_bytes() / sizeof(Word));
    copy_kernel<<<grid_for(op, size, kThreads), kThreads, 0, stream_of(op)>>>(static_cast<const Word*>(source.raw()),
                                                                              static_cast<Word*>(target.raw()), size);
  };
  const auto bits = reinterpret_cast<std::uintptr_t>(source.raw()) | reinterpret_cast<std::uintptr_t>(target.raw()) |
                    source.num_bytes();
  if (bits % sizeof(uint4) == 0) return run(uint4{});
  run(std::uint8_t{});
}

void set_zero(const Context& op, const Tensor& target) {
  if (op.measuring()) return;
  TESSERA_CUDA(cudaMemsetAsync(target.raw(), 0, target.num_bytes(), stream_of(op)));
}

// This waits for the GPU. It is called only after a failure.
bool all_finite(const Context& op, const Tensor& x) {
  if (x.num_elements() == 0) return true;
  const ArenaScope scope(*op.arena);
  const Tensor found_1 = op.arena->allocate({1}, DType::kInt32);
  cuda::set_zero(op, found_1);
  for_float_type(x.dtype(), [&]<typename T>(T) {
    all_finite_kernel<<<grid_for(op, x.num_elements(), kThreads), kThreads, 0, stream_of(op)>>>(
        numbers<const T>(x), x.stride(), x.dim(0), row_length(x), numbers<std::int32_t>(found_1));
  });
  std::int32_t found = 0;
  op.cuda->fetch(found_1, &found);
  return found == 0;
}

}  // namespace tessera::cuda
