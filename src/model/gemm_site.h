// GEMMs of the layers, each in the precision of its site (params/precision.h), and the forms of their operands that
// this takes. A layer asks for the forms, has its operators write them, and multiplies.
#pragma once

#include <initializer_list>
#include <vector>

#include "model/layer_context.h"
#include "ops/gemm/gemm.h"
#include "ops/kit/gemm_operand.h"

namespace tessera {

/// Forms of a matrix that its GEMMs read.
struct OperandForms {
  bool plain = false, rows = false, columns = false;
  mx::Format format{};  // of rows and columns

  /// Both sides' forms; what both have quantized is of one format.
  OperandForms operator|(const OperandForms& other) const;
};

/// Of a matrix that is the input of sites: what their forward reads, and what their weights' gradients read.
struct InputForms {
  OperandForms forward, wgrad;
};
InputForms input_forms(const LayerContext& context, std::initializer_list<ParamId> sites);
/// Of the gradient of a site's output: what dgrad and wgrad read.
OperandForms gradient_forms(const LayerContext& context, ParamId site);

/// An operand of these forms: those that `have` holds already, the others newly allocated.
GemmOperand allocate_operand(const LayerContext& context, const Shape& shape, const OperandForms& forms,
                             const GemmOperand& have = {});
/// The matrix x in these forms, quantized now, into what `have` holds as above.
GemmOperand quantized_operand(const LayerContext& context, const Tensor& x, const OperandForms& forms,
                              const GemmOperand& have = {});
/// The gradient of a site's output, in the forms that it reads.
inline GemmOperand gradient_operand(const LayerContext& context, const Tensor& d_y, ParamId site) {
  return quantized_operand(context, d_y, gradient_forms(context, site));
}

// As in ops/gemm/gemm.h and ops/gemm/grouped_gemm.h.
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

/// Weights' gradients that a backward has put off (zero-bubble pipelines, arXiv 2401.10241), with the operands that
/// they need: where these are not in `kept` already, copies there.
class DeferredWgrads {
 public:
  /// Room for so many gradients, so that adding them takes no memory of its own.
  explicit DeferredWgrads(std::size_t max_gradients) { wgrads_.reserve(max_gradients); }
  /// offsets_E1: of a grouped site.
  void add(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, ParamId site,
           const Tensor& offsets_E1);
  /// Computes them in the order in which they came, and forgets them.
  void run(const LayerContext& context);

 private:
  struct Wgrad {
    GemmOperand d_y, x;
    ParamId site;
    Tensor offsets_E1;
  };
  std::vector<Wgrad> wgrads_;
};

/// What groups of rows must begin at a multiple of, for these sites' gradients.
std::int64_t row_alignment(const QuantizedWeights& quantized, std::initializer_list<ParamId> sites);

}  // namespace tessera
