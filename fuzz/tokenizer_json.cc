// Fuzzes HfTokenizer with any bytes as tokenizer.json. A tokenizer that loads must give ids of its vocabulary, which
// decode.
#include "data/tokenizers/hf_tokenizer.h"
#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto path = fuzz::write_input("tokenizer.json", fuzz::as_text({data, size}));
  fuzz::read_hostile("tokenizer.json", [&] {
    const data::HfTokenizer tokenizer(path);
    for (const std::string_view text : {"", " a  b\r\n\tc", "it's 1234 \xC3\xA9\xE4\xBD\xA0!", " <s> x y</s>  x y a"}) {
      for (const auto& ids : {tokenizer.encode(text), tokenizer.encode_with_special(text)}) {
        for (const std::int32_t id : ids) {
          if (id < 0 || id >= tokenizer.vocab_size())
            fuzz::found(fmt::format("id {} of {}", id, tokenizer.vocab_size()));
        }
        const std::string decoded = tokenizer.decode(ids);
        fuzz::touch(std::as_bytes(std::span(decoded)));
      }
    }
    for (std::int32_t id = 0; id < std::min(tokenizer.vocab_size(), 64); ++id) {
      try {
        tokenizer.decode({&id, 1});
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a gap in the ids
      }
    }
  });
  return 0;
}
