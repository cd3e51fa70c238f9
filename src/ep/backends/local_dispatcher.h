// The dispatcher of a group of one rank. It calls the operators of ops/routing/permute.h.
#pragma once

#include <array>

#include "ep/dispatcher.h"

namespace tessera::ep {

class LocalDispatcher : public Dispatcher {
 public:
  static constexpr DispatchBackend kBackend = DispatchBackend::kLocal;
  static constexpr std::array<BackendChoice, 0> kChoices = {};  // a run cannot choose it

  explicit LocalDispatcher(const DispatchOptions& options) : Dispatcher(options, 1) {}

 private:
  void allocate_backend(const Context& op, DispatchSaved& saved) const override;
  void do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                   const GemmOperand& x_RD) override;
  void do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                         const GemmOperand& x_RD) override;
  void do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
                  Write write) override;
  void do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                           const GemmOperand& d_out_RD) override;
  void do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                            const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                            const Tensor& d_weights_tK) override;
};

}  // namespace tessera::ep
