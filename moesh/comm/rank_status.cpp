#include "moesh/comm/rank_status.h"

#include <c10/util/Exception.h>

#include <new>
#include <stdexcept>

namespace moesh::comm {

void RankStatus::returned(int rank) {
  std::lock_guard lock(mutex_);
  left_[static_cast<size_t>(rank)] = true;
}

void RankStatus::ended(int rank, const std::exception_ptr& fault) {
  if (!fault) return returned(rank);
  std::lock_guard lock(mutex_);
  if (!exception_) exception_ = fault;
  fail(rank, text_of(fault), kind_of(fault));
}

void RankStatus::failed(int rank, const std::string& text, ErrorKind kind) {
  std::lock_guard lock(mutex_);
  fail(rank, text, kind);
}

void RankStatus::fail(int rank, const std::string& text, ErrorKind kind) {
  left_[static_cast<size_t>(rank)] = true;
  if (!failure_.empty()) return;
  failure_ = detail::concat("rank ", rank, " failed: ", text);
  kind_ = kind;
}

void RankStatus::rethrow_first() const {
  std::lock_guard lock(mutex_);
  if (exception_ && kind_of(exception_) == kind_) std::rethrow_exception(exception_);
  if (exception_) throw Error(kind_, text_of(exception_));
  if (!failure_.empty()) throw Error(kind_, failure_);
}

std::exception_ptr RankStatus::first_exception() const {
  std::lock_guard lock(mutex_);
  return exception_;
}

std::string RankStatus::first_failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<int> RankStatus::present() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (size_t r = 0; r < left_.size(); ++r)
    if (!left_[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

bool RankStatus::has_left(int rank) const {
  std::lock_guard lock(mutex_);
  return left_[static_cast<size_t>(rank)];
}

std::string RankStatus::reason(const std::vector<int>& missing) const {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) return failure_;
  for (int r : missing)
    if (left_[static_cast<size_t>(r)])
      return detail::concat("rank ", r, " has returned and will not come");
  return {};
}

ErrorKind kind_of(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const Error& e) {
    return e.kind();
  } catch (...) {
    return is_about_memory(fault) ? ErrorKind::config : ErrorKind::internal;
  }
}

bool is_about_memory(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    // The last one remains of the first if there is no memory for its text.
    for (const char* known : {"DefaultCPUAllocator: ", "Storage size calculation overflowed",
                              "numel: integer multiplication overflow", "[enforce fail a"})
      if (text.find(known) != std::string::npos) return true;
    return false;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const std::length_error&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string text_of(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const c10::Error& e) {
    // Behind the text is a backtrace, which is for developers of LibTorch.
    const std::string text = e.what_without_backtrace();
    return text.substr(0, text.find("\nException raised from"));
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string too_late(const std::vector<int>& missing, std::chrono::milliseconds timeout) {
  return detail::concat(name_ranks(missing), " did not arrive within ",
                        std::chrono::duration<double>(timeout).count(), " s");
}

void give_up(int rank, const char* where, const Call& call, const std::string& group,
             const std::string& why) {
  throw Error(ErrorKind::comm, detail::concat("rank ", rank, " waited in ", where, call.describe(),
                                              ", ", call.place(group), ": ", why));
}

void check_count(std::int64_t sent, std::int64_t expected, const Call& call,
                 const std::string& group, int from, int to) {
  MOESH_CHECK(sent == expected, ErrorKind::comm, "in ", call.describe(), ", operation ",
              call.sequence, " of group '", group, "', rank ", from, " sends ", sent,
              " elements and rank ", to, " expects ", expected,
              ". Every rank must pass the same rows.");
}

}  // namespace moesh::comm
