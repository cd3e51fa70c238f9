// Parts of the pages that `compare` and `report` write. The functions escape all texts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns the text for HTML, with its special characters replaced.
std::string html_escape(std::string_view text);

/// Returns a table of texts. The first row, and the first cell of every row, are headings.
std::string html_table(const std::vector<std::vector<std::string>>& rows);

/// Says how a line, an area or a cell of a plot looks, and what it shows.
struct LegendEntry {
  std::string label;
  std::string style;    // its classes in the style sheet
  bool filled = false;  // an area, not a line
};

/// Returns a plot with its heading and its legend above it, and a caption below it.
std::string html_figure(const std::string& title, const std::vector<LegendEntry>& legend, const std::string& svg,
                        const std::string& caption);

/// Returns a box in the colour of its class ("equivalent", "worse", "better", "unsure"), with a mark for readers who do
/// not see colours. `heading` and `text` are HTML.
std::string html_box(const std::string& tone, const std::string& mark, const std::string& heading,
                     const std::string& text);

/// Returns a tile of a page's "tiles": a value with its name above it and a note below it.
std::string html_tile(const std::string& name, const std::string& value, const std::string& note);

/// Returns a whole page that needs no other file. `body` is HTML. `title` and `command` are plain texts.
std::string html_page(const std::string& title, const std::string& command, std::string body);

}  // namespace tessera
