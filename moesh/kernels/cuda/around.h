#pragma once
// The kernels around the MoE layer, under the rules of launch.h. They pass memory once, in pieces
// of 16 bytes: eight features of a row.

#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::cuda {

/// RMSNorm of N rows of D features: y = r x w, r = 1 / sqrt(mean(x^2) + eps).
struct Norm {
  std::int64_t num_rows;
  std::int64_t width;        // D, a multiple of 8, at most 8192
  std::int64_t stride;       // from a row of x to the next, a multiple of 8; y, dy, dx have no gaps
  float eps = 0.f;           // of forward
  const float* weight = {};  // [D]; null: none
};
Error norm(const Norm&, const void* x, void* y, float* r_N, Stream);
/// The number of floats that norm_backward needs besides its results.
std::int64_t norm_workspace(const Norm&);
/// d_weight is null without a weight. Its terms are summed in a fixed order. `beside`
/// (null: 0) is added to dx.
Error norm_backward(const Norm&, const void* x, const float* r_N, const void* dy,
                    const void* beside, float* workspace, void* dx, float* d_weight, Stream);

/// Rotary embedding of heads [batch, length, num_heads, num_kept + 2 num_turns].
struct Rope {
  std::int64_t batch, length, num_heads;
  std::int64_t num_kept;    // features that stay, a multiple of 8
  std::int64_t num_turns;   // frequencies, a multiple of 8
  std::int64_t strides[3];  // of x, from a sequence, position and head to the next: multiples of 8
  bool leading;             // the first features turn; else the last ones
  bool interleaved;         // x has pairs side by side, y evens then odds
  bool adjoint;             // from the gradient of y to that of x
  const float *cos, *sin;   // [positions, num_turns]
  const std::int64_t* positions = nullptr;  // [batch, length]: the line of each token; null: l
};
/// y has no gaps, or is x itself: then num_turns is 8 times a power of two, at most 256.
Error rope(const Rope&, const void* x, void* y, Stream);

/// RMSNorm of each head, which then turns. Heads have 64, 128 or 256 features and are not
/// interleaved; x has the strides, y, dy, dx have no gaps. `adjoint` does not matter.
Error norm_rope(const Rope&, const float* weight, float eps, const void* x, void* y, float* r_N,
                Stream);
/// The number of floats that norm_rope_backward needs besides its results.
std::int64_t norm_rope_workspace(const Rope&);
/// The terms of d_weight are summed in a fixed order.
Error norm_rope_backward(const Rope&, const float* weight, const void* x, const float* r_N,
                         const void* dy, float* workspace, void* dx, float* d_weight, Stream);

/// Heads [batch, length, num_heads, width] without gaps; lse is [batch, num_heads, length].
struct Sinks {
  std::int64_t batch, length, num_heads;
  std::int64_t width;  // a multiple of 8, at most 256; fewer than 2^34 numbers in all
};
/// y exp(lse - lse') over y, and lse' = log(exp(lse) + exp(sink)).
Error add_sinks(const Sinks&, const float* sinks, const float* lse, void* y, float* lse_out,
                Stream);
/// The number of floats that sink_gradient needs besides its result.
std::int64_t sink_workspace(const Sinks&);
/// Minus the sum of exp(sink - lse') <dy, y>, in a fixed order.
Error sink_gradient(const Sinks&, const float* sinks, const float* lse, const void* y,
                    const void* dy, float* workspace, float* d_sinks, Stream);

/// Logits of N tokens, without gaps.
struct Logits {
  std::int64_t num_tokens, num_words;  // words: a multiple of 8
  const std::int64_t* label_N;         // a column, or -1: not here
};
/// The largest, the sum of exponentials of the distance from it, and the logit of the label (0: not
/// here).
Error logit_sums(const Logits&, const void* logits_NV, float* max_N, float* sum_N, float* picked_N,
                 Stream);
/// weight (exp(logit - total), less 1 at the label), over the logits.
Error logit_gradient(const Logits&, void* logits_NV, const float* total_N, const float* weight_N,
                     Stream);

/// Features of heads, and the strides of a sequence, a position and a head: multiples of 8.
struct HeadsAt {
  void* data;
  std::int64_t strides[3];
};
/// Latent attention: kv has num_own features of a key and num_value of a value in each head, key
/// num_shared features for all heads; k and v are what attention takes. Numbers are multiples of 8.
struct Latent {
  std::int64_t batch, length, num_heads;
  std::int64_t num_own, num_shared, num_value;
  HeadsAt kv, key, k, v;
};
/// From kv and key to k and v.
Error latent_heads(const Latent&, Stream);
/// From the gradients of k and v to those of kv and key, which is summed over the heads in order.
Error latent_heads_backward(const Latent&, Stream);

/// Causal attention of heads of 64 features, in which a query sees itself and window - 1 keys
/// before it; window is at most 128.
struct WindowAttention {
  std::int64_t batch, length, num_heads;
  std::int64_t num_groups;  // key heads, each of num_heads / num_groups query heads
  std::int64_t window;
  float scale;
  HeadsAt q, k, v;
  const float* sinks = nullptr;  // [num_heads]; null: none
};
/// y has no gaps; lse [batch, num_heads, length], with the sinks.
Error window_attention(const WindowAttention&, void* y, float* lse, Stream);
/// y, dy and the results have no gaps. dots is <dy, y> of each row, as lse lies.
Error window_attention_backward(const WindowAttention&, const void* y, const float* lse,
                                const void* dy, float* dots, void* dq, void* dk, void* dv, Stream);

/// h = silu(gate) up of `size` numbers, a multiple of 8.
Error dense_swiglu(const void* gate, const void* up, void* h, std::int64_t size, Stream);
/// h is null: not wanted once more; it may be dh.
Error dense_swiglu_backward(const void* gate, const void* up, const void* dh, void* d_gate,
                            void* d_up, void* h, std::int64_t size, Stream);

/// The gated delta rule (kernels/attention.h) of heads of 128 features. A key head has a query, a
/// key and its value heads' values side by side.
struct DeltaRule {
  std::int64_t batch, length, num_key_heads, num_value_heads;
  std::int64_t
      strides[3];  // of qkv, from a sequence, token and key head to the next: multiples of 8
  const float *decay, *beta;   // [batch, length, num_value_heads]
  const std::int64_t* starts;  // [batch, length]; null: every document begins at 0
};
/// The number of bytes that delta_rule, or delta_rule_backward, needs besides its results: what it
/// makes of the chunks of 64 tokens of a key head, and of a value head.
constexpr std::int64_t delta_rule_workspace(const DeltaRule& r, bool backward) {
  const std::int64_t chunks = r.batch * ((r.length + 63) / 64), key = 64 * (2 * 128 * 2 + 2 * 4),
                     value = 64 * (2 * 64 * 2 + 16), states = 2 * 128 * (128 + 64) * 2;
  return chunks *
         (r.num_key_heads * key + r.num_value_heads * (value + (backward ? states : 0)) + 64 * 4);
}
/// y is [batch, length, num_value_heads, 128]; states are [batch, num_value_heads, 128, 128], null:
/// zeros, or not wanted.
Error delta_rule(const DeltaRule&, const void* qkv, const float* first_state, void* workspace,
                 void* y, float* last_state, Stream);
/// From a state of zeros. d_qkv has the strides of qkv.
Error delta_rule_backward(const DeltaRule&, const void* qkv, const void* dy, void* workspace,
                          void* d_qkv, float* d_decay, float* d_beta, Stream);

/// y_t = silu(sum over s of w_{3 - s} x_{t - s}), s from 0 to 3, of each channel, within documents.
struct Convolution {
  std::int64_t batch, length, num_heads;
  std::int64_t width;          // channels of a head, a multiple of 8
  std::int64_t strides[3];     // of x, as those of qkv above; y, dy and dx have no gaps
  const float* w;              // [num_heads, width, 4]
  const std::int64_t* starts;  // as above
};
Error convolution(const Convolution&, const void* x, void* y, Stream);
/// Runs of tokens, each of which leaves a term of dw.
constexpr std::int64_t convolution_terms(const Convolution& c) {
  return c.batch * ((c.length + 127) / 128);
}
/// dw_terms is [terms, num_heads, width, 4].
Error convolution_backward(const Convolution&, const void* x, const void* dy, float* dw_terms,
                           void* dx, Stream);

// ---- routers; logits and sums are float32 without gaps ----

/// The weights of a token's choices: their scores, that add up to one if they are normalised (with
/// epsilon added to their sum), times the scale.
struct Weighing {
  std::int64_t num_tokens, num_experts, top_k;  // at most 256 experts, 32 choices
  enum Scoring { sigmoid, softmax, softmax_chosen } scoring;
  bool normalize;
  float epsilon, scale;
};
Error weigh(const Weighing&, const float* logits_TE, const std::int64_t* experts_TK,
            float* weights_TK, Stream);
Error weigh_backward(const Weighing&, const float* logits_TE, const std::int64_t* experts_TK,
                     const float* d_weights_TK, float* d_logits_TE, Stream);

/// What a balance loss compares in each of B sequences of equally many tokens: probabilities, which
/// are the softmax of the logits or their sigmoids over the sum of these, and choices.
struct Balance {
  std::int64_t num_tokens, num_experts, top_k, num_sequences;
  bool softmax;
  const std::int64_t* experts_TK;
  const bool* valid_T;  // the tokens that count; null: all
};
constexpr int kBalanceTokens = 64;      // that leave one term
constexpr float kLeastScores = 1e-20f;  // added to the sum of sigmoids
/// The number of floats that balance needs besides its result.
std::int64_t balance_workspace(const Balance&);
/// [2, B, E]: sums of probabilities, and how often each expert was chosen; in a fixed order.
Error balance(const Balance&, const float* logits_TE, float* workspace, float* sums_2BE, Stream);
/// From the gradient of the sums of probabilities.
Error balance_backward(const Balance&, const float* logits_TE, const float* d_sums_BE,
                       float* d_logits_TE, Stream);

/// Adds to counts_E how often each expert was chosen by tokens that count (valid_T null: all).
Error count_choices(const std::int64_t* experts_TK, const bool* valid_T, std::int64_t num_tokens,
                    std::int64_t top_k, std::int64_t num_experts, std::int64_t* counts_E, Stream);

/// out[i] = x[index[i]], 0 where the index is negative.
Error gather_floats(const float* x, const std::int32_t* index_R, float* out_R,
                    std::int64_t num_rows, Stream);

}  // namespace moesh::kernels::cuda
