// What both model checkers of the direct protocol share: the calls, and changes of their steps.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "ep/direct/protocol.h"

namespace tessera::ep {

inline constexpr Call kD = Call::kDispatch, kA = Call::kDispatchAgain, kC = Call::kCombine,
                      kCB = Call::kCombineBackward, kDB = Call::kDispatchBackward;

/// Changes the steps of a call, for a test.
using Mutation = std::function<std::vector<Step>(Call, std::vector<Step>)>;

/// Removes the steps in `left_out` from calls of these kinds.
inline Mutation without(const std::vector<Call>& calls, const std::vector<Step>& left_out) {
  return [=](Call call, std::vector<Step> steps) {
    if (std::find(calls.begin(), calls.end(), call) == calls.end()) return steps;
    std::erase_if(
        steps, [&](const Step& step) { return std::find(left_out.begin(), left_out.end(), step) != left_out.end(); });
    return steps;
  };
}

}  // namespace tessera::ep
