#pragma once
// The experts of one rank: grouped SwiGLU, forward and backward, by hand.
//   swiglu          h = silu(g) * u
//   clamped_swiglu  g = min(g, 7), u = clamp(u, -7, 7), h = (u + 1) * g * sigmoid(1.702 g)  GPT-OSS
//   g = w1 x + b1, u = w3 x + b3, y = w2 h + b2
//   score s of the row: before: x -> s x; after: y -> s y
//   in float8 the rows are x before its score, h with its score, and the gradients of g, u and y
// Nothing of size [R, D] is made or kept where the rows are given as indices into tokens: rows are
// gathered, and outputs combined, block by block. The score acts on the F side (w1 (s x) = s (w1
// x), s (w2 h) = w2 (s h)), so that d(score) needs no row of width D either. T tokens, D model, F
// ffn, e local experts, K top-k, R rows at their experts

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "moesh/kernels/float8.h"

namespace moesh::kernels {

enum class ScoreSide { none, before, after };
enum class Activation { swiglu, clamped_swiglu };

struct ExpertsConfig {
  Activation activation = Activation::swiglu;
  ScoreSide scores = ScoreSide::after;
  bool weights_later = false;  // backward leaves the gradients of the weights for later
  /// T of products in float8 (float8.h): those of forward and those that give gradients of inputs.
  /// Gradients of weights and what LoRA adds stay in the type of the run. 0: no product is.
  std::int64_t float8_tile = 0;
  Float8Counts float8_counts = {};  // backward counts what both passes round, but for weights
};

/// The LoRA adapters of w1 and w3 together and of w2; undefined: none. Where it adds anything, the
/// weights themselves are frozen: backward gives only the gradients of these.
///   [g; u] = [w1; w3] x + scale13 b13 (a13 x)        y = w2 h + scale2 b2 (a2 h)
struct ExpertsLora {
  at::Tensor a13_erD, b13_e2Fr;  // the rows of w1, then those of w3
  at::Tensor a2_erF, b2_eDr;
  double scale13 = 1, scale2 = 1;

  bool any() const { return a13_erD.defined() || a2_erF.defined(); }
};

/// w1, w3 and w2 in float8.
struct ExpertsCodes {
  WeightCodes w1, w3, w2;
  bool defined() const { return w1.defined(); }
};

/// float64, float32 or bfloat16, all of one dtype. Gate and up are two tensors also where a
/// checkpoint interleaves them (GPT-OSS: gate = gate_up[:, 0::2], up = gate_up[:, 1::2]): both
/// halves are then plain contiguous GEMM operands, and ranks can split F. Biases are optional: an
/// undefined tensor means none. Where ranks split F, y is a partial sum, and b2 belongs to one rank
/// only.
struct ExpertsWeights {
  at::Tensor w1_eFD;  // gate
  at::Tensor w3_eFD;  // up
  at::Tensor w2_eDF;  // down
  at::Tensor b1_eF;
  at::Tensor b3_eF;
  at::Tensor b2_eD;
  ExpertsLora lora = {};
  /// Own kernels read these where they are defined, not the numbers of the weights.
  ExpertsCodes codes = {};
};

/// The same of what f makes of each tensor; codes stay.
template <class F>
ExpertsWeights mapped(const ExpertsWeights& w, const F& f) {
  const ExpertsLora& l = w.lora;
  return {f(w.w1_eFD),
          f(w.w3_eFD),
          f(w.w2_eDF),
          f(w.b1_eF),
          f(w.b3_eF),
          f(w.b2_eD),
          {f(l.a13_erD), f(l.b13_e2Fr), f(l.a2_erF), f(l.b2_eDr), l.scale13, l.scale2},
          w.codes};
}
/// Sizes and dtypes of weights without LoRA, and without their memory: one number stands for all of
/// each.
ExpertsWeights shapes_of(const ExpertsWeights& w);
/// Memory for the gradients that are products of rows: all but those of b1 and b3.
ExpertsWeights empty_products(const ExpertsWeights& w);

/// The rows, sorted by expert. Either x is rows_RD itself and token_R and inverse_TK are undefined;
/// or x is x_TD, row r is x[token_R[r]], and the output of token t is the sum of rows
/// inverse_TK[t][k] (-1: none): see sort_by_expert. The second form with K = 1 also undoes a
/// permutation, such as that of rank_major_to_expert_major. All on one device, so that nothing need
/// wait for an accelerator (on meta ends_e is on the host, where it can have values).
struct ExpertsInput {
  at::Tensor x;           // [R, D] or [T, D], dtype of the weights
  at::Tensor ends_e;      // int32: the rows of expert i end before row ends_e[i], the last at R
  at::Tensor scores_R;    // float32 (float64 with float64 weights); undefined with ScoreSide::none
  at::Tensor token_R;     // int32
  at::Tensor inverse_TK;  // int32
};

/// Why kernels that take neither LoRA nor float8 do not take these; "": they do.
std::string plain_experts_only(const ExpertsConfig& config, const ExpertsWeights& weights);

/// What a backward adds to config.float8_counts, if somebody counts: the inputs of both products,
/// and the gradients of all three.
void count_float8_experts(const ExpertsConfig& config, const ExpertsInput& input,
                          const at::Tensor& hidden_RF, const at::Tensor& dy,
                          const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF);

/// All that backward needs besides the weights: what came in, the pre-activations (w1 x and w3 x,
/// with LoRA, without bias and score), and what A of LoRA made of the rows, times its scale.
struct ExpertsSaved {
  ExpertsInput input;
  at::Tensor gate_RF;
  at::Tensor up_RF;
  at::Tensor low13_Rr = {}, low2_Rr = {};  // undefined: no LoRA there
  std::uint32_t version = 0;               // of gate_RF when forward returned: backward changes it
};

struct ExpertsOutput {
  at::Tensor y;  // shape of input.x
  ExpertsSaved saved;
};

/// y = sum over the rows of each token (or each row's own y). Sums over D and F accumulate in
/// float32 or better, as does the sum over a token's rows, in a fixed order that does not depend on
/// the number of threads.
ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input);

struct ExpertsGradients {
  at::Tensor x;            // shape of input.x
  at::Tensor scores_R;     // undefined with ScoreSide::none
  ExpertsWeights weights;  // dtype of the weights; zeros for experts without rows; biases undefined
                           // where there are none
  /// With config.weights_later, instead of them: computes them, once, with what it keeps. The
  /// weights themselves need not be there any more.
  std::function<ExpertsWeights()> weights_later;
};

/// dy has the shape of y. Consumes the pre-activations: kernels may write over them. A second
/// backward of the same forward is an Error(internal) on every device, and autograd refuses it too,
/// as it sees that they have changed.
ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy);

}  // namespace moesh::kernels
