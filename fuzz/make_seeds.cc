// Writes the valid files among the seeds: fuzz_make_seeds FOLDER (fuzz/corpus). They change only if a format does.
// Files that the fuzzer and people found are in the same folder.
#include <sentencepiece_trainer.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "config/job_config.h"
#include "data/dataset.h"
#include "data/shard.h"
#include "data/tokenizers/bpe.h"
#include "data/tokenizers/byte_tokenizer.h"
#include "run/state/hf_config.h"

using namespace tessera;
namespace fs = std::filesystem;

namespace {

void write(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void write_shard(const fs::path& path, const data::Tokenizer& tokenizer) {
  data::ShardWriter writer(path, tokenizer);
  for (const char* text : {"one", "", "three of them"}) writer.add_document(tokenizer.encode(text));
  writer.finish();
}

/// A tokenizer whose vocabulary is so large that shards store ids in four bytes.
class LargeVocabulary final : public data::Tokenizer {
 public:
  std::string_view kind() const override { return "large"; }
  std::int32_t vocab_size() const override { return 100'000; }
  std::int32_t bos_id() const override { return 0; }
  std::int32_t eos_id() const override { return 1; }
  std::vector<std::int32_t> encode(std::string_view text) const override { return {text.begin(), text.end()}; }
  std::string decode(std::span<const std::int32_t>) const override { return {}; }
  std::vector<data::TokenizerFile> files() const override { return {}; }
};

void write_safetensors_seeds(const fs::path& folder) {
  std::vector<float> floats = {0.0f, 1.0f, -2.0f, 3.5f, 4.0f, 5.0f};
  std::vector<std::int32_t> ints = {7, -8};
  const NamedTensor tensors[] = {{"model.w", Tensor(floats.data(), {2, 3}, DType::kFloat32, Device::kCpu)},
                                 {"h", Tensor(floats.data(), {1, 4}, DType::kBFloat16, Device::kCpu)},
                                 {"flat", Tensor(floats.data(), {6}, DType::kFloat32, Device::kCpu)},
                                 {"ids", Tensor(ints.data(), {2}, DType::kInt32, Device::kCpu)}};
  write_safetensors(folder / "seed-tensors", tensors, {{"format", "pt"}});
  write_safetensors(folder / "seed-empty", {}, {});
}

void write_checkpoint_seeds(const fs::path& folder) {
  // The manifest is that of the model.safetensors that the target writes beside it.
  write(folder / "seed-model",
        nlohmann::json{
            {"format", "tessera-checkpoint"},
            {"version", 3},
            {"step", 3},
            {"num_shards", 1},
            {"files",
             {{"model.safetensors",
               {{"bytes", 10}, {"xxh3_64", to_hex(checksum(std::as_bytes(std::span("\x02\0\0\0\0\0\0\0{}", 10))))}}}}},
            {"state", {{"step", 3}, {"tokens", 4096}}}}
            .dump(2));
}

void write_shards_seeds(const fs::path& folder) {
  // These are upper halves of the matrix whose lower half the target writes beside it, or pieces that have too much.
  std::vector<float> numbers(24, 2.0f);
  const Slice rows{.global = {4, 6}}, left{.global = {4, 6}, .dim = 1, .part = 0, .parts = 2};
  const auto write_piece = [&](const char* name, const Piece& piece, DType dtype = DType::kFloat32) {
    const TensorPiece tensor{
        .name = "w", .piece = piece, .numbers = Tensor(numbers.data(), {piece.end - piece.begin}, dtype, Device::kCpu)};
    write_shard(folder / name, {.step = 3, .shard = 0, .num_shards = 2}, std::span(&tensor, 1));
  };
  write_piece("seed-upper", {.slice = rows, .begin = 0, .end = 12});
  write_piece("seed-left", {.slice = left, .begin = 0, .end = 12});
  write_piece("seed-whole", Piece::whole({4, 6}));
  write_piece("seed-bfloat16", {.slice = rows, .begin = 0, .end = 12}, DType::kBFloat16);
}

void write_dataset_seeds(const fs::path& folder) {
  data::Manifest manifest{.tokenizer_kind = "bytes", .vocab_size = 258, .bos_id = 256, .eos_id = 257, .splits = {}};
  manifest.tokenizer_checksum = data::ByteTokenizer().checksum();
  manifest.splits["train"] = {{"train-00000.tokens", 256, 22, 3, 1}, {"train-00001.tokens", 256, 22, 3, 2}};
  manifest.splits["val"] = {{"val-00000.tokens", 256, 22, 3, 4}};
  data::write_manifest(folder, manifest);
  fs::rename(folder / data::kManifestName, folder / "seed-bytes");
}

void write_model(const fs::path& path, const fs::path& scratch, const std::string& options) {
  write(scratch / "text", "the quality of being amicable, the moral of it\nof naming names in the text\n");
  // The rules replace A by a, B by bb, the ligature by fi, and the ideographic space by a space.
  write(scratch / "rules", "41\t61\n42\t62 62\nFB01\t66 69\n3000\t20\n");
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      fmt::format("--input={0}/text --model_prefix={0}/m --minloglevel=2 --num_threads=1 --hard_vocab_limit=false {1}",
                  scratch.string(), fmt::format(fmt::runtime(options), scratch.string())));
  if (!status.ok()) fail("cannot train {}: {}", path.string(), status.ToString());
  fs::rename(scratch / "m.model", path);
}

void write_sentencepiece_seeds(const fs::path& folder, const fs::path& scratch) {
  const std::string lossless = "--normalization_rule_name=identity --remove_extra_whitespaces=false ";
  write_model(folder / "seed-bpe-bytes", scratch,
              lossless + "--model_type=bpe --vocab_size=290 --byte_fallback --add_dummy_prefix=false");
  write_model(folder / "seed-bpe", scratch, "--model_type=bpe --vocab_size=40 --normalization_rule_tsv={}/rules");
  write_model(folder / "seed-unigram", scratch,
              lossless + "--model_type=unigram --vocab_size=40 --user_defined_symbols=<x>,<xx>,ab");
  write_model(folder / "seed-word", scratch, lossless + "--model_type=word --vocab_size=20");
  write_model(folder / "seed-char", scratch, lossless + "--model_type=char --vocab_size=30");
}

void write_config_seeds(const fs::path& folder, const fs::path& overrides_folder) {
  for (const std::string& flavor : model_flavor_names()) {
    JobConfig config;
    config.model.flavor = flavor;
    config.model.args = model_flavor(flavor);
    write(folder / ("seed-" + flavor), config_table(config).to_toml());
  }
  JobConfig config;
  std::string lines;
  for (const auto& entry : config_table(config).describe()) lines += fmt::format("--{}={}\n", entry.key, entry.value);
  write(overrides_folder / "seed-all", lines);
}

void write_hf_seeds(const fs::path& config_folder, const fs::path& index_folder) {
  for (const std::string& flavor : model_flavor_names()) {
    HfConfig config{.model = model_flavor(flavor), .seq_len = flavor == "671B" ? 8192 : 2048};
    config.bos_id = 0;
    config.model.eos_id = config.eos_id = 1;
    for (const HfForm form : {HfForm::kDeepseekV2, HfForm::kDeepseekV3, HfForm::kRemoteCode}) {
      config.form = form;
      if (!hf_obstacles(config).empty()) continue;
      write(config_folder / fmt::format("seed-{}-{}", hf_class_name(form), flavor),
            hf_config_json(config, DType::kBFloat16));
    }
  }
  const char* shard = "model-00001-of-00001.safetensors";
  write(index_folder / "seed-shard",
        nlohmann::json{{"metadata", {{"total_size", 14}}},
                       {"weight_map", {{"a", shard}, {"b", shard}, {"b_scale_inv", shard}}}}
            .dump(1));
}

void write_run_record_seeds(const fs::path& folder) {
  const std::string info = nlohmann::json{
      {"format", "tessera-run"},
      {"version", 1},
      {"program", "0.1.0"},
      {"config", {{"debug.seed", "3"}, {"training.steps", "2"}}},
      {"dataset", {{"train", "0123456789abcdef"}}},
      {"threads", 2},
      {"processor", "one"}}.dump(1);
  const nlohmann::json sites = {{"layers.1.moe.experts.w13", {{"x", 31.5}, {"w", 31.25}, {"dy", nullptr}}},
                                {"output", {{"x", 30.0}}}};
  std::string lines;
  for (const int step : {1, 2}) {
    lines += nlohmann::json{{"step", step},
                            {"loss", 4.5},
                            {"grad_norm", nullptr},
                            {"tokens_per_second", 4000.0},
                            {"memory_bytes", 1000000},
                            {"quantization_sqnr_db", sites}}
                 .dump() +
             "\n";
  }
  write(folder / "seed-run", info + "\n\n" + lines + "{\"step\":2,\"validation_loss\":4.25}\n");
  write(folder / "seed-metrics", lines + "{\"step\":3,");
}

/// Writes tokenizers with bytes, a few merges, and the three ways in which the published tokenizers cut text.
void write_tokenizer_seeds(const fs::path& folder) {
  using nlohmann::json;
  json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[data::byte_level_text(static_cast<std::uint8_t>(byte))] = byte;
  vocab["ab"] = 256;
  vocab["it"] = 257;
  const auto byte_level = [](bool use_regex) {
    return json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
  };
  const auto split = [](const char* pattern) {
    return json{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  };
  const auto sequence = [](json members) { return json{{"type", "Sequence"}, {"pretokenizers", std::move(members)}}; };
  const auto added = [](int id, const char* content, bool special) {
    return json{{"id", id},           {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", !special}, {"normalized", false}, {"special", special}};
  };
  const auto write_style = [&](const char* name, const json& pre_tokenizer, bool ignore_merges) {
    write(folder / name,
          json{{"version", "1.0"},
               {"added_tokens", {added(258, "<s>", true), added(259, "</s>", true), added(260, "x y", false)}},
               {"normalizer", nullptr},
               {"pre_tokenizer", pre_tokenizer},
               {"post_processor", nullptr},
               {"decoder", byte_level(true)},
               {"model",
                {{"type", "BPE"}, {"ignore_merges", ignore_merges}, {"vocab", vocab}, {"merges", {"a b", "i t"}}}}}
              .dump());
  };
  write_style("seed-gpt2", byte_level(true), false);
  write_style(
      "seed-llama3",
      sequence({split("(?i:'s|'t|'re)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"),
                byte_level(false)}),
      true);
  write_style("seed-deepseek",
              sequence({split("\\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f]+"),
                        split(" ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s+(?!\\S)|\\s+"), byte_level(false)}),
              false);
}

}  // namespace

int main(int argc, char** argv) try {
  require(argc == 2, "usage: fuzz_make_seeds FOLDER");
  const fs::path corpus = argv[1];
  for (const char* target : {"checkpoint", "config", "config_overrides", "dataset", "hf_config", "hf_index",
                             "run_record", "safetensors", "sentencepiece", "shard", "shards", "tokenizer_json"}) {
    fs::create_directories(corpus / target);
  }
  write_safetensors_seeds(corpus / "safetensors");
  write_checkpoint_seeds(corpus / "checkpoint");
  write_shards_seeds(corpus / "shards");
  write_dataset_seeds(corpus / "dataset");
  write_shard(corpus / "shard" / "seed-bytes", data::ByteTokenizer());
  write_shard(corpus / "shard" / "seed-large-ids", LargeVocabulary());
  const fs::path scratch = corpus / "scratch";
  fs::create_directories(scratch);
  write_sentencepiece_seeds(corpus / "sentencepiece", scratch);
  fs::remove_all(scratch);
  write_config_seeds(corpus / "config", corpus / "config_overrides");
  write_hf_seeds(corpus / "hf_config", corpus / "hf_index");
  write_tokenizer_seeds(corpus / "tokenizer_json");
  write_run_record_seeds(corpus / "run_record");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "make_seeds: %s\n", error.what());
  return 1;
}
