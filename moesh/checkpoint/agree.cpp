#include "moesh/checkpoint/agree.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/comm/roll.h"

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

}  // namespace

void together(comm::Group& group, const std::function<void()>& f) {
  std::string fault;  // its kind as a letter, then its text
  try {
    f();
  } catch (const Error& e) {
    fault = static_cast<char>('a' + static_cast<int>(e.kind())) + std::string(e.what());
  } catch (...) {
    fault = static_cast<char>('a' + static_cast<int>(ErrorKind::internal)) +
            comm::text_of(std::current_exception());
  }
  const at::Tensor all = lengths(group, static_cast<std::int64_t>(fault.size()));
  for (int r = 0; r < group.size(); ++r) {
    const auto length = all[r].item<std::int64_t>();
    if (length == 0) continue;
    const std::string text = broadcast(group, fault, length, r);
    throw Error(static_cast<ErrorKind>(text[0] - 'a'),
                text.substr(1) +
                    (group.size() > 1
                         ? detail::concat(" (rank ", group.members()[static_cast<size_t>(r)], ")")
                         : ""));
  }
}

std::string text_of_first(comm::Group& group, const std::string& text) {
  const auto length =
      lengths(group, static_cast<std::int64_t>(text.size()))[0].item<std::int64_t>();
  return length == 0 ? "" : broadcast(group, text, length, 0);
}

}  // namespace moesh::checkpoint
