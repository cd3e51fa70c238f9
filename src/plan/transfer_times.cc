#include "plan/transfer_times.h"

#include <algorithm>
#include <map>
#include <ranges>

#include "parallel/mesh.h"
#include "plan/operator_work.h"

namespace tessera {
namespace {

/// Returns the domains of a group's ranks, of which this rank comes first.
std::vector<std::int64_t> domains_of(const std::vector<std::int64_t>& ranks, std::int64_t own, int gpus_per_domain) {
  std::vector<std::int64_t> domains = {own / gpus_per_domain};
  for (const std::int64_t rank : ranks) {
    if (rank != own) domains.push_back(rank / gpus_per_domain);
  }
  return domains;
}

}  // namespace

RoutingSpread experts_spread(const Cluster& cluster, const JobConfig& job, const MeshDegrees& degrees,
                             RoutingKind routing) {
  const ModelConfig& model = job.model.args;
  if (degrees.ep == 1 || model.num_moe_layers() == 0) return {};
  return spread_of({.kind = routing,
                    .num_experts = model.num_experts,
                    .top_k = model.top_k,
                    .num_groups = std::max<std::int64_t>(model.n_expert_groups, 1),
                    .num_limited_groups = model.n_expert_groups > 0 ? model.n_limited_groups : 1,
                    .domain_of_rank = domains_of(ranks_of_group(degrees, 0, "ep"), 0, cluster.gpus_per_domain)});
}

const TransferTimes::Group& TransferTimes::group(const std::string& axis) const {
  const auto known = groups_.find(axis);
  if (known != groups_.end()) return known->second;
  const std::vector<std::int64_t> domains =
      domains_of(ranks_of_group(degrees_, rank_, axis), rank_, cluster_.gpus_per_domain);
  std::map<std::int64_t, double> ranks_in;
  for (const std::int64_t domain : domains) ++ranks_in[domain];
  const auto [least, most] = std::ranges::minmax(std::views::values(ranks_in));
  return groups_[axis] = {.num_ranks = static_cast<double>(domains.size()),
                          .num_domains = static_cast<double>(ranks_in.size()),
                          .most_in_domain = most,
                          .least_in_domain = least};
}

double TransferTimes::of_dispatch(const RecordedTransfer& transfer) const {
  const auto top_k = static_cast<double>(transfer.choices.top_k);
  const bool combines = transfer.kind == "combine" || transfer.kind == "dispatch_backward";
  if (job_.parallelism.expert_parallel_comm_backend == DispatchBackend::kStandard) {
    const double here = transfer.bytes * (spread_.choices_away - spread_.choices_elsewhere);
    const double network = transfer.bytes * spread_.choices_elsewhere;
    // A dispatch first exchanges counts, from which the host makes tables.
    const double plan =
        transfer.kind == "dispatch" ? cluster_.seconds_per_host_plan + cluster_.seconds_per_transfer : 0.0;
    return plan + cluster_.seconds_per_transfer +
           std::max(here / cluster_.domain_rate("all_to_all"), network / network_rate("all_to_all"));
  }
  // A row crosses the network once per domain, and a domain's links once per rank there.
  const double over_links = transfer.bytes * spread_.other_ranks() / cluster_.direct_bytes_per_second;
  // Two domains send each other all tokens (ep/domain_exchange.h).
  const double num_crossing = group("ep").num_domains == 2.0 ? 1.0 : spread_.other_domains;
  const double over_network = transfer.bytes * num_crossing / cluster_.network_bytes_per_second;
  const double sums = spread_.own_rank + spread_.other_ranks();
  const double of_sm = combines ? top_k / cluster_.sm_read_per_second + sums / cluster_.sm_summed_per_second
                                : top_k / cluster_.sm_written_per_second;
  const auto num_sms = static_cast<double>(job_.parallelism.expert_parallel_num_sms);
  return cluster_.seconds_per_dispatch + std::max({over_links, over_network, transfer.bytes * of_sm / num_sms});
}

double TransferTimes::seconds(const RecordedTransfer& transfer) const {
  const double factor = cluster_.engine.factor_of(transfer.kind, transfer.pass);
  return factor * (is_dispatch(transfer) ? of_dispatch(transfer) : of_collective(transfer));
}

double TransferTimes::of_collective(const RecordedTransfer& transfer) const {
  const Group& ranks = group(transfer.axis);
  const double n = ranks.num_ranks, domains = ranks.num_domains;
  const double most = ranks.most_in_domain, least = ranks.least_in_domain;
  // The links of the fullest domain carry most, and each network card of the emptiest.
  double near = transfer.bytes * (most - 1.0) / most;
  double far = transfer.bytes * (domains - 1.0) / (domains * least);
  if (transfer.kind == "all_reduce") {
    near *= 2.0;
    far *= 2.0;
  } else if (transfer.kind == "all_to_all") {
    near = transfer.bytes * (most - 1.0) / n;
    far = transfer.bytes * (n - least) / n;
  } else if (transfer.kind == "send") {
    near = domains > 1.0 ? 0.0 : transfer.bytes;
    far = domains > 1.0 ? transfer.bytes : 0.0;
  }
  return cluster_.seconds_per_transfer +
         std::max(near / cluster_.domain_rate(transfer.kind), far / network_rate(transfer.kind));
}

double TransferTimes::network_rate(const std::string& kind) const {
  return std::min(cluster_.network_bytes_per_second, cluster_.domain_rate(kind));
}

bool TransferTimes::is_far(const RecordedTransfer& transfer) const {
  return is_dispatch(transfer) ? spread_.other_domains > 0.0 : group(transfer.axis).num_domains > 1.0;
}

double TransferTimes::dispatch_overlap_cost() const {
  if (cluster_.engine.dispatch_overlap_cost >= 0.0) return cluster_.engine.dispatch_overlap_cost;
  const bool is_direct = job_.parallelism.expert_parallel_comm_backend == DispatchBackend::kDirect;
  return is_direct ? cluster_.direct_overlap_cost : cluster_.overlap_cost;
}

}  // namespace tessera
