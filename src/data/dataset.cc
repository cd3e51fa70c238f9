#include "data/dataset.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "data/load_tokenizer.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kFormatName = "tessera-dataset";
constexpr int kManifestVersion = 1;

using DatasetFields = JsonFields<ordered_json>;

std::int32_t id_of(const DatasetFields& fields, const char* name) {
  return static_cast<std::int32_t>(fields.count(name, std::numeric_limits<std::int32_t>::max()));
}

std::string remedy(const fs::path& folder) {
  return fmt::format("`tessera data prepare --input TEXTS --tokenizer TOKENIZER --output {}` makes a dataset",
                     folder.string());
}

Manifest parse_manifest(const fs::path& path) {
  const std::string place = fmt::format("'{}'", path.string());
  const auto json = parse_json<ordered_json>(read_text_file(path), place);
  const DatasetFields fields(json, place + ", $");
  require(fields.text("format") == kFormatName, "{}: expected '{}', got {}", fields.place_of("format"), kFormatName,
          describe_json(fields.at("format")));
  require(fields.count("version") == kManifestVersion, "{}: version {}, this program reads version {}", place,
          fields.count("version"), kManifestVersion);
  fields.require_checksum();

  Manifest manifest;
  const DatasetFields tokenizer(fields.at("tokenizer"), fields.place_of("tokenizer"));
  manifest.tokenizer_kind = tokenizer.text("kind");
  manifest.tokenizer_checksum = tokenizer.hex("checksum");
  manifest.vocab_size = id_of(fields, "vocab_size");
  manifest.bos_id = id_of(fields, "bos_id");
  manifest.eos_id = id_of(fields, "eos_id");
  manifest.val_fraction = fields.number("val_fraction");
  manifest.seed = fields.count("seed");
  const ordered_json& splits = fields.at("splits");
  require(splits.is_object(), "{}: expected an object, got {}", fields.place_of("splits"), describe_json(splits));
  for (const auto& [name, split] : splits.items()) {
    const std::string split_place = fmt::format("{}, split {}", place, name);
    for (const ordered_json& shard : DatasetFields(split, split_place).array("shards")) {
      const DatasetFields shard_fields(shard, split_place + ", shards");
      require_plain_name(shard_fields.text("file"), split_place);
      manifest.splits[name].push_back({.file = shard_fields.text("file"),
                                       .num_bytes = shard_fields.count("num_bytes"),
                                       .num_tokens = shard_fields.count("num_tokens"),
                                       .num_documents = shard_fields.count("num_documents"),
                                       .checksum = shard_fields.hex("checksum")});
    }
  }
  return manifest;
}

}  // namespace

std::uint64_t num_tokens(const std::vector<ShardEntry>& shards) {
  std::uint64_t sum = 0;
  for (const ShardEntry& shard : shards) sum += shard.num_tokens;
  return sum;
}

std::uint64_t num_documents(const std::vector<ShardEntry>& shards) {
  std::uint64_t sum = 0;
  for (const ShardEntry& shard : shards) sum += shard.num_documents;
  return sum;
}

std::uint64_t split_checksum(const Manifest& manifest, const std::string& split) {
  Checksum sum;
  sum.update(as_bytes_of(manifest.tokenizer_checksum));
  if (const auto found = manifest.splits.find(split); found != manifest.splits.end()) {
    for (const ShardEntry& shard : found->second) sum.update(as_bytes_of(shard.checksum));
  }
  return sum.value();
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  ordered_json json;
  json["format"] = kFormatName;
  json["version"] = kManifestVersion;
  json["tokenizer"] = {{"kind", manifest.tokenizer_kind}, {"checksum", to_hex(manifest.tokenizer_checksum)}};
  json["vocab_size"] = manifest.vocab_size;
  json["bos_id"] = manifest.bos_id;
  json["eos_id"] = manifest.eos_id;
  json["val_fraction"] = manifest.val_fraction;
  json["seed"] = manifest.seed;
  for (const auto& [name, shards] : manifest.splits) {
    ordered_json& split = json["splits"][name];
    split["num_tokens"] = num_tokens(shards);
    split["num_documents"] = num_documents(shards);
    split["shards"] = ordered_json::array();
    for (const ShardEntry& shard : shards) {
      split["shards"].push_back({{"file", shard.file},
                                 {"num_bytes", shard.num_bytes},
                                 {"num_tokens", shard.num_tokens},
                                 {"num_documents", shard.num_documents},
                                 {"checksum", to_hex(shard.checksum)}});
    }
  }
  json[kChecksumField] = checksum_of_rest(json);
  write_whole_file(folder / kManifestName, json_text(json, 2) + "\n");
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  const bool is_there = path_exists(folder);  // throws Error if the user may not look there
  require(!fs::is_regular_file(folder), "dataset '{}': it is a file; expected a dataset's folder: {}", folder.string(),
          remedy(folder));
  require(is_there && fs::is_directory(folder), "dataset '{}': no such folder; {}", folder.string(), remedy(folder));
  require(path_exists(path), "dataset '{}': the folder has no {}, which is written last, when all else is there; {}",
          folder.string(), kManifestName, remedy(folder));
  try {
    return parse_manifest(path);
  } catch (const Error& error) {
    fail("{}; {}", error.what(), remedy(folder));
  }
}
std::vector<Shard> open_split(const fs::path& folder, const Manifest& manifest, const std::string& split) {
  const auto found = manifest.splits.find(split);
  require(found != manifest.splits.end(), "dataset '{}': it has no documents in its split '{}'{}", folder.string(),
          split,
          split == "val" ? "; a larger --val-fraction of `tessera data prepare` sets some aside, and "
                           "--validation.enable=false trains without"
                         : "");
  std::vector<Shard> shards;
  shards.reserve(found->second.size());
  for (const ShardEntry& entry : found->second) {
    const fs::path path = folder / entry.file;
    std::error_code unreadable;
    require(fs::exists(path, unreadable) || unreadable, "shard '{}' is missing; '{}' lists it; {}", path.string(),
            (folder / kManifestName).string(), remedy(folder));
    const Shard& shard = shards.emplace_back(path);
    require(shard.header().header_checksum == entry.checksum,
            "shard '{}': its header has checksum {}, '{}' lists {}: it is a shard of another dataset", path.string(),
            to_hex(shard.header().header_checksum), (folder / kManifestName).string(), to_hex(entry.checksum));
    const ShardHeader& header = shard.header();
    require(header.num_tokens == entry.num_tokens && header.num_documents == entry.num_documents &&
                header.file_bytes == entry.num_bytes,
            "shard '{}': {} tokens, {} documents and {} bytes, '{}' lists {}, {} and {}", path.string(),
            header.num_tokens, header.num_documents, header.file_bytes, (folder / kManifestName).string(),
            entry.num_tokens, entry.num_documents, entry.num_bytes);
  }
  return shards;
}

std::unique_ptr<Tokenizer> load_dataset_tokenizer(const fs::path& folder, const Manifest& manifest) {
  const std::string& kind = manifest.tokenizer_kind;
  const std::string_view file = kind == "huggingface" ? kTokenizerJsonName : kTokenizerModelName;
  const std::string name = kind == "bytes" ? kind : (folder / file).string();
  auto tokenizer = load_tokenizer(name);
  require(tokenizer->checksum() == manifest.tokenizer_checksum,
          "tokenizer '{}': it has checksum {}, '{}' lists {}: it is damaged, or another one", name,
          to_hex(tokenizer->checksum()), (folder / kManifestName).string(), to_hex(manifest.tokenizer_checksum));
  return tokenizer;
}

}  // namespace tessera::data
