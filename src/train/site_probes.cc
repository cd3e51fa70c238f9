#include "train/site_probes.h"

#include <cmath>

#include "ops/elementwise.h"
#include "train/recipe.h"

namespace tessera {

void SqnrProbe::observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
                        std::int64_t num_rows) {
  if (!quantized.defined()) return;
  const ArenaScope scope(*op.arena);
  const Tensor sums_2 = op.arena->allocate({2}, DType::kFloat64);
  Tensor num_rows_1;
  if (num_rows >= 0) num_rows_1 = op.arena->allocate({1}, DType::kInt32);
  if (!op.measuring() && num_rows_1.defined()) num_rows_1.data<std::int32_t>()[0] = static_cast<std::int32_t>(num_rows);
  set_zero(op, sums_2);
  quantization_error(op, plain, quantized, sums_2, num_rows_1);
  if (op.measuring()) return;
  sums_[site][role] += {.signal = sums_2.data<double>()[0], .noise = sums_2.data<double>()[1]};
}

std::vector<SiteSqnr> SqnrProbe::result(const Parameters& parameters) const {
  std::vector<SiteSqnr> sites;
  for (const auto& [site, roles] : sums_) {
    const auto sqnr = [&roles = roles](Role role) -> std::optional<double> {
      const auto found = roles.find(role);
      if (found == roles.end() || !std::isfinite(found->second.sqnr_db())) return std::nullopt;
      return found->second.sqnr_db();
    };
    sites.push_back({.module = module_name(parameters.spec(site)),
                     .x = sqnr(Role::kInput),
                     .w = sqnr(Role::kWeight),
                     .d_y = sqnr(Role::kGradient)});
  }
  return sites;
}

void FiniteProbe::observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized&,
                          std::int64_t num_rows) {
  if (!found_.empty()) return;
  const Tensor used = num_rows >= 0 && plain.num_dims() == 2 ? plain.rows(0, num_rows) : plain;
  if (all_finite(op, used)) return;
  const char* what = role == Role::kInput    ? "the input"
                     : role == Role::kWeight ? "the weight"
                                             : "the output's gradient";
  found_ = fmt::format("{} of {}", what, module_name(parameters_.spec(site)));
}

}  // namespace tessera
