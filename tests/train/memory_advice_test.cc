#include "train/memory_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/small_model.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class MemoryAdvice : public ::testing::Test {
 protected:
  static JobConfig config(const std::string& mode, int batch) {
    return parse_job_config(kSmallModel,
                            {"--activation_checkpoint.mode=" + mode, "--training.seq_len=64",
                             fmt::format("--training.local_batch_size={}", batch), "--training.global_batch_size=8"});
  }
  static MemoryPlan plan_of(const JobConfig& config) { return TrainingStep(config).memory_plan(); }
  static std::string advice(std::size_t available, std::size_t others = 0) {
    const JobConfig given = config("none", 8);
    return memory_advice(given, Device::kCpu, plan_of(given), others, available);
  }
};

TEST_F(MemoryAdvice, NamesTheNearestSettingsThatFit) {
  const std::size_t selective = plan_of(config("selective", 8)).total(), full = plan_of(config("full", 8)).total();
  ASSERT_LT(full, selective);
  EXPECT_THAT(advice(selective), AllOf(HasSubstr("weights"), HasSubstr("none"),
                                       HasSubstr("that fits: activation_checkpoint.mode = \"full\":"),
                                       HasSubstr("that fits: activation_checkpoint.mode = \"selective\":"),
                                       HasSubstr("mode = \"none\", training.local_batch_size = ")));
  // A byte less, and selective needs a smaller batch; what lies besides the step counts too.
  for (const std::string& text : {advice(selective - 1), advice(selective, 1)}) {
    EXPECT_THAT(text,
                AllOf(HasSubstr("mode = \"selective\", training.local_batch_size = 4, training.global_batch_size = 8"),
                      HasSubstr("mode = \"full\":")));
  }
}

TEST_F(MemoryAdvice, SaysThatNothingFits) {
  EXPECT_THAT(advice(1 << 10), AllOf(HasSubstr("no mode fits"), Not(HasSubstr("that fits:"))));
}

}  // namespace
}  // namespace tessera
