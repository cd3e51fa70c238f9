#include "plan/measure/random_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/median.h"

namespace tessera {
namespace {

// After a pause, the clock of a GPU at its power limit takes this long to fall.
constexpr std::chrono::milliseconds kSettling{300};

}  // namespace

bool take_durations_of_replay(std::span<cuda::KernelRun> runs) {
  const auto first = std::ranges::find_if(runs, [](const cuda::KernelRun& run) { return run.region >= 0; });
  const auto without_copies = [](auto begin, auto end) {
    std::vector<cuda::KernelRun*> kernels;
    for (auto run = begin; run != end; ++run) {
      if (run->name != "copy") kernels.push_back(&*run);
    }
    return kernels;
  };
  // What the second step runs before its first operator lies between the two.
  const std::vector<cuda::KernelRun*> before = without_copies(runs.begin(), first),
                                      launched = without_copies(first, runs.end());
  const auto same_name = [](const cuda::KernelRun* a, const cuda::KernelRun* b) { return a->name == b->name; };
  const auto replayed = std::ranges::find_end(before, launched, same_name);
  if (replayed.empty()) return false;
  for (std::size_t i = 0; i < launched.size(); ++i) {
    launched[i]->end = launched[i]->begin + replayed[i]->end - replayed[i]->begin;
  }
  return true;
}

RandomSteps::RandomSteps(TrainingStep& step, const JobConfig& config, const Mesh& mesh)
    : step_(step),
      random_(static_cast<std::uint64_t>(config.debug.seed),
              stream_of(fmt::format("bench.tokens.{}", mesh.data_rank()))),
      vocab_size_(static_cast<double>(config.model.args.vocab_size)),
      is_alone_(mesh.degrees.num_ranks() == 1),
      batches_(step.max_started()),
      tokens_(static_cast<std::size_t>(config.micro_batch_size() * (config.training.seq_len + 1))) {
  for (std::vector<Batch>& of_step : batches_) {
    for (std::int64_t i = 0; i < config.micro_batches_per_step(mesh.num_data_ranks()); ++i) {
      of_step.push_back(step.make_batch());
    }
  }
}

void RandomSteps::start() {
  std::vector<Batch>& of_step = batches_[static_cast<std::size_t>(num_started_) % batches_.size()];
  for (Batch& batch : of_step) {
    for (std::int32_t& token : tokens_) {
      const double u = random_.uniform(num_drawn_++);
      token = static_cast<std::int32_t>(u * u * u * vocab_size_);
    }
    batch.fill(tokens_);
  }
  step_.start(++num_started_, of_step);
}

void RandomSteps::start_settled() {
  const auto begin = std::chrono::steady_clock::now();
  start();
  while (is_alone_ && std::chrono::steady_clock::now() - begin < kSettling) {
    start();
    step_.finish();
  }
}

RandomSteps::Timed RandomSteps::time_once() {
  StepRecord record;
  Timed timed;
  if (step_.device() == Device::kCuda) {
    start_settled();
    start();
    const auto begin = step_.finish().ended;
    timed.step_seconds = std::chrono::duration<double>(step_.finish().ended - begin).count();
    cuda::KernelProfile profile;
    start_settled();
    step_.set_record(&record);
    start();
    step_.set_record(nullptr);
    while (step_.num_started() > 0) step_.finish();
    std::vector<cuda::KernelRun> runs = profile.finish();
    take_durations_of_replay(runs);  // changes nothing if steps are no graphs, or have several streams
    timed.other_seconds = cuda::add_to_record(runs, record);
  } else {
    step_.set_record(&record);
    const auto begin = std::chrono::steady_clock::now();
    run();
    timed.step_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    step_.set_record(nullptr);
  }
  timed.operators = record.operators();
  return timed;
}

RandomSteps::Timed RandomSteps::time_operators(int num_steps) {
  std::vector<Timed> all;
  for (int i = 0; i < num_steps; ++i) all.push_back(time_once());
  const auto median_of = [&](const auto& seconds_of) {
    std::vector<double> seconds;
    for (const Timed& one : all) seconds.push_back(seconds_of(one));
    return median(seconds);
  };
  Timed result = all.front();
  result.step_seconds = median_of([](const Timed& one) { return one.step_seconds; });
  result.other_seconds = median_of([](const Timed& one) { return one.other_seconds; });
  for (std::size_t k = 0; k < result.operators.size(); ++k) {
    RecordedOperator& call = result.operators[k];
    call.seconds = median_of([&](const Timed& one) {
      TESSERA_CHECK(one.operators.size() == result.operators.size() && one.operators[k].name == call.name, "{}",
                    call.name);
      return one.operators[k].seconds;
    });
  }
  return result;
}

}  // namespace tessera
