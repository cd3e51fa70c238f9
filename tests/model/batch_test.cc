#include "model/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/cross_entropy.h"

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
// Two rows of 5 + 1 tokens; EOS is 2.
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

}  // namespace
}  // namespace tessera
