#include "model/batch.h"

#include <algorithm>

#include "ops/cross_entropy.h"

namespace tessera {

Batch::Batch(const ModelConfig& config, std::int64_t num_seqs, std::int64_t seq_len)
    : num_seqs_(num_seqs),
      seq_len_(seq_len),
      mask_documents_(config.attn_mask_type == AttentionMask::kBlockCausal),
      eos_id_(static_cast<std::int32_t>(config.eos_id)) {
  const auto count = static_cast<std::size_t>(num_tokens());
  for (auto* ids : {&inputs_, &labels_, &positions_, &doc_starts_}) ids->resize(count);
  mtp_inputs_.assign(static_cast<std::size_t>(config.num_mtp_modules), inputs_);
  mtp_labels_.assign(static_cast<std::size_t>(config.num_mtp_modules), inputs_);
}

void Batch::fill(std::span<const std::int32_t> tokens, std::span<const std::int32_t> labels) {
  const auto length = static_cast<std::size_t>(seq_len_);
  TESSERA_CHECK(tokens.size() == static_cast<std::size_t>(num_seqs_) * (length + 1), "{} tokens", tokens.size());
  TESSERA_CHECK(labels.empty() || labels.size() == inputs_.size(), "{} labels", labels.size());
  num_valid_ = 0;
  for (std::size_t b = 0; b < static_cast<std::size_t>(num_seqs_); ++b) {
    const std::span<const std::int32_t> row = tokens.subspan(b * (length + 1), length + 1);
    const std::size_t first = b * length;
    std::size_t doc_start = 0;
    for (std::size_t i = 0; i < length; ++i) {
      inputs_[first + i] = row[i];
      labels_[first + i] = labels.empty() ? row[i + 1] : labels[first + i];
      num_valid_ += labels_[first + i] != kIgnoredLabel ? 1 : 0;
      doc_starts_[first + i] = static_cast<std::int32_t>(doc_start);
      positions_[first + i] = static_cast<std::int32_t>(i - doc_start);
      if (mask_documents_ && row[i] == eos_id_) doc_start = i + 1;
    }
    for (std::size_t module = 0; module < mtp_inputs_.size(); ++module) {
      const std::size_t depth = module + 1;
      for (std::size_t i = 0; i < length; ++i) {
        mtp_inputs_[module][first + i] = row[std::min(i + depth, length)];
        mtp_labels_[module][first + i] = i + depth < length ? labels_[first + i + depth] : kIgnoredLabel;
      }
    }
  }
}

void Batch::fill_tokens(std::span<const std::int32_t> tokens, std::span<const std::int32_t> positions) {
  TESSERA_CHECK(seq_len_ == 1 && tokens.size() == inputs_.size() && positions.size() == inputs_.size(),
                "{} tokens, {} positions", tokens.size(), positions.size());
  std::copy(tokens.begin(), tokens.end(), inputs_.begin());
  std::copy(positions.begin(), positions.end(), positions_.begin());
}

Tensor Batch::view(const std::vector<std::int32_t>& ids, Device device) const {
  void* data = device == Device::kMeta ? nullptr : const_cast<std::int32_t*>(ids.data());
  return Tensor(data, {static_cast<std::int64_t>(ids.size())}, DType::kInt32, device);
}

}  // namespace tessera
