// A number for people and alarms, as Prometheus has it.
#pragma once

#include <map>
#include <string>

namespace tessera {

struct Measurement {
  std::string name = {};  // with its unit: "gpu_temperature_celsius"; in Prometheus behind a prefix
  std::string help = {};
  std::map<std::string, std::string> labels = {};
  double value = 0.0;
  bool is_counter = false;  // only rises, and its name ends in _total
};

}  // namespace tessera
