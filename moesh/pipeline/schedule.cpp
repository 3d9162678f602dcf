#include "moesh/pipeline/schedule.h"

#include <algorithm>
#include <map>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;

void check_sizes(int p, int v, int m) {
  MOESH_CHECK(p >= 1 && v >= 1 && m >= 1, ErrorKind::config, "a pipeline of ", p, " ranks with ", v,
              " stages each and ", m, " micro-batches; each is 1 or more");
}

// v stages a rank in a row, round after round: 0 1 2 3 0 1 2 3.
Schedule looped(int p, int v, int m) {
  check_sizes(p, v, m);
  Schedule s{.num_stages = p * v, .num_micro_batches = m, .rank_of = {}, .ranks = {}};
  for (int stage = 0; stage < p * v; ++stage) s.rank_of.push_back(stage % p);
  s.ranks.resize(static_cast<size_t>(p));
  return s;
}

// A forward or a backward of every stage of a rank for every micro-batch, in an order.
struct Turn {
  int round, micro_batch;
};

// What p does not divide joins the first group: a smaller group would have to wait for itself, and
// a larger one later would want to run further ahead than the ranks do.
int first_group(int p, int m) { return m < p ? m : p + m % p; }

// Groups of p micro-batches go through all stages of a rank before the next group begins, so that
// what left the last rank has just come round when the first one wants it.
std::vector<Turn> turns(int p, int v, int m, bool is_backward) {
  std::vector<Turn> all;
  for (int first = 0, end = first_group(p, m); first < m; first = end, end += p)
    for (int round = 0; round < v; ++round)
      for (int i = first; i < end; ++i) all.push_back({is_backward ? v - 1 - round : round, i});
  return all;
}

}  // namespace

std::string to_string(const Action& a) {
  return detail::concat("FBIW"[static_cast<int>(a.kind)], a.stage, ".", a.micro_batch);
}

std::string describe(const Action& a) {
  static const char* const names[] = {"forward", "backward", "backward of the inputs",
                                      "backward of the weights"};
  return detail::concat(names[static_cast<int>(a.kind)], " of stage ", a.stage, " for micro-batch ",
                        a.micro_batch);
}

bool is_input_backward(const Action& a) { return a.kind == backward || a.kind == backward_input; }

std::optional<int> Schedule::source(const Action& a) const {
  if (a.kind == forward && a.stage > 0) return a.stage - 1;
  if (is_input_backward(a) && a.stage + 1 < num_stages) return a.stage + 1;
  return std::nullopt;
}

std::optional<int> Schedule::target(const Action& a) const {
  if (a.kind == forward && a.stage + 1 < num_stages) return a.stage + 1;
  if (is_input_backward(a) && a.stage > 0) return a.stage - 1;
  return std::nullopt;
}

Schedule gpipe(int p, int m) {
  Schedule s = looped(p, 1, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    for (int i = 0; i < m; ++i) list.push_back({forward, r, i});
    for (int i = 0; i < m; ++i) list.push_back({backward, r, i});
  }
  return s;
}

Schedule one_f_one_b(int p, int m) {
  Schedule s = looped(p, 1, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    const int ahead = std::min(p - 1 - r, m);
    for (int i = 0; i < m + ahead; ++i) {
      if (i < m) list.push_back({forward, r, i});
      if (i >= ahead) list.push_back({backward, r, i - ahead});
    }
  }
  return s;
}

Schedule interleaved_1f1b(int p, int v, int m) {
  Schedule s = looped(p, v, m);
  const auto forwards = turns(p, v, m, false), backwards = turns(p, v, m, true);
  const int num_turns = m * v;
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    // The first group has to go round v - 1 times before its first backward; each rank before the
    // last one is two turns further ahead.
    const int ahead = std::min(num_turns, (v - 1) * first_group(p, m) + 2 * (p - 1 - r));
    for (int i = 0; i < num_turns + ahead; ++i) {
      if (i < num_turns) {
        const Turn t = forwards[static_cast<size_t>(i)];
        list.push_back({forward, t.round * p + r, t.micro_batch});
      }
      if (i >= ahead) {
        const Turn t = backwards[static_cast<size_t>(i - ahead)];
        list.push_back({backward, t.round * p + r, t.micro_batch});
      }
    }
  }
  return s;
}

Schedule zero_bubble(int p, int m) {
  Schedule s = looped(p, 1, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    const int ahead = std::min(p - 1 - r, m);
    for (int i = 0; i < m + ahead + r; ++i) {
      if (i < m) list.push_back({forward, r, i});
      const int input = i - ahead, weight = input - r;
      if (input >= 0 && input < m) list.push_back({backward_input, r, input});
      if (weight >= 0) list.push_back({backward_weight, r, weight});
    }
  }
  return s;
}

// Written as its authors do, for at least 2p - 1 micro-batches: with fewer, those that are not
// there are left out of the lists.
Schedule zbv(int p, int m) {
  check_sizes(p, 2, m);
  Schedule s{.num_stages = 2 * p, .num_micro_batches = m, .rank_of = {}, .ranks = {}};
  for (int stage = 0; stage < 2 * p; ++stage)
    s.rank_of.push_back(std::min(stage, 2 * p - 1 - stage));
  const int enough = std::max(2 * p - 1, m);
  for (int r = 0; r < p; ++r) {
    std::vector<Action> list;
    const int down = r, up = 2 * p - 1 - r;
    std::map<std::pair<ActionKind, int>, int> next;  // micro-batch, of each action
    const auto add = [&](ActionKind kind, int stage) {
      const int i = next[{kind, stage}]++;
      if (i < m) list.push_back({kind, stage, i});
    };
    const auto add_backward = [&](int stage) {
      add(backward_input, stage), add(backward_weight, stage);
    };
    for (int i = 0; i < 2 * (p - r) - 1; ++i) add(forward, down);
    for (int i = 0; i < r; ++i) add(forward, up), add(forward, down);
    for (int i = 0; i < p - r; ++i) add(forward, up), add_backward(up);
    while (next[{forward, up}] < enough) {
      add(forward, down), add_backward(down);
      add(forward, up), add_backward(up);
    }
    // Nobody waits for weights: while gradients of inputs drain, they fill what would be bubble.
    for (int i = 0; i < r; ++i) add(backward_input, down), add(backward_input, up);
    for (int i = 0; i < p - r; ++i) add(backward_input, down), add(backward_weight, down);
    while (next[{backward_weight, up}] < enough) add(backward_weight, up);
    while (next[{backward_weight, down}] < enough) add(backward_weight, down);
    s.ranks.push_back(std::move(list));
  }
  return s;
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble",
                                              "zbv"};
  return names;
}

int stages_of_a_rank(const std::string& name) {
  return name == "zbv" ? 2 : name == "interleaved_1f1b" ? 0 : 1;
}

Schedule make_schedule(const std::string& name, int p, int v, int m) {
  const auto& names = schedule_names();
  MOESH_CHECK(std::find(names.begin(), names.end(), name) != names.end(), ErrorKind::config,
              "there is no pipeline schedule '", name, "'; the schedules are ",
              joined_by_or(names));
  const int wanted = stages_of_a_rank(name);
  MOESH_CHECK(wanted == 0 ? v >= 2 : v == wanted, ErrorKind::config, "the pipeline schedule ", name,
              " has ", wanted == 0 ? "2 or more" : std::to_string(wanted),
              " stages a rank, and the plan has ", v,
              "; change the number of stages, or the schedule");
  if (name == "gpipe") return gpipe(p, m);
  if (name == "1f1b") return one_f_one_b(p, m);
  if (name == "interleaved_1f1b") return interleaved_1f1b(p, v, m);
  return name == "zbv" ? zbv(p, m) : zero_bubble(p, m);
}

Schedule forwards_of(Schedule s) {
  for (auto& list : s.ranks) std::erase_if(list, [](const Action& a) { return a.kind != forward; });
  s.has_backward = false;
  return s;
}

void check(const Schedule& s) {
  MOESH_CHECK(static_cast<int>(s.rank_of.size()) == s.num_stages, ErrorKind::config,
              "a schedule of ", s.num_stages, " stages says of ", s.rank_of.size(),
              " on which rank they are");
  struct Done {
    bool forward = false, input = false, weight = false;
  };
  std::vector<Done> done(static_cast<size_t>(s.num_stages * s.num_micro_batches));
  for (int r = 0; r < s.num_ranks(); ++r)
    for (const Action& a : s.ranks[static_cast<size_t>(r)]) {
      const auto where = [&] { return detail::concat("rank ", r, ": ", to_string(a)); };
      MOESH_CHECK(a.stage >= 0 && a.stage < s.num_stages && a.micro_batch >= 0 &&
                      a.micro_batch < s.num_micro_batches,
                  ErrorKind::config, where(), " is not in a schedule of ", s.num_stages,
                  " stages and ", s.num_micro_batches, " micro-batches");
      const int owner = s.rank_of[static_cast<size_t>(a.stage)];
      MOESH_CHECK(owner == r, ErrorKind::config, where(), " is of a stage that is on rank ", owner);
      Done& d = done[static_cast<size_t>(a.stage * s.num_micro_batches + a.micro_batch)];
      const bool is_input = a.kind == backward || a.kind == backward_input,
                 is_weight = a.kind == backward || a.kind == backward_weight;
      MOESH_CHECK(a.kind == forward || d.forward, ErrorKind::config, where(),
                  " comes before its forward");
      MOESH_CHECK(a.kind != backward_weight || d.input, ErrorKind::config, where(),
                  " comes before the gradients of its inputs");
      MOESH_CHECK(a.kind == forward || s.has_backward, ErrorKind::config, where(),
                  " is in a schedule that has only forwards");
      const bool is_again =
          a.kind == forward ? d.forward : (is_input && d.input) || (is_weight && d.weight);
      MOESH_CHECK(!is_again, ErrorKind::config, where(), " is done twice");
      d.forward |= a.kind == forward, d.input |= is_input, d.weight |= is_weight;
    }
  for (int stage = 0; stage < s.num_stages; ++stage)
    for (int i = 0; i < s.num_micro_batches; ++i) {
      const Done& d = done[static_cast<size_t>(stage * s.num_micro_batches + i)];
      const bool is_done = d.forward && (!s.has_backward || (d.input && d.weight));
      MOESH_CHECK(is_done, ErrorKind::config, "rank ", s.rank_of[static_cast<size_t>(stage)], ": ",
                  to_string({!d.forward ? forward
                             : !d.input ? backward_input
                                        : backward_weight,
                             stage, i}),
                  " is missing");
    }
}

}  // namespace moesh::pipeline
