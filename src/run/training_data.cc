#include "run/training_data.h"

#include <filesystem>

#include "base/error.h"
#include "data/dataset.h"
#include "data/load_tokenizer.h"
#include "run/record/run_info.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Opens a dataset's split. `key` is the configuration's key that names the dataset's folder.
std::unique_ptr<data::Loader> make_loader(const JobConfig& config, const Mesh& mesh, const char* key,
                                          const std::string& folder, const std::string& split) {
  return data::read_for_key(key, [&] {
    return std::make_unique<data::Loader>(data::LoaderConfig{.dataset = folder,
                                                             .split = split,
                                                             .seq_len = config.training.seq_len,
                                                             .local_batch_size = config.micro_batch_size(),
                                                             .dp_rank = mesh.data_rank(),
                                                             .dp_size = mesh.num_data_ranks(),
                                                             .seed = static_cast<std::uint64_t>(config.debug.seed),
                                                             .vocab_size = config.model.args.vocab_size,
                                                             .shuffle = split == "train"});
  });
}

std::unique_ptr<data::Tokenizer> load_tokenizer_of(const std::string& dataset) {
  return data::read_for_key(kTrainDataKey,
                            [&] { return data::load_dataset_tokenizer(dataset, data::read_manifest(dataset)); });
}

}  // namespace

TrainingData::TrainingData(const JobConfig& config, const Mesh& mesh)
    : config_(config),
      mesh_(mesh),
      tokenizer_(load_tokenizer_of(config.training.dataset_path)),
      loader_(make_loader(config, mesh, kTrainDataKey, config.training.dataset_path, "train")) {}

void TrainingData::require_tokenizer_of_assets() const {
  const fs::path assets = config_.model.hf_assets_path;
  std::error_code unreadable;
  const bool has_one = !assets.empty() && (fs::exists(assets / data::kTokenizerJsonName, unreadable) ||
                                           fs::exists(assets / data::kTokenizerModelName, unreadable));
  if (!has_one) return;
  require(data::load_tokenizer(assets.string())->checksum() == tokenizer_->checksum(),
          "model.hf_assets_path '{}' has another tokenizer than training.dataset_path '{}' was prepared with: prepare "
          "the data with `tessera data prepare --tokenizer {}`, or leave model.hf_assets_path out",
          assets.string(), config_.training.dataset_path, assets.string());
}

void TrainingData::open_validation() {
  if (!config_.validation.enable) return;
  const bool is_other = !config_.validation.dataset_path.empty();
  const std::string& folder = is_other ? config_.validation.dataset_path : config_.training.dataset_path;
  validation_loader_ = make_loader(config_, mesh_, is_other ? kValidationDataKey : kTrainDataKey, folder, "val");
  require(validation_loader_->manifest().tokenizer_checksum == loader_->manifest().tokenizer_checksum,
          "'{}' (validation.dataset_path) was prepared with another tokenizer than '{}'", folder,
          config_.training.dataset_path);
}

}  // namespace tessera
