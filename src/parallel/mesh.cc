#include "parallel/mesh.h"

#include <numeric>

#include "base/error.h"

namespace tessera {

void require_divides(std::string_view key, std::int64_t degree, std::int64_t total, std::string_view what,
                     std::int64_t others) {
  if (degree >= 1 && total % degree == 0) return;
  const std::int64_t largest = std::gcd(total, others);
  std::int64_t below = 1, above = largest;
  for (std::int64_t value = 1; value <= largest; ++value) {
    if (largest % value != 0) continue;
    if (value < degree) below = value;
    if (value > degree) {
      above = value;
      break;
    }
  }
  fail("{} is {}, which does not divide {}; the nearest possible: {}", key, degree, what,
       below < degree && degree < above ? fmt::format("{} and {}", below, above)
                                        : fmt::format("{}", degree < below ? below : above));
}

MeshDegrees resolve(MeshDegrees degrees, std::int64_t num_ranks) {
  // Axis by axis, what is left for the others.
  std::int64_t left = num_ranks;
  for (const auto& [key, degree] : {std::pair{"parallelism.pipeline_parallel_degree", degrees.pp},
                                    {"parallelism.tensor_parallel_degree", degrees.tp},
                                    {"parallelism.context_parallel_degree", degrees.cp},
                                    {"parallelism.data_parallel_replicate_degree", degrees.dp_replicate}}) {
    require_divides(key, degree, left,
                    left == num_ranks
                        ? fmt::format("the number of ranks, {}", num_ranks)
                        : fmt::format("the {} that the axes before it leave of {} ranks", left, num_ranks));
    left /= degree;
  }
  if (degrees.dp_shard == -1) degrees.dp_shard = left;
  require(degrees.dp_shard == left,
          "parallelism.data_parallel_shard_degree is {}, but the other axes (pipeline {}, tensor {}, context {}, "
          "replicate {}) leave {} of {} ranks for it; expected {}, or -1 for what is left",
          degrees.dp_shard, degrees.pp, degrees.tp, degrees.cp, degrees.dp_replicate, left, num_ranks, left);
  const std::int64_t data_ranks = degrees.dp_shard * degrees.cp * degrees.tp;
  require_divides("parallelism.expert_parallel_degree", degrees.ep, data_ranks,
                  fmt::format("the ranks that it is cut out of, shard {} x context {} x tensor {} = {}",
                              degrees.dp_shard, degrees.cp, degrees.tp, data_ranks));
  return degrees;
}

MeshPlace place_of(const MeshDegrees& degrees, std::int64_t rank) {
  MeshPlace place;
  const auto take = [&](std::int64_t degree) {
    const std::int64_t coordinate = rank % degree;
    rank /= degree;
    return coordinate;
  };
  place.tp = take(degrees.tp);
  place.cp = take(degrees.cp);
  place.dp_shard = take(degrees.dp_shard);
  place.dp_replicate = take(degrees.dp_replicate);
  place.pp = take(degrees.pp);
  const std::int64_t data_rank = (place.dp_shard * degrees.cp + place.cp) * degrees.tp + place.tp;
  place.ep = data_rank % degrees.ep;
  place.ep_shard = data_rank / degrees.ep;
  return place;
}

Mesh::Mesh(ProcessGroup& world, const MeshDegrees& resolved)
    : degrees(resolved), place(place_of(resolved, world.rank())) {
  TESSERA_CHECK(world.size() == resolved.num_ranks(), "{} {}", world.size(), resolved.num_ranks());
  // A group is of the ranks that agree in all coordinates but those that vary along it: the color is what they agree
  // in.
  const MeshDegrees& d = degrees;
  const std::int64_t stage_replica = place.pp * d.dp_replicate + place.dp_replicate;
  const std::int64_t part = place.cp * d.tp + place.tp;                // of a sequence
  const std::int64_t data_rank = place.dp_shard * d.cp * d.tp + part;  // within stage and replica
  const auto group = [&](std::int64_t color, const char* axis) {
    return world.split(static_cast<int>(color), world.rank(), axis);
  };
  const std::int64_t num_data_ranks = d.dp_shard * d.cp * d.tp;
  pp = group(place.dp_replicate * num_data_ranks + data_rank, "pp");
  dp_replicate = group(place.pp * num_data_ranks + data_rank, "dp_replicate");
  cp = group((stage_replica * d.dp_shard + place.dp_shard) * d.tp + place.tp, "cp");
  tp = group((stage_replica * d.dp_shard + place.dp_shard) * d.cp + place.cp, "tp");
  ep = group(stage_replica * num_data_ranks + place.ep_shard, "ep");
  sequence = group(stage_replica * d.dp_shard + place.dp_shard, "cp_tp");
  tokens = group(place.pp, "dp_cp_tp");
  shard_of_cut = group(stage_replica * d.tp + place.tp, "dp_shard_cp");
  shard_of_whole = group(stage_replica, "dp_shard_cp_tp");
  shard_of_experts = group(stage_replica * num_data_ranks + place.ep, "ep_shard");
  model = group(place.dp_replicate, "model");
}

}  // namespace tessera
