#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "compare/launcher.h"
#include "compare/report.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

volatile std::sig_atomic_t stop_signal = 0;

/// The first signal goes to the run at hand, which saves; the second ends this program at once.
void on_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);
}

struct CompareOptions {
  std::vector<std::string> sides;
  std::string out, json, runs;
  std::int64_t seeds = 3;
  double margin_percent = 100.0 * kDefaultMargin;
};

/// `path`, or `otherwise` if that is empty; its folder exists afterwards. Asked for before hours of training.
fs::path output_path(const std::string& path, const fs::path& otherwise) {
  const fs::path output = path.empty() ? otherwise : fs::path(path);
  require(!fs::is_directory(output), "'{}' is a folder; expected the name of a file", output.string());
  if (output.has_parent_path()) create_folder(output.parent_path());
  return output;
}

void write_file(const fs::path& path, const std::string& content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

std::vector<SideSpec> parse_sides(const std::vector<std::string>& texts) {
  std::vector<SideSpec> specs;
  std::set<std::string> labels;
  for (const std::string& text : texts) {
    const SideSpec& spec = specs.emplace_back(parse_side(text));
    require(labels.insert(spec.label).second,
            "two sides are called '{}'; give them names, as in 'first={}' and 'second={}'", spec.label, texts[0],
            spec.text);
  }
  return specs;
}

std::string command_line(const CompareOptions& options) {
  std::string command = "tessera compare";
  for (const std::string& side : options.sides) {
    command += side.find(' ') == std::string::npos ? " " + side : " \"" + side + "\"";
  }
  command += fmt::format(" --out {} --seeds {} --margin {:g}", options.out, options.seeds, options.margin_percent);
  return options.runs.empty() ? command : command + " --runs " + options.runs;
}

int compare(const CompareOptions& options) {
  const fs::path html = output_path(options.out, {});
  const fs::path json = output_path(options.json, fs::path(html).replace_extension(".json"));
  require(html != json, "the report and its JSON would both be '{}'; expected an --out that ends in .html",
          html.string());
  std::vector<SideSpec> specs = parse_sides(options.sides);
  const fs::path runs =
      options.runs.empty() ? html.parent_path() / (html.stem().string() + "-runs") : fs::path(options.runs);
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  const int signal = train_missing_runs(specs, {.folder = runs, .num_seeds = options.seeds}, stop_signal);
  if (signal != 0) return 128 + signal;
  Comparison comparison = compare_sides(read_sides(specs), 0.01 * options.margin_percent);
  comparison.command = command_line(options);
  write_file(html, report_html(comparison));
  write_file(json, report_json(comparison));
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
  command->add_option("--out", options->out, "The report, an HTML file")->required();
  command->add_option("--json", options->json, "The same as JSON; default: beside the report");
  command->add_option("--seeds", options->seeds, "Seeds per side that is started, unless other sides have runs already")
      ->capture_default_str();
  command->add_option("--margin", options->margin_percent, "Difference of the losses, in %, that does not matter")
      ->capture_default_str();
  command->add_option("--runs", options->runs, "Folder of the runs that are started; default: beside the report");
  command->footer(
      "For example\n"
      "  tessera compare bf16=configs/debugmodel.toml \"mxfp8=configs/debugmodel.toml "
      "--model.converters=quantize.linear.mx\" --out report.html\n"
      "Runs that are finished are not started again; others go on from their checkpoints. docs/compare.md says what\n"
      "the verdict means.");
  command->callback([options, &status] { status = compare(*options); });
}

}  // namespace tessera
