#include "moesh/comm/tcp/tcp_world.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/base/log.h"

namespace moesh::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeToProve = 10s;
constexpr auto kTimeToEnd = 5s;
// Strangers that have proved nothing: for one more the oldest goes that has said nothing, or one
// that is slow. A rank says who it is as soon as it is connected.
constexpr std::size_t kMaxStrangers = 64;
constexpr auto kSilent = 300ms, kSlow = 1000ms;
constexpr std::size_t kPiece = std::size_t{1} << 16;

template <class T>
T taken(std::string& in) {
  T value;
  std::memcpy(&value, in.data(), sizeof(T));
  in.erase(0, sizeof(T));
  return value;
}

bool is_sane(const FrameHeader& h, int rank, int size) {
  return h.from == rank && (h.to == kEverybody || (h.to >= 0 && h.to < size)) &&
         h.key_bytes <= kMaxKeyBytes && h.bytes <= kMaxFrameBytes && h.kind <= FrameHeader::goodbye;
}

}  // namespace

Hub::Hub(const Rendezvous& meeting)
    : meeting_(meeting),
      listening_(listen_at(meeting.address, meeting.port)),
      port_(port_of(listening_)),
      sockets_(static_cast<std::size_t>(meeting.size), -1),
      waiting_(static_cast<std::size_t>(meeting.size)),
      is_gone_(static_cast<std::size_t>(meeting.size)) {
  int ends[2];
  MOESH_CHECK(::pipe2(ends, O_CLOEXEC) == 0, ErrorKind::comm, "no pipe: ", std::strerror(errno));
  wake_read_ = Descriptor(ends[0]);
  wake_write_ = Descriptor(ends[1]);
  thread_ = std::thread([this] { serve(); });
}

Hub::~Hub() {
  wake_write_ = Descriptor();
  thread_.join();
}

bool Hub::is_done() const {
  if (!is_ending_) return false;
  const bool is_idle =
      std::all_of(peers_.begin(), peers_.end(), [](const auto& p) { return p.second.out.empty(); });
  const bool all_gone = std::all_of(is_gone_.begin(), is_gone_.end(), [](bool g) { return g; });
  return (is_idle && all_gone) || Clock::now() >= end_;
}

void Hub::serve() {
  std::vector<pollfd> polls;
  while (!is_done()) {
    polls.clear();
    if (!is_ending_) polls.push_back({wake_read_.get(), POLLIN, 0});
    if (has_room()) polls.push_back({listening_.get(), POLLIN, 0});
    for (const auto& [socket, peer] : peers_)
      polls.push_back({socket, static_cast<short>(POLLIN | (peer.out.empty() ? 0 : POLLOUT)), 0});
    if (::poll(polls.data(), polls.size(), /*milliseconds=*/200) < 0 && errno != EINTR) return;
    for (const pollfd& p : polls) {
      if (p.revents == 0) continue;
      if (p.fd == wake_read_.get()) {
        is_ending_ = true;
        end_ = Clock::now() + kTimeToEnd;
      } else if (p.fd == listening_.get()) {
        while (has_room() && welcome()) {
        }
      } else {
        if (const auto found = peers_.find(p.fd); found != peers_.end() && p.revents & POLLOUT)
          write_to(found->second);
        if (const auto found = peers_.find(p.fd); found != peers_.end() && p.revents & ~POLLOUT)
          read_from(found->second);
      }
    }
    std::vector<int> late;
    for (const auto& [socket, peer] : peers_)
      if (peer.state < PeerState::member && Clock::now() >= peer.deadline) late.push_back(socket);
    for (const int socket : late) drop(peers_.at(socket));
  }
}

// Makes room for one more stranger, without dropping one that may be a rank.
bool Hub::has_room() {
  std::size_t num_strangers = 0;
  Peer *silent = nullptr, *slow = nullptr;
  for (auto& [socket, peer] : peers_) {
    if (peer.state >= PeerState::member) continue;
    ++num_strangers;
    Peer*& oldest = peer.state == PeerState::greeting ? silent : slow;
    if (!oldest || peer.deadline < oldest->deadline) oldest = &peer;
  }
  if (num_strangers < kMaxStrangers) return true;
  // A rank that has just come may not have spoken yet.
  if (silent && Clock::now() < silent->deadline - kTimeToProve + kSilent) silent = nullptr;
  if (slow && Clock::now() < slow->deadline - kTimeToProve + kSlow) slow = nullptr;
  if (!silent && !slow) return false;
  drop(silent ? *silent : *slow);
  return true;
}

// Whether a connection has arrived.
bool Hub::welcome() {
  Descriptor socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return false;
  const int yes = 1, number = socket.get();
  ::setsockopt(number, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::setsockopt(number, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  Peer& peer = peers_[number];
  peer.socket = std::move(socket);
  peer.deadline = Clock::now() + kTimeToProve;
  read_from(peer);  // a rank has said who it is already
  return true;
}

void Hub::read_from(Peer& peer) {
  const int socket = peer.socket.get();
  char piece[kPiece];
  const auto count = ::recv(socket, piece, sizeof piece, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0 || peer.state == PeerState::closing) return drop(peer);
  peer.in.append(piece, static_cast<std::size_t>(count));
  understand(peer);
}

void Hub::write_to(Peer& peer) {
  const auto count = ::send(peer.socket.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count < 0) return drop(peer);
  peer.out.erase(0, static_cast<std::size_t>(count));
  if (peer.state == PeerState::closing && peer.out.empty()) drop(peer);
}

void Hub::understand(Peer& peer) {
  const int socket = peer.socket.get();  // a peer that is dropped is gone
  if (peer.state == PeerState::greeting && peer.in.size() >= sizeof(Hello)) greet(peer);
  if (!peers_.contains(socket)) return;
  if (peer.state == PeerState::proving && peer.in.size() >= sizeof(Digest)) judge(peer);
  if (!peers_.contains(socket)) return;
  if (peer.state != PeerState::member) return;
  std::size_t done = 0;
  FrameHeader header;
  while (peer.in.size() - done >= sizeof header) {
    std::memcpy(&header, peer.in.data() + done, sizeof header);
    if (!is_sane(header, peer.hello.rank, meeting_.size)) return drop(peer);
    const std::size_t whole = sizeof header + header.key_bytes + header.bytes;
    if (peer.in.size() - done < whole) break;
    const std::string frame = peer.in.substr(done, whole);
    done += whole;
    if (header.kind == FrameHeader::goodbye)
      is_gone_[static_cast<std::size_t>(header.from)] = true;
    else
      route(header, frame);
  }
  peer.in.erase(0, done);
}

void Hub::greet(Peer& peer) {
  peer.hello = taken<Hello>(peer.in);
  if (std::memcmp(peer.hello.greeting, Hello().greeting, sizeof Hello::greeting) != 0)
    return drop(peer);
  peer.nonce = random_nonce();
  const Challenge challenge{proof(meeting_.secret, Side::hub, peer.hello, peer.nonce), peer.nonce};
  peer.out.append(bytes_of(challenge));
  peer.state = PeerState::proving;
}

void Hub::judge(Peer& peer) {
  const auto shown = taken<Digest>(peer.in);
  if (!are_same(shown, proof(meeting_.secret, Side::rank, peer.hello, peer.nonce))) {
    log_warn("a process that does not know MOESH_SECRET tried to join as rank ", peer.hello.rank,
             ", and was turned away");
    return drop(peer);
  }
  const auto [greeting, rank, size, nonce] = peer.hello;
  std::string why;
  if (size != meeting_.size || rank < 0 || rank >= meeting_.size)
    why = detail::concat("it is rank ", rank, " of ", size, ", and rank 0 is of ", meeting_.size);
  else if (sockets_[static_cast<std::size_t>(rank)] >= 0 ||
           is_gone_[static_cast<std::size_t>(rank)])
    why = detail::concat("there is a rank ", rank, " already");
  peer.out.append(bytes_of(static_cast<RefusalLength>(why.size()))).append(why);
  if (!why.empty()) {
    peer.state = PeerState::closing;
    return;
  }
  peer.state = PeerState::member;
  sockets_[static_cast<std::size_t>(rank)] = peer.socket.get();
  peer.out.append(waiting_[static_cast<std::size_t>(rank)]);
  waiting_[static_cast<std::size_t>(rank)].clear();
}

void Hub::route(const FrameHeader& header, std::string_view frame) {
  if (header.to != kEverybody) return send_to(header.to, frame);
  for (int r = 0; r < meeting_.size; ++r)
    if (r != header.from) send_to(r, frame);
}

void Hub::send_to(int rank, std::string_view frame) {
  const auto r = static_cast<std::size_t>(rank);
  if (sockets_[r] >= 0)
    peers_.at(sockets_[r]).out.append(frame);
  else if (!is_gone_[r])
    waiting_[r].append(frame);
}

void Hub::drop(Peer& peer) {
  const bool was_member = peer.state == PeerState::member;
  const int rank = peer.hello.rank;
  peers_.erase(peer.socket.get());
  if (was_member) lose(rank);
}

// The others are told, unless it has said goodbye.
void Hub::lose(int rank) {
  const auto r = static_cast<std::size_t>(rank);
  sockets_[r] = -1;
  if (is_gone_[r]) return;
  is_gone_[r] = true;
  const std::string text = static_cast<char>(ErrorKind::comm) +
                           std::string("its process, or the connection to it, is gone");
  const FrameHeader header{.from = rank,
                           .to = kEverybody,
                           .kind = FrameHeader::failed,
                           .key_bytes = 0,  // in whatever world
                           .bytes = text.size()};
  route(header, std::string(bytes_of(header)) + text);
}

}  // namespace moesh::comm
