#include "launch/watch/channel.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "base/error.h"

namespace tessera {
namespace {

constexpr std::size_t kKeySize = 40;  // length of a CURVE key in Z85

struct KeyPair {
  std::array<char, kKeySize + 1> open{}, secret{};
  KeyPair() {
    require(zmq_curve_keypair(open.data(), secret.data()) == 0,
            "this ZeroMQ library has no CURVE encryption: install one that was built with libsodium");
  }
};

/// How many messages can wait in a direction. A launcher that hangs must not fill the memory of its monitors.
constexpr int kMaxWaiting = 1000;

std::vector<zmq::message_t> frames_of(const nlohmann::json& body, const std::vector<std::string>& files) {
  std::vector<zmq::message_t> frames;
  frames.emplace_back(json_text(body));
  for (const std::string& file : files) frames.emplace_back(file);
  return frames;
}

/// Returns the message, or nullopt if it is not a JSON object.
std::optional<Message> message_of(std::string node, const std::vector<zmq::message_t>& frames, std::size_t first) {
  if (frames.size() <= first) return std::nullopt;
  try {
    Message message{.node = std::move(node), .body = parse_json(frames[first].to_string_view(), "a message")};
    for (std::size_t i = first + 1; i < frames.size(); ++i) message.files.push_back(frames[i].to_string());
    return message.body.is_object() ? std::optional(std::move(message)) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Collects the descriptors of connections that have ended.
class ConnectionEvents : public zmq::monitor_t {
 public:
  std::vector<int> ended;

 private:
  void on_event_disconnected(const zmq_event_t& event, const char*) override { ended.push_back(event.value); }
};

}  // namespace

struct LauncherChannel::Sockets {
  zmq::context_t context;
  zmq::socket_t router{context, zmq::socket_type::router};
  ConnectionEvents events;
  std::map<int, std::string> nodes;  // by the descriptor of the connection on which they were last heard
};

LauncherChannel::LauncherChannel(bool only_here) : sockets_(std::make_unique<Sockets>()) {
  const KeyPair keys;
  key_.assign(keys.open.data(), kKeySize);
  zmq::socket_t& router = sockets_->router;
  router.set(zmq::sockopt::curve_server, true);
  router.set(zmq::sockopt::curve_secretkey, keys.secret.data());
  router.set(zmq::sockopt::router_handover, true);  // a node's next monitor replaces the one before
  router.set(zmq::sockopt::linger, 0);
  router.set(zmq::sockopt::sndhwm, kMaxWaiting);
  sockets_->events.init(router, "inproc://connections", ZMQ_EVENT_DISCONNECTED);
  try {
    router.bind(only_here ? "tcp://127.0.0.1:*" : "tcp://*:*");
  } catch (const zmq::error_t& error) {
    fail("cannot listen for the monitors of the nodes: {}", error.what());
  }
  const std::string endpoint = router.get(zmq::sockopt::last_endpoint);
  port_ = std::stoi(endpoint.substr(endpoint.rfind(':') + 1));
}

LauncherChannel::~LauncherChannel() = default;

std::optional<Message> LauncherChannel::receive(std::chrono::milliseconds timeout) {
  std::vector<zmq::pollitem_t> items = {{sockets_->router.handle(), 0, ZMQ_POLLIN, 0}};
  try {
    if (zmq::poll(items, timeout) == 0) return std::nullopt;
    std::vector<zmq::message_t> frames;
    if (!zmq::recv_multipart(sockets_->router, std::back_inserter(frames), zmq::recv_flags::dontwait)) {
      return std::nullopt;
    }
    const std::string node = frames.front().to_string();
    sockets_->nodes[frames.back().get(ZMQ_SRCFD)] = node;
    return message_of(node, frames, 1);
  } catch (const zmq::error_t&) {  // interrupted by a signal
    return std::nullopt;
  }
}

std::vector<std::string> LauncherChannel::take_disconnected() {
  std::vector<std::string> nodes;
  try {
    while (sockets_->events.check_event(0)) {
    }
  } catch (const zmq::error_t&) {  // NOLINT(bugprone-empty-catch): a signal; they are there the next time
  }
  for (const int descriptor : std::exchange(sockets_->events.ended, {})) {
    if (auto found = sockets_->nodes.extract(descriptor)) nodes.push_back(found.mapped());
  }
  return nodes;
}

void LauncherChannel::send(const Message& message) {
  std::vector<zmq::message_t> frames = frames_of(message.body, message.files);
  frames.insert(frames.begin(), zmq::message_t(message.node));
  try {
    zmq::send_multipart(sockets_->router, frames, zmq::send_flags::dontwait);
  } catch (const zmq::error_t&) {  // NOLINT(bugprone-empty-catch): the launcher notices a lost node by its silence
  }
}

bool is_launcher_at(const std::string& endpoint, std::chrono::milliseconds timeout) {
  // ZeroMQ greets whoever connects, before any encryption. If the process is stopped, the kernel accepts the
  // connection, but nobody greets.
  zmq::context_t context;
  zmq::socket_t stream(context, zmq::socket_type::stream);
  stream.set(zmq::sockopt::linger, 0);
  try {
    stream.connect(endpoint);
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      stream.set(zmq::sockopt::rcvtimeo, std::max(0, static_cast<int>(left.count())));
      std::vector<zmq::message_t> frames;
      if (!zmq::recv_multipart(stream, std::back_inserter(frames))) return false;
      if (!frames.back().empty()) return true;  // an empty frame means that the connection has begun or ended
    }
  } catch (const zmq::error_t&) {  // an invalid endpoint, or a signal
    return false;
  }
}

struct MonitorChannel::Sockets {
  zmq::context_t context;
  zmq::socket_t dealer{context, zmq::socket_type::dealer};
};

MonitorChannel::MonitorChannel(const std::string& node, const std::string& endpoint, const std::string& key)
    : sockets_(std::make_unique<Sockets>()), node_(node) {
  require(key.size() == kKeySize, "the key of the launch has {} characters, expected {}", key.size(), kKeySize);
  const KeyPair own;
  zmq::socket_t& dealer = sockets_->dealer;
  dealer.set(zmq::sockopt::curve_serverkey, key);
  dealer.set(zmq::sockopt::curve_publickey, own.open.data());
  dealer.set(zmq::sockopt::curve_secretkey, own.secret.data());
  dealer.set(zmq::sockopt::routing_id, node);
  dealer.set(zmq::sockopt::linger, 0);
  dealer.set(zmq::sockopt::sndhwm, kMaxWaiting);
  // A connection does not end by itself when a cable is pulled.
  dealer.set(zmq::sockopt::heartbeat_ivl, 1000);
  dealer.set(zmq::sockopt::heartbeat_timeout, 4000);
  dealer.set(zmq::sockopt::reconnect_ivl_max, 1000);
  try {
    dealer.connect(endpoint);
  } catch (const zmq::error_t& error) {
    fail("cannot connect to the launcher at '{}': {}", endpoint, error.what());
  }
}

MonitorChannel::~MonitorChannel() = default;

void MonitorChannel::wait(std::chrono::milliseconds timeout, const std::vector<int>& descriptors) {
  std::vector<zmq::pollitem_t> items = {{sockets_->dealer.handle(), 0, ZMQ_POLLIN, 0}};
  for (const int descriptor : descriptors) items.push_back({nullptr, descriptor, ZMQ_POLLIN, 0});
  try {
    zmq::poll(items, timeout);
  } catch (const zmq::error_t&) {  // NOLINT(bugprone-empty-catch): a signal; the caller looks itself
  }
}

std::optional<Message> MonitorChannel::receive() {
  std::vector<zmq::message_t> frames;
  try {
    if (!zmq::recv_multipart(sockets_->dealer, std::back_inserter(frames), zmq::recv_flags::dontwait)) {
      return std::nullopt;
    }
  } catch (const zmq::error_t&) {
    return std::nullopt;
  }
  return message_of(node_, frames, 0);
}

void MonitorChannel::send(const nlohmann::json& body, const std::vector<std::string>& files) {
  std::vector<zmq::message_t> frames = frames_of(body, files);
  try {
    zmq::send_multipart(sockets_->dealer, frames, zmq::send_flags::dontwait);
  } catch (const zmq::error_t&) {  // NOLINT(bugprone-empty-catch): the launcher will notice the silence
  }
}

}  // namespace tessera
