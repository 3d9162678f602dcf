#include "moesh/comm/tcp/wire.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "moesh/base/error.h"

namespace moesh::comm {
namespace {

using Clock = std::chrono::steady_clock;

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// What a name stands for; null for the address of all networks. `why` is set where there is
// nothing.
Addresses look_up(const char* address, int port, std::string& why) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(address, std::to_string(port).c_str(), &hints, &list);
  if (code != 0) why = ::gai_strerror(code);
  return Addresses(code == 0 ? list : nullptr);
}

// The first socket on which `use` succeeds; otherwise none, and the errno of the last.
Descriptor first_of(const Addresses& list, int& code,
                    const std::function<bool(int socket, const addrinfo& at)>& use) {
  for (const addrinfo* at = list.get(); at; at = at->ai_next) {
    Descriptor s(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    if (s && use(s.get(), *at)) return s;
    code = errno;
  }
  return Descriptor();
}

bool bind_and_listen(int socket, const addrinfo& at) {
  const int yes = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  return ::fcntl(socket, F_SETFL, O_NONBLOCK) == 0 &&
         ::bind(socket, at.ai_addr, at.ai_addrlen) == 0 && ::listen(socket, SOMAXCONN) == 0;
}

// A machine that is not there must not take the whole time that there is.
bool connect_within(int socket, const addrinfo& at, int milliseconds) {
  timeval limit{milliseconds / 1000, milliseconds % 1000 * 1000};
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // connect, too
  const int yes = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  return ::connect(socket, at.ai_addr, at.ai_addrlen) == 0;
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce{};
  MOESH_CHECK(::getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()),
              ErrorKind::comm, "the system has no random numbers: ", std::strerror(errno));
  return nonce;
}

Digest proof(const std::string& secret, Side side, const Hello& hello, const Nonce& of_hub) {
  std::string text = side == Side::hub ? "hub" : "rank";
  text.append(bytes_of(hello)).append(bytes_of(of_hub));
  return hmac_sha256(secret, text);
}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (number_ >= 0) ::close(number_);
  number_ = other.release();
  return *this;
}

Descriptor listen_at(const std::string& address, int port) {
  std::string why;
  int code = 0;
  Descriptor s;
  if (const auto list = look_up(address.c_str(), port, why))
    s = first_of(list, code, bind_and_listen);
  if (!s && (code == 0 || code == EADDRNOTAVAIL))
    if (const auto list = look_up(nullptr, port, why)) s = first_of(list, code, bind_and_listen);
  MOESH_CHECK(s, ErrorKind::config, "rank 0 cannot listen at ", address, ":", port, ": ",
              std::strerror(code),
              "; choose another port with MOESH_PORT, the same in every process");
  return s;
}

int port_of(const Descriptor& listening) {
  sockaddr_storage name = {};
  socklen_t length = sizeof name;
  ::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&name), &length);
  const auto port = name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(name).sin6_port
                                               : reinterpret_cast<sockaddr_in&>(name).sin_port;
  return ntohs(port);
}

Descriptor connect_to(const std::string& address, int port, Clock::time_point deadline) {
  constexpr auto kPause = std::chrono::milliseconds(50);
  for (;;) {
    std::string why;
    int code = 0;
    if (const auto list = look_up(address.c_str(), port, why)) {
      Descriptor s = first_of(list, code, [](int socket, const addrinfo& at) {
        return connect_within(socket, at, /*milliseconds=*/5000);
      });
      if (s) return s;
      why = std::strerror(code == EINPROGRESS ? ETIMEDOUT : code);
    }
    MOESH_CHECK(Clock::now() + kPause < deadline, ErrorKind::comm, "rank 0 cannot be reached at ",
                address, ":", port, ": ", why,
                "; see that it was started, that MASTER_ADDR names its machine, and that no "
                "firewall closes the port (MOESH_PORT chooses another)");
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace moesh::comm
