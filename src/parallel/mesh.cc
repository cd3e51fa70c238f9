#include "parallel/mesh.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

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
  // The number of ranks that the axes so far leave for the others.
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
  if (degrees.ep_domain == 0) return degrees;
  require_divides("parallelism.expert_parallel_ranks_per_domain", degrees.ep_domain, degrees.ep,
                  fmt::format("parallelism.expert_parallel_degree, {}", degrees.ep));
  require(
      degrees.ep_domain > 1 || degrees.ep == 1,
      "parallelism.expert_parallel_ranks_per_domain is 1, which leaves nobody to make direct stores to; expected 2 or "
      "more, or parallelism.expert_parallel_comm_backend = \"standard\"");
  return degrees;
}

std::int64_t fewest_ranks(const MeshDegrees& degrees) {
  const std::int64_t shard = degrees.dp_shard == -1 ? 1 : degrees.dp_shard;
  if (std::min({degrees.dp_replicate, shard, degrees.cp, degrees.tp, degrees.pp, degrees.ep}) < 1) return 1;
  const auto times = [](std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
  };
  const std::int64_t parts = times(degrees.cp, degrees.tp);
  // Expert groups are cut out of dp_shard · cp · tp ranks.
  const std::int64_t dp_shard = degrees.dp_shard == -1 ? degrees.ep / std::gcd(degrees.ep, parts) : degrees.dp_shard;
  return times(times(times(parts, dp_shard), degrees.pp), degrees.dp_replicate);
}

std::string describe(const MeshDegrees& d) {
  return fmt::format("pipeline {} x replicate {} x shard {} x context {} x tensor {}, expert {}", d.pp, d.dp_replicate,
                     d.dp_shard, d.cp, d.tp, d.ep) +
         (d.num_ep_domains() > 1 ? fmt::format(" in domains of {}", d.ep_domain) : "");
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

namespace {

/// Describes a group of the mesh. Its ranks agree in all coordinates except those that vary along it; `color` encodes
/// the coordinates in which they agree.
struct Group {
  ProcessGroup Mesh::*of;
  const char* axis;
  std::int64_t color;
  Traffic traffic = Traffic::kWeights;
};

std::vector<Group> groups_of(const MeshDegrees& d, const MeshPlace& place) {
  const std::int64_t stage_replica = place.pp * d.dp_replicate + place.dp_replicate;
  const std::int64_t part = place.cp * d.tp + place.tp;  // rank among those that share the same sequences
  const std::int64_t rank_of_stage = place.dp_shard * d.cp * d.tp + part;  // rank within its stage and replica
  const std::int64_t ranks_per_stage = d.dp_shard * d.cp * d.tp;
  const std::int64_t ep_group = stage_replica * ranks_per_stage + place.ep_shard;
  // Each kind of traffic takes resources of its own, so it must have groups of several ranks.
  const Traffic activations = d.cp * d.tp > 1 ? Traffic::kActivations : Traffic::kWeights;
  const Traffic experts = d.ep > 1 ? Traffic::kExperts : Traffic::kWeights;
  std::vector<Group> groups = {
      {&Mesh::pp, "pp", place.dp_replicate * ranks_per_stage + rank_of_stage},
      {&Mesh::dp_replicate, "dp_replicate", place.pp * ranks_per_stage + rank_of_stage},
      {&Mesh::cp, "cp", (stage_replica * d.dp_shard + place.dp_shard) * d.tp + place.tp, activations},
      {&Mesh::tp, "tp", (stage_replica * d.dp_shard + place.dp_shard) * d.cp + place.cp, activations},
      {&Mesh::ep, "ep", ep_group, experts},
      {&Mesh::sequence, "cp_tp", stage_replica * d.dp_shard + place.dp_shard, activations},
      {&Mesh::tokens, "dp_cp_tp", place.pp},
      {&Mesh::shard_of_cut, "dp_shard_cp", stage_replica * d.tp + place.tp},
      {&Mesh::shard_of_whole, "dp_shard_cp_tp", stage_replica},
      {&Mesh::shard_of_experts, "ep_shard", stage_replica * ranks_per_stage + place.ep},
      {&Mesh::model, "model", place.dp_replicate}};
  if (d.num_ep_domains() > 1) {
    groups.push_back({&Mesh::ep_within, "ep_within", ep_group * d.ep + place.ep / d.ep_domain, experts});
    groups.push_back({&Mesh::ep_across, "ep_across", ep_group * d.ep + place.ep % d.ep_domain, experts});
  }
  return groups;
}

}  // namespace

std::vector<std::int64_t> ranks_of_group(const MeshDegrees& resolved, std::int64_t rank, std::string_view axis) {
  const auto color_of = [&](std::int64_t of) {
    for (const Group& group : groups_of(resolved, place_of(resolved, of))) {
      if (group.axis == axis) return group.color;
    }
    TESSERA_CHECK(false, "no group '{}'", axis);
    return std::int64_t{0};
  };
  std::vector<std::int64_t> ranks;
  for (std::int64_t other = 0; other < resolved.num_ranks(); ++other) {
    if (color_of(other) == color_of(rank)) ranks.push_back(other);
  }
  return ranks;
}

void Mesh::set_record(StepRecord* record) {
  for (const Group& group : groups_of(degrees, place)) (this->*group.of).set_record(record);
}

Mesh::Mesh(ProcessGroup& world, const MeshDegrees& resolved)
    : degrees(resolved), place(place_of(resolved, world.rank())) {
  TESSERA_CHECK(world.size() == resolved.num_ranks(), "{} {}", world.size(), resolved.num_ranks());
  for (const Group& group : groups_of(degrees, place)) {
    this->*group.of = world.split(static_cast<int>(group.color), world.rank(), group.axis, group.traffic);
  }
}

Mesh Mesh::planned(const MeshDegrees& resolved, std::int64_t rank) {
  TESSERA_CHECK(0 <= rank && rank < resolved.num_ranks(), "{} {}", rank, resolved.num_ranks());
  Mesh mesh;
  mesh.degrees = resolved;
  mesh.place = place_of(resolved, rank);
  mesh.is_planned = true;
  const auto own = groups_of(resolved, mesh.place);
  std::vector<int> ranks(own.size(), 0), sizes(own.size(), 0);
  for (std::int64_t other = 0; other < resolved.num_ranks(); ++other) {
    const auto groups = groups_of(resolved, place_of(resolved, other));
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (groups[i].color != own[i].color) continue;
      ++sizes[i];
      if (other < rank) ++ranks[i];
    }
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    mesh.*own[i].of = ProcessGroup::planned(ranks[i], sizes[i], own[i].axis);
  }
  return mesh;
}

}  // namespace tessera
