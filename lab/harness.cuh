// What all programs of the laboratory share: memory of the GPU, random numbers, verdicts, times, and the command line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda_check.h"

namespace lab {

/// The peaks of an NVIDIA H200, from which floors are computed: bytes per second of its memory and of NVLink in one
/// direction, and operations per second of its tensor cores in bfloat16.
inline constexpr double kMemoryRate = 4.8e12, kLinkRate = 450e9, kTensorRate = 989e12;

inline std::mt19937_64 random_bits;
inline bool all_right = true;

/// Seeds the random numbers of a check, and prints the seed. LAB_SEED repeats an earlier check.
inline void seed_random() {
  const char* given = std::getenv("LAB_SEED");
  const auto seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  random_bits.seed(seed);
}

/// Remembers whether everything was right, and returns what a line of output begins with.
inline const char* verdict(bool right) {
  all_right &= right;
  return right ? "ok  " : "FAIL";
}

template <typename T>
class Buffer {
 public:
  explicit Buffer(std::int64_t count) : count_(count) {
    TESSERA_CUDA(cudaMalloc(&data_, std::max<std::int64_t>(count, 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& numbers) : Buffer(static_cast<std::int64_t>(numbers.size())) {
    TESSERA_CUDA(cudaMemcpy(data_, numbers.data(), num_bytes(), cudaMemcpyHostToDevice));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  std::int64_t count() const { return count_; }
  std::size_t num_bytes() const { return count_ * sizeof(T); }
  /// Sets all bytes to 0xff: NaN in every format, and -1.
  void poison() const { TESSERA_CUDA(cudaMemset(data_, 0xff, num_bytes())); }
  void assign(const Buffer& from) const {
    TESSERA_CUDA(cudaMemcpy(data_, from.data_, num_bytes(), cudaMemcpyDeviceToDevice));
  }
  std::vector<T> on_host() const {
    std::vector<T> host(count_);
    TESSERA_CUDA(cudaMemcpy(host.data(), data_, num_bytes(), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_;
};

/// Waits for the GPU, and throws if a kernel has failed.
inline void finish_kernels() {
  TESSERA_CUDA(cudaGetLastError());
  TESSERA_CUDA(cudaDeviceSynchronize());
}

// --- Times ---------------------------------------------------------------------------------------------------------

/// Makes every timed thing run once only, for a profiler.
inline bool profiling = false;

/// Returns the milliseconds of `count` runs in the default stream.
inline double ms_of(const std::function<void()>& run, int count) {
  cudaEvent_t begin, end;
  float ms = 0;
  TESSERA_CUDA(cudaEventCreate(&begin));
  TESSERA_CUDA(cudaEventCreate(&end));
  TESSERA_CUDA(cudaEventRecord(begin));
  for (int i = 0; i < count; ++i) run();
  TESSERA_CUDA(cudaEventRecord(end));
  TESSERA_CUDA(cudaEventSynchronize(end));
  TESSERA_CUDA(cudaEventElapsedTime(&ms, begin, end));
  TESSERA_CUDA(cudaEventDestroy(begin));
  TESSERA_CUDA(cudaEventDestroy(end));
  TESSERA_CUDA(cudaGetLastError());
  return ms;
}

/// Returns the milliseconds of one run of each of `runs`, medians of some rounds. A GPU's clock falls under load and
/// rises under less. So all take turns, and each turn begins with runs that settle the clock and are not timed.
inline std::vector<double> times_in_turn(const std::vector<std::function<void()>>& runs) {
  constexpr int kRounds = 5;
  constexpr double kSettleMs = 100, kTimedMs = 30;
  std::vector<double> one_ms, medians;
  for (const auto& run : runs) {
    if (!profiling) run();  // the first run pays for what happens once
    one_ms.push_back(ms_of(run, 1));
  }
  if (profiling) return std::vector<double>(runs.size(), 1);
  std::vector<std::vector<double>> times(runs.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
      ms_of(runs[i], static_cast<int>(kSettleMs / one_ms[i]));
      const int count = std::max(1, static_cast<int>(kTimedMs / one_ms[i]));
      times[i].push_back(ms_of(runs[i], count) / count);
    }
  }
  for (std::vector<double>& of_one : times) {
    std::nth_element(of_one.begin(), of_one.begin() + kRounds / 2, of_one.end());
    medians.push_back(of_one[kRounds / 2]);
  }
  return medians;
}

/// Print a course's table, with one line per level. `floor_ms` is the least time that the hardware allows, and a line
/// shows it as a share of the level's time. `more` is a last column that the course may add.
inline void print_table_head(const char* unit, const char* more = "") {
  std::printf("  %-24s %-8s %9s %9s %9s  %s\n", "level", "correct", "ms", unit, "of floor", more);
}
inline void print_table_row(const std::string& level, bool right, double ms, double rate, double floor_ms,
                            const std::string& more = "") {
  std::printf("  %-24s %-8s %9.3f %9.1f %8.1f%%  %s\n", level.c_str(), right ? "yes" : "NO", ms, rate,
              100 * floor_ms / ms, more.c_str());
  std::fflush(stdout);
}

// --- The command line ----------------------------------------------------------------------------------------------

using Names = std::vector<std::string>;

/// Returns those of `all` that are named, or all if no name is given.
template <typename T>
std::vector<T> named(const std::vector<T>& all, const Names& names) {
  std::vector<T> found;
  for (const T& one : all) {
    if (names.empty() || std::find(names.begin(), names.end(), one.name) != names.end()) found.push_back(one);
  }
  TESSERA_CHECK(!found.empty() && (names.empty() || found.size() == names.size()), "there is no such level");
  return found;
}

struct Command {
  std::string name;
  std::function<void(const Names&)> run;
};

/// Runs the command that the command line names. Returns the exit status: 1 if something was wrong.
inline int run_command(int argc, char** argv, const std::vector<Command>& commands) {
  const std::string wanted = argc >= 2 ? argv[1] : "";
  const auto command =
      std::find_if(commands.begin(), commands.end(), [&](const Command& one) { return one.name == wanted; });
  if (command == commands.end()) {
    std::string all;
    for (const Command& one : commands) all += (all.empty() ? "" : "|") + one.name;
    std::fprintf(stderr, "usage: %s %s [name ...]\n", argv[0], all.c_str());
    return 2;
  }
  try {
    command->run(Names(argv + 2, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%s\n", all_right ? "all right" : "SOMETHING IS WRONG");
  return all_right ? 0 : 1;
}

}  // namespace lab
