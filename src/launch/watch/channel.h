// Messages between a launcher and the monitors of its nodes, over ZeroMQ. A message is a JSON object, and files' bytes
// behind it. CURVE encrypts it. A monitor needs the launcher's public key, which is made anew for each launch, is never
// sent over the network and goes to monitors by their standard input: who does not have it cannot talk to the launcher.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace tessera {

struct Message {
  std::string node;  // that it comes from, or goes to
  nlohmann::json body;
  std::vector<std::string> files = {};  // bytes
};

/// The launcher's end.
class LauncherChannel {
 public:
  /// Listens on a free port of all interfaces; of `only_here`, on the loopback interface. Throws Error.
  explicit LauncherChannel(bool only_here);
  ~LauncherChannel();

  int port() const { return port_; }
  /// What a monitor must have. 40 characters.
  const std::string& key() const { return key_; }

  /// The next message; none if none comes within the timeout. What is no message of ours is dropped.
  std::optional<Message> receive(std::chrono::milliseconds timeout);
  /// Nodes whose connection has ended since the last call. It ends at once if the node crashes or its monitor is
  /// killed; after a power cut it does not end.
  std::vector<std::string> take_disconnected();
  /// Does not wait. A message to a node that is gone is lost.
  void send(const Message& message);

 private:
  struct Sockets;
  std::unique_ptr<Sockets> sockets_;
  std::string key_;
  int port_ = 0;
};

/// Whether a launcher's channel listens at the endpoint and its process is at work. Waits for up to `timeout`.
bool is_launcher_at(const std::string& endpoint, std::chrono::milliseconds timeout);

/// A monitor's end.
class MonitorChannel {
 public:
  /// `endpoint`: "tcp://head:4711". Connects in the background, and again after the network was gone. Throws Error.
  MonitorChannel(const std::string& node, const std::string& endpoint, const std::string& key);
  ~MonitorChannel();

  /// Returns when a message may be there, one of `descriptors` is readable, or the timeout is over.
  void wait(std::chrono::milliseconds timeout, const std::vector<int>& descriptors);
  /// The next message that is there.
  std::optional<Message> receive();
  /// Does not wait: while the launcher cannot be reached, messages are dropped.
  void send(const nlohmann::json& body, const std::vector<std::string>& files = {});

 private:
  struct Sockets;
  std::unique_ptr<Sockets> sockets_;
  std::string node_;
};

}  // namespace tessera
