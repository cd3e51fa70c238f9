#include "comm/transport/thread_transport.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tensor/arena.h"

namespace tessera {
namespace {

/// Identifies a message. The n-th send and the n-th receive of a tag belong together.
struct Key {
  int tag;
  std::int64_t number;
  bool operator==(const Key&) const = default;
};

/// Describes a message that its sender offers and the receiver copies.
struct Message {
  Key key;
  const std::byte* data;
  std::size_t num_bytes;
  std::shared_ptr<std::atomic<bool>> taken;
  Bell* bell_of_sender;
};

struct Mailbox {
  std::mutex mutex;
  std::deque<Message> messages;
  std::map<int, std::int64_t> num_sent, num_received;  // by tag
};

/// A rank's mailboxes, one for each rank that has sent it something. Most pairs of ranks of a large world never do.
struct Inbox {
  std::mutex mutex;
  std::map<int, Mailbox> of_sender;  // its elements stay where they are
};

/// Holds what all threads share, whatever groups they are in.
struct Process {
  Process(int num_ranks, int the_ranks_per_node)
      : ranks_per_node(the_ranks_per_node), bells(static_cast<std::size_t>(num_ranks)) {}
  void require_alive() const { require(!failed.load(), "another rank has failed"); }
  void fail() {
    failed.store(true);
    for (Bell& bell : bells) bell.ring();
  }

  std::atomic<bool> failed{false};
  /// Returns the node of a rank in the world, by its bell.
  int node_of(const Bell& bell) const { return static_cast<int>(&bell - bells.data()) / ranks_per_node; }

  const int ranks_per_node;
  std::vector<Bell> bells;  // by rank in the world
};

/// Holds what the ranks of one transport share.
struct Group {
  Group(std::vector<Bell*> the_bells, Process& the_process)
      : size(static_cast<int>(the_bells.size())),
        process(the_process),
        bells(std::move(the_bells)),
        inboxes(bells.size()) {}

  Mailbox& mailbox(int from, int to) {
    Inbox& inbox = inboxes[static_cast<std::size_t>(to)];
    const std::lock_guard lock(inbox.mutex);
    return inbox.of_sender[from];
  }

  /// Waits until all ranks have called it. The last one computes a result from what all have given, and every rank gets
  /// it.
  std::shared_ptr<void> meet(
      int rank, std::pair<int, int> given,
      const std::function<std::shared_ptr<void>(const std::vector<std::pair<int, int>>&)>& make) {
    std::unique_lock lock(mutex_);
    arrivals_.resize(static_cast<std::size_t>(size));
    arrivals_[static_cast<std::size_t>(rank)] = given;
    const std::int64_t round = rounds_;
    if (++num_arrived_ == size) {
      num_arrived_ = 0;
      result_ = make(arrivals_);
      ++rounds_;
      for (Bell* bell : bells) bell->ring();
    }
    Bell& bell = bell_of(rank);
    while (rounds_ == round) {
      const std::uint32_t seen = bell.count();
      lock.unlock();
      process.require_alive();
      bell.wait(seen);
      lock.lock();
    }
    return result_;
  }

  Bell& bell_of(int rank) const { return *bells[static_cast<std::size_t>(rank)]; }

  const int size;
  Process& process;
  const std::vector<Bell*> bells;
  std::vector<Inbox> inboxes;  // by receiver

 private:
  std::mutex mutex_;
  int num_arrived_ = 0;
  std::int64_t rounds_ = 0;
  std::vector<std::pair<int, int>> arrivals_;
  std::shared_ptr<void> result_;
};

class ThreadSend : public Request {
 public:
  ThreadSend(std::shared_ptr<Group> group, Mailbox& mailbox, Key key, std::shared_ptr<std::atomic<bool>> taken)
      : group_(std::move(group)), mailbox_(mailbox), key_(key), taken_(std::move(taken)) {}
  /// Takes the message back if it is still there. A sender that has failed frees its memory.
  ~ThreadSend() override {
    if (taken_->load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mailbox_.mutex);
    std::erase_if(mailbox_.messages, [&](const Message& message) { return message.key == key_; });
  }
  bool test() override {
    group_->process.require_alive();
    return taken_->load(std::memory_order_acquire);
  }

 private:
  std::shared_ptr<Group> group_;  // owns the mailbox
  Mailbox& mailbox_;
  Key key_;
  std::shared_ptr<std::atomic<bool>> taken_;
};

class ThreadReceive : public Request {
 public:
  ThreadReceive(Mailbox& mailbox, const Process& process, std::byte* data, std::size_t num_bytes, int tag)
      : mailbox_(mailbox), process_(process), data_(data), num_bytes_(num_bytes), key_{tag, 0} {
    const std::lock_guard lock(mailbox_.mutex);
    key_.number = mailbox_.num_received[tag]++;
  }

  bool test() override {
    process_.require_alive();
    Message message;
    {
      const std::lock_guard lock(mailbox_.mutex);
      const auto found = std::find_if(mailbox_.messages.begin(), mailbox_.messages.end(),
                                      [&](const Message& m) { return m.key == key_; });
      if (found == mailbox_.messages.end()) return false;
      message = *found;
      TESSERA_CHECK(message.num_bytes == num_bytes_, "received {} bytes, expected {}", message.num_bytes, num_bytes_);
      if (num_bytes_ > 0) std::memcpy(data_, message.data, num_bytes_);  // under the lock, so that ~ThreadSend waits
      mailbox_.messages.erase(found);
    }
    message.taken->store(true, std::memory_order_release);
    message.bell_of_sender->ring();
    return true;
  }

 private:
  Mailbox& mailbox_;
  const Process& process_;
  std::byte* data_;
  std::size_t num_bytes_;
  Key key_;
};

class ThreadWindow : public SymmetricWindow {
 public:
  explicit ThreadWindow(std::shared_ptr<std::vector<Buffer>> memory) : memory_(std::move(memory)) {}
  std::byte* peer(int rank) const override { return (*memory_)[static_cast<std::size_t>(rank)].data(); }
  std::size_t num_bytes() const override { return memory_->front().size(); }

 private:
  std::shared_ptr<std::vector<Buffer>> memory_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size; }

  std::unique_ptr<Request> send(const std::byte* data, std::size_t num_bytes, int to, int tag) override {
    auto taken = std::make_shared<std::atomic<bool>>(false);
    Mailbox& mailbox = group_->mailbox(rank_, to);
    Key key{tag, 0};
    {
      const std::lock_guard lock(mailbox.mutex);
      key.number = mailbox.num_sent[tag]++;
      mailbox.messages.push_back({key, data, num_bytes, taken, bell()});
    }
    group_->bell_of(to).ring();
    return std::make_unique<ThreadSend>(group_, mailbox, key, std::move(taken));
  }

  std::unique_ptr<Request> receive(std::byte* data, std::size_t num_bytes, int from, int tag) override {
    return std::make_unique<ThreadReceive>(group_->mailbox(from, rank_), group_->process, data, num_bytes, tag);
  }

  std::unique_ptr<Transport> split(int color, int order, std::string_view) override {
    // Each rank's new group, and its rank in it, by its rank in this group.
    using Places = std::vector<std::pair<std::shared_ptr<Group>, int>>;
    const auto places = std::static_pointer_cast<Places>(group_->meet(rank_, {color, order}, [&](const auto& given) {
      std::map<int, std::vector<std::pair<int, int>>> members;  // (order, rank in this group), by color
      for (int r = 0; r < size(); ++r) {
        const auto& [member_color, member_order] = given[static_cast<std::size_t>(r)];
        members[member_color].emplace_back(member_order, r);
      }
      auto made = std::make_shared<Places>(static_cast<std::size_t>(size()));
      for (auto& [member_color, ranks] : members) {
        std::sort(ranks.begin(), ranks.end());
        std::vector<Bell*> bells;
        for (const auto& [member_order, r] : ranks) bells.push_back(&group_->bell_of(r));
        const auto group = std::make_shared<Group>(std::move(bells), group_->process);
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          (*made)[static_cast<std::size_t>(ranks[i].second)] = {group, static_cast<int>(i)};
        }
      }
      return made;
    }));
    const auto& [group, rank] = (*places)[static_cast<std::size_t>(rank_)];
    return std::make_unique<ThreadTransport>(group, rank);
  }

  std::unique_ptr<Transport> split_by_node() override { return split(group_->process.node_of(*bell()), rank_, "node"); }

  std::unique_ptr<SymmetricWindow> allocate_window(std::size_t num_bytes) override {
    return std::make_unique<ThreadWindow>(
        std::static_pointer_cast<std::vector<Buffer>>(group_->meet(rank_, {}, [&](const auto&) {
          auto memory = std::make_shared<std::vector<Buffer>>();
          for (int r = 0; r < size(); ++r) memory->emplace_back(num_bytes);
          return memory;
        })));
  }

  Bell* bell() const override { return &group_->bell_of(rank_); }

  void abort(int) override { group_->process.fail(); }

 private:
  std::shared_ptr<Group> group_;
  int rank_;
};

/// Keeps a message's receiver from interrupting its sender, which may have more messages for it. This holds for threads
/// that the calling one starts, too.
void run_in_long_turns() {
  const sched_param no_priority{};
  static_cast<void>(sched_setscheduler(0, SCHED_BATCH, &no_priority));  // it works without, but takes longer
}

}  // namespace

void run_rank_threads(int num_ranks, const std::function<void(std::unique_ptr<Transport>)>& body, int ranks_per_node) {
  Process process(num_ranks, ranks_per_node);
  std::vector<Bell*> bells;
  for (Bell& bell : process.bells) bells.push_back(&bell);
  const auto world = std::make_shared<Group>(std::move(bells), process);
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto keep_error = [&] {
    const std::lock_guard lock(mutex);
    if (!first_error) first_error = std::current_exception();
    process.fail();
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        run_in_long_turns();
        try {
          body(std::make_unique<ThreadTransport>(world, rank));
        } catch (...) {
          keep_error();
        }
      });
    }
  } catch (...) {  // the system has no more threads
    keep_error();
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace tessera
