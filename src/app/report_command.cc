#include <filesystem>
#include <iostream>
#include <memory>

#include "app/cli/commands.h"
#include "app/cli/output_file.h"
#include "base/error.h"
#include "base/file.h"
#include "compare/report/run_report.h"
#include "run/record/run_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void report(const std::string& run, const std::string& out) {
  const fs::path folder = run;
  require_run(folder);
  const RunRecord record = read_run(folder);
  const auto as_of = std::chrono::file_clock::to_sys(fs::last_write_time(folder / kMetricsName));
  const std::string html =
      run_report_html(record, std::chrono::time_point_cast<std::chrono::system_clock::duration>(as_of));
  const fs::path path = output_file(out, folder / "report.html");
  write_whole_file(path, html);
  std::cout << run_status(record).text << fmt::format("\nreport: {}\n", path.string());
}

}  // namespace

void add_report_command(CLI::App& app) {
  struct Options {
    std::string run, out;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("report", "Draw a run's metrics in one HTML page, also while it goes on");
  command->add_option("run", options->run, "The run's folder (job.dump_folder)")->required();
  command->add_option("--out,--output", options->out, "The page, an HTML file; default: RUN/report.html");
  command->footer(
      "For example\n"
      "  tessera report outputs --out run.html\n"
      "The page needs no network and no other file. docs/report.md says what is on it; tessera compare says whether\n"
      "runs reach the loss of other runs.");
  command->callback([options] { report(options->run, options->out); });
}

}  // namespace tessera
