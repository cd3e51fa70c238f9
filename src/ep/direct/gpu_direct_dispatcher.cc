#include "ep/direct/gpu_direct_dispatcher.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "device/cuda_check.h"
#include "ep/direct/direct_kernels.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/permute.h"
#include "ops/runtime/runtime.h"

namespace tessera::ep {
namespace {

/// All tensors are int32. The group has P ranks.
struct GpuDirectRouting {
  Tensor rank_tJ, first_row_tJ;
  /// For each token of each rank: which of the token's copies this rank received, in the order of ranks, or -1. For
  /// each choice of such a token its row here, or -1 if its expert is on another rank.
  Tensor place_Pt, row_PtK;
  Tensor source_of_row_R;
  /// For each token a bit per choice, which says whether the choice has a row in this round.
  Tensor choices_t;
  /// For each local expert, the row after its last one, where its padding begins.
  Tensor ends_e;
};

/// A call's tokens are cut into chunks of about this many or more, because each chunk costs a signal.
constexpr std::int64_t kTokensPerChunk = 128;

const GpuDirectRouting& gpu_direct_routing(const DispatchSaved& saved) { return saved.backend_as<GpuDirectRouting>(); }

std::int32_t* ints(const Tensor& x) { return x.data<std::int32_t>(); }

std::byte* bytes_of(const Tensor& x) { return static_cast<std::byte*>(x.raw()); }

class GpuDirectDispatcher : public WindowDispatcher {
 public:
  GpuDirectDispatcher(const DispatchOptions& options, ProcessGroup& group) : WindowDispatcher(options, group) {
    require(group.size() <= kMaxGpuRanks && options.num_experts <= kMaxGpuExperts && options.top_k <= kMaxGpuTopK,
            "direct expert parallelism on GPUs takes up to {} ranks, {} experts and top {}, not {}, {} and {}: set "
            "parallelism.expert_parallel_comm_backend = \"standard\"",
            kMaxGpuRanks, kMaxGpuExperts, kMaxGpuTopK, group.size(), options.num_experts, options.top_k);
    require(options.dim * static_cast<std::int64_t>(size_of(options.dtype)) % 16 == 0,
            "direct expert parallelism on GPUs moves rows of whole 16 bytes, not of {} numbers: make the model's dim a "
            "multiple of 8",
            options.dim);
    TESSERA_CHECK(options.num_sms >= 2, "{}", options.num_sms);
  }

  int num_sms() const override { return options().num_sms; }

  void check() override {
    if (report_.data() == nullptr) return;
    auto& report = *reinterpret_cast<GpuReport*>(report_.data());
    const auto kind = *static_cast<volatile GpuReport::Kind*>(&report.kind);
    if (kind == GpuReport::Kind::kNone) return;
    // The kind is written last.
    std::atomic_thread_fence(std::memory_order_acquire);
    group_.fail_late(name_of(report.call), layers_[static_cast<std::size_t>(report.layer)],
                     missing(report.flag, report.source, report.expected, report.seen));
  }

  void add_later_rounds(const Context& op, const DispatchSaved& first, const Tensor& sum_1) const override {
    if (has_rounds()) add_counts(op, first.rounds_2.rows(0, 1), sum_1);
  }

 private:
  void do_allocate() override {
    WindowDispatcher::do_allocate();
    state_ = Buffer_(sizeof(GpuState), Device::kCuda);
    report_ = Buffer_::pinned(sizeof(GpuReport));
  }

  using Buffer_ = ::tessera::Buffer;  // ep::Buffer is a part of a window

  void allocate_backend(const Context& op, DispatchSaved& saved) const override {
    const auto allocate = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
    const std::int64_t tokens = saved.num_tokens();
    saved.backend = GpuDirectRouting{
        .rank_tJ = allocate({tokens, max_ranks_of_token()}),
        .first_row_tJ = allocate({tokens, max_ranks_of_token()}),
        .place_Pt = allocate({num_ranks(), tokens}),
        .row_PtK = allocate({num_ranks(), tokens, options().top_k}),
        .source_of_row_R = allocate({saved.num_rows()}),
        .choices_t = allocate({tokens}),
        .ends_e = allocate({num_local_experts()}),
    };
    if (!saved.rounds_2.defined()) saved.rounds_2 = allocate({2});
  }

  std::int64_t found_rounds(const Context& op, const DispatchSaved& first) const override {
    std::int32_t num_later = 0;
    op.cuda->fetch(first.rounds_2.rows(0, 1), &num_later);
    return 1 + num_later;
  }

  void repeat(const Context& op, const DispatchSaved& first, std::int64_t least,
              const std::function<void(std::int64_t)>& run) const override {
    const auto next_round = [&](bool is_first, std::optional<unsigned long long> condition = std::nullopt) {
      launch_next_round(op.cuda->stream(), ints(first.rounds_2), is_first, condition);
    };
    if (op.measuring() || !op.cuda->stream().is_recording()) {
      Dispatcher::repeat(op, first, least, [&](std::int64_t round) {
        if (!op.measuring()) next_round(round == 1);
        run(round);
      });
      return;
    }
    cuda::GraphLoop loop(op.cuda->stream());
    next_round(true, loop.condition());
    op.cuda->record_loop(loop, [&] {
      run(1);
      next_round(false, loop.condition());
    });
  }

  CallArgs call_args(Call call, const DispatchSaved& saved) {
    const GpuDirectRouting& routing = gpu_direct_routing(saved);
    const auto found = std::find(layers_.begin(), layers_.end(), saved.layer.name);
    const std::int64_t layer_idx = found - layers_.begin();
    if (found == layers_.end()) layers_.emplace_back(saved.layer.name);
    // The GPU's timeout is somewhat shorter than the host's, because the GPU can report what is missing.
    constexpr double kLongest = 1e9, kOfTimeout = 0.9;  // seconds
    CallArgs args{
        .call = call,
        .layer = static_cast<std::int32_t>(layer_idx),
        .rank = group_.rank(),
        .num_ranks = group_.size(),
        .num_tokens = static_cast<int>(saved.num_tokens()),
        .top_k = static_cast<int>(options().top_k),
        .max_ranks_of_token = static_cast<int>(max_ranks_of_token()),
        .num_blocks = options().num_sms,
        .num_chunks = static_cast<int>(std::clamp<std::int64_t>(saved.num_tokens() / kTokensPerChunk, 1, kMaxChunks)),
        .timeout_ns = static_cast<std::uint64_t>(1e9 * std::min(kLongest, kOfTimeout * group_.timeout().count())),
        .state = reinterpret_cast<GpuState*>(state_.data()),
        .report = reinterpret_cast<GpuReport*>(report_.data()),
        .peers = {},
        .flags = window_.flags(group_.rank()),
        .rank_tJ = ints(routing.rank_tJ),
        .place_Pt = ints(routing.place_Pt),
        .row_PtK = ints(routing.row_PtK),
        .choices_t = reinterpret_cast<std::uint32_t*>(ints(routing.choices_t))};
    for (int peer = 0; peer < group_.size(); ++peer) args.peers[peer] = window_.base(peer);
    return args;
  }

  /// Returns the arguments for storing rows of `tokens` into the windows, and for copying them from this rank's window
  /// to `wanted`.
  RowsArgs rows_args(const Payload& tokens, const Payload& received, const Payload& wanted,
                     const DispatchSaved& saved) const {
    RowsArgs args{};
    for (std::size_t i = 0; i < tokens.parts().size() && tokens.parts()[i].defined(); ++i) {
      const Tensor from = tokens.parts()[i], window = received.parts()[i], out = wanted.parts()[i];
      const auto is_wide = [](const Tensor& x) {
        return !x.defined() || (reinterpret_cast<std::uintptr_t>(x.raw()) | bytes_of_row(x)) % 16 == 0;
      };
      using Copied = RowPart::Copied;
      Copied copied = Copied::kBytes;
      if (is_wide(from) && is_wide(window) && is_wide(out)) {
        if (i == 0) {
          copied = Copied::kPieces;
        } else if (bytes_of_row(from) <= kMaxLanesBytes) {
          copied = Copied::kLanes;
        }
      }
      args.parts[args.num_parts++] = {.tokens = bytes_of(from),
                                      .window = bytes_of(window),
                                      .out = out.defined() ? bytes_of(out) : nullptr,
                                      .row_bytes = static_cast<std::int64_t>(bytes_of_row(from)),
                                      .copied = copied};
    }
    const GpuDirectRouting& routing = gpu_direct_routing(saved);
    args.first_row_tJ = ints(routing.first_row_tJ);
    args.offsets_e1 = ints(saved.offsets_e1);
    args.ends_e = ints(routing.ends_e);
    args.num_local_experts = static_cast<int>(num_local_experts());
    return args;
  }

  void add_dispatch(RowsArgs& args, const Tensor& row_of_slot_tK, const Tensor& sorted_offsets_E1,
                    const DispatchSaved& saved) const {
    args.num_experts = static_cast<int>(options().num_experts);
    args.alignment = static_cast<int>(saved.layer.alignment);
    args.max_rows = static_cast<int>(saved.num_rows());
    args.rounds_2 = ints(saved.rounds_2);
    args.is_later_round = saved.round > 0;
    args.expert_ids_tK = ints(saved.routing.expert_ids_tK);
    args.counts_E = ints(saved.routing.counts_E);
    args.weights_tK = saved.routing.weights_tK.data<float>();
    args.row_of_slot_tK = ints(row_of_slot_tK);
    args.sorted_offsets_E1 = ints(sorted_offsets_E1);
    args.counts_PE = ints(window_.counts_PE(group_.rank()));
    args.window_place_Pt = ints(window_.place_Pt(group_.rank()));
    args.window_choice_PtK = static_cast<GpuChoice*>(window_.choice_PtK(group_.rank()).raw());
    args.source_of_row_R = ints(gpu_direct_routing(saved).source_of_row_R);
    args.weights_R = saved.weights_R.data<float>();
  }

  /// Makes a call that stores rows. add(args) adds the arguments that only a dispatch has.
  template <typename Add>
  void send_tokens(Call call, Buffer buffer, PayloadPrecision precision, const Context& op, const GemmOperand& y_tD,
                   const DispatchSaved& saved, const GemmOperand& x_RD, Add&& add) {
    const Payload tokens = make_payload(op, y_tD, precision);
    const Payload received = rows_of(group_.rank(), buffer, saved);
    // Rows that arrive in their final form are copied. The rest is computed from them.
    Payload wanted;
    GemmOperand computed = x_RD;
    if (!received.packed.defined()) {
      wanted.plain = std::exchange(computed.plain, {});
    } else if (x_RD.rows.defined() && x_RD.rows.format == received.packed.format) {
      wanted.packed = std::exchange(computed.rows, {});
    }
    if (!op.measuring()) {
      RowsArgs args = rows_args(tokens, received, wanted, saved);
      add(args);
      launch_rows(op.cuda->stream(), call_args(call, saved), args);
    }
    if (!computed.plain.defined() && !computed.quantized()) return;
    deliver_rows(op, received, options().dtype, gpu_direct_routing(saved).source_of_row_R, saved.num_rows_1(),
                 computed);
  }

  void do_dispatch(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                   const GemmOperand& x_RD) override {
    const std::int64_t num_experts = options().num_experts, num_slots = saved.num_tokens() * options().top_k;
    const auto allocate = [&](const Shape& shape) { return op.arena->allocate(shape, DType::kInt32); };
    const Tensor offsets_E1 = allocate({num_experts + 1}), slot_of_row = allocate({num_slots});
    const Tensor row_of_slot_tK = allocate({saved.num_tokens(), options().top_k});
    sort_by_expert(op, saved.routing.expert_ids_tK, saved.routing.counts_E, 1, offsets_E1, slot_of_row, row_of_slot_tK);
    if (!op.measuring()) {
      const Tensor& sources = gpu_direct_routing(saved).source_of_row_R;
      constexpr int kNone = 0xff;  // every byte of -1
      TESSERA_CUDA(cudaMemsetAsync(sources.raw(), kNone, sources.num_bytes(), op.cuda->stream().handle()));
      TESSERA_CUDA(cudaMemsetAsync(saved.weights_R.raw(), 0, saved.weights_R.num_bytes(), op.cuda->stream().handle()));
    }
    send_tokens(Call::kDispatch, Buffer::kRows, options().dispatch_forward, op, y_tD, saved, x_RD,
                [&](RowsArgs& args) { add_dispatch(args, row_of_slot_tK, offsets_E1, saved); });
  }

  void do_dispatch_again(const Context& op, const GemmOperand& y_tD, const DispatchSaved& saved,
                         const GemmOperand& x_RD) override {
    send_tokens(Call::kDispatchAgain, Buffer::kRows, options().dispatch_forward, op, y_tD, saved, x_RD,
                [](RowsArgs&) {});
  }

  void do_combine_backward(const Context& op, const GemmOperand& d_y_tD, const DispatchSaved& saved,
                           const GemmOperand& d_out_RD) override {
    send_tokens(Call::kCombineBackward, Buffer::kGradients, options().combine_backward, op, d_y_tD, saved, d_out_RD,
                [](RowsArgs&) {});
  }

  /// Returns the arguments of a call that stores sums of x_RD, without weights and their gradients.
  SumsArgs sums_args(const Tensor& x_RD, const Tensor& y_tD, Write write) const {
    const Tensor sums = window_.sums(group_.rank());
    for (const Tensor& x : {x_RD, y_tD}) TESSERA_CHECK(reinterpret_cast<std::uintptr_t>(x.raw()) % 16 == 0);
    return {.row_bytes = static_cast<std::int64_t>(bytes_of_row(x_RD)),
            .x = bytes_of(x_RD),
            .sums = bytes_of(sums),
            .y = bytes_of(y_tD),
            .accumulate = write == Write::kAccumulate,
            .weights_R = nullptr,
            .d_weights_R = nullptr,
            .window_d_weights_tK = nullptr,
            .d_weights_tK = nullptr};
  }

  void do_combine(const Context& op, const Tensor& out_RD, const DispatchSaved& saved, const Tensor& y_tD,
                  Write write) override {
    if (op.measuring()) return;
    SumsArgs args = sums_args(out_RD, y_tD, write);
    args.weights_R = saved.weights_R.data<float>();
    launch_sums(op.cuda->stream(), options().dtype, call_args(Call::kCombine, saved), args);
  }

  void do_dispatch_backward(const Context& op, const Tensor& d_x_RD, const Tensor& d_weights_R,
                            const DispatchSaved& saved, const Tensor& d_y_tD, Write write,
                            const Tensor& d_weights_tK) override {
    if (op.measuring()) return;
    SumsArgs args = sums_args(d_x_RD, d_y_tD, write);
    args.d_weights_R = d_weights_R.data<float>();
    args.window_d_weights_tK = window_.d_weights_tK(group_.rank()).data<float>();
    args.d_weights_tK = d_weights_tK.data<float>();
    launch_sums(op.cuda->stream(), options().dtype, call_args(Call::kDispatchBackward, saved), args);
  }

  Buffer_ state_, report_;
  std::vector<std::string> layers_;  // the names of all layers for which calls were made
};

}  // namespace

std::unique_ptr<Dispatcher> make_gpu_direct_dispatcher(const DispatchOptions& options, ProcessGroup& group) {
  return std::make_unique<GpuDirectDispatcher>(options, group);
}

}  // namespace tessera::ep
