#include "run/state/shard_pieces.h"

namespace tessera {

ShardPieces shard_pieces(const Parameters& parameters) {
  ShardPieces pieces;
  auto& [model, optimizer] = pieces;
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const Parameters::Range range = parameters.shard_range(id);
    if (range.begin == range.end) continue;
    const std::string& name = parameters.spec(id).name;
    const Piece piece{.slice = parameters.slice(id), .begin = range.begin, .end = range.end};
    model.push_back({name, piece, parameters.master_shard(id)});
    for (std::size_t i = 0; i < parameters.optimizer_tensors().size(); ++i) {
      optimizer.push_back({name + parameters.optimizer_tensors()[i].suffix, piece, parameters.optimizer_shard(i, id)});
    }
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    const Tensor buffer = parameters.buffer(id);
    const ParamSpec& spec = parameters.buffer_spec(id);
    model.push_back({spec.name, Piece::whole(spec.shape), buffer.reshape({buffer.num_elements()})});
  }
  return pieces;
}

}  // namespace tessera
