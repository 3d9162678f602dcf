#pragma once
// The messages between the processes of a world and its hub. All processes run the
// same program on machines of one kind: structures travel as they are in memory.
//
//   rank -> hub   Hello       who it is, and a random number
//   hub  -> rank  Challenge   the hub's proof, over both random numbers, and its own random number
//   rank -> hub   Digest      the rank's proof
//   hub  -> rank  Verdict     0, or the length of a text that says why not
//   then frames in both directions, which the hub passes on

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace moesh::comm {

// SHA-256 and HMAC (FIPS 180-4, RFC 2104): how processes that start together prove to each other
// that they hold the same secret, without sending it.

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// In a time that does not tell where they differ.
bool are_same(const Digest& a, const Digest& b);

struct Rendezvous {
  std::string address;  // of the machine of rank 0: a name or a number
  int port = 0;         // 0: the hub takes any that is free
  int rank = 0, size = 1;
  std::string secret;  // the same for all, and known only to them
};

using Nonce = std::array<std::uint8_t, 32>;

struct Hello {
  char greeting[8] = {'m', 'o', 'e', 's', 'h', ' ', '1', '\n'};
  std::int32_t rank = 0, size = 0;
  Nonce nonce{};
};
struct Challenge {
  Digest proof{};
  Nonce nonce{};
};
using Verdict = std::uint32_t;
constexpr Verdict kMaxVerdict = 1000;

struct FrameHeader {
  enum Kind : std::uint32_t {
    data,
    returned,  // the function of rank `from` has returned in the world of the key
    failed,    // ... has thrown: the ErrorKind in one byte, and the text that says what
    goodbye,   // the process ends in good order
  };
  std::int32_t from = 0, to = 0;  // to kEverybody: all others
  Kind kind = data;
  std::uint32_t key_bytes = 0;
  std::uint64_t bytes = 0;
};
constexpr std::int32_t kEverybody = -1;
constexpr std::uint32_t kMaxKeyBytes = 4096;
constexpr std::uint64_t kMaxFrameBytes = std::uint64_t{1} << 32;

template <class T>
std::string_view bytes_of(const T& x) {
  return {reinterpret_cast<const char*>(&x), sizeof(T)};
}

/// From the operating system; throws Error (comm) where it has none.
Nonce random_nonce();
enum class Side { hub, rank };
/// Proves that a side knows the secret, for this meeting only.
Digest proof(const std::string& secret, Side side, const Hello& hello, const Nonce& of_hub);

/// A socket, or another descriptor, that is closed with it.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  int release() {
    const int number = number_;
    number_ = -1;
    return number;
  }

 private:
  int number_;
};

/// A socket that listens at the address, or, where that is none of this machine's (a name that
/// others know it by), at all of them. Throws Error (config) where the port is taken.
Descriptor listen_at(const std::string& address, int port);
int port_of(const Descriptor& listening);
/// A connection, for which it tries again until `deadline`, since the other side may start later.
Descriptor connect_to(const std::string& address, int port,
                      std::chrono::steady_clock::time_point deadline);

}  // namespace moesh::comm
