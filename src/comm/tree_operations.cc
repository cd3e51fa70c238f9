#include "comm/tree_operations.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace tessera {

GatherInRounds::GatherInRounds(std::string name, Transport& transport, int tag, std::span<const std::byte> own)
    : Operation(std::move(name)),
      transport_(transport),
      tag_(tag),
      part_bytes_(own.size()),
      parts_(own.size() * static_cast<std::size_t>(transport.size())),
      messages_(transport) {
  std::ranges::copy(own, parts_.begin());
  start_round();
}

void GatherInRounds::start_round() {
  const int size = transport_.size(), distance = static_cast<int>(num_parts_);
  if (distance >= size) return;
  const std::size_t count = std::min(num_parts_, static_cast<std::size_t>(size) - num_parts_);
  messages_.send(parts_.data(), count * part_bytes_, (transport_.rank() - distance + size) % size, tag_);
  messages_.receive(parts_.data() + num_parts_ * part_bytes_, count * part_bytes_,
                    (transport_.rank() + distance) % size, tag_);
  num_parts_ += count;
}

bool GatherInRounds::advance() {
  while (messages_.test()) {
    if (num_parts_ == static_cast<std::size_t>(transport_.size())) return true;
    start_round();
  }
  return false;
}

std::span<const std::byte> GatherInRounds::part(int rank) const {
  const int at = (rank - transport_.rank() + transport_.size()) % transport_.size();
  return std::span(parts_).subspan(static_cast<std::size_t>(at) * part_bytes_, part_bytes_);
}

TreeBroadcast::TreeBroadcast(std::string name, Transport& transport, int tag, int root, std::span<std::byte> data)
    : Operation(std::move(name)), transport_(transport), tag_(tag), root_(root), data_(data), messages_(transport) {
  // Ranks are counted from the root. A rank's parent lacks the lowest bit of its number.
  const int size = transport.size(), rank = (transport.rank() - root + size) % size;
  if (rank == 0) return;
  const int parent = rank & (rank - 1);
  messages_.receive(data.data(), data.size(), (parent + root) % size, tag);
}

bool TreeBroadcast::advance() {
  if (!messages_.test()) return false;
  if (!std::exchange(has_passed_on_, true)) {
    const int size = transport_.size(), rank = (transport_.rank() - root_ + size) % size;
    for (int distance = 1; rank + distance < size && (rank & distance) == 0; distance *= 2) {
      messages_.send(data_.data(), data_.size(), (rank + distance + root_) % size, tag_);
    }
  }
  return messages_.test();
}

TreeAllReduce::TreeAllReduce(std::string name, Transport& transport, int tag, std::span<double> x)
    : Operation(std::move(name)), transport_(transport), tag_(tag), x_(x), received_(x.size()), messages_(transport) {}

bool TreeAllReduce::advance() {
  const int rank = transport_.rank(), size = transport_.size();
  auto* const own = reinterpret_cast<std::byte*>(x_.data());
  while (!broadcast_) {
    if (!messages_.test()) return false;
    if (std::exchange(is_receiving_, false)) {
      for (std::size_t i = 0; i < x_.size(); ++i) x_[i] += received_[i];
      distance_ *= 2;
    }
    if (is_sent_ || distance_ >= size) {
      broadcast_ = std::make_unique<TreeBroadcast>(name(), transport_, tag_, 0, std::span(own, x_.size_bytes()));
    } else if ((rank & distance_) != 0) {
      is_sent_ = true;  // the sum of this rank and of those to its right
      messages_.send(own, x_.size_bytes(), rank - distance_, tag_);
    } else if (rank + distance_ < size) {
      is_receiving_ = true;
      messages_.receive(reinterpret_cast<std::byte*>(received_.data()), x_.size_bytes(), rank + distance_, tag_);
    } else {
      distance_ *= 2;
    }
  }
  return broadcast_->advance();
}

}  // namespace tessera
