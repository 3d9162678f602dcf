// AdamW, casts and the sum of squares over lists of tensors. A list is cut into chunks of one size,
// which the blocks take in turn: each finds the tensor of its chunk by bisection.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/host.h"
#include "moesh/kernels/cuda/update.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8 * 4 * kThreads;  // elements: eight loads of 16 bytes for each thread
constexpr int kBlocks = 132 * 8;          // not of the device: the order of a sum must not change
constexpr int kMaxTensors = 192;          // of a launch, whose arguments end at 32 KiB

template <class Tensor>
struct List {
  Tensor tensors[kMaxTensors];
  int ends[kMaxTensors];  // in chunks
  int num_tensors;
};

/// Its tensor, and where in it the chunk begins.
template <class Tensor>
__device__ __forceinline__ int tensor_of(const List<Tensor>& list, int chunk, int64_t& begin) {
  int low = -1, high = list.num_tensors - 1;  // ends[low] <= chunk < ends[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list.ends[middle] <= chunk ? low : high) = middle;
  }
  begin = static_cast<int64_t>(chunk - (low < 0 ? 0 : list.ends[low])) * kChunk;
  return high;
}

/// Four gradients, or one, of float32 or bf16.
__device__ __forceinline__ float4 load_four(const void* data, bool is_narrow, int64_t i) {
  if (!is_narrow)
    return __ldcs(reinterpret_cast<const float4*>(static_cast<const float*>(data) + i));
  const uint2 v =
      __ldcs(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(data) + i));
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
          __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u)};
}
__device__ __forceinline__ float load_one(const void* data, bool is_narrow, int64_t i) {
  return is_narrow ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                   : static_cast<const float*>(data)[i];
}

struct Factors {  // of a step
  float beta1, beta2, rest1, rest2, rate, root, eps, factor;
  double lr;
};

__device__ __forceinline__ void move(const Factors& f, float keep, float gradient, float& w,
                                     float& m, float& v) {
  const float g = gradient * f.factor;
  m = f.beta1 * m + f.rest1 * g;
  v = f.beta2 * v + f.rest2 * g * g;
  w = keep * w - f.rate * m / (f.root * sqrtf(v) + f.eps);
}

__device__ __forceinline__ uint2 narrowed(float4 w) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(w.x, w.y),
                       high = __floats2bfloat162_rn(w.z, w.w);
  return {*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high)};
}

__device__ __forceinline__ void move_chunk(const Factors& f, const AdamWTensor& t, int64_t begin) {
  const auto keep = static_cast<float>(1 - f.lr * t.weight_decay);
  auto* copy = static_cast<__nv_bfloat16*>(t.copy);
#pragma unroll 2
  for (int k = 0; k < kChunk / (4 * kThreads); ++k) {
    const int64_t i = begin + (k * kThreads + threadIdx.x) * 4;
    if (i + 4 <= t.size) {
      const float4 g = load_four(t.gradient, t.is_narrow, i);
      float4 w = *reinterpret_cast<const float4*>(t.value + i),
             m = *reinterpret_cast<const float4*>(t.mean + i),
             v = *reinterpret_cast<const float4*>(t.mean_square + i);
      move(f, keep, g.x, w.x, m.x, v.x), move(f, keep, g.y, w.y, m.y, v.y);
      move(f, keep, g.z, w.z, m.z, v.z), move(f, keep, g.w, w.w, m.w, v.w);
      __stcs(reinterpret_cast<float4*>(t.value + i), w);
      __stcs(reinterpret_cast<float4*>(t.mean + i), m);
      __stcs(reinterpret_cast<float4*>(t.mean_square + i), v);
      if (copy) *reinterpret_cast<uint2*>(copy + i) = narrowed(w);
    } else {
      for (int64_t j = i; j < t.size; ++j) {
        move(f, keep, load_one(t.gradient, t.is_narrow, j), t.value[j], t.mean[j],
             t.mean_square[j]);
        if (copy) copy[j] = __float2bfloat16_rn(t.value[j]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ List<AdamWTensor> list, const AdamWStep step) {
  if (step.numbers[3] != 0) return;
  __shared__ Factors shared;
  if (threadIdx.x == 0) {
    const double lr = step.numbers[0], number = step.numbers[1];
    shared = {.beta1 = static_cast<float>(step.beta1),
              .beta2 = static_cast<float>(step.beta2),
              .rest1 = static_cast<float>(1 - step.beta1),
              .rest2 = static_cast<float>(1 - step.beta2),
              .rate = static_cast<float>(lr / (1 - pow(step.beta1, number))),
              .root = static_cast<float>(1 / sqrt(1 - pow(step.beta2, number))),
              .eps = static_cast<float>(step.eps),
              .factor = static_cast<float>(step.numbers[2]),
              .lr = lr};
  }
  __syncthreads();
  const Factors f = shared;
  for (int chunk = blockIdx.x; chunk < list.ends[list.num_tensors - 1]; chunk += gridDim.x) {
    int64_t begin;
    const int tensor = tensor_of(list, chunk, begin);
    move_chunk(f, list.tensors[tensor], begin);
  }
}

/// Loads of a chunk that are on their way before the first is used: all.
constexpr int kLoads = kChunk / (4 * kThreads);

__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ List<NarrowTensor> list) {
  for (int chunk = blockIdx.x; chunk < list.ends[list.num_tensors - 1]; chunk += gridDim.x) {
    int64_t begin;
    const NarrowTensor t = list.tensors[tensor_of(list, chunk, begin)];
    auto* to = static_cast<__nv_bfloat16*>(t.to);
    if (begin + kChunk <= t.size) {
      float4 v[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        v[k] = load_four(t.from, false, begin + (k * kThreads + threadIdx.x) * 4);
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        *reinterpret_cast<uint2*>(to + begin + (k * kThreads + threadIdx.x) * 4) = narrowed(v[k]);
      continue;
    }
    for (int64_t i = begin + threadIdx.x; i < t.size; i += kThreads)
      to[i] = __float2bfloat16_rn(t.from[i]);
  }
}

/// The sum over the threads of a block, in a fixed order; thread 0 has it.
__device__ __forceinline__ double block_sum(double v) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_down_sync(~0u, v, distance);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (const double w : warps) sum += w;
  return sum;
}

__device__ __forceinline__ double squares_of(float4 v) {
  return static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y +
         static_cast<double>(v.z) * v.z + static_cast<double>(v.w) * v.w;
}

/// For a chunk that is whole.
template <bool kNarrow>
__device__ __forceinline__ void add_chunk(double& sum, const void* data, int64_t begin) {
  float4 v[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k)
    v[k] = load_four(data, kNarrow, begin + (k * kThreads + threadIdx.x) * 4);
#pragma unroll
  for (int k = 0; k < kLoads; ++k) sum += squares_of(v[k]);
}

__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ List<SquaresTensor> list, double* terms) {
  double sum = 0;
  for (int chunk = blockIdx.x; chunk < list.ends[list.num_tensors - 1]; chunk += gridDim.x) {
    int64_t begin;
    const SquaresTensor t = list.tensors[tensor_of(list, chunk, begin)];
    if (begin + kChunk <= t.size) {
      t.is_narrow ? add_chunk<true>(sum, t.data, begin) : add_chunk<false>(sum, t.data, begin);
      continue;
    }
    for (int k = 0; k < kChunk / (4 * kThreads); ++k) {
      const int64_t i = begin + (k * kThreads + threadIdx.x) * 4;
      if (i + 4 <= t.size) {
        sum += squares_of(load_four(t.data, t.is_narrow, i));
      } else {
        for (int64_t j = i; j < t.size; ++j) {
          const double v = load_one(t.data, t.is_narrow, j);
          sum += v * v;
        }
      }
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) terms[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_terms(const double* terms, int num_terms, double* out) {
  double sum = 0;
  for (int i = threadIdx.x; i < num_terms; i += kThreads) sum += terms[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = sum;
}

constexpr int kWidth = 8;  // numbers that a thread widens

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const bf16* from, float* to, int64_t size) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (i + kWidth <= size) {
    float v[kWidth];
    unpack(load16(from + i), v);
    __stcs(reinterpret_cast<float4*>(to + i), float4{v[0], v[1], v[2], v[3]});
    __stcs(reinterpret_cast<float4*>(to + i) + 1, float4{v[4], v[5], v[6], v[7]});
  } else {
    for (int64_t j = i; j < size; ++j) to[j] = __bfloat162float(from[j]);
  }
}

/// run(list) for lists that hold as much as fits.
template <class Tensor, class Run>
Error in_lists(const Tensor* tensors, std::int64_t num_tensors, const Run& run) {
  for (std::int64_t first = 0; first < num_tensors; first += kMaxTensors) {
    List<Tensor> list;
    std::int64_t end = 0;
    list.num_tensors =
        static_cast<int>(num_tensors - first < kMaxTensors ? num_tensors - first : kMaxTensors);
    for (int i = 0; i < list.num_tensors; ++i) {
      list.tensors[i] = tensors[first + i];
      end += (list.tensors[i].size + kChunk - 1) / kChunk;
      if (end > INT32_MAX) return "an update of more than 2^44 elements";
      list.ends[i] = static_cast<int>(end);
    }
    if (Error error = run(list, first / kMaxTensors)) return error;
  }
  return nullptr;
}

}  // namespace

Error adamw(const AdamWStep& step, const AdamWTensor* tensors, std::int64_t num_tensors,
            Stream stream) {
  return in_lists(tensors, num_tensors, [&](const List<AdamWTensor>& list, std::int64_t) {
    return launch(stream, adamw_kernel, kBlocks, kThreads, list, step);
  });
}

Error narrow(const NarrowTensor* tensors, std::int64_t num_tensors, Stream stream) {
  return in_lists(tensors, num_tensors, [&](const List<NarrowTensor>& list, std::int64_t) {
    return launch(stream, narrow_kernel, kBlocks, kThreads, list);
  });
}

Error widen(const void* from, float* to, std::int64_t size, Stream stream) {
  if (size == 0) return nullptr;
  return launch(stream, widen_kernel, blocks_for(size, kThreads * kWidth), kThreads, from, to,
                size);
}

std::int64_t squares_workspace(std::int64_t num_tensors) {
  return (num_tensors + kMaxTensors - 1) / kMaxTensors * kBlocks;
}

Error sum_of_squares(const SquaresTensor* tensors, std::int64_t num_tensors, double* workspace,
                     double* sum, Stream stream) {
  const auto run = [&](const List<SquaresTensor>& list, std::int64_t number) {
    return launch(stream, squares_kernel, kBlocks, kThreads, list, workspace + number * kBlocks);
  };
  if (Error error = in_lists(tensors, num_tensors, run)) return error;
  return launch(stream, sum_terms, 1, kThreads, workspace, squares_workspace(num_tensors), sum);
}

}  // namespace moesh::kernels::cuda
