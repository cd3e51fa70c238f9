// Tests the pictures of pipeline schedules.
#include "parallel/pipeline_picture.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <regex>

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Kind = PipelineScheduleKind;

std::string text_of(Kind kind, int ranks, int stages, int micro_batches, const PipelineCosts& costs = {}) {
  const PipelineSchedule schedule = make_pipeline_schedule(kind, ranks, stages, micro_batches);
  return to_text(schedule, simulate(schedule, costs));
}

TEST(PipelineText, WholeBackwardsTakeTwoSlots) {
  EXPECT_EQ(text_of(Kind::k1F1B, 2, 1, 3),
            "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
            "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n");
}

TEST(PipelineText, StagesAreNamedWhereARankHasSeveral) {
  EXPECT_EQ(text_of(Kind::kZBV, 2, 2, 3),
            "rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .\n"
            "rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2\n");
}

TEST(PipelineText, OverlappedPassesShareACell) {
  EXPECT_EQ(text_of(Kind::kDualPipeV, 1, 2, 3),
            "rank 0  0F0 1F0 0F1 1B0---- 1F1&0B0---- 0F2&1B1---- 1F2&0B1---- 1B2---- 0I2 0W2\n");
}

// Rank 1 computes from 1.3 to 2.3 and then to 4.7. Rank 0 computes from 5.0 to 7.4.
TEST(PipelineText, TimesThatAreNoMultiplesAreRounded) {
  EXPECT_EQ(text_of(Kind::k1F1B, 2, 1, 1, {.forward = {1.0}, .backward_input = {1.4}, .communication = 0.3}),
            "rank 0  F0 .  .  .  .  B0---\n"
            "rank 1  .  F0 B0------ .  .\n");
}

TEST(PipelineText, SaysWhenThereAreTooManySlots) {
  EXPECT_EQ(
      text_of(Kind::k1F1B, 1, 1, 2, {.forward = {1e-6}}),
      "4000002 time slots of 1 ranks are too many to draw, expected 10000 slots or fewer, and a product of 200000 or "
      "less\n");
  EXPECT_THAT(text_of(Kind::k1F1B, 3000, 1, 1, {}), ::testing::HasSubstr("of 3000 ranks are too many to draw"));
}

/// Returns the names of all elements, in order. Fails unless tags are balanced, and attributes and texts are
/// well-formed XML.
std::vector<std::string> xml_elements(const std::string& xml) {
  static const std::regex tag(R"re(<(/?)([A-Za-z]+)((?: [A-Za-z:-]+="[^"<>&]*")*)(/?)>)re");
  std::vector<std::string> elements, open;
  std::string rest;
  auto last = xml.begin();
  for (std::sregex_iterator match(xml.begin(), xml.end(), tag), end; match != end; ++match) {
    rest.append(last, (*match)[0].first);
    last = (*match)[0].second;
    const std::string element = (*match)[2];
    if ((*match)[1].length() == 0) {
      elements.push_back(element);
      if ((*match)[4].length() == 0) open.push_back(element);
    } else if (open.empty() || open.back() != element) {
      ADD_FAILURE() << "</" << element << "> without its beginning";
      return {};
    } else {
      open.pop_back();
    }
  }
  rest.append(last, xml.end());
  EXPECT_TRUE(open.empty()) << open.back();
  EXPECT_EQ(rest.find_first_of("<>&"), std::string::npos) << rest;
  EXPECT_TRUE(!elements.empty() && elements[0] == "svg");
  return elements;
}

std::vector<std::string> titles(const std::string& svg) {
  static const std::regex title("<title>([^<]*)</title>");
  std::vector<std::string> found;
  for (std::sregex_iterator match(svg.begin(), svg.end(), title), end; match != end; ++match) {
    found.push_back((*match)[1]);
  }
  return found;
}

TEST(PipelineSvg, HasEveryActionOnce) {
  for (const Kind kind : {Kind::k1F1B, Kind::kInterleaved1F1B, Kind::kZBV, Kind::kDualPipeV}) {
    SCOPED_TRACE(name_of(kind));
    const PipelineSchedule schedule = make_pipeline_schedule(kind, 3, min_stages_per_rank(kind), 7);
    const PipelineTiming timing = simulate(schedule);
    const std::string svg = to_svg(schedule, timing);
    std::vector<std::string> expected;
    std::ptrdiff_t num_passes = 0;
    for (const auto& actions : schedule.actions) {
      for (const PipelineAction& action : actions) {
        for_each_pass(action, [&](const PipelinePass&) { ++num_passes; });
        expected.push_back(describe(action.pass));
        if (action.overlapped) expected.back() += ", with the " + describe(*action.overlapped);
      }
    }
    EXPECT_EQ(titles(svg), expected);
    const std::vector<std::string> elements = xml_elements(svg);
    // Every pass has its number. The other texts are the heading, the ranks, the time and the legend.
    const bool v = schedule.stages_per_rank > 1;
    const std::ptrdiff_t kinds = kind == Kind::kDualPipeV ? 4 : kind == Kind::kZBV ? 3 : 2;
    EXPECT_EQ(std::count(elements.begin(), elements.end(), "text"),
              num_passes + 1 + 3 + 2 + kinds + v + (kind == Kind::kDualPipeV));
    EXPECT_THAT(svg,
                HasSubstr(fmt::format("bubble {:.1f} %, at most {} stage", 100 * timing.mean_bubble_fraction(),
                                      *std::max_element(timing.peak_in_flight.begin(), timing.peak_in_flight.end()))));
  }
}

TEST(PipelineSvg, KindsAndStagesHaveColours) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::kZBV, 1, 2, 1);
  const std::string svg = to_svg(schedule, simulate(schedule));
  for (const char* colour : {"#56b4e9", "#e69f00", "#009e73", "#bbe1f6", "#f5d999", "#99d8c7"}) {
    EXPECT_THAT(svg, HasSubstr(colour));
  }
  EXPECT_THAT(svg, Not(HasSubstr("#cc79a7")));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme:dark"));
}

TEST(PipelineSvg, NumbersThatDoNotFitAreLeftOut) {
  const PipelineSchedule schedule = make_pipeline_schedule(Kind::k1F1B, 1, 1, 3);
  const std::string svg = to_svg(schedule, simulate(schedule, {.forward = {1e-6}}));
  xml_elements(svg);
  std::size_t count = 0;
  for (std::size_t at = 0; (at = svg.find("class=\"number\"", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 3u);  // those of the backwards
  EXPECT_THAT(svg, HasSubstr("viewBox=\"0 0 30090 "));
}

}  // namespace
}  // namespace tessera
