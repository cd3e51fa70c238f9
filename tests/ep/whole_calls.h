// Calls of a dispatcher together with its exchange's, so that a layer of one round takes and gives this rank's tokens.
#pragma once

#include "ep/domain_exchange.h"

namespace tessera::ep_test {

class WholeCalls {
 public:
  explicit WholeCalls(Dispatcher& dispatcher) : dispatcher_(dispatcher), exchange_(dispatcher.exchange()) {}

  void dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, const GemmOperand& x_RD) const {
    const ArenaScope scope(*op.arena);
    dispatcher_.dispatch(op, came(op, y_tD, saved, options().dispatch_forward, &DomainExchange::dispatch), saved, x_RD);
  }

  void dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                      const GemmOperand& x_RD) const {
    const ArenaScope scope(*op.arena);
    const GemmOperand y = came(op, y_tD, saved, options().dispatch_forward, &DomainExchange::dispatch_again);
    dispatcher_.dispatch_again(op, y, saved, x_RD);
  }

  void combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
               Write write) const {
    if (exchange_ == nullptr) return dispatcher_.combine(op, out_RD, saved, y_tD, write);
    const ArenaScope scope(*op.arena);
    const Tensor sums = allocate_sums(op, saved);
    dispatcher_.combine(op, out_RD, saved, sums, Write::kAssign);
    exchange_->combine(op, sums, saved, y_tD, write);
  }

  void combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                        const GemmOperand& d_out_RD) const {
    const ArenaScope scope(*op.arena);
    const GemmOperand d_y = came(op, d_y_tD, saved, options().combine_backward, &DomainExchange::combine_backward);
    dispatcher_.combine_backward(op, d_y, saved, d_out_RD);
  }

  void dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R, const DispatchSaved& saved,
                         const Tensor& d_y_tD, Write write, const Tensor& d_weights_tK) const {
    if (exchange_ == nullptr) {
      return dispatcher_.dispatch_backward(op, d_x_RD, d_weights_R, saved, d_y_tD, write, d_weights_tK);
    }
    const ArenaScope scope(*op.arena);
    const Tensor sums = allocate_sums(op, saved);
    const Tensor d_weights = op.arena->allocate({saved.num_tokens(), options().top_k}, DType::kFloat32);
    dispatcher_.dispatch_backward(op, d_x_RD, d_weights_R, saved, sums, Write::kAssign, d_weights);
    exchange_->dispatch_backward(op, sums, d_weights, saved, d_y_tD, write, d_weights_tK);
  }

 private:
  const DispatchOptions& options() const { return dispatcher_.options(); }
  using Send = void (DomainExchange::*)(const Context&, const GemmOperand&, const DispatchSaved&, const GemmOperand&);
  /// Returns what the dispatcher gets: y_tD, or the tokens that cross by `send`.
  GemmOperand came(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved, PayloadPrecision precision,
                   Send send) const {
    if (exchange_ == nullptr) return y_tD;
    const GemmOperand y_MD = exchange_->allocate_tokens(op, saved, precision);
    (exchange_->*send)(op, y_tD, saved, y_MD);
    return y_MD;
  }
  Tensor allocate_sums(const Context& op, const DispatchSaved& saved) const {
    return op.arena->allocate({saved.num_tokens(), options().dim}, options().dtype);
  }

  Dispatcher& dispatcher_;
  DomainExchange* exchange_;
};

/// Holds the tokens of a pass in rounds, as the dispatcher gets and gives them. Over several domains these are the
/// tokens that crossed. Else they are this rank's.
class CrossedTokens {
 public:
  /// This rank's tokens and their gradients.
  struct Own {
    Tensor y, d_y, out, d_in, d_weights;
  };

  CrossedTokens(const Context& op, const Dispatcher& dispatcher, const DispatchSaved& first, const Own& own)
      : y(own.y),
        d_y(own.d_y),
        out(own.out),
        d_in(own.d_in),
        d_weights(own.d_weights),
        op_(op),
        exchange_(dispatcher.exchange()),
        first_(first),
        own_(own) {
    if (exchange_ == nullptr) return;
    const DispatchOptions& options = dispatcher.options();
    y = exchange_->allocate_tokens(op, first, options.dispatch_forward);
    d_y = exchange_->allocate_tokens(op, first, options.combine_backward);
    out = op.arena->allocate({first.num_tokens(), options.dim}, options.dtype);
    d_in = op.arena->allocate(out.shape(), options.dtype);
    d_weights = op.arena->allocate({first.num_tokens(), options.top_k}, DType::kFloat32);
  }

  void begin_forward() const {
    if (exchange_ != nullptr) exchange_->dispatch(op_, own_.y, first_, y);
  }
  void end_forward() const {
    if (exchange_ != nullptr) exchange_->combine(op_, out, first_, own_.out, Write::kAssign);
  }
  void begin_backward() const {
    if (exchange_ == nullptr) return;
    exchange_->combine_backward(op_, own_.d_y, first_, d_y);
    exchange_->dispatch_again(op_, own_.y, first_, y);
  }
  void end_backward() const {
    if (exchange_ == nullptr) return;
    exchange_->dispatch_backward(op_, d_in, d_weights, first_, own_.d_in, Write::kAssign, own_.d_weights);
  }

  GemmOperand y, d_y;
  Tensor out, d_in, d_weights;

 private:
  Context op_;
  DomainExchange* exchange_;
  const DispatchSaved& first_;
  Own own_;
};

}  // namespace tessera::ep_test
