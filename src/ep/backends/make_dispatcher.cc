#include "ep/backends/make_dispatcher.h"

#include <array>

#include "base/error.h"
#include "ep/backends/all_backends.h"
#include "ep/direct/gpu_direct_dispatcher.h"
#include "ep/domain_exchange.h"
#include "ops/runtime/backends.h"

namespace tessera {

namespace {

using Made = std::unique_ptr<Dispatcher>;

template <typename Backend>
Made make(ProcessGroup& group, const DispatchOptions& options, ep::StepHook*) {
  return std::make_unique<Backend>(options, group);
}

template <>
Made make<ep::LocalDispatcher>(ProcessGroup& group, const DispatchOptions& options, ep::StepHook*) {
  TESSERA_CHECK(group.size() == 1, "{} ranks", group.size());
  return std::make_unique<ep::LocalDispatcher>(options);
}

template <>
Made make<ep::DirectDispatcher>(ProcessGroup& group, const DispatchOptions& options, ep::StepHook* hook) {
  if (options.device == Device::kCpu) return std::make_unique<ep::DirectDispatcher>(options, group, hook);
  TESSERA_CHECK(kHasCuda && hook == nullptr);
  if constexpr (kHasCuda) return ep::make_gpu_direct_dispatcher(options, group);
  return nullptr;
}

struct Maker {
  DispatchBackend backend;
  Made (*make)(ProcessGroup&, const DispatchOptions&, ep::StepHook*);
};

template <typename... Backends>
constexpr auto makers(ep::BackendList<Backends...>) {
  return std::array{Maker{Backends::kBackend, make<Backends>}...};
}

}  // namespace

std::unique_ptr<Dispatcher> make_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                            const DispatchOptions& options, ep::StepHook* hook) {
  for (const Maker& maker : makers(ep::AllBackends{})) {
    if (maker.backend == backend) return maker.make(group, options, hook);
  }
  TESSERA_CHECK(false, "no backend '{}'", backend.name);
  return nullptr;
}

std::unique_ptr<Dispatcher> make_two_level_dispatcher(const DomainGroups& groups, const DispatchOptions& options,
                                                      ep::StepHook* hook) {
  const ProcessGroup &all = groups.all, &within = groups.within, &across = groups.across;
  TESSERA_CHECK(options.num_domains == 1 && all.size() == across.size() * within.size() &&
                    all.rank() == across.rank() * within.size() + within.rank(),
                "rank {} of {} is {} of {} in domain {} of {}", all.rank(), all.size(), within.rank(), within.size(),
                across.rank(), across.size());
  auto exchange = std::make_unique<DomainExchange>(options, all.size(), groups.across);
  auto dispatcher = make_dispatcher(DispatchBackend::kDirect, groups.within, exchange->options_within(), hook);
  dispatcher->set_exchange(std::move(exchange));
  return dispatcher;
}

}  // namespace tessera
