#include "comm/tree_operations.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace tessera {
namespace {

// Ranks of a tree are counted from its root. A rank's parent lacks the lowest bit of its number.
int parent_of(int rank) { return rank & (rank - 1); }

std::vector<int> children_of(int rank, int size) {
  std::vector<int> children;
  for (int distance = 1; rank + distance < size && (rank & distance) == 0; distance *= 2) {
    children.push_back(rank + distance);
  }
  return children;
}

}  // namespace

GatherInRounds::GatherInRounds(std::string name, Transport& transport, int tag, std::span<const std::byte> own)
    : Exchange(std::move(name), transport),
      transport_(transport),
      tag_(tag),
      part_bytes_(own.size()),
      parts_(own.size() * static_cast<std::size_t>(transport.size())) {
  std::ranges::copy(own, parts_.begin());
  start_round();
}

void GatherInRounds::start_round() {
  const int size = transport_.size(), distance = static_cast<int>(num_parts_);
  if (distance >= size) return;
  const std::size_t count = std::min(num_parts_, static_cast<std::size_t>(size) - num_parts_);
  messages.send(parts_.data(), count * part_bytes_, (transport_.rank() - distance + size) % size, tag_);
  messages.receive(parts_.data() + num_parts_ * part_bytes_, count * part_bytes_, (transport_.rank() + distance) % size,
                   tag_);
  num_parts_ += count;
}

bool GatherInRounds::advance() {
  while (messages.test()) {
    if (num_parts_ == static_cast<std::size_t>(transport_.size())) return true;
    start_round();
  }
  return false;
}

std::span<const std::byte> GatherInRounds::part(int rank) const {
  const int at = (rank - transport_.rank() + transport_.size()) % transport_.size();
  return std::span(parts_).subspan(static_cast<std::size_t>(at) * part_bytes_, part_bytes_);
}

ExchangeInRounds::ExchangeInRounds(std::string name, Transport& transport, int tag, std::span<const std::byte> own)
    : Exchange(std::move(name), transport),
      transport_(transport),
      tag_(tag),
      part_bytes_(own.size() / static_cast<std::size_t>(transport.size())),
      parts_(own.size()) {
  // Part 0 is that of this rank.
  std::ranges::rotate_copy(own, own.begin() + transport.rank() * static_cast<std::ptrdiff_t>(part_bytes_),
                           parts_.begin());
  start_round();
}

template <typename Body>
void ExchangeInRounds::for_moving_parts(const Body& body) {
  for (int i = distance_; i < transport_.size(); ++i) {
    if ((i & distance_) != 0) body(std::span(parts_).subspan(static_cast<std::size_t>(i) * part_bytes_, part_bytes_));
  }
}

void ExchangeInRounds::start_round() {
  const int size = transport_.size();
  if (distance_ >= size) return;
  sent_.clear();
  for_moving_parts([&](std::span<std::byte> part) { sent_.insert(sent_.end(), part.begin(), part.end()); });
  received_.resize(sent_.size());
  messages.send(sent_.data(), sent_.size(), (transport_.rank() + distance_) % size, tag_);
  messages.receive(received_.data(), received_.size(), (transport_.rank() - distance_ + size) % size, tag_);
}

bool ExchangeInRounds::advance() {
  while (messages.test()) {
    if (distance_ >= transport_.size()) return true;
    const std::byte* next = received_.data();
    for_moving_parts([&](std::span<std::byte> part) {
      std::memcpy(part.data(), next, part.size());
      next += part.size();
    });
    distance_ *= 2;
    start_round();
  }
  return false;
}

std::span<const std::byte> ExchangeInRounds::part_from(int rank) const {
  const int at = (transport_.rank() - rank + transport_.size()) % transport_.size();
  return std::span(parts_).subspan(static_cast<std::size_t>(at) * part_bytes_, part_bytes_);
}

TreeBroadcast::TreeBroadcast(std::string name, Transport& transport, int tag, int root, std::span<std::byte> data)
    : Exchange(std::move(name), transport), transport_(transport), tag_(tag), root_(root), data_(data) {
  const int size = transport.size(), rank = (transport.rank() - root + size) % size;
  if (rank > 0) messages.receive(data.data(), data.size(), (parent_of(rank) + root) % size, tag);
}

bool TreeBroadcast::advance() {
  if (!messages.test()) return false;
  if (!std::exchange(has_passed_on_, true)) {
    const int size = transport_.size(), rank = (transport_.rank() - root_ + size) % size;
    for (const int child : children_of(rank, size)) {
      messages.send(data_.data(), data_.size(), (child + root_) % size, tag_);
    }
  }
  return messages.test();
}

TreeAllReduce::TreeAllReduce(std::string name, Transport& transport, int tag, std::span<double> x)
    : Exchange(std::move(name), transport), transport_(transport), tag_(tag), x_(x) {
  const std::vector<int> children = children_of(transport.rank(), transport.size());
  received_.resize(children.size() * x.size());
  for (std::size_t i = 0; i < children.size(); ++i) {
    messages.receive(reinterpret_cast<std::byte*>(&received_[i * x.size()]), x.size_bytes(), children[i], tag);
  }
}

bool TreeAllReduce::advance() {
  const std::span<std::byte> bytes = std::as_writable_bytes(x_);
  if (!broadcast_) {
    if (!messages.test()) return false;
    if (!std::exchange(is_added_, true)) {
      for (std::size_t i = 0; i < received_.size(); ++i) x_[i % x_.size()] += received_[i];
      const int rank = transport_.rank();
      if (rank > 0) messages.send(bytes.data(), bytes.size(), parent_of(rank), tag_);
      if (!messages.test()) return false;
    }
    broadcast_ = std::make_unique<TreeBroadcast>(name(), transport_, tag_, 0, bytes);
  }
  return broadcast_->advance();
}

}  // namespace tessera
