// Fuzzes parse_hf_config with any bytes as config.json. An accepted file makes a model that prints and reads back to
// the same.
#include "run/state/hf_config.h"

#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::read_hostile("config.json", [&] {
    const HfConfig config = parse_hf_config(fuzz::as_text({data, size}), "config.json");
    std::string printed;
    try {
      printed = hf_config_json(config, DType::kBFloat16);
    } catch (const Error&) {
      return;  // the class of this form cannot compute it, as hf_obstacles says
    }
    if (hf_config_json(parse_hf_config(printed, "config.json"), DType::kBFloat16) != printed) {
      fuzz::found("reads back to something else:\n" + printed);
    }
  });
  return 0;
}
