// The tests that must find the mistakes of the machine, in one program. It reads commands and
// forks a child for each, so that LibTorch is loaded once:
//   trace FILTER              runs the tests: for each its name, milliseconds, reached mistakes
//   run MISTAKE SECONDS FILTER   with a mistake on, until the first failure:
//                             "survived", or how it was killed, by which test, and what it said
// SECONDS are of processor time. A child whose threads all wait for each other is stopped as well.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

#include "tests/mutants/machine/chosen.h"

namespace {

using Clock = std::chrono::steady_clock;
using moesh::machine::current;
using moesh::machine::reached;

constexpr double kIdleSeconds = 5;

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\t') c = ' ';
  return text.substr(0, 300);
}

// Tells the parent what runs, and ends the child at the first failure.
class Reporter : public testing::EmptyTestEventListener {
 public:
  Reporter(int pipe, bool traces) : pipe_(pipe), traces_(traces) {}

  void OnTestStart(const testing::TestInfo& info) override {
    name_ = std::string(info.test_suite_name()) + "." + info.name();
    if (!traces_) return tell("test\t" + name_);
    for (auto& r : reached) r.store(false, std::memory_order_relaxed);
    began_ = Clock::now();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    tell("failed\t" + name_ + "\t" + one_line(result.summary()));
    if (!traces_) _exit(1);
  }
  void OnTestEnd(const testing::TestInfo&) override {
    if (!traces_) return;
    const std::chrono::duration<double, std::milli> time = Clock::now() - began_;
    std::ostringstream line;
    line << "traced\t" << name_ << '\t' << time.count() << '\t';
    for (int i = 0; i < moesh::machine::kMost; ++i)
      if (reached[i].load(std::memory_order_relaxed)) line << i << ' ';
    tell(line.str());
  }

 private:
  void tell(const std::string& line) {
    const std::string text = line + "\n";
    for (size_t at = 0; at < text.size();) {
      const auto n = write(pipe_, text.data() + at, text.size() - at);
      if (n <= 0) _exit(3);
      at += static_cast<size_t>(n);
    }
  }
  int pipe_;
  bool traces_;
  std::string name_;
  Clock::time_point began_;
};

[[noreturn]] void run_child(int pipe, int mistake, bool traces, const std::string& filter) {
  if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) _exit(3);
  current = mistake;
  testing::GTEST_FLAG(filter) = filter;
  testing::GTEST_FLAG(catch_exceptions) = true;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new Reporter(pipe, traces));
  _exit(RUN_ALL_TESTS() == 0 ? 0 : 1);
}

// Processor seconds of a process and its threads.
double used_seconds(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

struct Ended {
  int status = 0;
  const char* stopped = nullptr;  // why the parent ended it
};

Ended wait_for(pid_t pid, double seconds) {
  Ended ended;
  double seen = 0;
  auto since = Clock::now();
  while (waitpid(pid, &ended.status, WNOHANG) == 0) {
    usleep(2000);
    const double used = used_seconds(pid);
    const std::chrono::duration<double> idle = Clock::now() - since;
    if (used > seen + 0.03) seen = used, since = Clock::now();
    if (used > seconds)
      ended.stopped = "endless";
    else if (idle.count() > kIdleSeconds)
      ended.stopped = "stalled";
    if (!ended.stopped) continue;
    kill(pid, SIGKILL);
    waitpid(pid, &ended.status, 0);
    break;
  }
  return ended;
}

// What the child told, read while it runs or after it ended: a file takes any length.
std::string told(std::FILE* file) {
  std::rewind(file);
  std::string text;
  char buffer[65536];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
  return text;
}

void run(int mistake, double seconds, bool traces, const std::string& filter) {
  std::FILE* file = std::tmpfile();
  const pid_t pid = fork();
  if (pid == 0) run_child(fileno(file), mistake, traces, filter);
  const Ended ended = wait_for(pid, seconds);
  const std::string text = told(file);
  std::fclose(file);
  if (traces) {
    std::cout << text << "done" << std::endl;
    return;
  }
  std::string last, line, failed;
  std::istringstream lines(text);
  while (std::getline(lines, line))
    if (line.starts_with("test\t"))
      last = line.substr(5);
    else if (failed.empty())
      failed = line;
  if (!failed.empty())
    std::cout << failed << std::endl;
  else if (ended.stopped)
    std::cout << ended.stopped << '\t' << last << "\t" << std::endl;
  else if (WIFSIGNALED(ended.status))
    std::cout << "crashed\t" << last << "\tsignal " << WTERMSIG(ended.status) << std::endl;
  else if (WEXITSTATUS(ended.status) != 0)
    std::cout << "exited\t" << last << "\tstatus " << WEXITSTATUS(ended.status) << std::endl;
  else
    std::cout << "survived\t\t" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, filter;
    int mistake = 0;
    double seconds = 600;
    words >> command;
    if (command == "run") words >> mistake >> seconds;
    words >> filter;
    run(mistake, seconds, command == "trace", filter);
  }
}
