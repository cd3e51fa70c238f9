#include "health/peer_rates.h"

#include <fmt/format.h>

#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/median.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tessera-active-rates";
constexpr int kPeerRatesVersion = 1;
constexpr const char* kSuffix = ".rates.json";

}  // namespace

void write_rates(const fs::path& folder, const std::string& node, const ActiveRates& rates) {
  create_folder(folder);
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kPeerRatesVersion},
                                       {"processor", rates.processor},
                                       {"gemm_tflops", rates.gemm_tflops},
                                       {"copy_gb_per_s", rates.copy_gb_per_s}};
  write_whole_file(folder / (node + kSuffix), json_text(json, 2) + "\n");
}

std::optional<ActiveRates> find_peer_rates(const fs::path& folder, const std::string& node,
                                           const std::string& processor) {
  constexpr std::size_t kFewest = 2;
  std::vector<double> gemm, copy;
  std::error_code missing;
  for (fs::directory_iterator entry(folder, missing), end; !missing && entry != end; entry.increment(missing)) {
    const std::string name = entry->path().filename().string();
    if (!name.ends_with(kSuffix) || name == node + kSuffix) continue;
    try {
      const std::optional<nlohmann::json> json = read_json_file(entry->path(), kFormat, kPeerRatesVersion);
      if (!json) continue;
      const JsonFields fields(*json, fmt::format("'{}'", entry->path().string()));
      if (fields.text("processor") != processor) continue;
      gemm.push_back(fields.number("gemm_tflops"));
      copy.push_back(fields.number("copy_gb_per_s"));
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a damaged file says nothing of a peer
    }
  }
  if (gemm.size() < kFewest) return std::nullopt;
  return ActiveRates{.processor = processor, .gemm_tflops = median(gemm), .copy_gb_per_s = median(copy)};
}

}  // namespace tessera
