#pragma once
// The base of threads, mpi and tcp: every collective is one or two exchanges of spans between all
// ranks, and reductions sum in rank order, so that results have the same bits on both backends, in
// every run.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::comm {

/// One collective as a rank calls it. Plain bytes: it is compared over the ranks, and is the header
/// of an MPI message.
struct Call {
  std::int64_t sequence = 0;  // number of the operation in its group
  std::int32_t phase = 0;     // a large all_reduce is two exchanges
  Collective op = Collective::barrier;
  ReduceOp reduce = ReduceOp::sum;
  std::int8_t dtype = 0;
  std::int8_t num_dims = 0;
  std::int16_t root = 0;  // of a message: the world rank of the other end
  std::int64_t dims[8] = {};
  std::uint64_t rows = 0;  // a hash of the rows per rank, where all ranks must pass the same; of a
                           // message: the label

  static Call of(Collective op, std::int64_t sequence, const at::Tensor& x,
                 ReduceOp reduce = ReduceOp::sum, int root = 0);
  /// One end of message `number` of a channel.
  static Call message(Collective op, std::int64_t number, at::ScalarType dtype,
                      at::IntArrayRef sizes, int peer, std::int64_t label);
  bool is_message() const { return op == Collective::send || op == Collective::recv; }
  /// The same call with the rows of each rank (all_gather, reduce_scatter).
  Call with(const Rows& list) const;
  /// The same operation on tensors that fit: dimension 0 of gathers and all_to_all may differ.
  bool agrees_with(const Call& other) const;
  /// "all_reduce(sum, float32 [3, 4])", "recv(float32 [3, 4] from rank 1)"
  std::string describe() const;
  /// "operation 7 of group 'tp'", "message 7 of group 'pp'": of those from one rank to another.
  std::string place(const std::string& group) const;
};

/// The verdict over the two ends of a message: empty if they agree. Ranks are those of the world.
std::string disagreement(const Call& send, const Call& recv, const std::string& group);

/// The verdict over the calls of all ranks: empty if they agree, else which rank is out of step,
/// and with what.
std::string disagreement(const std::vector<Call>& calls, const std::vector<int>& world_ranks,
                         const std::string& group);

/// Contiguous elements of a call's dtype and device.
struct Span {
  void* data = nullptr;
  std::int64_t numel = 0;
};
inline Span whole(const at::Tensor& x) { return {x.data_ptr(), x.numel()}; }
/// Consecutive parts of x, one a rank: its rows.
std::vector<Span> parts(const at::Tensor& x, const Rows& rows);
std::int64_t total(const Rows& rows);
/// The sizes of x with other rows.
std::vector<std::int64_t> sizes_with(const at::Tensor& x, std::int64_t rows);

/// One rank's part in an exchange. send[j] goes to rank j, recv[j] elements come from it.
/// If `into` is not empty, a backend that receives messages puts them there; one that reads peers'
/// memory leaves the copy to the caller.
struct Post {
  Call call;
  std::vector<Span> send;
  std::vector<std::int64_t> recv;
  std::vector<Span> into;
  std::vector<at::Tensor> keep;  // owners of the memory behind the spans
  at::TensorOptions options;
  bool wait_for_readers = true;  // false: what is sent is not written after `close`, so peers may
                                 // still be reading it then
};

/// An exchange in progress.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Blocks until every rank has posted; element j is what rank j sent here. Valid until `close`.
  virtual std::vector<Span> receive() = 0;
  /// Reads what was received, by f, at once or on the queue of a device.
  virtual void run(const std::function<void()>& f) { f(); }
  /// This rank has read what it received. Blocks until every rank has read what this rank sent, if
  /// the post says so.
  virtual void close() = 0;
};

class HostGroup : public Group {
 protected:
  using Group::Group;
  /// Makes the post visible to the peers and returns at once.
  virtual std::unique_ptr<Exchange> post(Post post) = 0;

  std::unique_ptr<Work> do_all_reduce(const at::Tensor& x, ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(const at::Tensor& x, const Rows& rows) override;
  std::unique_ptr<Work> do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_to_all(const at::Tensor& x, const Rows& send,
                                      const Rows& recv) override;
  std::unique_ptr<Work> do_broadcast(const at::Tensor& x, int root) override;
  void do_barrier() override;

  /// This rank's end of a message, as it is compared with the other end.
  Call call_of(Collective op, at::ScalarType dtype, at::IntArrayRef sizes, const Message& m) const;

  /// The number of the latest operation.
  std::int64_t last_sequence() const { return sequence_ - 1; }

 private:
  friend class AllReduceWork;
  /// Each span that comes has its place in `out`. Peers read `mine`; undefined: nothing.
  std::unique_ptr<Work> start_copy(const Call& call, std::vector<Span> send, std::vector<Span> into,
                                   const at::Tensor& mine, const at::Tensor& out);
  /// The spans that come are summed into `out`.
  std::unique_ptr<Work> start_fold(const Call& call, std::vector<Span> send, const at::Tensor& mine,
                                   const at::Tensor& out, ReduceOp op);
  std::int64_t next_sequence() { return sequence_++; }
  std::int64_t sequence_ = 0;
};

/// out[i] = spans[0][i] op spans[1][i] op ...: in this order, bfloat16 in float32 and rounded
/// once. NaN wins.
void fold(ReduceOp op, const std::vector<Span>& spans, Span out, const at::TensorOptions& options);

/// Copies a span on its device.
void copy(Span to, Span from, const at::TensorOptions& options);

/// Like at::empty; large tensors on the host come from memory that was used before, where there is
/// some. The system hands out large blocks page by page, zeroed, and takes them back at once: for a
/// result of some megabytes that costs as much as the copy into it, and more above 32 MiB.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace moesh::comm
