#include "data/tokenizers/sentencepiece_tokenizer.h"

#include <sentencepiece_processor.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/tokenizers/sentencepiece_model_check.h"
#include "system/stop.h"

namespace tessera::data {
namespace {

/// U+2581, which SentencePiece writes for a space. If it occurs in a text, decoding would turn it into a space.
constexpr std::string_view kBlock = "\xE2\x96\x81";

/// Texts are passed to the library in pieces of this size, because it takes some 150 times a piece's size of memory.
constexpr std::size_t kEncodeBytes = 1u << 16;

}  // namespace

SentencePieceTokenizer::SentencePieceTokenizer(const std::filesystem::path& path)
    : place_(fmt::format("tokenizer '{}'", path.string())),
      model_(read_text_file(path)),
      processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {
  require(!model_.empty(), "{}: expected a SentencePiece model, got an empty file", place_);
  check_sentencepiece_model(model_, place_);
  try {
    const auto status = processor_->LoadFromSerializedProto(model_);
    require(status.ok(), "{}: not a SentencePiece model: {}", place_, status.ToString());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // from the library's tries
    fail("{}: not a SentencePiece model: {}", place_, error.what());
  }
  vocab_size_ = processor_->GetPieceSize();
  bos_id_ = processor_->bos_id();
  eos_id_ = processor_->eos_id();
  require(bos_id_ >= 0 && eos_id_ >= 0,
          "{}: the model has BOS id {} and EOS id {}, but both are needed (bos_id and eos_id in training)", place_,
          bos_id_, eos_id_);
  std::vector<std::int32_t> letter;
  encode_piece("a", letter);
  adds_prefix_ = !letter.empty() && processor_->IdToPiece(letter.front()).starts_with(kBlock);
  // Some models drop spaces at a text's begin, or put one behind it.
  std::vector<std::int32_t> word, words;
  encode_piece(" a", word);
  encode_piece(" a a", words);
  word.insert(word.end(), word.begin(), word.end());
  needs_whole_text_ = adds_prefix_ || word != words;
  for (const char* piece : {"<0xE2>", "<0x96>", "<0x81>"}) {
    const int id = processor_->PieceToId(piece);
    if (processor_->IsByte(id)) block_ids_.push_back(id);
  }
  if (block_ids_.size() != kBlock.size()) block_ids_.clear();
  constexpr std::string_view kProbe = "a\n  b\xE2\x91\xA0";  // a line end, two spaces, and U+2460, which NFKC makes a 1
  if (const std::string back = decode(encode(kProbe)); back != kProbe) {
    spdlog::warn("{} changes texts: of {} it makes {}. A dataset then holds the changed text", place_,
                 quote_text(kProbe), quote_text(back));
  }
}

SentencePieceTokenizer::~SentencePieceTokenizer() = default;

void SentencePieceTokenizer::encode_piece(std::string_view text, std::vector<std::int32_t>& ids) const {
  if (text.empty()) return;
  std::vector<int> more;
  const auto status = processor_->Encode(text, &more);
  require(status.ok(), "{}: cannot encode a text of {} bytes: {}", place_, text.size(), status.ToString());
  ids.insert(ids.end(), more.begin(), more.end());
}

std::vector<std::int32_t> SentencePieceTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  if (needs_whole_text_) {
    encode_piece(text, ids);
    return ids;
  }
  while (!text.empty()) {
    throw_if_stopped();  // a document may be a whole library
    std::size_t size = first_piece_size(text, kEncodeBytes);
    const std::size_t block = block_ids_.empty() ? std::string_view::npos : text.substr(0, size).find(kBlock);
    if (block != std::string_view::npos) size = block;
    encode_piece(text.substr(0, size), ids);
    if (block != std::string_view::npos) {
      ids.insert(ids.end(), block_ids_.begin(), block_ids_.end());
      size += kBlock.size();
    }
    text.remove_prefix(size);
  }
  return ids;
}

// It does not call the library's Decode, which turns a byte piece that is not a whole character yet into U+FFFD.
std::string SentencePieceTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) {
    require(id >= 0 && id < vocab_size_, "{}: token id {} is outside the vocabulary [0, {})", place_, id, vocab_size_);
    if (processor_->IsControl(id)) continue;
    const std::string& piece = processor_->IdToPiece(id);
    if (processor_->IsByte(id)) {                                  // "<0xE2>"
      TESSERA_CHECK(piece.size() == 6, "byte piece '{}'", piece);  // the library has checked it
      text.push_back(static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16)));
    } else if (processor_->IsUnknown(id)) {
      text.append("\xEF\xBF\xBD");
    } else {
      for (std::size_t at = 0; at < piece.size();) {
        const bool is_block = piece.compare(at, kBlock.size(), kBlock) == 0;
        text.push_back(is_block ? ' ' : piece[at]);
        at += is_block ? kBlock.size() : 1;
      }
    }
  }
  if (adds_prefix_ && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

}  // namespace tessera::data
