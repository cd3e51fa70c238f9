// Tests that the files in configs/ are valid and that their models fit into memory as their headers say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "tests/app/process.h"

namespace tessera {
namespace {

using app_test::Process;
using ::testing::HasSubstr;
using ::testing::Not;

std::filesystem::path configs() { return std::filesystem::path(TESSERA_TEST_DATA).parent_path() / "configs"; }

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(configs())) found.push_back(entry.path().filename());
  std::sort(found.begin(), found.end());
  return found;
}

/// Returns the arguments of the `tessera plan memory` command in the file's header, with the file's full path. Its line
/// may be continued. Returns none if the header has no such command.
std::vector<std::string> plan_in_header(const std::string& name) {
  std::istringstream lines(read_text_file(configs() / name));
  for (std::string line; std::getline(lines, line) && line.starts_with('#');) {
    const std::size_t at = line.find("tessera plan memory configs/" + name);
    if (at == std::string::npos) continue;
    std::string command = line.substr(at);
    while (command.ends_with('\\') && std::getline(lines, line)) command.replace(command.size() - 1, 1, line.substr(1));
    std::istringstream words(command);
    std::vector<std::string> arguments;
    for (std::string word; words >> word;) arguments.push_back(word);
    std::replace(arguments.begin(), arguments.end(), "configs/" + name, (configs() / name).string());
    arguments.erase(arguments.begin());  // the program's name
    return arguments;
  }
  return {};
}

class Configs : public ::testing::TestWithParam<std::string> {
 protected:
  data::TemporaryFolder scratch_;
};

TEST_P(Configs, AreValidOnTheRanksThatTheirNameSays) {
  const std::string& name = GetParam();
  const auto printed = Process(scratch_, {"train", configs() / name, "--print-config"}).finish();
  EXPECT_EQ(printed.status, 0) << printed.output;
  EXPECT_THAT(printed.output, Not(HasSubstr("warning")));

  std::vector<std::string> arguments = plan_in_header(name);
  const bool has_plan = !arguments.empty();
  EXPECT_EQ(has_plan, name.find("gpu") != std::string::npos) << "a header says what the ranks have room for";
  if (!has_plan) arguments = {"plan", "memory", configs() / name, "--device=cpu"};
  if (has_plan) {
    const std::size_t dash = name.find('-') + 1;
    const std::string ranks = name.substr(dash, name.find("gpu") - dash);
    EXPECT_THAT(arguments, ::testing::IsSupersetOf({std::string("--ranks"), ranks}));
  }
  const auto planned = Process(scratch_, arguments).finish();
  EXPECT_EQ(planned.status, 0) << planned.output;
  if (has_plan) {
    EXPECT_THAT(planned.output, HasSubstr("\nfits "));
  }
}

INSTANTIATE_TEST_SUITE_P(Files, Configs, ::testing::ValuesIn(names()), [](const auto& file) {
  std::string name = file.param.substr(0, file.param.find('.'));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace tessera
