#include "base/trace.h"

#include <fmt/format.h>

#include "base/file.h"

namespace tessera {

void TraceRecorder::write(const std::filesystem::path& path) const {
  std::string text = "{\"traceEvents\": [\n";
  if (!events_.empty()) {
    Clock::time_point origin = events_.front().begin;
    for (const Event& event : events_) origin = std::min(origin, event.begin);
    const auto microseconds = [](Clock::duration duration) {
      return std::chrono::duration<double, std::micro>(duration).count();
    };
    for (const Event& event : events_) {
      text += fmt::format(R"({{"name": "{}", "ph": "X", "pid": 0, "tid": 0, "ts": {:.3f}, "dur": {:.3f}}},)",
                          event.name, microseconds(event.begin - origin), microseconds(event.end - event.begin));
      text += '\n';
    }
    text.erase(text.size() - 2, 1);  // the last comma
  }
  text += fmt::format("], \"displayTimeUnit\": \"ms\", \"otherData\": {{\"complete\": {}}}}}\n",
                      events_.size() < events_.capacity());
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace tessera
