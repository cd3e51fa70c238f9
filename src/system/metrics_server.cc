#include "system/metrics_server.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <pthread.h>

#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>

#include "base/error.h"
#include "base/parse_number.h"

namespace tessera {
namespace {

using Families = std::vector<prometheus::MetricFamily>;

class Snapshot : public prometheus::Collectable {
 public:
  void set(Families families) {
    auto next = std::make_shared<const Families>(std::move(families));
    const std::scoped_lock lock(mutex_);
    families_.swap(next);
  }
  Families Collect() const override {
    std::shared_ptr<const Families> now;
    {
      const std::scoped_lock lock(mutex_);
      now = families_;
    }
    return *now;  // copied without the lock, so that publish() does not wait for readers
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Families> families_ = std::make_shared<const Families>();
};

/// Keeps the HTTP library from changing the process's signals. The library makes the process ignore SIGPIPE, and its
/// threads would run the process's signal handlers. Threads created during this object's life take no signals. The
/// destructor restores SIGPIPE's action.
class UnchangedSignals {
 public:
  UnchangedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask_);
    sigaction(SIGPIPE, nullptr, &on_pipe_);
  }
  ~UnchangedSignals() {
    sigaction(SIGPIPE, &on_pipe_, nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  UnchangedSignals(const UnchangedSignals&) = delete;
  UnchangedSignals& operator=(const UnchangedSignals&) = delete;

 private:
  sigset_t mask_{};
  struct sigaction on_pipe_ {};
};

/// Throws Error unless `address` is one HOST:PORT. The library also accepts lists, and a port alone, which would listen
/// on every address of the machine.
void require_one_address(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  const bool has_host = colon != std::string::npos && colon > 0;
  require(has_host && parse_number<std::uint16_t>(std::string_view(address).substr(colon + 1)) &&
              address.find(',') == std::string::npos,
          "cannot serve metrics at '{}': expected HOST:PORT, as 127.0.0.1:9400, or 0.0.0.0:9400 for all addresses of "
          "this machine",
          address);
}

}  // namespace

struct MetricsServer::State {
  State(const std::string& address, std::string name_prefix)
      : prefix(std::move(name_prefix)),
        // A connection that asks nothing occupies a thread until the timeout.
        exposer({"listening_ports", address, "num_threads", "4", "request_timeout_ms", "2000"}) {
    exposer.RegisterCollectable(snapshot);
  }

  std::string prefix;
  std::shared_ptr<Snapshot> snapshot = std::make_shared<Snapshot>();
  prometheus::Exposer exposer;  // last, so that it is destroyed first
};

MetricsServer::MetricsServer(const std::string& address, std::string prefix) {
  require_one_address(address);
  const UnchangedSignals signals;
  try {
    state_ = std::make_unique<State>(address, std::move(prefix));
  } catch (const std::exception& error) {
    fail("cannot serve metrics at '{}': expected an address of this machine and a port that nobody listens on ({})",
         address, error.what());
  }
}

MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const { return state_->exposer.GetListeningPorts().front(); }

void MetricsServer::publish(const std::vector<Measurement>& measurements) {
  // Prometheus refuses a scrape that has a series twice. Two findings may have the same labels, such as two XIDs of a
  // GPU.
  std::map<std::string, std::map<std::map<std::string, std::string>, const Measurement*>> series;  // by name and labels
  for (const Measurement& measurement : measurements) series[measurement.name][measurement.labels] = &measurement;
  Families families;
  for (const auto& [name, by_labels] : series) {
    const Measurement& any = *by_labels.begin()->second;
    prometheus::MetricFamily& family = families.emplace_back();
    family.name = state_->prefix + name;
    family.help = any.help;
    family.type = any.is_counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
    for (const auto& [labels, measurement] : by_labels) {
      prometheus::ClientMetric& metric = family.metric.emplace_back();
      for (const auto& [label, value] : labels) metric.label.push_back({label, value});
      metric.counter.value = metric.gauge.value = measurement->value;
    }
  }
  state_->snapshot->set(std::move(families));
}

}  // namespace tessera
