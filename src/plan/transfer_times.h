// How long transfers between ranks take on a cluster.
//
// A collective of n ranks, of which g share a domain, is bound by the slower of two things: what each GPU sends within
// its domain, and what each GPU's network link carries. The domains of a collective share its traffic among the links
// of all their ranks. docs/planner.md has the formulas.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "config/job_config.h"
#include "plan/cluster.h"
#include "plan/routing_spread.h"

namespace tessera {

/// Returns to how many ranks the tokens of rank 0 go.
RoutingSpread experts_spread(const Cluster& cluster, const JobConfig& job, const MeshDegrees& degrees,
                             RoutingKind routing);

class TransferTimes {
 public:
  /// Computes the times of the transfers of `rank`. Ranks fill domains in their order. `spread` is the result of
  /// experts_spread(). Cluster and job must outlive this.
  TransferTimes(const Cluster& cluster, const JobConfig& job, const MeshDegrees& degrees, std::int64_t rank,
                const RoutingSpread& spread)
      : cluster_(cluster), job_(job), degrees_(degrees), rank_(rank), spread_(spread) {}

  double seconds(const RecordedTransfer& transfer) const;
  /// Says whether a transfer leaves the domain.
  bool is_far(const RecordedTransfer& transfer) const;
  /// Returns, of the duration of a dispatcher's call, the part that operators beside it lose.
  double dispatch_overlap_cost() const;

 private:
  struct Group {
    double num_ranks = 1, num_domains = 1;
    double most_in_domain = 1, least_in_domain = 1;  // ranks of the fullest domain, and of the emptiest
  };
  const Group& group(const std::string& axis) const;
  double of_dispatch(const RecordedTransfer& transfer) const;
  double of_collective(const RecordedTransfer& transfer) const;
  /// Returns the bytes per second between domains. No kind is faster there than within a domain: a pipeline's message
  /// has the SMs of one channel.
  double network_rate(const std::string& kind) const;

  const Cluster& cluster_;
  const JobConfig& job_;
  MeshDegrees degrees_;
  std::int64_t rank_;
  RoutingSpread spread_;                         // of the experts' group
  mutable std::map<std::string, Group> groups_;  // by axis, filled when first asked for
};

}  // namespace tessera
