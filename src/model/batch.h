// A micro-batch as the model takes it: token ids, labels, and what document masking makes of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/config.h"
#include "ops/attention/mla_attention.h"
#include "tensor/mirrored.h"

namespace tessera {

/// What a rank has of a sequence of S tokens that is cut among the `size` ranks of context parallelism: of 2 · size
/// equal chunks the `rank`-th from the front and the `rank`-th from the back, so that all ranks have as many keys to
/// look at.
struct SequencePart {
  std::int64_t rank = 0, size = 1;
};

/// Owns the index tensors of a micro-batch of B sequences of S tokens, of which this rank has T = B · S / size; `fill`
/// allocates nothing.
///
/// Of a row of S + 1 tokens t[0..S], t[0..S-1] are inputs and t[1..S] labels. MTP module k (from 0, the paper's depth
/// d = k + 1) reads t[min(i + d, S)] at position i and predicts t[i + d + 1], where there is one.
class Batch {
 public:
  Batch(const ModelConfig& config, std::int64_t num_seqs, std::int64_t seq_len, const SequencePart& part = {},
        Device target = Device::kCpu);

  /// tokens: [B, S + 1], ids in [0, vocab_size), of the whole sequences. labels: [B, S], kIgnoredLabel where a position
  /// does not count; empty: the next tokens.
  void fill(std::span<const std::int32_t> tokens, std::span<const std::int32_t> labels = {});

  /// For decoding, where a sequence of this batch is one token that continues an earlier text: sets the tokens and
  /// their positions in it. seq_len must be 1.
  void fill_tokens(std::span<const std::int32_t> tokens, std::span<const std::int32_t> positions);

  /// Puts what was filled in on its way to the GPU, where the batch is for one. Until it is there, which is before what
  /// follows on the stream, nothing may be filled in.
  void upload(const cuda::Stream& stream) const { ids_.upload(stream); }

  std::int64_t num_seqs() const { return num_seqs_; }
  /// Bytes of the batch's tensors on one device.
  std::size_t num_bytes() const { return ids_.host().size_bytes(); }
  std::int64_t seq_len() const { return seq_len_; }
  /// This rank's tokens of one sequence, and of all sequences.
  std::int64_t tokens_per_seq() const { return seq_len_ / part_.size; }
  std::int64_t num_tokens() const { return num_seqs_ * tokens_per_seq(); }
  /// This rank's positions whose label counts.
  std::int64_t num_valid() const { return num_valid_; }
  /// This rank's ranges of a sequence, one or two, in order.
  std::span<const TokenRange> ranges() const { return ranges_; }

  // The functions below return int32 tensors [T] on `device`.
  Tensor inputs(Device device) const { return view(main_.inputs, device); }
  Tensor labels(Device device) const { return view(main_.labels, device); }
  /// Position of each token for RoPE: in its document under block_causal, otherwise in its sequence.
  Tensor positions(Device device) const { return view(positions_, device); }
  /// For each token, the index in its sequence of the first token that it attends to.
  Tensor doc_starts(Device device) const { return view(doc_starts_, device); }
  /// Two orders of the keys of all context-parallel ranks. By parts: the tokens of rank r are [r · T, (r + 1) · T) of
  /// [size · T]. By sequences: [B · S]. part_of_key gives the place in the former of each token of the latter,
  /// key_of_part the reverse.
  Tensor part_of_key(Device device) const { return view(part_of_key_, device); }
  Tensor key_of_part(Device device) const { return view(key_of_part_, device); }
  Tensor mtp_inputs(std::size_t module, Device device) const { return view(mtp_[module].inputs, device); }
  Tensor mtp_labels(std::size_t module, Device device) const { return view(mtp_[module].labels, device); }

 private:
  /// A range of ids_, which holds all tensors of the batch.
  struct Ids {
    std::int64_t begin = 0, size = 0;
  };
  /// What the main model or an MTP module reads and predicts.
  struct Prediction {
    Ids inputs, labels;
  };
  Tensor view(const Ids& ids, Device device) const { return ids_.tensor(device).rows(ids.begin, ids.begin + ids.size); }
  std::span<std::int32_t> host(const Ids& ids) const {
    return ids_.host().subspan(static_cast<std::size_t>(ids.begin), static_cast<std::size_t>(ids.size));
  }

  std::int64_t num_seqs_, seq_len_;
  SequencePart part_;
  std::vector<TokenRange> ranges_;
  bool mask_documents_;
  std::int32_t eos_id_;
  std::int64_t num_valid_ = 0;
  Prediction main_;
  Ids positions_, doc_starts_;
  Ids part_of_key_, key_of_part_;
  std::vector<Prediction> mtp_;  // by module
  Mirrored<std::int32_t> ids_;
};

}  // namespace tessera
