#include "ep/direct/direct_window.h"

namespace tessera::ep {
namespace {

std::size_t align_up(std::size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

DirectWindow::DirectWindow(int num_ranks, const DispatchOptions& options, std::int64_t max_rows)
    : options_(options),
      num_ranks_(num_ranks),
      max_rows_(max_rows),
      max_ranks_of_token_(std::min<std::int64_t>(options.top_k, num_ranks)),
      copy_bytes_(sizeof(CopyRecord) +
                  static_cast<std::size_t>(std::min(options.top_k, options.num_experts / num_ranks)) *
                      sizeof(CopyChoice)),
      layout_(make_layout()) {}

DirectWindow::Layout DirectWindow::make_layout() const {
  Layout layout;
  const auto take = [&](std::size_t num_bytes) {
    return std::exchange(layout.num_bytes, layout.num_bytes + align_up(num_bytes));
  };
  const auto take_tensor = [&](const Shape& shape, DType dtype) {
    return take(static_cast<std::size_t>(shape.num_elements()) * size_of(dtype));
  };
  const auto take_payload = [&](PayloadPrecision precision) {
    const std::size_t begin = layout.num_bytes;
    static_cast<void>(
        allocate_payload(max_rows_, options_.dim, options_.dtype, precision, [&](const Shape& shape, DType dtype) {
          take_tensor(shape, dtype);
          return Tensor(nullptr, shape, dtype, Device::kMeta);
        }));
    return begin;
  };
  const std::int64_t tokens = options_.max_tokens;
  layout.flags = take(sizeof(FlagWord) * static_cast<std::size_t>(kNumFlags * num_ranks_));
  const bool on_gpus = options_.device == Device::kCuda;
  layout.counts = take_tensor({on_gpus ? 2 * num_ranks_ : num_ranks_, options_.num_experts}, DType::kInt32);
  if (on_gpus) {
    layout.places = take_tensor({num_ranks_ * tokens}, DType::kInt32);
    layout.choices = take_tensor({num_ranks_ * tokens, options_.top_k, 2}, DType::kInt32);
  } else {
    layout.num_copies = take_tensor({num_ranks_}, DType::kInt32);
    layout.copies = take(static_cast<std::size_t>(num_ranks_ * tokens) * copy_bytes_);
  }
  layout.rows = take_payload(options_.dispatch_forward);
  layout.gradients = take_payload(options_.combine_backward);
  layout.sums = take_tensor({tokens * max_ranks_of_token_, options_.dim}, options_.dtype);
  layout.d_weights = take_tensor({tokens, options_.top_k}, DType::kFloat32);
  return layout;
}

std::atomic<std::uint64_t>& DirectWindow::flag(int rank, Flag flag, int source) const {
  return reinterpret_cast<FlagWord*>(at(rank, layout_.flags))[static_cast<std::int64_t>(flag) * num_ranks_ + source]
      .epoch;
}

CopyRecord* DirectWindow::copy(int rank, int source, std::int64_t i) const {
  const std::int64_t number = source * options_.max_tokens + i;
  return reinterpret_cast<CopyRecord*>(at(rank, layout_.copies + static_cast<std::size_t>(number) * copy_bytes_));
}

Tensor DirectWindow::tensor(int rank, std::size_t offset, const Shape& shape, DType dtype) const {
  if (window_ == nullptr) return Tensor(nullptr, shape, dtype, Device::kMeta);
  return Tensor(at(rank, offset), shape, dtype, options_.device);
}

Tensor DirectWindow::counts_PE(int rank) const {
  return tensor(rank, layout_.counts, {num_ranks_, options_.num_experts}, DType::kInt32);
}

Tensor DirectWindow::num_copies_P(int rank) const {
  return tensor(rank, layout_.num_copies, {num_ranks_}, DType::kInt32);
}

Tensor DirectWindow::place_Pt(int rank) const {
  return tensor(rank, layout_.places, {num_ranks_ * options_.max_tokens}, DType::kInt32);
}

Tensor DirectWindow::choice_PtK(int rank) const {
  return tensor(rank, layout_.choices, {num_ranks_ * options_.max_tokens, options_.top_k, 2}, DType::kInt32);
}

Payload DirectWindow::payload(int rank, std::size_t offset, PayloadPrecision precision) const {
  return allocate_payload(max_rows_, options_.dim, options_.dtype, precision, [&](const Shape& shape, DType dtype) {
    const Tensor part = tensor(rank, offset, shape, dtype);
    offset += align_up(part.num_bytes());
    return part;
  });
}

Payload DirectWindow::rows(int rank) const { return payload(rank, layout_.rows, options_.dispatch_forward); }

Payload DirectWindow::gradients(int rank) const { return payload(rank, layout_.gradients, options_.combine_backward); }

Tensor DirectWindow::sums(int rank) const {
  return tensor(rank, layout_.sums, {options_.max_tokens * max_ranks_of_token_, options_.dim}, options_.dtype);
}

Tensor DirectWindow::d_weights_tK(int rank) const {
  return tensor(rank, layout_.d_weights, {options_.max_tokens, options_.top_k}, DType::kFloat32);
}

WindowDispatcher::WindowDispatcher(const DispatchOptions& options, ProcessGroup& group)
    : Dispatcher(options, group.size()),
      group_(group),
      window_(group.size(), options, max_rows(options.max_tokens, options.max_alignment)) {}

Payload WindowDispatcher::rows_of(int rank, Buffer buffer, const DispatchSaved& saved) const {
  const Payload all = buffer == Buffer::kRows ? window_.rows(rank) : window_.gradients(rank);
  return all.first_rows(saved.num_rows());
}

Tensor WindowDispatcher::in_window(const Context& op, Buffer buffer, const DispatchSaved& saved) const {
  const Tensor rows = rows_of(group_.rank(), buffer, saved).plain;
  if (!rows.defined() || !op.measuring()) return rows;
  return Tensor(nullptr, rows.shape(), rows.dtype(), Device::kMeta);
}

Tensor WindowDispatcher::do_rows_in_window(const Context& op, const DispatchSaved& saved) const {
  return in_window(op, Buffer::kRows, saved);
}

Tensor WindowDispatcher::do_gradients_in_window(const Context& op, const DispatchSaved& saved) const {
  return in_window(op, Buffer::kGradients, saved);
}

std::string WindowDispatcher::missing(Flag flag, int source, std::uint64_t expected, std::uint64_t seen) const {
  return fmt::format("; it waits for rank {} of {} to {}: epoch {} expected, {} seen", source, group_.axis(),
                     flag == Flag::kReady ? "come" : "store its rows", expected, seen);
}

}  // namespace tessera::ep
