// What CUDA operators need besides their operands: the stream, the libraries' handles, and a record of the last
// operators.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda_graph.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

/// Records the last operators that were put on the stream. The GPU reports failures late, and the record shows what may
/// have caused one. It is a ring of fixed size, so recording allocates nothing.
class FlightRecorder {
 public:
  void begin(const char* name);
  void note(const Tensor& operand);
  /// Returns one line per operator, oldest first, with the dtypes and shapes of its operands.
  std::string dump() const;

 private:
  static constexpr std::size_t kOperators = 64, kOperands = 12;
  struct Entry {
    const char* name = nullptr;
    std::size_t num_operands = 0;
    std::array<Tensor, kOperands> operands;
  };
  std::array<Entry, kOperators> entries_;
  std::size_t num_noted_ = 0;
};

/// There is one per rank. One thread at a time uses it. The constructor throws Error if there is no GPU.
///
/// Operators run on stream(). The calls of a dispatcher have a stream of their own, and operators that run beside a
/// call have fewer SMs (ops/kit/call_stream.h). The runtimes for these are made by the functions below. They share the
/// settings of the one that makes them.
class Runtime {
 public:
  /// Uses the thread's GPU. `priority` is that of the stream and of calls.
  explicit Runtime(Priority priority = Priority::kNormal);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const Stream& stream() const { return *stream_; }
  /// Returns the number of SMs that operators may use.
  int num_sms() const { return num_sms_; }
  /// Returns the major number of the GPU's compute capability: 9 for Hopper, 10 for Blackwell.
  int compute_capability() const { return compute_capability_; }
  FlightRecorder& recorder() { return shared_->recorder; }
  /// Makes the calling thread use this runtime's GPU.
  void use_device() const { cuda::use_device(device_); }

  /// Reserves num_sms SMs for kernels that occupy their SM for a long time. It must be called before the first
  /// operator.
  void leave_sms(int num_sms);

  /// Returns the runtime of the calls, and its stream.
  Runtime& calls();
  const Stream& stream_of_calls() const { return *stream_of_calls_; }
  /// Returns a runtime for operators on the same stream, whose kernels that stay on an SM leave `num_sms` SMs free. The
  /// first call creates it. Later calls return the same one and must pass the same num_sms. With 0 it is this one.
  Runtime& leaving(int num_sms);
  /// Returns a runtime that leaves SMs, too, but has a stream of its own. Its priority is the lowest, so it yields
  /// where others want the same SMs.
  Runtime& beside(int num_sms);

  /// Makes the work that `run` puts on stream() the body of a loop in the graph that stream() is recording.
  void record_loop(GraphLoop& loop, const std::function<void()>& run);

  /// Returns whether two runs give the same bits. This costs time and scratch memory. Otherwise, gradients that cuDNN
  /// sums up may differ in their last bits. It must be set before a step is measured.
  bool deterministic() const { return shared_->deterministic; }
  void set_deterministic(bool deterministic) { shared_->deterministic = deterministic; }

  /// Returns whether grouped products in bfloat16 run on the library's kernel also where Hopper has a faster one. Tests
  /// set it, since a Blackwell uses that kernel. It must be set before a step is measured.
  bool prefers_library_grouped_gemm() const { return shared_->prefers_library_grouped_gemm; }
  void prefer_library_grouped_gemm(bool prefer) { shared_->prefers_library_grouped_gemm = prefer; }

  /// Returns which operators do not use their fast kernels, and why. Operators add these texts while a step is
  /// measured. Each text occurs once.
  const std::vector<std::string>& slow_operators() const { return shared_->slow_operators; }
  void add_slow_operator(const std::string& text);

  /// Sets a function that does the waiting of the functions below. It may give up and throw. It is for runs on several
  /// ranks, where the failure of one rank can make the other ranks' GPUs hang.
  using Wait = std::function<void(const Event&, const std::function<void()>& check)>;
  void set_wait(Wait wait) { shared_->wait = std::move(wait); }

  /// Waits for all operators. If one failed, throws Error with the CUDA error and the last operators.
  void synchronize();

  /// Waits for an event on the stream, with the same errors as synchronize(). `check` may be called meanwhile, and may
  /// throw.
  void wait(const Event& event, const std::function<void()>& check = {});

  /// Copies a contiguous tensor from the GPU to the host, and waits for it with the same errors as synchronize().
  void fetch(const Tensor& tensor, void* target);

  /// Holds the libraries' handles and plans (ops/runtime/libraries.h).
  class Libraries;
  Libraries& libraries();

 private:
  /// What a runtime and those that it has created share.
  struct Shared {
    bool deterministic = false;
    bool prefers_library_grouped_gemm = false;
    std::vector<std::string> slow_operators;
    FlightRecorder recorder;
    Wait wait;
  };
  Runtime(Runtime& main, std::shared_ptr<Stream> stream, int num_sms, int sm_target);

  /// Returns `made`. If it does not exist, creates it on `stream`, or on a new stream if that is null.
  Runtime& make(std::unique_ptr<Runtime>& made, int num_sms, std::shared_ptr<Stream> stream);

  Runtime* main_ = nullptr;  // null: this one
  std::shared_ptr<Stream> stream_, stream_of_calls_;
  int device_ = 0;
  int num_sms_ = 0, sm_target_ = 0;  // sm_target_ is for libraries; 0 means all SMs
  int compute_capability_ = 0;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::unique_ptr<Libraries> libraries_;
  std::unique_ptr<Runtime> calls_, leaving_, beside_;
};

/// Returns a new runtime. Throws Error if there is no GPU, and in a build without CUDA.
std::shared_ptr<Runtime> make_runtime();

}  // namespace tessera::cuda
