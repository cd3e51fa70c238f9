#include "run/state/memory_copies.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "comm/halves.h"
#include "comm/together.h"
#include "run/record/metrics.h"
#include "run/record/run_info.h"
#include "tensor/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "tessera-memcopy1";  // 16 bytes
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

std::string identity_of(const JobConfig& config, const MeshDegrees& degrees, const data::LoaderState& loader) {
  const nlohmann::json all = model_identity(config);
  nlohmann::json model;
  for (const auto& [key, value] : all.items()) {
    if (!is_of_schedule(key)) model[key] = value;
  }
  const nlohmann::json identity = {{"model", model},
                                   {"mesh", describe(degrees)},
                                   {"moments", name_of(config.optimizer.state_dtype)},
                                   {"seed", config.debug.seed},
                                   {"dataset", to_hex(loader.dataset_checksum)},
                                   {"seq_len", loader.seq_len}};
  const std::string text = json_text(identity);
  return to_hex(checksum(std::as_bytes(std::span(text))));
}

/// Finds which ranks share a node, and places their copies. All ranks must call it together.
CopyPlacement place_copies(const JobConfig& config, Ranks& ranks, std::int64_t shard, std::size_t state_bytes) {
  require(
      !config.job.node_folder.empty(),
      "checkpoint.memory_interval is {}, but job.node_folder does not say where copies in memory are kept; `tessera "
      "launch` sets it, or give a folder on tmpfs, like --job.node_folder=/dev/shm/my-run",
      config.checkpoint.memory_interval);
  std::uint64_t node = 0;
  run_together(ranks.world(), "the nodes' folders", [&] {
    create_folder(config.job.node_folder);
    node = identity_of_folder(config.job.node_folder);
  });
  std::vector<double> own = {static_cast<double>(state_bytes), static_cast<double>(shard)};
  append_halves(node, own);
  const std::vector<double> all = ranks.world().all_gather(own, "the nodes of ranks");
  std::vector<CopyPlacement::Rank> places;
  for (const double* next = all.data(); next != all.data() + all.size(); next += own.size()) {
    places.push_back({.node = join_halves(next + 2),
                      .shard = static_cast<std::int64_t>(next[1]),
                      .state_bytes = static_cast<std::size_t>(next[0])});
  }
  return {std::move(places), ranks.rank()};
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
    const int refused = reserve_storage(descriptor, num_bytes);
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
                           cuda::Event* state_read_done)
    : config_(config),
      ranks_(ranks),
      mesh_(mesh),
      state_(state),
      state_read_done_(state_read_done),
      placement_(place_copies(config, ranks, mesh.model.rank(), state.num_bytes())),
      folder_(config.job.node_folder, {}) {}

MemoryCopies::~MemoryCopies() {
  try {
    under_way_.wait();
  } catch (...) {  // NOLINT(bugprone-empty-catch): the run has failed already
  }
}

std::size_t MemoryCopies::file_bytes(int rank) const {
  return kMemoryCopyHeaderBytes + placement_.of(rank).state_bytes;
}

std::size_t MemoryCopies::num_bytes() const {
  std::size_t sum = placement_.own().keeps ? file_bytes(ranks_.rank()) : 0;
  for (const int source : placement_.sources()) sum += file_bytes(source);
  return slots_.both.size() * sum;
}

fs::path MemoryCopies::path_of(const StoredCopy& held) const {
  return folder_.path_of(held.attempt, held.owner, held.slot);
}

void MemoryCopies::require_room(std::size_t leftovers) const {
  struct statvfs room {};
  const std::string& folder = config_.job.node_folder;
  require(::statvfs(folder.c_str(), &room) == 0, "cannot read the size of '{}' (job.node_folder): {}", folder,
          std::strerror(errno));
  const std::size_t available = room.f_bavail * room.f_frsize + leftovers;
  std::size_t needed = 0;
  for (const int owner : placement_.owners_on_node()) needed += slots_.both.size() * file_bytes(owner);
  require(needed <= available,
          "checkpoint.memory_interval = {} needs {} in '{}' (job.node_folder) for the copies in memory of {} ranks and "
          "of their partners, but {} are free there. Enlarge it (mount -o remount,size={}G /dev/shm; docker run "
          "--shm-size={}g), spread the state over more ranks, or give --checkpoint.memory_interval=0 for none",
          config_.checkpoint.memory_interval, format_gib(needed), folder, placement_.neighbours().size(),
          format_gib(available), 1 + (needed >> 30), 1 + (needed >> 30));
}

RunIdentity MemoryCopies::after_earlier_starts(RunIdentity run) {
  if (run.is_counted) return run;
  double newest = 0.0;
  run_together(ranks_.world(), "the attempts with copies in memory", [&] {
    for (const std::int64_t attempt : CopyFolder(config_.job.node_folder, run).attempts()) {
      newest = std::max(newest, static_cast<double>(attempt));
    }
  });
  const std::vector<double> all = ranks_.world().all_gather(std::span(&newest, 1), "the newest attempt with copies");
  run.attempt = std::max(run.attempt, 1 + static_cast<std::int64_t>(std::ranges::max(all)));
  return run;
}

void MemoryCopies::open(const RunIdentity& given, const data::LoaderState& loader) {
  const RunIdentity run = after_earlier_starts(given);
  folder_ = CopyFolder(config_.job.node_folder, run);
  header_ = {.run = run.id,
             .attempt = run.attempt,
             .rank = ranks_.rank(),
             .shard = placement_.own().shard,
             .identity = identity_of(config_, mesh_.degrees, loader),
             .loader = {},
             .config = {},
             .payload_bytes = placement_.own().state_bytes};
  std::vector<StoredCopy> own;
  run_long_together(ranks_.world(), "the check of copies in memory", [&] {
    folder_.require_no_later_attempt();
    require(!path_exists(folder_.of_attempt(run.attempt)),
            "'{}' is there already: {} has run before. Expected a job.attempt that counts up",
            folder_.of_attempt(run.attempt).string(), run.describe());
    require_room(folder_.num_bytes());
    // Whoever asks for a checkpoint gives up the copies of later steps. A restart must not resume them.
    if (config_.checkpoint.load_step < 0) own = read_files();
  });
  std::vector<double> numbers;
  for (const StoredCopy& held : own) {
    for (const std::int64_t number : {held.attempt, held.step, held.shard, held.owner, held.slot}) {
      numbers.push_back(static_cast<double>(number));
    }
    append_halves(held.checksum, numbers);
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
                       .checksum = join_halves(record + 5),
                       .holder = static_cast<int>(rank)});
    }
  }
  choose(found);
}

std::vector<MemoryCopies::StoredCopy> MemoryCopies::read_files() const {
  const std::vector<int> neighbours = placement_.neighbours();
  std::vector<StoredCopy> found;
  std::size_t idx = 0;
  for (const std::int64_t attempt : folder_.attempts()) {
    for (const fs::path& path : folder_.files_of(attempt)) {
      if (neighbours[idx++ % neighbours.size()] != ranks_.rank()) continue;
      try {
        const MappedFile file(path);
        const std::optional<MemoryCopyHeader> header = read_memory_copy(file.bytes(), path.string());
        if (!header) continue;  // its process ended while it made the copy
        StoredCopy held{.attempt = header->attempt,
                        .step = header->step,
                        .shard = header->shard,
                        .owner = header->rank,
                        .slot = path.string().ends_with(".1") ? 1 : 0,
                        .checksum = header->checksum};
        if (header->run != header_.run || attempt != header->attempt || path_of(held) != path) {
          spdlog::warn("'{}' is not the copy that its name says; it is passed over", path.string());
        } else if (header->identity != header_.identity) {
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
  const auto node_of = [&](int rank) { return placement_.of(rank).node; };
  const auto source_of = [&](int rank) -> const StoredCopy& {
    const StoredCopy* found = nullptr;
    for (const StoredCopy& held : chosen_) {
      if (held.shard != placement_.of(rank).shard) continue;
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
  folder_.delete_earlier_attempts(kept);
}

void MemoryCopies::allocate() {
  JobConfig config = recorded_config(config_, mesh_.num_data_ranks());  // as the resume has left it
  header_.config = config_table(config).to_toml();
  run_together(ranks_.world(), "the deletion of old copies in memory", [&] { delete_leftovers(false); });
  has_leftovers_ = !chosen_.empty();
  run_together(ranks_.world(), "the memory of copies", [&] {
    create_folder(folder_.of_attempt(header_.attempt));
    for (std::size_t i = 0; i < slots_.both.size(); ++i) {
      if (i == 0 || !has_leftovers_) allocate(i);
    }
  });
  if (ranks_.rank() != 0) return;
  const bool sends = placement_.own().partner >= 0;
  spdlog::info("copies in memory: every {} steps in '{}', {} per rank; {}", config_.checkpoint.memory_interval,
               config_.job.node_folder, format_gib(num_bytes()),
               placement_.num_nodes() == 1 ? "all ranks are on one node, so they are lost with it"
               : sends                     ? "a second one of each on another node"
                                           : "replicas on other nodes hold the same");
}

void MemoryCopies::allocate(std::size_t slot_idx) {
  Slot& slot = slots_.both[slot_idx];
  const auto create = [&](int owner) {
    return std::make_unique<File>(folder_.path_of(header_.attempt, owner, static_cast<std::int64_t>(slot_idx)),
                                  file_bytes(owner));
  };
  if (placement_.own().keeps) slot.own = create(ranks_.rank());
  if (slot.own && state_read_done_ != nullptr) slot.own->pin();
  for (const int source : placement_.sources()) slot.others.push_back(create(source));
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
  if (!under_way_.taken && !under_way_.is_being_sent) return true;
  if (under_way_.taken) {
    if (!wait_for_all([&] { return ready(); }, seconds)) return false;
    advance();
  }
  if (!wait_for_all([&] { return under_way_.has_arrived(); }, seconds)) return false;
  under_way_.wait();
  under_way_.works.clear();
  under_way_.is_being_sent = false;
  if (!told_time_ && ranks_.rank() == 0) {
    spdlog::info("copies in memory: training waited {:.3f} s for the first, of {}", under_way_.stall_seconds,
                 format_gib(placement_.own().state_bytes));
  }
  told_time_ = true;
  if (has_leftovers_) {
    has_leftovers_ = false;
    ranks_.set_section(Section::kCheckpoint);  // taking and pinning this memory may take longer than a step
    delete_leftovers(true);
    run_together(ranks_.world(), "the memory of copies", [&] { allocate(1); });
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
  folder_.require_no_later_attempt();
  Slot& slot = slots_.next();
  if (slot.own) slot.own->invalidate();
  for (const auto& file : slot.others) file->invalidate();
  const Stopwatch stall;
  std::future<TrainingState::Checksums> checksums;
  const bool is_beside = state_read_done_ != nullptr && !compares_now;
  if (is_beside && slot.own && slot.own->is_pinned()) {
    const std::span<const std::byte> copy(slot.own->payload(), placement_.own().state_bytes);
    state_.start_copy(slot.own->payload(), *state_read_done_);
    checksums = std::async(std::launch::async, [this, copy] {
      const char* failure = state_read_done_->wait();
      TESSERA_CHECK(failure == nullptr, "copying the state of the GPU: {}", failure);
      set_num_threads(1);  // the other threads are training's
      return state_.checksums_of_copy(copy);
    });
  } else {
    std::promise<TrainingState::Checksums> read;
    read.set_value(state_.read(slot.own ? slot.own->payload() : nullptr));
    checksums = read.get_future();
  }
  MemoryCopyHeader header = header_;
  header.step = step;
  header.loader = loader;
  under_way_.taken =
      Taken{.header = std::move(header), .compare = std::move(compare), .checksums = std::move(checksums)};
  under_way_.stall_seconds = 0.0;
  if (!is_beside) advance();
  under_way_.stall_seconds = stall.seconds();
  return true;
}

bool MemoryCopies::CopyUnderWay::has_left_gpu() const {
  return taken && taken->checksums.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

bool MemoryCopies::CopyUnderWay::has_arrived() {
  return std::ranges::all_of(works, [](Work& work) { return work.done(); });
}

void MemoryCopies::CopyUnderWay::wait() {
  for (Work& work : works) work.wait();
}

void MemoryCopies::advance() {
  const Stopwatch stall;
  Taken taken = std::move(*std::exchange(under_way_.taken, std::nullopt));
  const TrainingState::Checksums checksums = taken.checksums.get();
  taken.compare(checksums);
  Slot& slot = slots_.next();
  taken.header.checksum = checksums.all;
  if (slot.own) slot.own->write_header(taken.header);
  constexpr const char* kName = "a copy in memory";
  const std::vector<int>& sources = placement_.sources();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    under_way_.works.push_back(ranks_.world().receive(slot.others[i]->words(), sources[i], kCopyTag, kName));
  }
  if (const int partner = placement_.own().partner; partner >= 0) {
    under_way_.works.push_back(ranks_.world().send(slot.own->words(), partner, kCopyTag, kName));
  }
  under_way_.stall_seconds += stall.seconds();
  under_way_.is_being_sent = true;
  slots_.next_idx = 1 - slots_.next_idx;
}

void MemoryCopies::finish() { settle(std::numeric_limits<double>::max()); }

void MemoryCopies::remove() {
  for (Slot& slot : slots_.both) {
    if (slot.own) slot.own->remove();
    for (const auto& file : slot.others) file->remove();
    slot = {};
  }
  folder_.remove_if_empty();
}

}  // namespace tessera
