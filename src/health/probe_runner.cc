#include "health/probe_runner.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/stopwatch.h"

namespace tessera {

/// State that the runner and the probe's thread share. The thread may outlive the runner.
struct ProbeRunner::Worker {
  explicit Worker(std::unique_ptr<Probe> probe_to_run) : probe(std::move(probe_to_run)), name(probe->name()) {}

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return is_asked || ends; });
      if (ends) return;
      is_asked = false;
      const double now = asked_at;
      const bool forgets = std::exchange(is_to_forget, false);
      lock.unlock();
      Outcome found{.probe = name};
      const Stopwatch watch;
      try {
        if (forgets) probe->forget();
        found.result = probe->look(now);
      } catch (const std::exception& error) {
        found.failure = error.what();
      } catch (...) {
        found.failure = "an unknown error";
      }
      found.seconds = watch.seconds();
      lock.lock();
      outcome = std::move(found);
      is_busy = false;
      changed.notify_all();
    }
  }

  const std::unique_ptr<Probe> probe;
  const std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  double asked_at = 0.0;
  bool is_asked = false, is_busy = false, is_to_forget = false, ends = false;
  Outcome outcome;
};

ProbeRunner::ProbeRunner(std::vector<std::unique_ptr<Probe>> probes, double limit) : limit_(limit) {
  for (std::unique_ptr<Probe>& probe : probes) {
    workers_.push_back(std::make_shared<Worker>(std::move(probe)));
    std::thread([worker = workers_.back()] { worker->run(); }).detach();
  }
}

ProbeRunner::~ProbeRunner() {
  for (const auto& worker : workers_) {
    const std::scoped_lock lock(worker->mutex);
    worker->ends = true;
    worker->changed.notify_all();
  }
}

std::vector<ProbeRunner::Outcome> ProbeRunner::look(double now, bool forgets) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                            std::chrono::duration<double>(limit_));
  for (const auto& worker : workers_) {
    const std::scoped_lock lock(worker->mutex);
    worker->is_to_forget = worker->is_to_forget || forgets;
    if (worker->is_busy) continue;
    worker->asked_at = now;
    worker->is_asked = worker->is_busy = true;
    worker->changed.notify_all();
  }
  std::vector<Outcome> outcomes;
  for (const auto& worker : workers_) {
    std::unique_lock lock(worker->mutex);
    if (worker->changed.wait_until(lock, until, [&] { return !worker->is_busy; })) {
      outcomes.push_back(worker->outcome);
    } else {
      outcomes.push_back({.probe = worker->name,
                          .failure = fmt::format("it has not ended after {:.1f} s", now - worker->asked_at + limit_),
                          .seconds = limit_});
    }
  }
  return outcomes;
}

}  // namespace tessera
