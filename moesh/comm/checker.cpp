#include "moesh/comm/checker.h"

#include <ATen/ops/tensor.h>

#include <cstring>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm {
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
    // What is sent is compared with what is expected by the backend: here a start would wait for
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

  // What rank i sends to rank j must be what j expects from i.
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
