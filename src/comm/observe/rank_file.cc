#include "comm/observe/rank_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/file.h"
#include "tensor/arena.h"

namespace tessera {
namespace {

constexpr std::array<char, 8> kMagic = {'T', 'E', 'S', 'S', 'R', 'A', 'N', 'K'};
constexpr std::uint32_t kVersion = 1;

[[noreturn]] void fail_system(const std::filesystem::path& path, const char* action, int reason) {
  fail("cannot {} '{}' (job.node_folder): {}; expected a folder on a tmpfs, in which this user may write", action,
       path.string(), std::strerror(reason));
}

void make_folder(const std::filesystem::path& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) fail_system(folder, "create", errno);
}

}  // namespace

struct RankFileContent {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t num_bytes;
  std::int64_t attempt;
  std::atomic<std::int32_t> world_size;
  RankEntry entry;
  FlightLog log;
};

std::string_view name_of(Section section) {
  constexpr std::array<std::string_view, 6> kNames = {"starting",   "loading",    "step",
                                                      "validation", "checkpoint", "ended"};
  const auto at = static_cast<std::size_t>(section);
  return at < kNames.size() ? kNames[at] : "unknown";
}

std::filesystem::path rank_file_path(const std::filesystem::path& folder, std::int64_t attempt, int world_rank) {
  return folder / fmt::format("attempt-{}", attempt) / fmt::format("rank-{:05}", world_rank);
}

RankFile::RankFile(const std::filesystem::path& folder, std::int64_t attempt, int world_rank)
    : path_(rank_file_path(folder, attempt, world_rank)), world_rank_(world_rank) {
  make_folder(folder);
  make_folder(path_.parent_path());
  const std::filesystem::path unfinished = path_.string() + ".tmp";
  ::unlink(unfinished.c_str());
  const int descriptor = ::open(unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) fail_system(unfinished, "create", errno);
  int reason = reserve_storage(descriptor, sizeof(RankFileContent));
  void* memory = MAP_FAILED;
  if (reason == 0) {
    memory = ::mmap(nullptr, sizeof(RankFileContent), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) reason = errno;
  }
  ::close(descriptor);
  if (reason != 0) {
    ::unlink(unfinished.c_str());
    fail_system(unfinished, "take memory for", reason);
  }
  content_ = static_cast<RankFileContent*>(memory);  // zeroed
  content_->magic = kMagic;
  content_->version = kVersion;
  content_->num_bytes = sizeof(RankFileContent);
  content_->attempt = attempt;
  RankEntry& entry = content_->entry;
  entry.pid = ::getpid();
  entry.process_start = start_of_process(::getpid());
  entry.section_since_ns = entry.operation_since_ns = monotonic_ns();
  put_text("starting", entry.operation);
  entry.world_rank_plus_1 = world_rank + 1;
  if (::rename(unfinished.c_str(), path_.c_str()) != 0) {
    reason = errno;
    ::munmap(content_, sizeof(RankFileContent));
    ::unlink(unfinished.c_str());
    fail_system(path_, "create", reason);
  }
}

RankFile::~RankFile() { ::munmap(content_, sizeof(RankFileContent)); }

void RankFile::set_world_size(int size) { content_->world_size = size; }

RankEntry& RankFile::entry() { return content_->entry; }

FlightRecorder RankFile::recorder() { return FlightRecorder(&content_->log); }

void set_end(RankEntry& entry, int exit_status, std::string_view message) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);  // two threads may find a failure at once
  if (entry.section.load() == Section::kEnded) return;
  entry.exit_status.store(exit_status);
  put_text(message, entry.end_message);
  entry.section_since_ns.store(monotonic_ns());
  entry.section.store(Section::kEnded);
}

const RankEntry& entry_in(std::span<const std::byte> file) {
  TESSERA_CHECK(file.size() == sizeof(RankFileContent));
  return reinterpret_cast<const RankFileContent*>(file.data())->entry;
}

const RankState::Event* RankState::find_event(std::uint64_t number) const {
  const auto found = std::ranges::find(events, number, &Event::number);
  return number == 0 || found == events.end() ? nullptr : &*found;
}

namespace {

std::vector<RankState::Group> groups_of(const FlightLog& log) {
  std::vector<RankState::Group> groups;
  for (const FlightGroup& group : log.groups) {
    if (group.id.load(kRelaxed) == 0) break;
    groups.push_back({.id = group.id.load(kRelaxed),
                      .axis = get_text(group.axis),
                      .rank = group.rank.load(kRelaxed),
                      .size = group.size.load(kRelaxed),
                      .sequence = group.sequence.load(kRelaxed)});
  }
  return groups;
}

/// Returns the events of a log that another process may be writing to. A writer sets `check`, the other fields and
/// `number`, in this order. So an event is whole if `number` was there before its fields were read, and `check` still
/// had the same value afterwards.
std::vector<RankState::Event> events_of(const FlightLog& log, std::size_t num_groups) {
  std::vector<RankState::Event> events;
  for (const FlightEvent& event : log.events) {
    const RankState::Event read{.number = event.number.load(std::memory_order_acquire),
                                .kind = event.kind.load(kRelaxed),
                                .group = event.group.load(kRelaxed),
                                .sequence = event.sequence.load(kRelaxed),
                                .bytes = event.bytes.load(kRelaxed),
                                .peer = event.peer.load(kRelaxed),
                                .begin_ns = event.begin_ns.load(kRelaxed),
                                .end_ns = event.end_ns.load(kRelaxed),
                                .on_gpu = event.on_gpu.load(kRelaxed) != 0};
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool is_whole = read.number != 0 && event.check.load(kRelaxed) == read.number;
    if (is_whole && read.group < num_groups) events.push_back(read);
  }
  std::ranges::sort(events, {}, &RankState::Event::number);
  return events;
}

}  // namespace

RankState parse_rank_file(std::span<const std::byte> bytes, const std::string& name) {
  require(bytes.size() == sizeof(RankFileContent) && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0,
          "'{}' is not the file of a rank: expected {} bytes that begin with {}", name, sizeof(RankFileContent),
          std::string_view(kMagic.data(), kMagic.size()));
  // Another process may go on writing, so all fields but the events are taken from one copy.
  const Buffer copy(sizeof(RankFileContent));
  std::memcpy(copy.data(), bytes.data(), sizeof(RankFileContent));
  const auto& content = *reinterpret_cast<const RankFileContent*>(copy.data());
  require(content.version == kVersion && content.num_bytes == sizeof(RankFileContent),
          "'{}' was written by another version of this program: its layout is {}, expected {}", name, content.version,
          kVersion);
  const RankEntry& entry = content.entry;
  const std::int32_t rank_plus_1 = entry.world_rank_plus_1.load(kRelaxed), pid = entry.pid.load(kRelaxed);
  require(rank_plus_1 > 0 && pid > 0, "'{}' is damaged: it is of rank {}, process {}", name, rank_plus_1 - 1LL, pid);
  RankState state{.world_rank = rank_plus_1 - 1,
                  .world_size = content.world_size.load(kRelaxed),
                  .attempt = content.attempt,
                  .pid = pid,
                  .process_start = entry.process_start.load(kRelaxed),
                  .first_step = entry.first_step.load(kRelaxed),
                  .step = entry.step.load(kRelaxed),
                  .section = entry.section.load(kRelaxed),
                  .section_since_ns = entry.section_since_ns.load(kRelaxed),
                  .operation = get_text(entry.operation),
                  .operation_since_ns = entry.operation_since_ns.load(kRelaxed),
                  .wait_begin_ns = entry.wait_begin_ns.load(kRelaxed),
                  .idle_ns = entry.idle_ns.load(kRelaxed),
                  .awaited_event = entry.awaited_event.load(kRelaxed),
                  .stopped_from_ns = entry.stopped_from_ns.load(kRelaxed),
                  .stopped_until_ns = entry.stopped_until_ns.load(kRelaxed),
                  .end = {},
                  .groups = groups_of(content.log),
                  .events = {}};
  if (state.section == Section::kEnded) {
    state.end = {.exit_status = entry.exit_status.load(kRelaxed), .message = get_text(entry.end_message)};
  }
  // A mapped file is aligned. What is not is memory to which nobody writes.
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(RankFileContent) == 0;
  const auto& log = is_aligned ? reinterpret_cast<const RankFileContent*>(bytes.data())->log : content.log;
  state.events = events_of(log, state.groups.size());
  return state;
}

RankState read_rank_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  RankState state = parse_rank_file(file.bytes(), path.string());
  state.process = state_of_process(state.pid, state.process_start);
  state.read_ns = monotonic_ns();
  return state;
}

}  // namespace tessera
