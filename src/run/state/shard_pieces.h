// The tensors of a rank's state as pieces of whole tensors, as a checkpoint's shards have them.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "checkpoint/shards.h"
#include "params/parameters.h"

namespace tessera {

inline constexpr std::array kShardKinds = {kModelShards, kOptimizerShards};
/// Holds pieces by kind of shard, in the order of kShardKinds.
using ShardPieces = std::array<std::vector<TensorPiece>, kShardKinds.size()>;

/// Returns all pieces that this rank has of masters and of the optimizer's tensors. The model's pieces end with the
/// buffers, which are whole. The pieces point to the parameters' memory.
ShardPieces shard_pieces(const Parameters& parameters);

}  // namespace tessera
