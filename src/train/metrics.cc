#include "train/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

namespace tessera {
namespace {

/// A field of /proc/self/status, in bytes; 0 if the system has none.
std::size_t status_bytes(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

std::string format_thousands(std::int64_t number) {
  std::string text = fmt::format("{}", number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

/// JSON has no NaN.
nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

/// Lines of steps before `first_step`.
std::string earlier_lines(const std::filesystem::path& path, std::int64_t first_step) {
  std::ifstream file(path);
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const auto parsed = nlohmann::json::parse(line, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) continue;
    if (parsed["step"].get<std::int64_t>() < first_step) kept += line + '\n';
  }
  return kept;
}

}  // namespace

std::size_t resident_bytes() { return status_bytes("VmRSS"); }
std::size_t peak_resident_bytes() { return status_bytes("VmHWM"); }

std::string format_gib(std::size_t bytes) {
  return fmt::format("{:.2f}GiB", static_cast<double>(bytes) / static_cast<double>(1ULL << 30));
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, std::int64_t first_step, std::int64_t num_steps,
                             std::int64_t log_freq, double flop_per_token, double peak_flops, std::size_t memory_bytes)
    : path_(path),
      first_step_(first_step),
      num_steps_(num_steps),
      log_freq_(log_freq),
      flop_per_token_(flop_per_token),
      peak_flops_(peak_flops),
      memory_bytes_(memory_bytes),
      terminal_(stderr_is_terminal()),
      window_begin_(Clock::now()) {
  {
    const std::string kept = earlier_lines(path, first_step);
    AtomicFile file(path);
    file.write(kept);
    file.commit();
  }
  file_ = std::fopen(path.c_str(), "a");
  require(file_ != nullptr, "cannot open '{}': {}", path.string(), std::strerror(errno));
}

MetricsWriter::~MetricsWriter() {
  clear_progress();
  std::fclose(file_);
}

void MetricsWriter::append(const std::string& line) {
  const bool written = std::fputs((line + "\n").c_str(), file_) >= 0 && std::fflush(file_) == 0;
  require(written, "cannot write '{}': {}", path_.string(), std::strerror(errno));
}

void MetricsWriter::pause() { paused_at_ = Clock::now(); }
void MetricsWriter::resume() { window_begin_ += Clock::now() - paused_at_; }

void MetricsWriter::step(std::int64_t step, const StepResult& result) {
  window_tokens_ += result.num_tokens;
  const bool due = step == first_step_ || step % log_freq_ == 0 || step == num_steps_;
  if (!due) {
    draw_progress(step, result.loss);
    return;
  }
  const Clock::duration window = Clock::now() - window_begin_;
  const double seconds = std::chrono::duration<double>(window).count();
  const double tokens_per_second = static_cast<double>(window_tokens_) / seconds;
  const double tflops = tokens_per_second * flop_per_token_ * 1e-12;
  const std::size_t memory = peak_resident_bytes();
  const double memory_percent = 100.0 * static_cast<double>(memory) / static_cast<double>(memory_bytes_);
  const std::string mfu =
      peak_flops_ > 0 ? fmt::format("{:.2f}%", 100.0 * tflops * 1e12 / peak_flops_) : std::string("N/A");

  clear_progress();
  spdlog::info("step: {:>{}}  loss: {:7.4f}  grad_norm: {:7.4f}  memory: {}({:.2f}%)  tps: {}  tflops: {:.2f}  mfu: {}",
               step, fmt::formatted_size("{}", num_steps_), result.loss, result.grad_norm, format_gib(memory),
               memory_percent, format_thousands(static_cast<std::int64_t>(tokens_per_second)), tflops, mfu);

  nlohmann::ordered_json line = {
      {"step", step},
      {"loss", number(result.loss)},
      {"grad_norm", number(result.grad_norm)},
      {"lr", result.learning_rate},
      {"tokens_per_second", tokens_per_second},
      {"tflops", tflops},
      {"mfu", peak_flops_ > 0 ? number(tflops * 1e12 / peak_flops_) : nullptr},
      {"memory_bytes", memory},
      {"step_seconds", seconds * static_cast<double>(result.num_tokens) / static_cast<double>(window_tokens_)}};
  if (!result.expert_load.empty()) {
    line["expert_load_max_over_mean"] = *std::max_element(result.expert_load.begin(), result.expert_load.end());
    line["expert_load_per_layer"] = result.expert_load;
  }
  if (result.mtp_loss != 0.0) line["mtp_loss"] = number(result.mtp_loss);
  if (result.balance_loss != 0.0) line["balance_loss"] = number(result.balance_loss);
  append(line.dump());

  run_time_ += window;
  window_begin_ = Clock::now();
  window_tokens_ = 0;
  draw_progress(step, result.loss);
}

void MetricsWriter::validation(std::int64_t step, double loss) {
  clear_progress();
  spdlog::info("validate step: {}  loss: {:7.4f}", step, loss);
  append(nlohmann::ordered_json{{"step", step}, {"validation_loss", number(loss)}}.dump());
}

void MetricsWriter::draw_progress(std::int64_t step, double loss) {
  if (!terminal_) return;
  constexpr std::int64_t kWidth = 30;
  const std::int64_t filled = kWidth * step / num_steps_;
  const std::chrono::duration<double> elapsed = run_time_ + (Clock::now() - window_begin_);
  const double per_step = elapsed.count() / static_cast<double>(step - first_step_ + 1);
  fmt::print(stderr, "\r\033[K[{:#<{}}{:.<{}}] {}/{}  loss {:.4f}  {:.2f} s/step  ETA {}", "", filled, "",
             kWidth - filled, step, num_steps_, loss, per_step,
             format_duration(per_step * static_cast<double>(num_steps_ - step)));
  std::fflush(stderr);
  progress_drawn_ = true;
}

void MetricsWriter::clear_progress() {
  if (!progress_drawn_) return;
  fmt::print(stderr, "\r\033[K");
  progress_drawn_ = false;
}

}  // namespace tessera
