// Reads a page of metrics as Prometheus does.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace tessera {

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Returns a socket that is connected to the port of this machine, or -1.
inline int connect_to(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = loopback(port);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return socket;
  ::close(socket);
  return -1;
}

/// Returns a port of this machine that nobody listens on.
inline int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

/// Returns the answer to an HTTP request, or "" if nobody listens.
inline std::string ask(int port, const std::string& request) {
  const int socket = connect_to(port);
  std::string answer;
  if (socket >= 0) {
    static_cast<void>(!::write(socket, request.data(), request.size()));
    char part[4096];
    for (ssize_t size = 0; (size = ::read(socket, part, sizeof part)) > 0;) {
      answer.append(part, static_cast<std::size_t>(size));
    }
  }
  ::close(socket);
  return answer;
}

inline std::string scrape(int port) { return ask(port, "GET /metrics HTTP/1.0\r\n\r\n"); }

}  // namespace tessera
