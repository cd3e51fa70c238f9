#include "compare/report/html.h"

#include <fmt/format.h>

#include <cctype>

#include "base/text.h"
#include "compare/report/report_style.h"

namespace tessera {
namespace {

/// Returns a cell's text. A long text may also break between the parts of a key or a path.
std::string cell_text(const std::string& text) {
  constexpr std::size_t kLong = 16;
  if (text.size() < kLong) return html_escape(text);
  std::string html;
  const std::string escaped = html_escape(text);
  for (std::size_t i = 0; i < escaped.size(); ++i) {
    html += escaped[i];
    const bool part_ends = escaped[i] == '.' || escaped[i] == '_' || escaped[i] == '/';
    if (part_ends && i + 1 < escaped.size() && std::isalpha(static_cast<unsigned char>(escaped[i + 1])) != 0) {
      html += "<wbr/>";
    }
  }
  return html;
}

/// Returns the text with U+FFFD for all that XML cannot have: ill-formed UTF-8, control characters, U+FFFE and U+FFFF.
std::string with_xml_characters(std::string_view text) {
  constexpr std::string_view kUnknown = "\xEF\xBF\xBD", kFffe = "\xEF\xBF\xBE", kFfff = "\xEF\xBF\xBF";
  std::string characters(text), result;
  repair_utf8(characters);
  for (std::size_t i = 0; i < characters.size(); ++i) {
    const std::string_view rest = std::string_view(characters).substr(i);
    const bool is_control = static_cast<unsigned char>(rest[0]) < 0x20 && rest[0] != '\t' && rest[0] != '\n';
    if (rest.starts_with(kFffe) || rest.starts_with(kFfff)) {
      result += kUnknown;
      i += kUnknown.size() - 1;
    } else if (is_control) {
      result += kUnknown;
    } else {
      result += rest[0];
    }
  }
  return result;
}

/// Replaces the space between a number and its "%" by one that does not break.
std::string with_hard_spaces(std::string html) {
  for (std::size_t at = html.find(" %"); at != std::string::npos; at = html.find(" %", at)) {
    html.replace(at, 1, "\u00a0");
  }
  return html;
}

}  // namespace

std::string html_escape(std::string_view text) {
  std::string escaped;
  for (const char c : with_xml_characters(text)) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string html_table(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"scroll\"><table>";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    html += r == 0 ? "<thead><tr>" : r == 1 ? "<tbody><tr>" : "<tr>";
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      const char* tag = r == 0 || c == 0 ? "th" : "td";
      html += fmt::format("<{0}>{1}</{0}>", tag, cell_text(rows[r][c]));
    }
    html += r == 0 ? "</tr></thead>" : "</tr>";
  }
  return html + (rows.size() > 1 ? "</tbody></table></div>\n" : "</table></div>\n");
}

std::string html_figure(const std::string& title, const std::vector<LegendEntry>& legend, const std::string& svg,
                        const std::string& caption) {
  // An empty legend keeps its place, so that plots side by side begin at the same height.
  std::string html = fmt::format("<figure><h3>{}</h3><p class=\"legend\">", html_escape(title));
  for (const LegendEntry& entry : legend) {
    html += fmt::format(
        "<span><svg viewBox=\"0 0 34 12\" aria-hidden=\"true\"><path class=\"{}\" d=\"{}\"/></svg>{}</span>",
        entry.style, entry.filled ? "M6 0H34V12H6z" : "M0 6H34", html_escape(entry.label));
  }
  return html + "</p>" + svg + fmt::format("<figcaption>{}</figcaption></figure>\n", html_escape(caption));
}

std::string html_box(const std::string& tone, const std::string& mark, const std::string& heading,
                     const std::string& text) {
  return fmt::format(
      "<section class=\"verdict {}\"><span class=\"mark\" aria-hidden=\"true\">{}</span><div><h2>{}</h2><p>{}</p></div>"
      "</section>\n",
      tone, mark, heading, text);
}

std::string html_tile(const std::string& name, const std::string& value, const std::string& note) {
  return fmt::format("<div class=\"tile\"><span>{}</span><b>{}</b><span>{}</span></div>", html_escape(name),
                     html_escape(value), html_escape(note));
}

std::string html_page(const std::string& title, const std::string& command, std::string body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
      "<link rel=\"icon\" href=\"data:,\"/><title>{0} – tessera {1}</title><style>{2}</style></head><body>\n"
      "<h1>{0}</h1>\n{3}</body></html>\n",
      html_escape(title), html_escape(command), kReportStyle, with_hard_spaces(std::move(body)));
}

}  // namespace tessera
