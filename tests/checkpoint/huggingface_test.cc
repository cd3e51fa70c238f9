#include "checkpoint/huggingface.h"

#include <gtest/gtest.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

/// Nothing in a file may send control codes to a terminal.
TEST(HfWeights, MessagesEscapeTheFilesNames) {
  const data::TemporaryFolder scratch;
  float number = 1.0f;
  const NamedTensor tensor{"\x1b[2J", Tensor(&number, {1}, DType::kFloat32, Device::kCpu)};
  write_safetensors(scratch / "model.safetensors", std::span(&tensor, 1), {});
  const HfWeights weights(scratch.path());
  expect_error([&] { require_same_tensors(weights, {}, 0); }, {"not expected are 1 (\\x1b[2J)"});
  const auto index = [&](const std::string& map) {
    data::write_file(scratch / kHfIndexName, fmt::format(R"({{"weight_map": {}}})", map));
  };
  index(R"({"\u001b[2J": 1})");
  expect_error([&] { HfWeights(scratch.path()); }, {"the file of '\\x1b[2J' is no string"});
  index(R"({"a": "model.safetensors"})");
  expect_error([&] { HfWeights(scratch.path()); }, {"the tensor '\\x1b[2J'", "does not list"});
}

}  // namespace
}  // namespace tessera
