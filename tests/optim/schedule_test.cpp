#include "moesh/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "moesh/base/error.h"

namespace moesh::optim {
namespace {

TEST(LrSchedule, WarmsUpToThePeakAndNeverStartsAtZero) {
  for (const std::string& kind : lr_schedule_names()) {
    const LrSchedule s({.kind = kind, .num_steps = 100, .warmup_steps = 4, .min_lr_factor = 0.5});
    EXPECT_EQ(s.factor(0), 0.25);
    EXPECT_EQ(s.factor(1), 0.5);
    EXPECT_EQ(s.factor(3), 1);  // the last of the warm-up
    EXPECT_EQ(s.factor(4), 1);  // the first after it
    const LrSchedule none({.kind = kind, .num_steps = 100});
    EXPECT_EQ(none.factor(0), 1);
    const LrSchedule one({.kind = kind, .num_steps = 1});
    EXPECT_EQ(one.factor(0), 1) << "a run of one step learns something";
    const LrSchedule only({.kind = kind, .num_steps = 4, .warmup_steps = 4, .decay_ratio = 0});
    EXPECT_EQ(only.factor(3), 1);
  }
}

TEST(LrSchedule, ConstantStays) {
  const LrSchedule s({.kind = "constant", .num_steps = 10, .warmup_steps = 2});
  for (std::int64_t step : {2, 5, 9, 10, 1000}) EXPECT_EQ(s.factor(step), 1) << step;
}

TEST(LrSchedule, LinearFallsToTheFloor) {
  const LrSchedule s({.kind = "linear", .num_steps = 10, .warmup_steps = 2, .min_lr_factor = 0.2});
  EXPECT_EQ(s.factor(2), 1);
  EXPECT_DOUBLE_EQ(s.factor(3), 0.9);
  EXPECT_DOUBLE_EQ(s.factor(6), 0.6);
  EXPECT_DOUBLE_EQ(s.factor(9), 0.3);  // the last step: one eighth of the way above the floor
  EXPECT_EQ(s.factor(10), 0.2);
  EXPECT_EQ(s.factor(11), 0.2);
}

TEST(LrSchedule, CosineFallsToTheFloor) {
  const LrSchedule s({.kind = "cosine", .num_steps = 10, .warmup_steps = 2, .min_lr_factor = 0.1});
  EXPECT_EQ(s.factor(2), 1);
  EXPECT_DOUBLE_EQ(s.factor(6), 0.55);  // half way
  EXPECT_DOUBLE_EQ(s.factor(9), 0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * 7 / 8)));
  EXPECT_EQ(s.factor(10), 0.1);
  EXPECT_EQ(s.factor(1'000'000), 0.1);
}

TEST(LrSchedule, WsdIsStableAndThenFalls) {
  const LrSchedule abrupt({.kind = "wsd", .num_steps = 4, .decay_ratio = 0, .min_lr_factor = 0.5});
  EXPECT_EQ(abrupt.factor(3), 1);
  EXPECT_EQ(abrupt.factor(4), 0.5);
  const LrSchedule s({.kind = "wsd", .num_steps = 20, .warmup_steps = 5, .decay_ratio = 0.2});
  for (std::int64_t step = 4; step <= 16; ++step) EXPECT_EQ(s.factor(step), 1) << step;
  EXPECT_DOUBLE_EQ(s.factor(17), 0.75);
  EXPECT_DOUBLE_EQ(s.factor(18), 0.5);
  EXPECT_DOUBLE_EQ(s.factor(19), 0.25);
  EXPECT_EQ(s.factor(20), 0);
  const LrSchedule never({.kind = "wsd", .num_steps = 20, .decay_ratio = 0});
  EXPECT_EQ(never.factor(19), 1);
  const LrSchedule all({.kind = "wsd", .num_steps = 20, .decay_ratio = 1});
  const LrSchedule linear({.kind = "linear", .num_steps = 20});
  for (std::int64_t step = 0; step < 20; ++step)
    EXPECT_EQ(all.factor(step), linear.factor(step)) << step;
}

TEST(LrSchedule, NeverRisesAfterTheWarmUpAndStaysWithinItsBounds) {
  for (const std::string& kind : lr_schedule_names())
    for (std::int64_t num_steps : {1, 2, 7, 50})
      for (std::int64_t warmup : {0, 1, 5}) {
        if (warmup > num_steps) continue;
        const double floor = 0.05;
        const double ratio =
            0.5 * static_cast<double>(num_steps - warmup) / static_cast<double>(num_steps);
        const LrSchedule s({.kind = kind,
                            .num_steps = num_steps,
                            .warmup_steps = warmup,
                            .decay_ratio = ratio,
                            .min_lr_factor = floor});
        for (std::int64_t step = 0; step < num_steps; ++step) {
          EXPECT_GT(s.factor(step), 0);
          EXPECT_LE(s.factor(step), 1);
          if (step < warmup) continue;
          EXPECT_GT(s.factor(step), floor);
          EXPECT_GE(s.factor(step), s.factor(step + 1));
        }
      }
}

TEST(ScheduleErrors, NameTheValueAndTheCure) {
  const auto message = [](const LrSchedule& schedule) {
    try {
      schedule.validate();
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::config);
      return std::string(e.what());
    }
  };
  EXPECT_EQ(message({.kind = "step", .num_steps = 1}),
            "schedule: kind is 'step'; it takes cosine, linear, wsd or constant");
  EXPECT_EQ(message({.num_steps = 0}), "schedule: num_steps is 0; it takes 1 or more");
  EXPECT_EQ(message({.num_steps = 10, .warmup_steps = 11}),
            "schedule: warmup_steps is 11 of 10 steps; it takes 0 to 10");
  EXPECT_EQ(message({.num_steps = 10, .warmup_steps = -1}),
            "schedule: warmup_steps is -1 of 10 steps; it takes 0 to 10");
  EXPECT_EQ(message({.num_steps = 10, .min_lr_factor = 1.5}),
            "schedule: min_lr_factor is 1.5; it is a factor of the peak and takes 0 to 1");
  EXPECT_EQ(message({.num_steps = 10, .min_lr_factor = std::nan("")}),
            "schedule: min_lr_factor is nan; it is a factor of the peak and takes 0 to 1");
  EXPECT_EQ(message({.kind = "wsd", .num_steps = 10, .decay_ratio = 1.5}),
            "schedule: decay_ratio is 1.5; it is a fraction of all steps and takes 0 to 1");
  EXPECT_EQ(
      message({.kind = "wsd", .num_steps = 10, .warmup_steps = 8, .decay_ratio = 0.5}),
      "schedule: 8 steps of warm-up and 5 of decay (decay_ratio 0.5) do not fit into 10 steps; set warmup_steps to 5 or less, "
      "or a smaller decay_ratio");
  EXPECT_THROW(LrSchedule({.num_steps = 10}).factor(-1), Error);
}

}  // namespace
}  // namespace moesh::optim
