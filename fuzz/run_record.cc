// Fuzzes read_run. The text before the first empty line is run.json, and the rest is metrics.jsonl. Without an empty
// line, all bytes are the metrics.jsonl of a valid run.json.
#include "compare/run_record.h"

#include "target.h"

using namespace tessera;

namespace {
constexpr std::string_view kInfo =
    R"({"format": "tessera-run", "version": 1, "program": "", "processor": "", "threads": 1,
"config": {"debug.seed": "1", "training.steps": "2"}, "dataset": {}})";
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::as_text({data, size});
  const std::size_t cut = text.find("\n\n");
  fuzz::write_input("run.json", cut == text.npos ? kInfo : text.substr(0, cut));
  fuzz::write_input("metrics.jsonl", cut == text.npos ? text : text.substr(cut + 2));
  fuzz::read_hostile(fuzz::input_folder().native(), [&] {
    const RunRecord run = read_run(fuzz::input_folder());
    static_cast<void>(run.finished());
  });
  return 0;
}
