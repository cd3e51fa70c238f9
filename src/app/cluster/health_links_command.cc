#include <fmt/format.h>

#include <iostream>
#include <memory>

#include "app/cli/commands.h"
#include "app/cli/on_ranks.h"
#include "app/cli/option_checks.h"
#include "base/error.h"
#include "base/json.h"
#include "base/median.h"
#include "comm/together.h"
#include "health/link_check.h"
#include "run/rank_setup.h"
#include "system/host_name.h"

namespace tessera {
namespace {

constexpr double kMostRate = 1e6;  // GB/s that may be expected

struct LinksOptions {
  std::int64_t mebibytes = 64;
  bool as_json = false;
  LinkCheckOptions check;
};

RankPlaces find_places(Ranks& ranks) {
  RankPlaces places{.nodes = ranks.first_ranks_on_nodes(), .hosts = {}};
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const bool is_first_here = places.nodes[static_cast<std::size_t>(rank)] == rank;
    if (is_first_here) {
      places.hosts.push_back(
          broadcast_first_text(ranks.world(), rank == ranks.rank() ? host_name() : "", "names of nodes"));
    } else {
      places.hosts.push_back(places.hosts[static_cast<std::size_t>(places.nodes[static_cast<std::size_t>(rank)])]);
    }
  }
  return places;
}

/// Returns, for example, "within nodes: 12 pairs, 338 GB/s (median), slowest 330: rank 1 on n1 - rank 2 on n1".
std::string describe_pairs(const LinkReport& report, const RankPlaces& places, bool inside) {
  std::vector<double> rates;
  std::size_t first = 0, second = 0;
  for (std::size_t a = 0; a < places.nodes.size(); ++a) {
    for (std::size_t b = a + 1; b < places.nodes.size(); ++b) {
      if ((places.nodes[a] == places.nodes[b]) != inside) continue;
      const double rate = std::min(report.pairs[a][b], report.pairs[b][a]);
      if (rates.empty() || rate < std::ranges::min(rates)) first = a, second = b;
      rates.push_back(rate);
    }
  }
  if (rates.empty()) return "";
  return fmt::format("{:<14} {} pairs, {:.3g} GB/s (median), slowest {:.3g}: rank {} on {} - rank {} on {}\n",
                     inside ? "within nodes" : "between nodes", rates.size(), median(rates), std::ranges::min(rates),
                     first, places.hosts[first], second, places.hosts[second]);
}

nlohmann::ordered_json to_json(const LinkReport& report, const RankPlaces& places) {
  nlohmann::ordered_json json = {{"hosts", places.hosts},
                                 {"all_reduce_gb_per_s", report.all_reduce_gb_per_s},
                                 {"all_to_all_gb_per_s", report.all_to_all_gb_per_s},
                                 {"pairs_gb_per_s", report.pairs},
                                 {"findings", nlohmann::ordered_json::array()}};
  for (const Finding& finding : report.findings) {
    json["findings"].push_back({{"signal", finding.signal}, {"part", finding.part}, {"detail", finding.detail}});
  }
  return json;
}

/// Checks the links and prints the report. Returns 1 if a link is bad.
int check_links_between(const LinksOptions& options, const JobConfig& config, Ranks& ranks) {
  require(ranks.size() > 1,
          "tessera health links needs several ranks: start it by mpirun or srun --mpi=pmix, with a "
          "rank per GPU, or one per node on CPUs");
  const std::shared_ptr<cuda::Runtime> runtime = join_gpus(config, ranks);
  const RankPlaces places = find_places(ranks);
  LinkCheckOptions check = options.check;
  check.num_bytes = options.mebibytes << 20;
  const LinkReport report = check_links(ranks.world(), places, runtime.get(), check);
  if (ranks.rank() == 0) {
    if (options.as_json) {
      std::cout << json_text(to_json(report, places), 2) << '\n';
    } else {
      std::cout << fmt::format("{:<14} {:.3g} GB/s (bus bandwidth, {} MiB)\n{:<14} {:.3g} GB/s\n", "all-reduce",
                               report.all_reduce_gb_per_s, options.mebibytes, "all-to-all", report.all_to_all_gb_per_s)
                << describe_pairs(report, places, true) << describe_pairs(report, places, false);
      for (const Finding& finding : report.findings) {
        std::cout << fmt::format("bad            {}, {}: {}\n", finding.signal,
                                 finding.part.empty() ? "all ranks" : finding.part, finding.detail);
      }
    }
    std::cout.flush();
  }
  return report.findings.empty() ? 0 : 1;
}

}  // namespace

void add_health_links_command(CLI::App& health, int& status) {
  auto options = std::make_shared<LinksOptions>();
  CLI::App* command = health.add_subcommand(
      "links", "Measure the links between ranks, and name slow ones; under mpirun or srun, on idle nodes");
  command->add_option("--mebibytes", options->mebibytes, "Size of a message; default: 64")
      ->transform(as_count(1, 4096));
  command->add_option("--repeats", options->check.repeats, "Of each operation; default: 5")
      ->transform(as_count(1, 1000));
  command
      ->add_option("--slow", options->check.slow_share,
                   "A link below this share of what is expected is bad; default: 0.8")
      ->check(is_number(0.0, 1.0));
  command
      ->add_option("--expect-inside", options->check.expected_pair_inside,
                   "GB/s of two ranks of a node; default: what most pairs reach")
      ->check(is_number(0.0, kMostRate));
  command
      ->add_option("--expect-between", options->check.expected_pair_between,
                   "GB/s of two ranks of two nodes; default: what most pairs reach")
      ->check(is_number(0.0, kMostRate));
  command
      ->add_option("--expect-all-reduce", options->check.expected_all_reduce, "GB/s of all ranks; default: not checked")
      ->check(is_number(0.0, kMostRate));
  command->add_option("--expect-all-to-all", options->check.expected_all_to_all, "GB/s of a rank; default: not checked")
      ->check(is_number(0.0, kMostRate));
  command->add_flag("--json", options->as_json, "Print JSON, with the rate of every pair");
  command->callback([options, &status] {
    status =
        run_on_ranks([] { return JobConfig(); },
                     [options](const JobConfig& config, Ranks& ranks) {
                       return ranks.end_where_it_fails([&] { return check_links_between(*options, config, ranks); });
                     });
  });
}

}  // namespace tessera
