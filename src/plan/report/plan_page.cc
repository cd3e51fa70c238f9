#include "plan/report/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/json.h"
#include "compare/report/html.h"
#include "compare/report/svg_plot.h"
#include "parallel/pipeline_picture.h"
#include "plan/operator_work.h"
#include "run/record/metrics.h"

namespace tessera {
namespace {

using Lane = ForecastEvent::Lane;
using TableRows = std::vector<std::vector<std::string>>;

constexpr double kMilli = 1e3;
constexpr const char* kLaneNames[] = {"products", "attention", "memory", "NVLink", "network"};

// Sizes are in units of the view box, as those of svg_plot.
constexpr double kWidth = 720, kRight = 34, kRow = 44, kBar = 30;

/// Returns a time as text: "12.3 ms", "45.6 s".
std::string time_text(double seconds) {
  return seconds < 10.0 ? fmt::format("{:.1f} ms", seconds * kMilli) : fmt::format("{:.1f} s", seconds);
}

std::string svg_frame(double height, const std::string& description, const std::string& body) {
  return fmt::format("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\">{}</svg>", kWidth, height,
                     html_escape(description), body);
}

/// Returns the axis of milliseconds below `height`, from `begin` to the right edge.
std::string axis_of(double begin, double height, double most) {
  std::string svg = fmt::format("<path class=\"axis\" d=\"M{} {}H{}\"/>", begin, height, kWidth - kRight);
  for (const double tick : round_ticks(0.0, most, 4)) {
    const double x = begin + tick / most * (kWidth - kRight - begin);
    svg += fmt::format(
        "<path class=\"grid\" d=\"M{0:.1f} 0V{1}\"/><text class=\"tx\" x=\"{0:.1f}\" y=\"{2}\">{3:g}</text>", x, height,
        height + 24, tick);
  }
  return svg;
}

/// Returns the events of one layer in a pass: from the attention of the layer before the last to that of the last one.
/// Without two layers it returns the whole pass.
std::vector<ForecastEvent> layer_of(const std::vector<ForecastEvent>& events, const std::string& pass,
                                    const std::string& attention) {
  std::vector<ForecastEvent> of_pass;
  int stage = -1;
  for (const ForecastEvent& event : events) {
    if (event.pass != pass || (stage >= 0 && event.stage != stage)) continue;
    stage = event.stage;
    of_pass.push_back(event);
  }
  std::vector<double> begins;
  for (const ForecastEvent& event : of_pass) {
    if (event.name == attention) begins.push_back(event.begin);
  }
  if (begins.size() < 2) return of_pass;
  const double from = begins[begins.size() - 2], to = begins.back();
  std::erase_if(of_pass, [&](const ForecastEvent& event) {
    return event.begin + event.seconds <= from + 1e-12 || event.begin >= to - 1e-12;
  });
  return of_pass;
}

std::string lanes_figure(const std::string& title, const std::vector<ForecastEvent>& events) {
  constexpr double kLeft = 118;
  double begin = HUGE_VAL, end = 0.0;
  for (const ForecastEvent& event : events) {
    if (event.lane >= Lane::kDomain) continue;
    begin = std::min(begin, event.begin);
    end = std::max(end, event.begin + event.seconds);
  }
  if (begin >= end) return {};
  const double scale = (kWidth - kRight - kLeft) / (end - begin), height = 5 * kRow;
  std::string svg = axis_of(kLeft, height, (end - begin) * kMilli);
  for (int lane = 0; lane < 5; ++lane) {
    svg +=
        fmt::format("<text class=\"te\" x=\"{}\" y=\"{}\">{}</text>", kLeft - 10, lane * kRow + 30, kLaneNames[lane]);
  }
  for (const ForecastEvent& event : events) {
    const double from = std::max(event.begin, begin), to = std::min(event.begin + event.seconds, end);
    if (from >= to) continue;
    const int lane = static_cast<int>(event.lane);
    svg += fmt::format(
        "<rect class=\"p{}\" x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"><title>{}, {:.3f} ms</title></rect>",
        lane, kLeft + (from - begin) * scale, lane * kRow + 7, std::max(0.6, (to - from) * scale - 0.6), kBar,
        html_escape(event.name), event.seconds * kMilli);
  }
  return html_figure(title, {}, svg_frame(height + 34, title, svg),
                     "Milliseconds. Where nothing computes, a transfer is waited for.");
}

/// Returns the parts of a step, each beginning where the one before ends.
std::string waterfall_figure(const std::vector<StepPart>& parts, double seconds) {
  constexpr double kLeft = 258;
  const bool is_long = seconds >= 10.0;
  const double unit = is_long ? 1.0 : kMilli;
  double most = seconds, now = 0.0;
  for (const StepPart& part : parts) most = std::max(most, now += part.seconds);
  const double scale = (kWidth - kRight - kLeft) / most;
  const double height = static_cast<double>(parts.size()) * kRow;
  std::string svg = axis_of(kLeft, height, most * unit);
  now = 0.0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double y = static_cast<double>(i) * kRow, from = std::min(now, now + parts[i].seconds);
    svg += fmt::format(
        "<text class=\"te\" x=\"{}\" y=\"{}\">{}</text>"
        "<rect class=\"p{}\" x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"><title>{}</title></rect>",
        kLeft - 10, y + 30, html_escape(parts[i].name), i == 0 ? 0 : 1, kLeft + from * scale, y + 7,
        std::max(0.6, std::abs(parts[i].seconds) * scale), kBar, time_text(parts[i].seconds));
    now += parts[i].seconds;
  }
  return html_figure("From the peak to the step", {}, svg_frame(height + 34, "Parts of a step", svg),
                     fmt::format("{} of a step of the slowest rank, {} in all. The first bar is what all products "
                                 "and attention would take at the peak of bfloat16.",
                                 is_long ? "Seconds" : "Milliseconds", time_text(seconds)));
}

std::string pipeline_section(const RunForecast& forecast) {
  const PipelineSchedule& whole = forecast.schedule;
  if (whole.num_ranks == 1) return {};
  // Enough to see the steady state, and what the schedule accepts.
  const int enough = whole.kind == PipelineScheduleKind::kDualPipeV ? 2 * whole.num_ranks : whole.num_ranks + 8;
  const int num_shown = std::min(whole.num_micro_batches, enough);
  const PipelineSchedule shown =
      make_pipeline_schedule(whole.kind, whole.num_ranks, whole.stages_per_rank, num_shown, whole.max_deferred);
  const PipelineCosts costs = pipeline_costs(forecast.step.ranks, shown.num_stages());
  return fmt::format(
      "<h2>The pipeline</h2>\n<p>{} of {} micro-batches, with the stages' own times. The step's bubble is {:.1f} %.</p>"
      "<div class=\"scroll\">{}</div>\n",
      num_shown, whole.num_micro_batches,
      100.0 * forecast.step.ranks[forecast.step.slowest].bubble_seconds / forecast.seconds,
      to_svg(shown, simulate(shown, costs)));
}

std::string frontier_figure(const std::vector<FoundLayout>& layouts) {
  PlotSeries all{.curve = {}, .style = 1, .points = true, .joined = false},
      best{.curve = {}, .style = 0, .solid = true, .points = true};
  const auto add = [](PlotSeries& series, const FoundLayout& layout) {
    series.curve.x.push_back(layout.memory_bytes / static_cast<double>(1ULL << 30));
    series.curve.y.push_back(layout.tokens_per_second_per_gpu);
  };
  for (const FoundLayout& layout : layouts) add(all, layout);
  for (const FoundLayout& layout : frontier(layouts)) add(best, layout);
  const Plot plot{.id = "frontier",
                  .description = "Speed and memory of all layouts that fit",
                  .x_label = "memory of a GPU, GiB",
                  .y_label = "tokens/s per GPU",
                  .series = {all, best}};
  return html_figure("Layouts that fit", {{"all", "p1", true}, {"not beaten in both", "p0", true}}, svg_plot(plot),
                     "Each point is a layout, planned in full.");
}

std::string validation_figure(const std::vector<ValidatedRun>& runs) {
  PlotSeries errors{.curve = {}, .style = 0, .points = true, .joined = false};
  double most = 6.0;
  for (const ValidatedRun& run : runs) {
    errors.curve.x.push_back(static_cast<double>(errors.curve.x.size() + 1));
    errors.curve.y.push_back(100.0 * (run.predicted / run.measured - 1.0));
    most = std::max(most, std::abs(errors.curve.y.back()));
  }
  const Plot plot{.id = "validation",
                  .description = "Errors of forecasts of runs that were measured",
                  .x_label = "run",
                  .y_label = "error, %",
                  .series = {errors},
                  .reference_lines = {-5.0, 5.0},
                  .y_range = std::pair{-1.1 * most, 1.1 * most}};
  return html_figure(
      "Predicted against measured", {}, svg_plot(plot),
      fmt::format("{} runs of this program that were measured. The dotted lines are at 5 %.", runs.size()));
}

std::string layouts_table(const std::vector<FoundLayout>& layouts, std::int64_t num_ranks) {
  constexpr std::size_t kMost = 12;
  TableRows rows = {{std::begin(kLayoutTitles), std::end(kLayoutTitles)}};
  for (const FoundLayout& layout : std::span(layouts).first(std::min(kMost, layouts.size()))) {
    rows.push_back(layout_row(layout, num_ranks));
  }
  return "<h2>The fastest layouts</h2>\n" + html_table(rows) +
         "<p>Memory is with the least capacity factor. The column behind it has the largest factor that fits, and the "
         "memory with it. *: weights are quantized for each pass.</p>\n";
}

std::string lines_table(const RankForecast& rank, double seconds) {
  std::vector<ForecastLine> lines = rank.lines;
  std::ranges::stable_sort(lines, std::ranges::greater(), &ForecastLine::seconds);
  TableRows rows = {{"operator or transfer", "pass", "calls", "ms", "part", "hidden, ms", ""}};
  for (const ForecastLine& line : lines) {
    rows.push_back({line.name, line.pass_of_stage(), std::to_string(line.num_calls),
                    fmt::format("{:.3f}", line.seconds * kMilli),
                    fmt::format("{:.1f} %", 100.0 * line.seconds / seconds),
                    line.is_transfer ? fmt::format("{:.3f}", line.hidden_seconds * kMilli) : "",
                    line.is_extrapolated ? "extrapolated" : ""});
  }
  return "<details><summary>All operators and transfers</summary>" + html_table(rows) + "</details>\n";
}

}  // namespace

std::vector<ValidatedRun> read_validation(const std::filesystem::path& path) {
  const std::optional<nlohmann::json> json = read_json_file(path, "tessera validation", 1);
  require(json.has_value(), "there is no '{}'; bench/forecast_gpu.py --out writes it", path.string());
  const JsonFields fields(*json, fmt::format("'{}', $", path.string()));
  std::vector<ValidatedRun> runs;
  for (const auto& [name, value] : fields.at("runs").items()) {
    const JsonFields run(value, fmt::format("'{}', $.runs.{}", path.string(), name));
    runs.push_back({.measured = run.number("measured"), .predicted = run.number("predicted")});
    require(runs.back().measured > 0.0, "'{}', $.runs.{}.measured must be above 0", path.string(), name);
  }
  return runs;
}

std::vector<StepPart> parts_of_step(const RunForecast& forecast, const Cluster& cluster) {
  const RankForecast& rank = forecast.step.ranks[forecast.step.slowest];
  double products = 0.0, memory = 0.0, transfers = 0.0;
  for (const ForecastLine& line : rank.lines) {
    if (line.stage < 0 || line.name == kWaitForHost) continue;
    (line.is_transfer ? transfers : is_product_or_attention(line.name) ? products : memory) += line.seconds;
  }
  // Weights that are gathered once are lines of the passes, and no part of their time.
  transfers -= rank.gather_seconds;
  const double passes = forecast.step.passes_seconds - rank.bubble_seconds;
  const double host = passes - products - memory - transfers;  // with the waits for the host
  const double at_peak = forecast.executed_flop / cluster.peak_flop_per_second;
  std::vector<StepPart> parts = {{"at the peak", at_peak},
                                 {"compute below it", products - at_peak},
                                 {"memory operators", memory},
                                 {"transfers", transfers},
                                 {"host", host},
                                 {"bubble", rank.bubble_seconds},
                                 {"gathered once", rank.gather_seconds},
                                 {"sums of gradients", rank.reduction_seconds},
                                 {"optimizer", rank.optimizer_seconds}};
  double sum = 0.0;
  for (const StepPart& part : parts) sum += part.seconds;
  parts.push_back({"other ranks", forecast.step.seconds - sum});
  parts.push_back({"the slowest GPU", forecast.seconds - forecast.step.seconds});
  std::erase_if(parts, [&](const StepPart& part) { return std::abs(part.seconds) < 1e-9 * forecast.seconds; });
  return parts;
}

std::string plan_page(const PlanPage& page) {
  const RunForecast& forecast = page.forecast;
  const Cluster& cluster = page.cluster;
  const RankForecast& rank = forecast.step.ranks[forecast.step.slowest];
  const double rate = forecast.tokens_per_second_per_gpu();
  const double memory = static_cast<double>(forecast.memory.total()) + cluster.reserved_bytes;
  const bool fits = memory <= cluster.memory_bytes;
  const std::string engine =
      cluster.engine.name.empty() ? "" : fmt::format(" Engine: {}, {}.", cluster.engine.name, cluster.engine.source);
  std::string body =
      html_box(fits ? "equivalent" : "worse", fits ? "✓" : "!",
               fmt::format("<b>{:.0f} tokens/s per GPU</b>{}", rate, fits ? "" : ", but it does not fit"),
               html_escape(fmt::format("{}. A forecast: nothing was run.{}", page.layout, engine)));
  body += "<div class=\"tiles\">";
  body += html_tile("Step", time_text(forecast.seconds), fmt::format("{:.0f} thousand tokens", 1e-3 * forecast.tokens));
  body +=
      html_tile("MFU", fmt::format("{:.1f} %", 100.0 * rate * forecast.flop_per_token / cluster.peak_flop_per_second),
                "TorchTitan's count");
  body += html_tile("Memory", format_gib(static_cast<std::size_t>(memory)),
                    "of " + format_gib(static_cast<std::size_t>(cluster.memory_bytes)));
  body +=
      html_tile("Price", fmt::format("${:.0f}", cluster.dollars_per_gpu_hour / 3600.0 / rate * 1e9), "per 10⁹ tokens");
  body += "</div>\n<div class=\"plots\">";
  body += waterfall_figure(parts_of_step(forecast, cluster), forecast.seconds);
  body += lanes_figure("A layer's forward", layer_of(rank.events, "forward", "mla_attention_forward"));
  body += lanes_figure("A layer's backward", layer_of(rank.events, "backward", "mla_attention_backward"));
  if (!page.layouts.empty()) body += frontier_figure(page.layouts);
  if (!page.validation.empty()) body += validation_figure(page.validation);
  body += "</div>\n";
  body += pipeline_section(forecast);
  if (!page.layouts.empty()) body += layouts_table(page.layouts, page.forecast.num_ranks);
  body += lines_table(rank, forecast.seconds);
  body += fmt::format("<p>Rates: {}</p>\n", html_escape(cluster.path.filename().string()));
  return html_page(page.title, "plan", body);
}

}  // namespace tessera
