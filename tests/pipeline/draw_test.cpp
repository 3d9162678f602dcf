#include "moesh/pipeline/simulate.h"

#include <fstream>
#include <sstream>

#include "tests/pipeline/support.h"

namespace moesh::pipeline {
namespace {

TEST(Draw, ShowsEveryActionAndEveryWait) {
  EXPECT_EQ(draw_text(simulate(one_f_one_b(2, 3))),
            "rank 0   F0 F1 ......B0    F2 B1    ...B2    \n"
            "rank 1   ...F0 B0    F1 B1    F2 B2    ......\n");
  EXPECT_EQ(draw_text(simulate(zbv(1, 1))), "rank 0   F0.0 F1.0 I1.0 W1.0 I0.0 W0.0 \n");
  // Two that are joined are one.
  EXPECT_EQ(draw_text(simulate(one_f_one_b(1, 2, true))), "rank 0   F0 F1&B0    B1    \n");
}

TEST(Draw, FitsIntoColumns) {
  const Simulation s = simulate(zero_bubble(4, 40));
  const std::string text = draw_text(s, 123);
  EXPECT_EQ(text.size(), 4 * (9 + 123 + 1u));
  EXPECT_EQ(text.substr(0, 22), "rank 0   FFFF...IWFIWF");
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(Draw, AnSvgHasARectangleForEachAction) {
  const Simulation s = simulate(zero_bubble(2, 3));
  const std::string svg = draw_svg(s, "a < b & c");
  // The ground, a bar for each rank, 9 actions of each, and 4 colours that are explained.
  EXPECT_EQ(count(svg, "<rect "), 1 + 2 + 2 * 9 + 4u);
  EXPECT_EQ(count(svg, "a &lt; b &amp; c"), 2u);
  EXPECT_EQ(count(svg, "<text "), count(svg, "</text>"));
  EXPECT_EQ(svg.substr(0, 5), "<svg ");
  EXPECT_NE(svg.find("bubble 10.0 %"), std::string::npos);  // (p - 1) / (3 m + p - 1)
}

// docs/pipeline.md shows what the program draws.
TEST(Draw, ThePageHasThesePictures) {
  for (const auto& name : schedule_names()) {
    const int v = stages_of_a_rank(name) == 1 ? 1 : 2;
    for (const bool is_joined : {false, true}) {
      if (is_joined && !can_be_joined(name)) continue;
      const std::string svg =
          draw_svg(simulate(make_schedule(name, 4, v, 8, is_joined)),
                   name + (is_joined ? ", joined" : "") + ", 4 ranks, 8 micro-batches");
      const std::string file = "/" + name + (is_joined ? "_joined.svg" : ".svg");
      std::ostringstream shown;
      shown << std::ifstream(MOESH_PICTURES + file).rdbuf();
      if (shown.str() == svg) continue;
      std::ofstream(MOESH_SCRATCH + file) << svg;
      ADD_FAILURE() << "copy " << MOESH_SCRATCH << file << " to " << MOESH_PICTURES << file;
    }
  }
}

}  // namespace
}  // namespace moesh::pipeline
