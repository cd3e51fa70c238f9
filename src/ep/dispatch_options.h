// The sizes and choices of expert parallelism's dispatch (ep/dispatcher.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "tensor/dtype.h"

namespace tessera {

/// A backend is known by its name. ep/backends/all_backends.h lists all of them. Those that other code
/// treats specially are constants here.
struct DispatchBackend {
  std::string_view name;  // of static storage

  static const DispatchBackend kLocal, kStandard, kDirect;
  bool operator==(const DispatchBackend&) const = default;
};
inline constexpr DispatchBackend DispatchBackend::kLocal{"local"};
inline constexpr DispatchBackend DispatchBackend::kStandard{"standard"};
inline constexpr DispatchBackend DispatchBackend::kDirect{"direct"};

/// Holds a value of parallelism.expert_parallel_comm_backend, which stands for a backend.
struct BackendChoice {
  std::string_view value;
  std::string_view help;  // how the backend moves tokens
};

/// kDefault sends numbers of DispatchOptions::dtype. kMxfp8 sends E4M3 elements with a scale per 32 numbers.
enum class PayloadPrecision { kDefault, kMxfp8 };

/// The default number of SMs for a call of the direct backend, found by measurement (docs/performance.md).
inline constexpr int kDefaultSms = 24;

struct DispatchOptions {
  std::int64_t max_tokens = 0;   // the largest t, tokens of a rank in a call
  std::int64_t dim = 0;          // D
  std::int64_t num_experts = 0;  // E
  std::int64_t top_k = 0;        // K
  /// The number of domains over which a token's K choices are spread, for the direct backend. The E experts are those
  /// of one domain. A choice in another domain has expert id kNoExpert, no row, and a weight that is not read. Its
  /// gradient is 0.
  std::int64_t num_domains = 1;
  DType dtype = DType::kFloat32;
  /// The largest DispatchLayer::alignment of any layer, in rows.
  std::int64_t max_alignment = 1;
  /// The number of rows that a rank has room for, as a multiple of a balanced load's. A balanced load is t·K rows, or
  /// with several domains a domain's part of that. 0 means room for any load. Tokens are never dropped: more rows are
  /// worked off in rounds.
  double capacity_factor = 0.0;
  PayloadPrecision dispatch_forward = PayloadPrecision::kDefault;
  PayloadPrecision combine_backward = PayloadPrecision::kDefault;
  /// The device of the tensors, kCpu or kCuda.
  Device device = Device::kCpu;
  /// The number of SMs of a GPU that a call of the direct backend takes. It is at least 2.
  int num_sms = kDefaultSms;
};

}  // namespace tessera
