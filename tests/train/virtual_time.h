#pragma once
// A step in virtual time. Ranks are threads that train; tensors are on the CPU and values are real,
// but each rank has clocks of its own, which nothing moves but messages, and what is computed after
// each message of rows. So the times are those of the order in which ranks send, wait and compute,
// the same on any machine, whatever else it does.
//
// A rank computes on its host, or on a device of its own. It then queues what it would queue on a
// GPU: its host goes on, until it waits for counts of rows or for the hosts of other ranks. Work on
// the device begins when the host has queued it, what is before it in its queue has ended, and what
// it follows has. Which work goes into which queue, and waits there for what, is the product's
// doing: groups of threads with a queue (comm/threads/thread_world.h), links (comm/paced.h), turns
// (base/turns.h), the executor of a pipeline.

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "moesh/base/this_thread.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/paced.h"
#include "moesh/comm/threads/thread_world.h"
#include "moesh/train/build.h"

namespace moesh::train {

/// Seconds.
struct VirtualMachine {
  double compute = 0;  // after a message of rows in forward; twice as long in backward
  bool has_device = false;
  double op = 0;  // of the host, for an operator
  // What the first compute of a thread costs the host, in forward and in backward: LibTorch keeps
  // the plans of cuDNN's attention for each thread.
  double first_forward = 0, first_backward = 0;
};

/// The clocks of all ranks of a world. The host's is that of links, where there is no device.
class VirtualClocks final : public comm::PaceClock {
 public:
  VirtualClocks(int num_ranks, const VirtualMachine& machine)
      : machine_(machine), ranks_(static_cast<std::size_t>(num_ranks)) {
    current = this;
    callback_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&VirtualClocks::begin_op, &VirtualClocks::end_op)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  }
  ~VirtualClocks() override {
    at::removeCallback(callback_);
    current = nullptr;
  }

  /// From now on this rank's times are counted from 0.
  void restart() const { mine() = {}; }
  /// When this rank's host and device are done.
  double end() const { return here().time; }

  void compute() const {
    thread_local std::array<bool, 2> has_computed{};  // forward, backward
    const bool is_backward = !at::GradMode::is_enabled();
    Clocks& c = mine();
    if (!std::exchange(has_computed[is_backward], true))
      c.host += is_backward ? machine_.first_backward : machine_.first_forward;
    const double seconds = is_backward ? 2 * machine_.compute : machine_.compute;
    if (machine_.has_device)
      c.device = here().time + seconds;
    else
      c.host += seconds;
  }

  /// Null where there is no device.
  std::unique_ptr<comm::CommStream> make_queue() {
    return machine_.has_device ? std::make_unique<ReadQueue>(*this) : nullptr;
  }
  std::unique_ptr<comm::DeviceLink> make_link() {
    return machine_.has_device ? std::make_unique<Link>(*this) : nullptr;
  }

  double now() const override { return mine().host; }
  void sleep_until(double time) const override { mine().host = std::max(mine().host, time); }

  /// While it lives, this rank's queue knows what is a message and no collective.
  class KnowMessages final : public comm::ThreadObserver {
   public:
    explicit KnowMessages(VirtualClocks& clocks) : clocks_(clocks) {}
    void called(const comm::Operation& o) override {
      clocks_.mine().is_in_message =
          o.op == comm::Collective::send || o.op == comm::Collective::recv;
    }
    void started(std::int64_t /*number*/) override { clocks_.mine().is_in_message = false; }

   private:
    VirtualClocks& clocks_;
  };

 private:
  // A place in a queue: when the device comes to it, and when the host had queued it.
  struct Point {
    double time = 0, host = 0;
  };
  friend Point later(const Point& a, const Point& b) {
    return {std::max(a.time, b.time), std::max(a.host, b.host)};
  }
  struct Clocks {
    double host = 0;
    double device = 0;  // the end of what is queued to be computed
    Point reads;        // of what is queued to be read from other ranks
    bool is_in_message = false;
  };

  Clocks& mine() const { return ranks_[static_cast<std::size_t>(this_thread.rank)]; }
  // The current stream's end.
  Point here() const { return {std::max(mine().device, mine().host), mine().host}; }

  struct Origin final : comm::StreamOrigin {
    explicit Origin(const Point& p) : point(p) {}
    const Point point;
  };

  // The device waits for the time, and the host for the other hosts that have been met there.
  class PointMark final : public comm::Mark {
   public:
    PointMark(VirtualClocks& clocks, const Point& p) : clocks_(clocks), point_(p) {}
    bool done() const override { return true; }
    void hold_current() override {
      Clocks& c = clocks_.mine();
      c.device = std::max(c.device, point_.time);
      c.host = std::max(c.host, point_.host);
    }

   private:
    VirtualClocks& clocks_;
    const Point point_;
  };

  // Which end of a message comes last, and copies it, depends on the machine: so it is copied
  // beside what else is read.
  class ReadQueue final : public comm::CommStream {
   public:
    explicit ReadQueue(VirtualClocks& clocks) : clocks_(clocks) {}
    void* handle() override { return nullptr; }
    std::shared_ptr<comm::StreamOrigin> here() override {
      message_ = {};
      return std::make_shared<Origin>(clocks_.here());
    }
    void follow(const comm::StreamOrigin& origin) override {
      Point& end = clocks_.mine().is_in_message ? message_ : clocks_.mine().reads;
      end = later(end, dynamic_cast<const Origin&>(origin).point);
    }
    void run(const std::function<void()>& f) override { f(); }
    std::shared_ptr<comm::Mark> mark(const comm::StreamOrigin& /*origin*/) override {
      return mark();
    }
    std::shared_ptr<comm::Mark> mark() override {
      Clocks& c = clocks_.mine();
      if (c.is_in_message) return std::make_shared<PointMark>(clocks_, message_);
      c.reads.host = std::max(c.reads.host, c.host);
      return std::make_shared<PointMark>(clocks_, c.reads);
    }

   private:
    VirtualClocks& clocks_;
    Point message_;
  };

  class Link final : public comm::DeviceLink {
   public:
    explicit Link(VirtualClocks& clocks) : clocks_(clocks) {}
    std::shared_ptr<comm::Mark> carry(double seconds) override {
      free_ = std::max(free_, clocks_.here().time) + seconds;
      return std::make_shared<PointMark>(clocks_, Point{.time = free_});
    }

   private:
    VirtualClocks& clocks_;
    double free_ = 0;
  };

  static std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& f) {
    if (this_thread.rank >= 0 && f.scope() == at::RecordScope::FUNCTION) {
      Clocks& c = current->mine();
      c.host += current->machine_.op;
      c.device = std::max(c.device, c.host);
    }
    return nullptr;
  }
  // A copy of counts to the host waits for what the current stream holds.
  static void end_op(const at::RecordFunction& f, at::ObserverContext* /*context*/) {
    if (this_thread.rank >= 0 && std::string_view(f.name()) == kReadCounts)
      current->mine().host = current->here().time;
  }

  static inline VirtualClocks* current = nullptr;  // callbacks are functions
  const VirtualMachine machine_;
  mutable std::vector<Clocks> ranks_;
  at::CallbackHandle callback_;
};

/// What a rank measured; the time is that of the slowest rank, the bytes of the largest message.
struct VirtualStep {
  double time = 0, loss = 0;
  double message_bytes = 0;   // of a message of rows: their mean
  double transfer_bytes = 0;  // to the next stage
};

/// Computes after each message of rows has come, and counts their bytes.
class ComputeAfterRows final : public comm::ThreadObserver {
 public:
  explicit ComputeAfterRows(const VirtualClocks& clocks) : clocks_(clocks) {}
  void called(const comm::Operation& o) override {
    const auto sent =
        static_cast<double>(comm::sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size()));
    if (o.op == comm::Collective::send) transfer_bytes = sent;
    if (o.op != comm::Collective::all_to_all) return;
    bytes += sent;
    ++num_messages;
    under_way_.insert(o.number);
  }
  void ended(std::int64_t number) override {
    if (under_way_.erase(number) == 1) clocks_.compute();
  }
  double bytes = 0, transfer_bytes = 0;
  std::int64_t num_messages = 0;

 private:
  const VirtualClocks& clocks_;
  std::set<std::int64_t> under_way_;
};

/// The second step: in the first one threads are new.
inline VirtualStep step_in_virtual_time(const Config& config, const VirtualMachine& machine,
                                        const comm::Links& links) {
  VirtualStep result;
  std::mutex mutex;
  comm::LaunchOptions options = launch_options(config);
  options.num_threads = 1;
  const int num_ranks = mesh_shape(config).num_ranks();
  comm::PacedWorld paced(links, 0, num_ranks);
  VirtualClocks clocks(num_ranks, machine);
  const auto world = comm::ThreadWorld::create(num_ranks, options.timeout,
                                               [&](at::Device) { return clocks.make_queue(); });
  const auto train = [&](comm::Group& ranks) {
    const Mesh mesh(ranks, mesh_shape(config));
    const MeshScope scope(mesh);
    const auto model = make_model(config);
    const auto dataset = open_dataset(config);
    const auto batches = step_batches(config, *dataset, mesh, 0);
    const VirtualClocks::KnowMessages messages(clocks);
    {
      const ComputeAfterRows first(clocks);
      accumulate_gradients(*model, batches, step_options(config));
    }
    model->each_param([](Stored& w, bool) { w.value.mutable_grad().reset(); });
    clocks.restart();
    const comm::Pacer pacer(paced, clocks, [&](at::Device) { return clocks.make_link(); });
    const ComputeAfterRows rows(clocks);
    const double loss = accumulate_gradients(*model, batches, step_options(config)).total_loss;
    const std::lock_guard lock(mutex);
    result.time = std::max(result.time, clocks.end());
    result.message_bytes =
        std::max(result.message_bytes, rows.bytes / static_cast<double>(rows.num_messages));
    result.transfer_bytes = std::max(result.transfer_bytes, rows.transfer_bytes);
    result.loss = loss;
  };
  comm::run_rank_threads(
      {.first = 0,
       .count = num_ranks,
       .num_on_machine = num_ranks,
       .group = [&](int rank) { return world->group(rank); },
       .leave = [&](int rank, std::exception_ptr fault) { world->leave(rank, fault); }},
      train, options);
  if (auto fault = world->roll().first_exception()) std::rethrow_exception(fault);
  return result;
}

}  // namespace moesh::train
