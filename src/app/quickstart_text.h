// The text that `tessera quickstart` trains on: the pages of this project's documentation. It needs no network.
#pragma once

#include <span>
#include <string_view>

namespace tessera {

/// Returns the pages, in Markdown.
std::span<const std::string_view> quickstart_pages();

}  // namespace tessera
