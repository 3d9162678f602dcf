#include "moesh/models/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "moesh/comm/mesh.h"
#include "moesh/fsdp/param.h"
#include "tests/support.h"

namespace moesh {
namespace {

// With only shapes: nothing is allocated.
template <class Fn>
void with_model(const std::string& name, const std::string& size, Fn f) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto model = models::make_model(models::built_in(name, size),
                                        {.dtype = at::kBFloat16, .device = at::kMeta});
  f(*model);
}

struct Published {
  std::string name, size;
  double total, active;  // billions, as their authors say
};

class PublishedSizes : public testing::TestWithParam<Published> {};
INSTANTIATE_TEST_SUITE_P(
    All, PublishedSizes,
    testing::Values(
        Published{"deepseek_v3", "671b", 671, 37.5}, Published{"qwen3_moe", "30b-a3b", 30.5, 3.3},
        Published{"qwen3_moe", "235b-a22b", 235, 22}, Published{"mixtral", "8x7b", 46.7, 12.9},
        Published{"mixtral", "8x22b", 141, 39}, Published{"llama4", "scout", 109, 17},
        Published{"llama4", "maverick", 400, 17}, Published{"gpt_oss", "20b", 20.9, 3.6},
        Published{"gpt_oss", "120b", 116.8, 5.1}, Published{"qwen2_moe", "a2.7b", 14.3, 2.7},
        Published{"qwen2_moe", "57b-a14b", 57.4, 14.2}, Published{"olmoe", "1b-7b", 6.92, 1.28},
        Published{"deepseek_v3", "moonlight", 15.96, 2.9},
        Published{"deepseek_v3", "kimi-k2", 1026, 32}, Published{"glm4_moe", "106b-a12b", 107, 12},
        Published{"glm4_moe", "355b-a32b", 353, 32}, Published{"glm4_moe_lite", "30b-a3b", 30, 3.5},
        Published{"minimax_m2", "230b-a10b", 229, 10},
        Published{"granitemoe", "1b-a400m", 1.33, 0.4},
        Published{"granitemoe", "3b-a800m", 3.3, 0.8}, Published{"qwen3_next", "80b-a3b", 80, 3.9}),
    [](const auto& info) {
      std::string text = info.param.name + "_" + info.param.size;
      std::replace_if(text.begin(), text.end(), [](char c) { return c == '-' || c == '.'; }, '_');
      return text;
    });

TEST_P(PublishedSizes, HaveTheirNumberOfParameters) {
  const auto& p = GetParam();
  with_model(p.name, p.size, [&](models::Model& model) {
    EXPECT_NEAR(static_cast<double>(model.num_parameters()) / 1e9, p.total, 0.012 * p.total);
    // What counts as active differs with the embedding, which a token does not pass but picks from.
    EXPECT_NEAR(static_cast<double>(model.num_active_parameters()) / 1e9, p.active,
                0.18 * p.active);
  });
}

// As transformers counts them for the same sizes.
TEST(Registry, CountsParametersAsTransformersDoes) {
  struct Exact {
    std::string name, size;
    std::int64_t num_parameters;
  };
  for (const auto& [name, size, num_parameters] :
       {Exact{"qwen2_moe", "a2.7b", 14'315'784'192}, Exact{"olmoe", "1b-7b", 6'919'161'856},
        Exact{"glm4_moe", "106b-a12b", 106'852'245'504},
        Exact{"glm4_moe", "355b-a32b", 352'797'814'784},
        Exact{"glm4_moe_lite", "30b-a3b", 29'943'390'976},
        Exact{"minimax_m2", "230b-a10b", 228'689'748'992},
        Exact{"granitemoe", "1b-a400m", 1'334'628'352},
        Exact{"qwen3_next", "80b-a3b", 79'674'391'296}})
    with_model(name, size, [&, n = num_parameters](models::Model& model) {
      EXPECT_EQ(model.num_parameters(), n) << name << " " << size;
    });
}

// The report of DeepSeek-V3 says 671 billion, and the files hold 685: 11.5 of a layer of
// multi-token prediction, and embedding and head once more.
TEST(Registry, CountsALayerOfMultiTokenPrediction) {
  auto config = std::get<models::DeepseekV3Config>(models::built_in("deepseek_v3", "671b"));
  config.num_mtp_layers = 1;
  const OneRankScope scope;
  const auto model = models::make_model(config, {.dtype = at::kBFloat16, .device = at::kMeta});
  with_model("deepseek_v3", "671b", [&](models::Model& without) {
    const auto added = static_cast<double>(model->num_parameters() - without.num_parameters());
    EXPECT_NEAR(added / 1e9, 11.5, 0.12);
    const double copies = 2.0 * static_cast<double>(config.vocab * config.dim);
    EXPECT_NEAR((static_cast<double>(model->num_parameters()) + copies) / 1e9, 684.5, 0.1);
    EXPECT_EQ(model->num_moe_layers(), without.num_moe_layers() + 1);
    // The head once more, and what a layer takes: more than its weights, for attention.
    const double head = 6.0 * static_cast<double>(config.vocab * config.dim);
    const double active =
        6.0 * static_cast<double>(model->num_active_parameters() - without.num_active_parameters());
    const double flops = model->flops_per_token(4096) - without.flops_per_token(4096);
    EXPECT_GT(flops, head + active);
    EXPECT_LT(flops, 1.2 * (head + active));
  });
}

TEST(Registry, KnowsEveryModelAndSize) {
  for (const auto& name : models::model_names())
    for (const auto& size : models::model_sizes(name)) {
      auto config = models::built_in(name, size);
      EXPECT_EQ(models::name(config), name);
      std::set<std::string> keys;
      for (const auto& key : models::keys(config)) {
        EXPECT_TRUE(keys.insert(key.name).second) << key.name << " twice in " << name;
        EXPECT_FALSE(key.help.empty()) << key.name;
      }
      // Messages name facts by the keys that set them.
      for (const char* fact : {"num_heads", "num_experts", "top_k", "max_sequence", "vocab_size"})
        EXPECT_TRUE(keys.contains(fact));
    }
  expect_parts(error_of([] { models::built_in("qwen3", "tiny"); }, ErrorKind::config),
               {"'qwen3'", "qwen3_moe", "gpt_oss"});
  expect_parts(error_of([] { models::built_in("llama4", "8x7b"); }, ErrorKind::config),
               {"llama4", "'8x7b'", "scout, maverick"});
}

TEST(Registry, NamesEveryParameterOnceAndDecaysMatricesAlone) {
  for (const auto& name : models::model_names())
    with_model(name, "tiny", [&](models::Model& model) {
      std::set<std::string> names;
      model.each_param([&](Stored& w, bool decays) {
        EXPECT_TRUE(names.insert(w.spec.name).second) << w.spec.name << " twice in " << name;
        const auto ends = [&](const char* end) { return w.spec.name.ends_with(end); };
        const bool is_vector = ends("norm.weight") || ends(".bias") || ends(".sinks") ||
                               ends(".b1") || ends(".b2") || ends(".b3") || ends(".A_log") ||
                               ends(".dt_bias");
        EXPECT_EQ(decays, !is_vector) << w.spec.name;
      });
    });
}

}  // namespace
}  // namespace moesh
