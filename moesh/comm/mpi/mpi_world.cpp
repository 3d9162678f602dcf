#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/mpi/world.h"

namespace moesh::comm {
namespace {

using namespace mpi;

// All memory that MPI reads and writes in one exchange.
struct Transfer {
  explicit Transfer(Post p)
      : post(std::move(p)),
        sent(post.send.size()),
        received(post.send.size()),
        landing(post.send.size()) {}
  bool active() const { return headers.active() || spans.active() || sends.active(); }

  Post post;
  std::vector<Header> sent, received;
  std::vector<Span> landing;  // where spans arrive, in host memory
  std::vector<at::Tensor>
      buffers;  // its memory, where it is not the caller's, and staged copies of what is sent
  Requests headers, spans, sends;
};

at::Tensor view(Span span, const at::TensorOptions& options) {
  return at::from_blob(span.data, {span.numel}, options);
}

class MpiExchange final : public Exchange {
 public:
  MpiExchange(std::shared_ptr<MpiWorld> world, std::shared_ptr<const GroupInfo> group, Post post)
      : world_(std::move(world)),
        group_(std::move(group)),
        transfer_(new Transfer(std::move(post))) {
    check_usable(*world_, *group_, call());
    const auto outgoing = staged(transfer_->post.send);
    // Round the group, so that ranks do not all send to the same peer at once.
    for (int k = 1; k < size(); ++k) receive_header((group_->rank + size() - k) % size());
    for (int k = 1; k < size(); ++k) send((group_->rank + k) % size(), outgoing);
  }

  std::vector<Span> receive() override {
    Transfer& t = *transfer_;
    t.received[static_cast<size_t>(group_->rank)] = {
        call(), t.post.send[static_cast<size_t>(group_->rank)].numel, 0};
    world_->wait(t.headers, call(), *group_, "");
    std::vector<Call> calls;
    for (const auto& h : t.received) calls.push_back(h.call);
    const std::string verdict = disagreement(calls, group_->members, group_->name);
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
    for (size_t j = 0; j < t.received.size(); ++j)
      check_count(t.received[j].numel, t.post.recv[j], call(), group_->name, group_->members[j],
                  group_->world_rank());
    // Only now is it certain that the spans fit: Open MPI 4 writes beyond the end of a receive
    // that is too short.
    for (int k = 1; k < size(); ++k) receive_block((group_->rank + size() - k) % size());
    world_->wait(t.spans, call(), *group_, "");
    return on_device();
  }

  void close() override { world_->wait(transfer_->sends, call(), *group_, "the end of "); }

 private:
  const Call& call() const { return transfer_->post.call; }
  int size() const { return static_cast<int>(group_->members.size()); }
  bool is_staged() const { return !transfer_->post.options.device().is_cpu(); }
  std::int64_t item_bytes() const {
    return static_cast<std::int64_t>(transfer_->post.options.dtype().itemsize());
  }

  // Spans on an accelerator are sent from copies in host memory; a span that goes to several
  // ranks is copied once.
  std::vector<Span> staged(const std::vector<Span>& spans) {
    if (!is_staged()) return spans;
    std::map<std::pair<void*, std::int64_t>, void*> copies;
    std::vector<Span> host = spans;
    for (int j = 0; j < size(); ++j) {
      Span& b = host[static_cast<size_t>(j)];
      if (j == group_->rank || b.numel == 0) continue;
      void*& copy = copies[{b.data, b.numel}];
      if (!copy)
        copy = transfer_->buffers.emplace_back(view(b, transfer_->post.options).cpu()).data_ptr();
      b.data = copy;
    }
    return host;
  }

  void receive_header(int peer) {
    const auto j = static_cast<size_t>(peer);
    const int from = group_->members[j];
    check_mpi(MPI_Irecv(&transfer_->received[j], sizeof(Header), MPI_BYTE, world_->process_of(from),
                        world_->header_tag(group_->context, from, group_->world_rank(), call()),
                        world_->comm(), transfer_->headers.add(peer)),
              "MPI_Irecv");
  }

  void receive_block(int peer) {
    Transfer& t = *transfer_;
    const auto j = static_cast<size_t>(peer);
    const int process = world_->process_of(group_->members[j]);
    if (!is_staged() && !t.post.into.empty()) {
      t.landing[j] = t.post.into[j];
    } else if (t.post.recv[j] > 0) {
      const auto& buffer =
          t.buffers.emplace_back(at::empty({t.post.recv[j]}, t.post.options.device(at::kCPU)));
      t.landing[j] = {buffer.data_ptr(), t.post.recv[j]};
    }
    for_pieces(t.landing[j].data, t.landing[j].numel * item_bytes(), [&](void* data, int bytes) {
      check_mpi(MPI_Irecv(data, bytes, MPI_BYTE, process, static_cast<int>(t.received[j].tag),
                          world_->comm(), t.spans.add(peer)),
                "MPI_Irecv");
    });
  }

  void send(int peer, const std::vector<Span>& outgoing) {
    Transfer& t = *transfer_;
    const auto j = static_cast<size_t>(peer);
    const int me = group_->world_rank(), to = group_->members[j];
    const int process = world_->process_of(to);
    const int tag = world_->block_tag(me, to, group_->of_rank->num_blocks++);
    t.sent[j] = {call(), outgoing[j].numel, tag};
    check_mpi(MPI_Isend(&t.sent[j], sizeof(Header), MPI_BYTE, process,
                        world_->header_tag(group_->context, me, to, call()), world_->comm(),
                        t.sends.add(peer)),
              "MPI_Isend");
    for_pieces(outgoing[j].data, outgoing[j].numel * item_bytes(), [&](void* data, int bytes) {
      check_mpi(MPI_Isend(data, bytes, MPI_BYTE, process, tag, world_->comm(), t.sends.add(peer)),
                "MPI_Isend");
    });
  }

  // The received data, where the caller's tensors live. The own span was never sent.
  std::vector<Span> on_device() {
    Transfer& t = *transfer_;
    std::vector<Span> spans = t.landing;
    spans[static_cast<size_t>(group_->rank)] = t.post.send[static_cast<size_t>(group_->rank)];
    if (!is_staged()) return spans;
    for (int j = 0; j < size(); ++j) {
      const auto i = static_cast<size_t>(j);
      if (j == group_->rank || spans[i].numel == 0) continue;
      const at::Tensor host = view(t.landing[i], t.post.options.device(at::kCPU));
      if (t.post.into.empty()) {
        spans[i].data = t.buffers.emplace_back(host.to(t.post.options.device())).data_ptr();
      } else {
        view(t.post.into[i], t.post.options).copy_(host);
        spans[i].data = t.post.into[i].data;
      }
    }
    return spans;
  }

  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> group_;
  const Buffers<Transfer> transfer_;
};

// Messages between two ranks: a header, and then what it describes.

// All memory that MPI reads in one send.
struct Outgoing {
  Header header;
  at::Tensor host;  // what is sent, in host memory
  Requests requests;
  bool active() const { return requests.active(); }
};

class SendWork final : public Work {
 public:
  SendWork(std::shared_ptr<MpiWorld> world, std::shared_ptr<const GroupInfo> group,
           Buffers<Outgoing> outgoing, at::Tensor x)
      : world_(std::move(world)),
        group_(std::move(group)),
        outgoing_(std::move(outgoing)),
        x_(std::move(x)) {}
  at::Tensor wait() override {
    world_->wait(outgoing_->requests, outgoing_->header.call, *group_, "");
    return x_;
  }

 private:
  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> group_;
  Buffers<Outgoing> outgoing_;
  at::Tensor x_;
};

// All memory that MPI writes in one receive.
class Incoming final : public MpiArrival {
 public:
  Incoming(const MpiWorld& world, const GroupInfo& group, int peer, const Call& call,
           const at::Tensor& host)
      : comm_(world.comm()),
        group_(group.name),
        peer_(peer),
        process_(world.process_of(call.root)),
        call_(call),
        host_(host) {
    const int tag = world.header_tag(group.context, call.root, group.world_rank(), call);
    check_mpi(
        MPI_Irecv(&header_, sizeof(Header), MPI_BYTE, process_, tag, comm_, requests_.add(peer)),
        "MPI_Irecv");
  }

  // Only when the header says that it fits is the rest received: Open MPI 4 writes beyond the end
  // of a receive that is too short. Any thread of the rank comes here: what fails is for the one
  // that waits for this message.
  bool advance() override {
    if (is_over_) return true;
    try {
      if (!requests_.test()) return false;
      if (!has_header_) {
        has_header_ = true;
        verdict_ = disagreement(header_.call, call_, group_);
        if (verdict_.empty()) receive_all();
      }
      is_over_ = requests_.test();
    } catch (const std::exception& e) {
      verdict_ = e.what();
      is_over_ = true;
    }
    return is_over_;
  }

  bool active() const { return requests_.active(); }
  bool is_over() const { return is_over_; }
  const std::string& verdict() const { return verdict_; }
  const at::Tensor& host() const { return host_; }

 private:
  void receive_all() {
    for_pieces(host_.data_ptr(), static_cast<std::int64_t>(host_.nbytes()),
               [&](void* data, int bytes) {
                 check_mpi(MPI_Irecv(data, bytes, MPI_BYTE, process_, static_cast<int>(header_.tag),
                                     comm_, requests_.add(peer_)),
                           "MPI_Irecv");
               });
  }

  MPI_Comm comm_;
  std::string group_;
  int peer_, process_;
  Call call_;
  at::Tensor host_;
  Header header_;
  Requests requests_;
  bool has_header_ = false, is_over_ = false;
  std::string verdict_;
};

class RecvWork final : public Work {
 public:
  RecvWork(std::shared_ptr<MpiWorld> world, std::shared_ptr<const GroupInfo> group,
           std::shared_ptr<Incoming> incoming, const Call& call, at::Tensor out)
      : world_(std::move(world)),
        group_(std::move(group)),
        incoming_(std::move(incoming)),
        call_(call),
        out_(std::move(out)) {}
  at::Tensor wait() override {
    const auto is_over = [&] {
      const std::lock_guard lock(group_->of_rank->mutex);
      return incoming_->is_over();
    };
    world_->wait(is_over, [&] { return std::vector<int>{call_.root}; }, call_, *group_, "");
    MOESH_CHECK(incoming_->verdict().empty(), ErrorKind::comm, incoming_->verdict());
    if (!out_.is_cpu()) out_.copy_(incoming_->host());
    return out_;
  }

 private:
  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> group_;
  std::shared_ptr<Incoming> incoming_;
  Call call_;
  at::Tensor out_;
};

std::unique_ptr<Work> send_message(std::shared_ptr<MpiWorld> world,
                                   std::shared_ptr<const GroupInfo> group, int peer,
                                   const Call& call, const at::Tensor& x) {
  check_usable(*world, *group, call);
  const int me = group->world_rank(), to = call.root;
  const int process = world->process_of(to);
  const int tag = world->block_tag(me, to, group->of_rank->num_blocks++);
  Buffers<Outgoing> out(new Outgoing{{call, x.numel(), tag}, x.cpu(), {}});
  check_mpi(MPI_Isend(&out->header, sizeof(Header), MPI_BYTE, process,
                      world->header_tag(group->context, me, to, call), world->comm(),
                      out->requests.add(peer)),
            "MPI_Isend");
  for_pieces(
      out->host.data_ptr(), static_cast<std::int64_t>(x.nbytes()), [&](void* data, int bytes) {
        check_mpi(
            MPI_Isend(data, bytes, MPI_BYTE, process, tag, world->comm(), out->requests.add(peer)),
            "MPI_Isend");
      });
  return std::make_unique<SendWork>(std::move(world), std::move(group), std::move(out), x);
}

std::unique_ptr<Work> receive_message(std::shared_ptr<MpiWorld> world,
                                      std::shared_ptr<const GroupInfo> group, int peer,
                                      const Call& call, const at::Tensor& out) {
  check_usable(*world, *group, call);
  const at::Tensor host =
      out.is_cpu() ? out : at::empty(out.sizes(), out.options().device(at::kCPU));
  std::shared_ptr<Incoming> incoming;
  {
    const std::lock_guard lock(group->of_rank->mutex);
    incoming =
        std::shared_ptr<Incoming>(new Incoming(*world, *group, peer, call, host), BuryIfActive{});
    group->of_rank->arriving.push_back(incoming);
  }
  return std::make_unique<RecvWork>(std::move(world), std::move(group), std::move(incoming), call,
                                    out);
}

class MpiGroup final : public HostGroup {
 public:
  MpiGroup(std::shared_ptr<MpiWorld> world, GroupInfo info)
      : HostGroup(info.name, info.rank, info.members),
        world_(std::move(world)),
        info_(std::make_shared<GroupInfo>(std::move(info))) {}

 private:
  std::unique_ptr<Exchange> post(Post post) override {
    return std::make_unique<MpiExchange>(world_, info_, std::move(post));
  }

  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& m) override {
    const Call call = call_of(Collective::send, x.scalar_type(), x.sizes(), m);
    return send_message(world_, info_, m.peer, call, x);
  }
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message& m) override {
    const at::Tensor out = empty_result(sizes, options);
    const Call call = call_of(Collective::recv, out.scalar_type(), sizes, m);
    return receive_message(world_, info_, m.peer, call, out);
  }

  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int,
                                  const std::string& name) override {
    // The groups of one split have no common member, so one context serves them all: one that no
    // rank of this group has used in any group.
    const int context = highest(info_->of_rank->next_context);
    MOESH_CHECK(context <= world_->max_context(), ErrorKind::comm, "split of group '", this->name(),
                "' would make group number ", context,
                " of this world, and MPI's tags leave room for ", world_->max_context(),
                ": keep groups and use them again");
    info_->of_rank->next_context = context + 1;
    if (members.size() <= 1) return nullptr;
    return std::make_shared<MpiGroup>(world_, GroupInfo{.name = name,
                                                        .members = world_ranks(members),
                                                        .rank = rank,
                                                        .context = context,
                                                        .of_rank = info_->of_rank});
  }

  // The largest value over the ranks. It is a part of the operation before it, the gather of colors
  // and keys.
  int highest(std::int64_t value) {
    const auto n = static_cast<size_t>(size());
    const at::Tensor mine = at::full({1}, value, at::kLong);
    Call call;
    call.op = Collective::split;
    call.sequence = last_sequence();
    call.phase = 1;
    call.dtype = static_cast<std::int8_t>(at::kLong);
    auto exchange = post({.call = call,
                          .send = std::vector<Span>(n, Span{mine.data_ptr(), 1}),
                          .recv = std::vector<std::int64_t>(n, 1),
                          .into = {},
                          .keep = {mine},
                          .options = mine.options()});
    std::int64_t most = value;
    for (const auto& b : exchange->receive())
      most = std::max(most, *static_cast<const std::int64_t*>(b.data));
    exchange->close();
    return static_cast<int>(most);
  }

  std::shared_ptr<MpiWorld> world_;
  std::shared_ptr<const GroupInfo> info_;
};

std::shared_ptr<Group> world_group(const std::shared_ptr<MpiWorld>& world, int rank) {
  GroupInfo info{.name = "world",
                 .members = std::vector<int>(static_cast<size_t>(world->num_ranks())),
                 .rank = rank,
                 .context = kWorldContext};
  std::iota(info.members.begin(), info.members.end(), 0);
  return std::make_shared<MpiGroup>(world, std::move(info));
}

}  // namespace

void launch_mpi(int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options) {
  Process& process = Process::instance(options.timeout);
  std::unique_lock running(process.running, std::try_to_lock);
  MOESH_CHECK(running.owns_lock(), ErrorKind::config,
              "launch inside launch: under MPI a process runs one world at a time");
  MOESH_CHECK(!process.unusable, ErrorKind::comm,
              "the start of an earlier world was given up half-way: start the processes again");
  const int size = process.size();
  if (num_ranks == 0) num_ranks = size;
  MOESH_CHECK(
      num_ranks > 0 && num_ranks % size == 0, ErrorKind::config, "launch of ", num_ranks,
      " ranks on ", size,
      " MPI processes: each process runs the same number of ranks, so use 0 (one rank a process), ",
      size, ", ", 2 * size, ", ..., or start another number of processes");
  ++process.num_launches;
  process.ended_well = false;
  const auto world = std::make_shared<MpiWorld>(process, num_ranks, options.timeout);
  run_rank_threads(
      {.first = world->first_rank(),
       .count = world->per_process(),
       .num_on_machine = process.num_on_machine() * world->per_process(),
       .group = [&](int rank) { return world_group(world, rank); },
       .leave = [&](int rank, std::exception_ptr fault) { world->leave(rank, fault); }},
      f, options);
  world->finish();
  process.ended_well = true;
}

}  // namespace moesh::comm
