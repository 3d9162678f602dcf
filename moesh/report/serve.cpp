#include "moesh/report/page.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <sstream>

#include "moesh/base/error.h"

namespace moesh::report {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLiveMs = 2000;
constexpr std::size_t kMaxRequest = 16384;
constexpr std::size_t kMaxOpen = 32;                  // connections
constexpr auto kPatience = std::chrono::seconds(10);  // with one that neither says nor reads a byte

class Socket {
 public:
  explicit Socket(int file) : file_(file) {}
  ~Socket() {
    if (file_ >= 0) ::close(file_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return file_; }

 private:
  int file_;
};

std::string message(const char* status, const char* type, const std::string& body) {
  return detail::concat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                        "; charset=utf-8\r\nContent-Length: ", body.size(),
                        "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
                        "Connection: close\r\n\r\n",
                        body);
}

// Whether the request is for this machine, as its header Host says.
bool is_for_this_machine(const std::string& request) {
  const char* header = ::strcasestr(request.c_str(), "\r\nhost:");
  std::string host;
  if (header) std::istringstream(header + std::strlen("\r\nhost:")) >> host;
  host = host.substr(0, host.find(':'));  // without the port
  return host == "127.0.0.1" || ::strcasecmp(host.c_str(), "localhost") == 0;
}

// "1.20.20,3.7.0": generation, records and the step of the last frame, of each run.
std::vector<PageState> known_of(const std::string& text) {
  std::vector<PageState> all;
  std::istringstream in(text);
  char between = 0;
  for (PageState k; in >> k.generation >> between >> k.num_records >> between >> k.last_frame;) {
    all.push_back(k);
    in >> between;
  }
  return all;
}

// A browser, and what it has said and is still to be told. Nothing waits for one: it is looked at
// when it can be read from or written to.
class Connection {
 public:
  explicit Connection(int file) : socket_(file) {}

  int file() const { return socket_.get(); }
  short awaits() const { return to_send_.empty() ? POLLIN : POLLOUT; }
  Clock::time_point last_moved() const { return last_moved_; }

  /// Reads or writes what is possible now; false: it is done, or gone.
  bool go_on(const std::function<std::string(const std::string& request)>& answer) {
    last_moved_ = Clock::now();
    if (!to_send_.empty()) return send();
    char bytes[4096];
    const auto count = ::recv(file(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (count <= 0) return count < 0 && errno == EAGAIN;
    request_.append(bytes, static_cast<std::size_t>(count));
    if (request_.find("\r\n\r\n") == std::string::npos) return request_.size() < kMaxRequest;
    to_send_ = answer(request_);
    return send();
  }

 private:
  bool send() {
    const auto count = ::send(file(), to_send_.data() + num_sent_, to_send_.size() - num_sent_,
                              MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN;
    num_sent_ += static_cast<std::size_t>(count);
    return num_sent_ < to_send_.size();
  }

  Socket socket_;
  std::string request_, to_send_;
  std::size_t num_sent_ = 0;
  Clock::time_point last_moved_ = Clock::now();
};

}  // namespace

std::string answer(const std::string& request, std::vector<RunData>& runs,
                   const std::vector<VerifyResult>& verified) {
  if (!is_for_this_machine(request))
    return message("403 Forbidden", "text/plain", "open this as http://127.0.0.1\n");
  if (!request.starts_with("GET "))
    return message("405 Method Not Allowed", "text/plain", "only GET is allowed\n");
  const std::string target = request.substr(4, request.find(' ', 4) - 4);
  const std::string data = "/data?known=";
  if (target != "/" && !target.starts_with(data))
    return message("404 Not Found", "text/plain", "there is nothing else here\n");
  try {
    for (RunData& run : runs) run.update();
  } catch (const Error& e) {  // it may be well the next time
    return message("500 Internal Server Error", "text/plain", detail::concat(e.what(), "\n"));
  }
  if (target == "/") return message("200 OK", "text/html", page(runs, verified, kLiveMs));
  return message("200 OK", "application/json",
                 runs_json(runs, known_of(target.substr(data.size()))));
}

void serve(std::vector<RunData> runs, const std::vector<VerifyResult>& verified, int port,
           const std::atomic<bool>& stop, const std::function<void(int port)>& ready) {
  const Socket listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  MOESH_CHECK(
      ::bind(listener.get(), where, sizeof address) == 0 && ::listen(listener.get(), 16) == 0,
      ErrorKind::config, "--serve ", port, " cannot be had on 127.0.0.1: ", std::strerror(errno),
      "; choose another port");
  socklen_t size = sizeof address;
  ::getsockname(listener.get(), where, &size);
  ready(ntohs(address.sin_port));
  std::list<Connection> open;
  const auto answer_now = [&](const std::string& request) {
    return answer(request, runs, verified);
  };
  while (!stop) {
    std::vector<pollfd> waits{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
    for (const Connection& c : open)
      waits.push_back({.fd = c.file(), .events = c.awaits(), .revents = 0});
    ::poll(waits.data(), waits.size(), 200);
    auto wait = waits.begin() + 1;
    std::erase_if(open, [&](Connection& c) {
      if ((wait++)->revents != 0) return !c.go_on(answer_now);
      return Clock::now() - c.last_moved() > kPatience;
    });
    if (waits[0].revents == 0) continue;
    const auto close_most_silent = [&] {
      open.erase(std::min_element(open.begin(), open.end(), [](const auto& a, const auto& b) {
        return a.last_moved() < b.last_moved();
      }));
    };
    if (open.size() == kMaxOpen) close_most_silent();
    const int file = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (file >= 0) {
      open.emplace_back(file);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // It still waits there, and poll would return at once: make room, and wait a little.
      if (!open.empty()) close_most_silent();
      ::poll(nullptr, 0, 200);
    }
  }
}

}  // namespace moesh::report
