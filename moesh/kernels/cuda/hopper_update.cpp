// The torch side of update.h. Float64, and what is not aligned, goes to LibTorch's ops.

#include <ATen/ops/empty.h>

#include <algorithm>

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/cuda/update.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::hopper {
namespace {

bool takes(const at::Tensor& t) { return t.scalar_type() == at::kFloat && in_chunks(t); }

bool takes(const AdamWParam& p) {
  return takes(p.value) && takes(p.mean) && takes(p.mean_square) && in_chunks(p.copy);
}

}  // namespace

void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params) {
  std::vector<AdamWTensor> tensors;
  std::vector<at::Tensor> gradients;  // that live until the kernel has its place in the queue
  std::vector<AdamWParam> rest;
  for (const auto& p : params) {
    if (p.value.numel() == 0) continue;
    if (!takes(p)) {
      rest.push_back(p);
      continue;
    }
    gradients.push_back(aligned(p.gradient));
    tensors.push_back({.value = floats(p.value),
                       .gradient = static_cast<const float*>(in(gradients.back())),
                       .mean = floats(p.mean),
                       .mean_square = floats(p.mean_square),
                       .copy = out(p.copy),
                       .size = p.value.numel(),
                       .weight_decay = p.weight_decay});
  }
  if (!rest.empty()) aten_kernels().adamw_(numbers, rest);
  const AdamWStep step{.beta1 = numbers.beta1,
                       .beta2 = numbers.beta2,
                       .eps = numbers.eps,
                       .numbers = static_cast<const double*>(in(numbers.step))};
  OnDeviceOf{numbers.step}("adamw", adamw, step, static_cast<const AdamWTensor*>(tensors.data()),
                           static_cast<std::int64_t>(tensors.size()));
}

void cast_into(const at::Tensor& to, const at::Tensor& from) {
  const auto are = [&](at::ScalarType a, at::ScalarType b) {
    return from.scalar_type() == a && to.scalar_type() == b;
  };
  if (!in_chunks(from) || !in_chunks(to))
    aten_kernels().cast_into(to, from);
  else if (are(at::kBFloat16, at::kFloat))
    OnDeviceOf{to}("widen", widen, in(from), floats(to), to.numel());
  else if (are(at::kFloat, at::kBFloat16))
    OnDeviceOf{to}("narrow", cuda::narrow, static_cast<const float*>(in(from)), out(to),
                   to.numel());
  else
    aten_kernels().cast_into(to, from);
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  if (!std::all_of(tensors.begin(), tensors.end(),
                   [](const at::Tensor& t) { return t.scalar_type() == at::kFloat; }))
    return aten_kernels().sum_of_squares(tensors);
  std::vector<at::Tensor> held;
  std::vector<SquaresTensor> list;
  for (const auto& t : tensors) {
    held.push_back(aligned(t));
    list.push_back({static_cast<const float*>(in(held.back())), t.numel()});
  }
  const auto num_tensors = static_cast<std::int64_t>(list.size());
  const auto wide = tensors[0].options().dtype(at::kDouble);
  const at::Tensor workspace = at::empty({squares_workspace(num_tensors)}, wide),
                   sum = at::empty({}, wide);
  OnDeviceOf{sum}("sum_of_squares", cuda::sum_of_squares,
                  static_cast<const SquaresTensor*>(list.data()), num_tensors,
                  static_cast<double*>(out(workspace)), static_cast<double*>(out(sum)));
  return sum;
}

}  // namespace moesh::kernels::hopper
