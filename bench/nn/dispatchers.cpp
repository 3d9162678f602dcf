// Bytes and time of each dispatcher: forward and backward of the MoE layer with its experts on all
// ranks (tp2ep).
//   bench_dispatchers [cpu|cuda]      mpirun -n N bench_dispatchers: meshes of N ranks and more
// moesh/nn/dispatch.cpp has what was fitted to its output.

#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/moe.h"
#include "tests/comm/trace.h"

using namespace moesh;
using enum Place;

namespace {

struct Shape {
  std::int64_t tokens, dim, ffn, experts, top_k;
};

struct Measured {
  double milliseconds = 0,
         least = 0;        // the median; the least is what a busy machine disturbs least
  std::int64_t bytes = 0;  // that rank 0 hands to collectives, forward and backward
};

Measured measure(const Shape& s, const MeshShape& shape, nn::Dispatcher dispatcher,
                 at::Device device, at::ScalarType dtype) {
  Measured result;
  comm::LaunchOptions options;
  options.device = device;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        nn::MoeConfig config;
        config.router = {
            .num_experts = s.experts, .top_k = s.top_k, .normalize = true, .forced_balance = true};
        config.experts = {.num_experts = s.experts, .dim = s.dim, .ffn = s.ffn};
        config.dispatcher = dispatcher;
        nn::Moe moe(config, {.dtype = dtype, .device = device});
        const nn::Tokens tokens(mesh, 1, s.tokens, true);
        const auto x = assume<Dense{T, T, T}>(
            at::randn({1, tokens.length(), s.dim}, at::TensorOptions(device).dtype(dtype)));
        const auto once_through = [&] {
          backward(sum_all(cast(square(moe(as_leaf(x), tokens).y), at::kFloat)));
          world.barrier();
        };
        for (int i = 0; i < 3; ++i) once_through();
        {
          const comm::Trace trace;
          once_through();
          if (world.rank() == 0)
            for (const auto& e : trace.entries()) result.bytes += e.bytes;
        }
        std::vector<double> times;
        for (int i = 0; i < 31; ++i) {
          const auto start = std::chrono::steady_clock::now();
          once_through();
          if (!device.is_cpu())
            at::ones({1}, device).item<float>();  // waits for this rank's stream
          world.barrier();
          times.push_back(
              std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                  .count());
        }
        std::sort(times.begin(), times.end());
        if (world.rank() == 0)
          result.milliseconds = times[times.size() / 2], result.least = times[0];
      },
      options);
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  const bool is_cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  const int processes = comm::num_launched_processes();
  const at::Device device(is_cuda ? "cuda:0" : "cpu");
  const Shape shape = is_cuda ? Shape{16384, 2048, 1408, 64, 6} : Shape{1024, 256, 128, 32, 4};
  std::printf("%s, %s, T %lld, D %lld, F %lld, E %lld, K %lld; all ranks on one device\n",
              device.str().c_str(), is_cuda ? "bfloat16" : "float32",
              static_cast<long long>(shape.tokens), static_cast<long long>(shape.dim),
              static_cast<long long>(shape.ffn), static_cast<long long>(shape.experts),
              static_cast<long long>(shape.top_k));
  std::printf("%-6s %-14s %-12s %12s %12s %16s %8s\n", "ranks", "mesh", "dispatcher", "ms", "least",
              "MiB of rank 0", "ratio");
  for (int n : {1, 2, 4, 8})
    for (const auto& mesh :
         n == 1   ? std::vector<MeshShape>{{}}
         : n == 2 ? std::vector<MeshShape>{{.tp = 2, .ep = 2}, {.tp = 2, .etp = 2}}
                  : std::vector<MeshShape>{{.tp = n, .ep = n}, {.tp = n, .ep = n / 2, .etp = 2}}) {
      if (processes > 0 && n % processes != 0) continue;
      double first = 0;
      for (auto d : {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather}) {
        const auto m = measure(shape, mesh, d, device, is_cuda ? at::kBFloat16 : at::kFloat);
        if (m.milliseconds == 0) continue;  // rank 0 is in another process
        if (first == 0) first = m.milliseconds;
        std::printf("%-6d %-14s %-12s %12.2f %12.2f %16.1f %8.2f\n", n,
                    ("ep " + std::to_string(mesh.ep) + " etp " + std::to_string(mesh.etp)).c_str(),
                    nn::to_string(d), m.milliseconds, m.least,
                    static_cast<double>(m.bytes) / (1 << 20), first / m.milliseconds);
      }
    }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_dispatchers: %s\n", e.what());
  return 1;
}
