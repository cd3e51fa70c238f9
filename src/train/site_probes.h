// What is measured at the GEMM sites of a step: quantization errors, and where numbers stop being finite.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/layer_context.h"
#include "ops/quantize.h"

namespace tessera {

/// Signal-to-quantization-noise ratios of a site's operands in dB, along the contraction of fprop (dgrad for d_y).
/// Those that are not quantized, are not finite, or lose nothing (all 0, say), are absent.
struct SiteSqnr {
  std::string module;
  std::optional<double> x, w, d_y;
};

class SqnrProbe : public SiteProbe {
 public:
  void observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
               std::int64_t num_rows) override;
  std::vector<SiteSqnr> result(const Parameters& parameters) const;

 private:
  std::map<ParamId, std::map<Role, ErrorSums>> sums_;
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
