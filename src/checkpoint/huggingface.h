// Weights in Hugging Face's form: a folder of safetensors shards with DeepSeek-V3's tensor names and
// model.safetensors.index.json, which says which shard holds which tensor. Numbers stream through: of neither side more
// than a chunk is in memory (the files are mapped).
//
// The layouts are the same on both sides but for what is fused here: a parameter is a row of Hugging Face's tensors one
// behind the other (w13: gate_proj, up_proj; experts.w13: gate_proj and up_proj of expert 0, of expert 1, ...).
// RoPE turns adjacent pairs on both sides.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

/// Says which shard holds which tensor.
inline constexpr const char* kHfIndexName = "model.safetensors.index.json";

struct HfTensor {
  std::string name;
  std::vector<std::int64_t> shape;

  std::int64_t num_elements() const;
};

/// The tensors that make up the parameter or buffer `name` of the field table (model/), in order. Modules of
/// multi-token prediction come as layers behind the `num_layers` layers of the model, as in DeepSeek's files.
std::vector<HfTensor> hf_tensors(const std::string& name, const Shape& shape, std::int64_t num_layers);

/// Numbers of a tensor in order, a chunk per call.
using FloatSink = std::function<void(std::span<const float>)>;

/// A folder with model.safetensors.index.json and its shards, or with model.safetensors alone. Errors name the file.
class HfWeights {
 public:
  explicit HfWeights(const std::filesystem::path& folder);

  bool contains(const std::string& name) const { return shard_of_.contains(name); }
  std::vector<std::string> names() const;

  /// Hands out the tensor as float32. F32 and BF16 as they are; F8_E4M3 times the factor of its 128 × 128 block, from
  /// the tensor NAME_scale_inv (float32 [rows / 128, columns / 128], rounded up; DeepSeek-V3's published form).
  void read(const HfTensor& tensor, const FloatSink& sink) const;

 private:
  const SafetensorsEntry& at(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, SafetensorsFile> shards_;
  std::map<std::string, const SafetensorsFile*> shard_of_;
};

/// Error unless `weights` has exactly what these parameters (and buffers) are made of. Let pass: block factors, the
/// copies of embedding and head in layers of multi-token prediction, and these layers as a whole where the parameters
/// have none (transformers reads DeepSeek-V3 so, too).
void require_same_tensors(const HfWeights& weights, std::span<const NamedTensor> parameters, std::int64_t num_layers);

/// Reads the parameter `name` into `sink`, tensor by tensor.
void read_hf_parameter(const HfWeights& weights, const std::string& name, const Shape& shape, std::int64_t num_layers,
                       const FloatSink& sink);

struct HfWriteOptions {
  DType dtype = DType::kBFloat16;
  std::uint64_t max_shard_bytes = 5'000'000'000;  // a tensor larger than this has a shard of its own
};

/// Hands out the numbers [begin, end) of a flattened parameter in order, in chunks of any size.
using ParameterSource =
    std::function<void(const NamedTensor& parameter, std::int64_t begin, std::int64_t end, const FloatSink& sink)>;

/// Writes the parameters, of which names and shapes count, with the numbers of `source` into `folder`, which exists:
/// shards and index. Experts' biases stay in float32.
void write_hf_weights(const std::filesystem::path& folder, std::span<const NamedTensor> parameters,
                      const ParameterSource& source, std::int64_t num_layers, const HfWriteOptions& options);

}  // namespace tessera
