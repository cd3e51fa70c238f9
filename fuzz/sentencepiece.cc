// Fuzzes SentencePieceTokenizer with any bytes as the model. Encodes texts with it and decodes every id.
#include "data/tokenizers/sentencepiece_tokenizer.h"
#include "target.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto path = fuzz::write_input("input.model", fuzz::as_text({data, size}));
  fuzz::read_hostile(path.native(), [&] {
    const data::SentencePieceTokenizer tokenizer(path);
    // The texts have all of ASCII; a full-width letter, a ligature, a decomposed accent and an ideographic space, which
    // charsmaps change; U+2581, by which the library writes spaces; runs, which long pieces match; and bytes that are
    // not UTF-8.
    std::string ascii;
    for (int c = 0; c < 128; ++c) ascii.push_back(static_cast<char>(c));
    for (const std::string& text :
         {ascii, std::string("  A\xEF\xBC\xA1 \xEF\xAC\x81 e\xCC\x81\xE3\x80\x80x \xE2\x96\x81 \xF0\x9F\x98\x80"),
          std::string(300, 'a') + std::string(300, ' '), std::string("\xFF\xE2\x96 \xC3")}) {
      for (const std::int32_t id : tokenizer.encode(text)) {
        if (id < 0 || id >= tokenizer.vocab_size()) fuzz::found(fmt::format("encode gives id {}", id));
      }
    }
    for (std::int32_t id = 0; id < tokenizer.vocab_size(); ++id) tokenizer.decode({&id, 1});
  });
  return 0;
}
