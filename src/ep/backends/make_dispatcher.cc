#include "ep/backends/make_dispatcher.h"

#include <array>

#include "base/error.h"
#include "ep/backends/local_dispatcher.h"
#include "ep/backends/standard_dispatcher.h"
#include "ep/backends/two_level_dispatcher.h"
#include "ep/direct/direct_dispatcher.h"
#include "ep/direct/gpu_direct_dispatcher.h"
#include "ops/runtime/backends.h"

namespace tessera {

namespace {

using Made = std::unique_ptr<Dispatcher>;

Made make_local(ProcessGroup& group, const DispatchOptions& options, ep::StepHook*) {
  TESSERA_CHECK(group.size() == 1, "{} ranks", group.size());
  return std::make_unique<ep::LocalDispatcher>(options);
}

Made make_direct(ProcessGroup& group, const DispatchOptions& options, ep::StepHook* hook) {
  if (options.device == Device::kCpu) return std::make_unique<ep::DirectDispatcher>(options, group, hook);
  TESSERA_CHECK(kHasCuda && hook == nullptr);
  if constexpr (kHasCuda) return ep::make_gpu_direct_dispatcher(options, group);
  return nullptr;
}

/// Makes a backend whose class needs no hook.
template <typename Backend>
Made make(ProcessGroup& group, const DispatchOptions& options, ep::StepHook*) {
  return std::make_unique<Backend>(options, group);
}

struct BackendRow {
  std::string_view value;  // of parallelism.expert_parallel_comm_backend; empty: a run cannot choose it
  DispatchBackend backend;
  std::string_view help;  // how it moves tokens
  Made (*make)(ProcessGroup&, const DispatchOptions&, ep::StepHook*);
};
constexpr std::array kBackends = {
    BackendRow{"", DispatchBackend::kLocal, "", make_local},
    BackendRow{"standard", DispatchBackend::kStandard, "all-to-alls", make<ep::StandardDispatcher>},
    BackendRow{"direct", DispatchBackend::kDirect, "direct stores into the other ranks' memory", make_direct},
    BackendRow{"deepep", DispatchBackend::kDirect, "the same stores", make_direct},
};

}  // namespace

std::vector<std::pair<std::string, DispatchBackend>> dispatch_backends() {
  std::vector<std::pair<std::string, DispatchBackend>> result;
  for (const BackendRow& row : kBackends) {
    if (!row.value.empty()) result.emplace_back(row.value, row.backend);
  }
  return result;
}

std::string dispatch_backends_help() {
  std::string help = "how tokens go to their experts";
  const char* separator = ": ";
  for (const BackendRow& row : kBackends) {
    if (row.value.empty()) continue;
    help += fmt::format("{}{}, by {}", separator, row.value, row.help);
    separator = "; ";
  }
  return help;
}

std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook) {
  for (const BackendRow& row : kBackends) {
    if (row.backend == backend) return row.make(group, options, hook);
  }
  TESSERA_CHECK(false, "no backend '{}'", backend.name);
  return nullptr;
}

std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook) {
  return std::make_unique<ep::TwoLevelDispatcher>(options, groups, hook);
}

}  // namespace tessera
