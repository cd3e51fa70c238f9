#include "model/head.h"

#include <algorithm>

#include "model/token_exchange.h"
#include "ops/elementwise/elementwise.h"
#include "ops/loss/cross_entropy.h"
#include "tensor/dims.h"

namespace tessera {

namespace {
/// These are enough rows for efficient products: every chunk reads and writes the weight's gradient, which on a GPU
/// takes as long as multiplying some 700 tokens. 102,400 vocabulary entries take 200 and 800 MiB of float32 logits per
/// chunk.
std::int64_t tokens_per_chunk(Device device) { return device == Device::kCuda ? 2048 : 512; }
}  // namespace

Head::Head(Parameters& parameters, const ModelConfig& config, const std::string& norm_name, const LinearSite& output)
    : norm_(parameters, norm_name, config.dim), output_(&output) {}

void Head::logits(const LayerContext& context, const Tensor& x_TD, const Tensor& logits_TV) const {
  const ArenaScope scope(*context.op.arena);
  const Tensor y_TD = context.allocate(x_TD.shape());
  const Tensor rstd_T = context.allocate({x_TD.dim(0)}, DType::kFloat32);
  norm_.forward(context, x_TD, y_TD, rstd_T);
  linear_forward(context.op, y_TD, context.weight(output_->id()), logits_TV);
}

void Head::forward_backward(const LayerContext& context, const Tensor& x_tD, const Tensor& labels_T, float scale,
                            const Tensor& loss_1, const Tensor& d_x_tD, const Tensor& logits_TV) const {
  TESSERA_DIMS(x_tD, labels_T, d_x_tD, logits_TV);
  const TraceScope trace(context.op.trace, "head");
  const Context& op = context.op;
  ProcessGroup& ranks = context.mesh().tp;
  const std::string& name = output_->name();
  const std::int64_t num_tokens = context.num_tokens(), num_local = x_tD.dim(0);
  const std::int64_t vocab = context.config().vocab_size / ranks.size(), first_id = ranks.rank() * vocab;
  const bool backward = d_x_tD.defined();
  const ArenaScope scope(*op.arena);
  const Tensor y_tD = context.allocate(x_tD.shape());
  const Tensor rstd_t = context.allocate({num_local}, DType::kFloat32);
  const Tensor losses_T = context.allocate({num_tokens}, DType::kFloat32);
  norm_.forward(context, x_tD, y_tD, rstd_t);
  const Tensor y_TD = gather_tokens(context, y_tD, name);
  const Tensor d_y_TD = backward ? context.allocate(y_TD.shape()) : Tensor();

  const bool high_logits = context.precision(output_->id()).fprop == Precision::kHigh;
  const InputForms input_forms = output_->product_forms(context);
  const OperandForms forms = backward ? input_forms.forward | input_forms.wgrad : input_forms.forward;
  const std::int64_t chunk = tokens_per_chunk(op.target());
  for (std::int64_t begin = 0; begin < num_tokens; begin += chunk) {
    const std::int64_t end = std::min(num_tokens, begin + chunk);
    const ArenaScope chunk_scope(*op.arena);
    const Tensor labels = labels_T.rows(begin, end);
    const GemmOperand y_chunk_TD = quantized_operand(context, y_TD.rows(begin, end), forms);
    const Shape shape{end - begin, vocab};
    const Tensor chunk_TV = context.allocate(shape, high_logits ? DType::kFloat32 : context.compute());
    output_->forward(context, y_chunk_TD, chunk_TV);
    if (logits_TV.defined()) convert(op, chunk_TV, logits_TV.rows(begin, end));
    GemmOperand d_chunk_TV;
    if (backward) {  // the gradient takes the logits' place, if it has their type
      const GemmOperand have(chunk_TV.dtype() == context.compute() ? chunk_TV : Tensor());
      d_chunk_TV = allocate_operand(context, shape, output_->gradient_forms(context), have);
    }
    const Tensor sums_PT3 = context.allocate({ranks.size(), end - begin, 3}, DType::kFloat32);
    const Tensor sums_T3 = sums_PT3[ranks.rank()];
    cross_entropy_sums(op, chunk_TV, labels, first_id, sums_T3);
    if (ranks.size() > 1) ranks.all_gather(sums_T3, sums_PT3, name).wait();
    cross_entropy(op, sums_PT3, chunk_TV, labels, first_id, scale, losses_T.rows(begin, end), d_chunk_TV);
    if (!backward) continue;
    output_->dgrad(context, d_chunk_TV, d_y_TD.rows(begin, end));
    output_->wgrad(context, d_chunk_TV, y_chunk_TD);
  }
  if (backward) {
    norm_.backward(context, reduce_scatter(context, TokenSet::kMicroBatch, d_y_TD, name), x_tD, rstd_t, d_x_tD);
  }
  add_sum(op, context.local_rows(losses_T), loss_1);
}

}  // namespace tessera
