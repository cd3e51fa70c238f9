#include "model/batch.h"

#include <algorithm>

#include "ops/loss/cross_entropy.h"

namespace tessera {

namespace {
std::vector<TokenRange> ranges_of(std::int64_t seq_len, const SequencePart& part) {
  if (part.size == 1) return {{0, seq_len}};
  TESSERA_CHECK(seq_len % (2 * part.size) == 0, "{} tokens in 2 x {} chunks", seq_len, part.size);
  const std::int64_t chunk = seq_len / (2 * part.size), tail = 2 * part.size - 1 - part.rank;
  return {{part.rank * chunk, (part.rank + 1) * chunk}, {tail * chunk, (tail + 1) * chunk}};
}
}  // namespace

Batch::Batch(const ModelConfig& config, std::int64_t num_seqs, std::int64_t seq_len, const SequencePart& part,
             Device target)
    : num_seqs_(num_seqs),
      seq_len_(seq_len),
      part_(part),
      ranges_(ranges_of(seq_len, part)),
      mask_documents_(config.attn_mask_type == AttentionMask::kBlockCausal),
      eos_id_(static_cast<std::int32_t>(config.eos_id)) {
  std::int64_t end = 0;
  // Each tensor begins at a multiple of the alignment.
  const auto take = [&end](std::int64_t size) {
    constexpr std::int64_t kUnit = kCudaAlignment / sizeof(std::int32_t);
    const Ids ids{.begin = end, .size = size};
    end += (size + kUnit - 1) / kUnit * kUnit;
    return ids;
  };
  for (Ids* ids : {&main_.inputs, &main_.labels, &positions_, &doc_starts_}) *ids = take(num_tokens());
  for (Ids* ids : {&part_of_key_, &key_of_part_}) *ids = take(num_seqs * seq_len);
  for (std::int64_t module = 0; module < config.num_mtp_modules; ++module) {
    const Ids inputs = take(num_tokens()), labels = take(num_tokens());
    mtp_.push_back({.inputs = inputs, .labels = labels});
  }
  ids_ = Mirrored<std::int32_t>(end, target);
  const std::span<std::int32_t> part_of_key = host(part_of_key_), key_of_part = host(key_of_part_);
  std::int32_t at = 0;
  for (SequencePart other = {.rank = 0, .size = part.size}; other.rank < part.size; ++other.rank) {
    const std::vector<TokenRange> ranges = ranges_of(seq_len, other);
    for (std::int64_t b = 0; b < num_seqs; ++b) {
      for (const TokenRange& range : ranges) {
        for (std::int64_t i = range.begin; i < range.end; ++i, ++at) {
          const std::int64_t key = b * seq_len + i;
          part_of_key[static_cast<std::size_t>(key)] = at;
          key_of_part[static_cast<std::size_t>(at)] = static_cast<std::int32_t>(key);
        }
      }
    }
  }
}

void Batch::fill(std::span<const std::int32_t> tokens, std::span<const std::int32_t> labels) {
  const auto length = static_cast<std::size_t>(seq_len_);
  TESSERA_CHECK(tokens.size() == static_cast<std::size_t>(num_seqs_) * (length + 1), "{} tokens", tokens.size());
  TESSERA_CHECK(labels.empty() || labels.size() == host(part_of_key_).size(), "{} labels", labels.size());
  num_valid_ = 0;
  const std::span<std::int32_t> inputs = host(main_.inputs), own_labels = host(main_.labels),
                                positions = host(positions_), doc_starts = host(doc_starts_);
  std::size_t at = 0;  // among this rank's tokens
  for (std::size_t b = 0; b < static_cast<std::size_t>(num_seqs_); ++b) {
    const std::span<const std::int32_t> row = tokens.subspan(b * (length + 1), length + 1);
    const auto label_at = [&](std::size_t i) { return labels.empty() ? row[i + 1] : labels[b * length + i]; };
    std::size_t doc_start = 0, next = 0;  // of position `next`
    const auto pass = [&] {
      if (mask_documents_ && row[next] == eos_id_) doc_start = next + 1;
      ++next;
    };
    for (const TokenRange& range : ranges_) {
      while (next < static_cast<std::size_t>(range.begin)) pass();
      for (; next < static_cast<std::size_t>(range.end); pass(), ++at) {
        const std::size_t i = next;
        inputs[at] = row[i];
        own_labels[at] = label_at(i);
        num_valid_ += own_labels[at] != kIgnoredLabel ? 1 : 0;
        doc_starts[at] = static_cast<std::int32_t>(doc_start);
        positions[at] = static_cast<std::int32_t>(i - doc_start);
        for (std::size_t module = 0; module < mtp_.size(); ++module) {
          const std::size_t depth = module + 1;
          host(mtp_[module].inputs)[at] = row[std::min(i + depth, length)];
          host(mtp_[module].labels)[at] = i + depth < length ? label_at(i + depth) : kIgnoredLabel;
        }
      }
    }
  }
}

void Batch::fill_tokens(std::span<const std::int32_t> tokens, std::span<const std::int32_t> positions) {
  const std::span<std::int32_t> inputs = host(main_.inputs), own_positions = host(positions_);
  TESSERA_CHECK(seq_len_ == 1 && tokens.size() == inputs.size() && positions.size() == inputs.size(),
                "{} tokens, {} positions", tokens.size(), positions.size());
  std::copy(tokens.begin(), tokens.end(), inputs.begin());
  std::copy(positions.begin(), positions.end(), own_positions.begin());
}

}  // namespace tessera
