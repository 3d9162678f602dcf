#include "moesh/pipeline/simulate.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include "moesh/base/error.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;

// What goes from one rank to another, in order: activations forward, gradients backward. Receivers
// know the order, so that a message needs no name.
struct MessageOrder {
  std::vector<Action> made_by, taken_by;  // the actions, message by message
};
using MessageOrderKey = std::tuple<int, int, bool>;  // from, to, whether it is a gradient

double duration(const Action& a, const Costs& costs) {
  const StageCosts& c = costs.of(a.stage);
  switch (a.kind) {
    case forward: return c.forward;
    case backward: return c.backward_input + c.backward_weight;
    case backward_input: return c.backward_input;
    case backward_weight: break;
  }
  return c.backward_weight;
}

double links_of(const Action& a, const Costs& costs) {
  const StageCosts& c = costs.of(a.stage);
  return a.kind == forward ? c.forward_links : is_input_backward(a) ? c.backward_links : 0;
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const Costs& costs) : s_(schedule), costs_(costs) {
    MOESH_CHECK(
        costs.stages.size() == 1 || costs.stages.size() == static_cast<size_t>(schedule.num_stages),
        "costs of ", costs.stages.size(), " stages for a schedule of ", schedule.num_stages);
    MOESH_CHECK(costs.num_buffers >= 1, "a pipeline with ", costs.num_buffers,
                " buffers between two ranks");
    for (const StageCosts& c : costs.stages)
      MOESH_CHECK(c.forward_links <= c.forward && c.backward_links <= c.backward_input,
                  "links are used for ", c.forward_links, " of a forward of ", c.forward, " and ",
                  c.backward_links, " of a backward of ", c.backward_input);
    check(schedule);
    times_.resize(static_cast<size_t>(4 * s_.num_stages * s_.num_micro_batches));
    place_.resize(times_.size());
    find_channels();
  }

  Simulation run() {
    advance();
    check_all_ran();
    for (const auto& list : s_.ranks) out_.peak.push_back(most_held(list, costs_, s_.has_backward));
    for (const auto& [key, channel] : channels_)
      out_.num_buffers = std::max(out_.num_buffers, most_messages(channel));
    return std::move(out_);
  }

  bool can_run() {
    advance();
    return waiting().empty();
  }

 private:
  // As far as the ranks come.
  void advance() {
    out_.ranks.resize(s_.ranks.size()), out_.busy.resize(s_.ranks.size());
    std::vector<double> free_from(s_.ranks.size());
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (size_t r = 0; r < s_.ranks.size(); ++r)
        while (out_.ranks[r].size() < s_.ranks[r].size()) {
          const auto now = next_of(r);
          const auto ready = ready_at(now, free_from[r]);
          if (!ready) break;
          const double start = *ready,
                       end = start + (now.size() == 1 ? duration(now[0], costs_)
                                                      : time_together(now[0], now[1], costs_));
          for (const Action& a : now) {
            time_of(a) = Timed{a, start, end};
            out_.ranks[r].push_back({a, start, end});
          }
          out_.busy[r] += end - start;
          out_.time = std::max(out_.time, end);
          free_from[r] = end;
          has_moved = true;
        }
    }
  }

  // What rank r does next: one action, or two that are joined.
  std::span<const Action> next_of(size_t r) const {
    const auto& list = s_.ranks[r];
    const size_t i = out_.ranks[r].size();
    return std::span(list).subspan(i, num_together(list, i));
  }
  std::optional<Timed>& time_of(const Action& a) {
    const int kind = static_cast<int>(is_input_backward(a) ? backward_input : a.kind);
    return times_[index(kind, a)];
  }
  size_t index(int kind, const Action& a) const {
    return static_cast<size_t>((kind * s_.num_stages + a.stage) * s_.num_micro_batches +
                               a.micro_batch);
  }
  int rank_of(int stage) const { return s_.rank_with(stage); }

  void find_channels() {
    for (const auto& list : s_.ranks)
      for (const Action& a : list) {
        const bool is_gradient = a.kind != forward;
        const int here = rank_of(a.stage);
        if (const auto to = s_.target(a); to && rank_of(*to) != here) {
          auto& channel = channels_[{here, rank_of(*to), is_gradient}];
          place_[index(is_gradient, a)] = channel.made_by.size();
          channel.made_by.push_back(a);
        }
        if (const auto from = s_.source(a); from && rank_of(*from) != here)
          channels_[{rank_of(*from), here, is_gradient}].taken_by.push_back(a);
      }
    for (const auto& [key, channel] : channels_)
      for (size_t i = 0; i < channel.made_by.size(); ++i) {
        const Action &made = channel.made_by[i], &taken = channel.taken_by[i];
        MOESH_CHECK(*s_.target(made) == taken.stage && made.micro_batch == taken.micro_batch,
                    ErrorKind::config, "rank ", std::get<0>(key), " sends what ", to_string(made),
                    " gives as its message ", i, " to rank ", std::get<1>(key),
                    ", which takes it for ", to_string(taken),
                    ": both sides must have the same order");
      }
  }

  // When all that an action needs is there; nothing: that is not known yet.
  std::optional<double> ready_at(const Action& a) {
    double ready = 0;
    if (const auto from = s_.source(a)) {
      const auto& before =
          time_of({a.kind == forward ? forward : backward_input, *from, a.micro_batch});
      if (!before) return std::nullopt;
      const bool stays = rank_of(*from) == rank_of(a.stage);
      ready = before->end + (stays ? 0 : costs_.of(std::min(*from, a.stage)).transfer);
    }
    const auto to = s_.target(a);
    if (!to || rank_of(*to) == rank_of(a.stage)) return ready;
    const auto place = place_[index(a.kind != forward, a)];
    if (place < static_cast<size_t>(costs_.num_buffers)) return ready;
    const auto& channel = channels_.at({rank_of(a.stage), rank_of(*to), a.kind != forward});
    const auto& taken = time_of(channel.taken_by[place - static_cast<size_t>(costs_.num_buffers)]);
    if (!taken) return std::nullopt;
    return std::max(ready, taken->start);
  }

  // The same of what a rank does next, which is free from then on.
  std::optional<double> ready_at(std::span<const Action> now, double ready) {
    for (const Action& a : now) {
      const auto own = ready_at(a);
      if (!own) return std::nullopt;
      ready = std::max(ready, *own);
    }
    return ready;
  }

  // The ranks that have not come to the end, and before what.
  std::string waiting() {
    std::string waiting;
    for (size_t r = 0; r < s_.ranks.size(); ++r)
      if (out_.ranks[r].size() < s_.ranks[r].size())
        for (const Action& a : next_of(r)) {
          if (ready_at(a)) continue;  // it waits for the one that it is joined with
          const auto from = s_.source(a);
          const bool has_input = !from || time_of({a.kind == forward ? forward : backward_input,
                                                   *from, a.micro_batch});
          waiting +=
              detail::concat(waiting.empty() ? "" : ", ", "rank ", r, " before ", to_string(a),
                             has_input ? " for a free buffer" : " for its input");
        }
    return waiting;
  }
  void check_all_ran() {
    const std::string left = waiting();
    MOESH_CHECK(left.empty(), ErrorKind::config,
                "the ranks of a pipeline wait for each other: ", left);
  }

  int most_messages(const MessageOrder& channel) {
    std::vector<std::pair<double, int>> events;  // at one time, what is taken comes first
    for (size_t i = 0; i < channel.made_by.size(); ++i) {
      events.emplace_back(time_of(channel.made_by[i])->start, 1);
      events.emplace_back(time_of(channel.taken_by[i])->start, -1);
    }
    std::sort(events.begin(), events.end());
    int now = 0, most = 0;
    for (const auto& [time, change] : events) most = std::max(most, now += change);
    return most;
  }

  const Schedule& s_;
  const Costs& costs_;
  std::vector<std::optional<Timed>> times_;  // by kind, stage, micro-batch
  std::map<MessageOrderKey, MessageOrder> channels_;
  std::vector<size_t> place_;  // of what an action sends in its channel, by kind as above
  Simulation out_;
};

}  // namespace

double Simulation::bubble_fraction() const {
  double work = 0;
  for (const double b : busy) work += b;
  return time == 0 ? 0 : 1 - work / (time * static_cast<double>(busy.size()));
}

double most_held(const std::vector<Action>& actions, const Costs& costs, bool has_backward) {
  double held = 0, most = 0;
  std::set<int> with_gradients;
  for (const Action& a : actions) {
    const StageCosts& c = costs.of(a.stage);
    most = std::max(most, held + (a.kind == forward           ? c.in_forward
                                  : a.kind == backward_weight ? c.in_weights
                                                              : c.in_backward));
    if (a.kind == forward) held += c.activation;
    if (is_input_backward(a)) held -= c.activation;
    if (a.kind == backward_input) held += c.kept_for_weights;
    if (a.kind == backward_weight) held -= c.kept_for_weights;
    const bool makes_gradients = a.kind == backward || a.kind == backward_weight;
    if (makes_gradients && with_gradients.insert(a.stage).second) held += c.gradients;
    // After a half for the inputs, too: with recompute it may keep more than forward has.
    most = std::max(most, held);
    if (!has_backward) held -= c.activation;  // nobody comes back for it
  }
  return most;
}

double time_together(const Action& a, const Action& b, const Costs& costs) {
  const double links_a = links_of(a, costs), links_b = links_of(b, costs),
               compute_a = duration(a, costs) - links_a, compute_b = duration(b, costs) - links_b;
  return compute_a + compute_b + std::max(0.0, links_a - compute_b) +
         std::max(0.0, links_b - compute_a);
}

Simulation simulate(const Schedule& schedule, const Costs& costs) {
  return Simulator(schedule, costs).run();
}

// Two that begin at the same time may each need the other's buffer: then one more.
int enough_buffers(const Schedule& schedule) {
  Costs costs{.stages = {{}}};
  costs.num_buffers = std::max(1, simulate(schedule).num_buffers);
  while (!Simulator(schedule, costs).can_run()) ++costs.num_buffers;
  return costs.num_buffers;
}

namespace {

class LaneClock {
 public:
  explicit LaneClock(double slower) : slower_(slower) {}

  double now() const { return now_; }
  void wait_until(double time) { now_ = std::max(now_, time); }
  void compute(double seconds) {
    const double moving = std::max(0.0, *std::ranges::max_element(free_) - now_),
                 meanwhile = std::min(seconds, moving / (1 + slower_));
    now_ += seconds + slower_ * meanwhile;
  }
  // When the message has come.
  double send(const LaneStep& step) {
    double& free = free_[static_cast<size_t>(step.link)];
    free = std::max(now_, free) + step.message;
    return free;
  }

 private:
  double slower_, now_ = 0;
  std::array<double, 2> free_{};  // from when on each link is idle
};

}  // namespace

double seconds_in_turns(const std::vector<Lane>& lanes, double slower) {
  LaneClock clock(slower);
  std::vector<size_t> next(lanes.size());
  std::vector<double> awaited(lanes.size());
  const auto is_left = [&](size_t lane) { return next[lane] < lanes[lane].size(); };
  size_t num_left = 0;
  for (const Lane& lane : lanes) num_left += lane.size();
  for (size_t lane = 0; num_left > 0; lane = (lane + 1) % lanes.size()) {
    clock.wait_until(awaited[lane]);
    for (bool has_turn = true; has_turn && is_left(lane); --num_left) {
      const LaneStep& step = lanes[lane][next[lane]++];
      clock.compute(step.compute);
      if (step.message == 0) continue;
      awaited[lane] = clock.send(step);
      if (step.takes_turns)
        has_turn = false;
      else
        clock.wait_until(awaited[lane]);
    }
  }
  for (const double time : awaited) clock.wait_until(time);
  return clock.now();
}

double seconds_apart(const Lane& lane) {
  return std::accumulate(lane.begin(), lane.end(), 0.0, [](double sum, const LaneStep& step) {
    return sum + step.compute + step.message;
  });
}

}  // namespace moesh::pipeline
