#include "compare/side_spec.h"

#include <algorithm>
#include <iomanip>
#include <span>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "compare/run_record.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_label_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
}

/// Returns the file's name and the values of the overrides, short enough for a folder's name:
/// "debugmodel-quantize.linear.mx".
std::string label_of_config(const std::string& config, const std::vector<std::string>& overrides) {
  std::string label = fs::path(config).stem().string();
  for (const std::string& override_text : overrides) {
    const std::size_t equals = override_text.find('=');
    label += "-" + override_text.substr(equals == std::string::npos ? 2 : equals + 1);
  }
  constexpr std::size_t kMaxLabel = 60;
  if (label.size() > kMaxLabel) {
    // A hash of the whole label keeps cut labels distinct.
    const auto hash = checksum(std::as_bytes(std::span(label.data(), label.size())));
    label = fmt::format("{}-{:08x}", label.substr(0, kMaxLabel - 9), hash >> 32);
  }
  std::replace_if(
      label.begin(), label.end(), [](char c) { return !is_label_character(c); }, '-');
  return label;
}

/// Returns the folder's name, or that of the parent if there are several folders.
std::string label_of_folders(const std::vector<std::string>& folders) {
  fs::path path = fs::absolute(folders.front()).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return (folders.size() > 1 ? path.parent_path() : path).filename().string();
}

/// Returns whether the text is an existing path. A text that is too long for a path is none.
bool is_path(const std::string& text) {
  std::error_code ignored;
  return fs::exists(text, ignored);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

/// Returns what a word that is no override probably should be: "--key value" with "=", or with more dashes.
std::string meant_instead(const std::string& before, const std::string& word) {
  if (before.starts_with("--") && before.find('=') == std::string::npos) {
    return fmt::format("; did you mean '{}={}'?", before, word);
  }
  const std::string key = word.substr(std::min(word.find_first_not_of('-'), word.size()));
  return key.find('.') < key.find('=') ? fmt::format("; did you mean '--{}'?", key) : "";
}

}  // namespace

SideSpec parse_side(const std::string& text) {
  SideSpec spec{.label = {}, .text = text, .runs = {}, .config = {}, .overrides = {}};
  const std::size_t label_end = text.find('=');
  const bool labelled =
      label_end != std::string::npos && label_end > 0 &&
      std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(label_end), is_label_character) &&
      !is_path(text);
  if (labelled) {
    spec.label = text.substr(0, label_end);
    spec.text = text.substr(label_end + 1);
  }
  require(spec.label != "." && spec.label != "..", "'{}' is no name for a side", spec.label);
  std::istringstream stream(spec.text);
  std::vector<std::string> words;
  for (std::string word; !(stream >> std::ws).eof(); words.push_back(word)) {
    require(static_cast<bool>(stream >> std::quoted(word)), "side '{}': a quote is not closed", spec.text);
  }
  require(!words.empty(), "'{}' names no runs; expected a folder, or a configuration (.toml)", text);
  if (words[0].ends_with(".toml")) {
    spec.config = words[0];
    spec.overrides.assign(words.begin() + 1, words.end());
    for (std::size_t i = 1; i < words.size(); ++i) {
      require(words[i].starts_with("--"), "side '{}': unexpected '{}'; expected --section.key=value{}", spec.text,
              words[i], meant_instead(words[i - 1], words[i]));
    }
    if (!labelled) spec.label = label_of_config(spec.config, spec.overrides);
    return spec;
  }
  const std::vector<std::string> folders =
      is_path(spec.text) ? std::vector<std::string>{spec.text} : split(spec.text, ',');
  for (const std::string& folder : folders) {
    for (const fs::path& run : find_runs(folder)) spec.runs.push_back(run);
  }
  if (!labelled) spec.label = label_of_folders(folders);
  return spec;
}

}  // namespace tessera
