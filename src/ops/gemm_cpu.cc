#include <dnnl.hpp>
#include <unordered_map>

#include "ops/cpu/gemm_float32.h"
#include "ops/elementwise.h"
#include "ops/gemm.h"
#include "ops/gemm_key.h"

namespace tessera {
namespace {

dnnl::memory::data_type library_type(DType dtype) {
  return dtype == DType::kFloat32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

/// Instruction sets are bit masks; a newer one holds the bits of those it extends.
bool has_isa(dnnl::cpu_isa wanted) {
  const auto mask = static_cast<unsigned>(wanted);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & mask) == mask;
}

struct Kernel {
  dnnl::matmul primitive;
  dnnl::memory a, b, c, scratch;
  std::size_t scratch_bytes;
};

dnnl::memory::desc matrix(std::int64_t rows, std::int64_t columns, std::int64_t stride, bool transpose, DType dtype) {
  const dnnl::memory::dims strides = transpose ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {{rows, columns}, library_type(dtype), strides};
}

}  // namespace

struct GemmLibrary::Implementation {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::unordered_map<GemmKey, Kernel, GemmKeyHash> kernels;
  // Before AVX-512 the library has no bfloat16 products; then operands are widened to float32.
  bool has_bfloat16 = has_isa(dnnl::cpu_isa::avx512_core);

  Kernel& kernel_for(const GemmKey& key) {
    const auto found = kernels.find(key);
    if (found != kernels.end()) return found->second;

    const auto a = matrix(key.m, key.k, key.stride_a, key.transpose_a, key.dtype);
    const auto b = matrix(key.k, key.n, key.stride_b, key.transpose_b, key.dtype);
    const auto c = matrix(key.m, key.n, key.stride_c, false, key.dtype_c);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (key.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc description(engine, a, b, c, attributes);
#else
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), attributes, engine);
#endif
    const auto scratch = description.scratchpad_desc();
    Kernel kernel{
        dnnl::matmul(description),        dnnl::memory(a, engine, nullptr),       dnnl::memory(b, engine, nullptr),
        dnnl::memory(c, engine, nullptr), dnnl::memory(scratch, engine, nullptr), scratch.get_size()};
    return kernels.emplace(key, std::move(kernel)).first->second;
  }
};

GemmLibrary::GemmLibrary() : implementation_(std::make_unique<Implementation>()) {}
GemmLibrary::~GemmLibrary() = default;

namespace cpu {

void gemm_float32(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                  const Tensor& c, Write write) {
  if (c.dtype() == DType::kFloat32) {
    tessera::gemm(context, a, transpose_a, b, transpose_b, c, write);
    return;
  }
  const ArenaScope scope(*context.arena);
  const Tensor c_wide = context.arena->allocate(c.shape(), DType::kFloat32);
  if (write == Write::kAccumulate) tessera::convert(context, c, c_wide);
  tessera::gemm(context, a, transpose_a, b, transpose_b, c_wide, write);
  tessera::convert(context, c_wide, c);
}

namespace {

/// For operands of two types, and processors without bfloat16 products.
void gemm_widened(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                  const Tensor& c, Write write) {
  const ArenaScope scope(*context.arena);
  const auto widened = [&](const Tensor& x) {
    if (x.dtype() == DType::kFloat32) return x;
    const Tensor wide = context.arena->allocate(x.shape(), DType::kFloat32);
    tessera::convert(context, x, wide);
    return wide;
  };
  gemm_float32(context, widened(a), transpose_a, widened(b), transpose_b, c, write);
}

}  // namespace

void gemm(const Context& context, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
          Write write) {
  const std::int64_t m = c.dim(0), n = c.dim(1), k = a.dim(transpose_a ? 0 : 1);
  auto& library = context.gemm->implementation();
  if (a.dtype() != b.dtype() || (a.dtype() == DType::kBFloat16 && !library.has_bfloat16)) {
    gemm_widened(context, a, transpose_a, b, transpose_b, c, write);
    return;
  }
  Kernel& kernel = library.kernel_for(GemmKey(a, transpose_a, b, transpose_b, c, write));
  const ArenaScope scope(*context.arena);
  std::byte* scratch = context.arena->allocate_bytes(kernel.scratch_bytes);
  if (context.measuring()) return;

  kernel.a.set_data_handle(a.raw());
  kernel.b.set_data_handle(b.raw());
  kernel.c.set_data_handle(c.raw());
  kernel.scratch.set_data_handle(scratch);
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, kernel.a.get()},
                                       {DNNL_ARG_WEIGHTS, kernel.b.get()},
                                       {DNNL_ARG_DST, kernel.c.get()},
                                       {DNNL_ARG_SCRATCHPAD, kernel.scratch.get()}};
  const dnnl_status_t status =
      dnnl_primitive_execute(kernel.primitive.get(), library.stream.get(), std::size(arguments), arguments);
  TESSERA_CHECK(status == dnnl_success, "oneDNN matmul {}x{}x{}: status {}", m, n, k, static_cast<int>(status));
  library.stream.wait();
}

}  // namespace cpu
}  // namespace tessera
