#include "parallel/pipeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>

namespace tessera {
namespace {

using Pass = PipelinePass::Kind;

// The colours are Okabe and Ito's, which colour-blind people can tell apart. Dark text is readable on all of them, and
// even more so on paler ones.
struct Style {
  char letter;
  const char* legend;
  std::array<int, 3> colour;
};
constexpr std::array kStyles = {
    Style{'F', "forward", {0x56, 0xb4, 0xe9}},
    Style{'B', "backward", {0xcc, 0x79, 0xa7}},
    Style{'I', "input gradient", {0xe6, 0x9f, 0x00}},
    Style{'W', "weight gradients", {0x00, 0x9e, 0x73}},
};

const Style& style_of(const PipelinePass& pass) { return kStyles[static_cast<int>(pass.kind)]; }

double shortest_action(const PipelineTiming& timing) {
  double shortest = std::numeric_limits<double>::infinity();
  for (const auto& spans : timing.spans) {
    for (const PipelineTiming::Span& span : spans) shortest = std::min(shortest, span.end - span.start);
  }
  return shortest;
}

// ---- Text

std::string label_of(const PipelineSchedule& schedule, const PipelineAction& action) {
  std::string label;
  for_each_pass(action, [&](const PipelinePass& pass) {
    if (!label.empty()) label += '&';
    if (schedule.stages_per_rank > 1) label += std::to_string(pass.stage);
    label += style_of(pass).letter + std::to_string(pass.micro_batch);
  });
  return label;
}

/// The time slots of an action, [begin, end). There is at least one, because no action is shorter than a slot.
struct Slots {
  std::int64_t begin, end;
};

Slots slots_of(const PipelineTiming::Span& span, double slot) {
  constexpr double kTolerance = 1e-9;  // half slots are common, and sums of times are not exact
  const std::int64_t begin = std::llround(span.start / slot + kTolerance);
  return {begin, std::max<std::int64_t>(begin + 1, std::llround(span.end / slot + kTolerance))};
}

// ---- SVG; all sizes are in pixels

constexpr double kLeft = 70, kRight = 20, kTop = 74, kRowHeight = 30, kRowGap = 6, kBottom = 34;
constexpr double kShortest = 26;         // width of the shortest action, unless the picture gets too wide
constexpr double kMaxRowWidth = 30'000;  // many programs cannot show wider pictures
constexpr double kLeastWidth = 760;      // the heading and the legend need it
constexpr double kDigit = 7.0;           // width of a digit
constexpr double kPalest = 0.6;          // part of white in the colour of a rank's last stage
constexpr double kSwatch = 14, kLegendLetter = 7.2;

constexpr const char* kStyleSheet =
    "<style>.page{fill:#ffffff}.text{fill:#1f2328}.quiet{fill:#59636e}.line{stroke:#9aa4af;fill:none}"
    ".frame{stroke:#1f2328;stroke-width:2;fill:none}.number{fill:#15191f;text-anchor:middle}"
    "@media (prefers-color-scheme:dark){.page{fill:#15191f}.text{fill:#e6edf3}.quiet{fill:#9aa4af}"
    ".line{stroke:#59636e}.frame{stroke:#e6edf3}}</style>\n";

std::string colour_of(Pass kind, int chunk, int num_chunks) {
  const double white = num_chunks == 1 ? 0.0 : kPalest * chunk / (num_chunks - 1);
  std::string colour = "#";
  for (const int part : kStyles[static_cast<int>(kind)].colour) {
    colour += fmt::format("{:02x}", static_cast<int>(std::lround(part + (255 - part) * white)));
  }
  return colour;
}

std::string draw_box(const PipelineSchedule& schedule, const PipelinePass& pass, double x, double y, double width,
                     double height) {
  // In both placements of stages, stages s and s + P are consecutive chunks of a rank.
  const int chunk = pass.stage / schedule.num_ranks;
  std::string svg = fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"/>", x,
                                y, width, height, colour_of(pass.kind, chunk, schedule.stages_per_rank));
  const std::string number = std::to_string(pass.micro_batch);
  if (width > kDigit * static_cast<double>(number.size()) + 2.0) {
    svg += fmt::format("<text class=\"number\" x=\"{:.2f}\" y=\"{:.1f}\">{}</text>", x + width / 2,
                       y + height / 2 + 4.2, number);
  }
  return svg;
}

std::string draw_action(const PipelineSchedule& schedule, const PipelineAction& action, double x, double y,
                        double width) {
  constexpr double kGap = 1.0;  // between boxes
  const double inner = width - kGap;
  if (!action.overlapped) {
    return fmt::format("<g><title>{}</title>{}</g>\n", describe(action.pass),
                       draw_box(schedule, action.pass, x, y, inner, kRowHeight));
  }
  return fmt::format(
      "<g><title>{}, with the {}</title>{}{}<rect class=\"frame\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" "
      "height=\"{}\"/></g>\n",
      describe(action.pass), describe(*action.overlapped), draw_box(schedule, action.pass, x, y, inner, kRowHeight / 2),
      draw_box(schedule, *action.overlapped, x, y + kRowHeight / 2, inner, kRowHeight / 2), x + 1, y + 1, inner - 2,
      kRowHeight - 2);
}

std::string draw_legend(const PipelineSchedule& schedule) {
  std::set<Pass> kinds;
  bool overlaps = false;
  for (const auto& actions : schedule.actions) {
    for (const PipelineAction& action : actions) {
      for_each_pass(action, [&](const PipelinePass& pass) { kinds.insert(pass.kind); });
      overlaps = overlaps || action.overlapped;
    }
  }
  std::string svg;
  double x = kLeft;
  const auto add_text = [&](std::string_view text) {
    svg += fmt::format("<text class=\"quiet\" x=\"{:.1f}\" y=\"58\">{}</text>\n", x, text);
    x += kLegendLetter * static_cast<double>(text.size()) + 18;
  };
  for (const Pass kind : kinds) {
    for (int chunk = 0; chunk < schedule.stages_per_rank; ++chunk) {
      svg += fmt::format("<rect x=\"{:.1f}\" y=\"46\" width=\"{}\" height=\"{}\" fill=\"{}\"/>", x, kSwatch, kSwatch,
                         colour_of(kind, chunk, schedule.stages_per_rank));
      x += kSwatch;
    }
    x += 6;
    add_text(kStyles[static_cast<int>(kind)].legend);
  }
  if (schedule.stages_per_rank > 1) add_text("paler: later stage");
  if (overlaps) add_text("framed: run together");
  return svg;
}

}  // namespace

std::string to_text(const PipelineSchedule& schedule, const PipelineTiming& timing) {
  const double slot = shortest_action(timing), num_slots = std::round(timing.makespan / slot);
  if (num_slots > kMaxTextSlots || num_slots * schedule.num_ranks > kMaxTextCells) {
    return fmt::format(
        "{:.0f} time slots of {} ranks are too many to draw, expected {} slots or fewer, and a product of {} or less\n",
        num_slots, schedule.num_ranks, kMaxTextSlots, kMaxTextCells);
  }
  std::size_t width = 0;  // of a slot, including a space
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto [begin, end] = slots_of(timing.spans[rank][i], slot);
      const std::size_t count = end - begin, length = label_of(schedule, schedule.actions[rank][i]).size() + 1;
      width = std::max(width, (length + count - 1) / count);
    }
  }
  const std::size_t rank_digits = std::to_string(schedule.num_ranks - 1).size();
  std::string text;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    std::string line = fmt::format("rank {:<{}}  ", rank, rank_digits);
    std::int64_t now = 0;
    const auto idle_until = [&](std::int64_t slot_idx) {
      for (; now < slot_idx; ++now) line += fmt::format("{:<{}}", ".", width);
    };
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto [begin, end] = slots_of(timing.spans[rank][i], slot);
      idle_until(begin);
      std::string cell = label_of(schedule, schedule.actions[rank][i]);
      cell.resize((end - begin) * width - 1, end - begin > 1 ? '-' : ' ');
      line += cell + ' ';
      now = end;
    }
    idle_until(static_cast<std::int64_t>(num_slots));
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string to_svg(const PipelineSchedule& schedule, const PipelineTiming& timing) {
  const double scale = std::min(kShortest / shortest_action(timing), kMaxRowWidth / timing.makespan);
  const double row_width = timing.makespan * scale, width = std::max(kLeft + row_width + kRight, kLeastWidth);
  const double end_of_rows = kTop + schedule.num_ranks * (kRowHeight + kRowGap);
  const double height = end_of_rows + kBottom;
  const int peak = *std::max_element(timing.peak_in_flight.begin(), timing.peak_in_flight.end());
  const std::string title = fmt::format(
      "{}: {} ranks, {} micro-batches, bubble {:.1f} %, at most {} stage activations on a rank", name_of(schedule.kind),
      schedule.num_ranks, schedule.num_micro_batches, 100.0 * timing.mean_bubble_fraction(), peak);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"{2}\">\n",
      width, height, title);
  svg += kStyleSheet;
  svg += fmt::format("<rect class=\"page\" width=\"{:.0f}\" height=\"{:.0f}\"/>\n", width, height);
  svg += fmt::format("<text class=\"text\" x=\"{}\" y=\"28\" font-size=\"15\" font-weight=\"bold\">{}</text>\n", kLeft,
                     title);
  svg += draw_legend(schedule);
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const double y = kTop + rank * (kRowHeight + kRowGap), middle = y + kRowHeight / 2;
    svg += fmt::format("<text class=\"text\" x=\"14\" y=\"{:.1f}\">rank {}</text>", middle + 4.2, rank);
    svg += fmt::format("<path class=\"line\" d=\"M{} {:.1f}h{:.2f}\"/>\n", kLeft, middle, row_width);
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const PipelineTiming::Span& span = timing.spans[rank][i];
      svg += draw_action(schedule, schedule.actions[rank][i], kLeft + span.start * scale, y,
                         (span.end - span.start) * scale);
    }
  }
  svg += fmt::format("<path class=\"line\" d=\"M{0} {1:.1f}v12M{2:.2f} {1:.1f}v12\"/>", kLeft, end_of_rows,
                     kLeft + row_width);
  svg += fmt::format("<text class=\"quiet\" x=\"{}\" y=\"{:.1f}\">0</text>", kLeft + 4, end_of_rows + 12);
  svg += fmt::format("<text class=\"quiet\" x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"end\">time {:g}</text>\n",
                     kLeft + row_width - 4, end_of_rows + 12, timing.makespan);
  return svg + "</svg>\n";
}

}  // namespace tessera
