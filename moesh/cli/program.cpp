#include "moesh/cli/program.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <system_error>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/commands.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/rank_status.h"
#include "moesh/train/stop.h"

namespace moesh::cli {
namespace {

constexpr const char* kNoMemory =
    "not enough memory for what was asked for; ask for less, or raise the limits of this process "
    "(ulimit -v)";

// Without them the next file that is opened would get what is printed.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) < 0) return;
}

// Says what the exception that is caught now means, and returns the exit code.
int say_why() {
  const auto say = [](ErrorKind kind, const std::string& text) {
    const bool is_of_others = kind == ErrorKind::internal || kind == ErrorKind::device;
    std::fprintf(stderr, "moesh: %s error: %s\n", to_string(kind),
                 (is_of_others ? for_terminal(text) : printable(text)).c_str());
    return static_cast<int>(exit_code(kind));
  };
  try {
    throw;
  } catch (const Error& e) {
    return say(e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    return say(ErrorKind::config, kNoMemory);
  } catch (const c10::Error&) {
    const auto fault = std::current_exception();
    if (comm::is_about_memory(fault)) return say(ErrorKind::config, kNoMemory);
    return say(ErrorKind::internal, "LibTorch: " + comm::text_of(fault));
  } catch (const std::system_error& e) {  // a thread that could not be made
    return say(ErrorKind::config,
               detail::concat("the system refused: ", e.what(),
                              "; ask for less, or raise the limits of this process (ulimit -u, "
                              "-v)"));
  } catch (const std::exception& e) {
    return say(ErrorKind::internal, e.what());
  } catch (...) {
    return say(ErrorKind::internal, "an exception that is not a std::exception");
  }
}

// Without any memory for it.
[[noreturn]] void end_for_no_memory() {
  constexpr std::string_view text =
      "moesh: config error: most likely there is no memory left: some was refused under the limit of "
      "this process, and a library could not continue; ask for less, or raise the limit (ulimit -v)\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  std::_Exit(static_cast<int>(ExitCode::usage));
}

// Under a limit on memory some libraries do not check what they got: the thread was refused memory,
// and used the null that it was given. Any other fault ends the process as itself. This is a guess:
// errno may be that of a refusal which the thread has survived.
void end_if_no_memory(int signal, siginfo_t* info, void*) {
  constexpr std::uintptr_t kNearNull = 1 << 16;
  const bool is_sent = info->si_code <= 0,  // by a process, and says nothing of this thread
      is_near_null = reinterpret_cast<std::uintptr_t>(info->si_addr) < kNearNull;
  if (errno == ENOMEM && !is_sent && is_near_null) end_for_no_memory();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// An exception that nothing can catch, as of a thread of a library: it is said, too.
[[noreturn]] void end_with_a_sentence() {
  try {
    if (std::current_exception()) std::_Exit(say_why());
  } catch (...) {
    end_for_no_memory();
  }
  std::fputs("moesh: internal error: it was ended by a library\n", stderr);
  std::_Exit(static_cast<int>(ExitCode::failed));
}

bool has_no_reader(int stream) {
  struct pollfd pipe = {.fd = stream, .events = 0, .revents = 0};
  return ::poll(&pipe, 1, 0) > 0 && (pipe.revents & POLLERR) != 0;
}

}  // namespace

void end_with_sentences() {
  std::set_terminate(end_with_a_sentence);
  rlimit limit{};
  struct sigaction action = {};
  action.sa_sigaction = end_if_no_memory, action.sa_flags = SA_SIGINFO;
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    ::sigaction(SIGSEGV, &action, nullptr);
}

void begin_program(int argc, const char* const* argv) {
  end_with_sentences();
  constexpr std::string_view kLogLevel = "--log-level";  // may be before the command
  int at = 1;
  while (at < argc && std::string_view(argv[at]).starts_with(kLogLevel))
    at += argv[at] == kLogLevel ? 2 : 1;
  if (at < argc && argv[at] == std::string_view("train")) train::catch_early_signals();
}

int run_program(const std::vector<std::string>& args) {
  open_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of the shell is an error, not a death
  int code = 0;
  try {
    comm::prepare_cuda();
    code = run_command(args);
  } catch (...) {
    code = say_why();
  }
  errno = 0;
  const bool is_lost = (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) &&
                       !has_no_reader(STDOUT_FILENO);  // as of `moesh train | head`
  if (is_lost)
    std::fprintf(stderr, "moesh: storage error: standard output could not be written%s%s\n",
                 errno ? ": " : "", errno ? std::strerror(errno) : "");
  return is_lost && code == 0 ? static_cast<int>(ExitCode::storage) : code;
}

}  // namespace moesh::cli
