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
                      sizeof(CopyChoice)) {
  const auto take = [&](std::size_t num_bytes) { return std::exchange(num_bytes_, num_bytes_ + align_up(num_bytes)); };
  const auto take_tensor = [&](const Shape& shape, DType dtype) {
    return take(static_cast<std::size_t>(shape.num_elements()) * size_of(dtype));
  };
  const auto take_payload = [&](PayloadPrecision precision) {
    const std::size_t begin = num_bytes_;
    static_cast<void>(
        allocate_payload(max_rows, options.dim, options.dtype, precision, [&](const Shape& shape, DType dtype) {
          take_tensor(shape, dtype);
          return Tensor(nullptr, shape, dtype, Device::kMeta);
        }));
    return begin;
  };
  const std::int64_t tokens = options.max_tokens;
  flags_ = take(sizeof(FlagWord) * static_cast<std::size_t>(kNumFlags * num_ranks_));
  const bool on_gpus = options.device == Device::kCuda;
  counts_ = take_tensor({on_gpus ? 2 * num_ranks_ : num_ranks_, options.num_experts}, DType::kInt32);
  if (on_gpus) {
    places_ = take_tensor({num_ranks_ * tokens}, DType::kInt32);
    choices_ = take_tensor({num_ranks_ * tokens, options.top_k, 2}, DType::kInt32);
  } else {
    num_copies_ = take_tensor({num_ranks_}, DType::kInt32);
    copies_ = take(static_cast<std::size_t>(num_ranks_ * tokens) * copy_bytes_);
  }
  rows_ = take_payload(options.dispatch_forward);
  gradients_ = take_payload(options.combine_backward);
  sums_ = take_tensor({tokens * max_ranks_of_token_, options.dim}, options.dtype);
  d_weights_ = take_tensor({tokens, options.top_k}, DType::kFloat32);
}

std::atomic<std::uint64_t>& DirectWindow::flag(int rank, Flag flag, int source) const {
  return reinterpret_cast<FlagWord*>(at(rank, flags_))[static_cast<std::int64_t>(flag) * num_ranks_ + source].epoch;
}

CopyRecord* DirectWindow::copy(int rank, int source, std::int64_t i) const {
  const std::int64_t number = source * options_.max_tokens + i;
  return reinterpret_cast<CopyRecord*>(at(rank, copies_ + static_cast<std::size_t>(number) * copy_bytes_));
}

Tensor DirectWindow::tensor(int rank, std::size_t offset, const Shape& shape, DType dtype) const {
  if (window_ == nullptr) return Tensor(nullptr, shape, dtype, Device::kMeta);
  return Tensor(at(rank, offset), shape, dtype, options_.device);
}

Tensor DirectWindow::counts_PE(int rank) const {
  return tensor(rank, counts_, {num_ranks_, options_.num_experts}, DType::kInt32);
}

Tensor DirectWindow::num_copies_P(int rank) const { return tensor(rank, num_copies_, {num_ranks_}, DType::kInt32); }

Tensor DirectWindow::place_Pt(int rank) const {
  return tensor(rank, places_, {num_ranks_ * options_.max_tokens}, DType::kInt32);
}

Tensor DirectWindow::choice_PtK(int rank) const {
  return tensor(rank, choices_, {num_ranks_ * options_.max_tokens, options_.top_k, 2}, DType::kInt32);
}

Payload DirectWindow::payload(int rank, std::size_t offset, PayloadPrecision precision) const {
  return allocate_payload(max_rows_, options_.dim, options_.dtype, precision, [&](const Shape& shape, DType dtype) {
    const Tensor part = tensor(rank, offset, shape, dtype);
    offset += align_up(part.num_bytes());
    return part;
  });
}

Payload DirectWindow::rows(int rank) const { return payload(rank, rows_, options_.dispatch_forward); }

Payload DirectWindow::gradients(int rank) const { return payload(rank, gradients_, options_.combine_backward); }

Tensor DirectWindow::sums(int rank) const {
  return tensor(rank, sums_, {options_.max_tokens * max_ranks_of_token_, options_.dim}, options_.dtype);
}

Tensor DirectWindow::d_weights_tK(int rank) const {
  return tensor(rank, d_weights_, {options_.max_tokens, options_.top_k}, DType::kFloat32);
}

WindowDispatcher::WindowDispatcher(const DispatchOptions& options, ProcessGroup& group)
    : Dispatcher(options, group.size()),
      group_(group),
      window_(group.size(), options, max_rows(options.max_tokens, options.max_alignment)),
      max_ranks_of_token_(std::min<std::int64_t>(options.top_k, group.size())) {}

Payload WindowDispatcher::rows_of(int rank, Buffer buffer, const DispatchSaved& saved) const {
  const Payload all = buffer == Buffer::kRows ? window_.rows(rank) : window_.gradients(rank);
  return all.first_rows(saved.num_rows());
}

Tensor WindowDispatcher::in_window(const Context& op, Buffer buffer, const DispatchSaved& saved) const {
  const Tensor rows = rows_of(group_.rank(), buffer, saved).plain;
  if (!rows.defined() || !op.measuring()) return rows;
  return Tensor(nullptr, rows.shape(), rows.dtype(), Device::kMeta);
}

Tensor WindowDispatcher::rows_in_window(const Context& op, const DispatchSaved& saved) const {
  return in_window(op, Buffer::kRows, saved);
}

Tensor WindowDispatcher::gradients_in_window(const Context& op, const DispatchSaved& saved) const {
  return in_window(op, Buffer::kGradients, saved);
}

std::string WindowDispatcher::missing(Flag flag, int source, std::uint64_t expected, std::uint64_t seen) const {
  return fmt::format("; it waits for rank {} of {} to {}: epoch {} expected, {} seen", source, group_.axis(),
                     flag == Flag::kReady ? "come" : "store its rows", expected, seen);
}

}  // namespace tessera::ep
