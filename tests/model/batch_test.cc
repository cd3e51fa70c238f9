#include "model/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/loss/cross_entropy.h"

namespace tessera {
namespace {

using ::testing::ElementsAreArray;

std::vector<std::int32_t> ints(const Tensor& tensor) {
  return {tensor.data<std::int32_t>(), tensor.data<std::int32_t>() + tensor.num_elements()};
}

ModelConfig config(AttentionMask mask, std::int64_t modules) {
  ModelConfig result;
  result.attn_mask_type = mask;
  result.eos_id = 2;
  result.num_mtp_modules = modules;
  return result;
}

constexpr Device kCpu = Device::kCpu;
// Two rows of 5 + 1 tokens. EOS is 2.
const std::vector<std::int32_t> kTokens = {7, 2, 8, 9, 2, 5, /**/ 2, 2, 6, 6, 6, 6};

TEST(Batch, InputsAndLabelsAreShifted) {
  Batch batch(config(AttentionMask::kCausal, 0), 2, 5);
  batch.fill(kTokens);
  EXPECT_THAT(ints(batch.inputs(kCpu)), ElementsAreArray({7, 2, 8, 9, 2, 2, 2, 6, 6, 6}));
  EXPECT_THAT(ints(batch.labels(kCpu)), ElementsAreArray({2, 8, 9, 2, 5, 2, 6, 6, 6, 6}));
  EXPECT_EQ(batch.num_valid(), 10);
  EXPECT_THAT(ints(batch.positions(kCpu)), ElementsAreArray({0, 1, 2, 3, 4, 0, 1, 2, 3, 4}));
  EXPECT_THAT(ints(batch.doc_starts(kCpu)), ElementsAreArray({0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(Batch, DocumentsEndAtEos) {
  Batch batch(config(AttentionMask::kBlockCausal, 0), 2, 5);
  batch.fill(kTokens);
  EXPECT_THAT(ints(batch.doc_starts(kCpu)), ElementsAreArray({0, 0, 2, 2, 2, 0, 1, 2, 2, 2}));
  EXPECT_THAT(ints(batch.positions(kCpu)), ElementsAreArray({0, 1, 0, 1, 2, 0, 0, 0, 1, 2}));
}

TEST(Batch, IgnoredLabelsAndMultiTokenPrediction) {
  Batch batch(config(AttentionMask::kCausal, 2), 1, 5);
  const std::vector<std::int32_t> tokens = {10, 11, 12, 13, 14, 15};
  batch.fill(tokens, std::vector<std::int32_t>{11, kIgnoredLabel, 13, 14, 15});
  EXPECT_EQ(batch.num_valid(), 4);
  EXPECT_THAT(ints(batch.mtp_inputs(0, kCpu)), ElementsAreArray({11, 12, 13, 14, 15}));
  EXPECT_THAT(ints(batch.mtp_labels(0, kCpu)), ElementsAreArray({kIgnoredLabel, 13, 14, 15, kIgnoredLabel}));
  EXPECT_THAT(ints(batch.mtp_inputs(1, kCpu)), ElementsAreArray({12, 13, 14, 15, 15}));
  EXPECT_THAT(ints(batch.mtp_labels(1, kCpu)), ElementsAreArray({13, 14, 15, kIgnoredLabel, kIgnoredLabel}));
}

// Two ranks share two sequences of 8 tokens in chunks of 2. Rank 0 has the first and the last chunk of each, rank 1 the
// two in between.
TEST(Batch, PartsOfSequences) {
  const std::vector<std::int32_t> tokens = {10, 11, 12, 2,  14, 15, 16, 17, 18, /**/
                                            20, 21, 22, 23, 24, 25, 2,  27, 28};
  const ModelConfig numbers = config(AttentionMask::kBlockCausal, 1);
  Batch whole(numbers, 2, 8), first(numbers, 2, 8, {.rank = 0, .size = 2}),
      second(numbers, 2, 8, {.rank = 1, .size = 2});
  for (Batch* batch : {&whole, &first, &second}) batch->fill(tokens);
  EXPECT_THAT(ints(first.inputs(kCpu)), ElementsAreArray({10, 11, 16, 17, 20, 21, 2, 27}));
  EXPECT_THAT(ints(second.inputs(kCpu)), ElementsAreArray({12, 2, 14, 15, 22, 23, 24, 25}));
  EXPECT_THAT(ints(first.labels(kCpu)), ElementsAreArray({11, 12, 17, 18, 21, 22, 27, 28}));
  EXPECT_THAT(ints(first.doc_starts(kCpu)), ElementsAreArray({0, 0, 4, 4, 0, 0, 0, 7}));
  EXPECT_THAT(ints(first.positions(kCpu)), ElementsAreArray({0, 1, 2, 3, 0, 1, 6, 0}));
  EXPECT_THAT(ints(second.positions(kCpu)), ElementsAreArray({2, 3, 0, 1, 2, 3, 4, 5}));
  EXPECT_THAT(ints(first.mtp_inputs(0, kCpu)), ElementsAreArray({11, 12, 17, 18, 21, 22, 27, 28}));
  EXPECT_THAT(ints(first.mtp_labels(0, kCpu)), ElementsAreArray({12, 2, 18, kIgnoredLabel, 22, 23, 28, kIgnoredLabel}));
  EXPECT_EQ(first.num_valid() + second.num_valid(), whole.num_valid());
  EXPECT_EQ(first.tokens_per_seq(), 4);
  // part_of_key has, for each key in the order of the sequences, its place among both ranks' tokens, one rank behind
  // the other. key_of_part is the inverse.
  const std::vector<std::int32_t> of_keys = {0, 1, 8, 9, 10, 11, 2, 3, 4, 5, 12, 13, 14, 15, 6, 7};
  EXPECT_EQ(ints(first.part_of_key(kCpu)), of_keys);
  EXPECT_EQ(ints(second.part_of_key(kCpu)), of_keys);
  const std::vector<std::int32_t> back = ints(first.key_of_part(kCpu));
  for (std::size_t key = 0; key < of_keys.size(); ++key) {
    EXPECT_EQ(back[static_cast<std::size_t>(of_keys[key])], static_cast<std::int32_t>(key));
  }
  EXPECT_THROW(Batch(numbers, 1, 6, {.rank = 0, .size = 2}), InternalError);
}

}  // namespace
}  // namespace tessera
