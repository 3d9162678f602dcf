// The gated delta rule and its convolution on one Hopper GPU: heads of 128 features, 16 of queries
// and keys and 32 of values, as Qwen3-Next has them.
// usage: bench_delta_rule_gpu
// Medians of 20 runs each, in milliseconds. Tests compare the results with float64.

#include <algorithm>
#include <functional>

#include "moesh/kernels/cuda/around.h"
#include "tests/kernels/cuda/device_layer.h"

namespace moesh::kernels::cuda {
namespace {

constexpr std::int64_t kKeyHeads = 16, kValueHeads = 32, kWidth = 128;
constexpr std::int64_t kChannels = (2 + kValueHeads / kKeyHeads) * kWidth;  // of a key head

double median_of(const std::function<Error()>& run) {
  constexpr int kWarm = 3, kRuns = 20;
  cudaEvent_t begin, end;
  MOESH_RUN(cudaEventCreate(&begin));
  MOESH_RUN(cudaEventCreate(&end));
  std::vector<float> times(kRuns);
  for (int i = -kWarm; i < kRuns; ++i) {
    float ms;
    MOESH_RUN(cudaEventRecord(begin));
    MOESH_RUN(run());
    MOESH_RUN(cudaEventRecord(end));
    MOESH_RUN(cudaEventSynchronize(end));
    MOESH_RUN(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times[i] = ms;
  }
  MOESH_RUN(cudaEventDestroy(begin));
  MOESH_RUN(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

/// Evenly spread over [0, sign).
void spread(const Buffer<float>& to, float sign) {
  std::vector<float> values(to.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = sign * static_cast<float>(mix(i) >> 40) * 0x1p-24f;
  MOESH_RUN(cudaMemcpy(to.get(), values.data(), to.bytes(), cudaMemcpyHostToDevice));
}

void measure(std::int64_t batch, std::int64_t length) {
  const std::int64_t tokens = batch * length;
  const Buffer<bf16> qkv(tokens * kKeyHeads * kChannels), d_qkv(qkv.size()),
      y(tokens * kValueHeads * kWidth), dy(y.size());
  const Buffer<float> decay(tokens * kValueHeads), beta(decay.size()), d_decay(decay.size()),
      d_beta(decay.size());
  fill(qkv, 1.f, 1), fill(dy, 1.f, 2), spread(decay, -1.f), spread(beta, 1.f);
  const DeltaRule rule{
      .batch = batch,
      .length = length,
      .num_key_heads = kKeyHeads,
      .num_value_heads = kValueHeads,
      .strides = {length * kKeyHeads * kChannels, kKeyHeads * kChannels, kChannels},
      .decay = decay.get(),
      .beta = beta.get(),
      .starts = nullptr};
  const Buffer<std::uint8_t> workspace(delta_rule_workspace(rule, /*backward=*/true));
  const double forward = median_of([&] {
    return delta_rule(rule, qkv.get(), nullptr, workspace.get(), y.get(), nullptr, nullptr);
  });
  const double backward = median_of([&] {
    return delta_rule_backward(rule, qkv.get(), dy.get(), workspace.get(), d_qkv.get(),
                               d_decay.get(), d_beta.get(), nullptr);
  });
  const Buffer<float> taps(kKeyHeads * kChannels * 4);
  spread(taps, 1.f);
  const Convolution convolution{.batch = batch,
                                .length = length,
                                .num_heads = kKeyHeads,
                                .width = kChannels,
                                .strides = {rule.strides[0], rule.strides[1], rule.strides[2]},
                                .w = taps.get(),
                                .starts = nullptr};
  const Buffer<float> terms(convolution_terms(convolution) * taps.size());
  const double through =
      median_of([&] { return cuda::convolution(convolution, qkv.get(), d_qkv.get(), nullptr); });
  const double back = median_of([&] {
    return convolution_backward(convolution, qkv.get(), qkv.get(), terms.get(), d_qkv.get(),
                                nullptr);
  });
  std::printf("%4lld x %-6lld  rule %7.3f forward %7.3f backward   convolution %6.3f %6.3f\n",
              static_cast<long long>(batch), static_cast<long long>(length), forward, backward,
              through, back);
}

}  // namespace
}  // namespace moesh::kernels::cuda

int main() {
  using moesh::kernels::cuda::measure;
  measure(8, 2048), measure(8, 4096), measure(1, 8192), measure(1, 32768);
}
