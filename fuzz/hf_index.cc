// Fuzzes HfWeights with any bytes as model.safetensors.index.json, beside a small shard.
#include "checkpoint/huggingface.h"
#include "target.h"

using namespace tessera;

namespace {

/// Writes the shard that the seeds name: two tensors, one of them with a block factor.
void write_shard() {
  const SafetensorsSpec specs[] = {{"a", "BF16", {3}}, {"b", "F8_E4M3", {2, 2}}, {"b_scale_inv", "F32", {1, 1}}};
  SafetensorsWriter writer(fuzz::input_folder() / "model-00001-of-00001.safetensors", specs, {});
  const std::byte numbers[6 + 4 + 4] = {};
  writer.append(numbers);
  writer.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool written = (write_shard(), true);
  static_cast<void>(written);
  fuzz::write_input("model.safetensors.index.json", fuzz::as_text({data, size}));
  fuzz::read_hostile(fuzz::input_folder().string(), [&] {
    const HfWeights weights(fuzz::input_folder());
    for (const auto& [name, shape] : {std::pair{"a", std::vector<std::int64_t>{3}}, {"b", {2, 2}}}) {
      weights.read({name, shape}, [](std::span<const float> numbers) { fuzz::touch(std::as_bytes(numbers)); });
    }
  });
  return 0;
}
