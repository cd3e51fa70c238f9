// The configuration of a run in a test's folder.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "config/job_config.h"
#include "tests/data/support.h"

namespace tessera {

/// Parses the configuration of a run on the dataset that data::make_dataset writes. The run's folder is "outputs".
inline JobConfig run_config(const data::TemporaryFolder& scratch, std::string_view toml,
                            const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {fmt::format("--training.dataset_path={}", (scratch / "dataset").string()),
                                  fmt::format("--job.dump_folder={}", (scratch / "outputs").string())};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_job_config(toml, all);
}

}  // namespace tessera
