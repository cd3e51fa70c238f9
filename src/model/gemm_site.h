// GEMM sites: the weights that layers multiply with. A site has its weight's id and name, and looks up its precision
// (params/precision.h). It knows the forms in which its products read operands, and which tokens it moves between
// ranks. A layer asks a site for the forms, has its operators write them, and multiplies.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/layer_context.h"
#include "model/token_exchange.h"
#include "ops/gemm/gemm.h"
#include "ops/kit/gemm_operand.h"

namespace tessera {

/// Says which forms of a matrix its GEMMs read: plain, quantized along rows, quantized along columns.
struct OperandForms {
  bool plain = false;
  std::optional<mx::Format> rows = std::nullopt, columns = std::nullopt;

  /// Returns the forms of both sides. A form that both have must have one format.
  OperandForms operator|(const OperandForms& other) const;
};

/// Says which forms of an activation a site's products read, in the forward and in the weight-gradient GEMM.
struct InputForms {
  OperandForms forward, wgrad;

  InputForms operator|(const InputForms& other) const {
    return {.forward = forward | other.forward, .wgrad = wgrad | other.wgrad};
  }
};

/// Returns an operand of these forms. It takes those that `have` holds, and allocates the others.
GemmOperand allocate_operand(const LayerContext& context, const Shape& shape, const OperandForms& forms,
                             const GemmOperand& have = {});
/// Returns x in these forms. It takes those that `have` holds, and quantizes x into the others.
GemmOperand quantized_operand(const LayerContext& context, const Tensor& x, const OperandForms& forms,
                              const GemmOperand& have = {});

/// Names a weight, multiplies with it, and knows the forms in which its products read operands.
class GemmSite {
 public:
  /// Adds the weight to the parameters.
  GemmSite(Parameters& parameters, const ParamSpec& spec) : id_(parameters.add(spec)), name_(spec.name) {}

  ParamId id() const { return id_; }
  const std::string& name() const { return name_; }
  /// Returns the forms of an input that the products read.
  InputForms product_forms(const LayerContext& context) const;
  /// Returns the forms of the output's gradient that dgrad and wgrad read.
  OperandForms gradient_forms(const LayerContext& context) const;
  /// Sets the weight's gradient to 0 if the next product would assign it. All products of the step then add to it.
  void clear_unassigned(const LayerContext& context) const;
  /// Returns the multiple at which groups of rows must begin for wgrad.
  std::int64_t row_alignment(const QuantizedWeights& quantized) const;

 protected:
  // The next three functions are the products in the site's precisions. `offsets_E1` is defined for a grouped site
  // only.
  void multiply_forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1, const Tensor& y,
                        Write write) const;
  void multiply_dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& offsets_E1, const Tensor& d_x,
                      Write write) const;
  /// Adds to the weight's gradient, or defers that (LayerContext::deferred).
  void multiply_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x,
                      const Tensor& offsets_E1) const;

 private:
  friend class DeferredWgrads;
  void compute_wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x,
                     const Tensor& offsets_E1) const;
  void observe_forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1) const;

  ParamId id_;
  std::string name_;
};

/// Says how tensor parallelism shards a linear site's weight [M, N], and so which tokens the site moves.
enum class Sharding : std::uint8_t {
  kReplicated,  // whole on every rank, or in a layer that moves tokens itself: the site moves nothing
  kColumn,      // M is sharded: gathers its input's tokens, and reduce-scatters the input's gradient
  kRow,         // N is sharded: reduce-scatters its output, and gathers the output's gradient
};

/// Computes y = x · wᵀ with w [M, N]. M and N are sizes of this rank's part.
///
///   sharding     x            y            gather_input     forward          gradient         dgrad
///   kReplicated  [t, N]       [t, M]       x itself         local            local            local
///   kColumn      [T, N]       [T, M]       [t, N] → [T, N]  local            local            [T, M] → [t, N]
///   kRow         [T, N]       [t, M]       x itself         [T, N] → [t, M]  [t, M] → [T, M]  local
class LinearSite : public GemmSite {
 public:
  /// Says which products read an input: the forward's, the weight gradient's, or both.
  enum class Reader : std::uint8_t { kForward, kWgrad, kBoth };

  /// `tokens` says whose tokens a column-sharded site gathers.
  LinearSite(Parameters& parameters, const ParamSpec& spec, Sharding sharding, TokenSet tokens = TokenSet::kMicroBatch)
      : GemmSite(parameters, spec), sharding_(sharding), tokens_(tokens) {}

  /// Returns the forms in which a layer hands the site this rank's tokens.
  InputForms input_forms(const LayerContext& context) const;
  /// Returns the input as the products of `reader` read it.
  GemmOperand gather_input(const LayerContext& context, const GemmOperand& x_tN, Reader reader) const;
  /// Returns the input as gather_input does, for an input of `shape` [t, N] that write(operand) computes. On one rank,
  /// `write` gets an operand that has the wanted forms. What `have` holds is used, as in allocate_operand.
  template <typename WriteInput>
  GemmOperand gather_written(const LayerContext& context, const Shape& shape, Reader reader, const GemmOperand& have,
                             WriteInput&& write) const;

  /// Assigns or adds x · wᵀ to y.
  void forward(const LayerContext& context, const GemmOperand& x, const Tensor& y, Write write = Write::kAssign) const;
  /// Returns the gradient of the output, in the forms that dgrad and wgrad read.
  GemmOperand gradient(const LayerContext& context, const Tensor& d_y) const;
  /// Assigns or adds d_y · w to d_x.
  void dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& d_x,
             Write write = Write::kAssign) const;
  /// Adds d_yᵀ · x to the weight's gradient.
  void wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x) const;
  /// Computes d_x and the weight's gradient from d_y. It frees what it allocates.
  void backward(const LayerContext& context, const Tensor& d_y, const GemmOperand& x, const Tensor& d_x,
                Write write = Write::kAssign) const;

 private:
  bool gathers(const LayerContext& context) const;
  OperandForms forms_for(const LayerContext& context, Reader reader) const;

  Sharding sharding_;
  TokenSet tokens_;
};

/// Computes y = x · w_eᵀ for the rows [offsets_E1[e], offsets_E1[e + 1]). Each expert has its own matrix w_e.
class GroupedSite : public GemmSite {
 public:
  using GemmSite::GemmSite;

  void forward(const LayerContext& context, const GemmOperand& x, const Tensor& offsets_E1, const Tensor& y) const;
  void dgrad(const LayerContext& context, const GemmOperand& d_y, const Tensor& offsets_E1, const Tensor& d_x) const;
  void wgrad(const LayerContext& context, const GemmOperand& d_y, const GemmOperand& x, const Tensor& offsets_E1) const;
};

/// Holds weight gradients that a backward has deferred (zero-bubble pipelines, arXiv 2401.10241), with the operands
/// that they need. Layers allocate operands in its arena (for_deferred). It copies those that lie neither there nor
/// among what the forward saved.
class DeferredWgrads {
 public:
  /// Reserves room for so many gradients, so that add() allocates nothing.
  explicit DeferredWgrads(std::size_t max_gradients) { wgrads_.reserve(max_gradients); }
  /// Says where copies go, from before the first add() to after run().
  void set_arena(Arena* arena) { arena_ = arena; }
  Arena* arena() const { return arena_; }
  /// `site` must outlive this. `offsets_E1` is defined for a grouped site only.
  void add(const LayerContext& context, const GemmSite& site, const GemmOperand& d_y, const GemmOperand& x,
           const Tensor& offsets_E1);
  /// Defers the weight gradient of a grouped site whose input is dispatched y. It does not keep those rows, because
  /// they take much memory. So run() dispatches y again. `dispatch` must outlive this.
  void add_dispatched(const LayerContext& context, const GroupedSite& site, const GemmOperand& d_y,
                      const GemmOperand& y, const DispatchSaved& dispatch);
  /// Computes the gradients in the order of add(), and forgets them.
  void run(const LayerContext& context);

 private:
  struct Wgrad {
    const GemmSite* site;
    GemmOperand d_y, x;
    Tensor offsets_E1;
    const DispatchSaved* dispatch = nullptr;  // if it is not null, x is y, which is dispatched again
  };
  Tensor keep(const LayerContext& context, const Tensor& tensor) const;
  mx::Quantized keep(const LayerContext& context, const mx::Quantized& quantized) const;
  /// Keeps the form of an operand that the site's product reads.
  GemmOperand keep(const LayerContext& context, const GemmSite& site, const GemmOperand& operand) const;
  void push(const Wgrad& wgrad);
  std::vector<Wgrad> wgrads_;
  Arena* arena_ = nullptr;
};

/// Returns the context for tensors that weight gradients read. If these are deferred, it allocates where the tensors
/// stay.
inline LayerContext for_deferred(const LayerContext& context) {
  LayerContext result = context;
  if (context.deferred != nullptr) result.op.arena = context.deferred->arena();
  return result;
}

/// Returns the context for a site whose weight gradient is not deferred, because its operands would take much memory
/// for little computation.
inline LayerContext at_once(const LayerContext& context) {
  LayerContext result = context;
  result.deferred = nullptr;
  return result;
}

template <typename WriteInput>
GemmOperand LinearSite::gather_written(const LayerContext& context, const Shape& shape, Reader reader,
                                       const GemmOperand& have, WriteInput&& write) const {
  const OperandForms forms = forms_for(context, reader);
  if (!gathers(context)) {
    const GemmOperand x = allocate_operand(context, shape, forms, have);
    write(x);
    return x;
  }
  const Tensor x_tN = context.allocate(shape);
  write(GemmOperand(x_tN));
  const Tensor x_TN = have.plain.defined() ? have.plain : context.allocate({num_tokens(context, tokens_), shape[1]});
  all_gather(context, tokens_, x_tN, x_TN, name());
  return quantized_operand(context, x_TN, forms, have);
}

}  // namespace tessera
