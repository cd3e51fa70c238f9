// Probes for the GEMM sites of a step. They measure quantization errors, and find where numbers stop being finite.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/layer_context.h"
#include "ops/quantize/quantize.h"

namespace tessera {

/// Holds the signal-to-quantization-noise ratios of a site's operands, in dB. x and w are quantized along the
/// contraction of fprop, and d_y along that of dgrad. A ratio is absent if the operand is not quantized, is not finite,
/// or loses nothing (if it is all zeros, for example).
struct SiteSqnr {
  std::string module;
  std::optional<double> x, w, d_y;
};

class SqnrProbe : public SiteProbe {
 public:
  void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
               std::int64_t num_rows) override;
  /// Returns the ratios of the whole model. Signal and noise are summed over all ranks of the mesh before they are
  /// divided. All ranks must call it together. `parameters` are this rank's, whose sites were observed. `whole` are
  /// those of all pipeline stages.
  ///
  /// Operands that several ranks hold alike count once per rank. A weight is on every data-parallel rank, and an
  /// activation may be gathered on all tensor-parallel ranks. All parts of one operand are on equally many ranks. So
  /// signal and noise grow by the same factor, and their ratio stays.
  std::vector<SiteSqnr> result(const Parameters& parameters, const Parameters& whole) const;

 private:
  static constexpr std::size_t kNumRoles = 3;
  using SiteSums = std::array<ErrorSums, kNumRoles>;  // by role

  std::map<ParamId, SiteSums> sums_;
};

class FiniteProbe : public SiteProbe {
 public:
  explicit FiniteProbe(const Parameters& parameters) : parameters_(parameters) {}
  void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
               std::int64_t num_rows) override;
  /// Returns the first operand with a number that is not finite, as "the input of layers.0.attention.wq". Returns an
  /// empty string if there is none.
  const std::string& found() const { return found_; }

 private:
  const Parameters& parameters_;
  std::string found_;
};

}  // namespace tessera
