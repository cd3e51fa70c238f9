// What an optimizer keeps for every number of the parameters.
#pragma once

#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace tessera {

/// Describes a tensor with one number per parameter number, in a flat buffer of its own. Its name in checkpoints is the
/// parameter's name + `suffix`.
struct OptimizerTensor {
  std::string suffix;
  DType dtype = DType::kFloat32;
};
using OptimizerTensors = std::vector<OptimizerTensor>;

/// Returns the two moments of AdamW, with PyTorch's names.
inline OptimizerTensors adamw_tensors(DType moments = DType::kFloat32) {
  return {{".exp_avg", moments}, {".exp_avg_sq", moments}};
}

}  // namespace tessera
