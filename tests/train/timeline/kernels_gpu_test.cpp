#include "moesh/train/timeline/record.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "moesh/comm/launch.h"

namespace moesh::train {
namespace {

// Two ranks on one GPU, of which one multiplies and the other copies: each kernel is of its rank.
TEST(KernelsOfTheGpu, AreOfTheRankThatLaunchedThem) {
  std::vector<KernelSpan> kernels;
  const auto f = [&](comm::Group& world) {
    const auto cuda = at::TensorOptions(at::Device("cuda"));
    const at::Tensor x = at::ones({512, 512}, cuda);
    world.barrier();
    RecordKernels recorded;
    world.barrier();
    for (int i = 0; i < 4; ++i) {
      const at::Tensor y = world.rank() == 0 ? x.mm(x) : x.sin();
      EXPECT_GT(y.sum().item<float>(), 0);
    }
    world.barrier();
    const auto mine = recorded.take();
    if (!mine.empty()) kernels = mine;
  };
  prepare_kernels();
  comm::launch(2, f, {.device = at::kCUDA});
  ASSERT_FALSE(kernels.empty());
  std::set<std::int64_t> seen;
  for (const KernelSpan& k : kernels) {
    EXPECT_LT(k.begin, k.end) << k.name;
    seen.insert(k.rank);
    if (k.name.find("sin") != std::string::npos) {
      EXPECT_EQ(k.rank, 1) << k.name;
    }
    if (k.name.find("gemm") != std::string::npos) {
      EXPECT_EQ(k.rank, 0) << k.name;
    }
  }
  EXPECT_EQ(seen, (std::set<std::int64_t>{0, 1}));
}

}  // namespace
}  // namespace moesh::train
