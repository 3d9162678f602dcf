#pragma once
// Operations on all parameters at once: the sum of the squares of their gradients, AdamW,
// and casts. Nothing here waits for the device: the numbers of a step are read where they are.

#include <ATen/core/Tensor.h>

#include <vector>

namespace moesh::kernels {

/// A parameter in an update. All tensors have one number of elements and one device; value and the
/// two means have one dtype, float32 or float64.
struct AdamWParam {
  at::Tensor value;
  at::Tensor gradient;           // of that dtype, or bfloat16; is not read again: it may be
                                 // written to
  at::Tensor mean, mean_square;  // of the gradients so far
  at::Tensor copy = {};          // bfloat16: gets the new value as well; undefined: no copy
  double weight_decay = 0;
};

struct AdamWNumbers {
  double beta1, beta2, eps;
  /// float64 [4], on the device of the parameters: learning rate, number of the step (from 1), the
  /// factor of the gradients (clipping), and whether the step is skipped (not 0): then nothing is
  /// written.
  at::Tensor step;
};

/// AdamW (optim/adamw.h has the formula), in place. No bit depends on which parameters share a call
/// or, on the CPU, on where a shard begins.
void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params);

/// The sum of the squares of all elements, a float64 scalar; 0 without tensors. They are float32 or
/// float64, on one device. Same bits every time.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors, at::Device device);

/// Writes `from` into `to`, which has its shape, and is contiguous, on its device and of any dtype.
void cast_into(const at::Tensor& to, const at::Tensor& from);
/// The same of several, all at once.
struct Cast {
  at::Tensor to, from;
};
void cast_all(const std::vector<Cast>& casts);
/// x in another dtype; x itself if it has it.
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype);

}  // namespace moesh::kernels
