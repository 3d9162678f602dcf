#include "moesh/train/timeline/costs.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::train {

namespace {

struct SectionCost {
  double nanoseconds = 0;
  std::int64_t num_calls = 0;
  std::map<int, std::int64_t> slowest;  // how often each rank came last
};
using Sums = std::map<std::string, SectionCost>;

// A slice with what it inherits from those around it.
struct Placed {
  std::int64_t self = 0;  // without what is inside
  std::string section = "other";
  bool in_step = false, in_collective = false;
};

std::vector<Placed> placed(const TimelineRecord& t) {
  std::vector<Placed> all(t.slices.size());
  std::map<std::int64_t, std::vector<std::size_t>> lanes;
  const Slice* step = nullptr;  // the last that began
  for (std::size_t i = 0; i < t.slices.size(); ++i) {
    const Slice& s = t.slices[i];
    auto& open = lanes[s.lane];
    while (!open.empty() && t.slices[open.back()].end <= s.begin) open.pop_back();
    Placed& p = all[i];
    if (s.kind == SliceKind::step) step = &s;
    if (open.empty()) p.in_step = s.lane > 0 && step && s.begin < step->end;
    if (!open.empty()) {
      const Slice& around = t.slices[open.back()];
      p = all[open.back()];
      p.in_collective = p.in_collective || around.kind == SliceKind::collective;
      if (!p.in_collective) all[open.back()].self -= s.end - s.begin;
    }
    p.self = s.end - s.begin;
    p.in_step = p.in_step || s.kind == SliceKind::step;
    if (s.kind == SliceKind::section) p.section = t.names[static_cast<std::size_t>(s.name)];
    open.push_back(i);
  }
  return all;
}

void add(Sums& sums, const std::string& what, double nanoseconds) {
  sums[what].nanoseconds += nanoseconds;
  ++sums[what].num_calls;
}

void add_collective(Sums& sums, const TimelineRecord& t, const Slice& s, std::int64_t self,
                    const std::vector<Wait>& waits) {
  const auto number = static_cast<std::size_t>(s.collective);
  const CollectiveSpan& c = t.collectives[number];
  const std::string what = t.names[static_cast<std::size_t>(c.op)] + " on " +
                           t.groups[static_cast<std::size_t>(c.group)].name;
  // One that goes on beside other work has a slice for its call, and one for the wait.
  const Wait& wait = waits[number];
  const bool has_waited = s.end == c.end && wait.unknown.empty();
  const std::int64_t waited = has_waited ? std::min(wait.nanoseconds, self) : 0;
  if (has_waited) {
    SectionCost& sum = sums["waiting in " + what];
    sum.nanoseconds += static_cast<double>(waited);
    ++sum.num_calls;
    ++sum.slowest[wait.slowest];
  }
  add(sums, what, static_cast<double>(self - waited));
}

// The turns of a rank's other lane are the slices of that lane.
void add_host(Sums& sums, const RankRecord& record, const std::vector<Wait>& waits) {
  const TimelineRecord& t = record.timeline;
  const std::vector<Placed> all = placed(t);
  double between_lanes = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Slice& s = t.slices[i];
    if (!all[i].in_step || all[i].in_collective) continue;
    const auto self = static_cast<double>(all[i].self);
    if (s.kind == SliceKind::turn && s.lane == 0) between_lanes += self;
    if (s.lane > 0) between_lanes -= s.kind == SliceKind::turn ? 0 : self;
    if (s.kind == SliceKind::turn) continue;
    if (s.kind == SliceKind::collective)
      add_collective(sums, t, s, all[i].self, waits);
    else if (s.kind == SliceKind::op)
      add(sums, t.names[static_cast<std::size_t>(s.name)], self);
    else
      add(sums, "host, between the operators of " + all[i].section, self);
  }
  if (between_lanes > 0) add(sums, "host, between the operators of other", between_lanes);
}

// "void at::native::elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, ...)" as
// "elementwise_kernel<4, CUDAFunctor_add<float> >": which of many it is stands in the middle.
std::string readable(const std::string& kernel) {
  std::string name = kernel.starts_with("void ") ? kernel.substr(5) : kernel;
  for (const std::string_view part : {"at::native::", "(anonymous namespace)::"})
    for (auto at = name.find(part); at != std::string::npos; at = name.find(part, at))
      name.erase(at, part.size());
  int depth = 0;  // of template arguments, whose parentheses are no parameters
  for (std::size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    // "Memcpy DtoH (Device -> Pinned)" is not a function.
    if (name[i] == '(' && depth == 0 && i > 0 && name[i - 1] != ' ') return name.substr(0, i);
  }
  return name;
}

std::string shortened(std::string text) {
  constexpr std::size_t kMost = 76;  // and a line has 100 columns
  if (text.size() > kMost) text.replace(kMost - 3, std::string::npos, "...");
  return text;
}

// From when to when a kernel ran within a step.
struct KernelInterval {
  std::int64_t begin, end;
  SectionCost* sum;
};

std::vector<KernelInterval> kernels_in(Sums& sums, const RankRecord& record, const Slice& step) {
  std::vector<KernelInterval> spans;
  for (const KernelSpan& k : record.kernels) {
    if (is_of_link(k)) continue;
    const std::int64_t begin = std::max(k.begin, step.begin), end = std::min(k.end, step.end);
    if (begin >= end) continue;
    SectionCost& sum = sums[readable(k.name)];
    sum.num_calls += k.begin >= step.begin;
    spans.push_back({begin, end, &sum});
  }
  std::sort(spans.begin(), spans.end(),
            [](const KernelInterval& a, const KernelInterval& b) { return a.begin < b.begin; });
  return spans;
}

// Every moment of a step, on the device: where several kernels run at once each has its part of the
// moment, so that all of them and the time without one are the step. Returns the nanoseconds in
// which several ran.
double add_device(Sums& sums, const RankRecord& record) {
  double together = 0;
  for (const Slice& step : record.timeline.slices) {
    if (step.kind != SliceKind::step) continue;
    const std::vector<KernelInterval> spans = kernels_in(sums, record, step);
    std::vector<KernelInterval> running;
    double idle = 0;
    std::int64_t now = step.begin;
    for (std::size_t next = 0; now < step.end;) {
      for (; next < spans.size() && spans[next].begin <= now; ++next)
        running.push_back(spans[next]);
      std::int64_t until = next < spans.size() ? spans[next].begin : step.end;
      for (const KernelInterval& s : running) until = std::min(until, s.end);
      const auto length = static_cast<double>(until - now);
      for (const KernelInterval& s : running)
        s.sum->nanoseconds += length / static_cast<double>(running.size());
      if (running.empty()) idle += length;
      if (running.size() > 1) together += length;
      std::erase_if(running, [&](const KernelInterval& s) { return s.end <= until; });
      now = until;
    }
    add(sums, "no kernel", idle);
  }
  return together;
}

// " (rank 5 last in 12 of 16)"
std::string who_was_slowest(const SectionCost& sum) {
  if (sum.slowest.empty()) return "";
  const auto most =
      std::max_element(sum.slowest.begin(), sum.slowest.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return detail::concat(" (rank ", most->first, " last in ", most->second, " of ", sum.num_calls,
                        ")");
}

}  // namespace

std::map<std::size_t, std::int64_t> idle_after_counts(const RankRecord& record) {
  std::vector<const KernelSpan*> kernels;
  for (const KernelSpan& k : record.kernels)
    if (!is_of_link(k)) kernels.push_back(&k);
  std::ranges::sort(kernels, {}, &KernelSpan::begin);
  std::map<std::size_t, std::int64_t> all;
  std::int64_t busy_until = 0;
  std::size_t next = 0;
  const TimelineRecord& t = record.timeline;
  std::vector<std::pair<std::int64_t, std::size_t>> reads;  // by their end
  for (std::size_t i = 0; i < t.slices.size(); ++i)
    if (t.names[static_cast<std::size_t>(t.slices[i].name)] == kReadCounts)
      reads.emplace_back(t.slices[i].end, i);
  std::ranges::sort(reads);
  for (const auto& [end, slice] : reads) {
    for (; next < kernels.size() && kernels[next]->begin < end; ++next)
      busy_until = std::max(busy_until, kernels[next]->end);
    if (next == 0 || next == kernels.size()) continue;
    all[slice] = std::max<std::int64_t>(0, kernels[next]->begin - busy_until);
  }
  return all;
}

TraceCosts costs_of(const std::vector<RankRecord>& records,
                    const std::vector<std::vector<Wait>>& waits) {
  TraceCosts result;
  Sums sums;
  std::int64_t num_steps = 0;
  double total = 0, together = 0, after_counts = 0, num_counts = 0;
  for (const RankRecord& r : records) result.of_device = result.of_device || !r.kernels.empty();
  for (std::size_t r = 0; r < records.size(); ++r) {
    for (const auto& [slice, idle] : idle_after_counts(records[r]))
      after_counts += static_cast<double>(idle), ++num_counts;
    if (result.of_device)
      together += add_device(sums, records[r]);
    else
      add_host(sums, records[r], waits[r]);
    for (const Slice& s : records[r].timeline.slices)
      if (s.kind == SliceKind::step) ++num_steps, total += static_cast<double>(s.end - s.begin);
  }
  if (num_steps == 0) return result;
  const auto mean = [&](double sum) { return sum / static_cast<double>(num_steps); };
  result.num_steps = static_cast<int>(num_steps / static_cast<std::int64_t>(records.size()));
  result.step_nanoseconds = mean(total);
  result.together_nanoseconds = mean(together);
  result.after_counts_nanoseconds = mean(after_counts), result.num_counts = mean(num_counts);
  for (const auto& [what, sum] : sums)
    result.costs.push_back({what + who_was_slowest(sum), mean(sum.nanoseconds),
                            mean(static_cast<double>(sum.num_calls))});
  std::stable_sort(result.costs.begin(), result.costs.end(),
                   [](const Cost& a, const Cost& b) { return a.nanoseconds > b.nanoseconds; });
  return result;
}

std::string describe(const TraceCosts& costs, std::size_t num) {
  std::string text =
      formatted("what costs most, of the %.2f ms of a step on the %s (mean of %s, all ranks):\n",
                costs.step_nanoseconds / 1e6, costs.of_device ? "device" : "host",
                counted(costs.num_steps, "step").c_str());
  for (std::size_t i = 0; i < std::min(num, costs.costs.size()); ++i) {
    const Cost& c = costs.costs[i];
    text += formatted("  %8.2f ms %5.1f %%  ", c.nanoseconds / 1e6,
                      100 * c.nanoseconds / costs.step_nanoseconds) +
            shortened(c.what) + "\n";
  }
  if (costs.together_nanoseconds > 0)
    text += formatted(
        "  (in %.2f ms of it several kernels of a rank ran at once, and have equal parts "
        "of that time)\n",
        costs.together_nanoseconds / 1e6);
  if (costs.num_counts > 0)
    text += formatted(
        "  (for %.2f ms of it the device had nothing to do after the host had read counts "
        "of rows, %.0f times)\n",
        costs.after_counts_nanoseconds / 1e6, costs.num_counts);
  return text;
}

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
