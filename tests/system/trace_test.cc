#include "system/trace.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/data/support.h"

namespace tessera {
namespace {

using std::chrono::microseconds;

TEST(TraceRecorder, TheGpuHasARowOfItsOwn) {
  const data::TemporaryFolder scratch;
  TraceRecorder recorder;
  recorder.start();
  const auto origin = TraceRecorder::Clock::now();
  recorder.record_on_gpu("early", origin - microseconds(9), origin);
  recorder.start();  // forgets what was recorded before
  recorder.record("step", origin + microseconds(2), origin + microseconds(9));
  recorder.record_on_gpu(std::string("gemm<") + "128>", origin, origin + microseconds(3));
  recorder.write(scratch / "trace.json");
  const auto json = nlohmann::json::parse(read_text_file(scratch / "trace.json"));
  ASSERT_EQ(json["traceEvents"].size(), 2u);
  EXPECT_EQ(json["traceEvents"][0]["tid"], 0);
  EXPECT_EQ(json["traceEvents"][0]["ts"], 2.0);
  EXPECT_EQ(json["traceEvents"][1]["name"], "gemm<128>");
  EXPECT_EQ(json["traceEvents"][1]["tid"], 1);
  EXPECT_EQ(json["traceEvents"][1]["ts"], 0.0);
}

/// The GPU's library gives a kernel's name, which may contain anything.
TEST(TraceRecorder, NamesAreEscaped) {
  const data::TemporaryFolder scratch;
  TraceRecorder recorder;
  recorder.start();
  const auto origin = TraceRecorder::Clock::now();
  const std::string name = "operator\"\" \\ <\n\x01\xC3\xA4>";
  recorder.record_on_gpu(name, origin, origin + microseconds(3));
  recorder.record_on_gpu("\xFF", origin, origin + microseconds(3));
  recorder.write(scratch / "trace.json");
  const auto json = nlohmann::json::parse(read_text_file(scratch / "trace.json"));
  EXPECT_EQ(json["traceEvents"][0]["name"], name);
  EXPECT_EQ(json["traceEvents"][1]["name"], "\xEF\xBF\xBD");  // the replacement character, because JSON is UTF-8
}

TEST(TraceRecorder, WritesEventsInMicroseconds) {
  const data::TemporaryFolder scratch;
  TraceRecorder recorder(2);
  { const TraceScope before(&recorder, "not recorded"); }
  recorder.start();
  const auto origin = TraceRecorder::Clock::now();
  recorder.record("inner", origin + microseconds(5), origin + microseconds(7));
  recorder.record("outer", origin, origin + microseconds(10));
  recorder.record("too many", origin, origin);
  recorder.stop();
  recorder.write(scratch / "trace.json");
  const auto json = nlohmann::json::parse(read_text_file(scratch / "trace.json"));
  ASSERT_EQ(json["traceEvents"].size(), 2u);
  EXPECT_EQ(json["traceEvents"][0]["name"], "inner");
  EXPECT_EQ(json["traceEvents"][0]["ts"], 5.0);
  EXPECT_EQ(json["traceEvents"][0]["dur"], 2.0);
  EXPECT_EQ(json["traceEvents"][1]["ts"], 0.0);
  EXPECT_EQ(json["otherData"]["complete"], false);

  recorder.start();
  for (int i = 0; i < 2; ++i) recorder.record("as many as there is room for", origin, origin);
  recorder.write(scratch / "trace.json");
  EXPECT_EQ(nlohmann::json::parse(read_text_file(scratch / "trace.json"))["otherData"]["complete"], true);
}

TEST(TraceScope, RecordsWhileRecording) {
  const data::TemporaryFolder scratch;
  TraceRecorder recorder;
  recorder.start();
  {
    const TraceScope outer(&recorder, "outer");
    const TraceScope inner(&recorder, "inner");
    const TraceScope nobody(nullptr, "nobody");
  }
  recorder.stop();
  { const TraceScope after(&recorder, "after"); }
  recorder.write(scratch / "trace.json");
  const auto json = nlohmann::json::parse(read_text_file(scratch / "trace.json"));
  const auto& events = json["traceEvents"];
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["name"], "inner");  // the inner scope ends first
  EXPECT_EQ(events[1]["ts"], 0.0);
  EXPECT_GE(events[1]["dur"].get<double>(), events[0]["dur"].get<double>());
  EXPECT_EQ(json["otherData"]["complete"], true);
  recorder.start();  // begins a new trace
  recorder.write(scratch / "trace.json");
  EXPECT_TRUE(nlohmann::json::parse(read_text_file(scratch / "trace.json"))["traceEvents"].empty());
}

TEST(TraceRecorder, EmptyTracesParse) {
  const data::TemporaryFolder scratch;
  TraceRecorder recorder;
  recorder.write(scratch / "trace.json");
  EXPECT_TRUE(nlohmann::json::parse(read_text_file(scratch / "trace.json"))["traceEvents"].empty());
}

}  // namespace
}  // namespace tessera
