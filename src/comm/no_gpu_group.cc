#include "base/error.h"
#include "comm/gpu_group.h"

// Defines GpuGroup for a build without CUDA. All that needs a GPU throws Error.
namespace tessera::cuda {

namespace {
[[noreturn]] void refuse() { fail("no GPU: {}", why_unavailable()); }
}  // namespace

struct GpuGroup::Family {};
struct GpuGroup::Member {};

GpuGroup::Id GpuGroup::make_id() { refuse(); }
GpuGroup::GpuGroup(const Id&, int, int, const Stream&, const Stream&, Progress&) { refuse(); }
GpuGroup::~GpuGroup() = default;
std::unique_ptr<GpuGroup> GpuGroup::split(int, int, int, Traffic) { refuse(); }
std::unique_ptr<GpuGroup> GpuGroup::link(const Id&, int) const { refuse(); }
Fence GpuGroup::all_gather(const Tensor&, const Tensor&, const std::string&) { refuse(); }
Fence GpuGroup::reduce_scatter(const Tensor&, const Tensor&, Write, const std::string&) { refuse(); }
Fence GpuGroup::reduce_scatter_as_bfloat16(const Tensor&, const Tensor&, Write, const std::string&) { refuse(); }
Fence GpuGroup::all_reduce(const Tensor&, const std::string&) { refuse(); }
Fence GpuGroup::all_to_all_v(const Tensor&, std::span<const std::int64_t>, const Tensor&, std::span<const std::int64_t>,
                             std::size_t, const std::string&) {
  refuse();
}
bool GpuGroup::open_counted(std::size_t) { refuse(); }
bool GpuGroup::is_open_for_counted() const { refuse(); }
Fence GpuGroup::all_to_all_counted(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::string&) {
  refuse();
}
Fence GpuGroup::broadcast(const Tensor&, int, const std::string&) { refuse(); }
Fence GpuGroup::send(const Tensor&, int, const std::string&) { refuse(); }
Fence GpuGroup::receive(const Tensor&, int, const std::string&) { refuse(); }
std::unique_ptr<SymmetricWindow> GpuGroup::allocate_window(std::size_t) { refuse(); }
const Stream& GpuGroup::computation() const { refuse(); }
void GpuGroup::check() const { refuse(); }
std::string GpuGroup::describe() const { refuse(); }
std::uint64_t GpuGroup::position() const { refuse(); }
void GpuGroup::mark() const { refuse(); }
void GpuGroup::abort() noexcept {}

}  // namespace tessera::cuda
