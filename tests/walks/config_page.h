// The check that a patch keeps docs/config.md current. tests/app/cli_test.cc requires it of the program's own keys.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "config/config_table.h"

namespace tessera {

/// Expects a row of the page for this key, in the form of `tessera train --list-keys`.
inline void expect_row_of_config_page(const std::string& name, const std::string& values,
                                      const std::string& default_value, const std::string& meaning) {
  const std::string page = read_text_file(std::string(TESSERA_TEST_DATA) + "/../docs/config.md");
  const std::string row = fmt::format("\n| `{}` | {} | `{}` | {} |\n", name, values, default_value, meaning);
  EXPECT_NE(page.find(row), std::string::npos) << "docs/config.md has no row" << row;
}

/// Expects the rows of all keys of a section, as "optimizer.".
inline void expect_section_of_config_page(const ConfigTable& table, const std::string& section) {
  for (const ConfigTable::Description& key : table.describe()) {
    if (!key.key.starts_with(section)) continue;
    expect_row_of_config_page(key.key.substr(section.size()), key.type, key.value, key.help);
  }
}

}  // namespace tessera
