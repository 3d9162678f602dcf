#include "moesh/comm/observers.h"

#include <ATen/ops/tensor.h>

#include <cstring>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm {

std::int64_t sent_bytes(Collective op, std::int64_t bytes, std::int64_t own, int num_ranks) {
  const std::int64_t n = num_ranks;
  switch (op) {
    case Collective::all_reduce: return 2 * bytes * (n - 1) / n;
    case Collective::all_gather: return bytes * (n - 1);
    case Collective::reduce_scatter:
    case Collective::all_to_all: return bytes - own;
    case Collective::broadcast: return bytes * (n - 1) / n;
    case Collective::send: return bytes;
    case Collective::barrier:
    case Collective::split:
    case Collective::recv: return 0;
  }
  return 0;
}

SentParts sent_parts(const Operation& o, int ranks_per_node) {
  const std::int64_t all =
      sent_bytes(o.op, o.bytes, o.own_bytes(), static_cast<int>(o.ranks.size()));
  if (ranks_per_node == 0 || all == 0) return {.inside = all};
  const auto node = [&](int rank) { return rank / ranks_per_node; };
  const int mine = node(o.group.members()[static_cast<size_t>(o.group.rank())]);
  std::int64_t between = 0;
  if (o.op == Collective::all_to_all) {
    const std::int64_t row = o.bytes / o.x->size(0);
    for (size_t r = 0; r < o.ranks.size(); ++r)
      if (node(o.ranks[r]) != mine) between += row * (*o.rows)[r];
  } else {
    std::set<int> nodes;
    for (const int r : o.ranks) nodes.insert(node(r));
    // Those of the n - 1 steps of a ring that lead to another node, once for each.
    const auto others = static_cast<std::int64_t>(nodes.size()) - 1;
    between = all * others / (static_cast<std::int64_t>(o.ranks.size()) - 1);
  }
  return {.inside = all - between, .between = between};
}

void SentBytes::called(const Operation& o) {
  Traffic& entry = ledger_[{o.group.name(), o.op}];
  ++entry.num_calls;
  entry.num_bytes += sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size());
}

std::map<std::string, std::int64_t> SentBytes::take() {
  std::map<std::string, std::int64_t> bytes;
  for (const auto& [key, entry] : std::exchange(ledger_, {})) bytes[key.first] += entry.num_bytes;
  return bytes;
}

namespace {

constexpr std::int64_t kHeaderSize = sizeof(Call) / sizeof(std::int64_t);
static_assert(sizeof(Call) % sizeof(std::int64_t) == 0, "a call travels as whole int64 words");

std::uint64_t mix_in(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15;
  return hash ^ (hash >> 29);
}

// A hash of shape, dtype and bytes.
std::uint64_t hash_of(const at::Tensor& x) {
  const at::Tensor host = x.detach().cpu().contiguous();
  std::uint64_t hash = mix_in(0x6d6f657368, static_cast<std::uint64_t>(host.scalar_type()));
  for (auto s : host.sizes()) hash = mix_in(hash, static_cast<std::uint64_t>(s));
  const auto* bytes = static_cast<const char*>(host.const_data_ptr());
  size_t left = host.nbytes();
  for (; left >= 8; left -= 8, bytes += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    hash = mix_in(hash, word);
  }
  std::uint64_t tail = 0;
  if (left) std::memcpy(&tail, bytes, left);
  return mix_in(hash, tail);
}

class Checker final : public GroupObserver {
 public:
  std::shared_ptr<GroupObserver> for_new_group() const override {
    return std::make_shared<Checker>();
  }

  void called(const Operation& o) override {
    // The backend compares what is sent with what is expected: here a start would wait for
    // its peer.
    if (is_own_ || o.op == Collective::send || o.op == Collective::recv) return;
    Call call;
    if (o.x) call = Call::of(o.op, 0, *o.x, o.reduce, o.root);
    if (o.rows && !o.recv) call = call.with(*o.rows);
    call.sequence = sequence_++;
    compare(call, o);
    if (o.recv) compare_counts(call, o);
  }

  void expect_same(Group& group, const at::Tensor& x, std::string_view what) override {
    const auto hash = hash_of(x);
    const at::Tensor all = gather(group, {static_cast<std::int64_t>(hash)}, x.device());
    const auto* p = all.const_data_ptr<std::int64_t>();
    for (int r = 1; r < group.size(); ++r)
      MOESH_CHECK(p[r] == p[0], ErrorKind::comm, "'", what,
                  "' is promised to be the same on every rank of group '", group.name(),
                  "' (R or I), and rank ", group.members()[static_cast<size_t>(r)],
                  " holds a different value from rank ", group.members()[0],
                  " (checked before operation ", sequence_,
                  "). A reduction before it was left out, or the ranks started from other values.");
  }

 private:
  // [size, words]: the words of every rank, on the host.
  at::Tensor gather(Group& group, const std::vector<std::int64_t>& words,
                    const at::Device& device) {
    const ObserverPause quiet;
    const auto n = static_cast<std::int64_t>(words.size());
    is_own_ = true;  // stays so where the gather throws: that is the end of the group
    const auto all = group.all_gather(at::tensor(words, at::kLong).reshape({1, n}).to(device));
    is_own_ = false;
    return all.cpu();
  }

  static at::Device device_of(const Operation& o) {
    return o.x ? o.x->device() : o.group.control_device();
  }

  void compare(const Call& call, const Operation& o) {
    std::vector<std::int64_t> words(kHeaderSize);
    std::memcpy(words.data(), &call, sizeof(Call));
    const at::Tensor all = gather(o.group, words, device_of(o));
    std::vector<Call> calls(static_cast<size_t>(o.group.size()));
    std::memcpy(static_cast<void*>(calls.data()), all.const_data_ptr(), all.nbytes());
    const std::string verdict = disagreement(calls, o.group.members(), o.group.name());
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
  }

  // The rows that rank i sends to rank j must be those that j expects from i.
  void compare_counts(const Call& call, const Operation& o) {
    std::vector<std::int64_t> words(*o.rows);
    words.insert(words.end(), o.recv->begin(), o.recv->end());
    const at::Tensor all = gather(o.group, words, device_of(o));
    const auto* p = all.const_data_ptr<std::int64_t>();
    const int n = o.group.size();
    const auto& members = o.group.members();
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        const auto sent = p[i * 2 * n + j], expected = p[j * 2 * n + n + i];
        MOESH_CHECK(sent == expected, ErrorKind::comm, "in ", call.describe(), ", operation ",
                    call.sequence, " of group '", o.group.name(), "', rank ",
                    members[static_cast<size_t>(i)], " sends ", sent, " rows to rank ",
                    members[static_cast<size_t>(j)], ", which expects ", expected);
      }
  }

  std::int64_t sequence_ = 0;
  bool is_own_ = false;  // what is called now
};

}  // namespace

void check_ranks(Group& group) {
  if (group.size() > 1) group.add(std::make_shared<Checker>());
}

}  // namespace moesh::comm
