#include "model/gemm_site.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"
#include "ops/runtime/runtime.h"

namespace tessera {
namespace {

bool is_high(Precision precision) { return precision == Precision::kHigh; }

/// Rows in use of a routed operand; all of another.
std::int64_t rows_in_use(const LayerContext& context, const Tensor& offsets_E1) {
  if (!offsets_E1.defined() || context.op.measuring()) return -1;
  const Tensor last = offsets_E1.rows(offsets_E1.dim(0) - 1, offsets_E1.dim(0));
  if (context.op.cuda == nullptr) return last.data<std::int32_t>()[0];
  std::int32_t num_rows = 0;
  context.op.cuda->fetch(last, &num_rows);
  return num_rows;
}

void observe(const LayerContext& context, ParamId site, SiteProbe::Role role, const Tensor& plain,
             const mx::Quantized& quantized, const Tensor& offsets_E1 = {}) {
  if (context.probe == nullptr || context.repeated) return;
  context.probe->observe(context.op, site, role, plain, quantized, rows_in_use(context, offsets_E1));
}

void observe_forward(const LayerContext& context, const GemmOperand& x, ParamId site, const Tensor& offsets_E1 = {}) {
  if (context.probe == nullptr || context.repeated) return;
  const bool quantizes = !is_high(context.precision(site).fprop);  // x may be quantized for another site that reads it
  observe(context, site, SiteProbe::Role::kInput, x.plain, quantizes ? x.rows : mx::Quantized(), offsets_E1);
  const ArenaScope scope(*context.op.arena);
  const Tensor w = context.weight(site);
  mx::Quantized rows;
  if (quantizes) rows = context.quantized->weight(site).rows;
  if (quantizes && !rows.defined()) {  // products read it wide
    rows = allocate_quantized(w.shape(), context.precision(site).weight, [&](const Shape& shape, DType dtype) {
      return context.op.arena->allocate(shape, dtype);
    });
    quantize(context.op, w, rows, {});
  }
  observe(context, site, SiteProbe::Role::kWeight, w, rows);
}

/// product(write) into the gradient of a site's weight: the first of a step assigns it. Both are measured.
template <typename Product>
void add_to_gradient(const LayerContext& context, ParamId site, Product&& product) {
  if (context.op.measuring()) product(Write::kAssign);
  product(context.op.measuring() ? Write::kAccumulate : context.gradient_write(site));
}

}  // namespace

OperandForms OperandForms::operator|(const OperandForms& other) const {
  const bool quantizes = rows || columns, other_quantizes = other.rows || other.columns;
  TESSERA_CHECK(!quantizes || !other_quantizes || format == other.format);
  return {.plain = plain || other.plain,
          .rows = rows || other.rows,
          .columns = columns || other.columns,
          .format = quantizes ? format : other.format};
}

InputForms input_forms(const LayerContext& context, std::initializer_list<ParamId> sites) {
  InputForms forms;
  for (const ParamId site : sites) {
    const SitePrecision& precision = context.precision(site);
    const bool high_forward = is_high(precision.fprop), high_wgrad = is_high(precision.wgrad);
    forms.forward = forms.forward | OperandForms{.plain = high_forward || context.probe != nullptr,
                                                 .rows = !high_forward,
                                                 .format = precision.activation};
    forms.wgrad =
        forms.wgrad | OperandForms{.plain = high_wgrad, .columns = !high_wgrad, .format = precision.activation};
  }
  return forms;
}

OperandForms gradient_forms(const LayerContext& context, ParamId site) {
  const SitePrecision& precision = context.precision(site);
  return {.plain = is_high(precision.dgrad) || is_high(precision.wgrad) || context.probe != nullptr,
          .rows = !is_high(precision.dgrad),
          .columns = !is_high(precision.wgrad),
          .format = precision.activation};
}

GemmOperand allocate_operand(const LayerContext& context, const Shape& shape, const OperandForms& forms,
                             const GemmOperand& have) {
  const auto allocate = [&](Shape s, DType dtype) { return context.allocate(s, dtype); };
  GemmOperand operand;
  if (forms.plain) operand.plain = have.plain.defined() ? have.plain : context.allocate(shape);
  if (forms.rows) operand.rows = have.rows.defined() ? have.rows : allocate_quantized(shape, forms.format, allocate);
  if (forms.columns) {
    operand.columns =
        have.columns.defined() ? have.columns : allocate_quantized(mx::transposed(shape), forms.format, allocate);
  }
  return operand;
}

GemmOperand quantized_operand(const LayerContext& context, const Tensor& x, const OperandForms& forms,
                              const GemmOperand& have) {
  GemmOperand here = have;
  here.plain = x;
  const GemmOperand operand = allocate_operand(context, x.shape(), forms, here);
  if (operand.quantized()) quantize(context.op, x, operand.rows, operand.columns);
  return operand;
}

void linear_forward(const LayerContext& context, const GemmOperand& x, ParamId site, const Tensor& y, Write write) {
  observe_forward(context, x, site);
  if (is_high(context.precision(site).fprop)) {
    linear_forward(context.op, x.plain, context.weight(site), y, write);
  } else {
    linear_forward(context.op, x.rows, context.quantized->weight(site), y, write);
  }
}

void linear_dgrad(const LayerContext& context, const GemmOperand& d_y, ParamId site, const Tensor& d_x, Write write) {
  observe(context, site, SiteProbe::Role::kGradient, d_y.plain, d_y.rows);
  if (is_high(context.precision(site).dgrad)) {
    linear_dgrad(context.op, d_y.plain, context.weight(site), d_x, write);
  } else {
    linear_dgrad(context.op, d_y.rows, context.quantized->weight(site), d_x, write);
  }
}

void linear_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site) {
  if (context.deferred != nullptr) return context.deferred->add(context, d_y, x, site, {});
  add_to_gradient(context, site, [&](Write write) {
    if (is_high(context.precision(site).wgrad)) {
      linear_wgrad(context.op, d_y.plain, x.plain, context.gradient(site), write);
    } else {
      linear_wgrad(context.op, d_y.columns, x.columns, context.gradient(site), write);
    }
  });
}

void grouped_linear_forward(const LayerContext& context, const GemmOperand& x, ParamId site, const Tensor& offsets_E1,
                            const Tensor& y) {
  observe_forward(context, x, site, offsets_E1);
  if (is_high(context.precision(site).fprop)) {
    grouped_linear_forward(context.op, x.plain, context.weight(site), offsets_E1, y);
  } else {
    grouped_linear_forward(context.op, x.rows, context.quantized->weight(site), offsets_E1, y);
  }
}

void grouped_linear_dgrad(const LayerContext& context, const GemmOperand& d_y, ParamId site, const Tensor& offsets_E1,
                          const Tensor& d_x) {
  observe(context, site, SiteProbe::Role::kGradient, d_y.plain, d_y.rows, offsets_E1);
  if (is_high(context.precision(site).dgrad)) {
    grouped_linear_dgrad(context.op, d_y.plain, context.weight(site), offsets_E1, d_x);
  } else {
    grouped_linear_dgrad(context.op, d_y.rows, context.quantized->weight(site), offsets_E1, d_x);
  }
}

void grouped_linear_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site,
                          const Tensor& offsets_E1) {
  if (context.deferred != nullptr) return context.deferred->add(context, d_y, x, site, offsets_E1);
  add_to_gradient(context, site, [&](Write write) {
    if (is_high(context.precision(site).wgrad)) {
      grouped_linear_wgrad(context.op, d_y.plain, x.plain, offsets_E1, context.gradient(site), write);
    } else {
      grouped_linear_wgrad(context.op, d_y.columns, x.columns, offsets_E1, context.gradient(site), write);
    }
  });
}

void DeferredWgrads::add(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site,
                         const Tensor& offsets_E1) {
  TESSERA_CHECK(wgrads_.size() < wgrads_.capacity(), "{} gradients put off", wgrads_.size());
  const auto keep_tensor = [&](const Tensor& tensor) {
    if (context.kept->contains(tensor)) return tensor;
    const Tensor copied = context.kept->allocate(tensor.shape(), tensor.dtype());
    copy(context.op, tensor, copied);
    return copied;
  };
  const bool is_high_precision = is_high(context.precision(site).wgrad);
  // Of all forms, the one that the product reads.
  const auto keep = [&](const GemmOperand& operand) {
    GemmOperand result;
    if (is_high_precision) {
      result.plain = keep_tensor(operand.plain);
    } else {
      result.columns = {keep_tensor(operand.columns.elements), keep_tensor(operand.columns.scales),
                        operand.columns.format};
    }
    return result;
  };
  wgrads_.push_back({keep(d_y), keep(x), site, offsets_E1.defined() ? keep_tensor(offsets_E1) : Tensor()});
}

void DeferredWgrads::run(const LayerContext& context) {
  LayerContext now = context;
  now.deferred = nullptr;
  for (const Wgrad& wgrad : wgrads_) {
    if (wgrad.offsets_E1.defined()) {
      grouped_linear_wgrad(now, wgrad.d_y, wgrad.x, wgrad.site, wgrad.offsets_E1);
    } else {
      linear_wgrad(now, wgrad.d_y, wgrad.x, wgrad.site);
    }
  }
  wgrads_.clear();
}

std::int64_t row_alignment(const QuantizedWeights& quantized, std::initializer_list<ParamId> sites) {
  std::int64_t alignment = 1;
  for (const ParamId site : sites) {
    const SitePrecision& precision = quantized.precision(site);
    if (!is_high(precision.wgrad)) alignment = std::max<std::int64_t>(alignment, precision.activation.along);
  }
  return alignment;
}

}  // namespace tessera
