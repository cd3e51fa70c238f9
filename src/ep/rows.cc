#include "ep/rows.h"

#include <cstring>
#include <optional>

#include "ops/cpu/operand_output.h"
#include "ops/cpu/sum_rows.h"
#include "ops/kit/checks.h"
#include "ops/quantize/quantize.h"
#include "ops/routing/permute.h"

namespace tessera::ep {
namespace {

constexpr std::int64_t kRowsPerTask = 64;

/// Copies row `source` of q to row r of `to`. If `source` is -1, row r becomes 0.
void copy_packed_row(const mx::Quantized& q, std::int64_t source, const mx::Quantized& to, std::int64_t r) {
  const auto copy = [&](const Tensor& from_part, const Tensor& to_part) {
    if (source < 0) {
      std::memset(row_bytes(to_part, r), 0, bytes_of_row(to_part));
    } else {
      std::memcpy(row_bytes(to_part, r), row_bytes(from_part, source), bytes_of_row(to_part));
    }
  };
  copy(q.elements, to.elements);
  copy(q.scales, to.scales);
}

/// Writes row `source` of the received rows to y as numbers. If `source` is -1, y becomes 0.
template <typename T>
void unpack_row(const Payload& received, std::int64_t source, std::int64_t dim, T* y) {
  if (source < 0) {
    std::fill_n(y, dim, T{});
  } else if (received.packed.defined()) {
    const mx::Quantized& q = received.packed;
    cpu::kernels().dequantize_row({.elements = q.element_bytes() + source * dim,
                                   .scales = q.scale_bytes() + source * q.scales.dim(1),
                                   .format = q.format,
                                   .count = dim,
                                   .out = y},
                                  cpu::element_of(DTypeOf<T>::value));
  } else if (const T* x = cpu::row_of<T>(received.plain, source); x != y) {
    std::copy_n(x, dim, y);
  }
}

}  // namespace

Payload Payload::first_rows(std::int64_t count) const {
  if (plain.defined()) return {.plain = plain.rows(0, count), .packed = {}};
  return {.plain = {}, .packed = {packed.elements.rows(0, count), packed.scales.rows(0, count), packed.format}};
}

Payload allocate_payload(const Context& op, std::int64_t num_rows, std::int64_t dim, DType dtype,
                         PayloadPrecision precision) {
  return allocate_payload(num_rows, dim, dtype, precision,
                          [&](const Shape& shape, DType type) { return op.arena->allocate(shape, type); });
}

Payload make_payload(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision) {
  const Tensor& plain = y_tD.plain;
  if (precision == PayloadPrecision::kDefault) return {.plain = plain, .packed = {}};
  if (!plain.defined()) return {.plain = {}, .packed = y_tD.rows};
  const Payload payload = allocate_payload(op, plain.dim(0), plain.dim(1), plain.dtype(), precision);
  quantize(op, plain, payload.packed, {});
  return payload;
}

void record_call(const Context& op, const char* call, const DispatchOptions& options, int num_ranks,
                 PayloadPrecision precision, const TokenRouting& routing, const DispatchLayer& layer) {
  if (op.record == nullptr || !op.measuring() || num_ranks == 1) return;
  const auto dim = static_cast<double>(options.dim);
  const double row_bytes = precision == PayloadPrecision::kMxfp8 ? dim * (1.0 + 1.0 / mx::kBlock)
                                                                 : dim * static_cast<double>(size_of(options.dtype));
  op.record->begin_transfer({.kind = call,
                             .axis = "ep",
                             .num_ranks = num_ranks,
                             .bytes = static_cast<double>(routing.expert_ids_tK.dim(0)) * row_bytes,
                             .choices = {.num_experts = options.num_experts, .top_k = options.top_k},
                             .layer = std::string(layer.name),
                             .pass = {}});
}

namespace {

/// Delivers rows on a GPU with existing operators.
void deliver_by_operators(const Context& op, const Payload& received, DType dtype, const Tensor& source_of_row_R,
                          const Tensor& num_rows_1, const GemmOperand& x_RD) {
  GemmOperand computed = x_RD;
  Tensor table = received.plain;
  if (received.packed.defined()) {
    const mx::Quantized& packed = received.packed;
    if (x_RD.rows.defined() && x_RD.rows.format == packed.format) {
      gather_row_bytes(op, packed.elements, source_of_row_R, 1, x_RD.rows.elements);
      gather_row_bytes(op, packed.scales, source_of_row_R, 1, x_RD.rows.scales);
      computed.rows = {};
    }
    if (!computed.plain.defined() && !computed.quantized()) return;
    table = op.arena->allocate(packed.elements.shape(), dtype);
    dequantize(op, packed, table);
  }
  gather_rows(op, table, source_of_row_R, 1, num_rows_1, computed);
}

void deliver_on_cpu(const Context& op, const Payload& received, DType dtype, const Tensor& source_of_row_R,
                    const Tensor& num_rows_1, const GemmOperand& x_RD) {
  const std::int64_t num_rows = source_of_row_R.dim(0), dim = received.parts()[0].dim(1);
  const bool packed = received.packed.defined();
  const bool copies_packed = packed && x_RD.rows.defined() && x_RD.rows.format == received.packed.format;
  GemmOperand computed = x_RD;
  if (copies_packed) computed.rows = {};
  std::optional<cpu::OperandOutput> output;
  if (computed.plain.defined() || computed.quantized()) output.emplace(op, computed, dim, dtype);
  if (op.measuring()) return;
  const auto* sources = source_of_row_R.data<std::int32_t>();
  cpu::for_float_type(dtype, [&]<typename T>(T) {
    const std::int64_t rows_per_task = output ? output->rows_per_task(kRowsPerTask) : kRowsPerTask;
    parallel_ranges(cpu::computed_rows(num_rows_1, num_rows), rows_per_task, [&](std::int64_t begin, std::int64_t end) {
      if (copies_packed) {
        for (std::int64_t r = begin; r < end; ++r) copy_packed_row(received.packed, sources[r], x_RD.rows, r);
      }
      if (!output) return;
      T* y = output->rows<T>(begin);
      for (std::int64_t r = begin; r < end; ++r, y += dim) unpack_row(received, sources[r], dim, y);
      output->finish<T>(begin, end);
    });
  });
}

}  // namespace

void deliver_rows(const Context& op, const Payload& received, DType dtype, const Tensor& source_of_row_R,
                  const Tensor& num_rows_1, const GemmOperand& x_RD) {
  const TraceScope trace(op.trace, "ep.deliver_rows");
  const std::int64_t num_rows = source_of_row_R.dim(0);
  TESSERA_CHECK_TENSOR(source_of_row_R, DType::kInt32, {num_rows});
  check_operand(x_RD, num_rows, received.parts()[0].dim(1), dtype);
  const auto deliver = op.target() == Device::kCuda ? deliver_by_operators : deliver_on_cpu;
  deliver(op, received, dtype, source_of_row_R, num_rows_1, x_RD);
}

void sum_rows(DType dtype, std::span<const void* const> rows, const float* weights, std::int64_t length, Write write,
              void* y) {
  cpu::for_float_type(dtype, [&]<typename T>(T) {
    const auto row = [&](std::int64_t i) { return static_cast<const T*>(rows[static_cast<std::size_t>(i)]); };
    cpu::sum_rows(static_cast<std::int64_t>(rows.size()), row, weights, length, write, static_cast<T*>(y));
  });
}

}  // namespace tessera::ep
