#pragma once
#include <gtest/gtest.h>

#include <functional>

#include "moesh/base/error.h"
#include "moesh/pipeline/simulate.h"
#include "tests/expect_error.h"

namespace moesh::pipeline {

/// Every schedule of up to 8 ranks, 4 stages a rank and 3 p + 2 micro-batches; those that can be
/// joined also joined.
struct Case {
  std::string name;
  int p, v, m;
  bool is_joined;
  Schedule schedule;
};

inline void each_case(const std::function<void(const Case&)>& f) {
  for (const auto& name : schedule_names())
    for (int p = 1; p <= 8; ++p)
      for (int v = 1; v <= 4; ++v) {
        const int wanted = stages_of_a_rank(name);
        if (wanted == 0 ? v < 2 : v != wanted) continue;
        for (int m = 1; m <= 3 * p + 2; ++m)
          for (const bool is_joined : {false, true}) {
            if (is_joined && !can_be_joined(name)) continue;
            const Case c{name, p, v, m, is_joined, make_schedule(name, p, v, m, is_joined)};
            SCOPED_TRACE(
                detail::concat(name, is_joined ? " joined" : "", " p ", p, " v ", v, " m ", m));
            f(c);
          }
      }
}

}  // namespace moesh::pipeline
