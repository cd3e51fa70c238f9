// Fuzzes read_verdict, read_active_check and find_peer_rates with any bytes as the files of health daemons and active
// checks.
#include "health/verdict.h"

#include "health/peer_rates.h"
#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::as_text({data, size});
  for (const char* name : {"verdict.json", "active_check.json", "n2.rates.json", "n3.rates.json"}) {
    fuzz::write_input(name, text);
  }
  fuzz::read_hostile(fuzz::input_folder().native(), [] {
    if (const auto verdict = read_verdict(fuzz::input_folder())) static_cast<void>(to_json(*verdict).dump());
  });
  fuzz::read_hostile(fuzz::input_folder().native(), [] { static_cast<void>(read_active_check(fuzz::input_folder())); });
  static_cast<void>(find_peer_rates(fuzz::input_folder(), "n1", "H100"));  // damaged files do not count
  return 0;
}
