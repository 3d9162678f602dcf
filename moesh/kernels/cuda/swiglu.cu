// silu(gate) up and its gradients: one pass, eight features a thread.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const bf16* gate, const bf16* up, bf16* h, int64_t num_chunks) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= num_chunks * 8) return;
  float g[8], u[8];
  unpack(load16(gate + at), g), unpack(load16(up + at), u);
#pragma unroll
  for (int i = 0; i < 8; ++i) g[i] = swiglu(g[i], u[i]).h;
  store16(h + at, packed(g));
}

__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const bf16* gate, const bf16* up, const bf16* dh, bf16* d_gate,
                           bf16* d_up, bf16* h, int64_t num_chunks) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= num_chunks * 8) return;
  float g[8], u[8], d[8];
  unpack(load16(gate + at), g), unpack(load16(up + at), u), unpack(load16(dh + at), d);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const ActivationResult hidden = swiglu(g[i], u[i]);
    g[i] = d[i] * hidden.dh_dg, u[i] = d[i] * hidden.dh_du, d[i] = hidden.h;
  }
  store16(d_gate + at, packed(g)), store16(d_up + at, packed(u));
  if (h) store16(h + at, packed(d));
}

}  // namespace

Error dense_swiglu(const void* gate, const void* up, void* h, std::int64_t size, Stream stream) {
  if (size % 8 != 0) return "a SwiGLU has a multiple of 8 numbers";
  if (size == 0) return nullptr;
  return launch(stream, swiglu_kernel, blocks_for(size / 8, kThreads), kThreads, gate, up, h,
                size / 8);
}

Error dense_swiglu_backward(const void* gate, const void* up, const void* dh, void* d_gate,
                            void* d_up, void* h, std::int64_t size, Stream stream) {
  if (size % 8 != 0) return "a SwiGLU has a multiple of 8 numbers";
  if (size == 0) return nullptr;
  return launch(stream, swiglu_backward_kernel, blocks_for(size / 8, kThreads), kThreads, gate, up,
                dh, d_gate, d_up, h, size / 8);
}

}  // namespace moesh::kernels::cuda
