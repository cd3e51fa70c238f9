// Gradients of the first step, in the precisions of training runs. Sizes are aligned, so the tensor cores' kernels
// compute all products. Head dims are those that cuDNN takes. Tokens are the bytes of a text.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/step/mesh_training.h"

namespace tessera::gradient_test {

using mesh_test::Gradients;
using mesh_test::MeshCase;
using mesh_test::operator+;
using mesh_test::Overrides;

// An expert gets about 2457 rows of a micro-batch of four sequences, which is enough for sums that several clusters
// share.
inline constexpr const char* kGradientModel = R"(
[model.args]
vocab_size = 512
dim = 512
inter_dim = 1024
moe_inter_dim = 384
n_layers = 3
n_dense_layers = 1
n_heads = 4
num_experts = 5
num_shared_experts = 1
top_k = 3
q_lora_rank = 256
kv_lora_rank = 256
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
eos_id = 0
[training]
seq_len = 1024
global_batch_size = 8
steps = 1
)";

using mesh_test::kForced;
inline const Overrides kFloat32 = {"--training.mixed_precision_param=float32", "--model.converters="};
inline const Overrides kBfloat16 = {"--training.mixed_precision_param=bfloat16"};

/// Returns the overrides that quantize all layers' products and the experts'.
inline Overrides recipe(const std::string& name, const std::string& blocks) {
  Overrides overrides = kBfloat16;
  overrides.emplace_back("--model.converters=quantize.linear.mx,quantize.grouped_mm.mx");
  for (const char* kind : {"linear", "grouped_mm"}) {
    overrides.push_back(fmt::format("--quantize.{}.mx.recipe_name={}", kind, name));
    overrides.push_back(fmt::format("--quantize.{}.mx.block_shape={}", kind, blocks));
  }
  return overrides;
}

/// Returns the bytes of the licence.
inline std::vector<std::int32_t> text_tokens() {
  std::ifstream file(std::string(TESSERA_TEST_DATA) + "/../LICENSE", std::ios::binary);
  std::vector<std::int32_t> tokens;
  for (char byte; file.get(byte);) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

/// Returns the gradients of the first step, whole. All meshes begin with the same weights and get the same sequences.
inline Gradients first_gradients(const MeshCase& mesh_case) {
  Gradients gradients;
  std::mutex mutex;
  mesh_test::on_mesh(mesh_case, kGradientModel, [&](ProcessGroup*, TrainingStep& step, std::vector<Batch>& batches) {
    const Mesh& mesh = step.model().parameters().mesh();
    const std::vector<std::int32_t> tokens = text_tokens();
    const auto length = static_cast<std::size_t>(batches.front().num_seqs() * (batches.front().seq_len() + 1));
    auto part = static_cast<std::size_t>(mesh.data_rank());
    for (Batch& batch : batches) {
      batch.fill(std::span(tokens).subspan(part * length, length));
      part += static_cast<std::size_t>(mesh.num_data_ranks());
    }
    step.run(1, batches);
    const std::lock_guard lock(mutex);
    mesh_test::copy_gradients(step.model().parameters(), gradients);
  });
  return gradients;
}

inline double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

inline double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
  }
  return std::sqrt(sum);
}

/// Holds the largest error over all parameters, and the parameter that has it.
struct Worst {
  double error = 0.0;
  std::string name;

  void see(double of, const std::string& parameter) {
    if (of > error) error = of, name = parameter;
  }
};

}  // namespace tessera::gradient_test
