// What is dropped of the tokens before: all that no later token sees, and no more.

#include "moesh/nn/kv_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace moesh::nn {
namespace {

using enum Place;

// Token i has the number i.
at::Tensor numbered(std::int64_t first, std::int64_t num) {
  return at::arange(first, first + num, at::kDouble);
}

// The tokens that are kept after `num`, which come two at a time.
template <class Add>
std::vector<std::int64_t> kept_after(std::int64_t num, const AttentionOptions& o, const Add& add) {
  KvCache kv_cache;
  std::vector<std::int64_t> kept;
  for (std::int64_t i = 0; i < num; i += 2) {
    const at::Tensor all = add(kv_cache, numbered(i, 2)).flatten();
    EXPECT_EQ(all.numel(), kv_cache.kept().end - kv_cache.kept().begin);
    EXPECT_EQ(all[0].item<std::int64_t>(), kv_cache.kept().begin);
    kv_cache.forget(o);
  }
  for (auto i = kv_cache.kept().begin; i < kv_cache.kept().end; ++i) kept.push_back(i);
  return kept;
}

TEST(KvCache, DropsWhatNoLaterTokenSees) {
  const auto add_heads = [](KvCache& kv_cache, const at::Tensor& x) {
    const auto heads = assume<Dense{T, T, F}>(x.reshape({1, -1, 1, 1}));
    const auto& all = kv_cache.add(heads, heads);
    EXPECT_TRUE(at::equal(local(all.keys_BSgd), local(all.values_BSgd)));
    return local(all.keys_BSgd);
  };
  const auto add_latents = [](KvCache& kv_cache, const at::Tensor& x) {
    return local(kv_cache.add(assume<Dense{T, T, R}>(x.reshape({1, -1, 1}))));
  };
  using Tokens = std::vector<std::int64_t>;
  for (const bool has_heads : {false, true}) {
    const auto kept = [&](const AttentionOptions& o) {
      return has_heads ? kept_after(8, o, add_heads) : kept_after(8, o, add_latents);
    };
    EXPECT_EQ(kept({}), (Tokens{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(kept({.window = 1}), Tokens{}) << "a token sees itself";
    EXPECT_EQ(kept({.window = 3}), (Tokens{6, 7})) << "and the two before it";
    EXPECT_EQ(kept({.window = 20}), (Tokens{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(kept({.chunk = 1}), Tokens{});
    EXPECT_EQ(kept({.chunk = 3}), (Tokens{6, 7})) << "token 8 is of the third chunk";
    EXPECT_EQ(kept({.chunk = 4}), Tokens{}) << "token 8 begins one";
    EXPECT_EQ(kept({.window = 2, .chunk = 3}), (Tokens{6, 7})) << "from the beginning of a chunk";
  }
}

}  // namespace
}  // namespace moesh::nn
