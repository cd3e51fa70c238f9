#include "run/record/metrics.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/unix_time.h"
#include "base/version.h"
#include "ops/runtime/inventory.h"
#include "run/record/expert_loads.h"
#include "run/record/run_files.h"

namespace tessera {
namespace {

std::string format_thousands(std::int64_t number) {
  std::string text = fmt::format("{}", number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

/// Calls `visit` with the step, the object and the text of every line of the file that is of a step. Throws Error if
/// there is a file that cannot be read.
template <typename Visit>
void for_each_line(const std::filesystem::path& path, Visit&& visit) {
  if (!path_exists(path)) return;
  std::istringstream file(read_text_file(path));
  for (std::string line; std::getline(file, line);) {
    const auto parsed = nlohmann::json::parse(line, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) continue;
    visit(parsed["step"].get<std::int64_t>(), parsed, line);
  }
}

/// Returns the file's lines of steps before `first_step`.
std::string earlier_lines(const std::filesystem::path& path, std::int64_t first_step) {
  std::string kept;
  for_each_line(path, [&](std::int64_t step, const auto&, const std::string& line) {
    if (step < first_step) kept += line + '\n';
  });
  return kept;
}

/// Calls write(). If storage fails, logs that and `consequence`, and returns false.
template <typename Write>
bool write_or_warn(Write&& write, const char* consequence) {
  try {
    write();
    return true;
  } catch (const Error& error) {
    if (error.status() != ExitStatus::kStorageFailed) throw;
    spdlog::warn("{}; {}", error.what(), consequence);
    return false;
  }
}

}  // namespace

bool has_validation_loss(const std::filesystem::path& path, std::int64_t step) {
  bool found = false;
  for_each_line(path, [&](std::int64_t step_of_line, const auto& parsed, const std::string&) {
    found |= step_of_line == step && parsed.contains("validation_loss");
  });
  return found;
}

std::size_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::size_t bytes = 0;
  for (std::string line; std::getline(status, line);) {  // "RssAnon:	     148 kB"
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:")) {
      bytes += std::stoull(line.substr(line.find(':') + 1)) * 1024;
    }
  }
  return bytes;
}

double peak_tflops(const JobConfig& config, Device device) {
  if (config.metrics.peak_tflops > 0.0 || device == Device::kCpu) return config.metrics.peak_tflops;
  return cuda::peak_tflops(cuda::gpu_name());
}

std::string format_gib(std::size_t bytes) {
  return fmt::format("{:.2f}GiB", static_cast<double>(bytes) / static_cast<double>(1ULL << 30));
}

namespace {

/// Returns "step  12", with the same width for all steps of a run.
std::string step_label(std::int64_t step, std::int64_t num_steps) {
  return fmt::format("step {:>{}}", step, fmt::formatted_size("{}", num_steps));
}

}  // namespace

std::string step_line(const StepResult& result, const Rates& rates, std::int64_t num_steps) {
  return fmt::format(
      "{}  loss {:7.4f}  norm {:7.4f}  lr {:.2e}  tps {}  {}", step_label(result.step, num_steps), result.loss,
      result.grad_norm, result.learning_rate, format_thousands(static_cast<std::int64_t>(rates.tokens_per_second)),
      rates.mfu ? fmt::format("mfu {:.1f}%", 100.0 * *rates.mfu) : fmt::format("tflops {:.2f}", rates.tflops));
}

MetricsWriter::MetricsWriter(const MetricsOptions& options) : options_(options), window_{.begin = Clock::now()} {
  const std::filesystem::path& path = options_.path;
  {
    const std::string kept = earlier_lines(path, options_.first_step);
    write_whole_file(path, kept);
  }
  file_.emplace(path);
  if (!options_.tensorboard_folder.empty()) tensorboard_.emplace(options_.tensorboard_folder, options_.first_step);
  if (!options_.prometheus_address.empty()) {
    saved_at_ = unix_time();
    try {
      server_.emplace(options_.prometheus_address, "tessera_train_");
      spdlog::info("metrics for Prometheus: http://{}/metrics", options_.prometheus_address);
    } catch (const Error& error) {  // a run is worth more than its curves
      spdlog::warn("{} (metrics.prometheus_port); training goes on without", error.what());
    }
  }
  // Without a terminal, the lines of the steps show how far the run is.
  if (stderr_is_terminal()) {
    const std::int64_t num_steps = options_.num_steps - options_.first_step + 1;
    progress_.emplace("training", static_cast<std::uint64_t>(num_steps), "steps");
  }
}

std::size_t MetricsWriter::memory_in_use() const {
  return options_.device == Device::kCuda ? options_.memory_bytes - cuda::free_memory_bytes() : peak_resident_bytes_;
}

void MetricsWriter::pause() { paused_at_ = Clock::now(); }
void MetricsWriter::resume() { window_.begin += Clock::now() - paused_at_; }

void MetricsWriter::Window::add(const StepResult& result) {
  tokens += result.num_tokens;
  ++steps;
  seconds += result.seconds;
  later_rounds += result.later_rounds;
}

Rates MetricsWriter::Window::means(Clock::time_point end, int num_ranks) const {
  const double elapsed = std::chrono::duration<double>(end - begin).count(), num_steps = static_cast<double>(steps);
  return {.tokens_per_second = static_cast<double>(tokens) / elapsed / num_ranks,
          .mfu = {},
          .step_seconds = elapsed / num_steps,
          .seconds = seconds / num_steps,
          .later_rounds = later_rounds / num_steps};
}

void MetricsWriter::step(const StepResult& result) {
  const std::int64_t step = result.step;
  tokens_ += result.num_tokens;
  repeated_steps_ += result.repeated_for.empty() ? 0 : 1;
  window_.add(result);
  if (options_.device == Device::kCpu) peak_resident_bytes_ = std::max(peak_resident_bytes_, resident_bytes());
  // total_loss is the sum that is minimised. If a part of it is not finite, no loss is reported.
  const bool finite = std::isfinite(result.total_loss) && std::isfinite(result.loss);
  const bool due = step == options_.first_step || step % options_.log_freq == 0 || step == options_.num_steps ||
                   !result.sqnr.empty() || !result.repeated_for.empty() || !finite || !std::isfinite(result.grad_norm);
  if (!due) {
    draw_progress(step, result.loss);
    return;
  }
  Rates rates = window_.means(result.ended, options_.num_ranks);
  rates.memory_bytes = memory_in_use();
  rates.tflops = rates.tokens_per_second * options_.flop_per_token * 1e-12;
  if (options_.peak_flops > 0) rates.mfu = rates.tflops * 1e12 / options_.peak_flops;

  clear_progress();
  spdlog::info("{}", step_line(result, rates, options_.num_steps));
  if (!told_memory_) {  // it hardly changes during a run
    told_memory_ = true;
    spdlog::info("memory in use: {} of {} ({:.1f}%)", format_gib(rates.memory_bytes), format_gib(options_.memory_bytes),
                 100.0 * static_cast<double>(rates.memory_bytes) / static_cast<double>(options_.memory_bytes));
  }

  nlohmann::ordered_json line = {{"step", step},
                                 {"loss", json_number(finite ? result.loss : std::numeric_limits<double>::quiet_NaN())},
                                 {"grad_norm", json_number(result.grad_norm)},
                                 {"lr", result.learning_rate},
                                 {"tokens_per_second", rates.tokens_per_second},
                                 {"tflops", rates.tflops},
                                 {"mfu", rates.mfu ? json_number(*rates.mfu) : nullptr},
                                 {"memory_bytes", rates.memory_bytes},
                                 {"step_seconds", rates.step_seconds},
                                 {"seconds",
                                  {{"data", rates.seconds.data},
                                   {"forward", rates.seconds.forward},
                                   {"backward", rates.seconds.backward},
                                   {"optimizer", rates.seconds.optimizer}}}};
  if (!result.repeated_for.empty()) line["repeated_for"] = result.repeated_for;
  if (result.is_skipped) line["skipped"] = true;
  if (!result.expert_load.empty()) {
    line["expert_load_max_over_mean"] = *std::max_element(result.expert_load.begin(), result.expert_load.end());
    line["expert_load_per_layer"] = result.expert_load;
  }
  if (rates.later_rounds > 0.0) {
    line["dispatch_later_rounds"] = rates.later_rounds;
    spdlog::warn(
        "experts got more rows than parallelism.expert_parallel_capacity_factor has room for: {:.3g} later "
        "rounds per step and rank. No token is dropped, but steps are slower; a larger factor avoids this",
        rates.later_rounds);
  }
  if (result.mtp_loss != 0.0) line["mtp_loss"] = json_number(result.mtp_loss);
  if (result.balance_loss != 0.0) line["balance_loss"] = json_number(result.balance_loss);
  for (const SiteSqnr& site : result.sqnr) {
    for (const auto& [name, sqnr] : {std::pair{"x", site.x}, {"w", site.w}, {"dy", site.d_y}}) {
      if (sqnr) line["quantization_sqnr_db"][site.module][name] = *sqnr;
    }
  }
  file_->append(line.dump());
  if (server_) publish(result, rates);
  write_or_warn([&] { write_expert_loads(result); }, "training goes on");
  write_tensorboard(step, scalars_of(result, rates));

  window_ = {.begin = result.ended};
  draw_progress(step, result.loss);
}

void MetricsWriter::publish(const StepResult& result, const Rates& rates) {
  std::vector<Measurement> numbers;
  const auto add = [&](const char* name, const char* help, double value, std::map<std::string, std::string> labels = {},
                       bool is_counter = false) {
    numbers.push_back({name, help, std::move(labels), value, is_counter});
  };
  add("info", "The run", 1.0, {{"run", options_.run_id}, {"version", version()}});
  add("step", "Last step that was made", static_cast<double>(result.step));
  add("steps", "Steps of the run", static_cast<double>(options_.num_steps));
  add("step_time_seconds", "Unix time at which the last step was reported", unix_time());
  add("loss", "Mean cross-entropy of the step", result.loss);
  add("grad_norm", "Norm of the gradients before clipping", result.grad_norm);
  add("learning_rate", "Learning rate of the step", result.learning_rate);
  add("tokens_per_second", "Tokens per second of a rank", rates.tokens_per_second);
  add("tokens_total", "Tokens of all ranks since the process began", static_cast<double>(tokens_), {}, true);
  add("repeated_steps_total", "Steps that were made twice since the process began",
      static_cast<double>(repeated_steps_), {}, true);
  if (rates.mfu) add("mfu_ratio", "Model FLOP/s over the device's highest rate", *rates.mfu);
  add("memory_bytes", "Memory of rank 0's device", static_cast<double>(rates.memory_bytes));
  add("step_seconds", "Seconds of a step", rates.step_seconds);
  for (const auto& [part, seconds] :
       {std::pair{"data", rates.seconds.data}, std::pair{"forward", rates.seconds.forward},
        std::pair{"backward", rates.seconds.backward}, std::pair{"optimizer", rates.seconds.optimizer}}) {
    add("phase_seconds", "Seconds of a step, by part", seconds, {{"phase", part}});
  }
  for (std::size_t i = 0; i < result.expert_load.size(); ++i) {
    add("expert_load_ratio", "Tokens of the busiest expert over the mean", result.expert_load[i],
        {{"layer", options_.moe_layers[i]}});
  }
  add("dispatch_later_rounds", "Rounds of dispatches beyond their first, per step and rank", rates.later_rounds);
  add("checkpoint_time_seconds", "Unix time of the last checkpoint, or of the process's start", saved_at_);
  server_->publish(numbers);
}

void MetricsWriter::write_tensorboard(std::int64_t step, const Scalars& scalars) {
  if (!tensorboard_) return;
  const bool is_written =
      write_or_warn([&] { tensorboard_->write(step, scalars); }, "training goes on without events for TensorBoard");
  if (!is_written) tensorboard_.reset();  // the last event may be cut off
}

Scalars MetricsWriter::scalars_of(const StepResult& result, const Rates& rates) const {
  Scalars scalars = {{"_overview/loss", result.loss},
                     {"_overview/lr", result.learning_rate},
                     {"_overview/tokens_per_second", rates.tokens_per_second},
                     {"loss_metrics/global_avg_loss", result.loss},
                     {"grad_norm", result.grad_norm},
                     {"lr", result.learning_rate},
                     {"throughput(tps)", rates.tokens_per_second},
                     {"tflops", rates.tflops},
                     {"memory/peak_resident(GiB)", static_cast<double>(rates.memory_bytes) * 0x1p-30},
                     {"time_metrics/end_to_end(s)", rates.step_seconds},
                     {"time_metrics/data_loading(s)", rates.seconds.data},
                     {"time_metrics/forward(s)", rates.seconds.forward},
                     {"time_metrics/backward(s)", rates.seconds.backward},
                     {"time_metrics/optimizer(s)", rates.seconds.optimizer}};
  if (rates.mfu) scalars.emplace_back("mfu(%)", 100.0 * *rates.mfu);
  if (result.mtp_loss != 0.0) scalars.emplace_back("loss_metrics/mtp_loss", result.mtp_loss);
  if (result.balance_loss != 0.0) scalars.emplace_back("loss_metrics/balance_loss", result.balance_loss);
  for (std::size_t i = 0; i < result.expert_load.size(); ++i) {
    scalars.emplace_back(fmt::format("moe/expert_load_max_over_mean/{}", options_.moe_layers[i]),
                         result.expert_load[i]);
  }
  if (rates.later_rounds > 0.0) scalars.emplace_back("moe/dispatch_later_rounds", rates.later_rounds);
  // A card per module would make hundreds of cards; metrics.jsonl has their numbers.
  for (const auto& [name, operand] : {std::pair{"x", &SiteSqnr::x}, {"w", &SiteSqnr::w}, {"dy", &SiteSqnr::d_y}}) {
    std::vector<double> sqnr;
    for (const SiteSqnr& site : result.sqnr) {
      if (site.*operand) sqnr.push_back(*(site.*operand));
    }
    if (sqnr.empty()) continue;
    std::ranges::sort(sqnr);
    scalars.emplace_back(fmt::format("quantization_sqnr_db/{}_lowest", name), sqnr.front());
    scalars.emplace_back(fmt::format("quantization_sqnr_db/{}_median", name), sqnr[sqnr.size() / 2]);
  }
  return scalars;
}

void MetricsWriter::validation(std::int64_t step, double loss) {
  clear_progress();
  spdlog::info("{}  validation loss {:7.4f}", step_label(step, options_.num_steps), loss);
  file_->append(nlohmann::ordered_json{{"step", step}, {"validation_loss", json_number(loss)}}.dump());
  write_tensorboard(step, {{"validation_metrics/loss", loss}});
}

void MetricsWriter::checkpoint(std::int64_t step, double stall_seconds, double seconds) {
  const nlohmann::ordered_json line = {
      {"step", step}, {"checkpoint_stall_seconds", stall_seconds}, {"checkpoint_seconds", seconds}};
  file_->append(line.dump());
  saved_at_ = unix_time();
  write_tensorboard(step,
                    {{"time_metrics/checkpoint_stall(s)", stall_seconds}, {"time_metrics/checkpoint(s)", seconds}});
}

void MetricsWriter::state_checksum(std::int64_t step, std::uint64_t checksum) {
  file_->append(nlohmann::ordered_json{{"step", step}, {"state_checksum", to_hex(checksum)}}.dump());
}

void MetricsWriter::write_expert_loads(const StepResult& result) {
  constexpr std::chrono::seconds kBetween{30};  // a file system may take long to commit a file
  const auto now = Clock::now();
  if (result.expert_tokens.empty() || (result.step != options_.num_steps && now < loads_due_)) return;
  loads_due_ = now + kBetween;
  ExpertLoads loads{.step = result.step, .tokens = {}};
  for (std::size_t i = 0; i < result.expert_tokens.size(); ++i) {
    loads.tokens[options_.moe_layers[i]] = result.expert_tokens[i];
  }
  tessera::write_expert_loads(loads, options_.path.parent_path() / kExpertLoadsName);
}

void MetricsWriter::draw_progress(std::int64_t step, double loss) {
  if (!progress_) return;
  progress_->set(static_cast<std::uint64_t>(step - options_.first_step + 1), fmt::format("loss {:.4f}", loss));
}

void MetricsWriter::clear_progress() {
  if (progress_) progress_->clear();
}

}  // namespace tessera
