// Saves on one mesh and resumes on another, with threads as ranks. The numbers and the losses must be the same.
#include "run/state/checkpointer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <mutex>
#include <span>
#include <thread>

#include "checkpoint/shards.h"
#include "data/load_tokenizer.h"
#include "run/state/saved_model.h"
#include "run/trainer.h"
#include "tests/comm/ranks.h"
#include "tests/data/support.h"
#include "tests/full_disk.h"
#include "tests/run/run_config.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using comm_test::on_ranks;
using data::TemporaryFolder;

struct MeshShape {
  const char* name;
  int num_ranks;
  MeshDegrees degrees;
  const char* schedule = "1F1B";  // the schedule of a pipeline
};

JobConfig checkpoint_config(const TemporaryFolder& scratch, const std::vector<std::string>& overrides = {}) {
  static const char* const kToml = R"(
[model.args]
vocab_size = 258
dim = 32
inter_dim = 48
moe_inter_dim = 16
n_layers = 3
n_dense_layers = 1
n_heads = 2
num_experts = 8
num_shared_experts = 1
top_k = 2
q_lora_rank = 20
kv_lora_rank = 24
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 16
load_balance_coeff = 0.01
num_mtp_modules = 1
[training]
local_batch_size = 1
global_batch_size = 12
seq_len = 16
steps = 6
num_threads = 1
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 3
)";
  return run_config(scratch, kToml, overrides);
}

class Checkpoints : public ::testing::Test {
 protected:
  Checkpoints() { data::make_dataset(scratch_, 400, 3000, 0.1); }
  fs::path outputs() const { return scratch_ / "outputs"; }
  fs::path checkpoint(std::int64_t step) const { return checkpoint_path(outputs() / "checkpoint", step); }

  /// Trains and returns the total losses by step. If `last_step` is above 0, the run gets a signal after it.
  std::map<std::int64_t, double> train(const MeshShape& mesh, const std::vector<std::string>& overrides = {},
                                       std::int64_t last_step = 0) const {
    std::vector<std::string> all = overrides;
    all.push_back(fmt::format("--parallelism.pipeline_parallel_schedule={}", mesh.schedule));
    for (const auto& [key, degree] : {std::pair{"data_parallel_replicate", mesh.degrees.dp_replicate},
                                      {"tensor_parallel", mesh.degrees.tp},
                                      {"context_parallel", mesh.degrees.cp},
                                      {"pipeline_parallel", mesh.degrees.pp},
                                      {"expert_parallel", mesh.degrees.ep}}) {
      all.push_back(fmt::format("--parallelism.{}_degree={}", key, degree));
    }
    const JobConfig config = checkpoint_config(scratch_, all);
    std::map<std::int64_t, double> losses;
    on_ranks(mesh.num_ranks, [&](Ranks& ranks) {
      Trainer trainer(config, &ranks);
      volatile std::sig_atomic_t signal = 0;
      trainer.set_step_callback([&](std::int64_t step, const StepResult& result) {
        if (ranks.rank() != 0) return;
        losses[step] = result.total_loss;
        if (step == last_step) signal = SIGTERM;
      });
      trainer.run(signal);
    });
    return losses;
  }

  /// Removes the checkpoints so far, and then trains.
  std::map<std::int64_t, double> train_anew(const MeshShape& mesh, const std::vector<std::string>& overrides = {},
                                            std::int64_t last_step = 0) const {
    fs::remove_all(outputs());
    return train(mesh, overrides, last_step);
  }

  TemporaryFolder scratch_;
};

const MeshShape kOne{"one", 1, {}};
const MeshShape kMeshes[] = {{"fsdp2", 2, {}},
                             {"fsdp3", 3, {}},
                             {"fsdp4", 4, {}},
                             {"replicate2", 2, {.dp_replicate = 2}},
                             {"hsdp", 4, {.dp_replicate = 2}},
                             {"fsdp2_tensor2", 4, {.tp = 2}},
                             {"context2_tensor2", 4, {.cp = 2, .tp = 2}},
                             {"tensor2_expert4", 4, {.tp = 2, .ep = 4}}};

class Resharding : public Checkpoints, public ::testing::WithParamInterface<MeshShape> {};

TEST_P(Resharding, GoesOnWithTheSameLossesOnAnotherMesh) {
  const std::map<std::int64_t, double> straight = train(kOne);
  ASSERT_EQ(straight.size(), 6u);
  for (const auto& [first, second] : {std::pair{kOne, GetParam()}, {GetParam(), kOne}, {GetParam(), kMeshes[2]}}) {
    std::map<std::int64_t, double> losses = train_anew(first, {}, 3);
    ASSERT_EQ(losses.size(), 3u);
    EXPECT_EQ(verify_checkpoint(checkpoint(3)).num_shards, first.num_ranks / first.degrees.dp_replicate);
    losses.merge(train(second));
    ASSERT_EQ(losses.size(), 6u);
    for (const auto& [step, loss] : losses) {
      EXPECT_NEAR(loss, straight.at(step), 1e-5 * straight.at(step)) << first.name << " then " << second.name << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, Resharding, ::testing::ValuesIn(kMeshes),
                         [](const auto& test) { return std::string(test.param.name); });

std::vector<SafetensorsFile> shards_of(const fs::path& folder, std::string_view kind) {
  std::vector<SafetensorsFile> shards;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_shard_file_name(entry.path().filename().string(), kind)) shards.emplace_back(entry.path());
  }
  return shards;
}

/// Counts how often the files of a folder are opened. It watches closes as well, because equal events in a row are one.
class Opens {
 public:
  explicit Opens(const fs::path& folder) : descriptor_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    EXPECT_GE(inotify_add_watch(descriptor_, folder.c_str(), IN_OPEN | IN_CLOSE), 0);
  }
  ~Opens() { ::close(descriptor_); }
  Opens(const Opens&) = delete;
  Opens& operator=(const Opens&) = delete;

  std::map<std::string, int> by_name() const {
    std::map<std::string, int> counts;
    alignas(inotify_event) std::array<char, 1 << 16> events{};
    const ssize_t size = ::read(descriptor_, events.data(), events.size());
    for (ssize_t at = 0; at < size;) {
      const auto* event = reinterpret_cast<const inotify_event*>(&events[static_cast<std::size_t>(at)]);
      if (event->len > 0 && (event->mask & IN_OPEN) != 0) ++counts[event->name];
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
    return counts;
  }

 private:
  int descriptor_;
};

/// The number of files that all ranks open must not grow with the square of the number of ranks.
TEST_F(Checkpoints, OneRankReadsTheManifestAndNoneReadsAllShards) {
  // A pipeline stage of one rank holds whole parameters.
  for (const MeshShape& mesh : {MeshShape{"fsdp6", 6, {}}, MeshShape{"zbv2", 2, {.pp = 2}, "ZBVZeroBubble"}}) {
    const std::vector<std::string> layers = {"--model.args.n_layers=4"};  // one per stage
    train_anew(mesh, layers, 3);
    const Opens opens(checkpoint(3));
    train(mesh, layers);
    const std::map<std::string, int> counts = opens.by_name();
    EXPECT_EQ(counts.at("manifest.json"), 1);
    // All ranks of a stage load its buffers, which its first shard has. For any other shard, one rank each verifies the
    // checksum, checks the header and loads.
    for (int shard = 1; shard < mesh.num_ranks; ++shard) {
      for (const std::string_view kind : {kModelShards, kOptimizerShards}) {
        EXPECT_LE(counts.at(shard_file_name(kind, shard, mesh.num_ranks)), 3) << mesh.name;
      }
    }
  }
}

/// Checkpoints keep bfloat16 moments unchanged. A run with float32 moments can resume from them, and the other way
/// round.
TEST_F(Checkpoints, MomentsInBfloat16) {
  const std::vector<std::string> small = {"--optimizer.state_dtype=bfloat16"}, large = {};
  const std::map<std::int64_t, double> straight = train_anew(kOne, small), in_float32 = train_anew(kOne, large);
  EXPECT_NE(straight, in_float32);
  for (const MeshShape& mesh : {kOne, kMeshes[1]}) {
    for (const auto& [first, second] : {std::pair{small, small}, {small, large}, {large, small}}) {
      std::map<std::int64_t, double> losses = train_anew(mesh, first, 3);
      const std::vector<SafetensorsFile> shards = shards_of(checkpoint(3), kOptimizerShards);
      EXPECT_EQ(shards.size(), static_cast<std::size_t>(mesh.num_ranks));
      for (const SafetensorsFile& file : shards) {
        for (const auto& [name, tensor] : file.entries()) {
          EXPECT_EQ(tensor.dtype, first == small ? "BF16" : "F32") << name;
        }
      }
      losses.merge(train(kOne, second));
      ASSERT_EQ(losses.size(), 6u);
      if (mesh.num_ranks == 1 && first == small && second == small) {
        EXPECT_EQ(losses, straight);
      }
      for (const auto& [step, loss] : losses) EXPECT_NEAR(loss, straight.at(step), 1e-5 * loss) << step;
    }
  }
}

/// A run that sends gradients in bfloat16 resumes to the bit. What its checkpoints hold does not depend on that.
TEST_F(Checkpoints, GradientsInBfloat16) {
  const std::vector<std::string> small = {"--training.mixed_precision_reduce=bfloat16"};
  for (const MeshShape& mesh : {kMeshes[1], kMeshes[4]}) {
    const std::map<std::int64_t, double> straight = train_anew(mesh, small), in_float32 = train_anew(mesh);
    EXPECT_NE(straight, in_float32);
    std::map<std::int64_t, double> losses = train_anew(mesh, small, 3);
    losses.merge(train(mesh, small));
    EXPECT_EQ(losses, straight) << mesh.name;
    std::map<std::int64_t, double> changed = train_anew(mesh, small, 3);
    changed.merge(train(mesh));
    EXPECT_NE(changed, straight);
    for (const auto& [step, loss] : changed) EXPECT_NEAR(loss, straight.at(step), 1e-3 * loss) << step;
  }
}

/// Returns the tensors of all model shards. A tensor that is in several shards is listed several times.
std::vector<std::string> tensors_of_shards(const fs::path& folder) {
  std::vector<std::string> names;
  for (const SafetensorsFile& file : shards_of(folder, kModelShards)) {
    for (const auto& [name, tensor] : file.entries()) names.push_back(name);
  }
  return names;
}

const MeshShape kPipeline2{"pipeline2", 2, {.pp = 2}};
const MeshShape kZbv2{"zbv2", 2, {.pp = 2}, "ZBVZeroBubble"};
const MeshShape kZbv2Tensor2{"zbv2_tensor2", 4, {.tp = 2, .pp = 2}, "ZBVZeroBubble"};
const MeshShape kFsdp2Pipeline2{"fsdp2_pipeline2", 4, {.dp_shard = 2, .pp = 2}};

/// Stages move to other ranks, and are cut in other places.
TEST_F(Checkpoints, GoOnWithTheSameLossesOnAnotherPipeline) {
  for (const bool with_mtp : {false, true}) {  // multi-token prediction needs the last stage on the first rank
    const std::vector<std::string> model = {"--model.args.n_layers=4",
                                            fmt::format("--model.args.num_mtp_modules={}", with_mtp ? 1 : 0)};
    const std::map<std::int64_t, double> straight = train_anew(kOne, model);
    const std::pair<MeshShape, MeshShape> of_all[] = {
        {kPipeline2, kZbv2Tensor2}, {kZbv2Tensor2, kFsdp2Pipeline2}, {kPipeline2, kOne}, {kOne, kPipeline2}};
    const std::pair<MeshShape, MeshShape> of_zbv[] = {{kZbv2, kZbv2Tensor2}, {kZbv2Tensor2, kOne}, {kOne, kZbv2}};
    for (const auto& [first, second] : with_mtp ? std::span<const std::pair<MeshShape, MeshShape>>(of_zbv) : of_all) {
      std::map<std::int64_t, double> losses = train_anew(first, model, 3);
      if (first.degrees.pp == first.num_ranks) {  // no tensor is cut, so each is in the shard of one stage
        std::vector<std::string> names = tensors_of_shards(checkpoint(3));
        std::sort(names.begin(), names.end());
        EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << first.name;
      }
      losses.merge(train(second, model));
      ASSERT_EQ(losses.size(), 6u);
      for (const auto& [step, loss] : losses) {
        EXPECT_NEAR(loss, straight.at(step), 1e-5 * straight.at(step))
            << first.name << " then " << second.name << " step " << step;
      }
    }
  }
}

/// Every rank loads its part of a run's initial weights, whoever saved them. The files are verified.
TEST_F(Checkpoints, InitialWeightsOnAnyMesh) {
  const std::vector<std::string> model = {"--model.args.n_layers=4", "--model.args.num_mtp_modules=0"};
  for (const MeshShape& saved : {kOne, kZbv2Tensor2}) {
    fs::remove_all(outputs());
    fs::remove_all(scratch_ / "initial");
    train(saved, model, 3);
    fs::rename(outputs(), scratch_ / "initial");
    std::vector<std::string> from_initial = model;
    from_initial.push_back(fmt::format("--checkpoint.initial_load_path={}", (scratch_ / "initial").string()));
    from_initial.insert(from_initial.end(), {"--checkpoint.enable=false", "--training.steps=3", "--job.overwrite"});
    const std::map<std::int64_t, double> straight = train(kOne, from_initial);
    for (const MeshShape& mesh : {kMeshes[1], kMeshes[6], kMeshes[7], kPipeline2, kZbv2Tensor2}) {
      const std::map<std::int64_t, double> losses = train(mesh, from_initial);
      ASSERT_EQ(losses.size(), 3u);
      for (const auto& [step, loss] : losses) {
        EXPECT_NEAR(loss, straight.at(step), 1e-5 * straight.at(step)) << saved.name << " then " << mesh.name << step;
      }
    }
    int num_files = 0;
    for (const auto& entry : fs::directory_iterator(scratch_ / "initial" / "checkpoint" / "step-3")) {
      const std::string name = entry.path().filename();
      if (!is_shard_file_name(name, kModelShards)) continue;
      ++num_files;
      data::flip_bit(entry.path(), fs::file_size(entry.path()) - 5, 3);
      expect_error([&] { train(kMeshes[1], from_initial); }, {name, "checksum"});
      data::flip_bit(entry.path(), fs::file_size(entry.path()) - 5, 3);
    }
    EXPECT_GT(num_files, 0);
  }
}

/// Returns all files of a checkpoint except for the manifest, whose state has the whole configuration.
std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") contents[entry.path().filename()] = read_text_file(entry.path());
  }
  return contents;
}

/// Training goes on while the files are written. They must still hold the numbers of their step.
TEST_F(Checkpoints, AsynchronousFilesAreThoseOfSynchronousSaves) {
  const std::vector<std::string> often = {"--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"};
  for (const MeshShape& mesh : {kOne, kMeshes[1], kMeshes[4]}) {
    train_anew(mesh, often);
    fs::rename(outputs(), scratch_ / "synchronous");
    for (const char* mode : {"async", "async_with_pinned_mem"}) {
      train(mesh, {often[0], often[1], std::string("--checkpoint.async_mode=") + mode});
      for (std::int64_t step = 1; step <= 6; ++step) {
        const CheckpointManifest manifest = verify_checkpoint(checkpoint(step));
        EXPECT_EQ(manifest.step, step);
        const fs::path other = checkpoint_path(scratch_ / "synchronous" / "checkpoint", step);
        EXPECT_TRUE(contents_of(checkpoint(step)) == contents_of(other)) << mesh.name << " step " << step;
        EXPECT_EQ(manifest.state["loader"], verify_checkpoint(other).state["loader"]);
      }
      EXPECT_EQ(checkpoint_steps(outputs() / "checkpoint").size(), 6u);
      fs::remove_all(outputs());
    }
    fs::remove_all(scratch_ / "synchronous");
  }
}

TEST_F(Checkpoints, ShardsThatDoNotBelongAreRefusedOnAllRanks) {
  const MeshShape two = kMeshes[0];
  train(two);
  const std::string name = "model-00001-of-00002.safetensors";
  const auto refused = [&](const std::vector<std::string>& parts) {
    on_ranks(2,
             [&](Ranks& ranks) { expect_error([&] { Trainer trainer(checkpoint_config(scratch_), &ranks); }, parts); });
  };
  fs::rename(checkpoint(6) / name, scratch_ / "kept");
  refused({"step-6/" + name, "cannot open"});
  fs::copy_file(checkpoint(3) / name, checkpoint(6) / name);
  refused({"step-6/" + name, "step is \"3\"", "expected 6"});
  fs::rename(scratch_ / "kept", checkpoint(6) / name);
  const fs::path optimizer = checkpoint(6) / "optimizer-00000-of-00002.safetensors";
  data::flip_bit(optimizer, fs::file_size(optimizer) - 5, 3);  // only one rank reads this file
  refused({optimizer.string(), "checksum"});
  data::flip_bit(optimizer, fs::file_size(optimizer) - 5, 3);
  fs::rename(checkpoint(6), checkpoint(7));
  refused({"step-7", "of step 6"});
  // The folder that a killed save leaves is not a checkpoint.
  fs::rename(checkpoint(7), checkpoint(7).concat(".partial"));
  on_ranks(2, [&](Ranks& ranks) {
    const Trainer trainer(checkpoint_config(scratch_), &ranks);
    EXPECT_FALSE(fs::exists(checkpoint(7).concat(".partial")));
  });
}

/// As Hugging Face files, a step has the same bytes whoever saved it.
TEST_F(Checkpoints, ConvertingShardsGivesTheBytesOfOneRanksFile) {
  train(kMeshes[2]);
  const JobConfig config = checkpoint_config(scratch_, {"--checkpoint.folder=one"});
  Trainer trainer(checkpoint_config(scratch_, {"--training.device=cpu"}));  // resumes from step 6
  Ranks one;
  const Mesh mesh;
  const auto tokenizer = data::load_tokenizer("bytes");
  Checkpointer(config, one, mesh, trainer.model().parameters(), *tokenizer).save(6, {}, true);
  const std::vector<NamedTensor> tensors = tensor_names(trainer.model().parameters());
  const auto convert = [&](const fs::path& from, const fs::path& to) {
    const SavedModel saved(from);
    EXPECT_EQ(saved.step(), 6);
    saved.require_same_tensors(tensors);
    fs::create_directories(to);
    write_hf_weights(to, tensors,
                     [&](const NamedTensor& parameter, std::int64_t begin, std::int64_t end, const FloatSink& sink) {
                       saved.read(parameter.name, parameter.tensor.shape(), begin, end, sink);
                     },
                     config.model.args.n_layers, {.max_shard_bytes = 20'000});
  };
  EXPECT_TRUE(fs::exists(outputs() / "one" / "step-6" / "model.safetensors"));
  EXPECT_TRUE(fs::exists(outputs() / "checkpoint" / "step-6" / "model-00003-of-00004.safetensors"));
  convert(outputs() / "one", scratch_ / "hf-one");
  convert(outputs() / "checkpoint", scratch_ / "hf-four");
  EXPECT_GT(contents_of(scratch_ / "hf-one").size(), 3u);
  EXPECT_TRUE(contents_of(scratch_ / "hf-one") == contents_of(scratch_ / "hf-four"));
}

/// Returns parameters that are cut in every way, for any mesh. A stage of a pipeline has only some of them.
Parameters cut_parameters(const std::shared_ptr<Mesh>& mesh) {
  Parameters parameters(mesh);
  using Axis = Cut::Axis;
  const auto add = [&](const char* name, const Shape& shape, const Cut& cut) {
    parameters.add({.name = name, .shape = shape, .init = {}, .cut = cut});
  };
  if (mesh->place.pp == 0) {
    add("embedding", {64, 12}, {.axis = Axis::kTensor, .dim = 0});
    add("w13", {48, 12}, {.axis = Axis::kTensor, .dim = 0, .blocks = 2});
  }
  if (mesh->place.pp == mesh->degrees.pp - 1) {
    parameters.begin_unit();
    add("wo", {12, 48}, {.axis = Axis::kTensor, .dim = 1});
    add("norm", {12}, {});
    add("odd", {37, 3}, {});
    add("experts", {8, 6, 5}, {.axis = Axis::kExperts, .dim = 0});
    parameters.add_buffer("bias", {8});
  }
  return parameters;
}

/// Returns a different number for each value that a checkpoint holds.
float mark(std::size_t kind, const std::string& name, std::int64_t index) {
  return static_cast<float>(kind * 100'000 + name.size() * 10'000 + static_cast<std::size_t>(index));
}

/// Calls visit(number, the expected number) for all numbers that this rank has.
template <typename Visit>
void for_each_number(Parameters& parameters, Visit&& visit) {
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const Parameters::Range range = parameters.shard_range(id);
    const Tensor kinds[] = {parameters.master_shard(id), parameters.optimizer_shard(0, id),
                            parameters.optimizer_shard(1, id)};
    for (std::size_t kind = 0; kind < std::size(kinds); ++kind) {
      parameters.slice(id).for_each_run(range.begin, range.end,
                                        [&](std::int64_t local, std::int64_t global, std::int64_t count) {
                                          for (std::int64_t i = 0; i < count; ++i) {
                                            visit(kinds[kind].data<float>()[local - range.begin + i],
                                                  mark(kind, parameters.spec(id).name, global + i));
                                          }
                                        });
    }
  }
  for (ParamId id = 0; id < parameters.num_buffers(); ++id) {
    const Tensor buffer = parameters.buffer(id);
    for (std::int64_t i = 0; i < buffer.num_elements(); ++i) {
      visit(buffer.data<float>()[i], mark(3, parameters.buffer_spec(id).name, i));
    }
  }
}

class CutParameters : public Checkpoints {
 protected:
  /// A rank's part of a run whose model is cut_parameters().
  struct Rank {
    Rank(const TemporaryFolder& scratch, Ranks& ranks, const MeshDegrees& degrees,
         AsyncMode mode = AsyncMode::kDisabled, const std::vector<std::string>& overrides = {})
        : config(checkpoint_config(scratch, overrides)),
          mesh(std::make_shared<Mesh>(ranks.world(), resolve(degrees, ranks.size()))),
          parameters(cut_parameters(mesh)),
          tokenizer(data::load_tokenizer("bytes")),
          loader({.dataset = scratch / "dataset", .seq_len = 16, .local_batch_size = 1, .vocab_size = 258}),
          checkpointer(config, ranks, *mesh, parameters, *tokenizer) {
      config.checkpoint.async_mode = mode;
      parameters.allocate(DType::kFloat32);
      checkpointer.prepare_snapshot(nullptr);
    }

    JobConfig config;
    std::shared_ptr<Mesh> mesh;
    Parameters parameters;
    std::unique_ptr<data::Tokenizer> tokenizer;
    data::Loader loader;
    Checkpointer checkpointer;
  };
};

TEST_F(CutParameters, FromAnyMeshToAnyOther) {
  const MeshShape meshes[] = {{"one", 1, {}},
                              {"fsdp3", 3, {}},
                              {"tensor4", 4, {.tp = 4}},
                              {"expert8", 8, {.ep = 8}},
                              {"tensor2_expert4", 8, {.tp = 2, .ep = 4}},
                              {"hsdp_tensor_context", 8, {.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 2}},
                              {"pipeline_of_replicas", 8, {.dp_replicate = 2, .tp = 2, .pp = 2}}};
  for (const MeshShape& saved : meshes) {
    fs::remove_all(outputs());
    on_ranks(saved.num_ranks, [&](Ranks& ranks) {
      Rank rank(scratch_, ranks, saved.degrees, AsyncMode::kAsync);
      EXPECT_FALSE(rank.checkpointer.resume(rank.loader).has_value());
      for_each_number(rank.parameters, [](float& number, float expected) { number = expected; });
      rank.checkpointer.save(5, rank.loader.state(), true);
      // Changes after the save are not in the checkpoint.
      for_each_number(rank.parameters, [](float& number, float) { number = -1.0f; });
      rank.checkpointer.finish();
      EXPECT_EQ(rank.checkpointer.snapshot_bytes_held(), 0u);
    });
    for (const MeshShape& loaded : meshes) {
      std::mutex mutex;
      std::int64_t num_wrong = 0, num_numbers = 0;
      on_ranks(loaded.num_ranks, [&](Ranks& ranks) {
        Rank rank(scratch_, ranks, loaded.degrees);
        const std::optional<ResumedFrom> resumed = rank.checkpointer.resume(rank.loader);
        ASSERT_TRUE(resumed.has_value());
        EXPECT_EQ(resumed->step, 5);
        const std::lock_guard lock(mutex);
        for_each_number(rank.parameters, [&](float number, float expected) {
          ++num_numbers;
          num_wrong += number != expected ? 1 : 0;
        });
      });
      EXPECT_EQ(num_wrong, 0) << saved.name << " to " << loaded.name;
      EXPECT_GE(num_numbers, 3 * (64 * 12 + 2 * 48 * 12 + 12 + 37 * 3 + 8 * 6 * 5) + 8);
    }
  }
}

/// A rank of attempt 1 wakes up, and writes its shard of the step that attempt 2 is saving.
TEST_F(CutParameters, ALateRankOfAnEarlierAttemptChangesNoByteOfALaterOnes) {
  on_ranks(2, [&](Ranks& ranks) {
    const auto wait = [](const Checkpointer& checkpointer) {
      while (!checkpointer.ready()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    Rank old(scratch_, ranks, {}, AsyncMode::kAsync), current(scratch_, ranks, {}, AsyncMode::kAsync);
    old.checkpointer.set_saver({.run = "run", .attempt = 1});
    current.checkpointer.set_saver({.run = "run", .attempt = 2});
    for_each_number(old.parameters, [](float& number, float) { number = -1.0f; });
    for_each_number(current.parameters, [](float& number, float expected) { number = expected; });
    current.checkpointer.resume(current.loader);
    current.checkpointer.save(5, current.loader.state(), true);
    wait(current.checkpointer);
    ranks.world().barrier("the later attempt's shards");
    if (ranks.rank() == 1) {
      old.checkpointer.save(5, old.loader.state(), false);
      wait(old.checkpointer);
    }
    ranks.world().barrier("the earlier attempt's shard");
    current.checkpointer.finish();
  });
  const std::vector<fs::path> left(fs::directory_iterator(outputs() / "checkpoint"), {});
  EXPECT_THAT(left, ::testing::ElementsAre(checkpoint(5)));
  EXPECT_NO_THROW(verify_checkpoint(checkpoint(5)));
  on_ranks(2, [&](Ranks& ranks) {
    Rank rank(scratch_, ranks, {});
    EXPECT_TRUE(rank.checkpointer.resume(rank.loader).has_value());
    for_each_number(rank.parameters, [](float number, float expected) { ASSERT_EQ(number, expected); });
  });
}

/// Two machines have folders of their own. The first one's has no file of the other's, or an older one of another size.
TEST_F(CutParameters, MachinesWithFoldersOfTheirOwnAreNoticed) {
  const std::string of_the_other = shard_file_name(kModelShards, 1, 2);
  for (const bool has_older_file : {false, true}) {
    SCOPED_TRACE(has_older_file);
    fs::remove_all(outputs());
    std::mutex mutex;
    std::vector<std::string> messages;
    on_ranks(2, [&](Ranks& ranks) {
      Rank rank(scratch_, ranks, {}, AsyncMode::kAsync,
                {fmt::format("--checkpoint.folder=of-machine-{}", ranks.rank())});
      rank.checkpointer.resume(rank.loader);
      rank.checkpointer.save(5, rank.loader.state(), true);
      while (!rank.checkpointer.ready()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ranks.world().barrier("both shards");
      if (has_older_file && ranks.rank() == 1) {
        const fs::path partial = fs::directory_iterator(outputs() / "of-machine-0")->path();
        std::ofstream(partial / of_the_other) << "old";
      }
      ranks.world().barrier("an older file");
      try {
        rank.checkpointer.finish();
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        messages.emplace_back(error.what());
      }
    });
    ASSERT_EQ(messages.size(), 2u);
    for (const std::string& message : messages) {
      EXPECT_THAT(message, ::testing::HasSubstr(of_the_other + "' was written by another rank but is not here"));
    }
    EXPECT_TRUE(checkpoint_steps(outputs() / "of-machine-0").empty());
  }
}

/// Storage that does not say how large a file is has not lost it. A link to itself stands in for such a file.
TEST_F(CutParameters, AFileThatCannotBeLookedForIsNotMissing) {
  Ranks one;
  Rank rank(scratch_, one, {}, AsyncMode::kAsync);
  rank.checkpointer.resume(rank.loader);
  rank.checkpointer.save(5, rank.loader.state(), true);
  while (!rank.checkpointer.ready()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const fs::path partial = fs::directory_iterator(outputs() / "checkpoint")->path();
  const std::string name = shard_file_name(kModelShards, 0, 1);
  fs::remove(partial / name);
  fs::create_symlink(name, partial / name);
  const std::string message =
      expect_error([&] { rank.checkpointer.finish(); }, {"cannot look for '", name, "Too many levels"});
  EXPECT_EQ(message.find("another rank"), std::string::npos) << message;
}

/// A limit on the size of files stands in for a full disk. Only the first stage's files are larger.
TEST_F(CutParameters, ASaveThatFailsOnOneRankFailsOnAll) {
  for (const AsyncMode mode : {AsyncMode::kDisabled, AsyncMode::kAsync}) {
    fs::remove_all(outputs());
    std::optional<FullDisk> full;
    std::mutex mutex;
    std::vector<std::string> messages;
    on_ranks(4, [&](Ranks& ranks) {
      Rank rank(scratch_, ranks, {.pp = 4}, mode);
      rank.checkpointer.resume(rank.loader);
      rank.checkpointer.save(1, rank.loader.state(), true);
      rank.checkpointer.finish();
      if (ranks.rank() == 0) full.emplace(10'000);  // only the first stage's moments, 2 x 1344 numbers, take more
      ranks.world().barrier("the limit");
      // The run goes on after a failed save, unless it is the last save.
      rank.checkpointer.save(2, rank.loader.state(), false);
      rank.checkpointer.finish();
      EXPECT_FALSE(fs::exists(checkpoint_path(rank.checkpointer.folder(), 2)));
      EXPECT_EQ(rank.checkpointer.snapshot_bytes_held(), 0u);
      std::string message;
      try {
        rank.checkpointer.save(2, rank.loader.state(), true);
        rank.checkpointer.finish();
      } catch (const Error& error) {
        message = error.what();
        EXPECT_EQ(error.status(), ExitStatus::kStorageFailed);
      }
      EXPECT_EQ(rank.checkpointer.snapshot_bytes_held(), 0u);
      const std::lock_guard lock(mutex);
      messages.push_back(message);
    });
    full.reset();
    ASSERT_EQ(messages.size(), 4u);
    for (const std::string& message : messages) {
      EXPECT_THAT(message, ::testing::AllOf(::testing::StartsWith("rank 0: cannot write"),
                                            ::testing::HasSubstr("optimizer-00000-of-00004.safetensors")));
    }
    EXPECT_THAT(checkpoint_steps(outputs() / "checkpoint"), ::testing::ElementsAre(1));
    EXPECT_NO_THROW(verify_checkpoint(checkpoint(1)));
    EXPECT_FALSE(fs::exists(checkpoint(2).concat(".partial")));
  }
}

}  // namespace
}  // namespace tessera
