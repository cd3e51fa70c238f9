#include "model/gemm_site.h"

#include <algorithm>
#include <optional>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/quantize/quantize.h"
#include "ops/runtime/runtime.h"
#include "tensor/step_record.h"

namespace tessera {
namespace {

bool is_high(Precision precision) { return precision == Precision::kHigh; }

/// Returns the rows in use of a routed operand; -1, which means all rows, of another.
std::int64_t rows_in_use(const LayerContext& context, const Tensor& offsets_E1) {
  if (!offsets_E1.defined() || context.op.measuring()) return -1;
  const Tensor last = offsets_E1.rows(offsets_E1.dim(0) - 1, offsets_E1.dim(0));
  if (context.op.cuda == nullptr) return last.data<std::int32_t>()[0];
  std::int32_t num_rows = 0;
  context.op.cuda->fetch(last, &num_rows);
  return num_rows;
}

}  // namespace

OperandForms OperandForms::operator|(const OperandForms& other) const {
  const auto join = [](const std::optional<mx::Format>& a, const std::optional<mx::Format>& b) {
    TESSERA_CHECK(!a || !b || *a == *b);
    return a ? a : b;
  };
  return {.plain = plain || other.plain, .rows = join(rows, other.rows), .columns = join(columns, other.columns)};
}

GemmOperand allocate_operand(const LayerContext& context, const Shape& shape, const OperandForms& forms,
                             const GemmOperand& have) {
  const auto allocate = [&](Shape s, DType dtype) { return context.allocate(s, dtype); };
  GemmOperand operand;
  if (forms.plain) operand.plain = have.plain.defined() ? have.plain : context.allocate(shape);
  if (forms.rows) operand.rows = have.rows.defined() ? have.rows : allocate_quantized(shape, *forms.rows, allocate);
  if (forms.columns) {
    operand.columns =
        have.columns.defined() ? have.columns : allocate_quantized(mx::transposed(shape), *forms.columns, allocate);
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

InputForms GemmSite::product_forms(const LayerContext& context) const {
  const SitePrecision& precision = context.precision(id_);
  InputForms forms{.forward = {.plain = is_high(precision.fprop) || context.probe != nullptr},
                   .wgrad = {.plain = is_high(precision.wgrad)}};
  if (!is_high(precision.fprop)) forms.forward.rows = precision.input;
  if (!is_high(precision.wgrad)) forms.wgrad.columns = precision.wgrad_input;
  return forms;
}

OperandForms GemmSite::gradient_forms(const LayerContext& context) const {
  const SitePrecision& precision = context.precision(id_);
  OperandForms forms{.plain = is_high(precision.dgrad) || is_high(precision.wgrad) || context.probe != nullptr};
  if (!is_high(precision.dgrad)) forms.rows = precision.gradient;
  if (!is_high(precision.wgrad)) forms.columns = precision.wgrad_gradient;
  return forms;
}

std::int64_t GemmSite::row_alignment(const QuantizedWeights& quantized) const {
  const SitePrecision& precision = quantized.precision(id_);
  return is_high(precision.wgrad) ? 1 : precision.wgrad_gradient.along;
}

void GemmSite::observe_forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1) const {
  SiteProbe* const probe = context.observer();
  if (probe == nullptr) return;
  const bool quantizes = !is_high(context.precision(id_).fprop);  // x may be quantized for another site that reads it
  probe->observe(context.op, id_, SiteProbe::Role::kInput, x.plain, quantizes ? x.rows : mx::Quantized(),
                 rows_in_use(context, offsets_E1));
  const ArenaScope scope(*context.op.arena);
  const Tensor w = context.model->parameters->rounded_weight(context.op, id_);
  mx::Quantized rows;
  if (quantizes) rows = context.model->quantized->weight(id_).rows;
  if (quantizes && !rows.defined()) {  // products read it wide
    rows = allocate_quantized(w.shape(), context.precision(id_).weight, [&](const Shape& shape, DType dtype) {
      return context.op.arena->allocate(shape, dtype);
    });
    quantize(context.op, w, rows, {});
  }
  probe->observe(context.op, id_, SiteProbe::Role::kWeight, w, rows, -1);
}

void GemmSite::multiply_forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1,
                                const Tensor& y, Write write) const {
  observe_forward(context, x, offsets_E1);
  const auto multiply = [&](const auto& input, const auto& weight) {
    if (offsets_E1.defined()) {
      grouped_linear_forward(context.op, input, weight, offsets_E1, y);
    } else {
      linear_forward(context.op, input, weight, y, write);
    }
  };
  if (is_high(context.precision(id_).fprop)) {
    multiply(x.plain, context.weight(id_));
  } else {
    multiply(x.rows, context.model->quantized->weight(id_));
  }
}

void GemmSite::multiply_dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& offsets_E1,
                              const Tensor& d_x, Write write) const {
  if (SiteProbe* const probe = context.observer()) {
    probe->observe(context.op, id_, SiteProbe::Role::kGradient, d_y.plain, d_y.rows, rows_in_use(context, offsets_E1));
  }
  const auto multiply = [&](const auto& gradient, const auto& weight) {
    if (offsets_E1.defined()) {
      grouped_linear_dgrad(context.op, gradient, weight, offsets_E1, d_x);
    } else {
      linear_dgrad(context.op, gradient, weight, d_x, write);
    }
  };
  if (is_high(context.precision(id_).dgrad)) {
    multiply(d_y.plain, context.weight(id_));
  } else {
    multiply(d_y.rows, context.model->quantized->weight(id_));
  }
}

void GemmSite::multiply_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x,
                              const Tensor& offsets_E1) const {
  if (context.deferred != nullptr) {
    context.deferred->add(context, *this, d_y, x, offsets_E1);
  } else {
    compute_wgrad(context, d_y, x, offsets_E1);
  }
}

void GemmSite::compute_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x,
                             const Tensor& offsets_E1) const {
  const Tensor d_w = context.gradient(id_);
  const auto multiply = [&](const Context& op, const auto& gradient, const auto& input, Write write) {
    if (offsets_E1.defined()) {
      grouped_linear_wgrad(op, gradient, input, offsets_E1, d_w, write);
    } else {
      linear_wgrad(op, gradient, input, d_w, write);
    }
  };
  const auto add = [&](const Context& op, Write write) {
    if (is_high(context.precision(id_).wgrad)) {
      multiply(op, d_y.plain, x.plain, write);
    } else {
      multiply(op, d_y.columns, x.columns, write);
    }
  };
  if (!context.op.measuring()) return add(context.op, context.gradients->gradient_write(id_));
  // The first product of a step assigns the gradient. Both are measured, and the first is recorded.
  add(context.op, Write::kAssign);
  Context unrecorded = context.op;
  unrecorded.record = nullptr;
  add(unrecorded, Write::kAccumulate);
}

void GemmSite::clear_unassigned(const LayerContext& context) const {
  if (context.op.measuring() || context.gradients->gradient_write(id_) == Write::kAccumulate) return;
  set_zero(context.op, context.gradient(id_));
}

bool LinearSite::gathers(const LayerContext& context) const {
  return sharding_ == Sharding::kColumn && are_sharded(context, tokens_);
}

InputForms LinearSite::input_forms(const LayerContext& context) const {
  // All ranks' tokens are quantized after they were gathered.
  if (gathers(context)) return {.forward = {.plain = true}, .wgrad = {.plain = true}};
  return product_forms(context);
}

OperandForms LinearSite::forms_for(const LayerContext& context, Reader reader) const {
  const InputForms forms = product_forms(context);
  switch (reader) {
    case Reader::kForward:
      return forms.forward;
    case Reader::kWgrad:
      return forms.wgrad;
    case Reader::kBoth:
      break;
  }
  return forms.forward | forms.wgrad;
}

GemmOperand LinearSite::gather_input(const LayerContext& context, const GemmOperand& x_tN, Reader reader) const {
  if (!gathers(context)) return x_tN;
  const Tensor x_TN = context.allocate({num_tokens(context, tokens_), x_tN.plain.dim(1)}, x_tN.plain.dtype());
  all_gather(context, tokens_, x_tN.plain, x_TN, name());
  return quantized_operand(context, x_TN, forms_for(context, reader));
}

void LinearSite::forward(const LayerContext& context, const GemmOperand& x, const Tensor& y, Write write) const {
  if (sharding_ != Sharding::kRow) return multiply_forward(context, x, {}, y, write);
  sum_over_ranks(context, tokens_, y, write, name(),
                 [&](const Tensor& target, Write how) { multiply_forward(context, x, {}, target, how); });
}

GemmOperand LinearSite::gradient(const LayerContext& context, const Tensor& d_y) const {
  const Tensor whole = sharding_ == Sharding::kRow ? gather_tokens(context, d_y, name()) : d_y;
  return quantized_operand(context, whole, gradient_forms(context));
}

void LinearSite::dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& d_x, Write write) const {
  if (sharding_ != Sharding::kColumn) return multiply_dgrad(context, d_y, {}, d_x, write);
  sum_over_ranks(context, tokens_, d_x, write, name(),
                 [&](const Tensor& target, Write how) { multiply_dgrad(context, d_y, {}, target, how); });
}

void LinearSite::wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x) const {
  multiply_wgrad(context, d_y, x, {});
}

void LinearSite::backward(const LayerContext& context, const Tensor& d_y, const GemmOperand& x, const Tensor& d_x,
                          Write write) const {
  const ArenaScope scope(*context.op.arena);
  const GemmOperand d_output = gradient(context, d_y);
  wgrad(context, d_output, x);
  dgrad(context, d_output, d_x, write);
}

void GroupedSite::forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1,
                          const Tensor& y) const {
  multiply_forward(context, x, offsets_E1, y, Write::kAssign);
}

void GroupedSite::dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& offsets_E1,
                        const Tensor& d_x) const {
  multiply_dgrad(context, d_y, offsets_E1, d_x, Write::kAssign);
}

void GroupedSite::wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x,
                        const Tensor& offsets_E1) const {
  multiply_wgrad(context, d_y, x, offsets_E1);
}

Tensor DeferredWgrads::keep(const LayerContext& context, const Tensor& tensor) const {
  if (!tensor.defined() || context.saved_arena->contains(tensor) || arena_->contains(tensor)) return tensor;
  const Tensor copied = arena_->allocate(tensor.shape(), tensor.dtype());
  copy(context.op, tensor, copied);
  return copied;
}

mx::Quantized DeferredWgrads::keep(const LayerContext& context, const mx::Quantized& quantized) const {
  return {keep(context, quantized.elements), keep(context, quantized.scales), quantized.format};
}

GemmOperand DeferredWgrads::keep(const LayerContext& context, const GemmSite& site, const GemmOperand& operand) const {
  GemmOperand result;
  if (is_high(context.precision(site.id()).wgrad)) {
    result.plain = keep(context, operand.plain);
  } else {
    result.columns = keep(context, operand.columns);
  }
  return result;
}

void DeferredWgrads::push(const Wgrad& wgrad) {
  TESSERA_CHECK(wgrads_.size() < wgrads_.capacity(), "{} gradients deferred", wgrads_.size());
  wgrads_.push_back(wgrad);
}

void DeferredWgrads::add(const LayerContext& context, const GemmSite& site, const GemmOperand& d_y,
                         const GemmOperand& x, const Tensor& offsets_E1) {
  push({&site, keep(context, site, d_y), keep(context, site, x), keep(context, offsets_E1)});
}

void DeferredWgrads::add_dispatched(const LayerContext& context, const GroupedSite& site, const GemmOperand& d_y,
                                    const GemmOperand& y, const DispatchSaved& dispatch) {
  GemmOperand kept = keep(context, y.plain);
  kept.rows = keep(context, y.rows);
  push({&site, keep(context, site, d_y), kept, keep(context, dispatch.offsets_e1), &dispatch});
}

void DeferredWgrads::run(const LayerContext& context) {
  for (const Wgrad& wgrad : wgrads_) {
    const ArenaScope scope(*context.op.arena);
    std::optional<StepRecord::Rows> rows;  // of a grouped site: a balanced load uses fewer than there is room for
    if (wgrad.offsets_E1.defined()) {
      const Dispatcher& dispatcher = *context.model->dispatcher;
      const std::int64_t tokens = context.num_local_tokens() * dispatcher.options().num_domains;
      const std::int64_t alignment = wgrad.site->row_alignment(*context.model->quantized);
      const std::string& site = wgrad.site->name();
      rows.emplace(context.op.record, std::string_view(site).substr(0, site.rfind(".experts")),
                   dispatcher.max_rows(tokens, alignment), dispatcher.expected_rows(tokens, alignment));
    }
    GemmOperand x = wgrad.x;
    if (wgrad.dispatch != nullptr) {
      Dispatcher& dispatcher = *context.model->dispatcher;
      x = allocate_operand(context, {wgrad.dispatch->num_rows(), context.config().dim},
                           wgrad.site->product_forms(context).wgrad,
                           dispatcher.rows_in_window(context.op, *wgrad.dispatch));
      dispatcher.dispatch_again(context.op, wgrad.x, *wgrad.dispatch, x);
    }
    wgrad.site->compute_wgrad(context, wgrad.d_y, x, wgrad.offsets_E1);
  }
  wgrads_.clear();
}

}  // namespace tessera
