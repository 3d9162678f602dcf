// What the dry run of an accelerator counts: the bytes that own kernels hold, and LibTorch's.
// T tokens, D model, F ffn, E experts, K top-k, R rows at their experts

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "moesh/kernels/cuda/launch.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/kernels/routing.h"

namespace moesh::kernels {
namespace {

constexpr std::int64_t T = 1024, D = 256, F = 512, E = 8, K = 2, R = T * K;

at::Tensor on_meta(at::IntArrayRef sizes, at::ScalarType dtype = at::kBFloat16) {
  return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(dtype));
}

struct Peaks {
  std::int64_t forward, kept, backward;  // bytes over inputs and weights
};

Peaks peaks_of(GpuKernels chosen, const ExpertsConfig& config, std::int64_t rank = 0) {
  const UseGpuKernels use(chosen);
  const meta::DryRun dry(at::kCUDA);
  const at::Tensor x = on_meta({T, D}), w13 = on_meta({E, F, D}), w2 = on_meta({E, D, F});
  const Sorted s = sort_by_expert(on_meta({T, K}, at::kLong), E);
  const ExpertsInput input{x, s.ends_e, on_meta({R}, at::kFloat), s.token_R, s.inverse_TK};
  ExpertsWeights w{w13, w13, w2};
  if (rank > 0)
    w.lora = {on_meta({E, rank, D}), on_meta({E, 2, F, rank}), on_meta({E, rank, F}),
              on_meta({E, D, rank})};
  const std::int64_t before = dry.live();
  ExpertsOutput out = experts_forward(config, w, input);
  Peaks peaks{.forward = dry.peak() - before, .kept = dry.live() - before, .backward = 0};
  const ExpertsGradients d = experts_backward(config, w, out.saved, out.y);
  peaks.backward = dry.peak() - before;
  return peaks;
}

TEST(Meta, CountsWhatOwnKernelsHold) {
  constexpr std::int64_t row = 2 * R * D, hidden = 2 * R * F, y = 2 * T * D, w = 2 * E * D * F;
  constexpr std::int64_t scores = 4 * R, terms = 4 * R * ((F + 255) / 256);
  const Peaks own = peaks_of(GpuKernels::automatic, {});
  EXPECT_EQ(own.forward, row + 3 * hidden + y);  // x and y at the experts share their rows
  EXPECT_EQ(own.kept, 2 * hidden + y);           // gate and up, and the result
  constexpr std::int64_t workspace = cuda::chunk_workspace(R, D, F);
  static_assert(workspace == 4 * (R / 512 * 4) * (256 * 256 + 4));
  constexpr std::int64_t chunks = (workspace + 511) / 512 * 512;  // as the allocator rounds
  const std::int64_t at_dw2 = row + hidden + terms + scores + w + chunks,
                     at_dw13 = row + scores + y + 3 * w + chunks;
  EXPECT_EQ(own.backward, own.kept + std::max(at_dw2, at_dw13));
  const Peaks library = peaks_of(GpuKernels::library, {});
  EXPECT_EQ(library.kept, own.kept);
  EXPECT_GT(library.forward, own.forward);
  EXPECT_GT(library.backward, own.backward);
}

TEST(Meta, CountsWhatLoraHolds) {
  constexpr std::int64_t r = 16, row = 2 * R * D, hidden = 2 * R * F, y = 2 * T * D,
                         low = 2 * R * r;
  constexpr std::int64_t scores = 4 * R, terms = 4 * R * ((F + 255) / 256);
  constexpr std::int64_t a13 = 2 * E * r * D, b13 = 4 * E * r * F, a2 = b13 / 2, b2 = a13;
  const Peaks own = peaks_of(GpuKernels::automatic, {}, r);
  EXPECT_EQ(own.forward, row + 3 * hidden + 2 * low + y);
  EXPECT_EQ(own.kept, 2 * hidden + 2 * low + y);
  // Sums of ranges of 64 rows, and with b those of 512 columns; both in float32.
  constexpr std::int64_t ranges = R / 64 + E, of_D = 4 * ranges * r * D, of_F = 4 * ranges * r * F;
  constexpr std::int64_t at_b2 = row + low + b2 + of_D + 4 * R * r,
                         at_a2 = row + low + b2 + hidden + terms + scores + a2 + of_F,
                         at_b13 = row + b2 + scores + a2 + low + b13 + 2 * of_F + 2 * 4 * R * r,
                         at_a13 = row + b2 + scores + a2 + low + b13 + y + a13 + of_D;
  EXPECT_EQ(own.backward, own.kept + std::max({at_b2, at_a2, at_b13, at_a13}));
  EXPECT_LT(own.backward, peaks_of(GpuKernels::library, {}, r).backward);
  // A rank that own kernels do not take is LibTorch's.
  EXPECT_EQ(peaks_of(GpuKernels::automatic, {}, 12).backward,
            peaks_of(GpuKernels::library, {}, 12).backward);
}

TEST(Meta, CountsNothingOfTheSizeOfXForTheGate) {
  const auto peak_of = [](GpuKernels chosen) {
    const UseGpuKernels use(chosen);
    const meta::DryRun dry(at::kCUDA);
    const at::Tensor x = on_meta({T, D}), gate = on_meta({E, D}, at::kFloat);
    const std::int64_t before = dry.live();
    gate_forward(x, gate);
    return dry.peak() - before;
  };
  constexpr std::int64_t logits = 4 * T * E, gate_terms = 4 * 2 * E * D;
  EXPECT_EQ(peak_of(GpuKernels::automatic), logits + gate_terms);
  EXPECT_EQ(peak_of(GpuKernels::library), logits + 4 * T * D);
}

}  // namespace
}  // namespace moesh::kernels
