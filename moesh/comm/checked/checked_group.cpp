#include "moesh/comm/checked/checked_group.h"

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

class InnerWork final : public Work {
 public:
  explicit InnerWork(Handle handle) : handle_(std::move(handle)) {}
  at::Tensor wait() override { return handle_.wait(); }

 private:
  Handle handle_;
};

class CheckedGroup final : public Group {
 public:
  explicit CheckedGroup(std::shared_ptr<Group> inner)
      : Group(inner->name(), inner->rank(), inner->members()), inner_(std::move(inner)) {}

  at::Device control_device() const override { return inner_->control_device(); }
  bool meets_on_host() const override { return inner_->meets_on_host(); }

  std::shared_ptr<Group> background(const std::string& name) override {
    const TracePause quiet;
    return checked(inner_->background(name));
  }

  void expect_same(const at::Tensor& x, std::string_view what) override {
    const auto hash = hash_of(x);
    const at::Tensor all = gather({static_cast<std::int64_t>(hash)}, x.device());
    const auto* p = all.const_data_ptr<std::int64_t>();
    for (int r = 1; r < size(); ++r)
      MOESH_CHECK(p[r] == p[0], ErrorKind::comm, "'", what,
                  "' is promised to be the same on every rank of group '", name(),
                  "' (R or I), and rank ", members()[static_cast<size_t>(r)],
                  " holds a different value from rank ", members()[0],
                  " (checked before operation ", sequence_,
                  "). A reduction before it was left out, or the ranks started from other values.");
  }

 private:
  std::unique_ptr<Work> do_all_reduce(const at::Tensor& x, ReduceOp op) override {
    const TracePause quiet;
    compare(Call::of(Collective::all_reduce, sequence_++, x, op), x.device());
    return forward(inner_->start_all_reduce(x, op));
  }
  std::unique_ptr<Work> do_all_gather(const at::Tensor& x, const Rows& rows) override {
    const TracePause quiet;
    compare(Call::of(Collective::all_gather, sequence_++, x).with(rows), x.device());
    return forward(inner_->start_all_gather(x, rows));
  }
  std::unique_ptr<Work> do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                          ReduceOp op) override {
    const TracePause quiet;
    compare(Call::of(Collective::reduce_scatter, sequence_++, x, op).with(rows), x.device());
    return forward(inner_->start_reduce_scatter(x, rows, op));
  }
  std::unique_ptr<Work> do_all_to_all(const at::Tensor& x, const Rows& send,
                                      const Rows& recv) override {
    const TracePause quiet;
    const Call call = Call::of(Collective::all_to_all, sequence_++, x);
    compare(call, x.device());
    compare_counts(call, send, recv, x.device());
    return forward(inner_->start_all_to_all(x, send, recv));
  }
  std::unique_ptr<Work> do_broadcast(const at::Tensor& x, int root) override {
    const TracePause quiet;
    compare(Call::of(Collective::broadcast, sequence_++, x, ReduceOp::sum, root), x.device());
    return forward(inner_->start_broadcast(x, root));
  }
  void do_barrier() override {
    const TracePause quiet;
    Call call;
    call.sequence = sequence_++;
    compare(call, control_device());
    inner_->barrier();
  }
  void do_open_channels(const std::vector<Channel>& channels) override {
    inner_->open_channels(channels);
  }
  // What is sent is compared with what is expected by the group below, without which a start would
  // wait for its peer.
  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& m) override {
    const TracePause quiet;
    return forward(inner_->start_send(x, m.peer, m.label));
  }
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message& m) override {
    const TracePause quiet;
    return forward(inner_->start_recv(sizes, options, m.peer, m.label));
  }
  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index,
                                  const std::string& name) override {
    const TracePause quiet;
    auto group = inner_->split(members.empty() ? -1 : index, rank, name);
    return group && group->size() > 1 ? checked(group) : group;
  }

  static std::unique_ptr<Work> forward(Handle handle) {
    return std::make_unique<InnerWork>(std::move(handle));
  }

  // [size, words]: the words of every rank, on the host.
  at::Tensor gather(const std::vector<std::int64_t>& words, const at::Device& device) {
    const TracePause quiet;
    const auto n = static_cast<std::int64_t>(words.size());
    return inner_->all_gather(at::tensor(words, at::kLong).reshape({1, n}).to(device)).cpu();
  }

  void compare(const Call& call, const at::Device& device) {
    std::vector<std::int64_t> words(kHeaderSize);
    std::memcpy(words.data(), &call, sizeof(Call));
    const at::Tensor all = gather(words, device);
    std::vector<Call> calls(static_cast<size_t>(size()));
    std::memcpy(static_cast<void*>(calls.data()), all.const_data_ptr(), all.nbytes());
    const std::string verdict = disagreement(calls, members(), name());
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
  }

  // What rank i sends to rank j must be what j expects from i.
  void compare_counts(const Call& call, const Rows& send, const Rows& recv,
                      const at::Device& device) {
    std::vector<std::int64_t> words(send);
    words.insert(words.end(), recv.begin(), recv.end());
    const at::Tensor all = gather(words, device);
    const auto* p = all.const_data_ptr<std::int64_t>();
    const int n = size();
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        const auto sent = p[i * 2 * n + j], expected = p[j * 2 * n + n + i];
        MOESH_CHECK(sent == expected, ErrorKind::comm, "in ", call.describe(), ", operation ",
                    call.sequence, " of group '", name(), "', rank ",
                    members()[static_cast<size_t>(i)], " sends ", sent, " rows to rank ",
                    members()[static_cast<size_t>(j)], ", which expects ", expected);
      }
  }

  std::shared_ptr<Group> inner_;
  std::int64_t sequence_ = 0;
};

}  // namespace

std::shared_ptr<Group> checked(std::shared_ptr<Group> inner) {
  if (inner->size() == 1) return inner;
  return std::make_shared<CheckedGroup>(std::move(inner));
}

}  // namespace moesh::comm
