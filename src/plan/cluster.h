// A kind of cluster as data: how fast its GPUs execute operators and move bytes, how they are connected, and what they
// cost. docs/planner.md describes the files in clusters/.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "plan/calibration.h"
#include "plan/other_engine.h"

namespace tessera {

class TomlReader;

/// Says how long calls of some operators take. A call takes seconds_per_call, the time of its flop, and that of its
/// bytes. The bytes of a product are those of its output, because a rate of its flop covers the operands. A rate of 0
/// means that this amount takes no time.
struct OperatorRule {
  std::vector<std::string> operators;  // names, in which * stands for any text
  std::string type;                    // of the first operand ("bfloat16"); empty: any
  double flop_per_second = 0.0;        // of a large product
  double half_contraction = 0.0;       // a contraction of K numbers has the rate flop_per_second · K / (K + this)
  double bytes_per_second = 0.0;
  double seconds_per_call = 0.0;

  bool is_for(const RecordedOperator& call) const;
  double seconds(const RecordedOperator& call) const;
};

/// Returns whether a name fits one of the patterns, in which * stands for any text.
bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

/// Reads a rule. Its caller reads what else the table may have.
OperatorRule read_rule(TomlReader& reader);

/// The kinds of transfers between ranks, without a dispatcher's calls. A pipeline's messages are sends.
inline constexpr const char* kTransferKinds[] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"};

struct Cluster {
  std::string name;
  int gpus_per_domain = 1;  // GPUs that NVLink connects
  // Between GPUs of a domain, and of different ones: per GPU and direction, as reached.
  double domain_bytes_per_second = 0.0, network_bytes_per_second = 0.0;
  /// The rates of some kinds of transfers within a domain ("all_gather"). Others have domain_bytes_per_second.
  std::map<std::string, double> domain_bytes_per_second_of;
  double memory_bytes = 0.0;    // of a GPU
  double reserved_bytes = 0.0;  // of that, what CUDA and NCCL take
  double dollars_per_gpu_hour = 0.0;
  double peak_flop_per_second = 0.0;    // dense bfloat16, for MFU
  std::vector<std::string> precisions;  // that have kernels on its GPUs, as in_precision() names them
  int num_sms = 0;                      // of a GPU; 0: it has none
  double seconds_per_transfer = 0.0;    // of a collective, besides its bytes
  double seconds_per_dispatch = 0.0;    // of a dispatcher's call, besides its bytes
  // The rates of the direct backend: of stores to other GPUs of a domain, and of what one SM does. A dispatch writes
  // rows. A combine reads rows, and adds up one sum per rank that has rows of a token.
  double direct_bytes_per_second = 0.0;
  double direct_overlap_cost = 0.0;  // as overlap_cost, of a direct call
  double sm_written_per_second = 0.0, sm_read_per_second = 0.0, sm_summed_per_second = 0.0;  // bytes
  double seconds_per_host_plan = 0.0;  // of the standard backend: what a dispatch waits for the host
  double overlap_cost = 0.0;           // κ: of a collective's duration, the part that operators beside it lose
  double straggler = 0.0;              // σ: the relative standard deviation of GPUs' speeds
  std::vector<OperatorRule> rules;     // the first that fits counts
  Calibration calibration;             // for operators that no rule is for; may be empty
  // How many times as fast products and attention are, and all other operators, as a search asks what would be gained.
  double products_speedup = 1.0, others_speedup = 1.0;
  OtherEngine engine;  // whose steps are executed
  std::filesystem::path path;

  /// Makes the rates of all operators so many times as high.
  void scale_rates(double flop, double bytes);
  /// Returns the time of a call on this cluster by its engine. Throws MissingRate, which names the operator, its class
  /// and the file, if neither a rule nor the calibration has a rate for the call.
  OperatorTime time_of(const RecordedOperator& call) const;
  /// Returns what the operator itself takes, without the engine's factors and bytes.
  OperatorTime own_time_of(const RecordedOperator& call) const;
  /// Returns the same without speedups.
  OperatorTime measured_time_of(const RecordedOperator& call) const;
  /// Returns the seconds of a copy that reads and writes so many bytes in all, in bfloat16.
  double copy_seconds(double bytes, const std::string& pass) const;
  /// Returns the bytes per second of a link within a domain, in transfers of that kind.
  double domain_rate(const std::string& kind) const;
  /// Returns by which factor the slowest of num_ranks GPUs is slower than their mean: 1 + σ expected_maximum(n).
  double slowest_of(std::int64_t num_ranks) const;
};

/// Returns the expected maximum of n normal numbers with mean 0 and deviation 1, n > 0, within 5 %. It is
/// Φ⁻¹((n - 0.375) / (n + 0.25)): Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
double expected_maximum(std::int64_t n);

/// Returns a cluster of `num_ranks` ranks on the CPUs of one node, with the rates of the calibration. Throws Error if
/// there are several, and another number of ranks measured it.
Cluster cluster_of_cpus(const Calibration& calibration, std::int64_t num_ranks);

/// Throws Error, which names the file and the key, if something is missing, has no source, or is no number in range.
Cluster read_cluster(const std::filesystem::path& path);

}  // namespace tessera
