// Stands in for the kernels where moesh was built without a CUDA compiler.
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/update.h"

namespace moesh::kernels::cuda {
namespace {
constexpr Error kNone = "the CUDA kernels of moesh were not compiled: no CUDA compiler was found";
}

Error check_hopper(int) { return kNone; }
Error check_ampere(int) { return kNone; }
Error up(const Experts&, const void*, void*, void*, void*, Stream) { return kNone; }
Error down(const Experts&, const void*, void*, Stream) { return kNone; }
Error dh(const Experts&, const void*, void*, void*, void*, float*, Stream) { return kNone; }
Error dx(const Experts&, const void*, const void*, void*, Stream) { return kNone; }
Error dw13(const Experts&, const void*, const void*, const void*, void*, void*, Stream) {
  return kNone;
}
Error dw2(const Experts&, const void*, const void*, void*, Stream) { return kNone; }
Error score_gradient(const Experts&, const void*, const float*, float*, Stream) { return kNone; }
Error bias_gradients(const Experts&, const void*, void*, void*, float*, void*, void*, void*,
                     Stream) {
  return kNone;
}
Error expand(const void*, const std::int32_t*, void*, std::int64_t, std::int64_t, std::int64_t,
             Stream) {
  return kNone;
}
Error combine(const void*, const std::int32_t*, const void*, void*, std::int64_t, std::int64_t,
              std::int64_t, Stream) {
  return kNone;
}
std::int64_t sort_workspace(const Sort&) { return 0; }
Error sort(const Sort&, Stream) { return kNone; }
Error top_k(const float*, std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t*, Stream) {
  return kNone;
}
Error split_gate(const Gate&, const float*, void*, Stream) { return kNone; }
Error gate_logits(const Gate&, const void*, const void*, float*, Stream) { return kNone; }
std::int64_t gate_workspace(const Gate&) { return 0; }
Error gate_backward(const Gate&, const void*, const void*, const float*, void*, float*, void*,
                    Stream) {
  return kNone;
}

Error norm(const Norm&, const void*, void*, float*, Stream) { return kNone; }
std::int64_t norm_workspace(const Norm&) { return 0; }
Error norm_backward(const Norm&, const void*, const float*, const void*, float*, void*, float*,
                    Stream) {
  return kNone;
}
Error rope(const Rope&, const void*, void*, Stream) { return kNone; }
Error add_sinks(const Sinks&, const float*, const float*, void*, float*, Stream) { return kNone; }
std::int64_t sink_workspace(const Sinks&) { return 0; }
Error sink_gradient(const Sinks&, const float*, const float*, const void*, const void*, float*,
                    float*, Stream) {
  return kNone;
}
Error logit_sums(const Logits&, const void*, float*, float*, float*, Stream) { return kNone; }
Error logit_gradient(const Logits&, void*, const float*, const float*, Stream) { return kNone; }
Error latent_heads(const Latent&, Stream) { return kNone; }
Error latent_heads_backward(const Latent&, Stream) { return kNone; }
Error dense_swiglu(const void*, const void*, void*, std::int64_t, Stream) { return kNone; }
Error dense_swiglu_backward(const void*, const void*, const void*, void*, void*, std::int64_t,
                            Stream) {
  return kNone;
}
Error widen(const void*, float*, std::int64_t, Stream) { return kNone; }
Error narrow(const float*, void*, std::int64_t, Stream) { return kNone; }
Error adamw(const AdamWStep&, const AdamWTensor*, std::int64_t, Stream) { return kNone; }
std::int64_t squares_workspace(std::int64_t) { return 0; }
Error sum_of_squares(const SquaresTensor*, std::int64_t, double*, double*, Stream) { return kNone; }

}  // namespace moesh::kernels::cuda
