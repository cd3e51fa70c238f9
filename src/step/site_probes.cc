#include "step/site_probes.h"

#include <cmath>

#include "config/resolve_recipes.h"
#include "ops/elementwise/elementwise.h"
#include "ops/runtime/runtime.h"

namespace tessera {

void SqnrProbe::observe(const Context& op, ParamId site, Role role, const Tensor& plain, const mx::Quantized& quantized,
                        std::int64_t num_rows) {
  if (!quantized.defined()) return;
  const ArenaScope scope(*op.arena);
  const Tensor sums_2 = op.arena->allocate({2}, DType::kFloat64);
  Tensor num_rows_1 = op.arena->allocate({1}, DType::kInt32);  // a dry run does not know whether it is needed
  if (num_rows < 0) num_rows_1 = {};
  if (!op.measuring() && num_rows_1.defined()) {
    const auto count = static_cast<std::int32_t>(num_rows);
    if (op.cuda == nullptr) {
      num_rows_1.data<std::int32_t>()[0] = count;
    } else {
      cuda::copy_bytes(op.cuda->stream(), &count, sizeof count, num_rows_1.raw());
    }
  }
  set_zero(op, sums_2);
  quantization_error(op, plain, quantized, sums_2, num_rows_1);
  if (op.measuring()) return;
  double sums[2];
  if (op.cuda == nullptr) {
    std::copy_n(sums_2.data<double>(), 2, sums);
  } else {
    op.cuda->fetch(sums_2, sums);
  }
  sums_[site][static_cast<std::size_t>(role)] += {.signal = sums[0], .noise = sums[1]};
}

std::vector<SiteSqnr> SqnrProbe::result(const Parameters& parameters, const Parameters& whole) const {
  std::map<std::string_view, const SiteSums*> own;
  for (const auto& [site, sums] : sums_) own[parameters.spec(site).name] = &sums;
  // The same sites in the same order on all ranks. Sites of other pipeline stages are 0 here.
  std::vector<ParamId> sites;
  std::vector<double> numbers;
  for (ParamId id = 0; id < whole.size(); ++id) {
    if (whole.spec(id).gemm == GemmKind::kNone) continue;
    sites.push_back(id);
    const auto found = own.find(whole.spec(id).name);
    for (const ErrorSums& sum : found == own.end() ? SiteSums() : *found->second) {
      numbers.insert(numbers.end(), {sum.signal, sum.noise});
    }
  }
  Mesh& mesh = parameters.mesh();
  for (ProcessGroup* group : {&mesh.tokens, &mesh.pp}) group->all_reduce(numbers, "quantization errors");

  std::vector<SiteSqnr> result;
  auto next = numbers.begin();
  const auto next_sqnr = [&]() -> std::optional<double> {
    const double signal = *next++, noise = *next++;
    const double sqnr = ErrorSums{.signal = signal, .noise = noise}.sqnr_db();
    return std::isfinite(sqnr) ? std::optional(sqnr) : std::nullopt;
  };
  static_assert(static_cast<int>(Role::kInput) == 0 && static_cast<int>(Role::kWeight) == 1 &&
                static_cast<int>(Role::kGradient) == 2);
  for (const ParamId id : sites) {
    SiteSqnr site{.module = module_name(whole.spec(id)), .x = next_sqnr(), .w = next_sqnr(), .d_y = next_sqnr()};
    if (site.x || site.w || site.d_y) result.push_back(std::move(site));
  }
  return result;
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
