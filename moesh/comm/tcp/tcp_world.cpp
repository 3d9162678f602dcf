#include "moesh/comm/tcp/tcp_world.h"

#include <ATen/ops/empty.h>

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm {
namespace {

using Clock = TcpLink::Clock;
using std::chrono::milliseconds;

constexpr milliseconds kLook{20};    // between two looks at which ranks have left
constexpr milliseconds kGrace{100};  // what was sent before bad news may still be on its way
constexpr milliseconds kLinger{2000};
constexpr std::size_t kLeastSecret = 16;  // characters

// One rank's side of one world.
struct World {
  TcpLink& link;
  std::int64_t number;
  milliseconds timeout;
  std::shared_ptr<RankStatus> roll;
};

// A group as its exchanges know it.
struct TcpGroupInfo {
  std::string key;  // the same on every member, and of no other group
  std::string name;
  std::vector<int> members;  // world ranks
  int rank = 0;              // in the group

  int world_rank() const { return members[static_cast<std::size_t>(rank)]; }
};

// The header of each span.
struct SpanHeader {
  Call call;
  std::int64_t numel = 0;
};

// The next frame of a world rank under a key, which begins with a header.
std::vector<char> frame_of(World& world, const TcpGroupInfo& group, int from,
                           const std::string& key, const Call& call, Clock::time_point deadline) {
  auto bad_news = Clock::time_point::max();
  for (;;) {
    const auto now = Clock::now();
    if (auto frame = world.link.take(from, key, now + kLook)) {
      MOESH_CHECK(frame->size() >= sizeof(SpanHeader), ErrorKind::comm, "rank ", from, " has sent ",
                  frame->size(), " bytes");
      return std::move(*frame);
    }
    const std::vector<int> missing{from};
    std::string why = world.roll->reason(missing);
    if (why.empty()) {
      if (now < deadline) continue;
      why = too_late(missing, world.timeout);
    } else {
      bad_news = std::min(bad_news, now);
      if (now < bad_news + kGrace) continue;
    }
    give_up(group.world_rank(), "", call, group.name, why);
  }
}

void check_usable(const World& world, const TcpGroupInfo& group, const Call& call,
                  const at::Device& device) {
  MOESH_CHECK(device.is_cpu(), ErrorKind::comm, call.describe(), " on group '", group.name,
              "': only tensors on the host go over TCP");
  MOESH_CHECK(!world.roll->has_left(group.world_rank()), ErrorKind::comm, call.describe(),
              " on group '", group.name, "', whose world has ended");
}

class TcpExchange final : public Exchange {
 public:
  TcpExchange(std::shared_ptr<World> world, std::shared_ptr<const TcpGroupInfo> group, Post post)
      : world_(std::move(world)), group_(std::move(group)), post_(std::move(post)) {
    check_usable(*world_, *group_, post_.call, post_.options.device());
    for (std::size_t j = 0; j < post_.send.size(); ++j) {
      if (static_cast<int>(j) == group_->rank) continue;
      const SpanHeader header{post_.call, post_.send[j].numel};
      const auto bytes = static_cast<std::size_t>(header.numel) * post_.options.dtype().itemsize();
      world_->link.send(group_->members[j], FrameHeader::data, key(), bytes_of(header),
                        {static_cast<const char*>(post_.send[j].data), bytes});
    }
  }

  std::vector<Span> receive() override {
    const auto n = post_.send.size();
    frames_.resize(n);
    const auto deadline = Clock::now() + world_->timeout;
    for (std::size_t j = 0; j < n; ++j)
      if (static_cast<int>(j) != group_->rank)
        frames_[j] = frame_of(*world_, *group_, group_->members[j], key(), post_.call, deadline);
    std::vector<SpanHeader> headers(n);
    std::vector<Call> calls;
    for (std::size_t j = 0; j < n; ++j) {
      headers[j] = {post_.call, post_.send[j].numel};
      if (static_cast<int>(j) != group_->rank)
        std::memcpy(&headers[j], frames_[j].data(), sizeof(SpanHeader));
      calls.push_back(headers[j].call);
    }
    const std::string verdict = disagreement(calls, group_->members, group_->name);
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
    std::vector<Span> spans(n);
    for (std::size_t j = 0; j < n; ++j) {
      check_count(headers[j].numel, post_.recv[j], post_.call, group_->name, group_->members[j],
                  group_->world_rank());
      spans[j] = static_cast<int>(j) == group_->rank ? post_.send[j] : landed(j);
    }
    return spans;
  }

  void close() override {}  // what is sent was copied

 private:
  // Exchanges of a group are told apart by their numbers.
  std::string key() const {
    return detail::concat(group_->key, "#", post_.call.sequence, ".", post_.call.phase);
  }

  Span landed(std::size_t j) {
    Span span{frames_[j].data() + sizeof(SpanHeader), post_.recv[j]};
    if (post_.into.empty()) return span;
    const auto bytes = static_cast<std::size_t>(span.numel) * post_.options.dtype().itemsize();
    if (bytes > 0) std::memcpy(post_.into[j].data, span.data, bytes);
    return post_.into[j];
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<const TcpGroupInfo> group_;
  Post post_;
  std::vector<std::vector<char>> frames_;  // by rank
};

// A message that comes; one that goes is on its way when it is started.
class TcpRecv final : public Work {
 public:
  TcpRecv(std::shared_ptr<World> world, std::shared_ptr<const TcpGroupInfo> group, std::string key,
          const Call& call, at::Tensor out)
      : world_(std::move(world)),
        group_(std::move(group)),
        key_(std::move(key)),
        call_(call),
        out_(std::move(out)) {}
  at::Tensor wait() override {
    const auto frame =
        frame_of(*world_, *group_, call_.root, key_, call_, Clock::now() + world_->timeout);
    SpanHeader header;
    std::memcpy(static_cast<void*>(&header), frame.data(), sizeof(header));
    const std::string verdict = disagreement(header.call, call_, group_->name);
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
    MOESH_CHECK(frame.size() == sizeof(header) + out_.nbytes(), ErrorKind::comm, "rank ",
                call_.root, " has sent ", frame.size(), " bytes");
    if (out_.nbytes() > 0)
      std::memcpy(out_.data_ptr(), frame.data() + sizeof(header), out_.nbytes());
    return out_;
  }

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<const TcpGroupInfo> group_;
  std::string key_;
  Call call_;
  at::Tensor out_;
};

class FinishedWork final : public Work {
 public:
  explicit FinishedWork(at::Tensor x) : x_(std::move(x)) {}
  at::Tensor wait() override { return x_; }

 private:
  at::Tensor x_;
};

class TcpGroup final : public HostGroup {
 public:
  TcpGroup(std::shared_ptr<World> world, TcpGroupInfo info)
      : HostGroup(info.name, info.rank, info.members),
        world_(std::move(world)),
        info_(std::make_shared<TcpGroupInfo>(std::move(info))) {}

 private:
  std::unique_ptr<Exchange> post(Post post) override {
    return std::make_unique<TcpExchange>(world_, info_, std::move(post));
  }

  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& m) override {
    const SpanHeader header{call_of(Collective::send, x.scalar_type(), x.sizes(), m), x.numel()};
    check_usable(*world_, *info_, header.call, x.device());
    world_->link.send(header.call.root, FrameHeader::data, message_key(m), bytes_of(header),
                      {static_cast<const char*>(x.const_data_ptr()), x.nbytes()});
    return std::make_unique<FinishedWork>(x);
  }
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message& m) override {
    const at::Tensor out = at::empty(sizes, options);
    const Call call = call_of(Collective::recv, out.scalar_type(), sizes, m);
    check_usable(*world_, *info_, call, out.device());
    return std::make_unique<TcpRecv>(world_, info_, message_key(m), call, out);
  }
  // Handles may be waited for in any order: each message has a key of its own.
  std::string message_key(const Message& m) const {
    return detail::concat(info_->key, "@", m.number);
  }

  std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index,
                                  const std::string& name) override {
    if (members.size() <= 1) return nullptr;
    return std::make_shared<TcpGroup>(
        world_, TcpGroupInfo{.key = detail::concat(info_->key, "/", last_sequence(), ".", index),
                             .name = name,
                             .members = world_ranks(members),
                             .rank = rank});
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<const TcpGroupInfo> info_;
};

// Returns when every rank has returned; else throws.
void finish(const World& world) {
  const auto begin = Clock::now();
  for (;; std::this_thread::sleep_for(kLook)) {
    const auto present = world.roll->present();
    if (present.empty()) break;
    const bool failed = !world.roll->first_failure().empty();
    const auto waited = Clock::now() - begin;
    if (failed && waited >= std::min(kLinger, world.timeout)) break;
    MOESH_CHECK(waited < world.timeout, ErrorKind::comm, "rank ", world.link.rank(),
                " has returned, and ", name_ranks(present), " did not within ",
                std::chrono::duration<double>(world.timeout).count(), " s");
  }
  world.roll->rethrow_first();
}

std::string own_secret(const Launcher& launcher) {
  const char* text = std::getenv("MOESH_SECRET");
  MOESH_CHECK(text && std::strlen(text) >= kLeastSecret, ErrorKind::config, launcher.name(),
              " has started ", launcher.num_processes,
              " processes, which meet over TCP, and MOESH_SECRET, by which they know each other, ",
              text ? "has fewer than 16 characters" : "is not set",
              "; before it is started: export MOESH_SECRET=$(openssl rand -hex 16), the same on "
              "every machine");
  return text;
}

// The one of this process. It says goodbye when that ends.
TcpLink& own_link(const Launcher& launcher, milliseconds timeout) {
  static std::unique_ptr<TcpLink>& link = *new std::unique_ptr<TcpLink>;
  if (!link) {
    link = std::make_unique<TcpLink>(Rendezvous{.address = launcher.address,
                                                .port = launcher.port,
                                                .rank = launcher.rank,
                                                .size = launcher.num_processes,
                                                .secret = own_secret(launcher)},
                                     timeout);
    std::atexit([] { link.reset(); });
  }
  return *link;
}

}  // namespace

void launch_on(TcpLink& link, std::int64_t number, const std::function<void(Group& world)>& f,
               const LaunchOptions& options, int num_on_machine) {
  const auto world =
      std::make_shared<World>(World{link, number, options.timeout, link.roll(number)});
  TcpGroupInfo info{.key = std::to_string(number),
                    .name = "world",
                    .members = std::vector<int>(static_cast<std::size_t>(link.size())),
                    .rank = link.rank()};
  std::iota(info.members.begin(), info.members.end(), 0);
  const auto leave = [&](int rank, const std::exception_ptr& fault) {
    world->roll->ended(rank, fault);
    try {
      const std::string text =
          fault ? static_cast<char>(kind_of(fault)) + text_of(fault) : std::string();
      link.send(kEverybody, fault ? FrameHeader::failed : FrameHeader::returned,
                std::to_string(number), text);
    } catch (const Error&) {
      // The connection is lost: the others know that by themselves.
    }
  };
  run_rank_threads({.first = link.rank(),
                    .count = 1,
                    .num_on_machine = num_on_machine,
                    .group = [&](int) { return std::make_shared<TcpGroup>(world, info); },
                    .leave = leave},
                   f, options);
  finish(*world);
}

void launch_tcp(const Launcher& launcher, int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options) {
  MOESH_CHECK(num_ranks == 0 || num_ranks == launcher.num_processes, ErrorKind::config,
              launcher.name(), " has started ", launcher.num_processes,
              " processes, which are one rank each, and the mesh has ", num_ranks,
              " ranks; start as many processes as it has ranks");
  static std::int64_t num_launches = 0;
  TcpLink& link = own_link(launcher, options.timeout);
  launch_on(link, ++num_launches, f, options, launcher.num_on_machine);
}

}  // namespace moesh::comm
