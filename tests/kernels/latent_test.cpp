#include "moesh/kernels/rowwise.h"

#include "moesh/base/error.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

void check(const at::Tensor& kv, const at::Tensor& key, std::int64_t num_own, bool by_heads) {
  const std::string what =
      detail::concat(kv.scalar_type(), " ", kv.sizes(), ", ", key.sizes(), ", own ", num_own);
  const std::int64_t heads = kv.size(2);
  const Poison poison;
  const LatentHeads y = latent_heads_forward(kv, key, num_own);
  for (std::int64_t h = 0; h < heads; ++h) {
    expect_equal(y.k_BLhd.select(2, h), at::cat({kv.select(2, h).narrow(2, 0, num_own), key}, 2),
                 "k, " + what);
    expect_equal(y.v_BLhv.select(2, h), kv.select(2, h).narrow(2, num_own, kv.size(3) - num_own),
                 "v, " + what);
  }
  const auto gradient = [&](const at::Tensor& like, const char* name) {
    const at::Tensor g = normal(like.sizes(), name, like.scalar_type());
    return by_heads ? g.transpose(1, 2).contiguous().transpose(1, 2) : g;
  };
  const at::Tensor dk = gradient(y.k_BLhd, "dk"), dv = gradient(y.v_BLhv, "dv");
  const LatentGradients d = latent_heads_backward(dk, dv, num_own);
  ASSERT_EQ(d.kv.sizes(), kv.sizes()) << what;
  ASSERT_EQ(d.key.sizes(), key.sizes()) << what;
  expect_equal(d.kv.narrow(3, 0, num_own), dk.narrow(3, 0, num_own), "d(kv), keys, " + what);
  expect_equal(d.kv.narrow(3, num_own, kv.size(3) - num_own), dv, "d(kv), values, " + what);
  expect_close(d.key, dk.narrow(3, num_own, key.size(2)).to(at::kDouble).sum(2),
               kv.scalar_type() == at::kBFloat16 ? 4e-3 : 1e-6, "d(key), " + what);
}

TEST(LatentHeads, AreTheFeaturesOfEachHeadAndTheSharedKey) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const bool by_heads : {false, true}) {
      check(normal({2, 5, 3, 40}, "kv", dtype), normal({2, 5, 8}, "key", dtype), 24, by_heads);
      check(normal({2, 5, 3, 7}, "kv", dtype), normal({2, 5, 2}, "key", dtype), 4, by_heads);
      check(normal({2, 0, 3, 16}, "kv", dtype), normal({2, 0, 8}, "key", dtype), 8, by_heads);
    }
  check(normal({2, 30, 16, 256}, "kv", at::kBFloat16), normal({2, 30, 64}, "key", at::kBFloat16),
        128, true);
}

TEST(LatentHeads, TakeAKeyWithGaps) {
  const at::Tensor wide = normal({2, 5, 80}, "wide", at::kBFloat16),
                   kv = normal({2, 5, 3, 32}, "kv", at::kBFloat16);
  check(kv, wide.narrow(2, 64, 16), 16, false);
  check(kv, wide.narrow(2, 61, 16), 16, false);  // not at a multiple of 16 bytes
}

TEST(LatentHeads, RefuseWhatDoesNotFit) {
  const at::Tensor kv = normal({2, 5, 3, 32}, "kv", at::kBFloat16);
  EXPECT_THROW(latent_heads_forward(kv, normal({2, 4, 8}, "key", at::kBFloat16), 16), Error);
  EXPECT_THROW(latent_heads_forward(kv, normal({2, 5, 8}, "key", at::kFloat), 16), Error);
  EXPECT_THROW(latent_heads_forward(kv, normal({2, 5, 8}, "key", at::kBFloat16), 33), Error);
  EXPECT_THROW(latent_heads_backward(kv, normal({2, 5, 2, 8}, "dv", at::kBFloat16), 16), Error);
}

}  // namespace
}  // namespace moesh::kernels
