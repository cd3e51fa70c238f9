#include "tensor/dims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(Dims, OneLetterHasOneSize) {
  Dims dims;
  dims.bind("x_TD", {6, 8});
  dims.bind("saved.y_tD", {3, 8});
  dims.bind("lse_T", {6});
  EXPECT_THROW(dims.bind("w_ND", {4, 9}), InternalError);
  EXPECT_THROW(dims.bind("d_y_tD", {6, 8}), InternalError);
  EXPECT_THROW(dims.bind("z_TD", {6, 8, 1}), InternalError);
  EXPECT_THROW(dims.bind("z_TDE", {6, 8}), InternalError);
}

TEST(Dims, DigitsAreFactorsTermsOrSizes) {
  Dims dims;
  dims.bind("offsets_E1", {5});
  dims.bind("counts_E", {4});
  dims.bind("w13_2FD", {12, 8});
  dims.bind("w2_DF", {8, 6});
  dims.bind("sums_B2E", {3, 2, 4});
  dims.bind("sums_PT3", {2, 7, 3});
  dims.bind("loss_1", {1});
  EXPECT_THROW(dims.bind("offsets_E1", {4}), InternalError);
  EXPECT_THROW(dims.bind("h_R2F", {9, 6}), InternalError);
  EXPECT_THROW(dims.bind("sums_B2E", {3, 1, 4}), InternalError);
  EXPECT_THROW(dims.bind("loss_1", {2}), InternalError);
}

TEST(Dims, AMessageNamesTheTensorAndTheLetter) {
  std::array<float, 20> data{};
  const Tensor x_TD(data.data(), {2, 3}, DType::kFloat32, Device::kCpu), none_TV,
      w_ND(data.data(), {4, 5}, DType::kFloat32, Device::kCpu);
  EXPECT_THAT([&] { TESSERA_DIMS(x_TD, none_TV, w_ND); },
              testing::ThrowsMessage<InternalError>(HasSubstr("w_ND is [4, 5], but D is 3")));
}

}  // namespace
}  // namespace tessera
