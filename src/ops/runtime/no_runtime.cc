#include "base/error.h"
#include "ops/runtime/inventory.h"
#include "ops/runtime/kernel_profile.h"
#include "ops/runtime/runtime.h"

// A build without CUDA has these functions in place of runtime.cc. It never creates a Runtime.
namespace tessera::cuda {

class Runtime::Libraries {};

Runtime::Runtime(Priority) {}
Runtime::~Runtime() = default;
Runtime& Runtime::calls() { return *this; }
Runtime& Runtime::leaving(int) { return *this; }
Runtime& Runtime::beside(int) { return *this; }
void Runtime::synchronize() {}
void Runtime::leave_sms(int) {}
void Runtime::wait(const Event&, const std::function<void()>&) {}
void Runtime::fetch(const Tensor&, void*) {}

Inventory take_inventory() { return {}; }
std::vector<std::string> gpu_names() { return {}; }
std::string gpu_name() { fail("no GPU: {}", why_unavailable()); }

KernelProfile::KernelProfile() { fail("no GPU: {}", why_unavailable()); }
KernelProfile::~KernelProfile() = default;
std::vector<KernelRun> KernelProfile::finish() { return {}; }
ProfiledRegion::ProfiledRegion(std::int64_t) {}
ProfiledRegion::~ProfiledRegion() = default;

std::shared_ptr<Runtime> make_runtime() { fail("no GPU: {}", why_unavailable()); }

}  // namespace tessera::cuda
