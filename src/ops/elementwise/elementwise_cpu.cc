#include <cmath>
#include <cstring>

#include "ops/cpu/types.h"
#include "ops/elementwise/elementwise.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kElementwiseGrain = 1 << 15;

std::int64_t row_length(const Tensor& x) { return x.dim(0) == 0 ? 0 : x.num_elements() / x.dim(0); }

/// Returns the number of rows per task. A task then has about kElementwiseGrain elements.
std::int64_t row_grain(const Tensor& x) {
  return std::max<std::int64_t>(1, kElementwiseGrain / std::max<std::int64_t>(1, row_length(x)));
}

}  // namespace

void convert(const Context& context, const Tensor& source, const Tensor& target) {
  if (context.measuring()) return;
  const std::int64_t length = row_length(source);
  for_float_type(source.dtype(), [&]<typename From>(From) {
    for_float_type(target.dtype(), [&]<typename To>(To) {
      parallel_ranges(source.dim(0), row_grain(source), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const From* from = row_of<From>(source, i);
          To* to = row_of<To>(target, i);
          for (std::int64_t j = 0; j < length; ++j) store(to[j], load(from[j]));
        }
      });
    });
  });
}

void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& c) {
  if (context.measuring()) return;
  for_float_type(a.dtype(), [&]<typename A>(A) {
    for_float_type(b.dtype(), [&]<typename B>(B) {
      const A* pa = a.data<A>();
      const B* pb = b.data<B>();
      const A* pc = c.defined() ? c.data<A>() : nullptr;
      A* out = sum.data<A>();
      parallel_ranges(a.num_elements(), kElementwiseGrain, [&](std::int64_t begin, std::int64_t end) {
        if (pc == nullptr) {
          for (std::int64_t i = begin; i < end; ++i) store(out[i], load(pa[i]) + load(pb[i]));
        } else {
          for (std::int64_t i = begin; i < end; ++i) store(out[i], load(pa[i]) + (load(pb[i]) + load(pc[i])));
        }
      });
    });
  });
}

void add_sum(const Context& context, const Tensor& x_N, const Tensor& sum_1) {
  if (context.measuring()) return;
  double sum = 0.0;
  for (std::int64_t i = 0; i < x_N.dim(0); ++i) sum += static_cast<double>(x_N.data<float>()[i]);
  sum_1.data<double>()[0] += sum;
}

void add_counts(const Context& context, const Tensor& x_N, const Tensor& sum_N) {
  if (context.measuring()) return;
  for (std::int64_t i = 0; i < x_N.dim(0); ++i) sum_N.data<double>()[i] += x_N.data<std::int32_t>()[i];
}

void copy(const Context& context, const Tensor& source, const Tensor& target) {
  if (context.measuring()) return;
  const auto* from = static_cast<const std::byte*>(source.raw());
  auto* to = static_cast<std::byte*>(target.raw());
  parallel_ranges(static_cast<std::int64_t>(source.num_bytes()), kElementwiseGrain * 4,
                  [&](std::int64_t begin, std::int64_t end) {
                    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
                  });
}

void set_zero(const Context& context, const Tensor& target) {
  if (context.measuring()) return;
  auto* bytes = static_cast<std::byte*>(target.raw());
  parallel_ranges(static_cast<std::int64_t>(target.num_bytes()), kElementwiseGrain * 4,
                  [&](std::int64_t begin, std::int64_t end) {
                    std::memset(bytes + begin, 0, static_cast<std::size_t>(end - begin));
                  });
}

bool all_finite(const Context&, const Tensor& x) {
  std::atomic<bool> finite{true};
  const std::int64_t length = row_length(x);
  for_float_type(x.dtype(), [&]<typename T>(T) {
    parallel_ranges(x.dim(0), row_grain(x), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const T* row = row_of<T>(x, i);
        for (std::int64_t j = 0; j < length; ++j) {
          if (!std::isfinite(load(row[j]))) finite = false;
        }
      }
    });
  });
  return finite;
}

}  // namespace tessera::cpu
