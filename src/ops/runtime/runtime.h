// What CUDA operators need besides their operands: the stream, the libraries' handles, and a record of the last
// operators.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

/// The last operators that were put on the stream, oldest first: after a failure, which the GPU reports late, what may
/// have caused it. A fixed ring; noting allocates nothing.
class FlightRecorder {
 public:
  void begin(const char* name);
  void note(const Tensor& operand);
  /// One operator a line, with the dtypes and shapes of its operands.
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

/// One per thread that runs operators on the GPU. Throws Error where there is none.
class Runtime {
 public:
  Runtime();
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const Stream& stream() const { return stream_; }
  /// Returns how many SMs operators may use.
  int num_sms() const { return num_sms_; }
  /// Its major number: 9 is Hopper, 10 Blackwell.
  int compute_capability() const { return compute_capability_; }
  FlightRecorder& recorder() { return *recorder_; }

  /// Leaves so many of them to kernels that stay on their SM for long. Before the first operator.
  void leave_sms(int num_sms);

  /// For operators that run beside this one's (ops/kit/side_stream.h): another stream, behind this one where both want
  /// the same SMs, whose kernels that stay on an SM leave `num_sms` of them free. Made by the first call; the same
  /// afterwards.
  Runtime& beside(int num_sms);

  /// Whether two runs give the same bits, at a price in time and scratch memory. Without it, gradients that cuDNN sums
  /// up may differ in their last bits. To be set before a step is measured.
  bool deterministic() const { return deterministic_; }
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }

  /// Which operators do not run by their fast kernels, and why: while a step is measured they say so, each text once.
  const std::vector<std::string>& slow_operators() const { return slow_operators_; }
  void add_slow_operator(const std::string& text);

  /// Has `wait` do the waiting below, which may give up and throw: on several ranks, where what one of them does not do
  /// can hang the others' GPUs.
  using Wait = std::function<void(const Event&, const std::function<void()>& check)>;
  void set_wait(Wait wait) { wait_ = std::move(wait); }

  /// Waits for all operators. Throws Error, with the CUDA error and the last operators, if one failed.
  void synchronize();

  /// Waits for an event on the stream, as above. `check` may be called meanwhile, and throw.
  void wait(const Event& event, const std::function<void()>& check = {});

  /// Copies a contiguous tensor of the GPU to the host, and waits for it as above.
  void fetch(const Tensor& tensor, void* target);

  /// The libraries' handles and plans (ops/runtime/libraries.h).
  class Libraries;
  Libraries& libraries();

 private:
  Runtime(const Runtime& main, int num_sms);

  Stream stream_;
  int num_sms_ = 0, sm_target_ = 0;  // the latter: for libraries, 0: all
  int compute_capability_ = 0;
  bool deterministic_ = false;
  std::vector<std::string> slow_operators_;
  std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  Wait wait_;
  std::unique_ptr<Libraries> libraries_;
  std::unique_ptr<Runtime> beside_;
};

/// A new one. Throws Error where there is no GPU, also in a build without CUDA.
std::shared_ptr<Runtime> make_runtime();

}  // namespace tessera::cuda
