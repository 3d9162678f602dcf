#include "moesh/comm/mpi/world.h"

#include <ATen/ops/empty.h>

namespace moesh::comm::mpi {
namespace {

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

}  // namespace

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

}  // namespace moesh::comm::mpi
