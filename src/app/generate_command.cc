#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "base/text.h"
#include "data/load_tokenizer.h"
#include "generate/decoder.h"
#include "generate/sampling.h"
#include "ops/runtime/runtime.h"
#include "run/state/saved_model.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

struct GenerateOptions {
  std::string checkpoint, tokenizer;
  std::string prompt, prompts_file;
  std::int64_t max_new_tokens = 128;
  std::int64_t batch_size = 8;
  SamplingOptions sampling;
  std::int64_t seed = 0;
  std::string dtype = "bfloat16";
  std::string device = "auto";
};

/// One text of a batch.
struct Text {
  std::size_t index;  // index of the prompt
  std::string prompt;
  std::vector<std::int32_t> tokens;                         // BOS, prompt, generated tokens
  std::size_t num_prompt_tokens = 0, num_prompt_bytes = 0;  // bytes: of the decoded prompt
  bool ended = false;                                       // by EOS

  std::size_t num_new_tokens() const { return tokens.size() - num_prompt_tokens; }
  /// Returns the generated text. It is the end of the whole text, because a tokenizer may treat the beginning of one
  /// differently.
  std::string continuation(const data::Tokenizer& tokenizer) const {
    return tokenizer.decode(tokens).substr(num_prompt_bytes);
  }
};

/// Returns the tokenizer of --tokenizer, or else the checkpoint's own. Throws Error for one that the model cannot have
/// learned.
std::unique_ptr<data::Tokenizer> choose_tokenizer(const GenerateOptions& options, const SavedModel& saved) {
  if (options.tokenizer.empty()) return saved.tokenizer();
  std::unique_ptr<data::Tokenizer> chosen = data::load_tokenizer(options.tokenizer), own;
  try {
    own = saved.tokenizer();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a folder of weights may have none
  }
  if (own == nullptr) {
    const std::int64_t vocab = saved.config().model.vocab_size;
    // Models have a few more entries than their tokenizers, so that the size is round.
    require(chosen->vocab_size() <= vocab && 2 * chosen->vocab_size() >= vocab,
            "--tokenizer '{}' has {} tokens, the model in '{}' has {}; expected the tokenizer that it was trained with",
            options.tokenizer, chosen->vocab_size(), options.checkpoint, vocab);
    return chosen;
  }
  require(chosen->vocab_size() == own->vocab_size(),
          "--tokenizer '{}' has {} tokens, but the model in '{}' was trained with a tokenizer of {}, which is in its "
          "folder; leave --tokenizer out",
          options.tokenizer, chosen->vocab_size(), options.checkpoint, own->vocab_size());
  if (chosen->checksum() != own->checksum()) {
    spdlog::warn("--tokenizer '{}' is not the tokenizer that the model in '{}' was trained with", options.tokenizer,
                 options.checkpoint);
  }
  return chosen;
}

class Generator {
 public:
  explicit Generator(const GenerateOptions& options)
      : options_(options),
        saved_(options.checkpoint),
        tokenizer_(choose_tokenizer(options, saved_)),
        cuda_(options.device == "cuda" || (options.device == "auto" && cuda::available()) ? cuda::make_runtime()
                                                                                          : nullptr),
        model_(saved_.config().model, {.device = cuda_ == nullptr ? Device::kCpu : Device::kCuda,
                                       .compute = options.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16,
                                       .seq_len = 1}) {  // the decoder has its own table of positions
    const std::int64_t vocab = model_.config().vocab_size;
    require(tokenizer_->vocab_size() <= vocab, "the tokenizer has {} tokens, the model {}: not the model's tokenizer",
            tokenizer_->vocab_size(), vocab);
    model_.parameters().allocate_weights(model_.options().compute, cuda_.get());
    saved_.load(model_.parameters(), model_.config());
    // Finds the gaps in the tokenizer's ids.
    for (std::int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
      try {
        tokenizer_->decode({&id, 1});
      } catch (const Error&) {
        unknown_ids_.push_back(id);
      }
    }
  }

  /// Generates the texts. Calls `on_token` with a text whenever it has a new token, and once more when it is done.
  template <typename OnToken>
  void run(std::vector<Text> texts, OnToken&& on_token) {
    std::int64_t longest = 0;
    for (Text& text : texts) {
      text.tokens = {tokenizer_->bos_id()};
      const std::vector<std::int32_t> ids = tokenizer_->encode(text.prompt);
      text.tokens.insert(text.tokens.end(), ids.begin(), ids.end());
      text.num_prompt_tokens = text.tokens.size();
      text.num_prompt_bytes = tokenizer_->decode(text.tokens).size();
      longest = std::max(longest, static_cast<std::int64_t>(text.tokens.size()));
    }
    const std::int64_t num_positions = longest + options_.max_new_tokens;
    if (num_positions > saved_.config().seq_len) {
      spdlog::warn("texts of up to {} tokens; the model was trained on {}", num_positions, saved_.config().seq_len);
    }
    const auto num_slots = static_cast<std::int64_t>(texts.size());
    Decoder decoder(model_,
                    {.seq_len = saved_.config().seq_len, .num_slots = num_slots, .num_positions = num_positions},
                    cuda_.get());
    const Stopwatch prefill_watch;
    for (std::size_t slot = 0; slot < texts.size(); ++slot) {
      append(texts[slot], decoder.prefill(static_cast<std::int64_t>(slot), texts[slot].tokens));
      num_prompt_tokens_ += texts[slot].num_prompt_tokens;
      on_token(texts[slot], false);
    }
    num_texts_ += texts.size();
    prefill_seconds_ += prefill_watch.seconds();

    const Stopwatch decode_watch;
    const auto vocab = static_cast<std::size_t>(model_.config().vocab_size);
    std::vector<bool> done(texts.size());
    std::vector<std::int32_t> next(texts.size());
    for (;;) {
      bool all_done = true;
      for (std::size_t slot = 0; slot < texts.size(); ++slot) {
        Text& text = texts[slot];
        if (!done[slot] &&
            (text.ended || static_cast<std::int64_t>(text.num_new_tokens()) >= options_.max_new_tokens)) {
          done[slot] = true;
          on_token(text, true);
        }
        all_done = all_done && done[slot];
        next[slot] = text.tokens.back();  // a text that is done only fills the batch
      }
      if (all_done) break;
      const std::span<const float> logits = decoder.decode(next);
      for (std::size_t slot = 0; slot < texts.size(); ++slot) {
        if (done[slot]) continue;
        append(texts[slot], logits.subspan(slot * vocab, vocab));
        on_token(texts[slot], false);
        ++num_decoded_;
      }
    }
    decode_seconds_ += decode_watch.seconds();
  }

  void report() const {
    // The prompts' pass makes each text's first token, so it does not count for the rate.
    spdlog::info("prompts: {} tokens in {:.2f} s; generated: {} tokens at {:.1f} tokens/s", num_prompt_tokens_,
                 prefill_seconds_, num_texts_ + num_decoded_,
                 decode_seconds_ > 0 ? static_cast<double>(num_decoded_) / decode_seconds_ : 0.0);
  }

  const data::Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  void append(Text& text, std::span<const float> logits) {
    // Each draw has its own random number, whatever else is generated in the batch.
    const Philox random(static_cast<std::uint64_t>(options_.seed), stream_of("generate"));
    const std::uint64_t draw = (static_cast<std::uint64_t>(text.index) << 32) + text.tokens.size();
    logits = logits.first(static_cast<std::size_t>(tokenizer_->vocab_size()));
    logits_.assign(logits.begin(), logits.end());
    for (const std::int32_t id : unknown_ids_) logits_[static_cast<std::size_t>(id)] = -HUGE_VALF;
    const std::int32_t token = sample(logits_, options_.sampling, random.uniform(draw), order_);
    text.tokens.push_back(token);
    text.ended = token == tokenizer_->eos_id();
  }

  const GenerateOptions& options_;
  SavedModel saved_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::shared_ptr<cuda::Runtime> cuda_;  // null on a CPU
  Model model_;
  std::vector<std::int32_t> unknown_ids_, order_;
  std::vector<float> logits_;
  std::size_t num_texts_ = 0, num_prompt_tokens_ = 0, num_decoded_ = 0;
  double prefill_seconds_ = 0.0, decode_seconds_ = 0.0;
};

/// Continues one prompt, and prints the text as it grows.
void generate_one(Generator& generator, const std::string& prompt) {
  std::size_t num_printed = 0;
  bool has_begun = false;
  generator.run({{.index = 0, .prompt = prompt, .tokens = {}}}, [&](const Text& text, bool done) {
    if (!std::exchange(has_begun, true)) fmt::print("{}", prompt);  // after all warnings
    const std::string continuation = text.continuation(generator.tokenizer());
    const std::size_t end = done ? continuation.size() : whole_characters(continuation);
    if (end > num_printed) {
      std::string grown = continuation.substr(num_printed, end - num_printed);
      repair_utf8(grown);
      fmt::print("{}", grown);
      num_printed = end;
    }
    if (done) fmt::print("\n");
    std::fflush(stdout);
  });
}

/// Continues the prompts of a file. Prints one line of JSON per text as soon as it is done.
void generate_file(Generator& generator, const GenerateOptions& options) {
  std::vector<std::string> prompts;
  std::istringstream lines(std::string(without_byte_order_mark(read_text_file(options.prompts_file))));
  for (std::string line; std::getline(lines, line);) {
    if (line.ends_with('\r')) line.pop_back();
    repair_utf8(line);
    prompts.push_back(line);
  }
  require(!prompts.empty(), "'{}' has no line", options.prompts_file);
  const auto batch_size = static_cast<std::size_t>(options.batch_size);
  for (std::size_t begin = 0; begin < prompts.size(); begin += batch_size) {
    std::vector<Text> texts;
    for (std::size_t i = begin; i < std::min(prompts.size(), begin + batch_size); ++i) {
      texts.push_back({.index = i, .prompt = prompts[i], .tokens = {}});
    }
    generator.run(std::move(texts), [&](const Text& text, bool done) {
      if (!done) return;
      std::string continuation = text.continuation(generator.tokenizer());
      repair_utf8(continuation);
      const nlohmann::ordered_json line = {{"index", text.index},
                                           {"prompt", text.prompt},
                                           {"text", continuation},
                                           {"tokens", text.num_new_tokens()},
                                           {"finish", text.ended ? "eos" : "length"}};
      fmt::print("{}\n", line.dump());
      std::fflush(stdout);
    });
  }
}

}  // namespace

void add_generate_command(CLI::App& app) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue texts with a trained model");
  command
      ->add_option("--checkpoint", options->checkpoint,
                   "A checkpoint, a run's folder (its newest counts), or a folder of Hugging Face files")
      ->required();
  CLI::Option* prompt = command->add_option("--prompt", options->prompt, "Text to continue; printed as it grows");
  CLI::Option* prompts =
      command
          ->add_option("--prompts", options->prompts_file,
                       "File with a prompt per line; prints a line of JSON per text as soon as it is done")
          ->excludes(prompt);
  command->add_option("--tokenizer", options->tokenizer,
                      "A tokenizer in place of the one in the checkpoint's folder, for weights without one");
  command->add_option("--max-new-tokens", options->max_new_tokens, "Tokens to generate, at most; an EOS ends a text")
      ->transform(as_count(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", options->sampling.temperature, "Of the softmax; 0: always the most likely token")
      ->check(is_number(0.0, 1e3))
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "Draw from the k most likely tokens; 0: from all")
      ->transform(as_count())
      ->capture_default_str();
  command
      ->add_option("--top-p", options->sampling.top_p,
                   "Draw from the most likely tokens with this probability together")
      ->check(is_number(1e-9, 1.0))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Of the draws")->transform(as_count())->capture_default_str();
  command->add_option("--batch-size", options->batch_size, "Texts of --prompts that are generated together")
      ->transform(as_count(1, 4096))
      ->capture_default_str()
      ->needs(prompts);
  command->add_option("--dtype", options->dtype, "Type of the weights and of the computation")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str();
  command->add_option("--device", options->device, "What to compute on; auto: a GPU if there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->callback([options, prompt] {
    require(prompt->count() > 0 || !options->prompts_file.empty(), "generate: --prompt or --prompts is needed");
    repair_utf8(options->prompt);
    Generator generator(*options);
    prompt->count() > 0 ? generate_one(generator, options->prompt) : generate_file(generator, *options);
    generator.report();
  });
}

}  // namespace tessera
