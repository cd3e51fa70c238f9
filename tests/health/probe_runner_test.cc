#include "health/probe_runner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>

#include "base/stopwatch.h"

namespace tessera {
namespace {

class Made : public Probe {
 public:
  explicit Made(std::function<void()> work) : work_(std::move(work)) {}
  std::string_view name() const override { return "made"; }
  ProbeResult look(double) override {
    work_();
    return {.findings = {{.signal = has_forgotten_ ? "forgot" : "seen"}}};
  }
  void forget() override { has_forgotten_ = true; }

 private:
  std::function<void()> work_;
  bool has_forgotten_ = false;
};

std::vector<std::unique_ptr<Probe>> probes(std::vector<std::function<void()>> works) {
  std::vector<std::unique_ptr<Probe>> made;
  for (auto& work : works) made.push_back(std::make_unique<Made>(std::move(work)));
  return made;
}

TEST(ProbeRunner, FailuresOfAProbeAreToldAndFindNothing) {
  // NOLINTNEXTLINE(bugprone-std-exception-baseclass): libraries may throw anything
  const auto throw_a_number = [] { throw 7; };
  ProbeRunner runner(probes({[] {}, [] { throw std::runtime_error("no such file"); }, throw_a_number}), 2.0);
  const std::vector<ProbeRunner::Outcome> outcomes = runner.look(0.0);
  ASSERT_EQ(outcomes.size(), 3u);
  EXPECT_EQ(outcomes[0].failure, "");
  EXPECT_EQ(outcomes[0].result.findings.size(), 1u);
  EXPECT_EQ(outcomes[1].failure, "no such file");
  EXPECT_EQ(outcomes[2].failure, "an unknown error");
  EXPECT_TRUE(outcomes[1].result.findings.empty());
}

TEST(ProbeRunner, AProbeThatHangsDelaysNobodyAndIsTriedAgainLater) {
  static std::atomic<bool> released = false;  // a probe's thread may outlive the test
  released = false;
  ProbeRunner runner(probes({[] {}, [] { released.wait(false); }}), 0.2);
  const Stopwatch watch;
  for (int i = 0; i < 3; ++i) {
    const std::vector<ProbeRunner::Outcome> outcomes = runner.look(i);
    EXPECT_EQ(outcomes[0].failure, "");
    EXPECT_NE(outcomes[1].failure.find("has not ended"), std::string::npos);
  }
  EXPECT_LT(watch.seconds(), 3.0);
  released = true;
  released.notify_all();
  for (int i = 0; i < 100; ++i) {
    if (runner.look(3.0)[1].failure.empty()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  FAIL() << "it was not asked again";
}

TEST(ProbeRunner, AProbeForgetsBeforeItLooks) {
  ProbeRunner runner(probes({[] {}}), 2.0);
  EXPECT_EQ(runner.look(0.0)[0].result.findings[0].signal, "seen");
  EXPECT_EQ(runner.look(1.0, true)[0].result.findings[0].signal, "forgot");
}

TEST(ProbeRunner, EndsWhileAProbeHangs) {
  static std::atomic<bool> never = false;
  const Stopwatch watch;
  {
    ProbeRunner runner(probes({[] { never.wait(false); }}), 0.05);
    EXPECT_FALSE(runner.look(0.0)[0].failure.empty());
  }
  EXPECT_LT(watch.seconds(), 3.0);
}

}  // namespace
}  // namespace tessera
