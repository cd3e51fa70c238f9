#include "train/job_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "model/model.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_of(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_job_config(toml, overrides).validate();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(JobConfig, FlavorThenArgsThenOverrides) {
  const JobConfig config = parse_job_config("[model]\nflavor = \"671B\"\n[model.args]\nn_layers = 4\n",
                                            {"--model.args.n_dense_layers=1", "--training.steps=7"});
  EXPECT_EQ(config.model.args.dim, 7168);
  EXPECT_EQ(config.model.args.n_layers, 4);
  EXPECT_EQ(config.model.args.n_dense_layers, 1);
  EXPECT_EQ(config.training.steps, 7);
  EXPECT_TRUE(config.model.args.route_norm);
}

TEST(JobConfig, PrintedConfigReadsBack) {
  JobConfig config =
      parse_job_config("", {"--model.flavor=16B", "--optimizer.lr=0.00022", "--job.description=a \"b\""});
  const std::string text = config_table(config).to_toml();
  JobConfig again = parse_job_config(text);
  EXPECT_EQ(config_table(again).to_toml(), text);
}

TEST(JobConfig, UnknownKeysNameTheNearest) {
  EXPECT_THAT(error_of("[training]\nstep = 3\n"),
              AllOf(HasSubstr("training.step"), HasSubstr("'training.steps'"), HasSubstr(":2")));
  EXPECT_THAT(error_of("", {"--optimiser.lr=1"}), HasSubstr("'optimizer.lr'"));
  EXPECT_THAT(error_of("[optimizer]\nseq_len = 3\n"), HasSubstr("'training.seq_len'"));
}

TEST(JobConfig, NumbersThatCannotWork) {
  EXPECT_THAT(error_of("", {"--model.args.top_k=9"}), AllOf(HasSubstr("top_k is 9"), HasSubstr("num_experts = 8")));
  EXPECT_THAT(error_of("", {"--model.args.n_expert_groups=3", "--model.args.n_limited_groups=1"}),
              HasSubstr("do not divide"));
  EXPECT_THAT(error_of("", {"--model.args.n_expert_groups=4", "--model.args.n_limited_groups=1"}),
              HasSubstr("hold only 2"));
  EXPECT_THAT(error_of("", {"--training.steps=0"}), HasSubstr("training.steps is 0"));
  EXPECT_THAT(error_of("", {"--training.local_batch_size=3", "--training.global_batch_size=4"}),
              HasSubstr("not a multiple"));
  EXPECT_THAT(error_of("", {"--model.args.qk_rope_head_dim=7"}), HasSubstr("even"));
  EXPECT_THAT(error_of("", {"--model.flavor=17B"}), AllOf(HasSubstr("17B"), HasSubstr("671B")));
  EXPECT_THAT(error_of("", {"--training.steps=many"}), HasSubstr("'many'"));
  EXPECT_THAT(error_of("[training]\nsteps = \"many\"\n"), HasSubstr("integer"));
  EXPECT_THAT(error_of("[training\n"), HasSubstr("config:1"));
  EXPECT_THAT(error_of("", {"--lr_scheduler.decay_type=step"}), HasSubstr("linear, sqrt, cosine"));
}

/// Specs only: no memory is taken.
ParameterCounts counts_of(const char* flavor) {
  const Model model(model_flavor(flavor), {.seq_len = 16});
  return model.count_parameters();
}

TEST(Flavors, ParameterCounts) {
  const ParameterCounts counts = counts_of("16B");
  EXPECT_EQ(counts.dense, 858'385'920);
  EXPECT_EQ(counts.sparse, 14'848'098'304);
  EXPECT_EQ(counts.active, 2'661'150'208);
  // TorchTitan counts 21.5 GFLOP per token at 8192.
  EXPECT_NEAR(flop_per_token(model_flavor("16B"), counts, 8192) * 1e-9, 21.5, 0.05);
  EXPECT_NEAR(static_cast<double>(counts_of("236B").total) * 1e-9, 236.0, 1.0);
  EXPECT_NEAR(static_cast<double>(counts_of("671B").total) * 1e-9, 671.0, 1.0);
}

}  // namespace
}  // namespace tessera
