#pragma once
// A file system on which errors, lies and deaths are injected: every call is counted, and the calls
// that a rule names go wrong.

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/formats/file_system.h"

namespace moesh {

class FaultyFileSystem final : public formats::FileSystem {
 public:
  /// What goes wrong in calls of `call` ("write", "list", ... or "any") on paths that have `part`
  /// in them, or at their end ("/c$"): those from number `first` (from 1) on, `count` of them.
  struct Rule {
    std::string call, part;
    int first = 1, count = 1;
    int code = 0;        // the call fails with this errno
    bool flips = false;  // one bit of what is written or read is another, and the call succeeds
    bool kills = false;  // the process dies before the call, as by kill -9
    int sleeps = 0;      // so many milliseconds, and then all is well
    int num_seen = 0, num_hit = 0;
  };

  FaultyFileSystem() = default;
  explicit FaultyFileSystem(std::vector<Rule> rules) : rules_(std::move(rules)) {}

  /// "write model- 3 1 EIO" by semicolon; the last word is a number, flip, kill or sleep50.
  static std::vector<Rule> parse(const std::string& text) {
    std::vector<Rule> rules;
    std::istringstream all(text);
    for (std::string one; std::getline(all, one, ';');) {
      std::istringstream words(one);
      Rule rule;
      std::string what;
      words >> rule.call >> rule.part >> rule.first >> rule.count >> what;
      MOESH_CHECK(!words.fail(), ErrorKind::config, "the fault '", one,
                  "' is not CALL PART FIRST COUNT CODE|flip|kill");
      rule.flips = what == "flip", rule.kills = what == "kill";
      if (what.starts_with("sleep")) rule.sleeps = std::atoi(what.c_str() + 5);
      if (!rule.flips && !rule.kills) rule.code = std::atoi(what.c_str());
      rules.push_back(rule);
    }
    return rules;
  }

  int num_hit() const {
    const std::lock_guard lock(mutex_);
    int sum = 0;
    for (const auto& r : rules_) sum += r.num_hit;
    return sum;
  }
  int num_calls() const { return num_calls_; }
  /// Calls that the rules name, whether they go wrong or not.
  int num_seen() const {
    const std::lock_guard lock(mutex_);
    int sum = 0;
    for (const auto& r : rules_) sum += r.num_seen;
    return sum;
  }

  int open(const Path& path, int flags) override {
    return failing("open", path) ? -1 : named(path, FileSystem::open(path, flags));
  }
  void close(int file) override {
    {
      const std::lock_guard lock(mutex_);
      paths_.erase(file);
    }
    FileSystem::close(file);
  }
  ssize_t read(int file, void* to, std::size_t count, std::uint64_t offset) override {
    const auto rule = hit("read", path_of(file));
    if (rule && rule->code) return errno = rule->code, -1;
    const auto result = FileSystem::read(file, to, count, offset);
    if (rule && result > 0) static_cast<char*>(to)[result / 2] ^= 4;
    return result;
  }
  ssize_t write(int file, const void* from, std::size_t count, std::uint64_t offset) override {
    return lying("write", file, from, count,
                 [&](const void* bytes) { return FileSystem::write(file, bytes, count, offset); });
  }
  ssize_t append(int file, const void* from, std::size_t count) override {
    return lying("append", file, from, count,
                 [&](const void* bytes) { return FileSystem::append(file, bytes, count); });
  }
  int reserve(int file, std::uint64_t size) override {
    return failing("reserve", path_of(file)) ? -1 : FileSystem::reserve(file, size);
  }
  int sync(int file) override {
    return failing("sync", path_of(file)) ? -1 : FileSystem::sync(file);
  }
  int lock(int file) override {
    return failing("lock", path_of(file)) ? -1 : FileSystem::lock(file);
  }
  int status(const Path& path, struct stat& status) override {
    return failing("status", path) ? -1 : FileSystem::status(path, status);
  }
  int status(int file, struct stat& status) override {
    return failing("status", path_of(file)) ? -1 : FileSystem::status(file, status);
  }
  int link_status(const Path& path, struct stat& status) override {
    return failing("status", path) ? -1 : FileSystem::link_status(path, status);
  }
  int list(const Path& folder, std::vector<std::string>& names) override {
    return failing("list", folder) ? -1 : FileSystem::list(folder, names);
  }
  int make_folder(const Path& path) override {
    return failing("make_folder", path) ? -1 : FileSystem::make_folder(path);
  }
  int remove(const Path& path) override {
    return failing("remove", path) ? -1 : FileSystem::remove(path);
  }
  int rename(const Path& from, const Path& to) override {
    return failing("rename", to) ? -1 : FileSystem::rename(from, to);
  }
  int exchange(const Path& a, const Path& b) override {
    return failing("exchange", b) ? -1 : FileSystem::exchange(a, b);
  }
  int free_bytes(const Path& folder, std::uint64_t& bytes) override {
    if (failing("free_bytes", folder)) return bytes = 1000, 0;  // a lie: the disk is nearly full
    return FileSystem::free_bytes(folder, bytes);
  }

 private:
  static bool has(const std::string& path, const std::string& part) {
    return part.ends_with('$') ? path.ends_with(part.substr(0, part.size() - 1))
                               : path.find(part) != std::string::npos;
  }
  std::optional<Rule> hit(const std::string& call, const Path& path) {
    int milliseconds = 0;
    const auto rule = find(call, path, milliseconds);
    if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return rule;
  }
  std::optional<Rule> find(const std::string& call, const Path& path, int& milliseconds) {
    const std::lock_guard lock(mutex_);
    ++num_calls_;
    for (auto& r : rules_) {
      if ((r.call != "any" && r.call != call) || !has(path.string(), r.part)) continue;
      ++r.num_seen;
      if (r.num_seen < r.first || r.num_seen >= r.first + r.count) continue;
      ++r.num_hit;
      if (r.kills) std::raise(SIGKILL);
      milliseconds += r.sleeps;
      if (r.sleeps == 0) return r;
    }
    return std::nullopt;
  }
  bool failing(const std::string& call, const Path& path) {
    const auto rule = hit(call, path);
    if (rule) errno = rule->code;
    return rule.has_value();
  }
  ssize_t lying(const std::string& call, int file, const void* from, std::size_t count,
                const std::function<ssize_t(const void*)>& write) {
    const auto rule = hit(call, path_of(file));
    if (!rule) return write(from);
    if (rule->code) return errno = rule->code, -1;
    std::string changed(static_cast<const char*>(from), count);
    changed[count / 2] ^= 4;
    return write(changed.data());
  }
  int named(const Path& path, int file) {
    const std::lock_guard lock(mutex_);
    if (file >= 0) paths_[file] = path;
    return file;
  }
  Path path_of(int file) const {
    const std::lock_guard lock(mutex_);
    const auto found = paths_.find(file);
    return found == paths_.end() ? Path() : found->second;
  }

  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  std::map<int, Path> paths_;
  int num_calls_ = 0;
};

/// While it lives, files are on a file system of these faults.
class WithFaults {
 public:
  explicit WithFaults(const std::string& rules) : files(FaultyFileSystem::parse(rules)) {
    formats::set_file_system(&files);
  }
  ~WithFaults() { formats::set_file_system(nullptr); }
  WithFaults(const WithFaults&) = delete;
  WithFaults& operator=(const WithFaults&) = delete;

  FaultyFileSystem files;
};

}  // namespace moesh
