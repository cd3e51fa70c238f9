// A micro-batch as the model takes it: token ids, labels, and the positions and ranges that document masking implies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/config.h"
#include "ops/attention/mla_attention.h"
#include "tensor/mirrored.h"

namespace tessera {

/// Says which part of a sequence of S tokens a rank of context parallelism has. The sequence is cut into 2 · size equal
/// chunks. The rank has the `rank`-th chunk from the front and the `rank`-th from the back. So all ranks have equally
/// many keys to attend to.
struct SequencePart {
  std::int64_t rank = 0, size = 1;
};

/// Owns the index tensors of a micro-batch of B sequences of S tokens. This rank has T = B · S / size of the tokens.
/// `fill` allocates nothing.
///
/// In a row of S + 1 tokens t[0..S], t[0..S-1] are inputs and t[1..S] are labels. MTP module k counts from 0, and the
/// paper's depth is d = k + 1. At position i it reads t[min(i + d, S)] and predicts t[i + d + 1], where there is one.
class Batch {
 public:
  Batch(const ModelConfig& config, std::int64_t num_seqs, std::int64_t seq_len, const SequencePart& part = {},
        Device target = Device::kCpu);

  /// Fills in whole sequences. `tokens` is [B, S + 1], with ids in [0, vocab_size). `labels` is [B, S], with
  /// kIgnoredLabel where a position does not count. If it is empty, the labels are the next tokens.
  void fill(std::span<const std::int32_t> tokens, std::span<const std::int32_t> labels = {});

  /// Fills in tokens for decoding, with their positions. A sequence of this batch is then one token that continues an
  /// earlier text. `positions` are those in that text. seq_len must be 1.
  void fill_tokens(std::span<const std::int32_t> tokens, std::span<const std::int32_t> positions);

  /// Starts to copy to the GPU what was filled in, if the batch is for a GPU. The copy ends before what follows on the
  /// stream. Until then nothing may be filled in.
  void upload(const cuda::Stream& stream) const { ids_.upload(stream); }

  std::int64_t num_seqs() const { return num_seqs_; }
  /// Returns the bytes of the batch's tensors on one device.
  std::size_t num_bytes() const { return ids_.host().size_bytes(); }
  std::int64_t seq_len() const { return seq_len_; }
  /// Returns the number of this rank's tokens of one sequence. num_tokens() counts those of all sequences.
  std::int64_t tokens_per_seq() const { return seq_len_ / part_.size; }
  std::int64_t num_tokens() const { return num_seqs_ * tokens_per_seq(); }
  /// Returns the number of this rank's positions whose label counts.
  std::int64_t num_valid() const { return num_valid_; }
  /// Returns this rank's ranges of a sequence. There are one or two, in order.
  std::span<const TokenRange> ranges() const { return ranges_; }

  // The functions below return int32 tensors on `device`. They are [T], except part_of_key() and key_of_part(), which
  // are [B · S].
  Tensor inputs(Device device) const { return view(main_.inputs, device); }
  Tensor labels(Device device) const { return view(main_.labels, device); }
  /// Returns the position of each token for RoPE. It counts from the start of the document under block_causal, and
  /// otherwise from that of the sequence.
  Tensor positions(Device device) const { return view(positions_, device); }
  /// Returns, for each token, the index in its sequence of the first token that it attends to.
  Tensor doc_starts(Device device) const { return view(doc_starts_, device); }
  /// Returns the map between two orders of the keys of all context-parallel ranks. In the order by parts, rank r has
  /// the tokens [r · T, (r + 1) · T) of [size · T]. The other order is by sequences, [B · S]. For each token by
  /// sequences, part_of_key gives its place by parts. key_of_part gives the reverse.
  Tensor part_of_key(Device device) const { return view(part_of_key_, device); }
  Tensor key_of_part(Device device) const { return view(key_of_part_, device); }
  Tensor mtp_inputs(std::size_t module, Device device) const { return view(mtp_[module].inputs, device); }
  Tensor mtp_labels(std::size_t module, Device device) const { return view(mtp_[module].labels, device); }

 private:
  /// Describes a range of ids_, which holds all tensors of the batch.
  struct Ids {
    std::int64_t begin = 0, size = 0;
  };
  /// Holds the inputs and labels of the main model or of an MTP module.
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
