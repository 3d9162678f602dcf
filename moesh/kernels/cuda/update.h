#pragma once
// Operations on all gradients at once, under the rules of launch.h. Lists of tensors are
// arguments of a kernel: a step is a few launches, however many parameters there are.

#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::cuda {

/// float32 tensors of one parameter, 16-byte aligned.
struct AdamWTensor {
  float* value;
  const void* gradient;
  float *mean, *mean_square;
  void* copy;  // bf16, 8-byte aligned: the new value once more; null: not wanted
  std::int64_t size;
  double weight_decay;
  bool is_narrow;  // the gradient is bf16
};
struct AdamWStep {
  double beta1, beta2, eps;
  const double* numbers;  // of the device: learning rate, number, factor, skip
};
/// AdamW of kernels/update.h.
Error adamw(const AdamWStep&, const AdamWTensor* tensors, std::int64_t num_tensors, Stream);

struct NarrowTensor {  // both 16-byte aligned
  const float* from;
  void* to;
  std::int64_t size;
};
/// float32 to bf16, rounded to the nearest.
Error narrow(const NarrowTensor* tensors, std::int64_t num_tensors, Stream);
/// bf16 to float32.
Error widen(const void* from, float* to, std::int64_t size, Stream);

struct SquaresTensor {
  const void* data;  // 16-byte aligned
  std::int64_t size;
  bool is_narrow;  // bf16, not float32
};
/// The number of float64 that sum_of_squares needs besides its result.
std::int64_t squares_workspace(std::int64_t num_tensors);
/// In float64, in an order that depends only on the sizes.
Error sum_of_squares(const SquaresTensor* tensors, std::int64_t num_tensors, double* workspace,
                     double* sum, Stream);

}  // namespace moesh::kernels::cuda
