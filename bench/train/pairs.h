#pragma once
// Pairs of measurements, with and without something, on a machine that does other things as well.

#include <algorithm>
#include <cmath>
#include <vector>

namespace moesh {

/// User and system time of all threads of this process: a program that takes turns with others on a
/// core waits, and does not count that. (What they push out of the caches counts.)
inline double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// A median, and between which values that of endlessly many such measurements is, in 95 cases of
/// 100 or more: order statistics, so nothing is assumed of how they are spread.
struct Median {
  double value, low, high;
};

inline Median median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  // Each of n values is below the true median with probability 1/2, like the throw of a coin.
  double probability = std::pow(0.5, static_cast<double>(n)), below = 0;
  std::size_t first = 0;
  for (std::size_t k = 0; k < n / 2; ++k) {
    below += probability;
    if (below > 0.025) break;
    first = k;
    probability *= static_cast<double>(n - k) / static_cast<double>(k + 1);
  }
  const double middle = (values[(n - 1) / 2] + values[n / 2]) / 2;
  return {middle, values[first], values[n - 1 - first]};
}

}  // namespace moesh
