// Fuzzes SafetensorsFile with any bytes.
#include "checkpoint/safetensors.h"

#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto path = fuzz::write_input("input.safetensors", fuzz::as_text({data, size}));
  fuzz::read_hostile(path.native(), [&] {
    const SafetensorsFile file(path);
    for (const auto& [name, entry] : file.entries()) {
      fuzz::touch(entry.bytes);
      std::int64_t element = 0;
      if (entry.shape.size() > Shape::kMaxDims) continue;
      if (entry.dtype == "F32" || entry.dtype == "I32") element = 4;
      if (entry.dtype == "BF16") element = 2;
      if (element == 0) continue;
      std::vector<std::byte> copy(entry.bytes.size());
      const auto count = static_cast<std::int64_t>(entry.bytes.size()) / element;
      // Most entries do not have this shape. So the result is a refusal, or a copy of the whole entry.
      const DType dtype = entry.dtype == "F32"   ? DType::kFloat32
                          : entry.dtype == "I32" ? DType::kInt32
                                                 : DType::kBFloat16;
      file.read(name, Tensor(copy.data(), {count}, dtype, Device::kCpu));
    }
  });
  return 0;
}
