// Summarises what a probe found.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "health/probe.h"

namespace tessera {

/// Returns findings as sorted texts such as "gpuXid GPU 3". The part is left out if there is none.
inline std::vector<std::string> names_of(const std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const Finding& finding : findings) {
    names.push_back(finding.part.empty() ? finding.signal : finding.signal + " " + finding.part);
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace tessera
