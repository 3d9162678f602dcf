#pragma once
// Causal softmax attention, forward and backward, by hand: nothing of size [L, S] is kept. B batch,
// L queries, S keys, h query heads, g key heads (h is a multiple of g), d width of queries and
// keys, v width of values

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Query i is at position start + i and sees the keys at positions [first, start + i], where first
/// is 0, or what window, chunk and the documents leave of it.
struct AttentionConfig {
  double scale = 1;
  std::int64_t start = 0;
  std::int64_t window = 0;  // a query sees itself and window - 1 keys before it; 0: all
  std::int64_t chunk = 0;   // a query sees the keys of its own chunk of this many positions; 0: all
  // The most documents that the queries of the batch may be of, where they have starts.
  std::int64_t most_documents = 0;
};

/// float64, float32 or bfloat16, all of one dtype. Features of a head lie side by side; other
/// strides may be anything.
struct AttentionInput {
  at::Tensor q_BLhd, k_BSgd, v_BSgv;
  at::Tensor sinks_h = {};  // one more score of each head, without a value; float32 (float64 with
                            // float64), or undefined
  // int64: the key with which the document of each query begins, before which it sees none, and
  // from which its chunks count; below 0 where that key is not among these. Undefined: 0.
  at::Tensor starts_BL = {};
};

struct AttentionOutput {
  at::Tensor y_BLhv;
  at::Tensor lse_BhL;  // the logarithm of the sum of exponentials; float32 or float64
};

struct AttentionGradients {
  at::Tensor q_BLhd, k_BSgd, v_BSgv, sinks_h;
};

/// Whether there is a kernel for these, on the device of q.
bool takes_attention(const AttentionConfig& config, const AttentionInput& input);

/// Sums accumulate in float32 or better, in an order that does not depend on the number of threads.
AttentionOutput attention_forward(const AttentionConfig& config, const AttentionInput& input);
AttentionGradients attention_backward(const AttentionConfig& config, const AttentionInput& input,
                                      const AttentionOutput& output, const at::Tensor& dy_BLhv);

}  // namespace moesh::kernels
