// Weights in Hugging Face's format: a folder of safetensors shards with DeepSeek-V3's tensor names. The file
// model.safetensors.index.json says which shard holds which tensor. Conversion streams the numbers: the files are
// mapped, and no more than a chunk of a tensor is in memory.
//
// The layouts are the same on both sides, except that some of Hugging Face's tensors are fused here. Such a parameter
// holds these tensors one after the other (w13: gate_proj, up_proj; experts.w13: gate_proj and up_proj of expert 0, of
// expert 1, ...). RoPE turns adjacent pairs on both sides.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

/// The file that says which shard holds which tensor.
inline constexpr const char* kHfIndexName = "model.safetensors.index.json";

/// Names a tensor of Hugging Face's files.
struct HfTensor {
  std::string name;
  std::vector<std::int64_t> shape;

  std::int64_t num_elements() const;
};

/// Returns the tensors that make up the parameter or buffer `name` of the model (params/parameter_table.h), in order.
/// Modules of multi-token prediction are layers after the `num_layers` layers of the model, as in DeepSeek's files.
std::vector<HfTensor> hf_tensors(const std::string& name, const Shape& shape, std::int64_t num_layers);

/// Receives the numbers of a tensor in order, one chunk per call.
using FloatSink = std::function<void(std::span<const float>)>;

/// Receives numbers of a tensor from index `begin` of the flattened tensor on.
using PlacedSink = std::function<void(std::int64_t begin, std::span<const float>)>;

/// Reads a folder with model.safetensors.index.json and its shards, or with model.safetensors alone. The constructor
/// maps all shards, and throws Error if one has a tensor that the index does not list. Errors name the file. One thread
/// at a time may use it.
class HfWeights {
 public:
  explicit HfWeights(const std::filesystem::path& folder);

  bool contains(const std::string& name) const { return shard_of_.contains(name); }
  std::vector<std::string> names() const;

  /// Passes the tensor to `sink` as float32. F32 and BF16 are read unchanged. F8_E4M3 is multiplied by the factor of
  /// its 128 × 128 block, as in DeepSeek-V3's published form. The factors are the tensor NAME_scale_inv, float32 [rows
  /// / 128, columns / 128], rounded up. Throws Error if the tensor is missing, or has another shape or type.
  void read(const HfTensor& tensor, const FloatSink& sink) const;

 private:
  const SafetensorsFile& shard(const std::string& file_name) const;
  const SafetensorsEntry& at(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, std::string> shard_of_;  // the file's name by the tensor's
  mutable std::map<std::string, SafetensorsFile> shards_;
};

/// Throws Error unless `weights` has exactly the tensors that make up these parameters (and buffers). It accepts three
/// kinds of additional tensors. The first are block factors. The second are copies of embedding and head in layers of
/// multi-token prediction. The third are all of these layers, if the parameters have none. transformers, too,
/// reads DeepSeek-V3 without these layers.
void require_same_tensors(const HfWeights& weights, std::span<const NamedTensor> parameters, std::int64_t num_layers);

/// Passes numbers of the parameter `name` to `sink`, tensor by tensor. It reads only tensors that have some of the
/// numbers [begin, end) of the flattened parameter: of all experts, only those that a rank has.
void read_hf_parameter(const HfWeights& weights, const std::string& name, const Shape& shape, std::int64_t num_layers,
                       std::int64_t begin, std::int64_t end, const PlacedSink& sink);

struct HfWriteOptions {
  DType dtype = DType::kBFloat16;
  std::uint64_t max_shard_bytes = 5'000'000'000;  // a tensor larger than this gets its own shard
};

/// Passes the numbers [begin, end) of a flattened parameter to `sink` in order, in chunks of any size.
using ParameterSource =
    std::function<void(const NamedTensor& parameter, std::int64_t begin, std::int64_t end, const FloatSink& sink)>;

/// Returns how many numbers write_hf_weights reads. It reads some twice, which the files repeat.
std::int64_t num_hf_elements(std::span<const NamedTensor> parameters, std::int64_t num_layers);

/// Writes the shards and the index into `folder`, which must exist. `parameters` gives names and shapes, and `source`
/// the numbers. Experts' biases stay in float32. Throws SystemError if a file cannot be written, and what `source`
/// throws.
void write_hf_weights(const std::filesystem::path& folder, std::span<const NamedTensor> parameters,
                      const ParameterSource& source, std::int64_t num_layers, const HfWriteOptions& options);

}  // namespace tessera
