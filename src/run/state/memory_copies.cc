#include "run/state/memory_copies.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "comm/together.h"
#include "run/record/metrics.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "tessera-memcopy1";  // 16 bytes
constexpr std::string_view kAttemptPrefix = "attempt-";
constexpr std::string_view kFilePrefix = "rank-";
/// Tag of the messages with copies. No other messages of the world group have tags.
constexpr int kCopyTag = 0;
/// How many seconds a copy waits for the one before. After that, it is postponed.
constexpr double kLongestStall = 1.0;
constexpr std::uint64_t kLargest = std::uint64_t{1} << 52;

/// The fixed part in front of the header's JSON.
struct Preamble {
  std::array<char, kMagic.size()> magic;
  std::uint64_t size, checksum;  // of the JSON
};

/// Returns a number that identifies the folder among all folders on all machines that are up.
std::uint64_t identity_of_folder(const fs::path& folder) {
  struct stat info {};
  require(::stat(folder.c_str(), &info) == 0, "cannot read the folder '{}' (job.node_folder): {}", folder.string(),
          std::strerror(errno));
  const std::string text =
      fmt::format("{} {} {}", read_text_file("/proc/sys/kernel/random/boot_id"),
                  static_cast<std::uint64_t>(info.st_dev), static_cast<std::uint64_t>(info.st_ino));
  return checksum(std::as_bytes(std::span(text)));
}

/// Returns the number in a name after its prefix, or nullopt for other names.
std::optional<std::int64_t> number_behind(std::string_view prefix, const std::string& name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() ? std::optional(number) : std::nullopt;
}

/// Returns the names of a folder's entries, sorted; none if there is no such folder.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

std::string identity_of(const JobConfig& config, const MeshDegrees& degrees, const data::LoaderState& loader) {
  const nlohmann::json identity = {{"model", model_identity(config)},
                                   {"mesh", describe(degrees)},
                                   {"moments", name_of(config.optimizer.state_dtype)},
                                   {"seed", config.debug.seed},
                                   {"dataset", to_hex(loader.dataset_checksum)},
                                   {"seq_len", loader.seq_len}};
  const std::string text = json_text(identity);
  return to_hex(checksum(std::as_bytes(std::span(text))));
}

}  // namespace

void write_memory_copy_header(const MemoryCopyHeader& header, std::byte* target) {
  nlohmann::json json = {
      {"run", header.run},       {"attempt", header.attempt},     {"step", header.step},
      {"rank", header.rank},     {"shard", header.shard},         {"identity", header.identity},
      {"loader", header.loader}, {"bytes", header.payload_bytes}, {"checksum", to_hex(header.checksum)},
      {"config", header.config}};
  std::string text = json_text(json);
  if (sizeof(Preamble) + text.size() > kMemoryCopyHeaderBytes) {  // job.description may be as long as a book
    json["config"] = "";
    text = json_text(json);
  }
  Preamble preamble{.magic = {}, .size = text.size(), .checksum = checksum(std::as_bytes(std::span(text)))};
  TESSERA_CHECK(sizeof preamble + text.size() <= kMemoryCopyHeaderBytes, "{}", text.size());
  std::ranges::copy(kMagic, preamble.magic.begin());
  std::memcpy(target + sizeof preamble, text.data(), text.size());
  std::memcpy(target, &preamble, sizeof preamble);
}

std::optional<MemoryCopyHeader> read_memory_copy(std::span<const std::byte> file, const std::string& name) {
  require(file.size() >= kMemoryCopyHeaderBytes, "'{}' is cut: it has {} bytes, and its header alone should have {}",
          name, file.size(), kMemoryCopyHeaderBytes);
  Preamble preamble{};
  std::memcpy(&preamble, file.data(), sizeof preamble);
  if (std::ranges::all_of(preamble.magic, [](char c) { return c == '\0'; })) return std::nullopt;
  const std::string_view magic(preamble.magic.data(), preamble.magic.size());
  require(magic == kMagic && preamble.size <= kMemoryCopyHeaderBytes - sizeof preamble,
          "'{}' is damaged: it does not begin as a copy in memory", name);
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + sizeof preamble, preamble.size);
  require(checksum(std::as_bytes(std::span(text))) == preamble.checksum,
          "'{}' is damaged: its header has another "
          "checksum than it says",
          name);
  const nlohmann::json json = parse_json(text, fmt::format("'{}'", name));
  const JsonFields fields(json, fmt::format("'{}', header", name));
  const auto number = [&](const char* field) { return static_cast<std::int64_t>(fields.count(field, kLargest)); };
  MemoryCopyHeader header{.run = fields.text("run"),
                          .attempt = number("attempt"),
                          .step = number("step"),
                          .rank = number("rank"),
                          .shard = number("shard"),
                          .identity = fields.text("identity"),
                          .loader = fields.at("loader").get<data::LoaderState>(),
                          .config = fields.text("config"),
                          .payload_bytes = fields.count("bytes", kLargest),
                          .checksum = fields.hex("checksum")};
  const std::span<const std::byte> payload = file.subspan(kMemoryCopyHeaderBytes);
  require(payload.size() == header.payload_bytes && payload.size() % sizeof(std::int32_t) == 0,
          "'{}' is cut: it has {} bytes of state, expected {}", name, payload.size(), header.payload_bytes);
  require(checksum_of_pieces(payload) == header.checksum,
          "'{}', the copy of rank {} after step {}, is damaged, or was not sent to its end: its state has another "
          "checksum than its header says",
          name, header.rank, header.step);
  return header;
}

/// The mapped file of a copy. The file stays when the object is destroyed.
class MemoryCopies::File {
 public:
  File(fs::path path, std::size_t num_bytes) : path_(std::move(path)), size_(num_bytes) {
    const int descriptor = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    require(descriptor >= 0, "cannot create '{}' (job.node_folder): {}", path_.string(), std::strerror(errno));
    // Reserves all pages now, so that a full tmpfs is an error here and not a signal later.
    const int refused = ::posix_fallocate(descriptor, 0, static_cast<off_t>(num_bytes));
    void* memory = refused != 0
                       ? MAP_FAILED
                       : ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
    const int reason = refused != 0 ? refused : errno;
    ::close(descriptor);
    if (memory == MAP_FAILED) {
      ::unlink(path_.c_str());
      fail("cannot take {} for a copy in memory in '{}' (job.node_folder): {}", format_gib(num_bytes), path_.string(),
           std::strerror(reason));
    }
    data_ = static_cast<std::byte*>(memory);
  }
  ~File() {
    if (is_pinned_) cuda::unpin(data_);
    ::munmap(data_, size_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::byte* payload() const { return data_ + kMemoryCopyHeaderBytes; }
  Tensor words() const { return words_of({data_, size_}); }
  /// Lets a GPU write to the file directly, which requires a tmpfs.
  void pin() {
    const char* problem = cuda::pin(data_, size_);
    is_pinned_ = problem == nullptr;
    if (!is_pinned_) {
      spdlog::warn("a GPU cannot write to '{}' (job.node_folder) by itself, so training waits for copies in memory: {}",
                   path_.string(), problem);
    }
  }
  bool is_pinned() const { return is_pinned_; }
  void invalidate() { std::memset(data_, 0, sizeof(Preamble)); }
  void write_header(const MemoryCopyHeader& header) { write_memory_copy_header(header, data_); }
  void remove() const { ::unlink(path_.c_str()); }

 private:
  fs::path path_;
  std::size_t size_;
  std::byte* data_ = nullptr;
  bool is_pinned_ = false;
};

MemoryCopies::MemoryCopies(const JobConfig& config, Ranks& ranks, const Mesh& mesh, TrainingState& state,
                           cuda::Event* state_is_read)
    : config_(config), ranks_(ranks), mesh_(mesh), state_(state), state_is_read_(state_is_read) {
  require(
      !config_.job.node_folder.empty(),
      "checkpoint.memory_interval is {}, but job.node_folder does not say where copies in memory are kept; `tessera "
      "launch` sets it, or give a folder on tmpfs, like --job.node_folder=/dev/shm/my-run",
      config_.checkpoint.memory_interval);
  std::uint64_t node = 0;
  run_together(ranks_.world(), "the nodes' folders", [&] {
    create_folder(config_.job.node_folder);
    node = identity_of_folder(config_.job.node_folder);
  });
  const std::array<double, 4> own = {static_cast<double>(node >> 32), static_cast<double>(node & 0xffffffffu),
                                     static_cast<double>(state_.num_bytes()), static_cast<double>(mesh_.model.rank())};
  const std::vector<double> all = ranks_.world().all_gather(own, "the nodes of ranks");
  for (auto next = all.begin(); next != all.end(); next += own.size()) {
    places_.push_back({.node = static_cast<std::uint64_t>(next[0]) << 32 | static_cast<std::uint64_t>(next[1]),
                       .shard = static_cast<std::int64_t>(next[3]),
                       .state_bytes = static_cast<std::size_t>(next[2])});
  }
  find_partners();
}

MemoryCopies::~MemoryCopies() {
  try {
    for (Work& work : works_) work.wait();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the run has failed already
  }
}

void MemoryCopies::find_partners() {
  std::vector<std::uint64_t> nodes;                   // in the order of their first ranks
  std::map<std::uint64_t, std::vector<int>> on_node;  // the ranks of each node
  std::map<std::int64_t, std::set<std::uint64_t>> nodes_of_shard;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    RankPlacement& placement = places_[static_cast<std::size_t>(rank)];
    std::vector<int>& neighbours = on_node[placement.node];
    if (neighbours.empty()) nodes.push_back(placement.node);
    neighbours.push_back(rank);
    placement.keeps = std::ranges::none_of(neighbours, [&](int other) {
      return other != rank && places_[static_cast<std::size_t>(other)].shard == placement.shard;
    });
    nodes_of_shard[placement.shard].insert(placement.node);
  }
  num_nodes_ = static_cast<int>(nodes.size());
  if (num_nodes_ == 1) return;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const std::vector<int>& from = on_node[nodes[i]];
    const std::vector<int>& to = on_node[nodes[(i + 1) % nodes.size()]];
    for (std::size_t r = 0; r < from.size(); ++r) {
      RankPlacement& placement = places_[static_cast<std::size_t>(from[r])];
      if (!placement.keeps || nodes_of_shard[placement.shard].size() > 1) continue;
      placement.partner = to[r % to.size()];
      if (placement.partner == ranks_.rank()) sources_.push_back(from[r]);
    }
  }
}

std::size_t MemoryCopies::file_bytes(int rank) const {
  return kMemoryCopyHeaderBytes + places_[static_cast<std::size_t>(rank)].state_bytes;
}

std::size_t MemoryCopies::num_bytes() const {
  std::size_t sum = place().keeps ? file_bytes(ranks_.rank()) : 0;
  for (const int source : sources_) sum += file_bytes(source);
  return slots_.size() * sum;
}

fs::path MemoryCopies::run_folder() const { return fs::path(config_.job.node_folder) / "memory" / run_.id; }
fs::path MemoryCopies::attempt_folder(std::int64_t attempt) const {
  return run_folder() / fmt::format("{}{}", kAttemptPrefix, attempt);
}
fs::path MemoryCopies::path_of(const StoredCopy& held) const {
  return attempt_folder(held.attempt) / fmt::format("{}{}.{}", kFilePrefix, held.owner, held.slot);
}

std::vector<std::int64_t> MemoryCopies::attempts() const {
  std::vector<std::int64_t> found;
  for (const std::string& name : names_in(run_folder())) {
    if (const auto attempt = number_behind(kAttemptPrefix, name)) found.push_back(*attempt);
  }
  return found;
}

void MemoryCopies::require_no_later_attempt() const {
  for (const std::int64_t attempt : attempts()) {
    if (attempt <= run_.attempt) continue;
    throw Error(fmt::format("{}: attempt {} has begun on this node ('{}'); this process writes nothing more",
                            run_.describe(), attempt, attempt_folder(attempt).string()),
                ExitStatus::kTakenOver);
  }
}

void MemoryCopies::require_room(std::size_t leftovers) const {
  struct statvfs room {};
  const std::string& folder = config_.job.node_folder;
  require(::statvfs(folder.c_str(), &room) == 0, "cannot read the size of '{}' (job.node_folder): {}", folder,
          std::strerror(errno));
  const std::size_t available = room.f_bavail * room.f_frsize + leftovers;
  std::size_t needed = 0;
  int num_ranks = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const RankPlacement& placement = places_[static_cast<std::size_t>(rank)];
    if (placement.node == place().node) ++num_ranks;
    for (const int keeper : {placement.keeps ? rank : -1, placement.partner}) {
      if (keeper < 0 || places_[static_cast<std::size_t>(keeper)].node != place().node) continue;
      needed += slots_.size() * file_bytes(rank);
    }
  }
  require(needed <= available,
          "checkpoint.memory_interval = {} needs {} in '{}' (job.node_folder) for the copies in memory of {} ranks and "
          "of their partners, but {} are free there. Enlarge it (mount -o remount,size={}G /dev/shm; docker run "
          "--shm-size={}g), spread the state over more ranks, or give --checkpoint.memory_interval=0 for none",
          config_.checkpoint.memory_interval, format_gib(needed), folder, num_ranks, format_gib(available),
          1 + (needed >> 30), 1 + (needed >> 30));
}

void MemoryCopies::open(const RunIdentity& run, const data::LoaderState& loader) {
  run_ = run;
  identity_ = identity_of(config_, mesh_.degrees, loader);
  JobConfig config = config_;
  config.training.global_batch_size = config.sequences_per_step(mesh_.num_data_ranks());
  config_toml_ = config_table(config).to_toml();
  std::vector<StoredCopy> own;
  run_long_together(ranks_.world(), "the check of copies in memory", [&] {
    require_no_later_attempt();
    require(!fs::exists(attempt_folder(run_.attempt)),
            "'{}' is there already: {} has run before. Count job.attempt up, or leave it out",
            attempt_folder(run_.attempt).string(), run_.describe());
    std::size_t leftovers = 0;
    for (const std::int64_t attempt : attempts()) {
      for (const std::string& name : names_in(attempt_folder(attempt))) {
        std::error_code missing;
        const std::uintmax_t size = fs::file_size(attempt_folder(attempt) / name, missing);
        leftovers += missing ? 0 : size;
      }
    }
    require_room(leftovers);
    own = read_files();
  });
  std::vector<double> numbers;
  for (const StoredCopy& held : own) {
    for (const std::int64_t number :
         {held.attempt, held.step, held.shard, held.owner, held.slot, static_cast<std::int64_t>(held.checksum >> 32),
          static_cast<std::int64_t>(held.checksum & 0xffffffffu)}) {
      numbers.push_back(static_cast<double>(number));
    }
  }
  constexpr std::size_t kNumbers = 7;
  constexpr const char* kName = "copies in memory";
  const auto count = static_cast<double>(own.size());
  const std::vector<double> counts = ranks_.world().all_gather(std::span(&count, 1), kName);
  const auto most = static_cast<std::size_t>(std::ranges::max(counts));
  numbers.resize(most * kNumbers);
  const std::vector<double> all = ranks_.world().all_gather(numbers, kName);
  std::vector<StoredCopy> found;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(counts[rank]); ++i) {
      const double* record = all.data() + (rank * most + i) * kNumbers;
      const auto number = [&](std::size_t n) { return static_cast<std::int64_t>(record[n]); };
      found.push_back({.attempt = number(0),
                       .step = number(1),
                       .shard = number(2),
                       .owner = number(3),
                       .slot = number(4),
                       .checksum = static_cast<std::uint64_t>(record[5]) << 32 | static_cast<std::uint64_t>(record[6]),
                       .holder = static_cast<int>(rank)});
    }
  }
  choose(found);
}

std::vector<MemoryCopies::StoredCopy> MemoryCopies::read_files() const {
  int num_neighbours = 0, place_among = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (places_[static_cast<std::size_t>(rank)].node != place().node) continue;
    if (rank < ranks_.rank()) ++place_among;
    ++num_neighbours;
  }
  std::vector<StoredCopy> found;
  int idx = 0;
  for (const std::int64_t attempt : attempts()) {
    for (const std::string& name : names_in(attempt_folder(attempt))) {
      if (idx++ % num_neighbours != place_among) continue;
      const fs::path path = attempt_folder(attempt) / name;
      try {
        const MappedFile file(path);
        const std::optional<MemoryCopyHeader> header = read_memory_copy(file.bytes(), path.string());
        if (!header) continue;  // its process ended while it made the copy
        StoredCopy held{.attempt = header->attempt,
                        .step = header->step,
                        .shard = header->shard,
                        .owner = header->rank,
                        .slot = name.ends_with(".1") ? 1 : 0,
                        .checksum = header->checksum};
        if (header->run != run_.id || attempt != header->attempt || path_of(held) != path) {
          spdlog::warn("'{}' is not the copy that its name says; it is passed over", path.string());
        } else if (header->identity != identity_) {
          spdlog::warn("'{}' is of another model, mesh, dataset or seed than this attempt's; it is passed over",
                       path.string());
        } else {
          found.push_back(held);
        }
      } catch (const Error& error) {
        spdlog::warn("a copy in memory is passed over: {}", error.what());
      }
    }
  }
  return found;
}

void MemoryCopies::choose(const std::vector<StoredCopy>& all) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<StoredCopy>> by_step;  // by step and attempt
  for (const StoredCopy& held : all) by_step[{held.step, held.attempt}].push_back(held);
  const std::int64_t num_shards = mesh_.model.size();
  for (auto it = by_step.rbegin(); it != by_step.rend(); ++it) {
    const auto& [key, copies] = *it;
    std::map<std::int64_t, std::set<std::uint64_t>> checksums;  // by shard
    for (const StoredCopy& held : copies) checksums[held.shard].insert(held.checksum);
    const bool differ = std::ranges::any_of(checksums, [](const auto& of_shard) { return of_shard.second.size() > 1; });
    const auto num_missing = num_shards - static_cast<std::int64_t>(checksums.size());
    if (num_missing == 0 && !differ) {
      chosen_ = copies;
      return;
    }
    if (ranks_.rank() == 0) {
      spdlog::warn("the copies in memory of step {} (attempt {}) are not whole: {}", key.first, key.second,
                   differ ? "replicas hold different ones"
                          : fmt::format("no node has those of {} of {} ranks", num_missing, num_shards));
    }
  }
}

std::optional<std::int64_t> MemoryCopies::newest_step() const {
  return chosen_.empty() ? std::nullopt : std::optional(chosen_.front().step);
}

ResumedFrom MemoryCopies::load(data::Loader& loader) {
  TESSERA_CHECK(!chosen_.empty());
  const auto node_of = [&](int rank) { return places_[static_cast<std::size_t>(rank)].node; };
  const auto source_of = [&](int rank) -> const StoredCopy& {
    const StoredCopy* found = nullptr;
    for (const StoredCopy& held : chosen_) {
      if (held.shard != places_[static_cast<std::size_t>(rank)].shard) continue;
      if (found == nullptr || node_of(held.holder) == node_of(rank)) found = &held;
    }
    return *found;
  };
  MappedFile own;
  Buffer received;
  std::vector<MappedFile> sent;
  std::vector<Work> works;
  int num_sent = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const StoredCopy& source = source_of(rank);
    const bool is_own = rank == ranks_.rank();
    constexpr const char* kName = "a copy in memory";
    if (node_of(source.holder) == node_of(rank)) {
      if (is_own) own = MappedFile(path_of(source));
      continue;
    }
    ++num_sent;
    if (is_own) {
      received = Buffer(file_bytes(rank));
      works.push_back(
          ranks_.world().receive(words_of({received.data(), received.size()}), source.holder, kCopyTag, kName));
    } else if (source.holder == ranks_.rank()) {
      sent.emplace_back(path_of(source));
      works.push_back(ranks_.world().send(words_of(sent.back().bytes()), rank, kCopyTag, kName));
    }
  }
  for (Work& work : works) work.wait();
  MemoryCopyHeader header;
  run_long_together(ranks_.world(), "the copies in memory", [&] {
    const std::span<const std::byte> file =
        received.size() > 0 ? std::span<const std::byte>(received.data(), received.size()) : own.bytes();
    const std::string name = received.size() > 0 ? "the copy that another node sent" : own.path().string();
    header = read_memory_copy(file, name).value();
  });
  run_together(ranks_.world(), "the state of the copies in memory", [&] {
    loader.restore(header.loader);
    const std::byte* bytes = received.size() > 0 ? received.data() : own.bytes().data();
    state_.write({bytes + kMemoryCopyHeaderBytes, header.payload_bytes});
  });
  ResumedFrom resumed{.step = header.step, .config = {}};
  if (ranks_.rank() == 0) {
    spdlog::info("resumed from the copies in memory of step {} (attempt {}): {} of {} ranks' came from another node",
                 header.step, header.attempt, num_sent, ranks_.size());
    try {
      if (!header.config.empty()) resumed.config = parse_job_config(header.config);
    } catch (const Error& error) {
      spdlog::warn("the copy's configuration cannot be compared with this run's: {}", error.what());
    }
  }
  return resumed;
}

void MemoryCopies::delete_leftovers(bool with_chosen) const {
  std::set<fs::path> kept;
  if (!with_chosen) {
    for (const StoredCopy& held : chosen_) kept.insert(path_of(held));
  }
  for (const std::int64_t attempt : attempts()) {
    if (attempt >= run_.attempt) continue;
    const fs::path folder = attempt_folder(attempt);
    bool is_empty = true;
    for (const std::string& name : names_in(folder)) {
      const bool stays = kept.contains(folder / name);
      std::error_code gone;  // another rank may have removed it
      if (!stays) fs::remove(folder / name, gone);
      is_empty = is_empty && !stays;
    }
    std::error_code gone;
    if (is_empty) fs::remove(folder, gone);
  }
}

void MemoryCopies::allocate() {
  run_together(ranks_.world(), "the deletion of old copies in memory", [&] { delete_leftovers(false); });
  has_leftovers_ = !chosen_.empty();
  run_together(ranks_.world(), "the memory of copies", [&] {
    create_folder(attempt_folder(run_.attempt));
    for (Slot& slot : slots_) {
      if (&slot == slots_.data() || !has_leftovers_) allocate(slot);
    }
  });
  if (ranks_.rank() != 0) return;
  const bool sends = place().partner >= 0;
  spdlog::info("copies in memory: every {} steps in '{}', {} per rank; {}", config_.checkpoint.memory_interval,
               config_.job.node_folder, format_gib(num_bytes()),
               num_nodes_ == 1 ? "all ranks are on one node, so they are lost with it"
               : sends         ? "a second one of each on another node"
                               : "replicas on other nodes hold the same");
}

void MemoryCopies::allocate(Slot& slot) {
  const auto create = [&](int owner) {
    const StoredCopy held{.attempt = run_.attempt, .owner = owner, .slot = &slot - slots_.data()};
    return std::make_unique<File>(path_of(held), file_bytes(owner));
  };
  if (place().keeps) slot.own = create(ranks_.rank());
  if (slot.own && state_is_read_ != nullptr) slot.own->pin();
  for (const int source : sources_) slot.others.push_back(create(source));
}

bool MemoryCopies::wait_for_all(const std::function<bool()>& is_done, double seconds) {
  const Stopwatch watch;
  for (;;) {
    while (!is_done() && watch.seconds() < seconds) std::this_thread::sleep_for(std::chrono::microseconds(200));
    // Rank 0's clock decides for all ranks.
    std::array<double, 2> votes = {is_done() ? 0.0 : 1.0, ranks_.rank() == 0 && watch.seconds() >= seconds ? 1.0 : 0.0};
    ranks_.world().all_reduce(votes, "whether copies in memory are whole");
    if (votes[0] == 0.0) return true;
    if (votes[1] > 0.0) return false;
  }
}

bool MemoryCopies::settle(double seconds) {
  if (!taken_ && !is_being_sent_) return true;
  if (taken_) {
    if (!wait_for_all([&] { return ready(); }, seconds)) return false;
    advance();
  }
  const auto is_sent = [&] { return std::ranges::all_of(works_, [](Work& work) { return work.done(); }); };
  if (!wait_for_all(is_sent, seconds)) return false;
  for (Work& work : works_) work.wait();
  works_.clear();
  is_being_sent_ = false;
  if (!told_time_ && ranks_.rank() == 0) {
    spdlog::info("copies in memory: training waited {:.3f} s for the first, of {}", stall_seconds_,
                 format_gib(place().state_bytes));
  }
  told_time_ = true;
  if (has_leftovers_) {
    has_leftovers_ = false;
    delete_leftovers(true);
    run_together(ranks_.world(), "the memory of copies", [&] { allocate(slots_[1]); });
  }
  return true;
}

bool MemoryCopies::take(std::int64_t step, const data::LoaderState& loader, Compare compare, bool compares_now) {
  if (!settle(is_postponed_ ? 0.0 : kLongestStall)) {
    if (!is_postponed_ && ranks_.rank() == 0) {
      spdlog::warn("the copy in memory of step {} waits for the one before, which is still on its way to other nodes",
                   step);
    }
    is_postponed_ = true;
    return false;
  }
  is_postponed_ = false;
  require_no_later_attempt();
  Slot& slot = slots_[next_slot_];
  if (slot.own) slot.own->invalidate();
  for (const auto& file : slot.others) file->invalidate();
  const Stopwatch stall;
  std::future<TrainingState::Checksums> checksums;
  const bool is_beside = state_is_read_ != nullptr && !compares_now;
  if (is_beside && slot.own && slot.own->is_pinned()) {
    const std::span<const std::byte> copy(slot.own->payload(), place().state_bytes);
    state_.start_copy(slot.own->payload(), *state_is_read_);
    checksums = std::async(std::launch::async, [this, copy] {
      const char* failure = state_is_read_->wait();
      TESSERA_CHECK(failure == nullptr, "copying the state of the GPU: {}", failure);
      set_num_threads(1);  // the other threads are training's
      return state_.checksums_of_copy(copy);
    });
  } else {
    std::promise<TrainingState::Checksums> read;
    read.set_value(state_.read(slot.own ? slot.own->payload() : nullptr));
    checksums = read.get_future();
  }
  taken_ = Taken{.header = {.run = run_.id,
                            .attempt = run_.attempt,
                            .step = step,
                            .rank = ranks_.rank(),
                            .shard = place().shard,
                            .identity = identity_,
                            .loader = loader,
                            .config = config_toml_,
                            .payload_bytes = place().state_bytes},
                 .compare = std::move(compare),
                 .checksums = std::move(checksums)};
  stall_seconds_ = 0.0;
  if (!is_beside) advance();
  stall_seconds_ = stall.seconds();
  return true;
}

bool MemoryCopies::ready() const {
  return taken_ && taken_->checksums.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void MemoryCopies::advance() {
  const Stopwatch stall;
  Taken taken = std::move(*std::exchange(taken_, std::nullopt));
  const TrainingState::Checksums checksums = taken.checksums.get();
  taken.compare(checksums);
  Slot& slot = slots_[next_slot_];
  taken.header.checksum = checksums.all;
  if (slot.own) slot.own->write_header(taken.header);
  constexpr const char* kName = "a copy in memory";
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    works_.push_back(ranks_.world().receive(slot.others[i]->words(), sources_[i], kCopyTag, kName));
  }
  if (place().partner >= 0) {
    works_.push_back(ranks_.world().send(slot.own->words(), place().partner, kCopyTag, kName));
  }
  stall_seconds_ += stall.seconds();
  is_being_sent_ = true;
  next_slot_ = 1 - next_slot_;
}

void MemoryCopies::finish() { settle(std::numeric_limits<double>::max()); }

void MemoryCopies::remove() {
  for (Slot& slot : slots_) {
    if (slot.own) slot.own->remove();
    for (const auto& file : slot.others) file->remove();
    slot = {};
  }
  std::error_code others;  // their files may be left; the last rank removes the folder
  fs::remove(attempt_folder(run_.attempt), others);
  fs::remove(run_folder(), others);
}

}  // namespace tessera
