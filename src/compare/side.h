// One side of a comparison: runs that have ended and differ only in their seeds. The functions check whether sides may
// be compared.
#pragma once

#include <string>
#include <vector>

#include "compare/run_record.h"

namespace tessera {

struct Side {
  std::string label;
  std::vector<RunRecord> runs;  // by seed
};

/// Sorts the runs by seed. Throws Error if a run is neither finished nor broken, if it was changed on its way, or if a
/// seed occurs twice. Also throws Error if the runs differ in more than seed and folder, and names every such key with
/// its values.
Side make_side(std::string label, std::vector<RunRecord> runs);

/// Throws Error if the sides differ in more than precision, and names every such key with its values. Such keys are
/// those of the model, the data, the length of the run and the optimizer. Also throws Error if they differ in their
/// seeds.
void require_comparable(const std::vector<Side>& sides);

/// Throws Error if a run of the baseline broke down.
void require_sound_baseline(const Side& baseline);

/// Throws Error if the run was resumed with another configuration.
void require_unchanged(const RunRecord& run);

/// Throws Error if the two runs differ in anything but folders: in their configuration, including the seed, or in the
/// data.
void require_same_run(const RunRecord& found, const RunRecord& expected);

/// Returns whether runs on two sides may have different values of a key of the configuration.
bool may_differ_between_sides(const std::string& key);

/// Returns whether a difference's key is of the program or the machine.
bool is_of_machine(const std::string& key);

/// Describes a key of the configuration, the program or the machine, and its value on each side.
struct Difference {
  std::string key;
  std::vector<std::string> values;
};

/// Returns what the sides differ in, without folders and seeds.
std::vector<Difference> differences_of(const std::vector<Side>& sides);

}  // namespace tessera
