#include "launch/launch_state.h"

#include <gmock/gmock.h>

#include <map>

#include "launch/incident.h"
#include "launch/launch_files.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(LaunchState, IsReadAsItWasWritten) {
  const data::TemporaryFolder scratch;
  EXPECT_FALSE(read_launch_state(scratch.path()));
  const LaunchState written{
      .run_id = "r",
      .attempt = 3,
      .state = "training",
      .host = "head",
      .engine = "slurm",
      .endpoint = "tcp://head:1",
      .job = LaunchState::Job{.id = "4711", .restarts = 2},
      .pid = 7,
      .time = 110.0,
      .begin = 10.0,
      .step = 5,
      .num_steps = 9,
      .step_seconds = 0.5,
      .nodes = {{"n1", "active", 0.25}},
      .wanted_spares = 2,
      .incidents = 2,
      .seconds_lost = 25.0,
      .load_step = LaunchBegin{.load_step = 15, .left_behind = {{20, 7}, {25, ~0ull}}, .has_trained = true}};
  data::write_file(scratch / kLaunchStateName, to_json(written).dump());
  const auto read = read_launch_state(scratch.path());
  ASSERT_TRUE(read);
  EXPECT_EQ(to_json(*read), to_json(written));
  EXPECT_EQ(read->job, written.job);
  EXPECT_EQ(read->load_step, written.load_step);
  EXPECT_DOUBLE_EQ(read->effective_training_time(), 0.75);
  EXPECT_FALSE(read->has_ended());
  data::write_file(scratch / kLaunchStateName, "{\"format\": \"other\", \"version\": 1}");
  expect_error([&] { read_launch_state(scratch.path()); }, {"expected format 'tessera-launch'"});
}

TEST(LaunchState, TheLossOfALauncherIsNotedForTheNextOne) {
  const data::TemporaryFolder scratch;
  const LaunchState lost{.run_id = "r", .job = LaunchState::Job{.id = "4711", .restarts = 2}};
  EXPECT_FALSE(read_launcher_loss(scratch.path(), lost));
  write_launcher_loss(scratch.path(), lost, 110.5);
  EXPECT_EQ(read_launcher_loss(scratch.path(), lost), 110.5);
  LaunchState later = lost;
  ++later.job->restarts;
  EXPECT_FALSE(read_launcher_loss(scratch.path(), later));
  later.job.reset();
  EXPECT_FALSE(read_launcher_loss(scratch.path(), later));
}

TEST(Incident, SaysWhatWasLostOnceTheRunGoesOn) {
  Incident incident{.number = 2,
                    .noticed_at = 100.0,
                    .attempt = 1,
                    .failure = {.kind = FailureKind::kNodeLost,
                                .node = "n2",
                                .sure = Certainty::kCertain,
                                .step = 24,
                                .evidence = {"n2 is silent"}},
                    .decision = {.action = Action::kReplace, .reason = "n2 is lost"},
                    .spare = "n4",
                    .last_step = 24};
  EXPECT_TRUE(to_json(incident)["resumed_step"].is_null());
  incident.resumed_step = 20;
  incident.seconds_lost = 8.5;
  const auto json = to_json(incident);
  EXPECT_EQ(json["steps_lost"], 3);  // 21 to 23: step 24 was not done yet
  EXPECT_EQ(json["blamed"]["node"], "n2");
  EXPECT_TRUE(json["blamed"]["rank"].is_null());
  EXPECT_THAT(describe(incident), HasSubstr("(n4 for n2), since n2 is lost. The run went on from step 20"));
}

TEST(LaunchState, MeanTimesArePerIncident) {
  LaunchState state;
  state.begin = 1000.0;
  state.time = 1600.0;
  state.incidents = 3;
  state.seconds_lost = 60.0;
  std::map<std::string, double> values;
  for (const Measurement& one : measurements_of(state, {})) values[one.name] = one.value;
  EXPECT_EQ(values.at("mtbf_seconds"), 200.0);
  EXPECT_EQ(values.at("mttr_seconds"), 20.0);
}

TEST(LaunchState, MeasurementsAreThoseOfTheState) {
  LaunchState state{.run_id = "r", .attempt = 3, .state = "training", .time = 1600.0, .begin = 1000.0, .step = 7};
  state.wanted_spares = 2;
  state.seconds_lost = 60.0;
  state.nodes = {{"n1", "active", 0.0}, {"n2", "active", 0.0}, {"n3", "spare", 0.0}, {"n4", "drained", 0.0}};
  const auto values_of = [&] {
    std::map<std::string, double> values;
    for (const Measurement& one : measurements_of(state, {{"node lost", 2}})) {
      std::string name = one.name;
      for (const auto& [label, text] : one.labels) name += " " + text;
      values[name] = one.value;
    }
    return values;
  };
  std::map<std::string, double> values = values_of();
  EXPECT_EQ(values.at("incidents_total node lost"), 2.0);
  EXPECT_EQ(values.at("incidents_total rank died"), 0.0);
  std::erase_if(values, [](const auto& item) { return item.first.starts_with("incidents_total"); });
  EXPECT_EQ(values, (std::map<std::string, double>{{"attempt", 3.0},
                                                   {"is_training", 1.0},
                                                   {"step", 7.0},
                                                   {"wanted_spares", 2.0},
                                                   {"lost_seconds_total", 60.0},
                                                   {"effective_training_time_ratio", 0.9},
                                                   {"time_seconds", 1600.0},
                                                   {"nodes active", 2.0},
                                                   {"nodes spare", 1.0},
                                                   {"nodes lost", 0.0},
                                                   {"nodes drained", 1.0}}));
  state.state = "recovering";
  EXPECT_EQ(values_of().at("is_training"), 0.0);
}

}  // namespace
}  // namespace tessera
