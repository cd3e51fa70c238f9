// A model on the disk: its numbers, tokenizer and weights. Either a checkpoint of Tessera, or a folder of Hugging Face
// files (config.json, safetensors, tokenizer).
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "checkpoint/huggingface.h"
#include "data/tokenizers/tokenizer.h"
#include "params/parameters.h"
#include "run/state/hf_config.h"

namespace tessera {

class SavedModel {
 public:
  /// `path`: a checkpoint, a folder with checkpoints (the newest counts), a run's folder, or a folder with config.json.
  /// Checks checksums where there are any, of several processes each its share of them. Throws Error.
  explicit SavedModel(const std::filesystem::path& path, const VerifyShare& share = {});

  bool is_hf() const { return hf_.has_value(); }
  const std::filesystem::path& path() const { return path_; }
  /// The model's numbers, the sequence length that it was trained for, BOS and EOS.
  const HfConfig& config() const { return config_; }
  /// Returns the step of a checkpoint; 0 for Hugging Face files.
  std::int64_t step() const { return step_; }

  /// Throws Error unless the folder has exactly these tensors (by name; shapes are looked at when reading).
  void require_same_tensors(std::span<const NamedTensor> tensors) const;
  /// Reads the weights and buffers of `parameters`: this rank's shards of `model`, or of a stage of it. Where shards
  /// are not the whole parameter only the masters are set. Throws Error unless the folder has exactly the model's
  /// tensors.
  void load(Parameters& parameters, const ModelConfig& model) const;
  /// The same for some of the model's tensors: those that `parameters` has.
  void load_tensors(Parameters& parameters) const;
  /// Hands out a parameter's or a buffer's numbers in order, a chunk per call.
  void read(const std::string& name, const Shape& shape, const FloatSink& sink) const;
  /// The numbers [begin, end) of it; of a checkpoint only.
  void read(const std::string& name, const Shape& shape, std::int64_t begin, std::int64_t end,
            const FloatSink& sink) const;

  /// Throws Error if the folder has none.
  std::unique_ptr<data::Tokenizer> tokenizer() const;

 private:
  std::filesystem::path path_;
  HfConfig config_;
  std::int64_t step_ = 0;
  std::string tokenizer_kind_;
  std::optional<ShardFiles> checkpoint_;
  std::optional<HfWeights> hf_;
};

/// All parameters' and buffers' names and shapes, without numbers.
std::vector<NamedTensor> tensor_names(const Parameters& parameters);

/// Returns the model's tensors that a folder of this form holds: a DeepseekV2 router has no expert bias.
std::vector<NamedTensor> hf_parameters(std::vector<NamedTensor> tensors, HfForm form);

/// The files by which a folder of weights keeps its tokenizer, and what a checkpoint's state says of it.
std::vector<CheckpointPart> tokenizer_parts(const data::Tokenizer& tokenizer);
nlohmann::json tokenizer_state(const data::Tokenizer& tokenizer);

}  // namespace tessera
