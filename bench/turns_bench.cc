// Measures what running two passes in turns hides (ep/turns.h), against passes one by one.
//   bench_turns [--delays 0,1,2,4] [--steps 5]
// Experts lie on two ranks. There is no pipeline, or one of two stages with DualPipeV. Threads are the ranks. Every
// message between experts' ranks is delayed, as by a network between nodes. Other messages are not. The fastest of all
// steps counts, and both sides take turns.
#include <CLI/CLI.hpp>
#include <cmath>
#include <map>

#include "base/stopwatch.h"
#include "comm/ranks.h"
#include "comm/transport/thread_transport.h"
#include "step/training_step.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"
#include "tests/comm/delayed_transport.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

/// The tests' model with more layers, and wide enough to compute for a millisecond between two calls.
const std::vector<std::string> kOverrides = {"--model.args.dim=512",
                                             "--model.args.n_layers=8",
                                             "--model.args.inter_dim=512",
                                             "--model.args.moe_inter_dim=256",
                                             "--training.seq_len=128",
                                             "--training.local_batch_size=8",
                                             "--parallelism.expert_parallel_degree=2",
                                             "--activation_checkpoint.mode=selective"};
constexpr std::size_t kNumMicroBatches = 8;

/// What is measured: a mesh, and the key that has its passes run in turns.
struct Case {
  const char* name;
  int num_ranks;
  std::vector<std::string> overrides;
  const char* key;
};

/// Delays the messages between experts' ranks by up to twice `ms`, and no others.
class SlowExperts : public ForwardingTransport {
 public:
  SlowExperts(std::unique_ptr<Transport> transport, double ms) : ForwardingTransport(std::move(transport)), ms_(ms) {}

  std::unique_ptr<Transport> split(int color, int order, std::string_view axis) override {
    std::unique_ptr<Transport> part = transport().split(color, order, axis);
    if (axis != "ep" || ms_ == 0.0) return part;
    return std::make_unique<comm_test::DelayedTransport>(std::move(part), 1, 2.0 * ms_);
  }

 private:
  double ms_;
};

/// Returns the time of the fastest step, in seconds.
double measure(const Case& measured, double delay_ms, bool in_turns, int num_steps) {
  double least = HUGE_VAL;
  run_rank_threads(measured.num_ranks, [&](std::unique_ptr<Transport> transport) {
    set_num_threads(1);
    Ranks ranks(std::make_unique<SlowExperts>(std::move(transport), delay_ms), Progress::Seconds(60.0));
    std::vector<std::string> overrides = kOverrides;
    overrides.insert(overrides.end(), measured.overrides.begin(), measured.overrides.end());
    overrides.push_back(fmt::format("--parallelism.{}={}", measured.key, in_turns));
    const JobConfig config = parse_job_config(kSmallModel, overrides);
    const auto mesh = std::make_shared<Mesh>(ranks.world(), resolve(config.mesh_degrees(), measured.num_ranks));
    TrainingStep step(config, mesh, Device::kCpu, nullptr);
    step.allocate();
    const Philox random(1, stream_of("bench.turns"));
    std::vector<Batch> batches;
    for (std::size_t i = 0; i < kNumMicroBatches; ++i) {
      batches.push_back(step.make_batch());
      std::vector<std::int32_t> tokens;
      for (std::int64_t t = 0; t < batches[i].num_seqs() * (config.training.seq_len + 1); ++t) {
        const std::uint32_t word = random.words(static_cast<std::uint64_t>(t))[0];
        tokens.push_back(static_cast<std::int32_t>(word % static_cast<std::uint32_t>(config.model.args.vocab_size)));
      }
      batches[i].fill(tokens);
    }
    for (int i = 1; i <= num_steps; ++i) {
      const Stopwatch watch;
      step.run(i, batches);
      if (ranks.rank() == 0) least = std::min(least, watch.seconds());
    }
  });
  return least;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  std::vector<double> delays = {0.0, 1.0, 2.0, 4.0};
  int num_steps = 5;
  CLI::App app("Measures what running two passes in turns hides.");
  app.add_option("--delays", delays, "mean delays of a message, in ms")->delimiter(',');
  app.add_option("--steps", num_steps, "steps per measurement");
  CLI11_PARSE(app, argc, argv);
  const Case cases[] = {
      {"no pipeline",
       2,
       {"--training.global_batch_size=16", "--training.local_batch_size=1"},
       "expert_parallel_overlap"},
      {"DualPipeV",
       4,
       {"--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=DualPipeV"},
       "pipeline_parallel_expert_parallel_overlap"}};
  for (const Case& measured : cases) {
    fmt::print("{:<12} {:>9} {:>16} {:>16} {:>10}\n", measured.name, "delay", "one by one", "in turns", "saved");
    for (const double delay : delays) {
      std::map<bool, double> least = {{false, HUGE_VAL}, {true, HUGE_VAL}};
      for (int round = 0; round < 3; ++round) {
        for (auto& [in_turns, seconds] : least) {
          seconds = std::min(seconds, measure(measured, delay, in_turns, num_steps));
        }
      }
      fmt::print("{:>19.1f} ms {:>13.0f} ms {:>13.0f} ms {:>8.1f} %\n", delay, 1e3 * least[false], 1e3 * least[true],
                 100.0 * (1.0 - least[true] / least[false]));
    }
  }
}
