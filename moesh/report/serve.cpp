#include "moesh/report/serve.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "moesh/base/error.h"

namespace moesh::report {
namespace {

constexpr int kLiveMs = 2000;
constexpr std::size_t kMaxRequest = 16384;

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

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// "127.0.0.1:8080" without the port.
std::string host_of(const std::string& request) {
  const std::string all = lower(request);
  const auto at = all.find("\r\nhost:");
  if (at == std::string::npos) return "";
  const auto begin = all.find_first_not_of(" \t", at + 7), end = all.find("\r\n", at + 7);
  const std::string host = begin < end ? all.substr(begin, end - begin) : "";
  return host.substr(0, host.find(':'));
}

// "1.20.20,3.7.0": generation, records and the step of the last frame, of each run.
std::vector<Known> known_of(const std::string& text) {
  std::vector<Known> all;
  const char *at = text.data(), *end = at + text.size();
  while (at < end) {
    Known known;
    for (const auto& read : std::initializer_list<std::function<std::from_chars_result()>>{
             [&] { return std::from_chars(at, end, known.generation); },
             [&] { return std::from_chars(at, end, known.num_records); },
             [&] { return std::from_chars(at, end, known.last_frame); }}) {
      const auto [after, error] = read();
      if (error != std::errc()) return all;
      at = after < end ? after + 1 : after;
    }
    all.push_back(known);
  }
  return all;
}

// Until the empty line after the headers, or half a second has passed.
std::string read_request(int file) {
  std::string request;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  while (request.find("\r\n\r\n") == std::string::npos && request.size() < kMaxRequest) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd wait{.fd = file, .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || ::poll(&wait, 1, static_cast<int>(left.count())) <= 0) break;
    char bytes[4096];
    const auto count = ::recv(file, bytes, sizeof bytes, 0);
    if (count <= 0) break;
    request.append(bytes, static_cast<std::size_t>(count));
  }
  return request;
}

void send_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto count = ::send(file, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return;  // the browser has gone
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace

std::string answer(const std::string& request, std::vector<RunData>& runs,
                   const std::vector<VerifyResult>& verified) {
  if (const std::string host = host_of(request); host != "127.0.0.1" && host != "localhost")
    return message("403 Forbidden", "text/plain", "open this as http://127.0.0.1\n");
  if (!request.starts_with("GET "))
    return message("405 Method Not Allowed", "text/plain", "GET alone\n");
  const std::string target = request.substr(4, request.find(' ', 4) - 4);
  for (RunData& run : runs) run.update();
  if (target == "/") return message("200 OK", "text/html", page(runs, verified, kLiveMs));
  const std::string data = "/data?known=";
  if (target.starts_with(data))
    return message("200 OK", "application/json",
                   runs_json(runs, known_of(target.substr(data.size()))));
  return message("404 Not Found", "text/plain", "there is nothing else here\n");
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
  while (!stop) {
    pollfd wait{.fd = listener.get(), .events = POLLIN, .revents = 0};
    if (::poll(&wait, 1, 200) <= 0) continue;
    const Socket connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0) continue;
    const timeval patience{.tv_sec = 5, .tv_usec = 0};  // of a browser that does not read
    ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    // Browsers open connections ahead of what they want to ask: those get no answer.
    const std::string request = read_request(connection.get());
    if (request.find("\r\n\r\n") != std::string::npos)
      send_all(connection.get(), answer(request, runs, verified));
  }
}

}  // namespace moesh::report
