// Attention within documents, recorded as a CUDA graph.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/comm/launch.h"
#include "moesh/kernels/graph.h"
#include "moesh/nn/attention_functions.h"
#include "tests/nn/documents.h"

namespace moesh {
namespace {

// The same launches serve other boundaries: nothing of them is read by the host.
TEST(AttentionOnAGpu, OfDocumentsIsAGraph) {
  // A rank has a stream of its own, which a graph needs.
  const auto rank = [](comm::Group&) {
    at::manual_seed(5);
    const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
    const auto random = [&](std::int64_t heads) { return at::randn({2, 128, heads, 64}, options); };
    const at::Tensor q = random(4), k = random(2), v = random(2);
    const kernels::AttentionConfig c{.scale = 0.125, .most_documents = 8};
    const at::Tensor starts = starts_of({{128}, {128}}).to(at::kCUDA);
    const auto attend = [&] { return nn::composed_attention(c, {q, k, v, {}, starts}); };
    attend();  // makes what is made once
    at::Tensor y;
    const auto graph = kernels::record_graph([&] { y = attend(); }, nullptr);
    for (const auto& lengths : {std::vector<std::vector<std::int64_t>>{{1, 127}, {64, 64}},
                                {{3, 5, 7, 113}, {100, 1, 26, 1}}}) {
      starts.copy_(starts_of(lengths));
      graph->replay();
      EXPECT_TRUE(at::equal(y, attend()));  // which attention_gpu_test.cpp holds to the formula
    }
  };
  comm::launch(1, rank, {.device = at::Device(at::kCUDA)});
}

}  // namespace
}  // namespace moesh
