#include <memory>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/is_number.h"
#include "base/error.h"
#include "base/log.h"
#include "base/output_folder.h"
#include "model/model.h"
#include "train/job_config.h"
#include "train/saved_model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct ConvertOptions {
  std::string to, input, output;
  std::string dtype = "bfloat16";
  double max_shard_gb = 5.0;
  bool overwrite = false;
};

/// The field table of a model, without memory.
Model field_table(const HfConfig& config) { return Model(config.model, {.compute = DType::kFloat32, .seq_len = 1}); }

constexpr OutputKind kHfFolder = {
    .name = "a folder of Hugging Face files", .marker = kHfConfigName, .is_part = [](const fs::path& name) {
      return name == kHfConfigName || name == kHfIndexName || name.extension() == ".safetensors" ||
             data::is_tokenizer_file(name);
    }};

/// Null, with a warning, if the folder of weights has no tokenizer, which a model can do without.
std::unique_ptr<data::Tokenizer> tokenizer_of(const SavedModel& saved) {
  try {
    return saved.tokenizer();
  } catch (const Error& error) {
    spdlog::warn("no tokenizer is copied: {}", error.what());
    return nullptr;
  }
}

void to_hf(const ConvertOptions& options, const SavedModel& saved) {
  require(!saved.is_hf(), "'{}' is a folder of Hugging Face files already", options.input);
  const HfConfig& config = saved.config();
  const DType dtype = options.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
  const std::string config_json = hf_config_json(config, dtype);
  check_output(options.output, kHfFolder, options.overwrite);
  for (const std::string& difference : hf_differences(config)) {
    spdlog::warn("transformers' DeepseekV3 will not compute quite the same: {}", difference);
  }
  const Model model = field_table(config);
  OutputFolder folder(options.output, kHfFolder);
  const std::vector<NamedTensor> tensors = tensor_names(model.parameters());
  saved.require_same_tensors(tensors);
  const auto source = [&](const NamedTensor& parameter, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
    saved.read(parameter.name, parameter.tensor.shape(), begin, end, sink);
  };
  write_hf_weights(folder.path(), tensors, source, config.model.n_layers,
                   {.dtype = dtype, .max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9)});
  if (const auto tokenizer = tokenizer_of(saved)) {
    for (const CheckpointPart& part : tokenizer_parts(*tokenizer)) part.write(folder.path() / part.name);
  }
  text_part(kHfConfigName, config_json).write(folder.path() / kHfConfigName);
  folder.commit(options.overwrite);
  fmt::print("{}: step {} as {} for DeepseekV3ForCausalLM\n", options.output, saved.step(), options.dtype);
}

void to_tessera(const ConvertOptions& options, const SavedModel& saved) {
  require(saved.is_hf(), "'{}' is a checkpoint of Tessera already", saved.path().string());
  const std::vector<std::int64_t> steps = checkpoint_steps(options.output);
  if (!steps.empty() && (steps.back() > 0 || !options.overwrite)) {
    fail("'{}' has checkpoints up to step {}; {}", options.output, steps.back(),
         steps.back() == 0 ? "--force replaces it" : "step-0 would not be the newest: choose another folder");
  }
  const Model model = field_table(saved.config());
  const std::vector<NamedTensor> tensors = tensor_names(model.parameters());
  saved.require_same_tensors(tensors);

  JobConfig job;
  job.model.args = saved.config().model;
  job.training.seq_len = saved.config().seq_len;
  nlohmann::json state = {{"config", config_table(job).to_toml()}};
  std::vector<CheckpointPart> parts;
  if (const auto tokenizer = tokenizer_of(saved)) {
    parts = tokenizer_parts(*tokenizer);
    state["tokenizer"] = tokenizer_state(*tokenizer);
  } else {
    state["tokenizer"] = {{"kind", ""}, {"bos_id", saved.config().bos_id}, {"eos_id", saved.config().eos_id}};
  }
  parts.push_back({.name = shard_file_name(kModelShards, 0, 1), .write = [&](const fs::path& path) {
                     SafetensorsWriter writer(path, specs_of(tensors), shard_metadata({.step = 0}));
                     for (const NamedTensor& named : tensors) {
                       saved.read(named.name, named.tensor.shape(),
                                  [&](std::span<const float> numbers) { writer.append(std::as_bytes(numbers)); });
                     }
                     return writer.finish();
                   }});
  save_checkpoint(options.output, parts, {.step = 0, .state = state});
  fmt::print("{}\n", checkpoint_path(options.output, 0).string());
}

}  // namespace

void add_convert_command(CLI::App& app) {
  auto options = std::make_shared<ConvertOptions>();
  CLI::App* command = app.add_subcommand("convert", "Convert weights to and from Hugging Face's files (DeepseekV3)");
  command->add_option("--to", options->to, "hf or tessera")->required()->check(CLI::IsMember({"hf", "tessera"}));
  command
      ->add_option(
          "--input", options->input,
          "For hf: a checkpoint, or a run's folder (its newest counts). For tessera: a folder with config.json "
          "and safetensors in float32, bfloat16 or FP8")
      ->required();
  command->add_option("--output", options->output, "For hf: the new folder. For tessera: the folder that gets step-0")
      ->required();
  CLI::Option* dtype = command->add_option("--dtype", options->dtype, "Type of the weights in Hugging Face's files")
                           ->check(CLI::IsMember({"float32", "bfloat16"}))
                           ->capture_default_str();
  CLI::Option* max_shard =
      command->add_option("--max-shard-gb", options->max_shard_gb, "Size of a shard, at most (but one tensor at least)")
          ->check(is_number(1e-6, 1e6))
          ->capture_default_str();
  command->add_flag("--force", options->overwrite, "Replace what is there");
  command->callback([options, dtype, max_shard] {
    require(options->to == "hf" || (dtype->count() == 0 && max_shard->count() == 0),
            "--dtype and --max-shard-gb are for --to hf; Tessera's checkpoints are in float32, in one file");
    const SavedModel saved(options->input);
    options->to == "hf" ? to_hf(*options, saved) : to_tessera(*options, saved);
  });
}

}  // namespace tessera
