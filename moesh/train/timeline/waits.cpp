#include "moesh/train/timeline/waits.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace moesh::train {
namespace {

using Key = std::tuple<std::string, std::vector<int>, std::string>;  // group, members, op

struct Calls {
  bool meets_on_host = true;
  std::map<int, std::vector<std::size_t>> of_rank;  // collectives, in order
};

std::map<Key, Calls> calls_of(const std::vector<RankRecord>& records) {
  std::map<Key, Calls> all;
  for (std::size_t r = 0; r < records.size(); ++r) {
    const TimelineRecord& t = records[r].timeline;
    for (std::size_t i = 0; i < t.collectives.size(); ++i) {
      const CollectiveSpan& c = t.collectives[i];
      const TimelineGroup& g = t.groups.at(static_cast<std::size_t>(c.group));
      const std::string& op = t.names.at(static_cast<std::size_t>(c.op));
      const bool is_message = op == "send" || op == "recv";  // its members are its two ends
      Calls& calls = all[{g.name, g.members, is_message ? "message" : op}];
      calls.meets_on_host = g.meets_on_host;
      calls.of_rank[static_cast<int>(r)].push_back(i);
    }
  }
  return all;
}

std::string why_unknown(const std::vector<RankRecord>& records, const std::vector<int>& members,
                        const Calls& calls) {
  if (!calls.meets_on_host) return "ranks meet on the device: see its kernels";
  const std::size_t num_calls = calls.of_rank.begin()->second.size();
  for (const int rank : members) {
    const auto found = calls.of_rank.find(rank);
    if (found == calls.of_rank.end() || found->second.size() != num_calls)
      return "not every rank of the group makes this call";
    const auto machine = [&](int r) { return records.at(static_cast<std::size_t>(r)).machine; };
    if (machine(rank) != machine(members[0])) return "ranks are on machines with different clocks";
  }
  return "";
}

}  // namespace

std::vector<std::vector<Wait>> find_waits(const std::vector<RankRecord>& records) {
  std::vector<std::vector<Wait>> waits(records.size());
  for (std::size_t r = 0; r < records.size(); ++r)
    waits[r].resize(records[r].timeline.collectives.size());
  const auto span = [&](int rank, std::size_t i) -> const CollectiveSpan& {
    return records[static_cast<std::size_t>(rank)].timeline.collectives[i];
  };
  for (const auto& [key, calls] : calls_of(records)) {
    const std::string unknown = why_unknown(records, std::get<1>(key), calls);
    for (std::size_t k = 0; k < calls.of_rank.begin()->second.size() && unknown.empty(); ++k) {
      int slowest = calls.of_rank.begin()->first;
      for (const auto& [rank, numbers] : calls.of_rank)
        if (span(rank, numbers[k]).begin > span(slowest, calls.of_rank.at(slowest)[k]).begin)
          slowest = rank;
      const std::int64_t last = span(slowest, calls.of_rank.at(slowest)[k]).begin;
      for (const auto& [rank, numbers] : calls.of_rank) {
        const CollectiveSpan& c = span(rank, numbers[k]);
        const std::int64_t most = std::max<std::int64_t>(0, c.end - c.wait_begin);
        waits[static_cast<std::size_t>(rank)][numbers[k]] = {
            .nanoseconds = std::clamp<std::int64_t>(last - c.wait_begin, 0, most),
            .slowest = slowest};
      }
    }
    if (unknown.empty()) continue;
    for (const auto& [rank, numbers] : calls.of_rank)
      for (const std::size_t i : numbers)
        waits[static_cast<std::size_t>(rank)][i].unknown = unknown;
  }
  return waits;
}

}  // namespace moesh::train
