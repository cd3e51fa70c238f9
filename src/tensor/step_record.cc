#include "tensor/step_record.h"

namespace tessera {

RecordedOperator* StepRecord::begin(const char* name) {
  if (depth_++ > 0) return nullptr;
  operators_.push_back({.name = name, .operands = {}, .pass = pass_});
  begun_ = std::chrono::steady_clock::now();
  return &operators_.back();
}

void StepRecord::end(bool is_timed) {
  if (--depth_ > 0 || !is_timed) return;
  operators_.back().seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
}

void StepRecord::add_operand(RecordedOperator& call, const Tensor& tensor) const {
  bool has_rows = false;
  for (int i = 0; i < tensor.num_dims(); ++i) has_rows |= tensor.dim(i) == row_capacity_;
  call.operands.push_back({tensor.shape(), tensor.dtype(), has_rows ? used_rows_ : 1.0, has_rows});
  if (has_rows) call.layer = layer_of_rows_;
}

std::size_t StepRecord::begin_transfer(RecordedTransfer transfer) {
  transfer.pass = pass_;
  transfer.begin = transfer.end = operators_.size();
  transfers_.push_back(std::move(transfer));
  return transfers_.size() - 1;
}

StepRecord::Rows::Rows(StepRecord* record, std::string_view layer, std::int64_t capacity, double expected)
    : record_(record) {
  if (record == nullptr) return;
  layer_before_ = std::exchange(record->layer_of_rows_, std::string(layer));
  capacity_before_ = std::exchange(record->row_capacity_, capacity);
  used_before_ = std::exchange(record->used_rows_, expected / static_cast<double>(capacity));
}

StepRecord::Rows::~Rows() {
  if (record_ == nullptr) return;
  record_->layer_of_rows_ = layer_before_;
  record_->row_capacity_ = capacity_before_;
  record_->used_rows_ = used_before_;
}

}  // namespace tessera
