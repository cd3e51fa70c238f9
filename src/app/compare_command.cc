#include <algorithm>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>

#include "app/cli/commands.h"
#include "app/cli/option_checks.h"
#include "app/cli/output_file.h"
#include "app/cli/signals.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "compare/launcher.h"
#include "compare/report/report.h"
#include "system/shell_word.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct CompareOptions {
  std::vector<std::string> sides;
  std::string out, json, runs;
  std::int64_t seeds = 3;
  double margin_percent = 100.0 * kDefaultMargin;
};

std::vector<SideSpec> parse_sides(const std::vector<std::string>& texts) {
  std::vector<SideSpec> specs;
  std::map<std::string, std::string> texts_by_label;
  for (const std::string& text : texts) {
    const SideSpec& spec = specs.emplace_back(parse_side(text));
    const auto [first, is_new] = texts_by_label.emplace(spec.label, spec.text);
    require(is_new, "two sides are called '{}'; give them names, as in 'first={}' and 'second={}'", spec.label,
            first->second, spec.text);
  }
  return specs;
}

std::string command_line(const CompareOptions& options) {
  std::string command = "tessera compare";
  for (const std::string& side : options.sides) command += " " + shell_word(side);
  command +=
      fmt::format(" --out {} --seeds {} --margin {:g}", shell_word(options.out), options.seeds, options.margin_percent);
  if (!options.json.empty()) command += " --json " + shell_word(options.json);
  return options.runs.empty() ? command : command + " --runs " + shell_word(options.runs);
}

/// Throws Error for an override outside of the quotes of its side, which would belong to no side.
void require_no_stray_overrides(const std::vector<std::string>& remaining, const std::vector<std::string>& sides) {
  if (remaining.empty()) return;
  const std::string& word = remaining.front();
  require(word.find('.') >= word.find('='),
          "'{}' belongs to no side; put it in quotes with its configuration, as in \"{} {}\"", word, sides.back(),
          word);
  fail("unexpected argument '{}'; `tessera compare --help` lists what there is", word);
}

int compare(const CompareOptions& options) {
  const double margin = 0.01 * options.margin_percent;
  require_margin(margin);
  require(options.sides.size() <= kMaxSides, "{} sides; expected at most {}: a report has no more kinds of lines",
          options.sides.size(), kMaxSides);
  const fs::path html = output_file(options.out, {});
  const fs::path json = output_file(options.json, fs::path(html).replace_extension(".json"));
  require(fs::weakly_canonical(html) != fs::weakly_canonical(json),
          "the report and its JSON would both be '{}'; expected another --json, or an --out that ends in .html",
          html.string());
  std::vector<SideSpec> specs = parse_sides(options.sides);
  const fs::path runs =
      options.runs.empty() ? html.parent_path() / (html.stem().string() + "-runs") : fs::path(options.runs);
  static const volatile StopRequest kNone{};
  const bool trains = std::ranges::any_of(specs, &SideSpec::is_started);
  const int signal =
      train_missing_runs(specs, {.folder = runs, .num_seeds = options.seeds}, trains ? count_stop_signals() : kNone);
  if (trains) handle_stop_signals(SIG_DFL);
  if (signal != 0) return 128 + signal;
  Comparison comparison = compare_sides(read_sides(specs), margin);
  comparison.command = command_line(options);
  write_whole_file(html, report_html(comparison));
  write_whole_file(json, report_json(comparison));
  std::cout << report_text(comparison) << fmt::format("\nreport: {}\njson: {}\n", html.string(), json.string());
  return 0;
}

}  // namespace

void add_compare_command(CLI::App& app, int& status) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = app.add_subcommand("compare", "Say whether runs reach the loss of other runs, with a report");
  command
      ->add_option("sides", options->sides,
                   "Two or more sides, the baseline first. [NAME=]FOLDER: a run, or a folder of runs, one per seed; "
                   "several with commas. [NAME=]\"CONFIG.toml [--section.key=value ...]\": runs that are started")
      ->required()
      ->expected(2, std::numeric_limits<int>::max());
  command->add_option("--out,--output", options->out, "The report, an HTML file")->required();
  command->add_option("--json", options->json, "The same as JSON; default: beside the report");
  command->add_option("--seeds", options->seeds, "Seeds per side that is started, unless other sides have runs already")
      ->transform(as_count(1, kMaxSeeds))
      ->capture_default_str();
  command->add_option("--margin", options->margin_percent, "Difference of the losses, in %, that does not matter")
      ->check(is_number(1e-9, 100.0))
      ->capture_default_str();
  command->add_option("--runs", options->runs, "Folder of the runs that are started; default: beside the report");
  command->footer(
      "For example\n"
      "  tessera compare bf16=configs/debugmodel.toml \"mxfp8=configs/debugmodel.toml "
      "--model.converters=quantize.linear.mx\" --out report.html\n"
      "Runs that are finished are not started again; others go on from their checkpoints. docs/compare.md says what\n"
      "the verdict means.");
  command->allow_extras();  // the error says where they belong
  command->callback([command, options, &status] {
    require_no_stray_overrides(command->remaining(), options->sides);
    status = compare(*options);
  });
}

}  // namespace tessera
