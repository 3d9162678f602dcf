#include "moesh/pipeline/execute.h"

#include <deque>
#include <map>
#include <span>
#include <tuple>

#include "moesh/base/error.h"

namespace moesh::pipeline {
namespace {

using enum ActionKind;

// What an action takes: of a stage and a micro-batch, an activation or a gradient.
using MessageKey = std::tuple<bool, int, int>;
MessageKey key_of(const Action& taker) {
  return {taker.kind != forward, taker.stage, taker.micro_batch};
}

class Executor {
 public:
  Executor(const Schedule& schedule, int rank, Actor& actor, const ExecuteOptions& options)
      : s_(schedule), rank_(rank), actor_(actor), num_buffers_(options.num_buffers) {
    MOESH_CHECK(num_buffers_ >= 1, "a pipeline with ", num_buffers_, " buffers between two ranks");
    std::map<MessageKey, Action> takers;
    for (const Action& a : list())
      if (receives(a)) takers.emplace(key_of(a), a);
    // In the order of the sender.
    for (int from = 0; from < s_.num_ranks(); ++from)
      for (const Action& made : s_.ranks[static_cast<size_t>(from)])
        if (const auto to = s_.target(made); from != rank_ && to && s_.rank_with(*to) == rank_)
          incoming_[from].push_back(takers.at({made.kind != forward, *to, made.micro_batch}));
  }

  void run() {
    for (size_t i = 0; i < list().size(); i += doing_.size()) {
      doing_ = std::span(list()).subspan(i, num_together(list(), i));
      receive_ahead(i, 2 * doing_.size());
      for (const Action& a : doing_)
        if (sends(a)) make_room(under_way(a));
      if (doing_.size() == 1)
        actor_.run(doing_[0]);
      else
        actor_.run_together(doing_[0], doing_[1]);
      for (const Action& a : doing_) {
        if (!sends(a)) continue;
        actor_.start_send(a, s_.rank_with(*s_.target(a)));
        under_way(a).push_back(a);
      }
    }
    for (auto& [to, under_way] : outgoing_)
      while (!under_way.empty()) finish_first(under_way);
  }

  // The actions that it is at: one, or two that are joined.
  std::span<const Action> doing() const { return doing_; }

 private:
  const std::vector<Action>& list() const { return s_.ranks[static_cast<size_t>(rank_)]; }
  bool receives(const Action& a) const {
    const auto from = s_.source(a);
    return from && s_.rank_with(*from) != rank_;
  }

  bool sends(const Action& a) const {
    const auto to = s_.target(a);
    return to && s_.rank_with(*to) != rank_;
  }
  std::deque<Action>& under_way(const Action& a) {
    return outgoing_[{s_.rank_with(*s_.target(a)), a.kind != forward}];
  }
  void make_room(std::deque<Action>& line) {
    if (line.size() == static_cast<size_t>(num_buffers_)) finish_first(line);
  }

  // Begins to receive the first messages that action i and those after it take.
  void receive_ahead(size_t i, size_t num) {
    size_t num_begun = 0;
    for (size_t next = i; next < list().size() && num_begun < num; ++next) {
      if (!receives(list()[next])) continue;
      receive_until(list()[next]);
      ++num_begun;
    }
  }
  void receive_until(const Action& taker) {
    const int from = s_.rank_with(*s_.source(taker));
    auto& left = incoming_.at(from);
    while (!begun_[key_of(taker)]) {
      MOESH_CHECK(!left.empty(), "rank ", rank_, ": nobody sends what ", to_string(taker),
                  " takes");
      const Action next = left.front();
      left.pop_front();
      actor_.start_receive(next, from);
      begun_[key_of(next)] = true;
    }
  }
  void finish_first(std::deque<Action>& under_way) {
    const Action maker = under_way.front();
    under_way.pop_front();
    actor_.finish_send(maker);
  }

  const Schedule& s_;
  int rank_;
  Actor& actor_;
  int num_buffers_;
  std::span<const Action> doing_;
  std::map<int, std::deque<Action>> incoming_;  // by sender: the takers of what is still to come
  std::map<MessageKey, bool> begun_;
  std::map<std::pair<int, bool>, std::deque<Action>> outgoing_;  // by receiver and kind: makers
};

}  // namespace

void execute(const Schedule& schedule, int rank, Actor& actor, const ExecuteOptions& options) {
  MOESH_CHECK(rank >= 0 && rank < schedule.num_ranks(), "rank ", rank, " of a pipeline of ",
              schedule.num_ranks());
  Executor executor(schedule, rank, actor, options);
  try {
    executor.run();
  } catch (const Error& e) {
    if (schedule.num_ranks() == 1 || executor.doing().empty()) throw;
    std::string doing;
    for (const Action& a : executor.doing())
      doing += (doing.empty() ? "" : " beside ") + describe(a);
    throw Error(e.kind(), detail::concat("rank ", rank, " of pp, ", doing, ": ", e.what()));
  }
}

}  // namespace moesh::pipeline
