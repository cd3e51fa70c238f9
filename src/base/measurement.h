// A number for people and for alarms, in the form that Prometheus has.
#pragma once

#include <map>
#include <string>

namespace tessera {

/// Describes a measured number.
struct Measurement {
  std::string name = {};  // ends in its unit: "gpu_temperature_celsius"; Prometheus shows it behind a prefix
  std::string help = {};
  std::map<std::string, std::string> labels = {};
  double value = 0.0;
  bool is_counter = false;  // it only rises, and its name ends in _total
};

}  // namespace tessera
