// Messages between a launcher and the monitors of its nodes, over ZeroMQ. A message is a JSON object followed by the
// bytes of files, and CURVE encrypts it. A monitor needs the launcher's public key. Each launch makes a new key, which
// is never sent over the network: monitors get it through their standard input. Without the key nobody can talk to the
// launcher.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace tessera {

struct Message {
  std::string node;  // the node that it is from or for
  nlohmann::json body;
  std::vector<std::string> files = {};  // bytes
};

/// Sends and receives messages at the launcher's end of the channel.
class LauncherChannel {
 public:
  /// Listens on a free port of all interfaces, or, if `only_here`, of the loopback interface. Throws Error.
  explicit LauncherChannel(bool only_here);
  ~LauncherChannel();

  int port() const { return port_; }
  /// Returns the key that a monitor needs, of 40 characters.
  const std::string& key() const { return key_; }

  /// Returns the next message, or nullopt if none arrives within the timeout. It drops what is not a valid message.
  std::optional<Message> receive(std::chrono::milliseconds timeout);
  /// Returns the nodes whose connection has ended since the last call. A connection ends at once if the node crashes or
  /// its monitor is killed. After a power cut it does not end.
  std::vector<std::string> take_disconnected();
  /// Sends a message without waiting. A message to a node that is gone is lost.
  void send(const Message& message);

 private:
  struct Sockets;
  std::unique_ptr<Sockets> sockets_;
  std::string key_;
  int port_ = 0;
};

/// Returns whether a launcher's channel listens at the endpoint and its process is at work. Waits for up to `timeout`.
bool is_launcher_at(const std::string& endpoint, std::chrono::milliseconds timeout);

/// Sends and receives messages at a monitor's end of the channel.
class MonitorChannel {
 public:
  /// `endpoint` is, for example, "tcp://head:4711". Connects in the background, and again after the network was gone.
  /// Throws Error.
  MonitorChannel(const std::string& node, const std::string& endpoint, const std::string& key);
  ~MonitorChannel();

  /// Returns when a message may have arrived, one of `descriptors` is readable, or the timeout is over.
  void wait(std::chrono::milliseconds timeout, const std::vector<int>& descriptors);
  /// Returns the next message, or nullopt if none has arrived.
  std::optional<Message> receive();
  /// Sends a message without waiting. While the launcher cannot be reached, messages are dropped.
  void send(const nlohmann::json& body, const std::vector<std::string>& files = {});

 private:
  struct Sockets;
  std::unique_ptr<Sockets> sockets_;
  std::string node_;
};

}  // namespace tessera
