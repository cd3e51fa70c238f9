// The data that a run trains on and validates with.
#pragma once

#include <memory>

#include "config/job_config.h"
#include "data/loader.h"
#include "data/tokenizers/tokenizer.h"
#include "parallel/mesh.h"

namespace tessera {

class TrainingData {
 public:
  /// Opens training.dataset_path and its tokenizer. Both arguments must outlive the object. Throws Error.
  TrainingData(const JobConfig& config, const Mesh& mesh);

  /// Throws Error if model.hf_assets_path has another tokenizer than the data.
  void require_tokenizer_of_assets() const;
  /// Opens the validation data if validation.enable is set. Throws Error if they have another tokenizer.
  void open_validation();

  const data::Tokenizer& tokenizer() const { return *tokenizer_; }
  data::Loader& loader() { return *loader_; }
  const data::Loader& loader() const { return *loader_; }
  /// Returns the loader of the validation data. It is null before open_validation(), and without validation.enable.
  data::Loader* validation_loader() const { return validation_loader_.get(); }

 private:
  const JobConfig& config_;
  const Mesh& mesh_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::unique_ptr<data::Loader> loader_, validation_loader_;
};

}  // namespace tessera
