// The command `moesh`, which with --serve runs many command lines one after the other, each in a
// copy of itself: to load LibTorch takes half a second, and a fork some milliseconds.
//
//   to it:    a number of texts, each as its length and its bytes: the folder to run in, the files
//             for standard output and error, the limits (bytes of addresses, seconds of computing,
//             seconds in all), then the words of the command line
//   from it:  what waitpid says, or -1 for one that was ended since it took too long in all
// All numbers are 32 bits of this machine.

#define main run_moesh
#include "apps/moesh.cpp"
#undef main

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

template <class T>
bool read_all(T* to, std::size_t count) {
  return std::fread(to, sizeof(T), count, stdin) == count;
}

bool read_texts(std::vector<std::string>& texts) {
  std::uint32_t count = 0;
  if (!read_all(&count, 1)) return false;
  texts.assign(count, "");
  for (auto& text : texts) {
    std::uint32_t length = 0;
    if (!read_all(&length, 1)) return false;
    text.resize(length);
    if (!read_all(text.data(), length)) return false;
  }
  return true;
}

void limit(int what, rlim_t value, rlim_t most) {
  const rlimit both{value, most};
  setrlimit(static_cast<__rlimit_resource>(what), &both);
}

void replace(int descriptor, const char* path, int flags) {
  const int file = open(path, flags, 0644);
  if (file < 0 || dup2(file, descriptor) < 0) _exit(99);
  close(file);
}

[[noreturn]] void run_one(const std::vector<std::string>& texts) {
  if (chdir(texts[0].c_str()) != 0) _exit(99);
  replace(0, "/dev/null", O_RDONLY);
  replace(1, texts[1].c_str(), O_WRONLY | O_CREAT);
  replace(2, texts[2].c_str(), O_WRONLY | O_CREAT);
  const auto seconds = static_cast<rlim_t>(std::atoll(texts[4].c_str()));
  const auto bytes = static_cast<rlim_t>(std::atoll(texts[3].c_str()));
  limit(RLIMIT_AS, bytes, bytes);
  limit(RLIMIT_CPU, seconds, seconds + 5);
  limit(RLIMIT_CORE, 0, 0);
  limit(RLIMIT_FSIZE, 1 << 30, 1 << 30);
  std::vector<std::string> words{"moesh"};
  words.insert(words.end(), texts.begin() + 6, texts.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // What main has flushed is all: to take LibTorch apart takes longer than most command lines.
  const int code = run_moesh(static_cast<int>(words.size()), argv.data());
  std::fflush(nullptr);
  _exit(code);
}

// Another thread would not survive the fork: the wait is a poll.
int wait_for(pid_t child, std::chrono::seconds most) {
  const auto end = std::chrono::steady_clock::now() + most;
  for (int status = 0;;) {
    if (waitpid(child, &status, WNOHANG) == child) return status;
    if (std::chrono::steady_clock::now() >= end) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(argv[1], "--serve") != 0) return run_moesh(argc, argv);
  for (std::vector<std::string> texts; read_texts(texts) && texts.size() >= 6;) {
    const pid_t child = fork();
    if (child == 0) run_one(texts);
    const std::int32_t status = wait_for(child, std::chrono::seconds(std::atoll(texts[5].c_str())));
    if (std::fwrite(&status, sizeof status, 1, stdout) != 1 || std::fflush(stdout) != 0) return 1;
  }
  return 0;
}
