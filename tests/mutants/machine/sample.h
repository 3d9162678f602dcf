#pragma once
// What the machine is tried on (machine_test.py): a cut, a sum that has a type, a loop.

namespace sample {

struct Term {
  int value;
};
struct Whole {
  int value;
};

inline Whole all_reduce(Term x) { return {2 * x.value}; }

// Leaving the sum out does not compile, nor does taking it twice.
inline Whole loss(Term x) { return all_reduce(x); }

// Where a part begins. With <= it is the same: both sides are the total then.
inline int start(int part, int parts, int total) {
  const int stride = (total + parts - 1) / parts;
  return part * stride < total ? part * stride : total;
}

// A step of 0 never ends.
inline int count(int n) {
  int found = 0;
  for (int i = 0; i < n; i += 1) found += 1;
  return found;
}

}  // namespace sample
