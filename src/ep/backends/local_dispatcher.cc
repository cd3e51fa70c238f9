#include "ep/backends/local_dispatcher.h"

#include "ops/routing/permute.h"

namespace tessera::ep {
namespace {

/// Both tensors are int32. A slot is t·K + k, and -1 stands for none.
struct LocalRouting {
  Tensor slot_of_row_R, row_of_slot_tK;
};

}  // namespace

void LocalDispatcher::allocate_backend(const Context& op, DispatchSaved& saved) const {
  saved.backend = LocalRouting{
      .slot_of_row_R = op.arena->allocate({saved.num_rows()}, DType::kInt32),
      .row_of_slot_tK = op.arena->allocate({saved.num_tokens(), options().top_k}, DType::kInt32),
  };
}

void LocalDispatcher::do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                  const GemmOperand& x_RD) {
  const auto& routing = saved.backend_as<LocalRouting>();
  sort_by_expert(op, saved.routing.expert_ids_tK, saved.routing.counts_E, saved.layer.alignment, saved.offsets_e1,
                 routing.slot_of_row_R, routing.row_of_slot_tK);
  gather_numbers(op, saved.routing.weights_tK, routing.slot_of_row_R, saved.weights_R);
  do_dispatch_again(op, y_tD, saved, x_RD);
}

void LocalDispatcher::do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                                        const GemmOperand& x_RD) {
  gather_rows(op, y_tD.plain, saved.backend_as<LocalRouting>().slot_of_row_R, options().top_k, saved.num_rows_1(),
              x_RD);
}

void LocalDispatcher::do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved,
                                 const Tensor& y_tD, Write write) {
  combine_rows(op, out_RD, saved.backend_as<LocalRouting>().row_of_slot_tK, saved.routing.weights_tK, y_tD, write);
}

void LocalDispatcher::do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                                          const GemmOperand& d_out_RD) {
  do_dispatch_again(op, d_y_tD, saved, d_out_RD);
}

void LocalDispatcher::do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                                           const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                                           const Tensor& d_weights_tK) {
  const auto& routing = saved.backend_as<LocalRouting>();
  combine_rows(op, d_x_RD, routing.row_of_slot_tK, {}, d_y_tD, write);
  gather_numbers(op, d_weights_R, routing.row_of_slot_tK, d_weights_tK);
}

}  // namespace tessera::ep
