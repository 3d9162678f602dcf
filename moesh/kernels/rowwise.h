#pragma once
// Functions of each row, or head, in one pass over memory: in float32 or wider, and rounded
// once. B batch, L tokens, P positions, D features of a row, h heads, d features of a head

#include <ATen/core/Tensor.h>

#include <optional>

namespace moesh::kernels {

// ---- rotary embedding: pairs of features turn by an angle that belongs to the position ----
// f frequencies

/// 2 f features of a head turn, the others stay.
struct Rotation {
  at::Tensor cos_Pf, sin_Pf;  // a line for each position; float32 (float64 with float64)
  at::Tensor positions_BL;    // int64: the line of each token; undefined: L lines, in their order
  bool interleaved = false;   // pairs (2i, 2i + 1), laid out evens then odds; else (i, i + f)
  bool leading = false;       // the first features turn; else the last ones
};

/// Whether the argument is needed afterwards. If not, the result may be its memory: features that
/// stay are not copied then.
enum class Argument { kept, consumed };

/// x [B, L, h, d] turned, [B, L, h, d].
at::Tensor rotate_forward(const Rotation& rotation, const at::Tensor& x_BLhd,
                          Argument x = Argument::kept);
/// Its adjoint: the gradient of x from that of the result.
at::Tensor rotate_backward(const Rotation& rotation, const at::Tensor& dy_BLhd,
                           Argument dy = Argument::kept);

// ---- RMSNorm: y = r x w with r = 1 / sqrt(mean(x^2) + eps) ----

struct NormOutput {
  at::Tensor y;  // shape and dtype of x
  at::Tensor r;  // one number for each row, all that backward needs besides the input; float32
                 // (float64 with float64)
};

/// x is [.., D]; weight_D is float32 (float64 with float64), or undefined: no weight. With `turn`
/// rows are heads [B, L, h, d], which then turn.
NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                        const std::optional<Rotation>& turn = {});

struct NormGradients {
  at::Tensor x, weight_D;  // weight_D is undefined if there is none
};
/// `beside` is a gradient of x that comes by another way and is added; undefined: none.
NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy, const std::optional<Rotation>& turn = {},
                            const at::Tensor& beside = {});

// ---- latent attention: its heads, from what the latent gives each and the key that all share ----
// n features of a key of its own, r shared ones, v features of a value

struct LatentHeads {
  at::Tensor k_BLhd;  // [B, L, h, n + r]: the first n features of kv, then those of the shared key
  at::Tensor v_BLhv;  // the other features of kv
};

/// kv is [B, L, h, n + v], key [B, L, r], both of one dtype; num_own is n.
LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key, std::int64_t num_own);

struct LatentGradients {
  at::Tensor kv, key;
};
/// The gradient of the shared key is the sum over the heads, in float32 or wider.
LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own);

// ---- SwiGLU of a dense MLP: h = silu(gate) up ----

/// Both of one shape and dtype.
at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up);

struct SwigluGradients {
  at::Tensor gate, up;
  at::Tensor h;  // once more, in the memory of dh, if it is wanted; else undefined
};
SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh,
                                bool wants_h = false);

// ---- sinks after attention without them ----
// A sink is one more score of a head, without a value: with lse the logarithm of the sum of
// exponentials, lse' = log(exp(lse) + exp(sink)) and y' = y exp(lse - lse').

/// Writes y' over y [.., L, h, d], and returns lse' of lse [.., h, L]; sinks_h and lse are float32
/// (float64 with float64).
at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h);

/// d(sinks) of y' and lse': minus the sum over the queries of exp(sink - lse') <dy, y'>.
at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy);

// ---- softmax cross-entropy of a slice of the vocabulary, in two passes over the logits ----
// The sums that ranks exchange, and then the gradient. N tokens, V words of this rank

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
