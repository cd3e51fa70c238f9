// The tensors of a checkpoint, spread over files. Every rank writes its own ("model-00002-of-00008.safetensors").
//
// A rank's numbers of a tensor are a piece: a range of the flattened part that tensor or expert parallelism gives the
// rank (Slice). In the file the piece is a tensor [n] under the whole tensor's name, and the metadata gives its place.
// A piece that is the whole tensor has the tensor's shape and no place. So the file of a single rank is a plain
// safetensors file. Metadata of a file ("__metadata__", values are strings):
//
//   step, shard, num_shards   the checkpoint that the file belongs to, and which of its files it is
//   pieces                    JSON: {"NAME": {"shape": [512, 256], "dim": 0, "blocks": 1, "part": 1, "parts": 2,
//                             "begin": 0, "end": 16384}, ...}; the first five are the fields of Slice, and "shape" is
//                             its `global`
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "parallel/slice.h"

namespace tessera {

// The kinds of shards that a checkpoint has.
inline constexpr std::string_view kModelShards = "model";
inline constexpr std::string_view kOptimizerShards = "optimizer";

/// Identifies one file of one checkpoint.
struct ShardId {
  std::int64_t step = 0;
  std::int64_t shard = 0, num_shards = 1;
};

/// Returns "model.safetensors" if there is one shard, else, for example, "model-00002-of-00008.safetensors".
std::string shard_file_name(std::string_view kind, std::int64_t shard, std::int64_t num_shards);
/// Returns whether a name begins and ends like those that shard_file_name gives to shards of this kind.
bool is_shard_file_name(std::string_view name, std::string_view kind);

/// Returns the metadata of a file whose tensors are whole.
std::map<std::string, std::string> shard_metadata(const ShardId& id);

/// Describes a range of a rank's part of a tensor: numbers [begin, end) of the flattened local tensor of `slice`.
struct Piece {
  Slice slice;
  std::int64_t begin = 0, end = 0;

  static Piece whole(const Shape& shape) { return {{.global = shape}, 0, shape.num_elements()}; }
  bool is_whole() const { return slice.parts == 1 && begin == 0 && end == slice.global.num_elements(); }
  bool operator==(const Piece&) const = default;
};

struct TensorPiece {
  std::string name;
  Piece piece;
  Tensor numbers;  // [end - begin], float32; the optimizer's may be bfloat16
};

/// Passes the bytes of a tensor to `sink`, in order, in one or several calls.
using ByteSink = std::function<void(std::span<const std::byte>)>;
using ReadTensor = std::function<void(const Tensor& tensor, const ByteSink& sink)>;
/// Reads a tensor in memory of the host.
void read_from_host(const Tensor& tensor, const ByteSink& sink);

/// Writes a rank's pieces, atomically. Calls `read` for the numbers of each piece, in order. Throws Error if that
/// fails, or if a stop is requested.
WrittenFile write_shard(const std::filesystem::path& path, const ShardId& id, std::span<const TensorPiece> tensors,
                        const std::stop_token& stop = {}, const ReadTensor& read = read_from_host);

/// Reads a tensor that is assembled from pieces in mapped files. It must not outlive the ShardFiles that it is from.
class AssembledTensor {
 public:
  /// Returns the numbers of a model's tensor from index `begin` of the flattened tensor on, as many as are contiguous
  /// in one file.
  std::span<const float> from(std::int64_t begin) const;
  /// Copies the numbers of a piece to `target`, which has room for all of them. Those that a file has in bfloat16 are
  /// widened. The piece need not be one of the files' pieces.
  void read(const Piece& piece, float* target) const;

 private:
  friend class ShardFiles;
  struct Run {
    std::int64_t begin, count;  // in the flattened tensor
    Tensor numbers;
    const std::filesystem::path* file;
  };
  /// Returns the numbers from `begin` on as from() does, in the type that the file has.
  Tensor stretch(std::int64_t begin) const;

  std::vector<Run> runs_;  // ascending, without gaps
};

/// Maps shards of one kind of a checkpoint: all, or some of them. Errors name the file and the tensor.
class ShardFiles {
 public:
  /// `folder` is a checkpoint of this step with `num_shards` shards. Throws Error if a shard is missing, belongs to
  /// another step, is not the one that its name says, or has impossible pieces.
  ShardFiles(const std::filesystem::path& folder, std::string_view kind, std::int64_t step, std::int64_t num_shards)
      : ShardFiles(folder, kind, step, num_shards, all_of(num_shards)) {}
  /// Maps some shards.
  ShardFiles(const std::filesystem::path& folder, std::string_view kind, std::int64_t step, std::int64_t num_shards,
             const std::set<std::int64_t>& shards);

  /// Returns whether the mapped shards have exactly these pieces.
  bool has(std::span<const TensorPiece> pieces) const;
  /// Returns the tensor of a piece that has() has found. Only the numbers of that piece may be read.
  AssembledTensor piece_at(const std::string& name, const Piece& piece) const;

  std::size_t num_tensors() const { return pieces_.size(); }
  /// Returns a tensor. Throws Error if there is no such tensor, it has another shape, or its pieces leave gaps or
  /// overlap.
  AssembledTensor at(const std::string& name, const Shape& shape) const;

 private:
  struct StoredPiece {
    std::size_t file;
    Piece piece;
    Tensor numbers;  // flattened
  };
  static std::set<std::int64_t> all_of(std::int64_t num_shards);
  void add(std::size_t file);
  /// Returns a stored piece with the same place, or null.
  const StoredPiece* find(const std::string& name, const Piece& piece) const;
  void add_runs(const StoredPiece& stored, AssembledTensor& tensor) const;

  std::filesystem::path folder_;
  std::string kind_;
  std::vector<std::filesystem::path> paths_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::vector<StoredPiece>> pieces_;
};

}  // namespace tessera
