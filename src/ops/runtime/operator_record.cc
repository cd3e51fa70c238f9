#include "ops/runtime/operator_record.h"

namespace tessera {

RecordedOperator* OperatorRecord::begin(const char* name) {
  if (depth_++ > 0) return nullptr;
  operators_.push_back({.name = name, .operands = {}, .pass = pass_});
  begun_ = std::chrono::steady_clock::now();
  return &operators_.back();
}

void OperatorRecord::end(bool is_timed) {
  if (--depth_ > 0 || !is_timed) return;
  operators_.back().seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
}

}  // namespace tessera
