#include "moesh/pipeline/execute.h"

#include <deque>
#include <map>
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
    for (size_t i = 0; i < list().size(); ++i) {
      const Action& a = list()[i];
      doing_ = &a;
      receive_ahead(i);
      const auto to = s_.target(a);
      const bool sends = to && s_.rank_with(*to) != rank_;
      std::deque<Action>* under_way =
          sends ? &outgoing_[{s_.rank_with(*to), a.kind != forward}] : nullptr;
      if (sends && under_way->size() == static_cast<size_t>(num_buffers_)) finish_first(*under_way);
      actor_.run(a);
      if (!sends) continue;
      actor_.start_send(a, s_.rank_with(*to));
      under_way->push_back(a);
    }
    for (auto& [to, under_way] : outgoing_)
      while (!under_way.empty()) finish_first(under_way);
  }

  // The action that it is at.
  const Action* doing() const { return doing_; }

 private:
  const std::vector<Action>& list() const { return s_.ranks[static_cast<size_t>(rank_)]; }
  bool receives(const Action& a) const {
    const auto from = s_.source(a);
    return from && s_.rank_with(*from) != rank_;
  }

  // Begins to receive the message of action i, or of the first after it that takes one, and the
  // next.
  void receive_ahead(size_t i) {
    int num_begun = 0;
    for (size_t next = i; next < list().size() && num_begun < 2; ++next) {
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
  const Action* doing_ = nullptr;
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
    if (schedule.num_ranks() == 1 || !executor.doing()) throw;
    throw Error(e.kind(), detail::concat("rank ", rank, " of pp, ", describe(*executor.doing()),
                                         ": ", e.what()));
  }
}

}  // namespace moesh::pipeline
