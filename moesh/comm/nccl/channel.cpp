#include "moesh/comm/nccl/world.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "moesh/base/error.h"
#include "moesh/base/log.h"

namespace moesh::comm {
namespace {

at::Tensor words_of(const Call& call) {
  static_assert(sizeof(Call) % sizeof(std::int64_t) == 0, "a call travels as whole int64 words");
  const at::Tensor words = at::empty({sizeof(Call) / sizeof(std::int64_t)}, at::kLong);
  std::memcpy(words.data_ptr(), &call, sizeof(Call));
  return words;
}

// Rank 0 of the communicator sends and rank 1 receives. Nothing is sent as nothing.
NcclWorld::Issue move(const Call& call, const at::Tensor& x, NcclType type) {
  return [data = x.data_ptr(), count = static_cast<std::size_t>(x.numel()), type,
          is_send = call.op == Collective::send](const NcclApi& api, NcclComm comm, void* stream) {
    if (count == 0) return NcclResult::success;
    return is_send ? api.send(data, count, type, 1, comm, stream)
                   : api.recv(data, count, type, 0, comm, stream);
  };
}

}  // namespace

NcclChannel::NcclChannel(NcclWorld& world, NcclComm comm,
                         std::shared_ptr<const NcclGroupInfo> group)
    : world_(world),
      comm_(comm),
      group_(std::move(group)),
      stream_(world.new_stream()),
      thread_([this] { work(); }) {}

NcclChannel::~NcclChannel() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<NcclTicket> NcclChannel::enqueue(const Call& call, const at::Tensor& x,
                                                 NcclType type) {
  const c10::DeviceGuard guard(world_.device());
  world_.throw_if_stopped();
  ChannelCall job{.ticket = world_.new_ticket(comm_, call, group_, {x}), .x = x, .type = type};
  if (world_.blocks_host()) job.header = words_of(call).to(world_.device());
  job.origin = stream_->here();
  auto ticket = job.ticket;
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
  return ticket;
}

void NcclChannel::run(const ChannelCall& job) {
  if (job.header.defined()) check_header(job);
  world_.issue(*stream_, *job.ticket, *job.origin, move(job.ticket->call, job.x, job.type));
}

// The sender's call comes before what it sends.
void NcclChannel::check_header(const ChannelCall& job) {
  const Call& call = job.ticket->call;
  const auto ticket = world_.new_ticket(comm_, call, group_, {job.header}, job.ticket);
  world_.issue(*stream_, *ticket, *job.origin, move(call, job.header, NcclType::int64));
  world_.finish(*ticket);
  if (call.op == Collective::send) return;
  const at::Tensor words = job.header.cpu();
  Call theirs;
  std::memcpy(static_cast<void*>(&theirs), words.const_data_ptr(), sizeof(Call));
  const std::string verdict = disagreement(theirs, call, group_->name);
  MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
}

void NcclChannel::work() {
  set_log_rank(world_.rank());
  const c10::DeviceGuard guard(world_.device());
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const ChannelCall job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    try {
      run(job);
    } catch (const std::exception& e) {
      world_.stop(e.what());  // thrown where the ticket is waited for
    }
    lock.lock();
  }
}

}  // namespace moesh::comm
