// Fuzzes read_manifest with any bytes as dataset.json: once unchanged, and once with the right checksum of the content.
// Then the shards and the tokenizer that it names are opened.
#include "data/dataset.h"

#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::filesystem::path& folder = fuzz::input_folder();
  const std::string text(fuzz::as_text({data, size}));
  for (const std::string& content : {text, fuzz::with_checksum(text)}) {
    fuzz::write_input(std::string(data::kManifestName), content);
    fuzz::read_hostile(folder.native(), [&] {
      const data::Manifest manifest = data::read_manifest(folder);
      for (const auto& split : manifest.splits) {
        data::split_checksum(manifest, split.first);
        fuzz::read_hostile(folder.native(), [&] { data::open_split(folder, manifest, split.first); });
      }
      data::load_dataset_tokenizer(folder, manifest);
    });
  }
  return 0;
}
