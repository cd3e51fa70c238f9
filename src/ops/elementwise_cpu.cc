#include <cmath>
#include <cstring>

#include "ops/checks.h"
#include "ops/cpu/types.h"
#include "ops/elementwise.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

constexpr std::int64_t kGrain = 1 << 15;

std::int64_t row_length(const Tensor& x) { return x.dim(0) == 0 ? 0 : x.num_elements() / x.dim(0); }

/// Rows per task, so that a task has about kGrain elements.
std::int64_t row_grain(const Tensor& x) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, row_length(x)));
}

}  // namespace

void convert(const Context& context, const Tensor& source, const Tensor& target) {
  const TraceScope trace(context.trace, "convert");
  TESSERA_CHECK(source.shape() == target.shape(), "{} {}", source.shape().to_string(), target.shape().to_string());
  if (context.measuring()) return;
  const std::int64_t length = row_length(source);
  cpu::for_float_type(source.dtype(), [&]<typename From>(From) {
    cpu::for_float_type(target.dtype(), [&]<typename To>(To) {
      parallel_ranges(source.dim(0), row_grain(source), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const From* from = cpu::row_of<From>(source, i);
          To* to = cpu::row_of<To>(target, i);
          for (std::int64_t j = 0; j < length; ++j) cpu::store(to[j], cpu::load(from[j]));
        }
      });
    });
  });
}

void add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum) {
  const TraceScope trace(context.trace, "add");
  TESSERA_CHECK(a.shape() == b.shape() && a.shape() == sum.shape(), "{} {} {}", a.shape().to_string(),
                b.shape().to_string(), sum.shape().to_string());
  TESSERA_CHECK(a.dtype() == sum.dtype() && (b.dtype() == a.dtype() || b.dtype() == DType::kFloat32));
  TESSERA_CHECK(a.is_contiguous() && b.is_contiguous() && sum.is_contiguous());
  if (context.measuring()) return;
  cpu::for_float_type(a.dtype(), [&]<typename A>(A) {
    cpu::for_float_type(b.dtype(), [&]<typename B>(B) {
      const A* pa = a.data<A>();
      const B* pb = b.data<B>();
      A* out = sum.data<A>();
      parallel_ranges(a.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) cpu::store(out[i], cpu::load(pa[i]) + cpu::load(pb[i]));
      });
    });
  });
}

void copy(const Context& context, const Tensor& source, const Tensor& target) {
  const TraceScope trace(context.trace, "copy");
  TESSERA_CHECK(source.is_contiguous() && target.is_contiguous());
  TESSERA_CHECK(source.shape() == target.shape() && source.dtype() == target.dtype(), "{} {} to {} {}",
                name_of(source.dtype()), source.shape().to_string(), name_of(target.dtype()),
                target.shape().to_string());
  if (context.measuring()) return;
  const auto* from = static_cast<const std::byte*>(source.raw());
  auto* to = static_cast<std::byte*>(target.raw());
  parallel_ranges(static_cast<std::int64_t>(source.num_bytes()), kGrain * 4, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

void set_zero(const Context& context, const Tensor& target) {
  const TraceScope trace(context.trace, "set_zero");
  TESSERA_CHECK(target.is_contiguous());
  if (context.measuring()) return;
  auto* bytes = static_cast<std::byte*>(target.raw());
  parallel_ranges(static_cast<std::int64_t>(target.num_bytes()), kGrain * 4, [&](std::int64_t begin, std::int64_t end) {
    std::memset(bytes + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

bool all_finite(const Context& context, const Tensor& x) {
  if (context.measuring()) return true;
  std::atomic<bool> finite{true};
  const std::int64_t length = row_length(x);
  cpu::for_float_type(x.dtype(), [&]<typename T>(T) {
    parallel_ranges(x.dim(0), row_grain(x), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const T* row = cpu::row_of<T>(x, i);
        for (std::int64_t j = 0; j < length; ++j) {
          if (!std::isfinite(cpu::load(row[j]))) finite = false;
        }
      }
    });
  });
  return finite;
}

}  // namespace tessera
