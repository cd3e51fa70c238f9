#include "config/job_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/nearest.h"
#include "device/cuda.h"
#include "parallel/mesh.h"
#include "parallel/pipeline_timing.h"

namespace tessera {

Recipes JobConfig::recipes() const {
  Recipes recipes;
  for (const std::string& converter : model.converters) {
    if (converter == kLinearConverter) recipes.linear = quantize_mx.linear;
    if (converter == kGroupedConverter) recipes.grouped_mm = quantize_mx.grouped_mm;
  }
  return recipes;
}

std::string JobConfig::why_no_gpu(int num_ranks_on_node) const {
  std::string why_not = cuda::why_unavailable();
  // A launcher may show each rank a GPU of its own, and no other.
  const int num_gpus = cuda::num_devices();
  const bool sees_its_own = num_gpus == 1 && std::getenv("CUDA_VISIBLE_DEVICES") != nullptr;
  if (why_not.empty() && num_gpus < num_ranks_on_node && !sees_its_own) {
    why_not = fmt::format("{} ranks on a machine with {} GPUs", num_ranks_on_node, num_gpus);
  }
  return why_not;
}

Device JobConfig::device(int num_ranks_on_node) const {
  if (training.device == DeviceChoice::kCpu) return Device::kCpu;
  const std::string why_not = why_no_gpu(num_ranks_on_node);
  if (why_not.empty()) return Device::kCuda;
  require(training.device == DeviceChoice::kAuto,
          "training.device is cuda, but no GPU can be used: {}; --device cpu trains without", why_not);
  return Device::kCpu;
}

MeshDegrees JobConfig::mesh_degrees() const {
  return {.dp_replicate = parallelism.data_parallel_replicate_degree,
          .dp_shard = parallelism.data_parallel_shard_degree,
          .cp = parallelism.context_parallel_degree,
          .tp = parallelism.tensor_parallel_degree,
          .pp = parallelism.pipeline_parallel_degree,
          .ep = parallelism.expert_parallel_degree,
          .ep_domain = parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect
                           ? parallelism.expert_parallel_ranks_per_domain
                           : 0};
}

namespace {

/// Returns a cut for so many stages by what layers cost.
std::vector<StageModules> cut_by_model_cost(const ModelConfig& m, std::int64_t seq_len, int num_stages) {
  // Products per token, roughly: what a layer's weights and its attention's scores take.
  const std::int64_t head_dims = m.qk_head_dim() + m.v_head_dim;
  const double attention =
      static_cast<double>(m.n_heads * head_dims) * (static_cast<double>(m.dim) + static_cast<double>(seq_len) / 2.0);
  std::vector<double> layers;
  for (std::int64_t layer = 0; layer < m.n_layers; ++layer) {
    const std::int64_t width = m.is_moe_layer(layer) ? (m.top_k + m.num_shared_experts) * m.moe_inter_dim : m.inter_dim;
    layers.push_back(attention + 3.0 * static_cast<double>(m.dim * width));
  }
  const double output = static_cast<double>(m.dim * m.vocab_size);
  const double mtp = static_cast<double>(m.num_mtp_modules) * (layers.back() + output);
  return cut_by_cost(layers, 0.0, output + mtp, num_stages);
}

}  // namespace

std::vector<StageModules> JobConfig::pipeline_stages(const MeshDegrees& degrees) const {
  const auto& p = parallelism;
  const std::int64_t num_layers = model.args.n_layers;
  if (degrees.pp == 1) return {{.embedding = true, .num_layers = num_layers, .head = true}};
  std::vector<StageModules> stages;
  if (!p.module_fqns_per_model_part.empty()) {
    stages = stages_of_module_lists(p.module_fqns_per_model_part, num_layers);
  } else if (p.pipeline_parallel_layers_per_stage > 0) {
    stages = cut_by_layers_per_stage(num_layers, p.pipeline_parallel_layers_per_stage,
                                     p.pipeline_parallel_first_stage_less_layers,
                                     p.pipeline_parallel_last_stage_less_layers);
  } else {
    const int per_rank = min_stages_per_rank(pipeline_schedule_kind(p.pipeline_parallel_schedule));
    stages = cut_by_model_cost(model.args, training.seq_len, static_cast<int>(degrees.pp) * per_rank);
  }
  require_divides("parallelism.pipeline_parallel_degree", degrees.pp, static_cast<std::int64_t>(stages.size()),
                  fmt::format("the {} stages of the model", stages.size()));
  return stages;
}

PipelineSchedule JobConfig::pipeline_schedule(const MeshDegrees& degrees) const {
  const auto num_stages = static_cast<std::int64_t>(pipeline_stages(degrees).size());
  const std::int64_t data_ranks = degrees.dp_replicate * degrees.dp_shard;
  if (overlaps_micro_batches(degrees)) {
    return make_overlapped_schedule(static_cast<int>(micro_batches_per_step(data_ranks)));
  }
  const auto kind =
      degrees.pp == 1 ? PipelineScheduleKind::k1F1B : pipeline_schedule_kind(parallelism.pipeline_parallel_schedule);
  try {
    PipelineSchedule schedule = make_pipeline_schedule(
        kind, static_cast<int>(degrees.pp), static_cast<int>(num_stages / degrees.pp),
        static_cast<int>(micro_batches_per_step(data_ranks)),
        parallelism.pipeline_parallel_max_deferred == 0 ? kNoLimit
                                                        : static_cast<int>(parallelism.pipeline_parallel_max_deferred));
    check(schedule);
    return schedule;
  } catch (const Error& error) {
    fail(
        "parallelism.pipeline_parallel_degree is {}: {} (each of {} data ranks has {} sequences per step, from "
        "training.global_batch_size or local_batch_size; parallelism.pipeline_parallel_microbatch_size = {} of them "
        "are a micro-batch)",
        degrees.pp, error.what(), data_ranks, sequences_per_step(data_ranks) / data_ranks, micro_batch_size());
  }
}

namespace {

JobConfig parse(std::string_view text, const std::string& source, const std::vector<std::string>& overrides) {
  const auto apply = [&](JobConfig& config) {
    ConfigTable table = config_table(config);
    table.apply_toml(text, source);
    for (const std::string& override_text : overrides) table.apply_override(override_text);
    // training.dataset names a dataset. The default folder holds another one, so it is not used.
    if (!config.training.dataset.empty() && !table.was_set("training.dataset_path")) config.training.dataset_path = {};
    return table.ignored();
  };
  // The first pass finds the flavor, the second puts what is said explicitly on top of its numbers.
  JobConfig first;
  apply(first);
  JobConfig config;
  config.model.args = model_flavor(first.model.flavor);
  const std::vector<std::string> ignored = apply(config);
  if (!ignored.empty()) {
    spdlog::warn("{}: ignored, because they mean nothing here (`tessera train --list-keys` says why): {}", source,
                 fmt::join(ignored, ", "));
  }
  return config;
}

}  // namespace

JobConfig load_job_config(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  std::error_code unreadable;
  require(!std::filesystem::is_directory(path, unreadable), "'{}' is a folder; expected a configuration file in TOML",
          path.string());
  if (!std::filesystem::exists(path, unreadable) && !unreadable) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path.parent_path() / ".", unreadable)) {
      names.push_back(entry.path().filename());
    }
    const std::string nearest = nearest_word(path.filename().string(), names);
    fail("there is no file '{}'; expected a configuration in TOML{}", path.string(),
         nearest.empty() ? "" : fmt::format("; did you mean '{}'?", (path.parent_path() / nearest).string()));
  }
  return parse(read_text_file(path), path.string(), overrides);
}

JobConfig parse_job_config(std::string_view toml_text, const std::vector<std::string>& overrides) {
  return parse(toml_text, "config", overrides);
}

}  // namespace tessera
