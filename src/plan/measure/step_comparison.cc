#include "plan/measure/step_comparison.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace tessera {
namespace {

std::string group_of(const RecordedOperator& call) {
  std::string name = call.name;
  if (call.accumulates) name += " +=";
  if (!call.operands.empty()) name += fmt::format(" {}", name_of(call.operands.front().dtype));
  return name;
}

}  // namespace

std::vector<ComparedOperators> compare_operators(std::span<const RecordedOperator> operators,
                                                 const std::function<OperatorTime(const RecordedOperator&)>& predict) {
  std::vector<ComparedOperators> groups;
  for (const RecordedOperator& call : operators) {
    const std::string name = group_of(call);
    auto group = std::ranges::find(groups, name, &ComparedOperators::name);
    if (group == groups.end()) group = groups.insert(group, {.name = name});
    ++group->num_calls;
    group->predicted += predict(call).seconds;
    group->measured += call.seconds;
  }
  std::ranges::stable_sort(groups, std::ranges::greater(),
                           [](const ComparedOperators& one) { return std::abs(one.predicted - one.measured); });
  return groups;
}

}  // namespace tessera
