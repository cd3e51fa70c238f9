#include "ops/runtime/runtime.h"

#include <algorithm>
#include <utility>

#include "device/cuda_check.h"
#include "ops/runtime/backends.h"
#include "ops/runtime/libraries.h"

namespace tessera::cuda {

void FlightRecorder::begin(const char* name) {
  Entry& entry = entries_[num_noted_++ % kOperators];
  entry.name = name;
  entry.num_operands = 0;
}

void FlightRecorder::note(const Tensor& operand) {
  Entry& entry = entries_[(num_noted_ - 1) % kOperators];
  if (operand.defined() && entry.num_operands < kOperands) entry.operands[entry.num_operands++] = operand;
}

std::string FlightRecorder::dump() const {
  std::string text;
  for (std::size_t i = num_noted_ > kOperators ? num_noted_ - kOperators : 0; i < num_noted_; ++i) {
    const Entry& entry = entries_[i % kOperators];
    text += fmt::format("  {} {}", i + 1, entry.name);
    for (std::size_t operand = 0; operand < entry.num_operands; ++operand) {
      const Tensor& tensor = entry.operands[operand];
      text += fmt::format(" {}{}", name_of(tensor.dtype()), tensor.shape().to_string());
    }
    text += '\n';
  }
  return text;
}

Runtime::Runtime(Priority priority)
    : stream_(std::make_shared<Stream>(priority)), stream_of_calls_(std::make_shared<Stream>(priority)) {
  TESSERA_CUDA(cudaGetDevice(&device_));
  TESSERA_CUDA(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_));
  TESSERA_CUDA(cudaDeviceGetAttribute(&compute_capability_, cudaDevAttrComputeCapabilityMajor, device_));
}

Runtime::Runtime(Runtime& main, std::shared_ptr<Stream> stream, int num_sms, int sm_target)
    : main_(&main),
      stream_(std::move(stream)),
      stream_of_calls_(main.stream_of_calls_),
      device_(main.device_),
      num_sms_(num_sms),
      sm_target_(sm_target),
      compute_capability_(main.compute_capability_),
      shared_(main.shared_) {}

Runtime::~Runtime() = default;

void Runtime::leave_sms(int num_sms) {
  if (num_sms == 0) return;
  TESSERA_CHECK(libraries_ == nullptr && calls_ == nullptr && leaving_ == nullptr && beside_ == nullptr &&
                    0 < num_sms && num_sms < num_sms_,
                "{} of {} SMs", num_sms, num_sms_);
  sm_target_ = num_sms_ -= num_sms;
}

void Runtime::add_slow_operator(const std::string& text) {
  std::vector<std::string>& all = shared_->slow_operators;
  if (std::ranges::find(all, text) == all.end()) all.push_back(text);
}

Runtime& Runtime::calls() {
  if (stream_ == stream_of_calls_) return *this;
  if (main_ != nullptr) return main_->calls();
  if (calls_ == nullptr) calls_.reset(new Runtime(*this, stream_of_calls_, num_sms_, sm_target_));
  return *calls_;
}

Runtime& Runtime::make(std::unique_ptr<Runtime>& made, int num_sms, std::shared_ptr<Stream> stream) {
  TESSERA_CHECK(0 < num_sms && num_sms < num_sms_, "{} of {} SMs", num_sms, num_sms_);
  const int left = num_sms_ - num_sms;
  if (made == nullptr) {
    if (stream == nullptr) stream = std::make_shared<Stream>(Priority::kLow);
    made.reset(new Runtime(*this, std::move(stream), left, left));
  }
  TESSERA_CHECK(made->num_sms_ == left, "{} and {} SMs", made->num_sms_, left);
  return *made;
}

Runtime& Runtime::leaving(int num_sms) { return num_sms == 0 ? *this : make(leaving_, num_sms, stream_); }

Runtime& Runtime::beside(int num_sms) {
  if (main_ != nullptr) return main_->beside(num_sms);
  return make(beside_, num_sms, nullptr);
}

void Runtime::record_loop(GraphLoop& loop, const std::function<void()>& run) {
  Stream recording;
  std::swap(*stream_, recording);  // operators now find the new stream
  try {
    loop.record(*stream_, run);
  } catch (...) {
    std::swap(*stream_, recording);
    throw;
  }
  std::swap(*stream_, recording);
}

std::shared_ptr<Runtime> make_runtime() { return std::make_shared<Runtime>(); }

Runtime::Libraries& Runtime::libraries() {
  if (libraries_ == nullptr) libraries_ = std::make_unique<Libraries>(*stream_, sm_target_);
  return *libraries_;
}

void Runtime::synchronize() {
  Event all;
  all.record(*stream_);
  wait(all);
}

void Runtime::wait(const Event& event, const std::function<void()>& check) {
  if (shared_->wait) shared_->wait(event, check);
  const char* failure = event.wait();
  if (failure == nullptr) return;
  throw Error(fmt::format("the GPU failed: {}, in one of the last operators or before them (CUDA_LAUNCH_BLOCKING=1 "
                          "finds which):\n{}",
                          failure, recorder().dump()),
              ExitStatus::kProgramError);  // another GPU may do: a launcher restarts the run
}

void Runtime::fetch(const Tensor& tensor, void* target) {
  TESSERA_CHECK(tensor.device() == Device::kCuda && tensor.is_contiguous());
  // Waits here, where the wait can be given up. A copy to memory that is not pinned would wait within the driver.
  synchronize();
  copy_bytes(*stream_, tensor.raw(), tensor.num_bytes(), target);
  synchronize();
}

void RunningOperator::begin(const char* name) const { op_.cuda->recorder().begin(name); }

void RunningOperator::note(const Tensor& operand) const { op_.cuda->recorder().note(operand); }

void RunningOperator::check_launches() const {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw Error(fmt::format("the GPU refused an operator: {} ({}). The last operators, this one last:\n{}",
                          cudaGetErrorString(status), cudaGetErrorName(status), op_.cuda->recorder().dump()),
              ExitStatus::kProgramError);
}

}  // namespace tessera::cuda
