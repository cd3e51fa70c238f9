// Fuzzes ShardFiles with any bytes as the first of two shards, of the model and of the optimizer. The second shard, the
// lower half of a matrix, is valid, so that the first can be right.
#include "checkpoint/shards.h"

#include "target.h"

using namespace tessera;

namespace {

const Shape kShape = {4, 6};

constexpr std::string_view kKinds[] = {kModelShards, kOptimizerShards};

/// Reads every number of the matrix in order, if the shards are a model's. Of both kinds of shards it also reads some
/// numbers by a cut that no file has.
void read_matrix(std::string_view kind) {
  const ShardFiles files(fuzz::input_folder(), kind, 3, 2);
  const AssembledTensor matrix = files.at("w", kShape);
  if (kind == kModelShards) {
    for (std::int64_t at = 0; at < kShape.num_elements();) {
      const std::span<const float> numbers = matrix.from(at);
      fuzz::touch(std::as_bytes(numbers));
      at += static_cast<std::int64_t>(numbers.size());
    }
  }
  const Slice third{.global = kShape, .dim = 1, .part = 1, .parts = 3};
  std::vector<float> numbers(8);
  matrix.read({.slice = third, .begin = 0, .end = 8}, numbers.data());
  fuzz::touch(std::as_bytes(std::span(numbers)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  [[maybe_unused]] static const auto second = [] {
    std::vector<float> numbers(12, 1.0f);
    const TensorPiece lower{.name = "w",
                            .piece = {.slice = {.global = kShape}, .begin = 12, .end = 24},
                            .numbers = Tensor(numbers.data(), {12}, DType::kFloat32, Device::kCpu)};
    for (const std::string_view kind : kKinds) {
      write_shard(fuzz::input_folder() / shard_file_name(kind, 1, 2), {.step = 3, .shard = 1, .num_shards = 2},
                  std::span(&lower, 1));
    }
    return true;
  }();
  for (const std::string_view kind : kKinds) {
    fuzz::write_input(shard_file_name(kind, 0, 2), fuzz::as_text({data, size}));
    fuzz::read_hostile(fuzz::input_folder().native(), [&] { read_matrix(kind); });
  }
  return 0;
}
