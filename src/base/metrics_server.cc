#include "base/metrics_server.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>

#include <map>
#include <mutex>

#include "base/error.h"

namespace tessera {
namespace {

using Families = std::vector<prometheus::MetricFamily>;

class Snapshot : public prometheus::Collectable {
 public:
  void set(Families families) {
    const std::scoped_lock lock(mutex_);
    std::swap(families_, families);
  }
  Families Collect() const override {
    const std::scoped_lock lock(mutex_);
    return families_;
  }

 private:
  mutable std::mutex mutex_;
  Families families_;
};

}  // namespace

struct MetricsServer::State {
  State(const std::string& address, std::string its_prefix)
      : prefix(std::move(its_prefix)), exposer({"listening_ports", address, "num_threads", "2"}) {
    exposer.RegisterCollectable(snapshot);
  }

  std::string prefix;
  std::shared_ptr<Snapshot> snapshot = std::make_shared<Snapshot>();
  prometheus::Exposer exposer;  // ends first
};

MetricsServer::MetricsServer(const std::string& address, std::string prefix) {
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
  std::map<std::string, prometheus::MetricFamily> by_name;
  for (const Measurement& measurement : measurements) {
    prometheus::MetricFamily& family = by_name[measurement.name];
    family.name = state_->prefix + measurement.name;
    family.help = measurement.help;
    family.type = measurement.is_counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
    prometheus::ClientMetric metric;
    for (const auto& [label, value] : measurement.labels) metric.label.push_back({label, value});
    metric.counter.value = metric.gauge.value = measurement.value;
    family.metric.push_back(std::move(metric));
  }
  Families families;
  for (auto& [name, family] : by_name) families.push_back(std::move(family));
  state_->snapshot->set(std::move(families));
}

}  // namespace tessera
