#include "app/cli/config_arguments.h"

#include "base/error.h"

namespace tessera {

ConfigArguments::ConfigArguments(CLI::App* command) : command_(command) {
  command->add_option(std::string("CONFIG,--config,") + kConfigOption, file_,
                      "TOML file; without one, all keys have their defaults");
  command->add_option("--device,--training.device", device_, "What to compute on: auto, cpu or cuda")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command->allow_extras();
}

JobConfig ConfigArguments::read() const {
  std::vector<std::string> overrides = command_->remaining();
  for (const std::string& argument : overrides) {
    require(argument.starts_with("--"), "unexpected argument '{}'; expected --section.key=value", argument);
  }
  if (!device_.empty()) overrides.push_back("--training.device=" + device_);
  return file_.empty() ? parse_job_config("", overrides) : load_job_config(file_, overrides);
}

}  // namespace tessera
