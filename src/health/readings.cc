#include "health/readings.h"

#include <algorithm>
#include <charconv>
#include <fstream>

namespace tessera {

namespace fs = std::filesystem;

fs::path Sysroot::operator/(std::string_view path) const { return root_ / fs::path(path).relative_path(); }

std::optional<std::string> Sysroot::text(std::string_view path) const {
  std::ifstream file(*this / path, std::ios::binary);
  if (!file) return std::nullopt;
  constexpr std::size_t kLongest = std::size_t{64} << 10;
  std::string text(kLongest, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return std::nullopt;
  text.resize(static_cast<std::size_t>(file.gcount()));
  constexpr std::string_view kSpace(" \t\n\r\0", 5);
  const std::size_t begin = text.find_first_not_of(kSpace), end = text.find_last_not_of(kSpace);
  return begin == text.npos ? "" : text.substr(begin, end - begin + 1);
}

std::optional<std::int64_t> Sysroot::number(std::string_view path) const {
  const std::optional<std::string> text = this->text(path);
  if (!text) return std::nullopt;
  const bool is_hexadecimal = text->starts_with("0x");
  std::int64_t value = 0;
  const char* begin = text->data() + (is_hexadecimal ? 2 : 0);
  const auto [end, error] = std::from_chars(begin, text->data() + text->size(), value, is_hexadecimal ? 16 : 10);
  return error == std::errc() ? std::optional(value) : std::nullopt;
}

bool Sysroot::exists(std::string_view path) const {
  std::error_code missing;
  return fs::exists(*this / path, missing);
}

std::vector<std::string> Sysroot::names(std::string_view folder) const {
  std::vector<std::string> names;
  std::error_code missing;
  for (fs::directory_iterator entry(*this / folder, missing), end; !missing && entry != end; entry.increment(missing)) {
    names.push_back(entry->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

double CounterRates::per_minute(const std::string& counter, double value, double now) {
  constexpr double kMinute = 60.0;
  std::deque<Sample>& samples = seen_[counter];
  if (!samples.empty() && (value < samples.back().value || now <= samples.back().time)) samples.clear();
  samples.push_back({value, now});
  while (samples.size() > 2 && samples[1].time <= now - kMinute) samples.pop_front();
  return (value - samples.front().value) * kMinute / std::max(kMinute, now - samples.front().time);
}

std::int64_t CounterRises::rise(const std::string& counter, std::int64_t value) {
  std::int64_t& first = first_.try_emplace(counter, value).first->second;
  first = std::min(first, value);
  return value - first;
}

bool KnownGood::has_failed(const std::string& part, bool is_well) {
  if (is_well) parts_.insert(part);
  return !is_well && parts_.contains(part);
}

std::vector<std::string> KnownGood::missing(const std::set<std::string>& there) const {
  std::vector<std::string> missing;
  std::ranges::set_difference(parts_, there, std::back_inserter(missing));
  return missing;
}

void HeldEvents::add(Finding finding, double now) {
  const std::pair key(finding.signal, finding.part);
  events_[key] = {std::move(finding), now};
}

void HeldEvents::append_to(std::vector<Finding>& findings, double now) {
  std::erase_if(events_, [&](const auto& event) { return now - event.second.second > kHoldSeconds; });
  for (const auto& [key, event] : events_) findings.push_back(event.first);
}

}  // namespace tessera
