#include "train/saved_model.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "train/job_config.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBytes = "bytes";

/// Numbers per call of a sink.
constexpr std::int64_t kChunk = 1 << 20;

}  // namespace

SavedModel::SavedModel(const fs::path& path) : path_(path) {
  std::error_code unreadable;
  if (fs::exists(path / kHfConfigName, unreadable)) {
    const fs::path config_path = path / kHfConfigName;
    config_ = parse_hf_config(read_text_file(config_path), config_path.string());
    hf_.emplace(path);
    // Files that transformers has saved say that there are such layers, but leave them out.
    std::int64_t& modules = config_.model.num_mtp_modules;
    const auto has_module = [&](std::int64_t module) {
      const std::string name = fmt::format("mtp.{}.eh_proj.weight", module);
      return hf_->contains(hf_tensors(name, {1}, config_.model.n_layers).front().name);
    };
    while (modules > 0 && !has_module(modules - 1)) --modules;
    return;
  }
  path_ = find_checkpoint(path);
  const nlohmann::json state = verify_checkpoint(path_, kOptimizerFileName);
  try {
    const JobConfig job = parse_job_config(state.at("config").get<std::string>());
    job.model.args.validate();
    require(job.training.seq_len > 0, "'{}': training.seq_len is {}", path_.string(), job.training.seq_len);
    config_.model = job.model.args;
    config_.seq_len = job.training.seq_len;
    step_ = state.at("step").get<std::int64_t>();
    if (state.contains("tokenizer")) {
      const nlohmann::json& tokenizer = state["tokenizer"];
      tokenizer_kind_ = tokenizer.at("kind").get<std::string>();
      config_.bos_id = tokenizer.at("bos_id").get<std::int64_t>();
      config_.eos_id = tokenizer.at("eos_id").get<std::int64_t>();
    }
  } catch (const nlohmann::json::exception& error) {
    fail("the manifest of '{}' does not hold a model's state: {}", path_.string(), error.what());
  }
  checkpoint_.emplace(path_ / kModelFileName);
}

void SavedModel::read(const std::string& name, const Shape& shape, const FloatSink& sink) const {
  if (hf_) return read_hf_parameter(*hf_, name, shape, config_.model.n_layers, sink);
  const Tensor tensor = checkpoint_->view(name, shape, DType::kFloat32);
  const float* numbers = tensor.data<float>();
  const std::int64_t count = shape.num_elements();
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    sink({numbers + begin, static_cast<std::size_t>(std::min(kChunk, count - begin))});
  }
}

void SavedModel::require_same_tensors(std::span<const NamedTensor> tensors) const {
  if (hf_) return tessera::require_same_tensors(*hf_, tensors, config_.model.n_layers);
  require(checkpoint_->entries().size() == tensors.size(), "'{}' holds {} tensors, this model has {}",
          (path_ / kModelFileName).string(), checkpoint_->entries().size(), tensors.size());
}

void SavedModel::load(Parameters& parameters) const {
  require_same_tensors(tensor_names(parameters));
  for (ParamId id = 0; id < parameters.size(); ++id) {
    std::int64_t offset = 0;
    read(parameters.spec(id).name, parameters.spec(id).shape, [&](std::span<const float> numbers) {
      parameters.set(id, offset, numbers);
      offset += static_cast<std::int64_t>(numbers.size());
    });
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    float* target = parameters.buffer(id).data<float>();
    read(parameters.buffer_spec(id).name, parameters.buffer_spec(id).shape,
         [&](std::span<const float> numbers) { target = std::copy(numbers.begin(), numbers.end(), target); });
  }
}

std::vector<NamedTensor> SavedModel::views(const Parameters& parameters) const {
  TESSERA_CHECK(checkpoint_.has_value());
  std::vector<NamedTensor> tensors = tensor_names(parameters);
  for (NamedTensor& named : tensors) {
    named.tensor = checkpoint_->view(named.name, named.tensor.shape(), DType::kFloat32);
  }
  return tensors;
}

std::unique_ptr<data::Tokenizer> SavedModel::tokenizer() const {
  return data::load_tokenizer(tokenizer_kind_ == kBytes ? kBytes : path_.string());
}

std::vector<NamedTensor> tensor_names(const Parameters& parameters) {
  std::vector<NamedTensor> tensors;
  const auto add = [&](const ParamSpec& spec) {
    tensors.push_back({spec.name, Tensor(nullptr, spec.shape, DType::kFloat32, Device::kMeta)});
  };
  for (ParamId id = 0; id < parameters.size(); ++id) add(parameters.spec(id));
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) add(parameters.buffer_spec(id));
  return tensors;
}

std::vector<CheckpointPart> tokenizer_parts(const data::Tokenizer& tokenizer) {
  std::vector<CheckpointPart> parts;
  for (const auto& [name, contents] : tokenizer.files())
    parts.push_back(text_part(std::string(name), std::string(contents)));
  return parts;
}

nlohmann::json tokenizer_state(const data::Tokenizer& tokenizer) {
  return {{"kind", tokenizer.kind()}, {"bos_id", tokenizer.bos_id()}, {"eos_id", tokenizer.eos_id()}};
}

}  // namespace tessera
