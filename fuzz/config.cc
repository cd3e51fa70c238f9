// Fuzzes parse_job_config with any bytes as TOML. A configuration that parses must print as TOML that reads back to the
// same.
#include "config/job_config.h"
#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::read_hostile("", [&] {
    JobConfig config = parse_job_config(fuzz::as_text({data, size}));
    const std::string printed = config_table(config).to_toml();
    try {
      JobConfig again = parse_job_config(printed);
      if (config_table(again).to_toml() != printed) fuzz::found("reads back to something else:\n" + printed);
    } catch (const Error& error) {
      fuzz::found(fmt::format("does not read back: {}\n{}", error.what(), printed));
    }
    config.validate();
  });
  return 0;
}
