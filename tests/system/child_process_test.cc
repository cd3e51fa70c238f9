#include "system/child_process.h"

#include <cstdlib>

#include "tests/data/support.h"

namespace tessera {
namespace {

TEST(ChildProcess, AVariableReplacesTheInheritedOneOfItsName) {
  const data::TemporaryFolder scratch;
  setenv("TESSERA_TEST", "inherited", 1);
  setenv("TESSERA_TEST_2", "inherited", 1);
  const pid_t process = spawn("env", {}, {.log = scratch / "log", .variables = {"TESSERA_TEST=added"}});
  unsetenv("TESSERA_TEST");
  unsetenv("TESSERA_TEST_2");
  const StopRequest none;
  ASSERT_EQ(wait_for(process, none), 0);
  const std::string log = "\n" + read_text_file(scratch / "log");
  EXPECT_NE(log.find("\nTESSERA_TEST=added\n"), std::string::npos) << log;
  EXPECT_EQ(log.find("\nTESSERA_TEST=inherited\n"), std::string::npos) << log;
  EXPECT_NE(log.find("\nTESSERA_TEST_2=inherited\n"), std::string::npos) << log;
}

}  // namespace
}  // namespace tessera
