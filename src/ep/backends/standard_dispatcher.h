// The dispatcher that the host drives by collectives, as TorchTitan's does. First it gathers all ranks' counts. From
// these the device computes which row goes where (ep/exchange_plan.h). The host waits for the numbers of rows to each
// rank and from each rank. Then rows cross by all-to-alls, one row per (token, expert). A payload in MXFP8 takes two,
// for elements and for scales. Routing weights, and their gradients, take one more. On a GPU, a dispatch copies
// 4·(2P + 1) bytes to the host: these numbers and the number of rounds. It copies nothing to the GPU.
//
// A backend that moves the same rows by other operations derives from it.
#pragma once

#include "ep/host_numbers.h"
#include "ep/rows.h"

namespace tessera::ep {

class StandardDispatcher : public Dispatcher {
 public:
  static constexpr DispatchBackend kBackend = DispatchBackend::kStandard;
  static constexpr std::array<BackendChoice, 1> kChoices = {{{"standard", "all-to-alls"}}};

  StandardDispatcher(const DispatchOptions& options, ProcessGroup& group)
      : Dispatcher(options, group.size()), group_(group) {}

  /// Returns a guess, because NCCL does not tell how many SMs its kernels take.
  int num_sms() const override { return options().device == Device::kCuda ? options().num_sms : 0; }
  bool waits_for_gpu() const override { return options().device == Device::kCuda; }

 protected:
  ProcessGroup& group() { return group_; }

 private:
  /// Sends in_rows[r] rows of `in` to rank r, and receives out_rows[r] rows of `out` from it. Both are in the order of
  /// ranks. They are [rows, D] or [rows], and contiguous. `name` is for messages.
  virtual Work exchange(const Tensor& in, std::span<const std::int64_t> in_rows, const Tensor& out,
                        std::span<const std::int64_t> out_rows, std::string_view name) {
    return group_.all_to_all_v(in, in_rows, out, out_rows, name);
  }

  void do_allocate() override { for_host_.allocate(options().device, 1 + 2 * num_ranks()); }
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

  /// Computes, from the counts of all ranks, what `saved` holds, except the weights.
  void plan(const Context& op, const DispatchSaved& saved);
  /// Sends the rows of this rank's tokens to the ranks of their experts.
  void send_tokens(const Context& op, const GemmOperand& y_tD, PayloadPrecision precision, const DispatchSaved& saved,
                   const GemmOperand& x_RD, std::string_view operation);
  /// Sends experts' rows back to the ranks of their tokens, where they are summed.
  void return_rows(const Context& op, const Tensor& x_RD, const Tensor& weights_tK, const DispatchSaved& saved,
                   const Tensor& y_tD, Write write, std::string_view operation);
  Work to_experts(const Tensor& sent, const Tensor& received, const DispatchSaved& saved, std::string_view operation);
  Work from_experts(const Tensor& returned, const Tensor& back, const DispatchSaved& saved, std::string_view operation);

  ProcessGroup& group_;
  HostNumbers for_host_;
};

}  // namespace tessera::ep
