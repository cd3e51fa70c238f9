#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda_graph.h"

// Defines the functions of cuda.h and cuda_graph.h for a build without CUDA. Those that need a GPU throw Error.
namespace tessera::cuda {

namespace {
[[noreturn]] void refuse() { fail("no GPU: {}", why_unavailable()); }
}  // namespace

bool is_built() { return false; }

const char* why_unavailable() {
  return "this build of Tessera has no CUDA: `make install PRESET=release` builds it in where nvcc 12.8 or newer is on "
         "the PATH; or run on a CPU";
}

int num_devices() { return 0; }
void use_device(int) { refuse(); }

std::byte* allocate_zeroed(std::size_t) { refuse(); }
void free_memory(std::byte*) noexcept {}
std::size_t free_memory_bytes() { refuse(); }
std::size_t total_memory_bytes() { refuse(); }
std::byte* allocate_pinned(std::size_t) { refuse(); }
void free_pinned(std::byte*) noexcept {}
const char* pin(std::byte*, std::size_t) { refuse(); }
void unpin(std::byte*) noexcept {}

Stream::Stream(Priority /*priority*/) { refuse(); }
Stream::~Stream() = default;
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
bool Stream::is_recording() const { refuse(); }
void Stream::synchronize() const { refuse(); }

void Stream::wait(const Fence&) const { refuse(); }
void Stream::wait(const Event&) const { refuse(); }

EventHandle::~EventHandle() = default;
EventHandle::EventHandle(EventHandle&&) noexcept = default;
EventHandle& EventHandle::operator=(EventHandle&&) noexcept = default;
void Fence::record(const Stream&) { refuse(); }
void Event::record(const Stream&) { refuse(); }
const char* Event::wait() const { refuse(); }
bool Event::passed() const { refuse(); }
double Event::seconds_since(const Event&) const { refuse(); }

void copy_bytes(const Stream&, const void*, std::size_t, void*) { refuse(); }
void call_on_host(const Stream&, void (*)(void*), void*) { refuse(); }

Graph::Graph(const Stream&, const std::function<void()>&) { refuse(); }
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
void Graph::launch(const Stream&) const { refuse(); }
GraphLoop::GraphLoop(const Stream& recording) : recording_(recording.handle()) { refuse(); }
void GraphLoop::record(const Stream&, const std::function<void()>&) { refuse(); }

}  // namespace tessera::cuda
