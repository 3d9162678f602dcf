#include "moesh/checkpoint/agree.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/comm/rank_status.h"

namespace moesh::checkpoint {
namespace {

// A letter is an int32, since groups carry no bytes.
std::string broadcast(comm::Group& group, const std::string& text, std::int64_t length, int root) {
  at::Tensor letters = at::empty({length}, at::kInt);
  if (group.rank() == root) std::copy(text.begin(), text.end(), letters.data_ptr<int>());
  letters = group.broadcast(letters.to(group.control_device()), root).cpu();
  const int* first = letters.const_data_ptr<int>();
  return std::string(first, first + length);
}

at::Tensor lengths(comm::Group& group, std::int64_t mine) {
  return group
      .all_gather(at::full({1}, mine, at::TensorOptions(group.control_device()).dtype(at::kLong)))
      .cpu();
}

// The meetings of ranks of which each has some work to do.
class Meetings {
 public:
  explicit Meetings(comm::Group& group) : group_(group) {}

  // For one that is at work: a meeting, if it is time for one. The threads that help it have no
  // part in that: collectives are of the rank's own thread.
  void breathe() {
    if (std::this_thread::get_id() != thread_ || Clock::now() < next_) return;
    meet(/*is_busy=*/true, "");
    next_ = Clock::now() + kInterval;
  }

  // For one that has ended, with a fault (its kind as a letter, then its text) or without.
  void end(const std::string& fault) {
    while (meet(/*is_busy=*/false, fault)) {
    }
  }

  // An exception came out of a meeting: do not meet again.
  bool are_over() const { return are_over_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{500};

  // True while a rank is busy. Throws the fault of the first rank that has one.
  bool meet(bool is_busy, const std::string& fault) {
    are_over_ = true;
    const auto on_device = at::TensorOptions(group_.control_device());
    const at::Tensor mine =
        at::tensor({std::int64_t{is_busy}, static_cast<std::int64_t>(fault.size())});
    const at::Tensor all =
        group_.all_gather(mine.unsqueeze(0).to(on_device.dtype(at::kLong))).cpu();
    bool any_busy = false;
    for (int r = 0; r < group_.size(); ++r) {
      any_busy |= all[r][0].item<bool>();
      if (const auto length = all[r][1].item<std::int64_t>(); length != 0)
        fail(r, broadcast(group_, fault, length, r));
    }
    are_over_ = false;
    return any_busy;
  }

  [[noreturn]] void fail(int rank, const std::string& fault) const {
    std::string text = fault.substr(1);
    if (group_.size() > 1)
      text += detail::concat(" (rank ", group_.members()[static_cast<std::size_t>(rank)], ")");
    throw Error(static_cast<ErrorKind>(fault[0] - 'a'), text);
  }

  comm::Group& group_;
  const std::thread::id thread_ = std::this_thread::get_id();
  Clock::time_point next_ = Clock::now() + kInterval;
  bool are_over_ = false;
};

}  // namespace

void together(comm::Group& group, const std::function<void(const Heartbeat& heartbeat)>& f) {
  Meetings meetings(group);
  std::string fault;
  try {
    f([&] { meetings.breathe(); });
  } catch (const Error& e) {
    if (meetings.are_over()) throw;
    fault = static_cast<char>('a' + static_cast<int>(e.kind())) + std::string(e.what());
  } catch (...) {
    if (meetings.are_over()) throw;
    fault = static_cast<char>('a' + static_cast<int>(ErrorKind::internal)) +
            comm::text_of(std::current_exception());
  }
  meetings.end(fault);
}

void together(comm::Group& group, const std::function<void()>& f) {
  together(group, [&](const Heartbeat&) { f(); });
}

std::string text_of_first(comm::Group& group, const std::string& text) {
  const auto length =
      lengths(group, static_cast<std::int64_t>(text.size()))[0].item<std::int64_t>();
  return length == 0 ? "" : broadcast(group, text, length, 0);
}

}  // namespace moesh::checkpoint
