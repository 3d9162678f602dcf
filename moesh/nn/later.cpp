#include "moesh/nn/later.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "moesh/base/error.h"

namespace moesh::nn {
namespace {

// A rank is a thread; layers check values and know nothing of steps.
thread_local CheckLater* innermost = nullptr;

}  // namespace

CheckLater::CheckLater() : scope_(innermost, this) {}
CheckLater* CheckLater::current() { return innermost; }
ScopedValue<CheckLater*> CheckLater::use(CheckLater* other) { return {innermost, other}; }

void CheckLater::Checks::raise(const std::int64_t* found) const {
  for (std::size_t i = 0; i < texts.size(); ++i)
    if (found[2 * i] != 0) throw Error(ErrorKind::data, texts[i](found[2 * i + 1]));
}

void check_values(const at::Tensor& wrong, const at::Tensor& values,
                  const std::function<std::string(std::int64_t)>& text) {
  if (values.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor all = wrong.reshape({-1}).to(at::kByte);
  const at::Tensor first = all.argmax(0).reshape({1});  // of equals the first
  const at::Tensor found = at::cat(
      {all.index_select(0, first).to(at::kLong), values.reshape({-1}).index_select(0, first)});
  if (CheckLater* const current = CheckLater::current()) {
    current->checks_.found.push_back(found);
    current->checks_.texts.push_back(text);
    return;
  }
  const at::Tensor host = found.cpu();
  CheckLater::Checks{.found = {}, .texts = {text}}.raise(host.const_data_ptr<std::int64_t>());
}

}  // namespace moesh::nn
