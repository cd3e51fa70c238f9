// Gradients on meshes of CPU ranks, with the largest blocks that weights have (tests/step/mesh_gradients.h). With
// tensor parallelism some of these blocks would lie in two ranks' parts.
#include "tests/step/mesh_gradients.h"

namespace tessera::gradient_test {
namespace {

using mesh_test::kDirect;
using mesh_test::kSelective;
using mesh_test::schedule;

class GradientsOnMesh : public ::testing::TestWithParam<MeshCase> {};

TEST_P(GradientsOnMesh, AreAsGoodAsOneRanks) {
  expect_as_good_as_one_rank(GetParam(), {"mxfp8_256", recipe("mxfp8", "256x256")});
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, GradientsOnMesh,
    ::testing::Values(MeshCase{"fsdp2", 2, {}, 2}, MeshCase{"tp2", 2, {.tp = 2}, 2}, MeshCase{"cp2", 2, {.cp = 2}, 2},
                      MeshCase{"ep4_of_2x2_direct", 4, {.ep = 4, .ep_domain = 2}, 2, kDirect},
                      MeshCase{"pp2_zbv", 2, {.pp = 2}, 4, schedule("ZBVZeroBubble") + kSelective}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tessera::gradient_test
