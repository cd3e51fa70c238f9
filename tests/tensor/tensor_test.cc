#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tessera {
namespace {

class TensorTest : public ::testing::Test {
 protected:
  TensorTest() { std::iota(numbers_.begin(), numbers_.end(), 0.0f); }
  std::vector<float> numbers_ = std::vector<float>(24);
  Tensor tensor_{numbers_.data(), {4, 6}, DType::kFloat32, Device::kCpu};
};

TEST_F(TensorTest, RowsAndColumnsAreViews) {
  const Tensor rows = tensor_.rows(1, 3);
  EXPECT_EQ(rows.shape(), (Shape{2, 6}));
  EXPECT_EQ(rows.data<float>()[0], 6.0f);
  EXPECT_TRUE(rows.is_contiguous());
  const Tensor columns = tensor_.columns(2, 4);
  EXPECT_EQ(columns.shape(), (Shape{4, 2}));
  EXPECT_EQ(columns.stride(), 6);
  EXPECT_FALSE(columns.is_contiguous());
  EXPECT_EQ(columns.rows(3, 4).data<float>()[1], 21.0f);
  EXPECT_TRUE(columns.rows(3, 4).is_contiguous());
  EXPECT_EQ(tensor_.rows(2, 2).num_elements(), 0);
}

TEST_F(TensorTest, ReshapeAndIndex) {
  const Tensor cube = tensor_.reshape({2, 3, 4});
  EXPECT_EQ(cube[1].shape(), (Shape{3, 4}));
  EXPECT_EQ(cube[1][2].data<float>()[3], 23.0f);
  EXPECT_EQ(cube.num_bytes(), 96u);
}

TEST_F(TensorTest, ViewsOfViews) {
  const Tensor inner = tensor_.rows(1, 4).columns(1, 5).columns(1, 3).rows(1, 3);
  EXPECT_EQ(inner.shape(), (Shape{2, 2}));
  EXPECT_EQ(inner.data<float>()[0], 14.0f);
  EXPECT_EQ(inner.data<float>()[inner.stride() + 1], 21.0f);
  EXPECT_EQ(inner[1].data<float>()[0], 20.0f);
}

TEST_F(TensorTest, UndefinedAndEmptyAndNowhere) {
  EXPECT_FALSE(Tensor().defined());
  EXPECT_TRUE(Tensor(nullptr, {0, 5}, DType::kFloat32, Device::kCpu).is_contiguous());
  const Tensor nowhere(nullptr, {4, 6}, DType::kBFloat16, Device::kMeta);
  EXPECT_EQ(nowhere.rows(1, 2).columns(2, 3).raw(), nullptr);  // not an address that looks like a valid one
  EXPECT_EQ(nowhere.num_bytes(), 48u);
}

TEST_F(TensorTest, MistakesThrow) {
  EXPECT_THROW(tensor_[4], InternalError);
  EXPECT_THROW(tensor_.reshape({24})[0], InternalError);
  EXPECT_THROW(tensor_.reshape({2, 3, 4}).columns(0, 1), InternalError);
  EXPECT_THROW(tensor_.rows(2, 1), InternalError);
  EXPECT_THROW(tensor_.data<BFloat16>(), InternalError);
  EXPECT_THROW(tensor_.rows(3, 5), InternalError);
  EXPECT_THROW(tensor_.columns(-1, 2), InternalError);
  EXPECT_THROW(tensor_.reshape({5, 5}), InternalError);
  EXPECT_THROW(tensor_.columns(0, 3).reshape({12}), InternalError);
  EXPECT_THROW((Shape{1, 2, 3, 4, 5}), InternalError);
  EXPECT_THROW((Shape{-1}), InternalError);
  EXPECT_THROW(Tensor(nullptr, {2}, DType::kFloat32, Device::kCpu), InternalError);
}

TEST(Shapes, Text) { EXPECT_EQ((Shape{4, 256}).to_string(), "[4, 256]"); }

}  // namespace
}  // namespace tessera
