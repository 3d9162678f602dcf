#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/comm/tcp/tcp_world.h"

namespace moesh::comm {
namespace {

// How long a call of the socket may block before it looks at the clock.
constexpr int kLookMilliseconds = 200;

void limit_waiting(int socket) {
  const timeval limit{0, kLookMilliseconds * 1000};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool may_try_again(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

enum class Ended { no, by_peer, by_time };

// Fills `bytes` of them; `go_on` is asked whenever nothing came for a moment.
template <class GoOn>
Ended receive(int socket, char* to, std::size_t bytes, const GoOn& go_on) {
  while (bytes > 0) {
    const auto count = ::recv(socket, to, bytes, 0);
    if (count == 0 || (count < 0 && !may_try_again(errno))) return Ended::by_peer;
    if (count < 0) {
      if (!go_on()) return Ended::by_time;
      continue;
    }
    to += count;
    bytes -= static_cast<std::size_t>(count);
  }
  return Ended::no;
}

bool send_all(int socket, std::string_view bytes, TcpLink::Clock::time_point deadline) {
  while (!bytes.empty()) {
    const auto count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && may_try_again(errno) && TcpLink::Clock::now() < deadline) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace

TcpLink::TcpLink(Rendezvous meeting, std::chrono::milliseconds timeout)
    : meeting_(std::move(meeting)) {
  if (meeting_.rank == 0) {
    hub_ = std::make_unique<Hub>(meeting_);
    meeting_.port = hub_->port();
  }
  const auto deadline = Clock::now() + timeout;
  socket_ = connect_to(meeting_.address, meeting_.port, deadline);
  limit_waiting(socket_.get());
  join(deadline);
  reader_ = std::thread([this] { read_frames(); });
}

TcpLink::~TcpLink() {
  try {
    send(meeting_.rank, FrameHeader::goodbye, "", "");
  } catch (const Error&) {
    // The others are gone already.
  }
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  reader_.join();
}

void TcpLink::join(Clock::time_point deadline) {
  const std::string place = detail::concat(meeting_.address, ":", meeting_.port);
  const auto get = [&](char* to, std::size_t bytes, const char* or_else) {
    const Ended ended = receive(socket_.get(), to, bytes, [&] { return Clock::now() < deadline; });
    MOESH_CHECK(ended != Ended::by_time, ErrorKind::comm, "rank ", meeting_.rank,
                " waited for rank 0 at ", place, ", which did not answer in time");
    MOESH_CHECK(ended == Ended::no, ErrorKind::config, "rank ", meeting_.rank,
                " was turned away by rank 0 at ", place, ": ", or_else);
  };
  constexpr const char* kOther =
      "MOESH_SECRET is another there, or something else than moesh listens at this port "
      "(MOESH_PORT chooses another)";
  Hello hello;
  hello.rank = meeting_.rank;
  hello.size = meeting_.size;
  hello.nonce = random_nonce();
  send_all(socket_.get(), bytes_of(hello), deadline);
  Challenge challenge;
  get(reinterpret_cast<char*>(&challenge), sizeof challenge, kOther);
  MOESH_CHECK(are_same(challenge.proof, proof(meeting_.secret, Side::hub, hello, challenge.nonce)),
              ErrorKind::config, "the process that listens at ", place,
              " does not know MOESH_SECRET: ", kOther);
  send_all(socket_.get(), bytes_of(proof(meeting_.secret, Side::rank, hello, challenge.nonce)),
           deadline);
  RefusalLength verdict = 0;
  get(reinterpret_cast<char*>(&verdict), sizeof verdict, kOther);
  if (verdict == 0) return;
  std::string why(std::min(verdict, kMaxRefusal), ' ');
  get(why.data(), why.size(), kOther);
  throw Error(ErrorKind::config, detail::concat("rank ", meeting_.rank,
                                                " was turned away by rank 0 at ", place, ": ", why,
                                                "; start every process once, with the same number "
                                                "of processes"));
}

void TcpLink::send(int to, FrameHeader::Kind kind, const std::string& key, std::string_view a,
                   std::string_view b) {
  const FrameHeader header{.from = meeting_.rank,
                           .to = to,
                           .kind = kind,
                           .key_bytes = static_cast<std::uint32_t>(key.size()),
                           .bytes = a.size() + b.size()};
  MOESH_CHECK(key.size() <= kMaxKeyBytes && header.bytes <= kMaxFrameBytes, "a message of ",
              header.bytes, " bytes under a key of ", key.size(), " is too long");
  constexpr auto kTimeToSend = std::chrono::seconds(60);
  const auto deadline = Clock::now() + kTimeToSend;
  const std::lock_guard lock(sending_);
  const bool sent = send_all(socket_.get(), bytes_of(header), deadline) &&
                    send_all(socket_.get(), key, deadline) &&
                    send_all(socket_.get(), a, deadline) && send_all(socket_.get(), b, deadline);
  MOESH_CHECK(sent, ErrorKind::comm, "rank ", meeting_.rank,
              " has lost its connection to rank 0: ", std::strerror(errno));
}

std::optional<std::vector<char>> TcpLink::take(int from, const std::string& key,
                                               Clock::time_point until) {
  std::unique_lock lock(mutex_);
  const std::pair place{from, key};
  if (!came_.wait_until(lock, until, [&] { return frames_.contains(place); })) return {};
  const auto found = frames_.find(place);
  auto frame = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) frames_.erase(found);
  return frame;
}

std::shared_ptr<RankStatus> TcpLink::roll(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  auto& roll = rolls_[number];
  if (!roll) {
    roll = std::make_shared<RankStatus>(meeting_.size);
    for (const auto& [rank, why] : lost_) roll->failed(rank, why);
  }
  return roll;
}

void TcpLink::read_frames() {
  const auto go_on = [&] {
    const std::lock_guard lock(mutex_);
    return !is_ending_;
  };
  for (;;) {
    FrameHeader header;
    Ended ended = receive(socket_.get(), reinterpret_cast<char*>(&header), sizeof header, go_on);
    std::string key;
    std::vector<char> bytes;
    if (ended == Ended::no) {
      key.resize(std::min(header.key_bytes, kMaxKeyBytes));
      bytes.resize(std::min(header.bytes, kMaxFrameBytes));
      ended = receive(socket_.get(), key.data(), key.size(), go_on);
    }
    if (ended == Ended::no) ended = receive(socket_.get(), bytes.data(), bytes.size(), go_on);
    if (ended == Ended::by_peer) fail_all(0, "its process, or the connection to it, is gone");
    if (ended != Ended::no) return;
    file(header, std::move(key), std::move(bytes));
  }
}

void TcpLink::file(const FrameHeader& header, std::string key, std::vector<char> bytes) {
  if (header.kind == FrameHeader::data) {
    const std::lock_guard lock(mutex_);
    frames_[{header.from, std::move(key)}].push_back(std::move(bytes));
    came_.notify_all();
    return;
  }
  const auto kind = bytes.empty() ? ErrorKind::comm : static_cast<ErrorKind>(bytes.front());
  const std::string text(bytes.begin() + (bytes.empty() ? 0 : 1), bytes.end());
  if (key.empty()) return fail_all(header.from, text);
  const auto of_world = roll(std::atoll(key.c_str()));
  if (header.kind == FrameHeader::returned)
    of_world->returned(header.from);
  else
    of_world->failed(
        header.from, text,
        kind >= ErrorKind::config && kind <= ErrorKind::internal ? kind : ErrorKind::comm);
  came_.notify_all();
}

// In every world, those to come included.
void TcpLink::fail_all(int rank, const std::string& text) {
  const std::lock_guard lock(mutex_);
  lost_.emplace(rank, text);
  for (const auto& [number, roll] : rolls_)
    if (!roll->has_left(rank)) roll->failed(rank, text);
  came_.notify_all();
}

}  // namespace moesh::comm
