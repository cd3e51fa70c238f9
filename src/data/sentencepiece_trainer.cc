#include "data/sentencepiece_trainer.h"

#include <sentencepiece_trainer.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "system/progress_bar.h"
#include "tensor/philox.h"

namespace tessera::data {
namespace {

constexpr std::size_t kPieceBytes = 4096;

/// Draws a sample of a stream of unknown length. Every piece draws a random key, and the pieces with the smallest keys
/// stay.
class Sample {
 public:
  Sample(std::uint64_t max_bytes, std::uint64_t seed)
      : max_bytes_(max_bytes), random_(seed, stream_of("data.tokenizer.sample")) {}

  void add(std::string_view piece) {
    const auto words = random_.words(num_seen_);
    const Key key{static_cast<std::uint64_t>(words[0]) << 32 | words[1], num_seen_};
    ++num_seen_;
    if (key > largest_) return;
    pieces_.emplace(key, piece);
    num_bytes_ += piece.size();
    while (num_bytes_ > max_bytes_ && pieces_.size() > 1) {
      const auto last = std::prev(pieces_.end());
      largest_ = last->first;  // from now on, larger keys may not use the room that a long piece leaves
      num_bytes_ -= last->second.size();
      pieces_.erase(last);
    }
  }

  std::vector<std::string> take() {
    std::map<std::uint64_t, std::string> ordered;
    for (auto& [key, piece] : pieces_) ordered.emplace(key.second, std::move(piece));
    std::vector<std::string> result;
    for (auto& [index, piece] : ordered) result.push_back(std::move(piece));
    return result;
  }

 private:
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // random number, position in the stream
  std::uint64_t max_bytes_;
  Philox random_;
  std::uint64_t num_seen_ = 0;
  std::uint64_t num_bytes_ = 0;
  Key largest_{~std::uint64_t{0}, ~std::uint64_t{0}};
  std::map<Key, std::string> pieces_;
};

class Sentences final : public sentencepiece::SentenceIterator {
 public:
  explicit Sentences(const std::vector<std::string>& sentences) : sentences_(sentences) {}
  bool done() const override { return at_ == sentences_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return sentences_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& sentences_;
  std::size_t at_ = 0;
};

/// Returns the text without U+2585. The library uses that character itself, and leaves out sentences that have it.
std::string without_reserved(std::string_view text) {
  constexpr std::string_view kReserved = "\u2585";
  std::string result(text);
  for (std::size_t at = 0; (at = result.find(kReserved, at)) != std::string::npos;) result.erase(at, kReserved.size());
  return result;
}

/// Throws Error with the library's reason. If the text is too short, the message is in our own words.
[[noreturn]] void fail_training(const std::string& reason, const SentencePieceOptions& options,
                                std::uint64_t sample_bytes, std::uint64_t text_bytes) {
  constexpr std::string_view kLimit = "Please set it to a value <= ";
  const std::string what = fmt::format("cannot train a tokenizer of {} pieces on {} bytes of the text's {}",
                                       options.vocab_size, sample_bytes, text_bytes);
  const std::size_t at = reason.find(kLimit);
  if (at != std::string::npos) {
    fail("{}, which give {} at most: ask for a smaller vocabulary (--vocab-size), or {}", what,
         std::strtoll(reason.c_str() + at + kLimit.size(), nullptr, 10),
         sample_bytes < text_bytes ? "for a larger sample (--sample-bytes)" : "give more text");
  }
  fail("{}: {}", what, reason);
}

}  // namespace

std::string train_sentencepiece(DocumentSource& source, const SentencePieceOptions& options) {
  constexpr int kNumFixedPieces = 3 + 256;
  require(options.vocab_size > kNumFixedPieces, "vocabulary size {}: expected more than {} (control and byte pieces)",
          options.vocab_size, kNumFixedPieces);
  require(options.sample_bytes > 0, "sample size 0: expected at least 1 byte");
  Sample sample(options.sample_bytes, options.seed);
  ProgressBar progress("reading", source.num_bytes_total(), "B");
  std::string text;
  while (source.next(text)) {
    progress.set(source.num_bytes_done());
    for (std::string_view rest = text; !rest.empty();) {
      const std::size_t size = first_piece_size(rest, kPieceBytes);
      sample.add(without_reserved(rest.substr(0, size)));
      rest.remove_prefix(size);
    }
  }
  progress.clear();
  require(source.statistics().num_documents > 0, "cannot train a tokenizer: the inputs have no text");

  const std::unordered_map<std::string, std::string> arguments = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocab_size)},
      {"byte_fallback", "true"},
      // Rarer characters are encoded as byte pieces. The space is a piece in any text: U+2581 stands for it, and its
      // bytes would come back as that character.
      {"character_coverage", "0.9995"},
      {"required_chars", "\u2581"},
      {"unk_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"pad_id", "-1"},
      // Nothing of the text may be lost.
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"split_digits", "true"},
      {"max_sentence_length", std::to_string(2 * kPieceBytes)},
      // The order in which threads finish must not affect the result.
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  std::vector<std::string> sentences = sample.take();
  std::uint64_t num_bytes = 0;
  for (const std::string& sentence : sentences) num_bytes += sentence.size();
  const auto has_space = [](const std::string& sentence) { return sentence.find(' ') != sentence.npos; };
  // The library needs each of required_chars in the text.
  if (std::ranges::none_of(sentences, has_space)) sentences.emplace_back(" ");
  spdlog::info("learning {} pieces from {} of text", options.vocab_size,
               format_quantity(static_cast<double>(num_bytes), "B"));
  Sentences iterator(sentences);
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(arguments, &iterator, &model);
  if (!status.ok()) fail_training(status.ToString(), options, num_bytes, source.statistics().num_text_bytes);
  return model;
}

}  // namespace tessera::data
