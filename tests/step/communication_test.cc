// Compares the bytes that every rank sends in a step, group by group, with the formulas of docs/parallelism.md, and
// with the record of the step's dry run.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "comm/transport/counting_transport.h"
#include "step/training_step.h"
#include "tests/comm/ranks.h"
#include "tests/step/small_model.h"
#include "tests/threads_scope.h"

namespace tessera {
namespace {

const std::string kCommunicationModel = std::string(kSmallModel) + R"(
[training]
local_batch_size = 2
seq_len = 32
[debug]
moe_force_load_balance = true
)";

using Overrides = std::vector<std::string>;
using Bytes = std::map<std::string, std::int64_t>;  // by the name of the group in Mesh

struct StepCase {
  const char* name;
  int num_ranks;
  MeshDegrees degrees;
  std::int64_t micro_batches = 1;
  Overrides overrides = {};

  friend void PrintTo(const StepCase& step_case, std::ostream* out) { *out << step_case.name; }
};

/// With so many tokens, the embedding and the head of the small model are far larger than its layers.
constexpr std::int64_t kLargeVocabulary = 4096;

/// Computes what the page says about one rank's step.
class Formulas {
 public:
  Formulas(const JobConfig& config, const Mesh& mesh, const Parameters& parameters, std::int64_t micro_batches)
      : config_(config),
        model_(config.model.args),
        mesh_(mesh),
        parameters_(parameters),
        micro_batches_(micro_batches),
        mode_(config.activation_checkpoint.mode),
        b_(static_cast<std::int64_t>(size_of(config.training.mixed_precision_param))),
        tokens_T_(config.training.local_batch_size * config.training.seq_len / mesh.degrees.cp),
        tokens_t_(tokens_T_ / mesh.degrees.tp) {}

  Bytes bytes() {
    find_modules();
    data();
    tensor_and_context();
    experts();
    pipeline();
    step_numbers();
    return bytes_;
  }

 private:
  /// Finds the layers, the embedding and the head that this rank has.
  void find_modules() {
    for (ParamId id = 0; id < parameters_.size(); ++id) {
      const std::string& name = parameters_.spec(id).name;
      if (name == "tok_embeddings.weight") embedding_ = parameters_.unit(id);
      if (name == "output.weight") head_ = parameters_.unit(id);
      if (name.ends_with("attention.wo.weight")) {
        layers_.push_back(parameters_.unit(id));
        is_moe_.push_back(model_.is_moe_layer(std::stoll(name.substr(std::string("layers.").size()))));
      }
    }
  }

  // Section "Data": FSDP sends per unit and step, and HSDP per step.
  void data() {
    // The sizes of the parameters of a unit that are cut alike. The size of each parameter is rounded up to a multiple
    // of 32.
    std::map<std::pair<UnitId, Cut::Axis>, std::int64_t> sizes;
    const auto padded = [](std::int64_t count) { return (count + 31) / 32 * 32; };
    for (ParamId id = 0; id < parameters_.size(); ++id) {
      sizes[{parameters_.unit(id), parameters_.spec(id).cut.axis}] +=
          padded(parameters_.local_shape(id).num_elements());
    }
    const std::string& reshard = config_.parallelism.fsdp_reshard_after_forward;
    const bool is_pipeline = mesh_.degrees.pp > 1;
    const bool keeps = reshard == "never" || (reshard == "default" && is_pipeline);
    const bool reduces_once = is_pipeline && config_.parallelism.pipeline_parallel_reduce_gradients == "step";
    std::int64_t total = 0;
    for (const auto& [place, size] : sizes) {
      const auto& [unit, axis] = place;
      const auto [name, n] = axis == Cut::Axis::kTensor ? std::pair("shard_of_cut", mesh_.shard_of_cut.size())
                             : axis == Cut::Axis::kExperts
                                 ? std::pair("shard_of_experts", mesh_.shard_of_experts.size())
                                 : std::pair("shard_of_whole", mesh_.shard_of_whole.size());
      const std::int64_t shard = padded((size + n - 1) / n);
      total += shard;
      std::int64_t gathers = micro_batches_;
      if (unit != embedding_ && unit != head_) {
        gathers = 2 * micro_batches_;  // for the forward and for the backward
        // The last layer's weights are still there for the backward, and the first layer's for the next forward. So are
        // those of the layers next to them, unless the weights of the head or of the embedding take their slot. With a
        // large vocabulary, head and embedding have a slot of their own.
        const bool is_large = model_.vocab_size >= kLargeVocabulary;
        const bool embedding_takes_a_slot = mesh_.shard_of_cut.size() > 1 && !is_large;
        if (unit == layers_.back() || (unit == *(layers_.end() - 2) && is_large)) gathers -= micro_batches_;
        if (unit == layers_[0] || (unit == layers_[1] && !embedding_takes_a_slot)) gathers -= micro_batches_ - 1;
      }
      if (keeps) gathers = 1;
      const auto sent = static_cast<std::int64_t>(size_of(config_.training.mixed_precision_reduce));
      bytes_[name] += (n - 1) * shard * (gathers * b_ + (reduces_once ? 1 : micro_batches_) * sent);
    }
    const std::int64_t r = mesh_.degrees.dp_replicate, even = (total + r - 1) / r;
    const std::int64_t own = std::min(even, total - mesh_.place.dp_replicate * even);
    bytes_["dp_replicate"] += 4 * (total - own + (r - 1) * own);
  }

  // Sections "Tensor" and "Context": the tables are per layer and micro-batch.
  void tensor_and_context() {
    const std::int64_t dim = model_.dim, lora = model_.q_lora_rank;
    std::int64_t tensor_numbers = 0, key_numbers = 0;  // numbers per token
    for (const bool is_moe : is_moe_) {
      const std::int64_t queries = lora > 0 ? lora : dim;
      const bool has_ffn = !is_moe || model_.num_shared_experts > 0;
      tensor_numbers += queries + dim;                             // attention, forward
      tensor_numbers += dim + (lora > 0 ? lora : 2 * dim);         // attention, backward
      if (has_ffn) tensor_numbers += 2 * dim + 3 * dim;            // FFN, forward and backward
      if (mode_ == Recompute::kSelective) tensor_numbers += lora;  // repeated for the backward
      if (mode_ == Recompute::kFull) tensor_numbers += queries + dim + (has_ffn ? dim : 0);
      key_numbers += (mode_ == Recompute::kNone ? 2 : 3) * (model_.kv_lora_rank + model_.qk_rope_head_dim);
      if (is_moe && model_.seq_balance_loss_coeff > 0.0f) {
        const std::int64_t times = mode_ == Recompute::kFull ? 2 : 1;
        bytes_["sequence"] += micro_batches_ * times * (mesh_.sequence.size() - 1) * config_.training.local_batch_size *
                              2 * model_.num_experts * 4;
      }
    }
    std::int64_t loss_bytes = 0;
    if (embedding_) tensor_numbers += 2 * dim;
    if (head_) {
      tensor_numbers += 2 * dim;
      loss_bytes = tokens_T_ * 3 * 4;
    }
    bytes_["tp"] += micro_batches_ * (mesh_.degrees.tp - 1) * (tokens_t_ * tensor_numbers * b_ + loss_bytes);
    bytes_["sequence"] += micro_batches_ * (mesh_.sequence.size() - 1) * tokens_t_ * key_numbers * b_;
  }

  // Section "Over several domains". The forced balance gives the same tokens the same experts on every rank.
  void experts_on_domains() {
    const std::int64_t N = mesh_.degrees.num_ep_domains(), per_domain = model_.num_experts / N;
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(N), 0);  // tokens with an expert in each domain
    for (std::int64_t t = 0; t < tokens_t_; ++t) {
      std::set<std::int64_t> domains;
      for (std::int64_t k = 0; k < model_.top_k; ++k) {
        domains.insert((t * model_.top_k + k) % model_.num_experts / per_domain);
      }
      for (const std::int64_t domain : domains) ++tokens[static_cast<std::size_t>(domain)];
    }
    const std::int64_t own = mesh_.place.ep / mesh_.degrees.ep_domain;
    const std::int64_t here = tokens[static_cast<std::size_t>(own)], come = (N - 1) * here;
    const std::int64_t go = std::accumulate(tokens.begin(), tokens.end(), -here);
    const std::int64_t dispatched = go * row_bytes(config_.parallelism.expert_parallel_a2a_dispatch_fwd_precision);
    const std::int64_t dispatch = dispatched + go * model_.top_k * 8 + 4 * (N - 1);
    const std::int64_t combine = come * model_.dim * b_;
    const std::int64_t combine_backward = go * row_bytes(config_.parallelism.expert_parallel_a2a_combine_bwd_precision);
    const std::int64_t dispatch_backward = come * (model_.dim * b_ + model_.top_k * 4);
    const bool is_full = mode_ == Recompute::kFull;
    const std::int64_t again = is_full ? dispatch : mode_ == Recompute::kSelective ? dispatched : 0;
    for (const bool is_moe : is_moe_) {
      if (!is_moe) continue;
      bytes_["ep_across"] += micro_batches_ * (dispatch + combine + combine_backward + dispatch_backward + again);
    }
  }

  /// Returns the bytes of a token that crosses.
  std::int64_t row_bytes(PayloadPrecision precision) const {
    return precision == PayloadPrecision::kMxfp8 ? model_.dim * 33 / 32 : model_.dim * b_;
  }

  // Section "Expert", standard backend. The forced balance sends 1/P of the copies to each rank.
  void experts() {
    if (mesh_.degrees.num_ep_domains() > 1) return experts_on_domains();
    const std::int64_t P = mesh_.degrees.ep;
    const std::int64_t copies = tokens_t_ * model_.top_k * (P - 1) / P;
    const std::int64_t dispatched = copies * row_bytes(config_.parallelism.expert_parallel_a2a_dispatch_fwd_precision);
    const std::int64_t dispatch = dispatched + copies * 4 + (P - 1) * model_.num_experts * 4;
    const std::int64_t combine = copies * model_.dim * b_;
    const std::int64_t combine_backward =
        copies * row_bytes(config_.parallelism.expert_parallel_a2a_combine_bwd_precision);
    const std::int64_t dispatch_backward = copies * (model_.dim * b_ + 4);
    std::int64_t again = 0;
    if (mode_ == Recompute::kSelective) again = dispatched;
    if (mode_ == Recompute::kFull) again = dispatch;
    for (const bool is_moe : is_moe_) {
      if (is_moe && P > 1) {
        bytes_["ep"] += micro_batches_ * (dispatch + combine + combine_backward + dispatch_backward + again);
      }
    }
  }

  // Section "Pipeline": activations go to the next stage and gradients to the previous one, unless this rank has that
  // stage, too.
  void pipeline() {
    if (mesh_.degrees.pp == 1) return;
    const PipelineSchedule schedule = config_.pipeline_schedule(mesh_.degrees);
    for (std::size_t s = 0; s + 1 < schedule.rank_of_stage.size(); ++s) {
      const int here = schedule.rank_of_stage[s], next = schedule.rank_of_stage[s + 1];
      const auto sends = static_cast<std::int64_t>(here != next && (mesh_.place.pp == here || mesh_.place.pp == next));
      bytes_["pp"] += sends * micro_batches_ * tokens_t_ * model_.dim * b_;
    }
  }

  /// Returns how often a rank of a tree sends a sum: up, unless it is the root, and down to each rank of which it is
  /// the parent. A rank's parent lacks the lowest bit of its number.
  static std::int64_t messages_of_sum(const ProcessGroup& group) {
    std::int64_t count = group.rank() > 0 ? 1 : 0;
    for (int other = 1; other < group.size(); ++other) count += (other & (other - 1)) == group.rank() ? 1 : 0;
    return count;
  }

  // Section "Once per step": these are sums of a few numbers.
  void step_numbers() {
    const auto sums_of = [&](std::int64_t layers) { return 3 + layers * (1 + model_.num_experts); };
    const std::int64_t own = sums_of(std::count(is_moe_.begin(), is_moe_.end(), true));
    bytes_["tokens"] += messages_of_sum(mesh_.tokens) * 8 * (1 + own);
    bytes_["pp"] += messages_of_sum(mesh_.pp) * 8 * sums_of(model_.num_moe_layers());
    bytes_["model"] += messages_of_sum(mesh_.model) * 8;
  }

  const JobConfig& config_;
  const ModelConfig& model_;
  const Mesh& mesh_;
  const Parameters& parameters_;
  std::int64_t micro_batches_;
  Recompute mode_;
  // Bytes of a number; tokens that tensor-parallel ranks share; tokens of this rank.
  std::int64_t b_, tokens_T_, tokens_t_;
  std::optional<UnitId> embedding_, head_;
  std::vector<UnitId> layers_;
  std::vector<bool> is_moe_;
  Bytes bytes_;
};

/// Returns the bytes that a rank sends in a transfer that was recorded.
std::int64_t sent_bytes(const RecordedTransfer& transfer) {
  const auto bytes = static_cast<std::int64_t>(transfer.bytes), ranks = std::int64_t{transfer.num_ranks};
  if (transfer.kind == "all_gather" || transfer.kind == "reduce_scatter" || transfer.kind == "all_to_all") {
    return bytes / ranks * (ranks - 1);
  }
  if (transfer.kind == "all_reduce") return bytes * (ranks - 1);  // of few numbers
  EXPECT_EQ(transfer.kind, "send");
  return bytes;
}

/// Checks the groups whose transfers the dry run of a micro-batch records as such. Dispatchers' calls are recorded in
/// tokens, and sums of a step's numbers have other types on a CPU.
void expect_recorded(const StepRecord& record, const Mesh& mesh, Bytes expected, std::int64_t micro_batches) {
  const std::pair<const char*, const ProcessGroup*> groups[] = {{"tp", &mesh.tp},
                                                                {"sequence", &mesh.sequence},
                                                                {"shard_of_cut", &mesh.shard_of_cut},
                                                                {"shard_of_whole", &mesh.shard_of_whole},
                                                                {"shard_of_experts", &mesh.shard_of_experts}};
  std::map<std::string, std::int64_t> recorded;  // by axis
  for (const RecordedTransfer& transfer : record.transfers()) {
    EXPECT_LE(transfer.begin, transfer.end);
    if (transfer.choices.num_experts == 0 && transfer.kind != "receive" && transfer.pass != "optimizer") {
      recorded[transfer.axis] += sent_bytes(transfer);
    }
  }
  EXPECT_EQ(recorded["pp"] > 0, mesh.degrees.pp > 1);
  if (micro_batches > 1) return;  // weights may stay gathered from one to the next
  for (const auto& [name, group] : groups) EXPECT_EQ(recorded[group->axis()], expected[name]) << name;
}

class Communication : public ::testing::TestWithParam<StepCase> {};

TEST_P(Communication, IsWhatTheFormulasSay) {
  const StepCase& step_case = GetParam();
  std::vector<SentMessages> sent(static_cast<std::size_t>(step_case.num_ranks));
  const auto rank = [&](ProcessGroup& world) {
    const ThreadsScope one_thread(1);
    const auto mesh = std::make_shared<Mesh>(world, resolve(step_case.degrees, world.size()));
    Overrides overrides = step_case.overrides;
    const JobConfig defaults = parse_job_config(kCommunicationModel, overrides);
    overrides.push_back(
        fmt::format("--training.global_batch_size={}",
                    defaults.training.local_batch_size * mesh->num_data_ranks() * step_case.micro_batches));
    const JobConfig config = parse_job_config(kCommunicationModel, overrides);
    TrainingStep step(config, mesh);
    step.allocate();
    std::vector<std::int32_t> tokens(
        static_cast<std::size_t>(config.training.local_batch_size * (config.training.seq_len + 1)));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>((i * 7 + 3) % static_cast<std::size_t>(config.model.args.vocab_size));
    }
    std::vector<Batch> batches;
    for (std::int64_t m = 0; m < step_case.micro_batches; ++m) {
      batches.push_back(step.make_batch());
      batches.back().fill(tokens);
    }
    const std::pair<const char*, ProcessGroup*> groups[] = {{"pp", &mesh->pp},
                                                            {"dp_replicate", &mesh->dp_replicate},
                                                            {"cp", &mesh->cp},
                                                            {"tp", &mesh->tp},
                                                            {"ep", &mesh->ep},
                                                            {"ep_within", &mesh->ep_within},
                                                            {"ep_across", &mesh->ep_across},
                                                            {"sequence", &mesh->sequence},
                                                            {"tokens", &mesh->tokens},
                                                            {"shard_of_cut", &mesh->shard_of_cut},
                                                            {"shard_of_whole", &mesh->shard_of_whole},
                                                            {"shard_of_experts", &mesh->shard_of_experts},
                                                            {"model", &mesh->model}};
    SentMessages& own = sent[static_cast<std::size_t>(world.rank())];
    own.take();
    step.run(1, batches);
    Bytes expected = Formulas(config, *mesh, step.model().parameters(), step_case.micro_batches).bytes();
    expect_recorded(step.dry_run(), *mesh, expected, step_case.micro_batches);
    for (const auto& [name, group] : groups) {
      EXPECT_EQ(own.of(group->axis()).bytes, expected[name]) << "group " << name << " on rank " << world.rank();
    }
  };
  comm_test::with_ranks(step_case.num_ranks, rank, {.wrap = [&](std::unique_ptr<Transport> transport) {
                          SentMessages& own = sent[static_cast<std::size_t>(transport->rank())];
                          return std::make_unique<CountingTransport>(std::move(transport), own);
                        }});
}

const Overrides kFloat = {"--training.mixed_precision_param=float32"};
const Overrides kVocabulary = {fmt::format("--model.args.vocab_size={}", kLargeVocabulary)};
const Overrides kMicroBatch = {"--parallelism.pipeline_parallel_reduce_gradients=micro_batch"};
const Overrides kReduce = {"--training.mixed_precision_reduce=bfloat16"};
const Overrides kMicroBatchReduce = {kMicroBatch[0], kReduce[0]};
const Overrides kNever = {"--parallelism.fsdp_reshard_after_forward=never"};
const Overrides kSelective = {"--activation_checkpoint.mode=selective", "--model.args.q_lora_rank=48"};
const Overrides kFull = {"--activation_checkpoint.mode=full", "--model.args.q_lora_rank=48"};
const Overrides kFullQueries = {"--activation_checkpoint.mode=full"};
const Overrides kBalance = {"--model.args.seq_balance_loss_coeff=0.01", "--activation_checkpoint.mode=full"};
const Overrides kNoShared = {"--model.args.num_shared_experts=0"};
const Overrides kMxfp8Rows = {"--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
                              "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8"};
const Overrides kMxfp8 = {"--model.converters=quantize.linear.mx,quantize.grouped_mm.mx",
                          "--quantize.linear.mx.unaligned=bf16"};
const Overrides kDirect = {"--parallelism.expert_parallel_comm_backend=direct"};
/// With a factor that a balanced load does not reach, rounds are possible, and their counts are exchanged.
const Overrides kDirectRounds = {kDirect[0], "--parallelism.expert_parallel_capacity_factor=2"};
const Overrides kDirectMxfp8Rows = {kDirect[0], kMxfp8Rows[0], kMxfp8Rows[1]};
const Overrides kDirectFull = {kDirect[0], "--activation_checkpoint.mode=full", "--model.args.q_lora_rank=48"};
const Overrides kDirectSelective = {kDirect[0], kSelective[0], kSelective[1]};
const Overrides kInterleaved = {"--parallelism.pipeline_parallel_schedule=Interleaved1F1B"};
const Overrides kZbv = {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"};
const Overrides kZbvSelective = {kZbv[0], kSelective[0], kSelective[1]};

INSTANTIATE_TEST_SUITE_P(
    Meshes, Communication,
    ::testing::Values(
        StepCase{"fsdp2", 2, {}}, StepCase{"fsdp4_two", 4, {}, 2}, StepCase{"fsdp2_vocabulary", 2, {}, 3, kVocabulary},
        StepCase{"fsdp3_float", 3, {}, 3, kFloat}, StepCase{"fsdp2_never", 2, {}, 2, kNever},
        StepCase{"fsdp2_mxfp8", 2, {}, 2, kMxfp8}, StepCase{"replicate3", 3, {.dp_replicate = 3}, 2},
        StepCase{"hsdp", 4, {.dp_replicate = 2}, 2}, StepCase{"fsdp4_reduce", 4, {}, 2, kReduce},
        StepCase{"hsdp_tp2_reduce", 8, {.dp_replicate = 2, .tp = 2}, 1, kReduce},
        StepCase{"ep2_of_fsdp4_reduce", 4, {.ep = 2}, 1, kReduce},
        StepCase{"pp2_fsdp2_reduce", 4, {.pp = 2}, 4, kReduce},
        StepCase{"pp2_fsdp2_micro_batch_reduce", 4, {.pp = 2}, 4, kMicroBatchReduce}, StepCase{"tp2", 2, {.tp = 2}},
        StepCase{"tp2_float", 2, {.tp = 2}, 2, kFloat}, StepCase{"tp4_selective", 4, {.tp = 4}, 1, kSelective},
        StepCase{"tp2_full", 2, {.tp = 2}, 1, kFull}, StepCase{"tp2_full_queries", 2, {.tp = 2}, 1, kFullQueries},
        StepCase{"tp2_no_shared", 2, {.tp = 2}, 1, kNoShared}, StepCase{"tp2_mxfp8", 2, {.tp = 2}, 1, kMxfp8},
        StepCase{"cp2", 2, {.cp = 2}}, StepCase{"cp4_selective", 4, {.cp = 4}, 2, kSelective},
        StepCase{"cp2_tp2_balance", 4, {.cp = 2, .tp = 2}, 1, kBalance}, StepCase{"ep2", 2, {.ep = 2}},
        StepCase{"ep2_mxfp8_rows", 4, {.ep = 2}, 1, kMxfp8Rows}, StepCase{"ep4_selective", 4, {.ep = 4}, 2, kSelective},
        StepCase{"ep2_full", 2, {.ep = 2}, 1, kFull}, StepCase{"ep4_of_2x2", 4, {.ep = 4, .ep_domain = 2}, 2, kDirect},
        StepCase{"ep4_of_2x2_rounds", 4, {.ep = 4, .ep_domain = 2}, 2, kDirectRounds},
        StepCase{"ep8_of_4x2_rounds", 8, {.ep = 8, .ep_domain = 2}, 1, kDirectRounds},
        StepCase{"ep4_of_2x2_mxfp8_rows", 4, {.ep = 4, .ep_domain = 2}, 1, kDirectMxfp8Rows},
        StepCase{"ep8_of_4x2_selective", 8, {.ep = 8, .ep_domain = 2}, 1, kDirectSelective},
        StepCase{"ep8_of_2x4_full", 8, {.ep = 8, .ep_domain = 4}, 1, kDirectFull}, StepCase{"pp2", 2, {.pp = 2}, 4},
        StepCase{"pp2_interleaved", 2, {.pp = 2}, 4, kInterleaved}, StepCase{"pp2_zbv", 2, {.pp = 2}, 4, kZbv},
        StepCase{"pp2_ep2_zbv_selective", 4, {.pp = 2, .ep = 2}, 4, kZbvSelective},
        StepCase{"pp2_fsdp2_micro_batch", 4, {.pp = 2}, 4, kMicroBatch}, StepCase{"pp2_fsdp2", 4, {.pp = 2}, 4},
        StepCase{"pp2_fsdp2_tp2_ep2", 8, {.tp = 2, .pp = 2, .ep = 2}, 2},
        StepCase{"hsdp_cp2_tp2", 8, {.dp_replicate = 2, .cp = 2, .tp = 2}, 2}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tessera
