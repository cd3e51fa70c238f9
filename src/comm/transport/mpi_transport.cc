#include "comm/transport/mpi_transport.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "tensor/arena.h"

namespace tessera {
namespace {

/// Largest size of one MPI message: MPI counts in int.
constexpr std::size_t kMaxMessage = std::size_t{1} << 30;

/// Returns MPI's description of an error code.
std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

[[noreturn]] void mpi_failed(const std::string& what, int code) {
  throw RankFailure(
      fmt::format("{} failed; MPI says: {}. Another rank may have died, or the network between them may have failed: "
                  "see what mpirun (or srun) and the other ranks say",
                  what, text_of(code)));
}

/// TESSERA_MPI(call, "format of what it does", values...) throws RankFailure if MPI returns an error code. Every
/// group's error handler lets MPI return codes.
#define TESSERA_MPI(call, ...)                                             \
  do {                                                                     \
    if (const int mpi_code = (call); mpi_code != MPI_SUCCESS) [[unlikely]] \
      mpi_failed(fmt::format(__VA_ARGS__), mpi_code);                      \
  } while (false)

/// Returns the room in the folder where Open MPI creates windows, by default /dev/shm.
WindowRoom find_window_room() {
  const char* folder = std::getenv("OMPI_MCA_osc_sm_backing_directory");
  WindowRoom room{.folder = folder == nullptr ? "/dev/shm" : folder};
  struct statvfs found {};
  if (statvfs(room.folder.c_str(), &found) == 0) {
    room.size = found.f_blocks * found.f_frsize;
    room.available = found.f_bavail * found.f_frsize;
  }
  return room;
}

class MpiRequest : public Request {
 public:
  std::vector<MPI_Request> parts;

  bool test() override {
    int done = 0;
    TESSERA_MPI(MPI_Testall(static_cast<int>(parts.size()), parts.data(), &done, MPI_STATUSES_IGNORE),
                "a message to or from another rank");
    return done != 0;
  }
};

/// Owns a communicator. Its users share the object, and the last of them frees the communicator.
struct Communicator {
  explicit Communicator(MPI_Comm the_comm) : comm(the_comm) {
    TESSERA_MPI(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "setting the error handler of a group of ranks");
  }
  ~Communicator() {
    if (comm != MPI_COMM_WORLD) MPI_Comm_free(&comm);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm comm;
};

class MpiWindow : public SymmetricWindow {
 public:
  MpiWindow(std::shared_ptr<Communicator> communicator, int size, std::size_t num_bytes)
      : communicator_(std::move(communicator)), num_bytes_(num_bytes) {
    // The library aligns to less than kAlignment. Windows begin at pages, so rounding up gives the same offset on all
    // ranks.
    void* own = nullptr;
    const int code = MPI_Win_allocate_shared(static_cast<MPI_Aint>(num_bytes + kAlignment), 1, MPI_INFO_NULL,
                                             communicator_->comm, &own, &window_);
    if (code != MPI_SUCCESS) {
      const WindowRoom room = find_window_room();
      fail(
          "allocating memory that {} ranks share, {} bytes for each, failed; MPI says: {}. '{}' has {} bytes, of which "
          "{} are free: enlarge it, or delete what ended programs have left there",
          size, num_bytes, text_of(code), room.folder, room.size, room.available);
    }
    std::memset(aligned(own), 0, num_bytes);
    for (int rank = 0; rank < size; ++rank) {
      MPI_Aint bytes = 0;
      int unit = 0;
      void* memory = nullptr;
      TESSERA_MPI(MPI_Win_shared_query(window_, rank, &bytes, &unit, &memory), "finding the memory of rank {} of {}",
                  rank, size);
      peers_.push_back(aligned(memory));
    }
    TESSERA_MPI(MPI_Barrier(communicator_->comm), "waiting for the shared memory of {} ranks", size);  // all zeroed now
  }
  /// MPI_Win_free waits for the other ranks. They may not arrive while an exception ends the run, so it is skipped
  /// then.
  ~MpiWindow() override {
    if (std::uncaught_exceptions() == 0) MPI_Win_free(&window_);
  }

  std::byte* peer(int rank) const override { return peers_[static_cast<std::size_t>(rank)]; }
  std::size_t num_bytes() const override { return num_bytes_; }

 private:
  static std::byte* aligned(void* memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    return reinterpret_cast<std::byte*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

  std::shared_ptr<Communicator> communicator_;
  std::size_t num_bytes_;
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<std::byte*> peers_;
};

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {
    TESSERA_MPI(MPI_Comm_rank(comm(), &rank_), "finding this rank in its group");
    TESSERA_MPI(MPI_Comm_size(comm(), &size_), "finding the size of a group of ranks");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    return in_parts(num_bytes, [&](std::size_t begin, int count, MPI_Request* request) {
      TESSERA_MPI(MPI_Isend(data + begin, count, MPI_BYTE, to, tag, comm(), request),
                  "sending {} bytes from rank {} to rank {} of a group of {}", count, rank_, to, size_);
    });
  }

  std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) override {
    return in_parts(num_bytes, [&](std::size_t begin, int count, MPI_Request* request) {
      TESSERA_MPI(MPI_Irecv(data + begin, count, MPI_BYTE, from, tag, comm(), request),
                  "receiving {} bytes from rank {} on rank {} of a group of {}", count, from, rank_, size_);
    });
  }

  std::unique_ptr<Transport> split(int color, int order, std::string_view) override {
    MPI_Comm part = MPI_COMM_NULL;
    TESSERA_MPI(MPI_Comm_split(comm(), color, order, &part), "splitting a group of {} ranks", size_);
    return std::make_unique<MpiTransport>(std::make_shared<Communicator>(part));
  }

  std::unique_ptr<Transport> split_by_node() override {
    MPI_Comm part = MPI_COMM_NULL;
    TESSERA_MPI(MPI_Comm_split_type(comm(), MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &part),
                "splitting a group of {} ranks by node", size_);
    return std::make_unique<MpiTransport>(std::make_shared<Communicator>(part));
  }

  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) override {
    const int reachable = split_by_node()->size();
    require(reachable == size_, "{} ranks are to share memory, but only {} of them are on one node", size_, reachable);
    return std::make_unique<MpiWindow>(communicator_, size_, num_bytes);
  }

  std::optional<WindowRoom> window_room() const override {
    WindowRoom room = find_window_room();
    return room.size == 0 ? std::nullopt : std::optional(std::move(room));
  }

  void abort(int status) override { MPI_Abort(MPI_COMM_WORLD, status); }

 private:
  MPI_Comm comm() const { return communicator_->comm; }

  template <typename Start>
  static std::unique_ptr<Request> in_parts(std::size_t num_bytes, Start&& start) {
    auto request = std::make_unique<MpiRequest>();
    std::size_t begin = 0;
    do {
      const std::size_t count = std::min(kMaxMessage, num_bytes - begin);
      request->parts.push_back(MPI_REQUEST_NULL);
      start(begin, static_cast<int>(count), &request->parts.back());
      begin += count;
    } while (begin < num_bytes);
    return request;
  }

  std::shared_ptr<Communicator> communicator_;
  int rank_ = 0, size_ = 1;
};

/// Returns the number in the first of these variables of the environment that has one from 0.
std::optional<int> first_number(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    int number = -1;
    if (value == nullptr) continue;
    std::from_chars(value, value + std::strlen(value), number);
    if (number >= 0) return number;
  }
  return std::nullopt;
}

}  // namespace

bool launched_by_mpi() {
  const auto is_set = [](const char* name) { return std::getenv(name) != nullptr; };
  if (is_set("OMPI_COMM_WORLD_SIZE")) return true;  // Open MPI's mpirun
  // With use_interactive_step, salloc's shell is a step of one task, which may have a task's variables. This is its
  // step id (SLURM_INTERACTIVE_STEP in Slurm's slurm.h).
  const char* step = std::getenv("SLURM_STEP_ID");
  if (step != nullptr && std::string_view(step) == "4294967290") return false;
  // PMIx gives its clients their rank as PMIX_RANK (srun --mpi=pmix). Slurm's mpi/pmi2 plugin gives tasks PMI_RANK, but
  // not batch scripts. SLURM_PROCID and SLURM_MPI_TYPE say nothing: shells have them, too.
  return is_set("PMIX_RANK") || is_set("PMI_RANK");
}

std::optional<int> launched_rank() { return first_number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}); }

std::optional<int> launched_size() {
  if (const auto size = first_number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})) return size;
  // PMIx does not say it, but its step of Slurm does.
  return std::getenv("PMIX_RANK") != nullptr ? first_number({"SLURM_STEP_NUM_TASKS"}) : std::nullopt;
}

MpiRuntime::MpiRuntime() {
  int provided = 0;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  require(
      code == MPI_SUCCESS,
      "the start of MPI failed; it says: {}. Expected a start by the mpirun of the MPI library that this program was "
      "built with, or by srun --mpi=pmix",
      text_of(code));
  require(
      provided == MPI_THREAD_MULTIPLE,
      "this MPI library gives thread level {}, needed is {} (MPI_THREAD_MULTIPLE): build or choose one with support "
      "for threads",
      provided, MPI_THREAD_MULTIPLE);
}

MpiRuntime::~MpiRuntime() { MPI_Finalize(); }

std::unique_ptr<Transport> MpiRuntime::world() const {
  return std::make_unique<MpiTransport>(std::make_shared<Communicator>(MPI_COMM_WORLD));
}

}  // namespace tessera
