// Measures generation with the debug model at 512 tokens of context: a token from the cache of latents, against
// computing the whole prefix again. Rates are tokens per second.
#include <benchmark/benchmark.h>

#include "generate/decoder.h"
#include "tensor/philox.h"

namespace tessera {
namespace {

constexpr std::int64_t kContext = 512;

/// A model with random weights, and texts that fill its context.
class Bench {
 public:
  Bench(DType compute, std::int64_t num_slots)
      : model_(ModelConfig{}, {.compute = compute, .seq_len = kContext}),
        decoder_(model_, {.seq_len = kContext, .num_slots = num_slots, .num_positions = 2 * kContext}) {
    Parameters& parameters = model_.parameters();
    parameters.allocate_weights(compute);
    std::vector<float> numbers;
    for (ParamId id = 0; id < parameters.size(); ++id) {
      const Philox random(1, static_cast<std::uint32_t>(id));
      numbers.resize(static_cast<std::size_t>(parameters.spec(id).shape.num_elements()));
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = 0.02f * static_cast<float>(random.normal(i));
      parameters.set(id, 0, numbers);
    }
    for (std::int64_t i = 0; i < kContext; ++i) {
      text_.push_back(static_cast<std::int32_t>(i * 7919 % model_.config().vocab_size));
    }
    tokens_.assign(static_cast<std::size_t>(num_slots), 5);
    prefill();
  }

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
  Bench bench(compute, state.range(0));
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
  Bench bench(compute, 1);
  for (auto _ : state) bench.prefill();
  state.SetItemsProcessed(state.iterations());
}

BENCHMARK_CAPTURE(from_cache, float32, DType::kFloat32)->Arg(1)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(from_cache, bfloat16, DType::kBFloat16)->Arg(1)->Arg(8)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recomputing, float32, DType::kFloat32)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recomputing, bfloat16, DType::kBFloat16)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera
