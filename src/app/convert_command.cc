#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "base/log.h"
#include "checkpoint/remote_code.h"
#include "config/job_config.h"
#include "model/model.h"
#include "run/record/run_files.h"
#include "run/router_sample.h"
#include "run/state/saved_model.h"
#include "system/file_lock.h"
#include "system/output_folder.h"
#include "system/progress_bar.h"
#include "system/stop.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct ConvertOptions {
  std::string to, input, output;
  std::string form = "auto";
  std::string dtype = "bfloat16";
  double max_shard_gb = 5.0;
  bool overwrite = false;
};

/// Returns the parameters and buffers of a model, without memory.
Model field_table(const HfConfig& config) { return Model(config.model, {.compute = DType::kFloat32, .seq_len = 1}); }

constexpr OutputKind kHfFolder = {
    .name = "a folder of Hugging Face files", .marker = kHfConfigName, .is_part = [](const fs::path& name) {
      const auto has_name = [&](const RemoteCodeFile& file) { return name == file.name; };
      return name == kHfConfigName || name == kHfIndexName || name.extension() == ".safetensors" ||
             data::is_tokenizer_file(name) || std::ranges::any_of(remote_code_files(), has_name);
    }};

const std::map<std::string, HfForm> kForms = {
    {"v2", HfForm::kDeepseekV2}, {"v3", HfForm::kDeepseekV3}, {"remote-code", HfForm::kRemoteCode}};

/// Returns the tokenizer. If the folder of weights has none, which a model can do without, it logs a warning and
/// returns null.
std::unique_ptr<data::Tokenizer> tokenizer_of(const SavedModel& saved) {
  try {
    return saved.tokenizer();
  } catch (const Error& error) {
    spdlog::warn("no tokenizer is copied: {}", error.what());
    return nullptr;
  }
}

bool has_expert_bias(const SavedModel& saved, std::span<const NamedTensor> tensors) {
  bool found = false;
  for (const auto& [name, tensor] : tensors) {
    if (!name.ends_with(".expert_bias")) continue;
    saved.read(name, tensor.shape(), [&](std::span<const float> numbers) {
      found = found || std::ranges::any_of(numbers, [](float number) { return number != 0.0f; });
    });
  }
  return found;
}

constexpr const char* kSampleText =
    "The harbour lay quiet in the early light. Three boats had come in during the night, and their crews were asleep "
    "below deck. Anna walked along the wall with a basket on her arm and counted the nets that hung there to dry. "
    "Most of them were torn. \"If the wind turns before noon,\" her father had said, \"we can be back by Friday; "
    "otherwise it will take until the 14th.\" She did not believe him. Last year they had lost two days to repairs, "
    "and the price of rope had risen since then by a third, from 12 to 16 crowns a length. Still, there was work to "
    "be done, and nobody else in the village who knew how to do it. She sat down, took the needle out of her pocket, "
    "and began with the smallest hole.";

/// Returns, for example, "on 256 tokens of a sample text, 3 of 768 selections of layers.2.moe differ (5 of 1536 in all
/// layers)".
std::string describe_routing(const SavedModel& saved) {
  constexpr std::size_t kMaxTokens = 256;
  std::vector<std::int32_t> tokens;
  const char* what = "tokens of a sample text";
  try {
    const auto tokenizer = saved.tokenizer();
    tokens = tokenizer->encode(kSampleText);
    tokens.insert(tokens.begin(), tokenizer->bos_id());
    tokens.resize(std::min(tokens.size(), kMaxTokens));
  } catch (const Error&) {
    what = "random tokens (the model has no tokenizer)";
    const Philox random(0, stream_of("convert"));
    const auto vocab = static_cast<double>(saved.config().model.vocab_size);
    for (std::size_t i = 0; i < kMaxTokens; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random.uniform(i) * vocab));
    }
  }
  const std::vector<RoutingDifference> layers = compare_with_v2_router(saved, tokens);
  const auto worst = std::ranges::max_element(layers, {}, &RoutingDifference::num_different);
  std::int64_t num_different = 0, num_selections = 0;
  for (const RoutingDifference& layer : layers) {
    num_different += layer.num_different;
    num_selections += layer.num_selections;
  }
  return fmt::format("on {} {}, {} of {} selections of {} differ ({} of {} in all layers)", tokens.size(), what,
                     worst->num_different, worst->num_selections, worst->layer, num_different, num_selections);
}

/// Throws Error if the form's class computes anything other than the model does.
void require_exact(const SavedModel& saved, const HfConfig& config, std::span<const NamedTensor> tensors) {
  std::vector<std::string> obstacles = hf_obstacles(config);
  if (config.form == HfForm::kDeepseekV2 && plain_hf_form(config.model) == HfForm::kDeepseekV2) {
    const bool has_bias = has_expert_bias(saved, tensors);
    if (has_bias)
      obstacles.emplace_back("its router has no expert bias, and this model's is not 0 (load_balance_coeff)");
    if (has_bias || config.model.n_expert_groups > 1) obstacles.push_back(describe_routing(saved));
  }
  require(obstacles.empty(),
          "'{}' has no exact form as {}: {}. --form remote-code writes a folder with its own modeling code, which "
          "computes the same; docs/checkpoints.md says how to train for the plain form",
          saved.path().string(), hf_class_name(config.form), fmt::join(obstacles, "; "));
}

/// Counts the numbers that are converted, and ends the conversion when a signal asks for it.
class ConversionProgress {
 public:
  explicit ConversionProgress(std::int64_t num_elements)
      : bar_("converting", static_cast<std::uint64_t>(num_elements) * sizeof(float), "B") {}

  FloatSink counting(const FloatSink& sink) {
    return [this, &sink](std::span<const float> numbers) {
      throw_if_stopped();
      sink(numbers);
      bar_.advance(numbers.size_bytes());
    };
  }

 private:
  ProgressBar bar_;
};

void to_hf(const ConvertOptions& options, const SavedModel& saved) {
  require(!saved.is_hf(), "'{}' is a folder of Hugging Face files already", options.input);
  HfConfig config = saved.config();
  check_output(options.output, kHfFolder, options.overwrite);
  config.form = options.form == "auto" ? plain_hf_form(config.model) : kForms.at(options.form);
  const Model model = field_table(config);
  const std::vector<NamedTensor> tensors = tensor_names(model.parameters());
  saved.require_same_tensors(tensors);
  require_exact(saved, config, tensors);
  const DType dtype = options.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
  const std::string config_json = hf_config_json(config, dtype);
  for (const std::string& difference : hf_differences(config)) {
    spdlog::warn("{} of transformers will not compute quite the same: {}", hf_class_name(config.form), difference);
  }
  OutputFolder folder(options.output, kHfFolder, options.overwrite);
  const std::vector<NamedTensor> written = hf_parameters(tensors, config.form);
  ConversionProgress progress(num_hf_elements(written, config.model.n_layers));
  const auto source = [&](const NamedTensor& parameter, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
    saved.read(parameter.name, parameter.tensor.shape(), begin, end, progress.counting(sink));
  };
  write_hf_weights(folder.path(), written, source, config.model.n_layers,
                   {.dtype = dtype, .max_shard_bytes = static_cast<std::uint64_t>(options.max_shard_gb * 1e9)});
  if (const auto tokenizer = tokenizer_of(saved)) {
    const std::vector<CheckpointPart> parts = tokenizer_parts(*tokenizer);
    for (const CheckpointPart& part : parts) part.write(folder.path() / part.name);
    if (parts.empty()) {
      spdlog::warn("the tokenizer '{}' has no files, so '{}' has no tokenizer: whoever uses it must encode text alike",
                   tokenizer->kind(), options.output);
    }
  }
  if (config.form == HfForm::kRemoteCode) {
    for (const auto& [name, content] : remote_code_files()) {
      text_part(std::string(name), std::string(content)).write(folder.path() / name);
    }
  }
  text_part(kHfConfigName, config_json).write(folder.path() / kHfConfigName);
  folder.commit();
  fmt::print("{}: step {} as {} for {}{}\n", options.output, saved.step(), options.dtype, hf_class_name(config.form),
             config.form == HfForm::kRemoteCode ? " (trust_remote_code=True)" : "");
}

/// Creates a folder if it is not there. The destructor removes it if nothing was put into it.
class NewFolder {
 public:
  explicit NewFolder(fs::path path) : path_(std::move(path)), is_new_(!path_exists(path_)) { create_folder(path_); }
  ~NewFolder() {
    std::error_code not_empty;
    if (is_new_) fs::remove(path_, not_empty);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

 private:
  fs::path path_;
  bool is_new_;
};

void to_tessera(const ConvertOptions& options, const SavedModel& saved) {
  require(saved.is_hf(), "'{}' is a checkpoint of Tessera already", saved.path().string());
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
  const NewFolder folder(options.output);
  const FileLock lock(fs::path(options.output) / kRunLockName, fmt::format("the folder '{}'", options.output),
                      {.at_end = FileLock::AtEnd::kRemoveFile});
  const std::vector<std::int64_t> steps = steps_of_folders(options.output);  // also damaged ones
  if (!steps.empty() && (steps.back() > 0 || !options.overwrite)) {
    fail("'{}' has checkpoints up to step {}; {}", options.output, steps.back(),
         steps.back() == 0 ? "--force replaces it" : "step-0 would not be the newest: choose another folder");
  }
  std::int64_t num_elements = 0;
  for (const auto& [name, tensor] : tensors) num_elements += tensor.num_elements();
  ConversionProgress progress(num_elements);
  parts.push_back({.name = shard_file_name(kModelShards, 0, 1), .write = [&](const fs::path& path) {
                     SafetensorsWriter writer(path, specs_of(tensors), shard_metadata({.step = 0}));
                     const FloatSink append = [&](std::span<const float> numbers) {
                       writer.append(std::as_bytes(numbers));
                     };
                     for (const NamedTensor& named : tensors) {
                       saved.read(named.name, named.tensor.shape(), progress.counting(append));
                     }
                     return writer.finish();
                   }});
  save_checkpoint(options.output, parts, {.step = 0, .state = state});
  fmt::print("{}\n", checkpoint_path(options.output, 0).string());
}

}  // namespace

void add_convert_command(CLI::App& app, int& status) {
  auto options = std::make_shared<ConvertOptions>();
  CLI::App* command = app.add_subcommand("convert", "Convert weights to and from Hugging Face's files");
  command->add_option("--to", options->to, "hf or tessera")->required()->check(CLI::IsMember({"hf", "tessera"}));
  command
      ->add_option(
          "--input", options->input,
          "For hf: a checkpoint, or a run's folder (its newest counts). For tessera: a folder with config.json "
          "and safetensors in float32, bfloat16 or FP8")
      ->required();
  command
      ->add_option("--output,--out", options->output,
                   "For hf: the new folder. For tessera: the folder that gets step-0")
      ->required();
  CLI::Option* form =
      command
          ->add_option("--form", options->form,
                       "Class of transformers: v2 (DeepseekV2ForCausalLM, softmax routers), v3 (DeepseekV3ForCausalLM, "
                       "sigmoid routers), remote-code (any model; the folder brings its own code); auto: v2 or v3")
          ->check(CLI::IsMember({"auto", "v2", "v3", "remote-code"}))
          ->capture_default_str();
  CLI::Option* dtype = command->add_option("--dtype", options->dtype, "Type of the weights in Hugging Face's files")
                           ->check(CLI::IsMember({"float32", "bfloat16"}))
                           ->capture_default_str();
  CLI::Option* max_shard =
      command->add_option("--max-shard-gb", options->max_shard_gb, "Size of a shard, at most (but one tensor at least)")
          ->check(is_number(1e-6, 1e6))
          ->capture_default_str();
  command->add_flag("--force", options->overwrite, "Replace what is there");
  command->callback([options, form, dtype, max_shard, &status] {
    require(options->to == "hf" || (form->count() == 0 && dtype->count() == 0 && max_shard->count() == 0),
            "--form, --dtype and --max-shard-gb are for --to hf; Tessera's checkpoints are in float32, in one file");
    const SavedModel saved(options->input);
    handle_stop_signals(request_stop);
    try {
      options->to == "hf" ? to_hf(*options, saved) : to_tessera(*options, saved);
    } catch (const Stopped& stopped) {
      spdlog::info("stopped by signal {}: '{}' is not written, and what was begun is removed", stopped.signal(),
                   options->output);
      status = 128 + stopped.signal();
    }
  });
}

}  // namespace tessera
