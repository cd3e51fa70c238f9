// The training state of a GPU. Skipped if there is no GPU.
#include "run/state/training_state.h"

#include <gtest/gtest.h>

#include "step/training_step.h"
#include "tests/step/small_model.h"

namespace tessera {
namespace {

/// The engine that copies to the host does all that a stream has ready before it turns to another stream. A step has
/// such copies, too, and events behind them.
TEST(TrainingState, OtherCopiesToTheHostDoNotWaitForAllOfIt) {
  if (!cuda::available()) GTEST_SKIP() << cuda::why_unavailable();
  const JobConfig config = parse_job_config(kSmallModel, {"--model.args.vocab_size=129280", "--model.args.dim=512"});
  TrainingStep step(config, nullptr, Device::kCuda);
  step.allocate();
  TrainingState state(step.model().parameters());
  ASSERT_GT(state.num_bytes(), std::size_t{3} << 29);
  Buffer copy = Buffer::pinned(state.num_bytes()), number = Buffer::pinned(sizeof(float));
  const cuda::Stream other;
  const auto copy_number = [&](cuda::Event& done) {
    cuda::copy_bytes(other, step.model().parameters().all_masters().raw(), number.size(), number.data());
    done.record(other);
  };
  cuda::Event before, beside, copied;
  copy_number(before);
  ASSERT_EQ(before.wait(), nullptr);
  state.start_copy(copy.data(), copied);
  copy_number(beside);
  ASSERT_EQ(beside.wait(), nullptr);
  ASSERT_EQ(copied.wait(), nullptr);
  EXPECT_GT(copied.seconds_since(beside), 0.0);
  EXPECT_EQ(state.checksums_of_copy({copy.data(), copy.size()}).all, state.read().all);
}

}  // namespace
}  // namespace tessera
