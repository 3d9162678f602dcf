#include "moesh/pipeline/schedule.h"

#include <algorithm>
#include <deque>
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

// Two stages a rank, down and up again: 0 1 2 3 3 2 1 0.
Schedule in_a_v(int p, int m) {
  check_sizes(p, 2, m);
  Schedule s{.num_stages = 2 * p, .num_micro_batches = m, .rank_of = {}, .ranks = {}};
  for (int stage = 0; stage < 2 * p; ++stage)
    s.rank_of.push_back(std::min(stage, 2 * p - 1 - stage));
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

size_t num_together(const std::vector<Action>& list, size_t i) {
  return list[i].joins_next ? 2 : 1;
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

Schedule one_f_one_b(int p, int m, bool joined) {
  Schedule s = looped(p, 1, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    const int after = p - 1 - r, ahead = std::min(joined ? 2 * after + 1 : after, m);
    for (int i = 0; i < m + ahead; ++i) {
      if (i < m) list.push_back({forward, r, i, joined && i >= ahead});
      if (i >= ahead) list.push_back({backward, r, i - ahead});
    }
  }
  return s;
}

Schedule interleaved_1f1b(int p, int v, int m, bool joined) {
  Schedule s = looped(p, v, m);
  const auto forwards = turns(p, v, m, false), backwards = turns(p, v, m, true);
  const int num_turns = m * v;
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    // The first group has to go round v - 1 times before its first backward; each rank before the
    // last one is two turns further ahead.
    const int ahead =
        std::min(num_turns, (v - 1) * first_group(p, m) + 2 * (p - 1 - r) + (joined ? 1 : 0));
    for (int i = 0; i < num_turns + ahead; ++i) {
      if (i < num_turns) {
        const Turn t = forwards[static_cast<size_t>(i)];
        list.push_back({forward, t.round * p + r, t.micro_batch, joined && i >= ahead});
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
  Schedule s = in_a_v(p, m);
  const int enough = std::max(2 * p - 1, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
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
  }
  return s;
}

// For at least 2p micro-batches, as its authors want it: with fewer, those that are not there are
// left out of the lists.
Schedule dualpipev(int p, int m, bool joined) {
  Schedule s = in_a_v(p, m);
  const int enough = std::max(2 * p, m);
  for (int r = 0; r < p; ++r) {
    auto& list = s.ranks[static_cast<size_t>(r)];
    const int down = r, up = 2 * p - 1 - r, after = p - 1 - r;
    std::map<std::pair<bool, int>, int> next;  // micro-batch, of the forwards and of the backwards
    std::deque<Action> weights;                // put off, the oldest first
    const auto add = [&](ActionKind kind, int stage) {
      const int i = next[{kind == forward, stage}]++;
      if (i >= m) return false;
      list.push_back({kind, stage, i});
      if (kind == backward_input) weights.push_back({backward_weight, stage, i});
      return true;
    };
    const auto add_weights = [&] {
      if (weights.empty()) return;
      list.push_back(weights.front());
      weights.pop_front();
    };
    const auto add_both = [&](int forward_stage, int backward_stage) {
      const bool has_forward = add(forward, forward_stage),
                 has_backward = add(backward, backward_stage);
      if (has_forward && has_backward) list[list.size() - 2].joins_next = joined;
    };
    for (int i = 0; i < 2 * after; ++i) add(forward, down);
    for (int i = 0; i <= r; ++i) add(forward, down), add(forward, up);
    for (int i = 0; i < after; ++i) add(backward_input, up), add_weights(), add(forward, up);
    for (int i = 0; i < enough - 2 * p + r + 1; ++i) {
      // The other ranks wait for the first backward of the last one: it has that rank to itself.
      if (i == 0 && after == 0)
        add(forward, down), add(backward, up);
      else
        add_both(down, up);
      add_both(up, down);
    }
    for (int i = 0; i < after; ++i) add(backward, up), add_both(up, down);
    // As in zbv, weights fill the end: of the last backwards, half leave them for later.
    for (int i = 0; i < 2 * (r + 1); ++i)
      add(i <= r ? backward : backward_input, i % 2 == 0 ? up : down);
    for (int i = 0; i < after; ++i) add_weights(), add(backward_input, down);
    while (!weights.empty()) add_weights();
  }
  return s;
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{"gpipe",       "1f1b", "interleaved_1f1b",
                                              "zero_bubble", "zbv",  "dualpipev"};
  return names;
}

const std::vector<std::string>& joined_schedule_names() {
  static const std::vector<std::string> names{"1f1b", "interleaved_1f1b", "dualpipev"};
  return names;
}
bool can_be_joined(const std::string& name) {
  const auto& names = joined_schedule_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool has_halves(const std::string& name) {
  return name == "zero_bubble" || name == "zbv" || name == "dualpipev";
}

int stages_of_a_rank(const std::string& name, int any) {
  return name == "zbv" || name == "dualpipev" ? 2 : name == "interleaved_1f1b" ? any : 1;
}

Schedule make_schedule(const std::string& name, int p, int v, int m, bool joined) {
  const auto& names = schedule_names();
  MOESH_CHECK(std::find(names.begin(), names.end(), name) != names.end(), ErrorKind::config,
              "there is no pipeline schedule '", name, "'; the schedules are ",
              joined_by_or(names));
  const int wanted = stages_of_a_rank(name);
  MOESH_CHECK(wanted == 0 ? v >= 2 : v == wanted, ErrorKind::config, "the pipeline schedule ", name,
              " has ", wanted == 0 ? "2 or more" : std::to_string(wanted),
              " stages a rank, and the plan has ", v,
              "; change the number of stages, or the schedule");
  MOESH_CHECK(
      !joined || can_be_joined(name), ErrorKind::config, "the pipeline schedule ", name,
      " has no forward and backward of two micro-batches side by side; those that have are ",
      joined_by_or(joined_schedule_names()));
  if (name == "gpipe") return gpipe(p, m);
  if (name == "1f1b") return one_f_one_b(p, m, joined);
  if (name == "interleaved_1f1b") return interleaved_1f1b(p, v, m, joined);
  if (name == "dualpipev") return dualpipev(p, m, joined);
  return name == "zbv" ? zbv(p, m) : zero_bubble(p, m);
}

Schedule forwards_of(Schedule s) {
  for (auto& list : s.ranks) {
    std::erase_if(list, [](const Action& a) { return a.kind != forward; });
    for (Action& a : list) a.joins_next = false;
  }
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
  for (int r = 0; r < s.num_ranks(); ++r) {
    const auto& list = s.ranks[static_cast<size_t>(r)];
    for (size_t i = 0; i < list.size(); ++i) {
      const Action& a = list[i];
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
      if (!a.joins_next) continue;
      const Action* const next = i + 1 < list.size() ? &list[i + 1] : nullptr;
      MOESH_CHECK(next && a.kind == forward && is_input_backward(*next) &&
                      next->micro_batch != a.micro_batch,
                  ErrorKind::config, where(), " is joined with ",
                  next ? to_string(*next) : "nothing",
                  "; only a forward before a backward of another micro-batch can be");
    }
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
