// Measures at the GEMM sites of a step: quantization errors, and where numbers stop being finite.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/layer_context.h"
#include "ops/quantize/quantize.h"

namespace tessera {

/// The signal-to-quantization-noise ratios of a site's operands in dB. Operands are quantized along the contraction of
/// fprop, d_y along that of dgrad. One is absent if it is not quantized, not finite, or loses nothing (all zeros, for
/// example).
struct SiteSqnr {
  std::string module;
  std::optional<double> x, w, d_y;
};

class SqnrProbe : public SiteProbe {
 public:
  void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
               std::int64_t num_rows) override;
  /// The ratios of the whole model: signal and noise are summed over all ranks of the mesh before they are divided. All
  /// ranks must call it. `parameters`: this rank's, whose sites were observed. `whole`: those of all pipeline stages.
  ///
  /// What several ranks hold alike counts once per rank: a weight on every data-parallel rank, an activation that the
  /// tensor-parallel ranks have gathered. All parts of one operand are on equally many ranks, so that signal and noise
  /// grow by the same factor, and their ratio stays.
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
  /// The first operand with a number that is not finite, as "the input of layers.0.attention.wq"; empty: none.
  const std::string& found() const { return found_; }

 private:
  const Parameters& parameters_;
  std::string found_;
};

}  // namespace tessera
