// Tests CUDA operators: makes the same call on the GPU and on the CPU, from the same bytes.
#pragma once

#include <algorithm>
#include <map>

#include "device/cuda_check.h"
#include "device/cuda_graph.h"
#include "mx/quantized.h"
#include "ops/kit/gemm_operand.h"
#include "ops/runtime/runtime.h"
#include "tests/gpu_delay.h"
#include "tests/ops/harness.h"

namespace tessera {

/// The types that activations have.
inline constexpr DType kActivationTypes[] = {DType::kFloat32, DType::kBFloat16};

/// Skips the test if there is no GPU. Operands are made on the CPU (OperatorTest). Operands that an operator assigns
/// are best made by poisoned().
class ParityTest : public OperatorTest {
 protected:
  /// Describes one of the two calls: its context, and the place of its operands.
  class Side {
   public:
    Context op;

    Tensor operator()(const Tensor& tensor) const { return test_ == nullptr ? tensor : test_->on_gpu(tensor); }
    mx::Quantized operator()(const mx::Quantized& x) const {
      return {(*this)(x.elements), (*this)(x.scales), x.format};
    }
    GemmOperand operator()(const GemmOperand& x) const {
      GemmOperand result((*this)(x.plain));
      result.rows = (*this)(x.rows);
      result.columns = (*this)(x.columns);
      return result;
    }

   private:
    friend class ParityTest;
    Side(const Context& context, ParityTest* test) : op(context), test_(test) {}
    ParityTest* test_;
  };

  void SetUp() override {
    if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
    runtime_.emplace();
    memory_ = Arena(std::size_t{512} << 20, Device::kCuda);
    poison_gpu();
  }

  /// Returns a tensor whose bytes are all 0xFF, which is NaN in all float types.
  Tensor poisoned(Shape shape, DType dtype) {
    const Tensor tensor = arena_.allocate(shape, dtype);
    std::memset(tensor.raw(), 0xff, tensor.num_bytes());
    return tensor;
  }
  mx::Quantized poisoned(const Shape& shape, const mx::Format& format) {
    return mx::allocate_quantized(shape, format, [&](const Shape& part, DType dtype) { return poisoned(part, dtype); });
  }

  /// Calls run() once on the CPU. On the GPU the first call lets libraries make plans, and then run() is replayed as a
  /// graph.
  template <typename Run>
  static void as_graph(const Side& side, const std::vector<Tensor>& outputs, Run&& run) {
    run();
    if (side.op.target() == Device::kCpu) return;
    const cudaStream_t stream = side.op.cuda->stream().handle();
    for (const Tensor& output : outputs) {
      TESSERA_CUDA(cudaMemsetAsync(side(output).raw(), 0xff, output.num_bytes(), stream));
    }
    const cuda::Graph graph(side.op.cuda->stream(), run);
    graph.launch(side.op.cuda->stream());
    side.op.cuda->synchronize();
  }

  /// Calls `run(side)` on both sides. The outputs must be the same numbers. NaN counts as equal to NaN.
  template <typename Run>
  void expect_same(Run&& run, const std::vector<Tensor>& outputs) {
    compare(run, outputs, [](const Tensor& output, const Doubles& gpu, std::size_t i) {
      const Doubles cpu = doubles(output);
      const auto differ = [](double a, double b) { return a != b && !(std::isnan(a) && std::isnan(b)); };
      std::size_t num_different = 0, first = cpu.size();
      for (std::size_t at = 0; at < cpu.size(); ++at) {
        if (!differ(gpu[at], cpu[at])) continue;
        ++num_different;
        first = std::min(first, at);
      }
      EXPECT_EQ(num_different, 0u) << "output " << i << " " << output.shape().to_string() << ", first at " << first
                                   << ": " << gpu[first] << " for " << cpu[first];
    });
  }

  /// Calls `run(side)` on both sides. Outputs may differ by float_bound of their largest number, or by bfloat16's
  /// bound.
  template <typename Run>
  void expect_close(Run&& run, const std::vector<Tensor>& outputs, double float_bound = kForwardBound) {
    compare(run, outputs, [&](const Tensor& output, const Doubles& gpu, std::size_t i) {
      EXPECT_LE(relative_error(gpu, doubles(output)),
                bound_for(output.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, float_bound))
          << "output " << i << " " << output.shape().to_string();
    });
  }

  /// Compares like expect_close(), with constant weights and an operand that comes late on the GPU. A kernel in front
  /// writes `late` only after the kernels behind it could have begun. Until then, the operand has the bytes of `stale`.
  /// The kernels run once from a stream, and once from a graph.
  template <typename Run>
  void expect_close_though_late(const Tensor& late, const Tensor& stale, Run&& run,
                                const std::vector<Tensor>& outputs) {
    constexpr int kMicroseconds = 300;
    const auto as_decoded = [&](const Side& side, bool is_graph) {
      Side decoded = side;
      decoded.op.weights_are_constant = true;
      run(decoded);
      if (side.op.target() == Device::kCpu) return;
      // Now the operands are there, and the kernels are loaded.
      const cuda::Stream& stream = runtime_->stream();
      std::byte* const numbers = memory_.allocate_bytes(late.num_bytes());
      cuda::copy_bytes(stream, late.raw(), late.num_bytes(), numbers);
      cuda::copy_bytes(stream, stale.raw(), late.num_bytes(), side(late).raw());
      run(decoded);  // What kernels hand to each other is stale now, too.
      for (const Tensor& output : outputs) {
        TESSERA_CUDA(cudaMemsetAsync(side(output).raw(), 0xff, output.num_bytes(), stream.handle()));
      }
      const auto run_late = [&] {
        put_late_copy(stream, numbers, late.num_bytes(), kMicroseconds, side(late).raw());
        run(decoded);
      };
      if (!is_graph) return run_late();
      const cuda::Graph graph(stream, run_late);
      graph.launch(stream);
      runtime_->synchronize();
    };
    for (const bool is_graph : {false, true}) {
      SCOPED_TRACE(is_graph ? "as a graph" : "on a stream");
      expect_close([&](const Side& side) { as_decoded(side, is_graph); }, outputs);
    }
  }

  /// Calls `run(side)` on the GPU only. Then the outputs have its results.
  template <typename Run>
  void run_on_gpu(Run&& run, const std::vector<Tensor>& outputs) {
    const std::vector<std::vector<std::byte>> results = results_of_gpu(run, outputs);
    for (std::size_t i = 0; i < results.size(); ++i)
      std::memcpy(outputs[i].raw(), results[i].data(), extent(outputs[i]));
  }

 private:
  /// Returns the number of bytes from the first number of a tensor to its last, including gaps between rows.
  static std::size_t extent(const Tensor& tensor) {
    if (tensor.num_elements() == 0) return 0;
    const std::int64_t length = tensor.num_elements() / tensor.dim(0);
    return static_cast<std::size_t>((tensor.dim(0) - 1) * tensor.stride() + length) * size_of(tensor.dtype());
  }

  /// Returns a tensor of this shape and stride at other memory.
  static Tensor like(const Tensor& tensor, void* memory, Device device) {
    if (tensor.is_contiguous()) return Tensor(memory, tensor.shape(), tensor.dtype(), device);
    return Tensor(memory, {tensor.dim(0), tensor.stride()}, tensor.dtype(), device).columns(0, tensor.dim(1));
  }

  /// Returns where the GPU has a tensor that was copied there, or that is a part of one that was. Returns null if it
  /// has none.
  std::byte* find_copy(const Tensor& tensor) const {
    const auto* begin = static_cast<const std::byte*>(tensor.raw());
    auto found = copies_.upper_bound(begin);
    if (found == copies_.begin()) return nullptr;
    --found;
    const std::ptrdiff_t offset = begin - found->first;
    const bool inside = offset == 0 || offset < static_cast<std::ptrdiff_t>(found->second.num_bytes);
    return inside ? found->second.gpu + offset : nullptr;
  }

  Tensor on_gpu(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    std::byte* copy = find_copy(tensor);
    if (copy == nullptr) {
      // The copy has a whole last row, so that a tensor can be made of it.
      const std::size_t num_bytes =
          static_cast<std::size_t>(std::max<std::int64_t>(tensor.dim(0), 1) * tensor.stride()) *
          size_of(tensor.dtype());
      copy = memory_.allocate_bytes(std::max(num_bytes, extent(tensor)));
      cuda::copy_bytes(runtime_->stream(), tensor.raw(), extent(tensor), copy);
      copies_[static_cast<const std::byte*>(tensor.raw())] = {.gpu = copy, .num_bytes = extent(tensor)};
    }
    return like(tensor, copy, Device::kCuda);
  }

  void poison_gpu() {
    const ArenaScope scope(memory_);
    const std::vector<std::byte> bytes(std::size_t{1} << 20, std::byte{0xff});
    while (memory_.used() + bytes.size() <= memory_.capacity()) {
      cuda::copy_bytes(runtime_->stream(), bytes.data(), bytes.size(), memory_.allocate_bytes(bytes.size()));
    }
  }

  /// Makes the call on the GPU and returns the outputs' bytes, including gaps between rows.
  template <typename Run>
  std::vector<std::vector<std::byte>> results_of_gpu(Run&& run, const std::vector<Tensor>& outputs) {
    const ArenaScope scope(memory_);
    copies_.clear();
    run(Side({.arena = &memory_, .cuda = &*runtime_}, this));
    std::vector<std::vector<std::byte>> results;
    for (const Tensor& output : outputs) {
      const std::byte* copy = find_copy(output);
      std::vector<std::byte>& bytes =
          results.emplace_back(static_cast<std::size_t>(output.dim(0) * output.stride()) * size_of(output.dtype()));
      EXPECT_NE(copy, nullptr) << "an output that the call was not given";
      if (copy == nullptr) continue;
      cuda::copy_bytes(runtime_->stream(), copy, extent(output), bytes.data());
    }
    runtime_->synchronize();
    return results;
  }

  template <typename Run, typename Compare>
  void compare(Run&& run, const std::vector<Tensor>& outputs, Compare&& compare_one) {
    std::vector<std::vector<std::byte>> results = results_of_gpu(run, outputs);
    run(Side(context(), nullptr));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      compare_one(outputs[i], doubles(like(outputs[i], results[i].data(), Device::kCpu)), i);
    }
  }

  std::optional<cuda::Runtime> runtime_;
  Arena memory_;
  struct Copy {
    std::byte* gpu;
    std::size_t num_bytes;
  };
  std::map<const std::byte*, Copy> copies_;  // the key is the first byte of what was copied
};

}  // namespace tessera
