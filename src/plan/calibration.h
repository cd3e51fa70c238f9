// How fast a machine executes operators: a calibration, which `tessera bench calibrate` measures and writes to a file.
//
// Within a class of calls (plan/operator_work.h) a call is taken to last a sum of terms, each an amount of its work
// times a rate: so much per call, per flop, and per byte of each operand. The rates are those that fit measured calls
// best.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "plan/operator_work.h"

namespace tessera {

/// Holds the rates of a class of calls, and what they were fitted to.
struct OperatorRate {
  std::array<double, OperatorWork::kKinds> seconds_per{};  // by OperatorWork::Kind; none is negative
  std::size_t num_calls = 0;                               // different calls that were measured
  double mean_error = 0.0;                                 // of the fit, as a part of a call's time
  double least_bytes = 0.0, most_bytes = 0.0;              // of the calls that were measured

  double seconds(const OperatorWork& work) const;
  /// Says whether a call is so far from all that were measured that its time is an extrapolation: by more than a factor
  /// of 2 in bytes.
  bool extrapolates(const OperatorWork& work) const;
};

/// The relative error that is assumed for a time that was not measured: one from a table of rates, or an extrapolation.
inline constexpr double kUnmeasuredError = 0.10;

/// Says how long a call takes, as a plan reckons it.
struct OperatorTime {
  double seconds = 0.0;
  bool is_extrapolated = false;  // the call is far from all that were measured, or has operands of other types
  double error = 0.0;            // the relative error of `seconds`: that of a fit, or an assumption
};

/// Describes a call that was measured.
struct MeasuredCall {
  OperatorWork work;
  double seconds;
};

/// Reports an operator without a rate.
class MissingRate : public Error {
 public:
  using Error::Error;
};

/// Holds a number that ranks of one node measured together (plan/measure/calibrate_ranks.h).
struct RankValue {
  std::string name;  // "all_gather.gb_per_s"
  double value = 0.0;
  std::string unit, source, date;
};

struct Calibration {
  std::string machine, program, date;             // the processor or GPU, version(), and the day as year-month-day
  int threads = 1;                                // 0: of a GPU
  std::map<std::string, OperatorRate> operators;  // by class
  double seconds_per_operator = 0.0;              // what a step takes for each operator besides the operator itself

  std::vector<RankValue> between_ranks;  // empty: one rank measured

  /// Returns the number of ranks that measured together.
  std::int64_t num_ranks() const;
  /// Returns the command that measures such a file: "mpirun -np 2 tessera bench calibrate".
  std::string command() const;
  /// Returns the value of that name. Throws Error, which names the file and the remedy, if there is none.
  double between_ranks_value(const std::string& name) const;
  /// Returns the class itself if it was measured. Otherwise returns the most similar one of the same operator, whose
  /// first operand has the same type. Returns an empty text if there is none.
  std::string measured_class(const std::string& name) const;

  /// Returns nothing if there is no measured_class.
  std::optional<OperatorTime> find_time(const RecordedOperator& call) const;
  /// Throws MissingRate, which names the class, the file and the remedy, if there is no measured_class.
  OperatorTime time_of(const RecordedOperator& call) const;

  /// The file that it was read from, for errors. It is no part of the file.
  std::filesystem::path path;
};

/// Returns the command that measures so many ranks on CPUs.
std::string calibrate_command(std::int64_t num_ranks);

/// Fits the rates of one class by least squares of the relative errors.
OperatorRate fit_rate(std::span<const MeasuredCall> calls);

/// Throws Error if the file is no calibration.
Calibration read_calibration(const std::filesystem::path& path);
void write_calibration(const Calibration& calibration, const std::filesystem::path& path);

}  // namespace tessera
