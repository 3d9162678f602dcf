#include "moesh/comm/nccl/nccl_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/comm/nccl/world.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/rank_status.h"

namespace moesh::comm {
namespace {

constexpr std::int64_t kIdWords = sizeof(NcclUniqueId) / sizeof(std::int64_t);

NcclType type_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble: return NcclType::float64;
    case at::kFloat: return NcclType::float32;
    case at::kBFloat16: return NcclType::bfloat16;
    case at::kLong: return NcclType::int64;
    case at::kInt: return NcclType::int32;
    case at::kBool: return NcclType::uint8;  // 0 and 1: max is any, min is all
    default: throw Error(ErrorKind::internal, "NCCL has no type for this dtype");
  }
}

NcclReduce reduce_of(ReduceOp op) {
  return op == ReduceOp::sum   ? NcclReduce::sum
         : op == ReduceOp::max ? NcclReduce::max
                               : NcclReduce::min;
}

bool is_even(const Rows& rows) {
  return std::all_of(rows.begin(), rows.end(), [&](auto r) { return r == rows[0]; });
}

// send[j] goes to rank j and recv[j] comes from it, all at once. Empty parts are left out on both
// sides.
NcclResult exchange(const NcclApi& api, NcclComm comm, void* stream, NcclType type,
                    const std::vector<Span>& send, const std::vector<Span>& recv) {
  NcclResult result = api.group_start();
  auto keep_first_error = [&](NcclResult r) {
    if (result == NcclResult::success && r != NcclResult::in_progress) result = r;
  };
  for (size_t j = 0; j < send.size(); ++j) {
    const int peer = static_cast<int>(j);
    if (send[j].numel)
      keep_first_error(
          api.send(send[j].data, static_cast<size_t>(send[j].numel), type, peer, comm, stream));
    if (recv[j].numel)
      keep_first_error(
          api.recv(recv[j].data, static_cast<size_t>(recv[j].numel), type, peer, comm, stream));
  }
  const NcclResult end = api.group_end();
  return result == NcclResult::success ? end : result;
}

at::Tensor words_of(const NcclUniqueId& id, at::Device device) {
  const at::Tensor words = at::empty({1, kIdWords}, at::kLong);
  std::memcpy(words.data_ptr(), &id, sizeof(id));
  return words.to(device);
}

NcclUniqueId id_of(const at::Tensor& words) {
  NcclUniqueId id;
  const at::Tensor host = words.cpu().contiguous();
  std::memcpy(&id, host.const_data_ptr(), sizeof(id));
  return id;
}

class NcclGroup final : public Group {
 public:
  /// `host` is the same ranks on the host, only in the world group.
  NcclGroup(std::shared_ptr<NcclWorld> world, NcclComm comm,
            std::shared_ptr<const NcclGroupInfo> info, int rank, std::shared_ptr<Group> host = {})
      : Group(info->name, rank, info->members),
        world_(std::move(world)),
        comm_(comm),
        info_(std::move(info)),
        host_(std::move(host)) {}

  at::Device control_device() const override { return world_->device(); }
  bool meets_on_host() const override { return false; }

  NcclWorld& world() { return *world_; }

 private:
  // A second thread cannot use NCCL: the rank has one stream, and the order of the calls on it must
  // be that of every other rank.
  std::shared_ptr<Group> do_background(const std::string& name) override {
    MOESH_CHECK(host_, "background of group '", this->name(), "': only the world has one");
    return host_->background(name);
  }
  std::unique_ptr<Work> do_all_reduce(const at::Tensor& x, ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(const at::Tensor& x, const Rows& rows) override;
  std::unique_ptr<Work> do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_to_all(const at::Tensor& x, const Rows& send,
                                      const Rows& recv) override;
  std::unique_ptr<Work> do_broadcast(const at::Tensor& x, int root) override;
  void do_barrier() override;
  void do_open_channels(const std::vector<Channel>& channels) override;
  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& m) override;
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message& m) override;
  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index,
                                  const std::string& name) override;

  void check_device(Collective op, const at::Tensor& x) const;
  std::unique_ptr<Work> message(Collective op, const at::Tensor& x, const Message& m);
  // Checks where x lives, and counts the operation.
  Call call(Collective op, const at::Tensor& x, ReduceOp reduce = ReduceOp::sum, int root = 0);
  std::unique_ptr<Work> start(const Call& call, const at::Tensor& x, const at::Tensor& out,
                              const NcclWorld::Issue& issue);

  std::shared_ptr<NcclWorld> world_;
  NcclComm comm_;
  std::shared_ptr<const NcclGroupInfo> info_;
  std::shared_ptr<Group> host_;
  std::int64_t sequence_ = 0;
  std::map<Channel, NcclChannel*> channels_;  // that begin or end here
};

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclWorld> world, std::shared_ptr<NcclTicket> ticket, at::Tensor out)
      : world_(std::move(world)), ticket_(std::move(ticket)), out_(std::move(out)) {}
  at::Tensor wait() override {
    world_->wait(*ticket_);
    return out_;
  }

 private:
  std::shared_ptr<NcclWorld> world_;
  std::shared_ptr<NcclTicket> ticket_;
  at::Tensor out_;
};

void NcclGroup::check_device(Collective op, const at::Tensor& x) const {
  MOESH_CHECK(x.device() == world_->device(), ErrorKind::comm, to_string(op), " on group '", name(),
              "': the tensor is on ", x.device(), ", and this NCCL group works on ",
              world_->device(),
              "; move it there (x.to(group.control_device())), or use backend host");
}

Call NcclGroup::call(Collective op, const at::Tensor& x, ReduceOp reduce, int root) {
  check_device(op, x);
  return Call::of(op, sequence_++, x, reduce, root);
}

std::unique_ptr<Work> NcclGroup::start(const Call& call, const at::Tensor& x, const at::Tensor& out,
                                       const NcclWorld::Issue& issue) {
  // Detached: what is kept is memory, not a graph.
  return std::make_unique<NcclWork>(
      world_, world_->enqueue(comm_, call, info_, {x.detach(), out}, issue), out);
}

std::unique_ptr<Work> NcclGroup::do_all_reduce(const at::Tensor& x, ReduceOp op) {
  const Call c = call(Collective::all_reduce, x, op);
  const at::Tensor out = at::empty_like(x);
  return start(c, x, out, [&](const NcclApi& api, NcclComm comm, void* stream) {
    if (x.numel() == 0) return NcclResult::success;
    return api.all_reduce(x.const_data_ptr(), out.data_ptr(), static_cast<size_t>(x.numel()),
                          type_of(x), reduce_of(op), comm, stream);
  });
}

std::unique_ptr<Work> NcclGroup::do_all_gather(const at::Tensor& x, const Rows& rows) {
  const Call c = call(Collective::all_gather, x);
  const at::Tensor out = at::empty(sizes_with(x, total(rows)), x.options());
  return start(c, x, out, [&](const NcclApi& api, NcclComm comm, void* stream) {
    if (out.numel() == 0) return NcclResult::success;
    if (is_even(rows))
      return api.all_gather(x.const_data_ptr(), out.data_ptr(), static_cast<size_t>(x.numel()),
                            type_of(x), comm, stream);
    return exchange(api, comm, stream, type_of(x), std::vector<Span>(rows.size(), whole(x)),
                    parts(out, rows));
  });
}

std::unique_ptr<Work> NcclGroup::do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                                   ReduceOp op) {
  const Call c = call(Collective::reduce_scatter, x, op);
  const at::Tensor out = at::empty(sizes_with(x, rows[static_cast<size_t>(rank())]), x.options());
  if (is_even(rows)) {
    return start(c, x, out, [&](const NcclApi& api, NcclComm comm, void* stream) {
      if (out.numel() == 0) return NcclResult::success;
      return api.reduce_scatter(x.const_data_ptr(), out.data_ptr(),
                                static_cast<size_t>(out.numel()), type_of(x), reduce_of(op), comm,
                                stream);
    });
  }
  // NCCL has no uneven one: the term of every rank comes here, and they are summed in rank order.
  const at::Tensor terms = at::empty({size(), out.numel()}, x.options());
  const auto spans = parts(terms, Rows(rows.size(), 1));
  auto ticket = world_->enqueue(
      comm_, c, info_, {x.detach(), out, terms},
      [&](const NcclApi& api, NcclComm comm, void* stream) {
        return exchange(api, comm, stream, type_of(x), parts(x, rows), spans);
      },
      [op, spans, to = whole(out), options = x.options()] { fold(op, spans, to, options); });
  return std::make_unique<NcclWork>(world_, std::move(ticket), out);
}

std::unique_ptr<Work> NcclGroup::do_all_to_all(const at::Tensor& x, const Rows& send,
                                               const Rows& recv) {
  const Call c = call(Collective::all_to_all, x);
  const at::Tensor out = at::empty(sizes_with(x, total(recv)), x.options());
  return start(c, x, out, [&](const NcclApi& api, NcclComm comm, void* stream) {
    return exchange(api, comm, stream, type_of(x), parts(x, send), parts(out, recv));
  });
}

std::unique_ptr<Work> NcclGroup::do_broadcast(const at::Tensor& x, int root) {
  const Call c = call(Collective::broadcast, x, ReduceOp::sum, root);
  const at::Tensor out = at::empty_like(x);
  return start(c, x, out, [&](const NcclApi& api, NcclComm comm, void* stream) {
    if (x.numel() == 0) return NcclResult::success;
    return api.broadcast(x.const_data_ptr(), out.data_ptr(), static_cast<size_t>(x.numel()),
                         type_of(x), root, comm, stream);
  });
}

void NcclGroup::do_barrier() {
  Call c;
  c.sequence = sequence_++;
  const at::Tensor one = at::ones({1}, at::TensorOptions(at::kInt).device(world_->device()));
  const auto ticket =
      world_->enqueue(comm_, c, info_, {one}, [&](const NcclApi& api, NcclComm comm, void* stream) {
        return api.all_reduce(one.const_data_ptr(), one.data_ptr(), 1, NcclType::int32,
                              NcclReduce::max, comm, stream);
      });
  world_->finish(*ticket);
}

// Each channel is a communicator of two ranks, whose id the sender makes. All ranks go through the
// list in the same order, so both ends of the first one that is not there yet always come.
void NcclGroup::do_open_channels(const std::vector<Channel>& channels) {
  std::vector<at::Tensor> mine;
  for (const Channel& c : channels)
    mine.push_back(words_of(c.from == rank() ? world_->new_id() : NcclUniqueId{}, at::kCPU));
  const at::Tensor all = all_gather(at::cat(mine).unsqueeze(0).to(world_->device())).cpu();
  world_->throw_if_stopped();  // else the words may be noise
  for (std::size_t i = 0; i < channels.size(); ++i) {
    const Channel& c = channels[i];
    if (c.from != rank() && c.to != rank()) continue;
    auto ends =
        std::make_shared<const NcclGroupInfo>(NcclGroupInfo{name(), world_ranks({c.from, c.to})});
    NcclComm comm = world_->join(id_of(all[c.from][static_cast<std::int64_t>(i)]),
                                 c.to == rank() ? 1 : 0, ends);
    channels_[c] = &world_->new_channel(comm, std::move(ends));
  }
}

std::unique_ptr<Work> NcclGroup::message(Collective op, const at::Tensor& x, const Message& m) {
  check_device(op, x);
  const Channel channel =
      op == Collective::send ? Channel{rank(), m.peer} : Channel{m.peer, rank()};
  const Call call = Call::message(op, m.number, x.scalar_type(), x.sizes(),
                                  members()[static_cast<std::size_t>(m.peer)], m.label);
  return std::make_unique<NcclWork>(world_, channels_.at(channel)->enqueue(call, x, type_of(x)), x);
}

std::unique_ptr<Work> NcclGroup::do_send(const at::Tensor& x, const Message& m) {
  return message(Collective::send, x, m);
}

std::unique_ptr<Work> NcclGroup::do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                         const Message& m) {
  return message(Collective::recv, at::empty(sizes, options), m);
}

std::shared_ptr<Group> NcclGroup::do_split(const std::vector<int>& members, int rank, int /*index*/,
                                           const std::string& name) {
  // The first member of each new group makes its id, and one all_gather brings all ids to everyone.
  const ObserverPause quiet;
  const bool makes_id = rank == 0 && members.size() > 1;
  const at::Tensor mine = words_of(makes_id ? world_->new_id() : NcclUniqueId{}, world_->device());
  const at::Tensor all = all_gather(mine).cpu();
  world_->throw_if_stopped();  // else the words may be noise
  if (members.size() <= 1) return nullptr;
  auto info = std::make_shared<const NcclGroupInfo>(NcclGroupInfo{name, world_ranks(members)});
  NcclComm comm = world_->join(id_of(all[members[0]]), rank, info);
  return std::make_shared<NcclGroup>(world_, comm, std::move(info), rank);
}

NcclWorld& world_of(Group& group) {
  auto* nccl = dynamic_cast<NcclGroup*>(&group);
  MOESH_CHECK(nccl, "group '", group.name(), "' is not an NCCL group");
  return nccl->world();
}

// A number for the GPU which this process calls `device`: the machine (its name and boot), and the
// entry of CUDA_VISIBLE_DEVICES, by which processes of one machine give different GPUs the same
// index.
std::int64_t gpu_key(at::Device device) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string entry = std::to_string(static_cast<int>(device.index()));
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::istringstream list(visible);
    for (int i = 0; i <= device.index(); ++i)
      if (!std::getline(list, entry, ','))
        entry = detail::concat("?", static_cast<int>(device.index()));
  }
  return static_cast<std::int64_t>(
      std::hash<std::string>{}(detail::concat(host, '/', boot, '/', entry)));
}

}  // namespace

void NcclOptions::validate() const {
  MOESH_CHECK(timeout.count() > 0, ErrorKind::config, "timeout is ", timeout.count(),
              " ms; it must be positive");
}

// All ranks enter the collective and find the same, also where their environments differ.
std::vector<int> ranks_that_share_a_gpu(Group& group, at::Device device, bool may_share) {
  const at::Tensor mine = at::empty({2}, at::kLong);
  auto* values = mine.mutable_data_ptr<std::int64_t>();
  values[0] = gpu_key(existing_device(device)), values[1] = may_share;
  const at::Tensor all = group.all_gather(mine.to(group.control_device())).cpu();
  const auto* p = all.const_data_ptr<std::int64_t>();
  std::vector<int> sharing;
  bool all_may = true;
  std::set<std::int64_t> keys;
  for (int r = 0; r < group.size(); ++r) {
    all_may = all_may && p[2 * r + 1] != 0;
    if (!keys.insert(p[2 * r]).second) sharing.push_back(r);
  }
  return all_may ? std::vector<int>() : sharing;
}

std::shared_ptr<Group> nccl_world(Group& bootstrap, at::Device device, const NcclOptions& options) {
  options.validate();
  const auto api = options.api ? options.api : installed_nccl();
  MOESH_CHECK(device.type() == api->device_type, ErrorKind::config, "an NCCL world on device ",
              device, "; it takes a ", c10::DeviceTypeName(api->device_type, true), " device");
  device = existing_device(device);
  const auto sharing = ranks_that_share_a_gpu(bootstrap, device, api->ranks_may_share_device);
  MOESH_CHECK(
      sharing.empty(), ErrorKind::config, "NCCL takes one rank per GPU, and ranks ", sharing,
      " of group '", bootstrap.name(), "' are on the same GPU as a lower rank (this rank is on ",
      device,
      "); use the host backend (ranks that are threads), which lets them share it, start one rank "
      "per GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 for all ranks (NCCL 2.30 and later)");

  const int rank = bootstrap.rank();
  auto world =
      std::make_shared<NcclWorld>(api, device, bootstrap.members()[static_cast<size_t>(rank)],
                                  options.timeout, options.block_host);
  const at::Tensor mine =
      words_of(rank == 0 ? world->new_id() : NcclUniqueId{}, bootstrap.control_device());
  const NcclUniqueId id = id_of(bootstrap.broadcast(mine, 0));
  auto info =
      std::make_shared<const NcclGroupInfo>(NcclGroupInfo{bootstrap.name(), bootstrap.members()});
  NcclComm comm = world->join(id, rank, info);
  return std::make_shared<NcclGroup>(std::move(world), comm, std::move(info), rank,
                                     bootstrap.background("host"));
}

void close_nccl(Group& group) { world_of(group).close(); }
void stop_nccl(Group& group, const std::string& reason) { world_of(group).stop(reason); }

namespace {

// The worlds of the ranks which are threads of this process: a fault in one of them reaches the
// others at once.
class LocalWorlds {
 public:
  void add(const std::shared_ptr<Group>& world) {
    std::lock_guard lock(mutex_);
    worlds_.push_back(world);
  }
  /// Stops the others, and gives the first fault of all.
  std::exception_ptr fail(int rank, const std::exception_ptr& fault) {
    std::vector<std::weak_ptr<Group>> worlds;
    {
      std::lock_guard lock(mutex_);
      if (first_) return first_;
      first_ = fault;
      worlds = worlds_;
    }
    const std::string reason = detail::concat("rank ", rank, " failed: ", text_of(fault));
    for (const auto& weak : worlds)
      if (const auto world = weak.lock()) stop_nccl(*world, reason);
    return fault;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> worlds_;
  std::exception_ptr first_;
};

}  // namespace

void prepare_cuda() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  try {
    if (num_launched_processes() < 2) return;
  } catch (const Error&) {
    return;  // launch() says what is wrong with the environment; other commands start no ranks
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
}

bool should_try_nccl(int num_ranks, const LaunchOptions& options) {
  if (options.backend == Backend::nccl) return true;
  const int num_processes = num_launched_processes();
  return options.backend == Backend::automatic && options.device.is_cuda() && num_processes > 0 &&
         (num_ranks == 0 || num_ranks == num_processes) && has_nccl();
}

std::function<void(Group&)> on_nccl(std::function<void(Group&)> f, LaunchOptions options,
                                    std::shared_ptr<const NcclApi> api) {
  return [f = std::move(f), options, api = std::move(api),
          local = std::make_shared<LocalWorlds>()](Group& host) {
    // Ranks that are threads of this process take one GPU each.
    const int place = num_launched_processes() > 0 ? local_process() : host.rank();
    const at::Device device = device_for(options.device, place);
    use_device(device);
    const auto& table = api ? api : installed_nccl();
    if (options.backend == Backend::automatic &&
        !ranks_that_share_a_gpu(host, device, table->ranks_may_share_device).empty()) {
      if (options.checked) check_ranks(host);
      return f(host);
    }
    // The `checked` group reads what it gathers: there a fault must show at once.
    const auto world = nccl_world(
        host, device, {.timeout = options.timeout, .block_host = options.checked, .api = table});
    local->add(world);
    if (options.checked) check_ranks(*world);
    try {
      f(*world);
      close_nccl(*world);
    } catch (...) {
      std::rethrow_exception(local->fail(host.rank(), std::current_exception()));
    }
  };
}

}  // namespace moesh::comm
