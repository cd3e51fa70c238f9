// The layers' GEMMs, each in the precision of its site (params/precision.h). A site reads its operands in certain
// forms. A layer asks for these forms, has its operators write them, and multiplies.
#pragma once

#include <initializer_list>
#include <vector>

#include "model/layer_context.h"
#include "ops/gemm/gemm.h"
#include "ops/kit/gemm_operand.h"

namespace tessera {

/// Which forms of a matrix its GEMMs read: plain, quantized along rows, quantized along columns.
struct OperandForms {
  bool plain = false, rows = false, columns = false;
  mx::Format format{};  // of rows and columns

  /// Returns the forms of both sides. If both are quantized, their formats must be equal.
  OperandForms operator|(const OperandForms& other) const;
};

/// Which forms (plain, row-quantized, column-quantized) the sites that read an activation need: in the forward, and in
/// the weight-gradient GEMM.
struct InputForms {
  OperandForms forward, wgrad;
};
InputForms input_forms(const LayerContext& context, std::initializer_list<ParamId> sites);
/// Returns the forms of the output's gradient that a site's dgrad and wgrad read.
OperandForms gradient_forms(const LayerContext& context, ParamId site);

/// Returns an operand of these forms. It takes those that `have` holds, and allocates the others.
GemmOperand allocate_operand(const LayerContext& context, const Shape& shape, const OperandForms& forms,
                             const GemmOperand& have = {});
/// Returns x in these forms, quantized now. What `have` holds is used as above.
GemmOperand quantized_operand(const LayerContext& context, const Tensor& x, const OperandForms& forms,
                              const GemmOperand& have = {});
/// Returns the gradient of a site's output in the forms that the site reads.
inline GemmOperand gradient_operand(const LayerContext& context, const Tensor& d_y, ParamId site) {
  return quantized_operand(context, d_y, gradient_forms(context, site));
}

// The GEMMs of ops/gemm/gemm.h and ops/gemm/grouped_gemm.h, with the site's weight.
void linear_forward(const LayerContext& context, const GemmOperand& x, ParamId site, const Tensor& y,
                    Write write = Write::kAssign);
void linear_dgrad(const LayerContext& context, const GemmOperand& d_y, ParamId site, const Tensor& d_x,
                  Write write = Write::kAssign);
void linear_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site);
void grouped_linear_forward(const LayerContext& context, const GemmOperand& x, ParamId site, const Tensor& offsets_E1,
                            const Tensor& y);
void grouped_linear_dgrad(const LayerContext& context, const GemmOperand& d_y, ParamId site, const Tensor& offsets_E1,
                          const Tensor& d_x);
void grouped_linear_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site,
                          const Tensor& offsets_E1);

/// Weight gradients that a backward has put off (zero-bubble pipelines, arXiv 2401.10241). Holds the operands that they
/// need, copied unless they are in `kept` already.
class DeferredWgrads {
 public:
  /// Reserves room for so many gradients, so that add() allocates nothing.
  explicit DeferredWgrads(std::size_t max_gradients) { wgrads_.reserve(max_gradients); }
  /// `offsets_E1` is defined for a grouped site only.
  void add(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site,
           const Tensor& offsets_E1);
  /// Computes the gradients in the order of add(), and forgets them.
  void run(const LayerContext& context);

 private:
  struct Wgrad {
    GemmOperand d_y, x;
    ParamId site;
    Tensor offsets_E1;
  };
  std::vector<Wgrad> wgrads_;
};

/// Returns the multiple at which groups of rows must begin for these sites' weight gradients.
std::int64_t row_alignment(const QuantizedWeights& quantized, std::initializer_list<ParamId> sites);

}  // namespace tessera
