// Checks what tests/walks/transport.patch adds. The tests of all backends run on ring too, because it is in the table.
#include "tests/ep/dispatcher_test.cc"
#include "tests/expect_error.h"
#include "tests/walks/config_page.h"

namespace tessera {
namespace {

TEST(Ring, IsABackendThatTheTestsAboveRun) {
  const std::vector<DispatchBackend> tested = backends(4);
  EXPECT_EQ(std::ranges::count(tested, DispatchBackend{"ring"}), 1);
  std::string values;
  for (const auto& [name, backend] : dispatch_backends()) values += (values.empty() ? "" : " \\| ") + name;
  EXPECT_TRUE(values.ends_with(" \\| ring")) << values;
  expect_row_of_config_page("expert_parallel_comm_backend", values, "\"standard\"", dispatch_backends_help());
}

TEST(Ring, RefusesAGpu) {
  on_ranks(2, 0, [](ProcessGroup& group, ep::StepHook*) {
    DispatchOptions options = Case{}.options();
    options.device = Device::kCuda;
    expect_error([&] { make_dispatcher({"ring"}, group, options); }, {"ring", "expert_parallel_comm_backend", "CPU"});
  });
}

}  // namespace
}  // namespace tessera
