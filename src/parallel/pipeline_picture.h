// Draws a pipeline schedule as text or SVG, with a row per rank and time from left to right.
#pragma once

#include <string>

#include "parallel/pipeline_timing.h"

namespace tessera {

/// The largest number of time slots that to_text draws.
inline constexpr int kMaxTextSlots = 10'000;
/// The largest product of time slots and ranks that to_text() draws.
inline constexpr int kMaxTextCells = 200'000;

/// Returns a line per rank with a column per time slot. A slot is as long as the shortest action. A pass is F
/// (forward), B (backward), I (input gradient) or W (weight gradients), followed by the micro-batch: "F3". If ranks
/// have several stages, the stage is in front: "5F3". '-' continues a pass, '.' is idle, and "0F9&7B2" are two passes
/// that overlap. For more than kMaxTextSlots slots, or kMaxTextCells of all ranks, it returns one line
/// that says so.
std::string to_text(const PipelineSchedule& schedule, const PipelineTiming& timing);

/// Returns a self-contained SVG for light and dark pages. Each action is a box with the number of its micro-batch. The
/// box's <title> describes the action. The later a stage is on its rank, the paler its boxes. Overlapped passes share a
/// frame.
std::string to_svg(const PipelineSchedule& schedule, const PipelineTiming& timing);

}  // namespace tessera
