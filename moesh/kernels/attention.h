#pragma once
// What lets a token see those before it: attention, or the gated delta rule.
// Causal softmax attention, forward and backward, by hand: nothing of size [L, S] is kept. B batch,
// L queries, S keys, h query heads, g key heads (h is a multiple of g), d width of queries and
// keys, v width of values

#include <ATen/core/Tensor.h>

#include <array>

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

// ---- the gated delta rule, and the short convolution before it: what a layer computes that
// carries a state along the sequence in place of keys and values ---- L tokens, h value heads (a
// multiple of g: value heads in a row share a key head), c channels of a key head: its query, its
// key, and its value heads' values side by side; K taps

// Each head has a state S [d, v], zero where a document begins. For one token after the other
//
//   S <- exp(decay) S;   S <- S + k (beta (v - S' k))';   y = S' q
//
// where q and k are vectors of length 1, and q is divided by sqrt(d).
// Chunks of tokens are computed at once, with products of matrices.

struct DeltaRuleInput {
  at::Tensor qkv_BLgc;       // float64, float32 or bfloat16, of any length
  at::Tensor decay_BLh;      // 0 or less: the logarithm of what is left of the state
  at::Tensor beta_BLh;       // both float32 (float64 with float64)
  std::int64_t key_dim = 0;  // d
  // int64: the position at which the document of each token begins; undefined: all begin at 0.
  at::Tensor starts_BL = {};
  at::Tensor state_Bhdv = {};  // before the first token; undefined: zero. Float32 or float64.

  std::int64_t value_dim() const;  // v
  std::array<std::int64_t, 4> y_sizes() const, state_sizes() const;
};

struct DeltaRuleOutput {
  at::Tensor y_BLhv;      // of the type of qkv
  at::Tensor state_Bhdv;  // after the last token
};

/// `chunk` tokens at once, 1 or more: the results are the same but for rounding. All is computed
/// in float32, or float64 with float64; own kernels of a GPU round what they multiply to bfloat16,
/// and have chunks of 64.
DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, std::int64_t chunk);

struct DeltaRuleGradients {
  at::Tensor qkv_BLgc, decay_BLh, beta_BLh;
};
/// From the gradient of y. The states are computed again: only the input is kept.
DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk);

// ---- y_t = silu(sum over s of w_{K - 1 - s} x_{t - s}), of each channel, in its document ----

/// x is [B, L, g, c], w [g, c, K] float32 (float64 with float64), and starts as above.
at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& starts_BL);

struct ConvolutionGradients {
  at::Tensor x, w;
};
ConvolutionGradients convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                          const at::Tensor& starts_BL, const at::Tensor& dy);

}  // namespace moesh::kernels
