#include "compare/report/report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "compare/report/html.h"
#include "compare/report/report_figures.h"

namespace tessera {
namespace {

std::string worst_sites_table(const SideResult& side) {
  std::vector<std::vector<std::string>> rows = {{"Matrix"}};
  const std::vector<std::string> operands = operands_of(side.sqnr);
  rows[0].insert(rows[0].end(), operands.begin(), operands.end());
  for (const WorstSite& site : side.worst_sites) {
    auto& row = rows.emplace_back(std::vector<std::string>{site.site});
    for (const std::string& operand : operands) {
      const auto found = site.sqnr.find(operand);
      row.push_back(found == site.sqnr.end() ? "" : fmt::format("{:.1f}", found->second));
    }
  }
  return fmt::format("<h2>Lowest SQNR of {}, dB, at the last measurement</h2>\n", html_escape(side.label)) +
         html_table(rows);
}

std::string verdict_box(const SideResult& side, const std::string& baseline) {
  const Verdict& verdict = *side.verdict;
  const char *tone = "unsure", *mark = "?";
  const char* meaning =
      "The seeds scatter too much, or are too few, for a decision. The number of seeds is what it would take if mean "
      "and "
      "scatter stayed as they are.";
  if (verdict.kind == Verdict::Kind::kEquivalent) {
    tone = "equivalent", mark = "=";
    meaning =
        "At the end of the run the losses differ by less than the margin, in either direction. The chance of saying so "
        "when it is not true is 5 % at most, if the number of seeds was fixed before.";
  } else if (verdict.kind == Verdict::Kind::kWorse) {
    tone = "worse", mark = "↑";
    meaning = "The loss is higher, and the confidence interval of the difference lies beyond the margin.";
  } else if (verdict.kind == Verdict::Kind::kBetter) {
    tone = "better", mark = "↓";
    meaning = "The loss is lower, and the confidence interval of the difference lies beyond the margin.";
  }
  if (verdict.kind == Verdict::Kind::kTooShort) {
    meaning =
        "What a change costs shows where a model learns. These runs have learned too little for the losses at their "
        "end to say anything.";
  }
  if (verdict.more_seeds > kMaxMoreSeeds) {
    meaning = verdict.near_margin
                  ? "The difference is so close to the margin that no number of seeds within reach tells them apart."
                  : "The seeds scatter too much for a decision. Longer runs and larger batches scatter less.";
  }
  if (verdict.identical && verdict.kind == Verdict::Kind::kEquivalent)
    meaning = "No step of any seed has another loss, to the last bit.";
  if (verdict.broken) meaning = "A run that breaks down is worse, whatever the other seeds do.";
  if (verdict.growing)
    meaning = "The loss is higher, still within the margin, but the gap grows from the middle of the run to its end.";
  const std::string same = side.same_configuration ? " Both sides have the same configuration." : "";
  // The words before a colon or a parenthesis are the verdict itself.
  const std::size_t end = std::min(verdict.text.find(" ("), verdict.text.find(": "));
  const std::string head = verdict.text.substr(0, end),
                    rest = end < verdict.text.size() ? verdict.text.substr(end) : "";
  const std::string heading = fmt::format("{} against {}: <b>{}</b>{}", html_escape(side.label), html_escape(baseline),
                                          html_escape(head), html_escape(rest));
  return html_box(tone, mark, heading, meaning + same);
}

std::string differences_table(const Comparison& comparison) {
  if (comparison.differences.empty()) return "<p>Nothing but the seeds and the folders.</p>\n";
  std::vector<std::vector<std::string>> rows = {{"Key"}};
  for (const SideResult& side : comparison.sides) rows[0].push_back(side.label);
  for (const Difference& difference : comparison.differences) {
    auto& row = rows.emplace_back(std::vector<std::string>{difference.key});
    row.insert(row.end(), difference.values.begin(), difference.values.end());
  }
  return html_table(rows);
}

std::string runs_table(const Comparison& comparison) {
  std::vector<std::vector<std::string>> rows = {
      {"Side", "Seed", "Loss at first", "At the end", "Tokens", "After the warm-up", "Tokens/s per rank", "Folder"}};
  std::set<std::string> machines;
  for (const RunSummary& run : comparison.runs) {
    const Learned& learned = run.learned;
    rows.push_back({run.side, std::to_string(run.seed), fmt::format("{:.4f}", learned.first_loss),
                    fmt::format("{:.4f}", learned.last_loss), fmt::format("{:.0f}", learned.tokens),
                    fmt::format("{} steps", learned.steps_after_warmup), fmt::format("{:.0f}", run.tokens_per_second),
                    run.folder});
    machines.insert(fmt::format("{}, {}, tessera {}", run.processor,
                                run.threads == 1 ? "1 thread" : fmt::format("{} threads", run.threads), run.program));
  }
  return html_table(rows) +
         fmt::format("<p class=\"soft\">Machine: {}</p>\n", html_escape(fmt::format("{}", fmt::join(machines, "; "))));
}

std::string explanation(const Comparison& comparison) {
  return fmt::format(
      "<details><summary>How to read this</summary><ul>"
      "<li>Runs are paired by seed: both have the same initial weights and the same data in the same order.</li>"
      "<li>Per seed, the difference is that of the mean losses over the last {:g} % of the steps, relative to the "
      "baseline's.</li>"
      "<li><b>Equivalent</b>: the {:g} % confidence interval of the mean difference lies within ±{:g} % (two one-sided "
      "t-tests at 5 %).</li>"
      "<li><b>Worse</b> (↑) or <b>better</b> (↓): the whole interval lies beyond the margin. Also worse: a loss that "
      "is "
      "not finite, or a gap that grows, so that at this rate it passes the margin before the run is twice as long.</li>"
      "<li><b>Not enough evidence</b>: anything else, and fewer than {} seeds.</li>"
      "<li><b>Too short to say</b>: fewer than {:.0f} tokens, fewer steps after the warm-up than in it or than {}, or "
      "a baseline whose loss has fallen by less than {:g} times the margin.</li>"
      "<li>The 5 % hold for one candidate and a number of seeds that was fixed before. Seeds that are added after a "
      "look at the result raise the chance of an error, to about 10 % where once as many are added as are asked for; "
      "so does every further candidate.</li>"
      "<li>SQNR: the power of a tensor over the power of its rounding error, 10 log10, in dB. 6 dB are one bit.</li>"
      "</ul></details>\n",
      100.0 * kTail, 100.0 * kConfidence, 100.0 * comparison.margin, kMinSeeds, kMinTokens, kMinStepsAfterWarmup,
      kMinFallInMargins);
}

}  // namespace

std::string report_html(const Comparison& comparison) {
  const std::string& baseline = comparison.sides.front().label;
  std::vector<std::string> others;
  for (std::size_t i = 1; i < comparison.sides.size(); ++i) others.push_back(comparison.sides[i].label);
  std::string html = fmt::format(
      "<p class=\"soft\">{} steps, of which {} are compared, {} per side, paired. Margin {:g} % of the loss.</p>\n",
      comparison.num_steps, comparison.num_lines,
      comparison.num_seeds == 1 ? "1 seed" : fmt::format("{} seeds", comparison.num_seeds), 100.0 * comparison.margin);
  for (const SideResult& side : comparison.sides) {
    if (side.verdict) html += verdict_box(side, baseline);
  }
  html += html_table(summary_table(comparison));
  html += fmt::format(
      "<p class=\"soft\">Loss at the end: mean over the last {0:g} % of the steps. Fallen by: from "
      "the first {0:g} % to there.{1}{2}</p>\n",
      100.0 * kTail, comparison.sides[0].learned.uniform_loss ? " ln(vocabulary): the loss of a uniform guess." : "",
      comparison.num_seeds > 1 ? " ±: standard deviation over the seeds; in the verdict, the confidence interval."
                               : "");
  html += "<h2>Curves</h2>\n" + figures_html(comparison);
  for (const SideResult& side : comparison.sides) {
    if (!side.worst_sites.empty()) html += worst_sites_table(side);
  }
  html += "<h2>What differs</h2>\n" + differences_table(comparison);
  html += "<h2>Runs</h2>\n" + runs_table(comparison);
  if (!comparison.command.empty())
    html += fmt::format("<h2>Command</h2>\n<pre><code>{}</code></pre>\n", html_escape(comparison.command));
  const std::string title = fmt::format("{} against {}", fmt::join(others, ", "), baseline);
  return html_page(title, "compare", html + explanation(comparison));
}

}  // namespace tessera
