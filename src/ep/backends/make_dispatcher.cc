#include "ep/backends/make_dispatcher.h"

#include "base/error.h"
#include "ep/backends/local_dispatcher.h"
#include "ep/backends/standard_dispatcher.h"
#include "ep/backends/two_level_dispatcher.h"
#include "ep/direct/direct_dispatcher.h"
#include "ep/direct/gpu_direct_dispatcher.h"
#include "ops/runtime/backends.h"

namespace tessera {

std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook) {
  switch (backend) {
    case DispatchBackend::kLocal:
      TESSERA_CHECK(group.size() == 1, "{} ranks", group.size());
      return std::make_unique<ep::LocalDispatcher>(options);
    case DispatchBackend::kStandard:
      return std::make_unique<ep::StandardDispatcher>(options, group);
    case DispatchBackend::kDirect:
      break;
  }
  if (options.device == Device::kCpu) return std::make_unique<ep::DirectDispatcher>(options, group, hook);
  TESSERA_CHECK(kHasCuda && hook == nullptr);
  if constexpr (kHasCuda) return ep::make_gpu_direct_dispatcher(options, group);
  return nullptr;
}

std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook) {
  return std::make_unique<ep::TwoLevelDispatcher>(options, groups, hook);
}

}  // namespace tessera
