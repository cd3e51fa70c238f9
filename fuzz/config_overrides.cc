// Fuzzes overrides "--section.key=value", one on each line of the input.
#include "config/job_config.h"
#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> overrides;
  for (std::string_view text = fuzz::as_text({data, size}); !text.empty();) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    overrides.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  fuzz::read_hostile("", [&] {
    JobConfig config = parse_job_config("", overrides);
    static_cast<void>(config_table(config).to_toml());
    config.validate();
  });
  return 0;
}
