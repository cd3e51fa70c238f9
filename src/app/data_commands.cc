// `tessera data` makes tokenizers and datasets from text.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "data/dataset.h"
#include "data/document_source.h"
#include "data/load_tokenizer.h"
#include "data/prepare.h"
#include "data/sentencepiece_trainer.h"
#include "data/tokenizers/tokenizer.h"
#include "system/file_lock.h"
#include "system/stop.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInputHelp =
    "Text: files, or folders that are searched for files. NAME.jsonl, .ndjson or .json: a document per line, "
    "{\"text\": "
    "...}; NAME.dict or .dict.dz with NAME.index beside it: a document per entry of the dictd database; any "
    "other file: "
    "one document. Files may be compressed by gzip";

void report_source(const data::SourceStatistics& source) {
  if (source.num_repaired_documents > 0) {
    spdlog::warn(
        "{} documents are not UTF-8 throughout (the first: {}); U+FFFD stands for what is not. If that is another "
        "encoding, convert it: iconv -f WINDOWS-1252 -t UTF-8 IN > OUT",
        source.num_repaired_documents, source.first_repaired);
  }
  if (source.num_empty_documents > 0) {
    spdlog::warn("{} documents are left out: they are empty, or white space alone (the first: {})",
                 source.num_empty_documents, source.first_empty);
  }
}

constexpr const char* kSkipHelp =
    "Leave out files that are not text (images, Parquet, other encodings, ...) and say how many, in place of an error";

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int64_t>::max();
constexpr const char* kOutputNames = "--output,--out";

void print_splits(const data::Manifest& manifest) {
  for (const auto& [name, shards] : manifest.splits) {
    fmt::print("  {:<6} {:>14} tokens {:>12} documents {:>6} shards\n", name, data::num_tokens(shards),
               data::num_documents(shards), shards.size());
  }
}

void print_manifest(const data::Manifest& manifest) {
  fmt::print("tokenizer: {}, {} pieces, BOS {}, EOS {}, checksum {:016x}\n", manifest.tokenizer_kind,
             manifest.vocab_size, manifest.bos_id, manifest.eos_id, manifest.tokenizer_checksum);
  fmt::print("validation: {} of the documents, seed {}\n", manifest.val_fraction, manifest.seed);
  print_splits(manifest);
}

struct TokenizerCommand {
  std::vector<std::string> inputs;
  std::string output;
  data::SentencePieceOptions options;
  bool overwrite = false, skip_unknown = false;

  void run() const {
    fs::path path(output);
    if (path.extension() != ".model") path /= data::kTokenizerModelName;
    const auto require_absent = [&] {
      require(overwrite || !path_exists(path), "output '{}': it exists; --force replaces it", path.string());
    };
    require_absent();
    data::require_outside(path, {inputs.begin(), inputs.end()});
    const Stopwatch watch;
    data::DocumentSource source({inputs.begin(), inputs.end()}, skip_unknown);
    if (path.has_parent_path()) create_folder(path.parent_path());
    const FileLock lock(path.string() + ".lock", fmt::format("the output '{}'", path.string()),
                        {.at_end = FileLock::AtEnd::kRemoveFile});
    require_absent();
    const std::string model = data::train_sentencepiece(source, options);
    report_source(source.statistics());
    write_whole_file(path, model);
    spdlog::info("trained on {} documents of {} bytes in {:.1f} s", source.statistics().num_documents,
                 source.statistics().num_text_bytes, watch.seconds());
    fmt::print("{}: {} pieces\n", path.string(), data::load_tokenizer(path.string())->vocab_size());
  }
};

struct PrepareCommand {
  std::vector<std::string> inputs;
  data::PrepareOptions options;
  std::string output;
  int num_threads = 0;

  void run() {
    if (num_threads > 0) set_num_threads(num_threads);
    options.inputs.assign(inputs.begin(), inputs.end());
    options.output = output;
    const Stopwatch watch;
    const data::PrepareResult result = data::prepare_dataset(options);
    report_source(result.source);
    if (result.num_without_tokens > 0) {
      spdlog::warn("{} documents are left out: the tokenizer has no token for any of their text",
                   result.num_without_tokens);
    }
    if (options.val_fraction > 0 && !result.manifest.splits.contains("val")) {
      spdlog::warn(
          "no document fell to validation: there are only {} (a file of text is one, and a line of a .jsonl file is "
          "one). A larger --val-fraction sets some aside; --validation.enable=false trains without",
          result.source.num_documents);
    }
    spdlog::info("{} documents of {} bytes in {:.1f} s", result.source.num_documents, result.source.num_text_bytes,
                 watch.seconds());
    fmt::print("{}:\n", output);
    print_manifest(result.manifest);
  }
};

struct InspectCommand {
  std::string folder;
  std::string split = "train";
  std::uint64_t document = 0;
  bool has_document = false;

  void run() const {
    const data::Manifest manifest = data::read_manifest(folder);
    fmt::print("{}:\n", folder);
    print_manifest(manifest);
    const auto tokenizer = data::load_dataset_tokenizer(folder, manifest);
    if (has_document) {
      print_document(manifest, *tokenizer);
      return;
    }
    for (const auto& [name, entries] : manifest.splits) {
      const std::vector<data::Shard> shards = data::open_split(folder, manifest, name);
      parallel_for(static_cast<std::int64_t>(shards.size()),
                   [&](std::int64_t i) { shards[static_cast<std::size_t>(i)].verify(); });
    }
    fmt::print("all checksums are right\n");
  }

  void print_document(const data::Manifest& manifest, const data::Tokenizer& tokenizer) const {
    std::uint64_t index = document;
    for (const data::Shard& shard : data::open_split(folder, manifest, split)) {
      if (index >= shard.num_documents()) {
        index -= shard.num_documents();
        continue;
      }
      const data::TokenRange range = shard.document(index);
      std::vector<std::int32_t> ids(range.end - range.begin);
      shard.read_tokens(range.begin, ids);
      fmt::print("document {} of {}: {}, tokens {} to {}\n{}\n", document, split, shard.path().filename().string(),
                 range.begin, range.end - 1, tokenizer.decode(ids));
      return;
    }
    fail("document {}: split '{}' of dataset '{}' has {} documents, counted from 0", document, split, folder,
         data::num_documents(manifest.splits.at(split)));
  }
};

void add_tokenizer_command(CLI::App& parent) {
  auto command = std::make_shared<TokenizerCommand>();
  CLI::App* app = parent.add_subcommand("tokenizer", "Train a SentencePiece BPE tokenizer on text");
  app->add_option("--input", command->inputs, kInputHelp)->required();
  app->add_option(kOutputNames, command->output,
                  "Where the model goes: NAME.model, or a folder, which then gets tokenizer.model")
      ->required();
  app->add_option("--vocab-size", command->options.vocab_size,
                  "Number of pieces, with 3 control pieces and 256 byte pieces")
      ->transform(as_count())
      ->capture_default_str();
  app->add_option("--sample-bytes", command->options.sample_bytes,
                  "Train on a random sample of this many bytes of the text (memory grows with it)")
      ->transform(as_count(1, kMaxCount))
      ->capture_default_str();
  app->add_option("--seed", command->options.seed, "Seed of the sample")
      ->transform(as_count(0, kMaxCount))
      ->capture_default_str();
  app->add_flag("--skip-unknown", command->skip_unknown, kSkipHelp);
  app->add_flag("--force", command->overwrite, "Replace the model if it exists");
  app->callback([command] { command->run(); });
}

std::string name_of_signal(int signal) {
  return signal == SIGINT ? "Ctrl-C (SIGINT)" : fmt::format("SIG{}", ::sigabbrev_np(signal));
}

void add_prepare_command(CLI::App& parent, int& status) {
  auto command = std::make_shared<PrepareCommand>();
  CLI::App* app = parent.add_subcommand("prepare", "Turn text into a dataset: a folder of checksummed token shards");
  data::PrepareOptions& options = command->options;
  app->add_option("--input", command->inputs, kInputHelp)->required();
  app->add_option("--tokenizer", options.tokenizer,
                  "'bytes', a SentencePiece model file, a tokenizer.json, or a folder with one of them")
      ->required();
  app->add_option(kOutputNames, command->output, "The dataset's folder; it appears when it is whole")->required();
  app->add_option("--val-fraction", options.val_fraction, "Fraction of the documents kept for validation, below 1")
      ->check(is_number(0.0, 1.0))
      ->capture_default_str();
  app->add_option("--shard-tokens", options.shard_tokens, "Tokens per shard, at most (but one document at least)")
      ->transform(as_count(1, kMaxCount))
      ->capture_default_str();
  app->add_option("--seed", options.seed, "Seed of the choice of validation documents")
      ->transform(as_count(0, kMaxCount))
      ->capture_default_str();
  app->add_option("--threads", command->num_threads,
                  "Threads that tokenize; the result does not depend on it (default: all cores)")
      ->transform(as_count(1, 4096));
  app->add_flag("--skip-unknown", options.skip_unknown, kSkipHelp);
  app->add_flag("--force", options.overwrite, "Replace the dataset if it exists");
  app->callback([command, &status] {
    handle_stop_signals(request_stop);
    try {
      command->run();
    } catch (const Stopped& stopped) {
      spdlog::info("stopped by {}: '{}' is not written, and what was begun is removed",
                   name_of_signal(stopped.signal()), command->output);
      status = 128 + stopped.signal();
    }
  });
}

void add_inspect_command(CLI::App& parent) {
  auto command = std::make_shared<InspectCommand>();
  CLI::App* app = parent.add_subcommand("inspect", "Describe a dataset, and check all of it or print a document");
  app->add_option("DIR", command->folder, "The dataset's folder")->required();
  CLI::Option* document = app->add_option("--document", command->document,
                                          "Print this document's text (counted from 0) in place of checking")
                              ->transform(as_count(0, kMaxCount));
  app->add_option("--split", command->split, "The split that --document counts in: train or val")
      ->capture_default_str()
      ->needs(document);
  app->callback([command, document] {
    command->has_document = document->count() > 0;
    command->run();
  });
}

}  // namespace

void add_data_commands(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("data", "Make tokenizers and datasets, and look into them");
  command->require_subcommand(1);
  add_tokenizer_command(*command);
  add_prepare_command(*command, status);
  add_inspect_command(*command);
}

}  // namespace tessera
