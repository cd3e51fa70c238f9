// Pictures of a pipeline schedule: a row per rank, time from left to right.
#pragma once

#include <string>

#include "parallel/pipeline_timing.h"

namespace tessera {

/// Fits on every screen; more time slots are not drawn.
inline constexpr int kMaxTextSlots = 10'000;

/// A line per rank, a column per time slot; a slot is as long as the shortest action. A pass is F (forward), B
/// (backward), I (input gradient) or W (weight gradients), then the micro-batch: "F3"; after the stage, if ranks have
/// several: "5F3". '-' is where it goes on, '.' is idle, "0F9&7B2" are two passes that overlap. Above kMaxTextSlots
/// slots, one line that says so.
std::string to_text(const PipelineSchedule& schedule, const PipelineTiming& timing);

/// A self-contained SVG, for light and dark pages. A box per action, with the micro-batch's number; its <title> is what
/// the action does. The later a stage is on its rank, the paler its boxes. Overlapped passes share a frame.
std::string to_svg(const PipelineSchedule& schedule, const PipelineTiming& timing);

}  // namespace tessera
