#include "step/fault_injection.h"

#include <limits>

#include "base/file.h"
#include "system/host_name.h"

namespace tessera {

bool FaultInjection::hits(std::int64_t step) {
  const auto& debug = config_.debug;
  if (debug.nan_at_step != step || num_hits_ >= debug.nan_count) return false;
  if (debug.nan_on_rank >= 0 && debug.nan_on_rank != mesh_.rank()) return false;
  if (!debug.nan_on_host.empty() && debug.nan_on_host != host_name()) return false;
  ++num_hits_;
  return true;
}

void FaultInjection::poison(const Context& op, Model& model) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr double kNanLoss = std::numeric_limits<double>::quiet_NaN();
  const Parameters& parameters = model.parameters();
  parameters.assign(parameters.all_gradients().rows(0, 1), as_bytes_of(kNan));
  if (op.cuda != nullptr) parameters.assign(model.sums().main_loss(op.device()), as_bytes_of(kNanLoss));
}

}  // namespace tessera
