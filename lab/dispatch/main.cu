// Compares the levels of dispatch with a plain host plan, byte by byte, and measures their time. All ranks are regions
// of one GPU's memory.
//   dispatch check [level ...]   many sizes and routings, and CUDA graphs; exits with 1 if one is wrong
//   dispatch bench [level ...]   all levels in turn
//   dispatch plan                the plan and the way of the rows, on the CPU only
#include <numeric>
#include <string>
#include <vector>

#include "../harness.cuh"
#include "level.cuh"

namespace lab {
namespace {

using Ints = std::vector<std::int32_t>;

// --- Routing, and what must come of it -------------------------------------------------------------------------------

enum class Routing { kUniform, kSkewed, kOneRank, kHoles };
constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kSkewed, Routing::kOneRank, Routing::kHoles};

/// Returns expert_ids_PtK. The choices of a token differ. kSkewed prefers the first experts, kOneRank sends what it can
/// to the last rank, and kHoles leaves out choices and whole tokens.
Ints make_routing(const Sizes& s, Routing routing) {
  Ints ids;
  std::vector<double> keys(s.experts);
  Ints order(s.experts);
  std::uniform_real_distribution<double> uniform;
  for (int token = 0; token < s.ranks * s.tokens; ++token) {
    for (int x = 0; x < s.experts; ++x) {
      keys[x] = uniform(random_bits);
      if (routing == Routing::kSkewed) keys[x] *= 1 + 4.0 * x / s.experts;
      if (routing == Routing::kOneRank && s.rank_of(x) == s.ranks - 1) keys[x] -= 1;
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + s.top_k, order.end(),
                      [&](int a, int b) { return keys[a] < keys[b]; });
    const bool no_choice = routing == Routing::kHoles && random_bits() % 5 == 0;
    for (int k = 0; k < s.top_k; ++k) {
      const bool hole = no_choice || (routing == Routing::kHoles && random_bits() % 4 == 0);
      ids.push_back(hole ? -1 : order[k]);
    }
  }
  return ids;
}

/// What a rank must have: the token (source rank · tokens + t) of each row, and where each expert's rows begin.
struct Expected {
  Ints token_of_row, offsets_e1;
};

/// Computes what a rank must have from the definition.
Expected expect(const Sizes& s, const Ints& ids_PtK, int rank) {
  Expected expected;
  for (int local = 0; local < s.experts_per_rank(); ++local) {
    expected.offsets_e1.push_back(static_cast<int>(expected.token_of_row.size()));
    for (std::size_t slot = 0; slot < ids_PtK.size(); ++slot) {
      if (ids_PtK[slot] == rank * s.experts_per_rank() + local) {
        expected.token_of_row.push_back(static_cast<int>(slot) / s.top_k);
      }
    }
  }
  expected.offsets_e1.push_back(static_cast<int>(expected.token_of_row.size()));
  return expected;
}

std::string describe(const Sizes& s) {
  char text[160];
  std::snprintf(text, sizeof(text), "%d ranks, %d tokens each, %d experts, top-%d, rows of %d bytes", s.ranks, s.tokens,
                s.experts, s.top_k, s.row_units * 16);
  return text;
}

std::vector<Sizes> sizes_to_check() {
  std::vector<Sizes> all = {
      {.ranks = 1, .tokens = 1, .experts = 1, .top_k = 1, .row_units = 1},         // the smallest
      {.ranks = 1, .tokens = 100, .experts = 8, .top_k = 3, .row_units = 5},       // one rank has all experts
      {.ranks = 8, .tokens = 7, .experts = 8, .top_k = 8, .row_units = 33},        // fewer tokens than chunks
      {.ranks = 2, .tokens = 513, .experts = 64, .top_k = 6, .row_units = 256},    // the 16B model's rows
      {.ranks = 8, .tokens = 300, .experts = 256, .top_k = 8, .row_units = 129},   // one unit more than a turn
      {.ranks = 4, .tokens = 1000, .experts = 32, .top_k = 32, .row_units = 128},  // as many choices as lanes
      {.ranks = 8, .tokens = 257, .experts = 1024, .top_k = 2, .row_units = 7},  // more experts than a block's threads
  };
  for (int i = 0; i < 4; ++i) {
    const auto random = [](int most) { return 1 + static_cast<int>(random_bits() % most); };
    const int ranks = random(8), experts = ranks * random(20);
    all.push_back({ranks, random(700), experts, random(std::min(experts, 32)), random(200)});
  }
  return all;
}

// --- The plan on the CPU ---------------------------------------------------------------------------------------------

/// Walks the plan of plan.cuh and the records of level 3 with tokens' numbers in place of their rows.
bool walk(const Sizes& s, const Ints& ids_PtK) {
  Ints counts_PE(s.ranks * s.experts), index_PtK(ids_PtK.size());
  for (std::size_t slot = 0; slot < ids_PtK.size(); ++slot) {
    const int p = static_cast<int>(slot) / s.slots();
    if (ids_PtK[slot] >= 0) index_PtK[slot] = counts_PE[p * s.experts + ids_PtK[slot]]++;
  }
  bool right = true;
  std::vector<Expected> expected;
  std::vector<Ints> rows;
  for (int rank = 0; rank < s.ranks; ++rank) {
    expected.push_back(expect(s, ids_PtK, rank));
    rows.emplace_back(expected.back().token_of_row.size(), -1);
    for (int i = 0; i <= s.experts_per_rank(); ++i) {
      right &= offset_of(counts_PE.data(), s, rank, i) == expected[rank].offsets_e1[i];
    }
  }
  std::vector<Ints> records(s.ranks, Ints(ids_PtK.size(), -1));
  for (std::size_t slot = 0; slot < ids_PtK.size(); ++slot) {
    if (ids_PtK[slot] < 0) continue;
    const int token = static_cast<int>(slot) / s.top_k, k = static_cast<int>(slot) % s.top_k;
    const int expert = ids_PtK[slot], rank = s.rank_of(expert);
    const int row = first_row(counts_PE.data(), s, token / s.tokens, expert) + index_PtK[slot];
    if (row < 0 || row >= static_cast<int>(rows[rank].size())) return false;
    right &= expected[rank].token_of_row[row] == token;
    records[rank][slot] = row;
    if (crosses(ids_PtK.data() + token * s.top_k, s, k)) rows[rank][row] = token;
  }
  for (int rank = 0; rank < s.ranks; ++rank) {
    for (int token = 0; token < s.ranks * s.tokens; ++token) {
      int arrived = -1;
      for (int k = 0; k < s.top_k; ++k) {
        const int row = records[rank][token * s.top_k + k];
        if (row < 0) continue;
        if (arrived >= 0) right &= std::exchange(rows[rank][row], rows[rank][arrived]) == -1;
        if (arrived < 0) arrived = row;
      }
    }
    right &= rows[rank] == expected[rank].token_of_row;
  }
  return right;
}

void plan(const Names&) {
  seed_random();
  for (const Sizes& sizes : sizes_to_check()) {
    for (const Routing routing : kRoutings) {
      const bool right = walk(sizes, make_routing(sizes, routing));
      std::printf("%s plan: %s, routing %d\n", verdict(right), describe(sizes).c_str(), static_cast<int>(routing));
    }
  }
}

// --- On the GPU ------------------------------------------------------------------------------------------------------

__device__ uint4 unit_of(std::uint64_t index) {
  const std::uint64_t a = index * 0x9e3779b97f4a7c15u, b = (index ^ index >> 7) * 0xc2b2ae3d27d4eb4fu;
  return {static_cast<unsigned>(a), static_cast<unsigned>(a >> 32), static_cast<unsigned>(b),
          static_cast<unsigned>(index)};
}

__global__ void fill_units(uint4* out, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    out[i] = unit_of(i);
  }
}

/// Counts units that differ from their token's. Rows without a token (-1) must still be poisoned.
__global__ void count_wrong(const uint4* rows, const std::int32_t* token_of_row, std::int64_t num_rows, int row_units,
                            unsigned long long* wrong) {
  unsigned long long mine = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < num_rows * row_units;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t token = token_of_row[i / row_units];
    const uint4 poison{~0u, ~0u, ~0u, ~0u}, got = rows[i];
    const uint4 want = token < 0 ? poison : unit_of(token * row_units + i % row_units);
    mine += got.x != want.x || got.y != want.y || got.z != want.z || got.w != want.w;
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

struct Level {
  std::string name;
  void (*run)(const Ranks&, cudaStream_t);
  bool once_per_rank;  // a token crosses once per rank
  bool needs_host;
};

const std::vector<Level> kLevels = {{"1_row_per_expert", dispatch_1_row_per_expert, false, true},
                                    {"2_device_plan", dispatch_2_device_plan, false, false},
                                    {"3_row_per_rank", dispatch_3_row_per_rank, true, false},
                                    {"4_one_kernel", dispatch_4_one_kernel, true, false}};

/// Holds the memory of all ranks. Rank p's part of each buffer is the p-th.
class Case {
 public:
  /// Gives every rank room for a few rows more than it can get.
  explicit Case(const Sizes& sizes)
      : sizes_(with_room(sizes)),
        x_(std::int64_t{sizes_.ranks} * sizes_.tokens * sizes_.row_units),
        rows_(std::int64_t{sizes_.ranks} * sizes_.max_rows * sizes_.row_units),
        expert_ids_(sizes_.ranks * sizes_.slots()),
        offsets_(sizes_.ranks * (sizes_.experts_per_rank() + 1)),
        index_(expert_ids_.count()),
        row_(expert_ids_.count()),
        base_(sizes_.ranks * sizes_.experts),
        records_(expert_ids_.count() * sizes_.ranks),
        counts_(std::int64_t{2} * sizes_.ranks * sizes_.ranks * sizes_.experts),
        counted_(sizes_.ranks * sizes_.ranks),
        stored_(sizes_.ranks * sizes_.ranks),
        states_(sizes_.ranks) {
    fill_units<<<1024, 256>>>(x_.get(), x_.count());
    TESSERA_CUDA(cudaMemset(states_.get(), 0, states_.num_bytes()));
    TESSERA_CUDA(cudaMemset(counted_.get(), 0, counted_.num_bytes()));
    TESSERA_CUDA(cudaMemset(stored_.get(), 0, stored_.num_bytes()));
    ranks_.sizes = sizes_;
    for (int p = 0; p < sizes_.ranks; ++p) {
      ranks_.of[p] = {.x_tD = part(x_, p),
                      .expert_ids_tK = part(expert_ids_, p),
                      .offsets_e1 = part(offsets_, p),
                      .index_tK = part(index_, p),
                      .base_E = part(base_, p),
                      .row_tK = part(row_, p),
                      .state = part(states_, p),
                      .window = {.rows = part(rows_, p),
                                 .record_PtK = part(records_, p),
                                 .counts_2PE = part(counts_, p),
                                 .counted_P = part(counted_, p),
                                 .stored_P = part(stored_, p)}};
    }
  }

  const Sizes& sizes() const { return sizes_; }
  void route(const Ints& ids_PtK) {
    ids_PtK_ = ids_PtK;
    TESSERA_CUDA(cudaMemcpy(expert_ids_.get(), ids_PtK.data(), expert_ids_.num_bytes(), cudaMemcpyHostToDevice));
  }
  void run(const Level& level, cudaStream_t stream = nullptr) const { level.run(ranks_, stream); }

  /// Poisons all that a dispatch writes, except what lasts from call to call.
  void poison() const {
    rows_.poison();
    records_.poison();
    counts_.poison();
    for (const Buffer<std::int32_t>* buffer : {&offsets_, &index_, &row_, &base_}) buffer->poison();
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  /// Returns whether all rows and offsets are those that the definition gives.
  bool is_right() const {
    finish_kernels();
    Ints token_of_row, offsets;
    for (int rank = 0; rank < sizes_.ranks; ++rank) {
      Expected expected = expect(sizes_, ids_PtK_, rank);
      expected.token_of_row.resize(sizes_.max_rows, -1);
      token_of_row.insert(token_of_row.end(), expected.token_of_row.begin(), expected.token_of_row.end());
      offsets.insert(offsets.end(), expected.offsets_e1.begin(), expected.offsets_e1.end());
    }
    const Buffer<std::int32_t> tokens(token_of_row);
    const Buffer<unsigned long long> wrong(std::vector<unsigned long long>{0});
    count_wrong<<<1024, 256>>>(rows_.get(), tokens.get(), tokens.count(), sizes_.row_units, wrong.get());
    finish_kernels();
    return wrong.on_host().front() == 0 && offsets_.on_host() == offsets;
  }

 private:
  static Sizes with_room(Sizes sizes) {
    sizes.max_rows = sizes.ranks * sizes.tokens * std::min(sizes.top_k, sizes.experts_per_rank()) + 3;
    return sizes;
  }
  template <typename T>
  T* part(const Buffer<T>& buffer, int p) const {
    return buffer.get() + buffer.count() / sizes_.ranks * p;
  }

  Sizes sizes_;
  Buffer<uint4> x_, rows_;
  Buffer<std::int32_t> expert_ids_, offsets_, index_, row_, base_, records_, counts_;
  Buffer<std::uint64_t> counted_, stored_;
  Buffer<State> states_;
  Ranks ranks_;
  Ints ids_PtK_;
};

/// Captures a dispatch into a graph, and replays it with other choices than those of the capture.
bool replays(Case& c, const Level& level) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  TESSERA_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  TESSERA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  c.run(level, stream);
  TESSERA_CUDA(cudaStreamEndCapture(stream, &graph));
  TESSERA_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  bool right = true;
  for (const Routing routing : kRoutings) {
    c.route(make_routing(c.sizes(), routing));
    c.poison();
    TESSERA_CUDA(cudaGraphLaunch(executable, stream));
    right &= c.is_right();
  }
  TESSERA_CUDA(cudaGraphExecDestroy(executable));
  TESSERA_CUDA(cudaGraphDestroy(graph));
  TESSERA_CUDA(cudaStreamDestroy(stream));
  return right;
}

void check(const Names& names) {
  seed_random();
  const std::vector<Level> levels = named(kLevels, names);
  for (const Sizes& sizes : sizes_to_check()) {
    Case c(sizes);
    for (const Routing routing : kRoutings) {
      c.route(make_routing(c.sizes(), routing));
      for (const Level& level : levels) {
        c.poison();
        c.run(level);
        std::printf("%s %-18s %s, routing %d\n", verdict(c.is_right()), level.name.c_str(), describe(sizes).c_str(),
                    static_cast<int>(routing));
        std::fflush(stdout);
      }
    }
    for (const Level& level : levels) {
      if (level.needs_host) continue;
      std::printf("%s %-18s %s, as a graph\n", verdict(replays(c, level)), level.name.c_str(), describe(sizes).c_str());
    }
  }
}

/// Returns how many rows are sent to any rank, also to their own, and how many of these to another rank.
std::pair<double, double> count_crossings(const Sizes& s, const Ints& ids_PtK, bool once_per_rank) {
  double all = 0, remote = 0;
  for (std::size_t slot = 0; slot < ids_PtK.size(); ++slot) {
    const int token = static_cast<int>(slot) / s.top_k, k = static_cast<int>(slot) % s.top_k;
    if (ids_PtK[slot] < 0 || (once_per_rank && !crosses(ids_PtK.data() + token * s.top_k, s, k))) continue;
    ++all;
    remote += s.rank_of(ids_PtK[slot]) != token / s.tokens;
  }
  return {all, remote};
}

void bench(const Names& names) {
  const Sizes all[] = {{.ranks = 8, .tokens = 4096, .experts = 256, .top_k = 8, .row_units = 896},
                       {.ranks = 8, .tokens = 16384, .experts = 64, .top_k = 6, .row_units = 256}};
  const std::vector<Level> levels = named(kLevels, names);
  for (const Sizes& sizes : all) {
    Case c(sizes);
    const Ints ids = make_routing(c.sizes(), Routing::kUniform);
    c.route(ids);
    std::vector<bool> right;
    std::vector<std::function<void()>> runs;
    for (const Level& level : levels) {
      c.poison();
      c.run(level);
      right.push_back(c.is_right());
      verdict(right.back());
      runs.push_back([&c, &level] { c.run(level); });
    }
    const std::vector<double> ms = times_in_turn(runs);
    std::printf("%s\n", describe(sizes).c_str());
    print_table_head("GB/s", "to other ranks, per rank, and its floor at 450 GB/s");
    const double row_bytes = sizes.row_units * 16.0, tokens = sizes.ranks * sizes.tokens;
    const double rows = count_crossings(sizes, ids, false).first;
    for (std::size_t i = 0; i < levels.size(); ++i) {
      const auto [crossing, remote] = count_crossings(sizes, ids, levels[i].once_per_rank);
      // Tokens are read, rows are stored, and the rows that did not cross are read and written again.
      const double bytes = (tokens + crossing + 2 * (rows - crossing)) * row_bytes;
      const double remote_bytes = remote * row_bytes / sizes.ranks;
      char more[80];
      std::snprintf(more, sizeof(more), "%.0f MB, %.3f ms", remote_bytes * 1e-6, remote_bytes / kLinkRate * 1e3);
      print_table_row(levels[i].name, right[i], ms[i], bytes / ms[i] * 1e-6, bytes / kMemoryRate * 1e3, more);
    }
  }
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  return lab::run_command(argc, argv, {{"check", lab::check}, {"bench", lab::bench}, {"plan", lab::plan}});
}
