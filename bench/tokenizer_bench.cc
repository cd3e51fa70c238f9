// Measures the speed of a tokenizer on one thread: bench_tokenizer TOKENIZER INPUT [PASSES]
// Encodes all documents of INPUT, PASSES times. Prints one line of JSON with the best pass, and with the number and a
// checksum of the ids.
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "base/error.h"
#include "base/stopwatch.h"
#include "data/document_source.h"
#include "data/load_tokenizer.h"
#include "data/tokenizers/tokenizer.h"

namespace {

int run(int argc, char** argv) {
  tessera::require(argc == 3 || argc == 4, "usage: bench_tokenizer TOKENIZER INPUT [PASSES]");
  const auto tokenizer = tessera::data::load_tokenizer(argv[1]);
  tessera::data::DocumentSource source({argv[2]});
  std::vector<std::string> documents;
  for (std::string text; source.next(text);) documents.push_back(std::move(text));
  const int num_passes = argc == 4 ? std::max(1, static_cast<int>(std::strtol(argv[3], nullptr, 10))) : 1;

  double seconds = std::numeric_limits<double>::infinity();
  std::vector<std::vector<std::int32_t>> ids(documents.size());
  for (int pass = 0; pass < num_passes; ++pass) {
    const tessera::Stopwatch watch;
    for (std::size_t i = 0; i < documents.size(); ++i) ids[i] = tokenizer->encode(documents[i]);
    seconds = std::min(seconds, watch.seconds());
  }
  std::size_t num_tokens = 0;
  uLong crc = crc32(0, nullptr, 0);
  for (const std::vector<std::int32_t>& document : ids) {
    num_tokens += document.size();
    if (document.empty()) continue;  // its address may be null, which would make zlib start again
    crc = crc32(crc, reinterpret_cast<const Bytef*>(document.data()), static_cast<uInt>(document.size() * 4));
  }
  fmt::print("{{\"bytes\": {}, \"seconds\": {}, \"tokens\": {}, \"crc32\": {}}}\n", source.statistics().num_text_bytes,
             seconds, num_tokens, crc);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_tokenizer: {}\n", error.what());
    return 2;
  }
}
