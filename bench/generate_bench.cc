// Measures generation with the debug model at 512 tokens of context: a token from the cache of latents, against
// computing the whole prefix again. Rates are tokens per second. If there is a GPU, it also decodes with 8 layers of
// the 16B model there. Its rate in bytes counts the weights that one token reads.
#include <benchmark/benchmark.h>

#include <memory>

#include "config/job_config.h"
#include "generate/decoder.h"
#include "ops/runtime/runtime.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr std::int64_t kContext = 512;

/// Fills all weights with one block of random numbers, again and again: drawing 4 billion for a GPU would take minutes.
void fill(Parameters& parameters) {
  std::vector<float> block(std::size_t{1} << 24);
  const Philox random(1, stream_of("bench.generate"));
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = 0.02f * static_cast<float>(random.normal(i));
  for (ParamId id = 0; id < parameters.size(); ++id) {
    const std::int64_t size = parameters.spec(id).shape.num_elements();
    for (std::int64_t at = 0; at < size; at += std::ssize(block)) {
      const std::int64_t count = std::min(size - at, std::ssize(block));
      parameters.set(id, at, std::span(block).first(static_cast<std::size_t>(count)));
    }
  }
}

/// A model with random weights, and texts that fill its context. `cuda` is null on a CPU.
class Bench {
 public:
  Bench(const ModelConfig& config, DType compute, std::int64_t num_slots, cuda::Runtime* cuda = nullptr)
      : model_(config,
               {.device = cuda == nullptr ? Device::kCpu : Device::kCuda, .compute = compute, .seq_len = kContext}),
        decoder_(model_, {.seq_len = kContext, .num_slots = num_slots, .num_positions = 2 * kContext}, cuda) {
    model_.parameters().allocate_weights(compute, cuda);
    fill(model_.parameters());
    for (std::int64_t i = 0; i < kContext; ++i) {
      text_.push_back(static_cast<std::int32_t>(i * 7919 % config.vocab_size));
    }
    tokens_.assign(static_cast<std::size_t>(num_slots), 5);
    prefill();
  }

  const Model& model() const { return model_; }
  void prefill() {
    for (std::size_t slot = 0; slot < tokens_.size(); ++slot) decoder_.prefill(static_cast<std::int64_t>(slot), text_);
  }
  void decode() { benchmark::DoNotOptimize(decoder_.decode(tokens_).data()); }

 private:
  Model model_;
  Decoder decoder_;
  std::vector<std::int32_t> text_, tokens_;
};

void from_cache(benchmark::State& state, DType compute) {
  Bench bench(ModelConfig{}, compute, state.range(0));
  std::int64_t at = 0;
  for (auto _ : state) {
    bench.decode();
    if (++at % 32 == 0) {  // the context stays near 512 tokens
      state.PauseTiming();
      bench.prefill();
      state.ResumeTiming();
    }
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void recomputing(benchmark::State& state, DType compute) {
  Bench bench(ModelConfig{}, compute, 1);
  for (auto _ : state) bench.prefill();
  state.SetItemsProcessed(state.iterations());
}

void on_gpu(benchmark::State& state) {
  const ModelConfig config = parse_job_config("", {"--model.flavor=16B", "--model.args.n_layers=8"}).model.args;
  const std::shared_ptr<cuda::Runtime> runtime = cuda::make_runtime();
  Bench bench(config, DType::kBFloat16, state.range(0), runtime.get());
  for (int i = 0; i < 3; ++i) bench.decode();  // loads kernels, and records the graph
  for (auto _ : state) bench.decode();
  state.SetItemsProcessed(state.iterations() * state.range(0));
  if (state.range(0) > 1) return;
  const ParameterCounts counts = bench.model().count_parameters();
  state.SetBytesProcessed(state.iterations() * 2 * (counts.active - counts.embedding));  // of bfloat16
}

const bool kOnGpu = [] {
  if (!cuda::available()) return false;
  benchmark::RegisterBenchmark("on_gpu/16B_8_layers", on_gpu)
      ->Arg(1)
      ->Arg(8)
      ->Iterations(400)  // the context has room for 512 tokens more
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
  return true;
}();

BENCHMARK_CAPTURE(from_cache, float32, DType::kFloat32)->Arg(1)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(from_cache, bfloat16, DType::kBFloat16)->Arg(1)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recomputing, float32, DType::kFloat32)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recomputing, bfloat16, DType::kBFloat16)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera
