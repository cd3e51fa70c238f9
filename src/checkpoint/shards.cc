#include "checkpoint/shards.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStepKey = "step";
constexpr const char* kShardKey = "shard";
constexpr const char* kNumShardsKey = "num_shards";
constexpr const char* kPiecesKey = "pieces";
constexpr std::string_view kSuffix = ".safetensors";

/// Limit of the elements of a tensor, far beyond any real one. It keeps products of dims from overflowing.
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 48;

std::string to_json(const Piece& piece) {
  return nlohmann::ordered_json{{"shape", piece.slice.global.dims()},
                                {"dim", piece.slice.dim},
                                {"blocks", piece.slice.blocks},
                                {"part", piece.slice.part},
                                {"parts", piece.slice.parts},
                                {"begin", piece.begin},
                                {"end", piece.end}}
      .dump();
}

/// Reads a piece. Throws Error unless it is the place of `num_elements` numbers.
Piece parse_piece(const nlohmann::json& json, std::int64_t num_elements, const std::string& place) {
  const JsonFields fields(json, place);
  std::vector<std::int64_t> dims;
  std::uint64_t total = 1;
  for (const nlohmann::json& dim : fields.array("shape")) {
    require(dim.is_number_unsigned() && dim > 0 && dim <= kMaxElements / total,
            "{}: expected numbers of at least 1 whose product is at most {}, got {}", fields.place_of("shape"),
            kMaxElements, describe_json(dim));
    dims.push_back(dim.get<std::int64_t>());
    total *= dim.get<std::uint64_t>();
  }
  require(!dims.empty() && dims.size() <= Shape::kMaxDims, "{}: expected 1 to {} dims, got {}",
          fields.place_of("shape"), Shape::kMaxDims, dims.size());
  const auto count = [&](const char* name) { return static_cast<std::int64_t>(fields.count(name, kMaxElements)); };
  const Piece piece{.slice = {.global = Shape(dims),
                              .dim = static_cast<int>(fields.count("dim", dims.size() - 1)),
                              .blocks = count("blocks"),
                              .part = count("part"),
                              .parts = count("parts")},
                    .begin = count("begin"),
                    .end = count("end")};
  const Slice& slice = piece.slice;
  const std::int64_t dim = slice.global[slice.dim];
  require(slice.blocks > 0 && dim % slice.blocks == 0 && slice.parts > 0 && dim / slice.blocks % slice.parts == 0,
          "{}: dim {} of {} cannot be cut into {} blocks of {} parts", place, slice.dim, slice.global.to_string(),
          slice.blocks, slice.parts);
  require(slice.part < slice.parts, "{}: part {} of {}", place, slice.part, slice.parts);
  require(
      piece.begin <= piece.end && piece.end <= slice.local().num_elements() && piece.end - piece.begin == num_elements,
      "{}: numbers {} to {} of {}, of which the file has {}", place, piece.begin, piece.end, slice.local().to_string(),
      num_elements);
  return piece;
}

void require_id(const SafetensorsFile& file, const fs::path& path, const ShardId& expected) {
  for (const auto& [key, value] :
       {std::pair{kStepKey, expected.step}, {kShardKey, expected.shard}, {kNumShardsKey, expected.num_shards}}) {
    const auto found = file.metadata().find(key);
    require(found != file.metadata().end(), "'{}': no {} in its metadata: no shard of a checkpoint", path.string(),
            key);
    require(found->second == fmt::format("{}", value),
            "'{}': {} is {} in its metadata, expected {}: it belongs to another checkpoint", path.string(), key,
            describe_json(nlohmann::json(found->second)), value);
  }
}

}  // namespace

std::string shard_file_name(std::string_view kind, std::int64_t shard, std::int64_t num_shards) {
  if (num_shards == 1) return fmt::format("{}{}", kind, kSuffix);
  return fmt::format("{}-{:05}-of-{:05}{}", kind, shard, num_shards, kSuffix);
}

bool is_shard_file_name(std::string_view name, std::string_view kind) {
  return name.starts_with(kind) && name.ends_with(kSuffix);
}

std::map<std::string, std::string> shard_metadata(const ShardId& id) {
  return {{"format", "pt"},
          {kStepKey, fmt::format("{}", id.step)},
          {kShardKey, fmt::format("{}", id.shard)},
          {kNumShardsKey, fmt::format("{}", id.num_shards)}};
}

void read_from_host(const Tensor& tensor, const ByteSink& sink) {
  sink({static_cast<const std::byte*>(tensor.raw()), tensor.num_bytes()});
}

WrittenFile write_shard(const fs::path& path, const ShardId& id, std::span<const TensorPiece> tensors,
                        const std::stop_token& stop, const ReadTensor& read) {
  std::map<std::string, std::string> metadata = shard_metadata(id);
  std::vector<SafetensorsSpec> specs;
  std::string pieces;
  for (const auto& [name, piece, numbers] : tensors) {
    TESSERA_CHECK(numbers.is_contiguous() && numbers.num_elements() == piece.end - piece.begin, "{}", name);
    specs.push_back({.name = name,
                     .dtype = safetensors_dtype(numbers.dtype()),
                     .shape = piece.is_whole() ? piece.slice.global.dims() : numbers.shape().dims()});
    if (piece.is_whole()) continue;
    pieces += fmt::format("{}{}: {}", pieces.empty() ? "{" : ", ", nlohmann::json(name).dump(), to_json(piece));
  }
  if (!pieces.empty()) metadata[kPiecesKey] = pieces + "}";
  SafetensorsWriter writer(path, specs, metadata);
  for (const TensorPiece& tensor : tensors) {
    read(tensor.numbers, [&](std::span<const std::byte> bytes) {
      require(!stop.stop_requested(), "writing '{}' was given up", path.string());
      writer.append(bytes);
    });
  }
  return writer.finish();
}

Tensor AssembledTensor::stretch(std::int64_t begin) const {
  const auto behind = std::upper_bound(runs_.begin(), runs_.end(), begin,
                                       [](std::int64_t index, const Run& run) { return index < run.begin; });
  TESSERA_CHECK(behind != runs_.begin(), "{}", begin);
  const Run& run = *std::prev(behind);
  TESSERA_CHECK(begin < run.begin + run.count, "{} {} {}", begin, run.begin, run.count);
  return run.numbers.rows(begin - run.begin, run.count);
}

std::span<const float> AssembledTensor::from(std::int64_t begin) const {
  const Tensor numbers = stretch(begin);
  return {numbers.data<float>(), static_cast<std::size_t>(numbers.num_elements())};
}

void AssembledTensor::read(const Piece& piece, float* target) const {
  piece.slice.for_each_run(piece.begin, piece.end, [&](std::int64_t, std::int64_t global, std::int64_t count) {
    for (const std::int64_t end = global + count; global < end;) {
      const Tensor numbers = stretch(global);
      const std::int64_t size = std::min(numbers.num_elements(), end - global);
      const auto copy = [&](const auto* from) {
        target = std::transform(from, from + size, target, [](auto number) { return static_cast<float>(number); });
      };
      numbers.dtype() == DType::kBFloat16 ? copy(numbers.data<BFloat16>()) : copy(numbers.data<float>());
      global += size;
    }
  });
}

ShardFiles::ShardFiles(const fs::path& folder, std::string_view kind, std::int64_t step, std::int64_t num_shards,
                       const std::set<std::int64_t>& shards)
    : folder_(folder), kind_(kind) {
  for (const std::int64_t shard : shards) {
    paths_.push_back(folder / shard_file_name(kind, shard, num_shards));
    files_.emplace_back(paths_.back());
    require_id(files_.back(), paths_.back(), {step, shard, num_shards});
  }
  for (std::size_t file = 0; file < files_.size(); ++file) add(file);
}

std::set<std::int64_t> ShardFiles::all_of(std::int64_t num_shards) {
  std::set<std::int64_t> shards;
  for (std::int64_t shard = 0; shard < num_shards; ++shard) shards.insert(shards.end(), shard);
  return shards;
}

void ShardFiles::add(std::size_t file) {
  const SafetensorsFile& shard = files_[file];
  const std::string where = fmt::format("'{}'", paths_[file].string());
  const auto text = shard.metadata().find(kPiecesKey);
  const auto places = text == shard.metadata().end()
                          ? nlohmann::json::object()
                          : parse_json(text->second, fmt::format("{}, {}", where, kPiecesKey));
  require(places.is_object(), "{}: {} is no JSON object", where, kPiecesKey);
  for (const auto& [name, place] : places.items()) shard.at(name);  // throws Error if it is not there
  for (const auto& [name, entry] : shard.entries()) {
    const std::string tensor = fmt::format("{}, tensor '{}'", where, printable(name));
    const bool may_be_bf16 = kind_ == kOptimizerShards, is_bf16 = may_be_bf16 && entry.dtype == "BF16";
    require(is_bf16 || entry.dtype == "F32", "{}: it is {}, expected F32{}", tensor, entry.dtype,
            may_be_bf16 ? " or BF16" : "");
    const DType dtype = is_bf16 ? DType::kBFloat16 : DType::kFloat32;
    require(reinterpret_cast<std::uintptr_t>(entry.bytes.data()) % size_of(dtype) == 0, "{}: not aligned", tensor);
    const auto num_elements = static_cast<std::int64_t>(entry.bytes.size() / size_of(dtype));
    const auto place = places.find(name);
    // The cast is safe, because the mapped file is only read.
    StoredPiece stored{
        .file = file,
        .piece = {},
        .numbers = Tensor(const_cast<std::byte*>(entry.bytes.data()), {num_elements}, dtype, Device::kCpu)};
    if (place != places.end()) {
      stored.piece = parse_piece(*place, num_elements, tensor);
    } else {
      require(!entry.shape.empty() && entry.shape.size() <= Shape::kMaxDims, "{}: {} dims, expected 1 to {}", tensor,
              entry.shape.size(), Shape::kMaxDims);
      stored.piece = Piece::whole(Shape(entry.shape));
    }
    std::vector<StoredPiece>& pieces = pieces_[name];
    const Shape& shape = stored.piece.slice.global;
    require(pieces.empty() || pieces.front().piece.slice.global == shape,
            "{}: it is a piece of {}, but in '{}' one of {}", tensor, shape.to_string(),
            pieces.empty() ? "" : paths_[pieces.front().file].string(),
            pieces.empty() ? "" : pieces.front().piece.slice.global.to_string());
    pieces.push_back(stored);
  }
}

const ShardFiles::StoredPiece* ShardFiles::find(const std::string& name, const Piece& piece) const {
  const auto stored = pieces_.find(name);
  if (stored == pieces_.end()) return nullptr;
  // A file has no place for a whole tensor, so the dim and the blocks that it could be cut by are not known.
  const Piece wanted = piece.is_whole() ? Piece::whole(piece.slice.global) : piece;
  const auto found = std::ranges::find(stored->second, wanted, &StoredPiece::piece);
  return found == stored->second.end() ? nullptr : &*found;
}

bool ShardFiles::has(std::span<const TensorPiece> pieces) const {
  return std::ranges::all_of(pieces,
                             [&](const TensorPiece& wanted) { return find(wanted.name, wanted.piece) != nullptr; });
}

AssembledTensor ShardFiles::piece_at(const std::string& name, const Piece& piece) const {
  const StoredPiece* stored = find(name, piece);
  TESSERA_CHECK(stored != nullptr, "{}", name);
  AssembledTensor tensor;
  add_runs(*stored, tensor);
  std::ranges::sort(tensor.runs_, {}, &AssembledTensor::Run::begin);
  return tensor;
}

void ShardFiles::add_runs(const StoredPiece& stored, AssembledTensor& tensor) const {
  const Piece& piece = stored.piece;
  piece.slice.for_each_run(piece.begin, piece.end, [&](std::int64_t local, std::int64_t global, std::int64_t count) {
    const std::int64_t first = local - piece.begin;
    tensor.runs_.push_back({global, count, stored.numbers.rows(first, first + count), &paths_[stored.file]});
  });
}

AssembledTensor ShardFiles::at(const std::string& name, const Shape& shape) const {
  const auto found = pieces_.find(name);
  require(found != pieces_.end(), "'{}' has no tensor '{}' in its {} shards", folder_.string(), name, kind_);
  AssembledTensor tensor;
  for (const StoredPiece& stored : found->second) {
    const Piece& piece = stored.piece;
    require(piece.slice.global == shape, "'{}', tensor '{}': the shape is {}, expected {}",
            paths_[stored.file].string(), name, piece.slice.global.to_string(), shape.to_string());
    add_runs(stored, tensor);
  }
  std::ranges::sort(tensor.runs_, {}, &AssembledTensor::Run::begin);
  std::int64_t end = 0;
  const fs::path* last_file = nullptr;
  const auto require_no_gap = [&](std::int64_t next) {
    require(next <= end, "'{}', tensor '{}': numbers {} to {} of {} are in none of its {} shards", folder_.string(),
            name, end, next - 1, shape.num_elements(), kind_);
  };
  for (const auto& run : tensor.runs_) {
    require_no_gap(run.begin);
    require(run.begin == end, "'{}', tensor '{}': number {} is in '{}' as well", run.file->string(), name, run.begin,
            last_file == nullptr ? "" : last_file->string());
    end = run.begin + run.count;
    last_file = run.file;
  }
  require_no_gap(shape.num_elements());
  return tensor;
}

}  // namespace tessera
