// A model on the disk: its configuration, tokenizer and weights. It is either a checkpoint of Tessera or a folder of
// Hugging Face files (config.json, safetensors, tokenizer).
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
  /// `path` is a checkpoint, a folder with checkpoints (the newest is used), a run's folder, or a folder with
  /// config.json. Verifies checksums if there are any. Each of several processes verifies its share. Throws Error.
  explicit SavedModel(const std::filesystem::path& path, const VerifyShare& share = {});

  bool is_hf() const { return hf_.has_value(); }
  const std::filesystem::path& path() const { return path_; }
  /// Returns the model's numbers, the sequence length that it was trained for, BOS and EOS.
  const HfConfig& config() const { return config_; }
  /// Returns the step of a checkpoint, or 0 for Hugging Face files.
  std::int64_t step() const { return step_; }

  /// Throws Error if Hugging Face files have other tensors than these, by name, or if a checkpoint has another number
  /// of them. A checkpoint's names, and all shapes, are checked when a tensor is read.
  void require_same_tensors(std::span<const NamedTensor> tensors) const;
  /// Reads the weights and buffers of `parameters`: this rank's shards of `model`, or of a stage of it. If shards are
  /// not whole parameters, only the masters are set. Throws Error unless the folder has exactly the model's tensors.
  /// All ranks of `group` must call it together. No rank waits for another longer than that takes for one tensor.
  void load(Parameters& parameters, const ModelConfig& model, ProcessGroup& group) const;
  /// Does the same on one rank.
  void load(Parameters& parameters, const ModelConfig& model) const {
    ProcessGroup one;
    load(parameters, model, one);
  }
  /// Reads those of the model's tensors that `parameters` has. It does not check which other tensors the folder has.
  void load_tensors(Parameters& parameters) const;
  /// Passes the numbers of a parameter or a buffer to `sink` in order, one chunk per call.
  void read(const std::string& name, const Shape& shape, const FloatSink& sink) const;
  /// Passes numbers [begin, end) of a parameter or a buffer to `sink`. The model must be a checkpoint.
  void read(const std::string& name, const Shape& shape, std::int64_t begin, std::int64_t end,
            const FloatSink& sink) const;

  /// Loads the tokenizer. Throws Error if the folder has none.
  std::unique_ptr<data::Tokenizer> tokenizer() const;

 private:
  void load_parameter(Parameters& parameters, ParamId id) const;
  void load_buffer(Parameters& parameters, ParamId id) const;

  std::filesystem::path path_;
  HfConfig config_;
  std::int64_t step_ = 0;
  std::string tokenizer_kind_;
  std::optional<ShardFiles> checkpoint_;
  std::optional<HfWeights> hf_;
};

/// Returns the names and shapes of all parameters and buffers, without numbers.
std::vector<NamedTensor> tensor_names(const Parameters& parameters);

/// Returns the model's tensors that a folder of this form holds. A DeepseekV2 router has no expert bias.
std::vector<NamedTensor> hf_parameters(std::vector<NamedTensor> tensors, HfForm form);

/// Returns the files with which a folder of weights keeps its tokenizer.
std::vector<CheckpointPart> tokenizer_parts(const data::Tokenizer& tokenizer);
/// Returns what a checkpoint's state says about the tokenizer.
nlohmann::json tokenizer_state(const data::Tokenizer& tokenizer);

}  // namespace tessera
