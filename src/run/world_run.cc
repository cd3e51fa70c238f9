#include "run/world_run.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/stopwatch.h"
#include "checkpoint/checkpoint.h"
#include "comm/transport/counting_transport.h"
#include "comm/transport/thread_transport.h"
#include "data/prepare.h"
#include "run/trainer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int kRanksPerNode = 8;
/// Larger worlds have replicas, as real runs do. Shards of fewer numbers would be padding.
constexpr int kMostInReplica = 1024;

constexpr const char* kTinyRun = R"(
[model.args]
vocab_size = 258
dim = 32
inter_dim = 32
moe_inter_dim = 16
n_layers = 2
n_dense_layers = 1
n_heads = 2
num_experts = 8
num_shared_experts = 1
top_k = 2
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
[training]
local_batch_size = 2
seq_len = 8
steps = 1
num_threads = 1
[lr_scheduler]
warmup_steps = 1
[parallelism]
pipeline_parallel_degree = 2
expert_parallel_degree = 4
[checkpoint]
enable = true
[metrics]
enable_tensorboard = false
[comm]
init_timeout_seconds = 3600
train_timeout_seconds = 3600
)";

/// Groups whose messages come from the host on GPUs, too (Mesh). On CPUs "pp" has a pipeline's activations and their
/// gradients as well.
const std::set<std::string> kHostGroups = {"world", "dp_cp_tp", "model", "pp"};

void add(const SentMessages::Count& count, WorldPhase::Sent& sum) {
  sum.messages += count.messages;
  sum.bytes += count.bytes;
  sum.receivers += std::ssize(count.receivers);
}

void keep_larger(const WorldPhase::Sent& sent, WorldPhase::Sent& most) {
  most.messages = std::max(most.messages, sent.messages);
  most.bytes = std::max(most.bytes, sent.bytes);
  most.receivers = std::max(most.receivers, sent.receivers);
}

/// Collects the phases of all ranks.
class Phases {
 public:
  explicit Phases(WorldRun& run) : run_(run) {}

  /// Ends a phase on one rank. All ranks end the same phases in the same order.
  void end(const std::string& name, bool is_first_rank, SentMessages& sent) {
    WorldPhase own{.name = name, .seconds = 0.0, .host = {}, .tensors = {}};
    for (const auto& [axis, count] : sent.take()) add(count, kHostGroups.contains(axis) ? own.host : own.tensors);
    const std::lock_guard lock(mutex_);
    auto phase = std::ranges::find(run_.phases, name, &WorldPhase::name);
    if (phase == run_.phases.end()) phase = run_.phases.insert(phase, WorldPhase{own.name, 0.0, {}, {}});
    keep_larger(own.host, phase->host);
    keep_larger(own.tensors, phase->tensors);
    if (!is_first_rank) return;
    phase->seconds = since_.seconds();
    since_ = Stopwatch();
  }
  void restart_clock() { since_ = Stopwatch(); }

 private:
  WorldRun& run_;
  std::mutex mutex_;
  Stopwatch since_;
};

}  // namespace

WorldRun run_world(int num_ranks, const fs::path& folder, const WrapTransport& wrap) {
  require(num_ranks >= 8 && num_ranks % 8 == 0, "a world of {} ranks; expected a multiple of 8", num_ranks);
  require(num_ranks <= kMostInReplica || num_ranks % kMostInReplica == 0,
          "a world of {} ranks; above {}, expected a multiple of that", num_ranks, kMostInReplica);
  create_folder(folder);
  const auto num_sequences = static_cast<std::size_t>(num_ranks) * 2;
  write_whole_file(folder / "text.txt", std::string(64 * num_sequences + 4096, 'x'));
  data::PrepareOptions prepare;
  prepare.inputs = {folder / "text.txt"};
  prepare.tokenizer = "bytes";
  prepare.output = folder / "dataset";
  prepare.val_fraction = 0.0;
  data::prepare_dataset(prepare);
  JobConfig config = parse_job_config(kTinyRun);
  config.training.dataset_path = (folder / "dataset").string();
  config.job.dump_folder = (folder / "run").string();
  config.parallelism.data_parallel_replicate_degree = std::max(1, num_ranks / kMostInReplica);

  WorldRun run;
  run.num_ranks = num_ranks;
  Phases phases(run);
  const auto on_each_rank = [&](const std::function<void(Ranks&, SentMessages&)>& body) {
    phases.restart_clock();
    const auto run_rank = [&](std::unique_ptr<Transport> transport) {
      SentMessages sent;
      transport = std::make_unique<CountingTransport>(std::move(transport), sent);
      if (wrap) transport = wrap(std::move(transport));
      Ranks ranks(std::move(transport), Progress::Seconds(3600.0));
      body(ranks, sent);
    };
    run_rank_threads(num_ranks, run_rank, kRanksPerNode);
  };
  on_each_rank([&](Ranks& ranks, SentMessages& sent) {
    const bool is_first = ranks.rank() == 0;
    Trainer trainer(config, &ranks);
    phases.end("start", is_first, sent);
    trainer.set_step_callback([&](std::int64_t, const StepResult&) { phases.end("step", is_first, sent); });
    const volatile std::sig_atomic_t no_signal = 0;
    trainer.run(no_signal);
    phases.end("save", is_first, sent);
  });
  config.training.steps = 2;
  on_each_rank([&](Ranks& ranks, SentMessages& sent) {
    const Trainer trainer(config, &ranks);
    phases.end("resume", ranks.rank() == 0, sent);
  });
  const fs::path saved = checkpoint_path(folder / "run" / "checkpoint", 1);
  for (const auto& entry : fs::directory_iterator(saved)) {
    ++run.num_files;
    if (entry.path().filename() == kCheckpointManifestName) run.manifest_bytes = entry.file_size();
  }
  return run;
}

std::vector<std::string> phases_that_grow_too_fast(const WorldRun& smaller, const WorldRun& larger) {
  TESSERA_CHECK(smaller.num_ranks < larger.num_ranks && smaller.phases.size() == larger.phases.size());
  const double doublings = std::log2(larger.num_ranks) - std::log2(smaller.num_ranks);
  std::vector<std::string> result;
  for (std::size_t i = 0; i < smaller.phases.size(); ++i) {
    const auto before = static_cast<double>(smaller.phases[i].host.receivers);
    const auto after = static_cast<double>(larger.phases[i].host.receivers);
    const double per_doubling = before / std::log2(smaller.num_ranks);
    if (after - before > doublings * (per_doubling + 1.0)) result.push_back(larger.phases[i].name);
  }
  return result;
}

}  // namespace tessera
