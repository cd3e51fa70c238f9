// Random token ids for steps whose speed is measured. A few ids are frequent, so that there is something to learn.
#pragma once

#include <span>
#include <vector>

#include "config/job_config.h"
#include "tensor/philox.h"

namespace tessera {

class RandomTokens {
 public:
  /// Draws for micro-batches of this configuration. Each data rank has a stream of its own.
  RandomTokens(const JobConfig& config, std::int64_t data_rank)
      : random_(static_cast<std::uint64_t>(config.debug.seed), stream_of(fmt::format("bench.tokens.{}", data_rank))),
        vocab_size_(static_cast<double>(config.model.args.vocab_size)),
        tokens_(static_cast<std::size_t>(config.micro_batch_size() * (config.training.seq_len + 1))) {}

  /// Returns the tokens of the next micro-batch, which stay until the next call.
  std::span<const std::int32_t> next() {
    for (std::int32_t& token : tokens_) {
      const double u = random_.uniform(drawn_++);
      token = static_cast<std::int32_t>(u * u * u * vocab_size_);
    }
    return tokens_;
  }

 private:
  Philox random_;
  double vocab_size_;
  std::uint64_t drawn_ = 0;
  std::vector<std::int32_t> tokens_;
};

}  // namespace tessera
