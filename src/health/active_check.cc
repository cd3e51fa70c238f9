#include "health/active_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <future>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"
#include "device/cuda.h"
#include "health/copy_bytes.h"
#include "ops/gemm/gemm.h"
#include "ops/runtime/runtime.h"
#include "tensor/bfloat16.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

// The numbers repeat along both dims, so that only a few sums must be known. All numbers are small enough for bfloat16,
// and the sums for float32. Their means are 1, so that sums grow with their length, and a missing part shows.
constexpr std::int64_t kPeriodA = 5, kPeriodB = 7;
std::int64_t a_of(std::int64_t row, std::int64_t k) { return (7 * (row % kPeriodA) + 3 * k) % 5 - 1; }
std::int64_t b_of(std::int64_t row, std::int64_t k) { return (5 * (row % kPeriodB) + 11 * k) % 7 - 2; }

class ActiveChecks {
 public:
  /// `part` is "GPU 3", or "" for the host.
  ActiveChecks(const ActiveCheckOptions& options, std::string part)
      : options_(options),
        part_(std::move(part)),
        is_gpu_(options.device == Device::kCuda),
        size_(is_gpu_ ? 4096 : 512),
        runtime_(is_gpu_ ? cuda::make_runtime() : nullptr),
        arena_(is_gpu_ ? std::size_t{1} << 30 : std::size_t{64} << 20, options.device) {}

  ProbeResult run() {
    check_gemm();
    check_copy();
    return std::move(result_);
  }

 private:
  void check_gemm() {
    const ArenaScope scope(arena_);
    const Context op{.arena = &arena_, .cuda = runtime_.get()};
    const Tensor a = arena_.allocate({size_, size_}, DType::kBFloat16),
                 b = arena_.allocate({size_, size_}, DType::kBFloat16),
                 c = arena_.allocate({size_, size_}, DType::kFloat32);
    fill(a, a_of);
    fill(b, b_of);
    const auto multiply = [&] {
      linear_forward(op, a, b, c);
      if (options_.after_product) options_.after_product(c);
    };
    multiply();
    const std::int64_t num_wrong = count_wrong(c);
    const double elements = static_cast<double>(size_) * static_cast<double>(size_);
    const double tflops = 2e-12 * elements * static_cast<double>(size_) / mean_seconds(multiply);
    const std::int64_t wrong_later = count_wrong(c);
    if (num_wrong + wrong_later > 0) {
      add("gemmWrong", static_cast<double>(num_wrong + wrong_later), 0.0, "",
          fmt::format("{} of {:.0f} sums of a known product are wrong, and {} when it was made again", num_wrong,
                      elements, wrong_later));
    }
    measure(kGemmRateName, "Rate of a bfloat16 product in the last active check", tflops);
    judge_rate("gemmSlow", tflops, options_.expected_gemm_tflops, "TFLOP/s");
  }

  void check_copy() {
    const ArenaScope scope(arena_);
    const std::int64_t num_bytes = is_gpu_ ? std::int64_t{256} << 20 : std::int64_t{24} << 20;
    const Tensor from = arena_.allocate({num_bytes / 4}, DType::kInt32),
                 to = arena_.allocate({num_bytes / 4}, DType::kInt32);
    const auto copy = [&] {
      if (is_gpu_) return cuda::copy_bytes(runtime_->stream(), from.raw(), from.num_bytes(), to.raw());
      constexpr std::int64_t kPiece = std::int64_t{1} << 20;
      parallel_for(num_bytes / kPiece, [&](std::int64_t piece) {
        std::copy_n(static_cast<const std::byte*>(from.raw()) + piece * kPiece, kPiece,
                    static_cast<std::byte*>(to.raw()) + piece * kPiece);
      });
    };
    copy();
    const double rate = 2e-9 * static_cast<double>(num_bytes) / mean_seconds(copy);
    measure(kCopyRateName, "Bytes read and written by a copy in the last active check", rate);
    judge_rate("copySlow", rate, options_.expected_copy_gb_per_s, "GB/s");
  }

  template <typename Number>
  void fill(const Tensor& matrix, Number number) const {
    std::vector<BFloat16> numbers(static_cast<std::size_t>(size_ * size_));
    for (std::int64_t row = 0; row < size_; ++row) {
      for (std::int64_t k = 0; k < size_; ++k) {
        numbers[static_cast<std::size_t>(row * size_ + k)] = BFloat16(static_cast<float>(number(row, k)));
      }
    }
    copy_bytes(runtime_.get(), numbers.data(), matrix.num_bytes(), matrix.raw());
  }

  std::int64_t count_wrong(const Tensor& c) const {
    std::array<std::array<float, kPeriodB>, kPeriodA> expected{};
    for (std::int64_t row = 0; row < kPeriodA; ++row) {
      for (std::int64_t column = 0; column < kPeriodB; ++column) {
        std::int64_t sum = 0;
        for (std::int64_t k = 0; k < size_; ++k) sum += a_of(row, k) * b_of(column, k);
        expected[static_cast<std::size_t>(row)][static_cast<std::size_t>(column)] = static_cast<float>(sum);
      }
    }
    std::vector<float> numbers(static_cast<std::size_t>(size_ * size_));
    copy_bytes(runtime_.get(), c.raw(), c.num_bytes(), numbers.data());
    std::int64_t num_wrong = 0;
    for (std::int64_t row = 0; row < size_; ++row) {
      for (std::int64_t column = 0; column < size_; ++column) {
        const float right =
            expected[static_cast<std::size_t>(row % kPeriodA)][static_cast<std::size_t>(column % kPeriodB)];
        if (numbers[static_cast<std::size_t>(row * size_ + column)] != right) ++num_wrong;
      }
    }
    return num_wrong;
  }

  /// Returns the mean time of a call. A median would hide that a device pauses now and then.
  template <typename Work>
  double mean_seconds(const Work& work) const {
    int num_calls = 0;
    const Stopwatch watch;
    do {
      work();
      if (is_gpu_) runtime_->synchronize();
      ++num_calls;
    } while (watch.seconds() < options_.seconds);
    return watch.seconds() / num_calls;
  }

  void judge_rate(const char* signal, double rate, double expected, const char* unit) {
    if (expected <= 0.0 || rate >= kSlow * expected) return;
    add(signal, rate, kSlow * expected, unit,
        fmt::format("{:.3g} {}, which is {:.0f} % of what its peers reach", rate, unit, 100.0 * rate / expected));
  }

  void add(const char* signal, double value, double limit, const char* unit, std::string detail) {
    result_.findings.push_back({.signal = signal,
                                .part = part_,
                                .evidence = EvidenceKind::kHard,
                                .value = value,
                                .limit = limit,
                                .unit = unit,
                                .detail = std::move(detail)});
  }

  void measure(const char* name, const char* help, double value) {
    result_.measurements.push_back({.name = name, .help = help, .value = value});
  }

  const ActiveCheckOptions& options_;
  std::string part_;
  bool is_gpu_;
  std::int64_t size_;  // rows and columns of the matrices
  std::shared_ptr<cuda::Runtime> runtime_;
  Arena arena_;
  ProbeResult result_;
};

}  // namespace

ProbeResult check_gpus(int num_gpus, const std::function<ProbeResult(int)>& check) {
  std::vector<std::future<ProbeResult>> checks;
  for (int gpu = 0; gpu < num_gpus; ++gpu) checks.push_back(std::async(std::launch::async, check, gpu));
  ProbeResult all;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    ProbeResult one;
    try {
      one = checks[static_cast<std::size_t>(gpu)].get();
    } catch (const InternalError& error) {
      one.findings.push_back({.signal = "gpuFailed",
                              .part = fmt::format("GPU {}", gpu),
                              .evidence = EvidenceKind::kHard,
                              .detail = error.what()});
    }
    all.findings.insert(all.findings.end(), one.findings.begin(), one.findings.end());
    for (Measurement& measurement : one.measurements) {
      const auto least = std::ranges::find(all.measurements, measurement.name, &Measurement::name);
      if (least == all.measurements.end()) {
        all.measurements.push_back(std::move(measurement));
      } else {
        least->value = std::min(least->value, measurement.value);
      }
    }
  }
  return all;
}

ProbeResult run_active_checks(const ActiveCheckOptions& options) {
  if (options.device == Device::kCpu) return ActiveChecks(options, "").run();
  const int num_usable = cuda::num_devices();
  std::vector<Finding> missing;
  if (num_usable < options.num_gpus) {
    const std::string why = cuda::why_unavailable();
    missing.push_back({.signal = "gpuMissing",
                       .evidence = EvidenceKind::kHard,
                       .value = 1.0 * num_usable,
                       .limit = 1.0 * options.num_gpus,
                       .detail = fmt::format("CUDA can use {} of {} GPUs{}{}", num_usable, options.num_gpus,
                                             why.empty() ? "" : ": ", why)});
    if (num_usable == 0) return {.findings = std::move(missing)};
  }
  const int num_gpus = std::max(1, num_usable);  // without any, the first check says why
  ProbeResult all = check_gpus(num_gpus, [&options](int gpu) {
    cuda::use_device(gpu);
    return ActiveChecks(options, fmt::format("GPU {}", gpu)).run();
  });
  all.findings.insert(all.findings.end(), missing.begin(), missing.end());
  return all;
}

}  // namespace tessera
