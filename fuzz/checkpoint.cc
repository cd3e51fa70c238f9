// Fuzzes verify_checkpoint with any bytes as manifest.json of a checkpoint: once unchanged, and once with the right
// checksum of the content. The folder also has model.safetensors, of kModelBytes, so that a manifest can be right.
#include "checkpoint/checkpoint.h"

#include "target.h"

using namespace tessera;

namespace {
constexpr std::string_view kModelBytes("\x02\0\0\0\0\0\0\0{}", 10);  // it has no tensors
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto model = fuzz::write_input("model.safetensors", kModelBytes);
  const std::string text(fuzz::as_text({data, size}));
  for (const std::string& content : {text, fuzz::with_checksum(text)}) {
    fuzz::write_input("manifest.json", content);
    fuzz::read_hostile(fuzz::input_folder().native(),
                       [&] { static_cast<void>(verify_checkpoint(fuzz::input_folder()).state.dump()); });
  }
  return 0;
}
