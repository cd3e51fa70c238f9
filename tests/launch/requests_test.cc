#include "launch/requests.h"

#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "base/stopwatch.h"
#include "base/unix_time.h"
#include "launch/launch_files.h"
#include "launch/launch_state.h"
#include "tests/data/support.h"
#include "tests/expect_error.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;

class RequestsTest : public ::testing::Test {
 protected:
  RequestsTest() {
    leave_state([](LaunchState&) {});
  }

  /// Writes the launch.json of a launcher, as if it had written it just now.
  void leave_state(const std::function<void(LaunchState&)>& change) const {
    LaunchState state;
    state.state = "training";
    state.host = "head";
    state.pid = 7;
    state.time = unix_time();
    for (const auto& [name, role] :
         {std::pair("n1", "active"), {"n2.site", "drained"}, {"n3", "drained"}, {"n4", "lost"}}) {
      state.nodes.push_back({name, role, 0.0});
    }
    change(state);
    data::write_file(scratch_ / kLaunchStateName, to_json(state).dump());
  }
  std::filesystem::path requests() const { return scratch_ / kRequestsFolderName; }

  data::TemporaryFolder scratch_;
};

TEST_F(RequestsTest, ALauncherTakesEachRequestOnce) {
  RequestInbox inbox(scratch_.path());
  const Stopwatch watch;
  while (!std::filesystem::exists(requests()) && watch.seconds() < 10.0) std::this_thread::yield();
  data::write_file(requests() / "n9.undrain.tmp", "");  // a request that is still being made
  request_undrain(scratch_.path(), {"n2.site", "n3"}, 10.0);
  std::vector<std::string> taken;
  while (taken.size() < 2 && watch.seconds() < 20.0) {
    for (const std::string& name : inbox.take_undrained()) taken.push_back(name);
  }
  EXPECT_THAT(taken, ::testing::UnorderedElementsAre("n2.site", "n3"));
  EXPECT_THAT(inbox.take_undrained(), IsEmpty());
}

TEST_F(RequestsTest, WhatCannotBeReturnedIsNotAskedFor) {
  std::filesystem::create_directories(requests());
  const auto refused = [&](const std::vector<std::string>& nodes, const std::vector<std::string>& parts) {
    expect_error([&] { request_undrain(scratch_.path(), nodes, 30.0); }, parts);
    EXPECT_TRUE(std::filesystem::is_empty(requests()));
  };
  refused({"n3", "n9"}, {"no node 'n9'", "n1, n2.site, n3, n4"});
  refused({"n3", "n1"}, {"n1 is not drained but active"});
  refused({"n4"}, {"n4 is not drained but lost", "by itself"});
  leave_state([](LaunchState& state) { state.state = "stopped"; });
  refused({"n3"}, {"the launcher on head (process 7) has ended"});
  leave_state([](LaunchState& state) { state.time -= 40.0; });
  refused({"n3"}, {"the launcher on head (process 7) has been silent for 40 s"});
  std::filesystem::remove(scratch_ / kLaunchStateName);
  refused({"n3"}, {"has no launch.json", "job.dump_folder"});
}

TEST_F(RequestsTest, ALauncherThatDoesNotAnswerIsAnError) {
  std::filesystem::create_directories(requests());
  expect_error([&] { request_undrain(scratch_.path(), {"n3"}, 0.3); }, {"has not taken", "n3.undrain", "0.3 s"});
  EXPECT_TRUE(std::filesystem::is_empty(requests()));
}

TEST_F(RequestsTest, AFolderThatCannotBeReadIsNoRequest) {
  data::write_file(requests(), "no folder");
  RequestInbox inbox(scratch_.path());
  EXPECT_THAT(inbox.take_undrained(), IsEmpty());
}

}  // namespace
}  // namespace tessera
