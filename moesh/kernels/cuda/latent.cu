// The heads of latent attention: features move in pieces of 16 bytes, one a thread.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// Where the features of a head lie.
struct HeadAddress {
  bf16* data;
  int64_t strides[3];  // of a sequence, a position, a head
  __device__ bf16* operator()(int64_t sequence, int64_t position, int64_t head) const {
    return data + sequence * strides[0] + position * strides[1] + head * strides[2];
  }
};
struct LatentParams {
  HeadAddress kv, key, k, v;
  unsigned size;  // pieces, or of the sum: pieces of the shared key
  unsigned length, num_heads;
  int num_own, num_shared, num_value;
};

/// Forward: kv and key to k and v; backward: k and v to kv.
template <bool kForward>
__global__ void __launch_bounds__(kThreads) move_heads(const LatentParams p) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.size) return;
  const int num_shared = kForward ? p.num_shared : 0;
  const unsigned pieces = (p.num_own + num_shared + p.num_value) / 8;
  const unsigned head_at = at / pieces, token = head_at / p.num_heads;
  const int feature = static_cast<int>(at - head_at * pieces) * 8;
  const unsigned head = head_at - token * p.num_heads, sequence = token / p.length,
                 position = token - sequence * p.length;
  const auto move = [](bf16* to, bf16* from) {
    kForward ? store16(to, load16(from)) : store16(from, load16(to));
  };
  if (feature < p.num_own) {
    move(p.k(sequence, position, head) + feature, p.kv(sequence, position, head) + feature);
  } else if (feature < p.num_own + num_shared) {
    move(p.k(sequence, position, head) + feature,
         p.key(sequence, position, 0) + feature - p.num_own);
  } else {
    const int value = feature - p.num_own - num_shared;
    move(p.v(sequence, position, head) + value, p.kv(sequence, position, head) + p.num_own + value);
  }
}

/// The gradient of the shared key: the sum over the heads, in order.
__global__ void __launch_bounds__(kThreads) sum_heads(const LatentParams p) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.size) return;
  const unsigned pieces = p.num_shared / 8;
  const unsigned token = at / pieces, sequence = token / p.length,
                 position = token - sequence * p.length;
  const int feature = static_cast<int>(at - token * pieces) * 8;
  const bf16* k = p.k(sequence, position, 0) + p.num_own + feature;
  float sum[8] = {};
#pragma unroll 8
  for (int head = 0; head < p.num_heads; ++head) {
    float v[8];
    unpack(load16(k + head * p.k.strides[2]), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += v[i];
  }
  store16(p.key(sequence, position, 0) + feature, packed(sum));
}

HeadAddress place(const HeadsAt& h) {
  return {static_cast<bf16*>(h.data), {h.strides[0], h.strides[1], h.strides[2]}};
}

LatentParams params_of(const Latent& l, int64_t pieces) {
  return {.kv = place(l.kv),
          .key = place(l.key),
          .k = place(l.k),
          .v = place(l.v),
          .size = static_cast<unsigned>(l.batch * l.length * pieces),
          .length = static_cast<unsigned>(l.length),
          .num_heads = static_cast<unsigned>(l.num_heads),
          .num_own = static_cast<int>(l.num_own),
          .num_shared = static_cast<int>(l.num_shared),
          .num_value = static_cast<int>(l.num_value)};
}

Error complaint(const Latent& l) {
  // What is divided has 32 bits: divisions of 64 take longer than the memory.
  const std::int64_t features = l.num_heads * (l.num_own + l.num_shared + l.num_value);
  if (l.batch * l.length * (features / 8) >= std::int64_t{1} << 31)
    return "latent heads have fewer than 2^34 features in all";
  bool fits = l.num_own % 8 == 0 && l.num_shared % 8 == 0 && l.num_value % 8 == 0;
  for (const HeadsAt* h : {&l.kv, &l.key, &l.k, &l.v})
    for (const int64_t stride : h->strides) fits = fits && stride % 8 == 0;
  return fits ? nullptr : "latent heads have multiples of 8 features";
}

}  // namespace

Error latent_heads(const Latent& l, Stream stream) {
  if (Error error = complaint(l)) return error;
  const auto p = params_of(l, l.num_heads * (l.num_own + l.num_shared + l.num_value) / 8);
  if (p.size == 0) return nullptr;
  return launch(stream, move_heads<true>, blocks_for(p.size, kThreads), kThreads, p);
}

Error latent_heads_backward(const Latent& l, Stream stream) {
  if (Error error = complaint(l)) return error;
  const auto heads = params_of(l, l.num_heads * (l.num_own + l.num_value) / 8),
             shared = params_of(l, l.num_shared / 8);
  Error error = nullptr;
  if (heads.size > 0)
    error = launch(stream, move_heads<false>, blocks_for(heads.size, kThreads), kThreads, heads);
  if (!error && shared.size > 0)
    error = launch(stream, sum_heads, blocks_for(shared.size, kThreads), kThreads, shared);
  return error;
}

}  // namespace moesh::kernels::cuda
