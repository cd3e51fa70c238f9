// Compares gradients of every parameter on a mesh with one rank's on the same device, in the precisions of training
// runs. Both are compared with float32 on a CPU. A mesh may be at most 1.5 times as far from that as one rank is: it
// rounds as often, but adds in another order. A gradient that is lost or counted twice makes a far larger difference.
// `tests/gpu_mutants.py --of meshes` shows that.
#pragma once

#include "tests/step/text_gradients.h"

namespace tessera::gradient_test {

inline constexpr double kBound = 1.5;

/// All meshes divide these sizes, and a rank's parts are whole blocks of 128.
inline const Overrides kMeshSizes = {"--model.args.n_layers=4", "--model.args.num_experts=8",
                                     "--model.args.moe_inter_dim=512"};

struct Precision {
  const char* name;
  Overrides overrides;

  friend void PrintTo(const Precision& precision, std::ostream* out) { *out << precision.name; }
};

/// Returns the gradients of one rank, which are computed once. Cases with rounds have the real router. The others have
/// forced balance, because rounding may change what the router chooses.
inline const Gradients& of_one_rank(bool is_forced, const Precision& precision, Device device) {
  static std::map<std::tuple<bool, std::string, Device>, Gradients> runs;
  const std::tuple key(is_forced, precision.name, device);
  const auto found = runs.find(key);
  if (found != runs.end()) return found->second;
  const Overrides overrides = kMeshSizes + (is_forced ? kForced : Overrides{}) + precision.overrides;
  return runs[key] = first_gradients({"one", 1, {}, 2, overrides, device});
}

/// Compares the gradients of a mesh with those of one rank on its device.
inline void expect_as_good_as_one_rank(MeshCase mesh_case, const Precision& precision) {
  const bool is_forced =
      parse_job_config(kGradientModel, mesh_case.overrides).parallelism.expert_parallel_capacity_factor == 0.0;
  mesh_case.overrides = kMeshSizes + (is_forced ? kForced : Overrides{}) + precision.overrides + mesh_case.overrides;
  // The error of float32 is a thousandth of the other precisions' or less.
  const Gradients &exact = of_one_rank(is_forced, {"float32", kFloat32}, Device::kCpu),
                  &one = of_one_rank(is_forced, precision, mesh_case.device), many = first_gradients(mesh_case);
  ASSERT_EQ(many.size(), exact.size());
  Worst worst;
  for (const auto& [name, expected] : exact) {
    const double of_one = distance(one.at(name), expected), of_many = distance(many.at(name), expected);
    ASSERT_GT(of_one, 0.0) << name;
    EXPECT_LE(of_many, kBound * of_one) << name << ", whose norm is " << std::sqrt(dot(expected, expected));
    worst.see(of_many / of_one, name);
  }
  fmt::print("{} {}: error at most {:.3f} times one rank's ({})\n", mesh_case.name, precision.name, worst.error,
             worst.name);
}

}  // namespace tessera::gradient_test
