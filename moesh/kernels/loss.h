#pragma once
// Softmax cross-entropy of a slice of the vocabulary, in two passes over the logits: the sums that
// ranks exchange, and then the gradient. N tokens, V words of this rank

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Sums over the words for each token, float32 (float64 with float64).
struct LogitSums {
  at::Tensor max_N;     // -inf without a word
  at::Tensor sum_N;     // of exp(logit - max)
  at::Tensor picked_N;  // the logit of the label, 0 where it is not here
};

/// label_N (int64): a column of logits_NV, or -1: not here.
LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N);

/// exp(logit - total_N), less 1 at the label; rows of zeros where weight_N is 0 (else it is 1). The
/// result is the memory of logits_NV. total_N and weight_N have the dtype of LogitSums.
at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N);

}  // namespace moesh::kernels
