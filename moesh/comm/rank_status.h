#pragma once
// The roll of a world: which ranks have left it, and which failed first. A rank that waits asks it
// whether the wait can still end well.

#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm {

class RankStatus {
 public:
  explicit RankStatus(int num_ranks) : left_(static_cast<size_t>(num_ranks)) {}

  /// The function of a rank of this process ended, with what it threw or null; the first exception
  /// is kept.
  void ended(int rank, const std::exception_ptr& fault);
  /// A rank elsewhere returned.
  void returned(int rank);
  /// A rank failed elsewhere, with an error of this text and kind.
  void failed(int rank, const std::string& text, ErrorKind kind = ErrorKind::comm);

  /// The first exception that `ended` was told, or null.
  std::exception_ptr first_exception() const;
  /// "rank 2 failed: ..." of the first rank that failed anywhere; empty if none did.
  std::string first_failure() const;
  /// The first failure as the ranks of this process know it, which all processes end with: of the
  /// kind of the first, in words of an exception here where there is one.
  void rethrow_first() const;
  /// Ranks that are still there.
  std::vector<int> present() const;
  bool has_left(int rank) const;
  /// Why a wait for `missing` ranks cannot end well; empty while it can.
  std::string reason(const std::vector<int>& missing) const;

 private:
  void fail(int rank, const std::string& text, ErrorKind kind);

  mutable std::mutex mutex_;
  std::vector<bool> left_;
  std::exception_ptr exception_;
  std::string failure_;
  ErrorKind kind_ = ErrorKind::comm;  // of the first failure
};

/// Whether it was thrown for lack of memory: none was there, or a size is more than any memory has.
bool is_about_memory(const std::exception_ptr& fault);

/// The kind of an Error; config for lack of memory, and internal for anything else that is thrown.
ErrorKind kind_of(const std::exception_ptr& fault);

/// The text of an exception.
std::string text_of(const std::exception_ptr& fault);

/// "rank 3", "ranks 1, 2"
std::string name_ranks(const std::vector<int>& ranks);

/// "rank 3 did not arrive within 5 s"
std::string too_late(const std::vector<int>& missing, std::chrono::milliseconds timeout);

/// Throws the Error (comm) of a wait that ended badly. `rank` is a world rank, `where` is "" or
/// "the end of ".
[[noreturn]] void give_up(int rank, const char* where, const Call& call, const std::string& group,
                          const std::string& why);

/// Throws unless the span which `from` sends has the `expected` elements. Both are world ranks.
void check_count(std::int64_t sent, std::int64_t expected, const Call& call,
                 const std::string& group, int from, int to);

}  // namespace moesh::comm
