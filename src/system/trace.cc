#include "system/trace.h"

#include <fmt/format.h>

#include "base/file.h"
#include "base/json.h"

namespace tessera {

void TraceRecorder::write(const std::filesystem::path& path) const {
  std::string text = "{\"traceEvents\": [\n";
  Clock::time_point origin = Clock::time_point::max();
  for (const Event& event : events_) origin = std::min(origin, event.begin);
  for (const GpuEvent& event : gpu_events_) origin = std::min(origin, event.begin);
  const auto add = [&](std::string_view name, Row row, Clock::time_point begin, Clock::time_point end) {
    const auto microseconds = [](Clock::duration duration) {
      return std::chrono::duration<double, std::micro>(duration).count();
    };
    text += fmt::format(R"({{"name": {}, "ph": "X", "pid": 0, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}},)",
                        json_text(nlohmann::json(name)), static_cast<int>(row), microseconds(begin - origin),
                        microseconds(end - begin));
    text += '\n';
  };
  for (const Event& event : events_) add(event.name, event.row, event.begin, event.end);
  for (const GpuEvent& event : gpu_events_) add(event.name, Row::kGpu, event.begin, event.end);
  if (!events_.empty() || !gpu_events_.empty()) text.erase(text.size() - 2, 1);  // removes the last comma
  text += fmt::format("], \"displayTimeUnit\": \"ms\", \"otherData\": {{\"complete\": {}}}}}\n", is_complete_);
  write_whole_file(path, text);
}

}  // namespace tessera
