#include "checkpoint/huggingface.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "mx/formats.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleName = "model.safetensors";
/// Side of the square block of numbers that share a factor in DeepSeek's FP8 files.
constexpr std::int64_t kScaleBlock = 128;
/// How many numbers are converted at a time.
constexpr std::int64_t kChunk = 1 << 18;

/// Hugging Face's names of the parameters within a layer that are not fused here.
const std::map<std::string_view, std::string_view> kLayerNames = {
    {"attention_norm.weight", "input_layernorm.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"attention.wq.weight", "self_attn.q_proj.weight"},
    {"attention.wq_a.weight", "self_attn.q_a_proj.weight"},
    {"attention.q_norm.weight", "self_attn.q_a_layernorm.weight"},
    {"attention.wq_b.weight", "self_attn.q_b_proj.weight"},
    {"attention.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {"attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"},
    {"attention.wkv_b.weight", "self_attn.kv_b_proj.weight"},
    {"attention.wo.weight", "self_attn.o_proj.weight"},
    {"feed_forward.w2.weight", "mlp.down_proj.weight"},
    {"moe.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"},
    {"moe.router.gate.weight", "mlp.gate.weight"},
    {"moe.expert_bias", "mlp.gate.e_score_correction_bias"},
    // Parameters of a module of multi-token prediction.
    {"embedding_norm.weight", "enorm.weight"},
    {"hidden_norm.weight", "hnorm.weight"},
    {"eh_proj.weight", "eh_proj.weight"},
    {"norm.weight", "shared_head.norm.weight"},
};

std::vector<HfTensor> layer_tensors(const std::string& prefix, std::string_view rest, const Shape& shape) {
  if (rest == "feed_forward.w13.weight" || rest == "moe.shared_experts.w13.weight") {
    const std::string mlp = prefix + (rest.starts_with("moe.") ? "mlp.shared_experts." : "mlp.");
    const std::vector<std::int64_t> half = {shape[0] / 2, shape[1]};
    return {{mlp + "gate_proj.weight", half}, {mlp + "up_proj.weight", half}};
  }
  if (rest == "moe.experts.w13" || rest == "moe.experts.w2") {
    std::vector<HfTensor> tensors;
    for (std::int64_t expert = 0; expert < shape[0]; ++expert) {
      const std::string mlp = fmt::format("{}mlp.experts.{}.", prefix, expert);
      if (rest == "moe.experts.w2") {
        tensors.push_back({mlp + "down_proj.weight", {shape[1], shape[2]}});
        continue;
      }
      tensors.push_back({mlp + "gate_proj.weight", {shape[1] / 2, shape[2]}});
      tensors.push_back({mlp + "up_proj.weight", {shape[1] / 2, shape[2]}});
    }
    return tensors;
  }
  const auto found = kLayerNames.find(rest);
  TESSERA_CHECK(found != kLayerNames.end(), "parameter '{}' of a layer", rest);
  return {{prefix + std::string(found->second), shape.dims()}};
}

/// Splits "layers.12.rest" into 12 and "rest".
std::pair<std::int64_t, std::string_view> split_index(std::string_view name) {
  const std::size_t first = name.find('.') + 1, second = name.find('.', first);
  std::int64_t index = -1;
  if (second != std::string_view::npos) std::from_chars(name.data() + first, name.data() + second, index);
  TESSERA_CHECK(index >= 0, "{}", name);
  return {index, name.substr(second + 1)};
}

/// Returns N for "model.layers.N.rest", and -1 for other names.
std::int64_t layer_of(const std::string& name) {
  constexpr std::string_view kLayersPrefix = "model.layers.";
  if (!name.starts_with(kLayersPrefix)) return -1;
  std::int64_t layer = -1;
  std::from_chars(name.data() + kLayersPrefix.size(), name.data() + name.size(), layer);
  return layer;
}

/// Suffix of the name of the tensor that holds the factors of a matrix's blocks.
constexpr std::string_view kScaleSuffix = "_scale_inv";

std::string scale_name(const std::string& name) { return name + std::string(kScaleSuffix); }

/// The number that each E4M3 byte stands for.
constexpr std::array<float, 256> kE4m3 = [] {
  std::array<float, 256> numbers{};
  for (std::size_t code = 0; code < numbers.size(); ++code) {
    numbers[code] = mx::value_of<mx::E4M3>(static_cast<std::uint8_t>(code));
  }
  return numbers;
}();

/// Passes convert(0), convert(1), ..., `count` numbers in all, to `sink` in chunks.
template <typename Convert>
void convert_chunks(std::int64_t count, const FloatSink& sink, Convert&& convert) {
  std::vector<float> chunk(static_cast<std::size_t>(std::min(count, kChunk)));
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = std::min(kChunk, count - begin);
    for (std::int64_t i = 0; i < size; ++i) chunk[static_cast<std::size_t>(i)] = convert(begin + i);
    sink({chunk.data(), static_cast<std::size_t>(size)});
  }
}

/// Returns number i of a mapped file, which need not be aligned.
template <typename T>
T load(std::span<const std::byte> bytes, std::int64_t i) {
  T number;
  std::memcpy(&number, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return number;
}

}  // namespace

std::int64_t HfTensor::num_elements() const {
  std::int64_t product = 1;
  for (const std::int64_t dim : shape) product *= dim;
  return product;
}

std::vector<HfTensor> hf_tensors(const std::string& name, const Shape& shape, std::int64_t num_layers) {
  if (name == "tok_embeddings.weight") return {{"model.embed_tokens.weight", shape.dims()}};
  if (name == "norm.weight") return {{"model.norm.weight", shape.dims()}};
  if (name == "output.weight") return {{"lm_head.weight", shape.dims()}};
  auto [index, rest] = split_index(name);
  if (name.starts_with("mtp.")) {
    index += num_layers;
    if (rest.starts_with("block.")) rest.remove_prefix(std::strlen("block."));
  }
  return layer_tensors(fmt::format("model.layers.{}.", index), rest, shape);
}

HfWeights::HfWeights(const fs::path& folder) : folder_(folder) {
  const fs::path index_path = folder / kHfIndexName;
  if (!path_exists(index_path)) {
    require(path_exists(folder / kSingleName),
            "'{}' holds neither {} nor {}: expected a folder of Hugging Face weights", folder.string(), kHfIndexName,
            kSingleName);
    for (const auto& [name, entry] : shard(kSingleName).entries()) shard_of_.emplace(name, kSingleName);
    return;
  }
  const std::string where = fmt::format("'{}'", index_path.string());
  const nlohmann::json index = parse_json(read_text_file(index_path), where);
  require(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
          "{}: expected an object with the object \"weight_map\"", where);
  for (const auto& [name, file] : index["weight_map"].items()) {
    require(file.is_string(), "{}: the file of '{}' is no string", where, printable(name));
    const auto file_name = file.get<std::string>();
    require_plain_name(file_name, where);
    shard_of_.emplace(name, file_name);
  }
  std::set<std::string> files;
  for (const auto& [name, file] : shard_of_) files.insert(file);
  for (const std::string& file : files) {
    require(path_exists(folder / file), "there is no '{}', which {} names", (folder / file).string(), where);
    for (const auto& [name, entry] : shard(file).entries()) {
      require(shard_of_.contains(name), "'{}' has the tensor '{}', which {} does not list", (folder / file).string(),
              printable(name), where);
    }
  }
}

const SafetensorsFile& HfWeights::shard(const std::string& file_name) const {
  auto found = shards_.find(file_name);
  if (found == shards_.end()) found = shards_.emplace(file_name, SafetensorsFile(folder_ / file_name)).first;
  return found->second;
}

std::vector<std::string> HfWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : shard_of_) names.push_back(name);
  return names;
}

const SafetensorsEntry& HfWeights::at(const std::string& name) const {
  const auto found = shard_of_.find(name);
  require(found != shard_of_.end(), "'{}' has no tensor '{}'", folder_.string(), name);
  return shard(found->second).at(name);
}

void HfWeights::read(const HfTensor& tensor, const FloatSink& sink) const {
  const SafetensorsEntry& entry = at(tensor.name);
  require(entry.shape == tensor.shape, "'{}': tensor '{}' has the shape [{}], this model's has [{}]", folder_.string(),
          tensor.name, fmt::join(entry.shape, ", "), fmt::join(tensor.shape, ", "));
  const std::int64_t count = tensor.num_elements();
  if (entry.dtype == "F32") {
    convert_chunks(count, sink, [&](std::int64_t i) { return load<float>(entry.bytes, i); });
  } else if (entry.dtype == "BF16") {
    convert_chunks(count, sink, [&](std::int64_t i) { return static_cast<float>(load<BFloat16>(entry.bytes, i)); });
  } else if (entry.dtype == "F8_E4M3") {
    require(tensor.shape.size() == 2, "'{}': tensor '{}' is F8_E4M3 but no matrix", folder_.string(), tensor.name);
    const SafetensorsEntry& scales = at(scale_name(tensor.name));
    const std::int64_t columns = tensor.shape[1], blocks = (columns + kScaleBlock - 1) / kScaleBlock;
    const std::vector<std::int64_t> expected = {(tensor.shape[0] + kScaleBlock - 1) / kScaleBlock, blocks};
    require(scales.dtype == "F32" && scales.shape == expected,
            "'{}': tensor '{}' is {} [{}], expected F32 [{}]: a factor per block of 128 x 128", folder_.string(),
            scale_name(tensor.name), scales.dtype, fmt::join(scales.shape, ", "), fmt::join(expected, ", "));
    std::vector<float> row(static_cast<std::size_t>(columns));
    for (std::int64_t r = 0; r < tensor.shape[0]; ++r) {
      for (std::int64_t begin = 0; begin < columns; begin += kScaleBlock) {
        const float scale = load<float>(scales.bytes, r / kScaleBlock * blocks + begin / kScaleBlock);
        for (std::int64_t c = begin; c < std::min(columns, begin + kScaleBlock); ++c) {
          const auto code = static_cast<std::uint8_t>(entry.bytes[static_cast<std::size_t>(r * columns + c)]);
          row[static_cast<std::size_t>(c)] = kE4m3[code] * scale;
        }
      }
      sink(row);
    }
  } else {
    fail("'{}': tensor '{}' is {}; expected F32, BF16 or F8_E4M3", folder_.string(), tensor.name, entry.dtype);
  }
}

void require_same_tensors(const HfWeights& weights, std::span<const NamedTensor> parameters, std::int64_t num_layers) {
  std::set<std::string> expected;
  std::int64_t last_layer = num_layers - 1;
  for (const auto& [name, tensor] : parameters) {
    for (const HfTensor& piece : hf_tensors(name, tensor.shape(), num_layers)) {
      expected.insert(piece.name);
      last_layer = std::max(last_layer, layer_of(piece.name));
    }
  }
  std::vector<std::string> missing, unexpected;
  for (const std::string& name : expected) {
    if (!weights.contains(name)) missing.push_back(name);
  }
  // The layers of multi-token prediction. A model without them can still read the other weights.
  std::set<std::int64_t> mtp_layers;
  for (const std::string& name : weights.names()) {
    if (name.ends_with(".eh_proj.weight")) mtp_layers.insert(layer_of(name));
  }
  for (const std::string& name : weights.names()) {
    const bool is_mtp = layer_of(name) >= num_layers;
    const bool is_copy =
        is_mtp && (name.ends_with(".embed_tokens.weight") || name.ends_with(".shared_head.head.weight"));
    const bool is_scale = name.ends_with(kScaleSuffix);
    const bool may_be_left = layer_of(name) > last_layer && mtp_layers.contains(layer_of(name));
    if (!expected.contains(name) && !is_copy && !is_scale && !may_be_left) unexpected.push_back(name);
  }
  static constexpr std::size_t kShown = 5;
  const auto list = [](std::vector<std::string> names) {
    const std::size_t count = names.size();
    names.resize(std::min(count, kShown));
    std::ranges::transform(names, names.begin(), printable);
    return fmt::format("{} ({}{})", count, fmt::join(names, ", "), count > kShown ? ", ..." : "");
  };
  require(missing.empty(), "the weights are not of this model: missing are {}; not expected {}", list(missing),
          list(unexpected));
  require(unexpected.empty(), "the weights are not of this model: not expected are {}", list(unexpected));
}

void read_hf_parameter(const HfWeights& weights, const std::string& name, const Shape& shape, std::int64_t num_layers,
                       std::int64_t begin, std::int64_t end, const PlacedSink& sink) {
  std::int64_t at = 0;  // of the tensor in the parameter
  for (const HfTensor& tensor : hf_tensors(name, shape, num_layers)) {
    const std::int64_t next = at + tensor.num_elements();
    if (at < end && begin < next) {
      weights.read(tensor, [&](std::span<const float> numbers) {
        sink(at, numbers);
        at += static_cast<std::int64_t>(numbers.size());
      });
    }
    at = next;
  }
}

namespace {

/// A tensor to write: numbers [begin, end) of a parameter.
struct Item {
  SafetensorsSpec spec;
  const NamedTensor* parameter;
  std::int64_t begin, end;
};

std::vector<Item> items_of(std::span<const NamedTensor> parameters, std::int64_t num_layers, DType dtype) {
  std::vector<Item> items;
  const auto add = [&](const HfTensor& tensor, const NamedTensor& parameter, std::int64_t begin, DType stored) {
    items.push_back({.spec = {tensor.name, safetensors_dtype(stored), tensor.shape},
                     .parameter = &parameter,
                     .begin = begin,
                     .end = begin + tensor.num_elements()});
  };
  for (const NamedTensor& parameter : parameters) {
    const DType stored = parameter.name.ends_with(".expert_bias") ? DType::kFloat32 : dtype;
    std::int64_t begin = 0;
    for (const HfTensor& piece : hf_tensors(parameter.name, parameter.tensor.shape(), num_layers)) {
      add(piece, parameter, begin, stored);
      begin += piece.num_elements();
    }
  }
  // DeepSeek's files repeat the embedding and the head in every layer of multi-token prediction.
  for (const auto& [name, tensor] : parameters) {
    if (!name.starts_with("mtp.") || !name.ends_with(".eh_proj.weight")) continue;
    const std::string prefix = fmt::format("model.layers.{}.", num_layers + split_index(name).first);
    const auto add_copy = [&](std::string_view source, const char* target) {
      const auto found = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const NamedTensor& other) { return other.name == source; });
      TESSERA_CHECK(found != parameters.end(), "{}", source);
      add({prefix + target, found->tensor.shape().dims()}, *found, 0, dtype);
    };
    add_copy("tok_embeddings.weight", "embed_tokens.weight");
    add_copy("output.weight", "shared_head.head.weight");
  }
  return items;
}

void write_item(const Item& item, const ParameterSource& source, SafetensorsWriter& writer) {
  std::vector<BFloat16> rounded(static_cast<std::size_t>(kChunk));
  source(*item.parameter, item.begin, item.end, [&](std::span<const float> numbers) {
    if (item.spec.dtype == "F32") return writer.append(std::as_bytes(numbers));
    for (; !numbers.empty(); numbers = numbers.subspan(std::min(numbers.size(), rounded.size()))) {
      const std::span<const float> chunk = numbers.first(std::min(numbers.size(), rounded.size()));
      std::transform(chunk.begin(), chunk.end(), rounded.begin(), [](float x) { return BFloat16(x); });
      writer.append(std::as_bytes(std::span(rounded).first(chunk.size())));
    }
  });
}

}  // namespace

std::int64_t num_hf_elements(std::span<const NamedTensor> parameters, std::int64_t num_layers) {
  std::int64_t sum = 0;
  for (const Item& item : items_of(parameters, num_layers, DType::kFloat32)) sum += item.end - item.begin;
  return sum;
}

void write_hf_weights(const fs::path& folder, std::span<const NamedTensor> parameters, const ParameterSource& source,
                      std::int64_t num_layers, const HfWriteOptions& options) {
  const std::vector<Item> items = items_of(parameters, num_layers, options.dtype);
  std::vector<std::size_t> shard_ends;  // index after each shard's last item
  std::uint64_t shard_bytes = 0, total_bytes = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::uint64_t bytes = items[i].spec.num_bytes();
    if (shard_bytes > 0 && shard_bytes + bytes > options.max_shard_bytes) {
      shard_ends.push_back(i);
      shard_bytes = 0;
    }
    shard_bytes += bytes;
    total_bytes += bytes;
  }
  shard_ends.push_back(items.size());

  nlohmann::json weight_map;
  std::size_t begin = 0;
  for (std::size_t shard = 0; shard < shard_ends.size(); ++shard) {
    const std::size_t end = shard_ends[shard];
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shard_ends.size());
    std::vector<SafetensorsSpec> specs;
    for (std::size_t i = begin; i < end; ++i) {
      specs.push_back(items[i].spec);
      weight_map[items[i].spec.name] = file;
    }
    SafetensorsWriter writer(folder / file, specs, {{"format", "pt"}});
    for (std::size_t i = begin; i < end; ++i) write_item(items[i], source, writer);
    writer.finish();
    begin = end;
  }
  write_whole_file(
      folder / kHfIndexName,
      nlohmann::ordered_json{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}}.dump(2) + "\n");
}

}  // namespace tessera
