// Includes the backends' headers for what they say of themselves. It makes none of them, so that a reader of
// configurations is linked without what moves tokens.
#include "ep/backends/backend_choices.h"

#include <fmt/format.h>

#include <span>

#include "ep/backends/all_backends.h"

namespace tessera {

namespace {

struct ChoiceOfBackend {
  DispatchBackend backend;
  BackendChoice choice;
};

template <typename... Backends>
std::vector<ChoiceOfBackend> all_choices(ep::BackendList<Backends...>) {
  std::vector<ChoiceOfBackend> result;
  const auto add = [&](const DispatchBackend& backend, std::span<const BackendChoice> choices) {
    for (const BackendChoice& choice : choices) result.push_back({backend, choice});
  };
  (add(Backends::kBackend, Backends::kChoices), ...);
  return result;
}

}  // namespace

std::vector<std::pair<std::string, DispatchBackend>> dispatch_backends() {
  std::vector<std::pair<std::string, DispatchBackend>> result;
  for (const auto& [backend, choice] : all_choices(ep::AllBackends{})) result.emplace_back(choice.value, backend);
  return result;
}

std::string dispatch_backends_help() {
  std::string help = "how tokens go to their experts";
  const char* separator = ": ";
  for (const auto& [backend, choice] : all_choices(ep::AllBackends{})) {
    help += fmt::format("{}{}, by {}", separator, choice.value, choice.help);
    separator = "; ";
  }
  return help;
}

}  // namespace tessera
