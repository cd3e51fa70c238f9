#include "data/prepare.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "data/load_tokenizer.h"
#include "system/output_folder.h"
#include "system/progress_bar.h"
#include "system/stop.h"
#include "tensor/parallel.h"
#include "tensor/philox.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

/// Documents are read one by one, tokenized together in batches, and written in order. These limits of a batch do not
/// affect the result.
constexpr std::size_t kBatchBytes = 8u << 20;
constexpr std::size_t kBatchDocuments = 1u << 14;

/// Writes the shards of one split.
class SplitWriter {
 public:
  SplitWriter(fs::path folder, std::string split, const Tokenizer& tokenizer, const PrepareOptions& options)
      : folder_(std::move(folder)), split_(std::move(split)), tokenizer_(tokenizer), options_(options) {}

  void add(const std::vector<std::int32_t>& tokens) {
    constexpr std::size_t kBosAndEos = 2;
    const std::size_t size = tokens.size() + kBosAndEos;
    if (writer_ != nullptr && writer_->num_tokens() + size > options_.shard_tokens) finish_shard();
    if (writer_ == nullptr) {
      require(
          shards_.size() < options_.max_shards,
          "more than {} shards of {} tokens (--shard-tokens) are more files than a run can open; let them be larger",
          options_.max_shards, options_.shard_tokens);
      file_ = fmt::format("{}-{:05}{}", split_, shards_.size(), kShardExtension);
      writer_ = std::make_unique<ShardWriter>(folder_ / file_, tokenizer_);
    }
    writer_->add_document(tokens);
    num_tokens_ += size;
  }

  std::uint64_t num_tokens() const { return num_tokens_; }

  std::vector<ShardEntry> finish() {
    if (writer_ != nullptr) finish_shard();
    return std::move(shards_);
  }

 private:
  void finish_shard() {
    const ShardHeader header = writer_->finish();
    writer_.reset();
    shards_.push_back({.file = file_,
                       .num_bytes = header.file_bytes,
                       .num_tokens = header.num_tokens,
                       .num_documents = header.num_documents,
                       .checksum = header.header_checksum});
  }

  fs::path folder_;
  std::string split_;
  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  std::string file_;
  std::unique_ptr<ShardWriter> writer_;
  std::vector<ShardEntry> shards_;
  std::uint64_t num_tokens_ = 0;
};

constexpr OutputKind kDataset = {.name = "a dataset", .marker = kManifestName, .is_part = [](const fs::path& name) {
                                   return name == kManifestName || is_tokenizer_file(name) ||
                                          name.extension() == kShardExtension;
                                 }};

struct Document {
  std::string text, origin;
};

/// Returns the next documents; none at the end.
std::vector<Document> read_batch(DocumentSource& source) {
  std::vector<Document> batch;
  std::size_t num_bytes = 0;
  std::string text;
  while (batch.size() < kBatchDocuments && num_bytes < kBatchBytes && source.next(text)) {
    throw_if_stopped();
    num_bytes += text.size();
    batch.push_back({std::move(text), source.origin()});
  }
  return batch;
}

std::vector<std::int32_t> encode(const Tokenizer& tokenizer, const Document& document) {
  try {
    return tokenizer.encode(document.text);
  } catch (const Error& error) {
    fail("{}: {}", document.origin, error.what());
  }
}

}  // namespace

PrepareResult prepare_dataset(const PrepareOptions& options) {
  require(options.val_fraction >= 0 && options.val_fraction < 1, "validation fraction {}, expected one in [0, 1)",
          options.val_fraction);
  require(options.shard_tokens >= 1, "0 tokens per shard, expected at least 1");
  check_output(options.output, kDataset, options.overwrite);
  require_outside(options.output, options.inputs);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(options.tokenizer);
  DocumentSource source(options.inputs, options.skip_unknown);

  OutputFolder folder(options.output, kDataset, options.overwrite);
  SplitWriter train(folder.path(), "train", *tokenizer, options);
  SplitWriter val(folder.path(), "val", *tokenizer, options);
  const Philox random(options.seed, stream_of("data.prepare.val"));
  ProgressBar progress("tokenizing", source.num_bytes_total(), "B");
  PrepareResult result;
  std::vector<std::vector<std::int32_t>> tokens;
  std::uint64_t document_idx = 0;
  for (std::vector<Document> batch = read_batch(source); !batch.empty(); batch = read_batch(source)) {
    tokens.resize(batch.size());
    parallel_for(static_cast<std::int64_t>(batch.size()), [&](std::int64_t i) {
      throw_if_stopped();
      const auto at = static_cast<std::size_t>(i);
      tokens[at] = encode(*tokenizer, batch[at]);
    });
    for (const std::vector<std::int32_t>& document : tokens) {
      if (document.empty()) {
        ++result.num_without_tokens;
        continue;
      }
      const bool is_val = random.uniform(document_idx++) < options.val_fraction;
      (is_val ? val : train).add(document);
    }
    progress.set(source.num_bytes_done(),
                 format_quantity(static_cast<double>(document_idx), "documents") + ", " +
                     format_quantity(static_cast<double>(train.num_tokens() + val.num_tokens()), "tokens"));
  }
  const std::uint64_t num_blank = source.statistics().num_empty_documents;
  require(document_idx > 0, "no document with text in the inputs{}{}",
          num_blank == 0 ? "" : fmt::format("; empty, or white space alone: {}", num_blank),
          result.num_without_tokens == 0
              ? ""
              : fmt::format("; without a token of this tokenizer: {}", result.num_without_tokens));
  require(train.num_tokens() > 0,
          "all {} documents fell to validation, none is left to train on: give more documents, another seed, "
          "or a "
          "validation fraction of 0 (it is {})",
          document_idx, options.val_fraction);

  result.source = source.statistics();
  Manifest& manifest = result.manifest;
  manifest.tokenizer_kind = tokenizer->kind();
  manifest.tokenizer_checksum = tokenizer->checksum();
  manifest.vocab_size = tokenizer->vocab_size();
  manifest.bos_id = tokenizer->bos_id();
  manifest.eos_id = tokenizer->eos_id();
  manifest.val_fraction = options.val_fraction;
  manifest.seed = options.seed;
  manifest.splits["train"] = train.finish();
  if (val.num_tokens() > 0) manifest.splits["val"] = val.finish();
  for (const TokenizerFile& part : tokenizer->files()) {
    write_whole_file(folder.path() / part.name, part.content);
  }
  write_manifest(folder.path(), manifest);
  folder.commit();
  return result;
}

}  // namespace tessera::data
