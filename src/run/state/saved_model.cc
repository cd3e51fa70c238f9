#include "run/state/saved_model.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "comm/together.h"
#include "config/job_config.h"
#include "data/load_tokenizer.h"
#include "model/model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBytes = "bytes";

/// How many numbers a call of a sink gets at most.
constexpr std::int64_t kChunk = 1 << 20;

bool holds(HfForm form, const std::string& name) {
  return form != HfForm::kDeepseekV2 || !name.ends_with(".expert_bias");
}

}  // namespace

SavedModel::SavedModel(const fs::path& path, const VerifyShare& share) : path_(path) {
  if (path_exists(path / kHfConfigName)) {
    const fs::path config_path = path / kHfConfigName;
    config_ = parse_hf_config(read_text_file(config_path), config_path.string());
    hf_.emplace(path);
    // Files that transformers has saved may declare such layers without containing them.
    std::int64_t& modules = config_.model.num_mtp_modules;
    const auto has_module = [&](std::int64_t module) {
      const std::string name = fmt::format("mtp.{}.eh_proj.weight", module);
      return hf_->contains(hf_tensors(name, {1}, config_.model.n_layers).front().name);
    };
    while (modules > 0 && !has_module(modules - 1)) --modules;
    return;
  }
  path_ = find_checkpoint(path);
  const CheckpointManifest manifest = verify_checkpoint(path_, kOptimizerShards, share);
  const nlohmann::json& state = manifest.state;
  try {
    const JobConfig job = parse_job_config(state.at("config").get<std::string>());
    job.model.args.validate();
    require(job.training.seq_len > 0, "'{}': training.seq_len is {}", path_.string(), job.training.seq_len);
    config_.model = job.model.args;
    config_.seq_len = job.training.seq_len;
    if (state.contains("tokenizer")) {
      const nlohmann::json& tokenizer = state["tokenizer"];
      tokenizer_kind_ = tokenizer.at("kind").get<std::string>();
      config_.bos_id = tokenizer.at("bos_id").get<std::int64_t>();
      config_.eos_id = tokenizer.at("eos_id").get<std::int64_t>();
    }
  } catch (const nlohmann::json::exception& error) {
    fail("the manifest of '{}' does not hold a model's state: {}", path_.string(), json_problem(error));
  }
  step_ = manifest.step;
  checkpoint_.emplace(path_, kModelShards, manifest.step, manifest.num_shards);
}

void SavedModel::read(const std::string& name, const Shape& shape, const FloatSink& sink) const {
  if (hf_ && !holds(config_.form, name))
    return sink(std::vector<float>(static_cast<std::size_t>(shape.num_elements())));
  if (hf_) {
    return read_hf_parameter(*hf_, name, shape, config_.model.n_layers, 0, shape.num_elements(),
                             [&](std::int64_t, std::span<const float> numbers) { sink(numbers); });
  }
  read(name, shape, 0, shape.num_elements(), sink);
}

void SavedModel::read(const std::string& name, const Shape& shape, std::int64_t begin, std::int64_t end,
                      const FloatSink& sink) const {
  TESSERA_CHECK(checkpoint_.has_value());
  const AssembledTensor tensor = checkpoint_->at(name, shape);
  while (begin < end) {
    const std::span<const float> numbers = tensor.from(begin);
    const std::int64_t count = std::min({static_cast<std::int64_t>(numbers.size()), end - begin, kChunk});
    sink(numbers.first(static_cast<std::size_t>(count)));
    begin += count;
  }
}

void SavedModel::require_same_tensors(std::span<const NamedTensor> tensors) const {
  if (hf_) {
    return tessera::require_same_tensors(*hf_, hf_parameters({tensors.begin(), tensors.end()}, config_.form),
                                         config_.model.n_layers);
  }
  require(checkpoint_->num_tensors() == tensors.size(), "'{}' holds {} tensors, this model has {}", path_.string(),
          checkpoint_->num_tensors(), tensors.size());
}

void SavedModel::load(Parameters& parameters, const ModelConfig& model, ProcessGroup& group) const {
  run_together(group, "the initial weights' names",
               [&] { require_same_tensors(tensor_names(Model(model, {.seq_len = 1}).parameters())); });
  std::size_t next = 0;
  run_steps_together(group, "the initial weights", [&] {
    if (next < parameters.size()) {
      load_parameter(parameters, next);
    } else if (next - parameters.size() < parameters.num_buffers()) {
      load_buffer(parameters, next - parameters.size());
    } else {
      return false;
    }
    ++next;
    return true;
  });
}

void SavedModel::load_tensors(Parameters& parameters) const {
  for (ParamId id = 0; id < parameters.size(); ++id) load_parameter(parameters, id);
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) load_buffer(parameters, id);
}

void SavedModel::load_parameter(Parameters& parameters, ParamId id) const {
  const std::string& name = parameters.spec(id).name;
  const Shape& shape = parameters.spec(id).shape;
  const Parameters::Range range = parameters.shard_range(id);
  if (range.begin == range.end) return;
  const Piece piece{.slice = parameters.slice(id), .begin = range.begin, .end = range.end};
  if (hf_) {
    std::int64_t first = shape.num_elements(), last = 0;  // of this rank's numbers in the whole
    piece.slice.for_each_run(piece.begin, piece.end, [&](std::int64_t, std::int64_t global, std::int64_t count) {
      first = std::min(first, global);
      last = std::max(last, global + count);
    });
    return read_hf_parameter(
        *hf_, name, shape, config_.model.n_layers, first, last,
        [&](std::int64_t begin, std::span<const float> numbers) { parameters.set(id, begin, numbers); });
  }
  if (!piece.is_whole()) {
    const AssembledTensor saved = checkpoint_->at(name, shape);
    return parameters.fill(parameters.master_shard(id), [&](float* target) { saved.read(piece, target); });
  }
  std::int64_t offset = 0;
  read(name, shape, [&](std::span<const float> numbers) {
    parameters.set(id, offset, numbers);
    offset += static_cast<std::int64_t>(numbers.size());
  });
}

void SavedModel::load_buffer(Parameters& parameters, ParamId id) const {
  const ParamSpec& spec = parameters.buffer_spec(id);
  parameters.fill(parameters.buffer(id), [&](float* target) {
    read(spec.name, spec.shape,
         [&](std::span<const float> numbers) { target = std::copy(numbers.begin(), numbers.end(), target); });
  });
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

std::vector<NamedTensor> hf_parameters(std::vector<NamedTensor> tensors, HfForm form) {
  std::erase_if(tensors, [&](const NamedTensor& tensor) { return !holds(form, tensor.name); });
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
