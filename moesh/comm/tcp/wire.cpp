#include "moesh/comm/tcp/tcp_world.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
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

// The address of a name; null for the address of all networks. `why` is set where there is
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

namespace {

constexpr std::size_t kBlock = 64;  // bytes

using Words = std::array<std::uint32_t, 8>;

constexpr std::array<std::uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block(Words& state, const char* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t j = 0; j < 4; ++j)
      w[i] = w[i] << 8 | static_cast<std::uint8_t>(block[4 * i + j]);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const std::uint32_t t2 =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const Words more{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += more[i];
}

}  // namespace

Digest sha256(std::string_view bytes) {
  Words state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded(bytes);
  padded += '\x80';
  padded.resize((padded.size() + 8 + kBlock - 1) / kBlock * kBlock - 8, '\0');
  const std::uint64_t bits = std::uint64_t{bytes.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded += static_cast<char>(bits >> shift & 0xff);
  for (std::size_t i = 0; i < padded.size(); i += kBlock) add_block(state, padded.data() + i);
  Digest digest{};
  for (std::size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  const auto text = [](const Digest& d) { return std::string(d.begin(), d.end()); };
  const Digest of_key = sha256(key);
  std::array<char, kBlock> k{};
  if (key.size() > kBlock)
    std::copy(of_key.begin(), of_key.end(), k.begin());
  else
    std::copy(key.begin(), key.end(), k.begin());
  std::string inner, outer;
  for (const char c : k) {
    inner += static_cast<char>(c ^ 0x36);
    outer += static_cast<char>(c ^ 0x5c);
  }
  return sha256(outer + text(sha256(inner.append(bytes))));
}

bool are_same(const Digest& a, const Digest& b) {
  int difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace moesh::comm
