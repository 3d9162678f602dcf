#include "moesh/formats/adapter_config.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"

namespace moesh::formats {
namespace {

AdapterConfig adapter_config(const std::string& more) {
  return parse_adapter_config(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8)" + more + "}",
                              "adapter_config.json");
}

void expect_refused_adapter(const std::string& more, const std::vector<std::string>& parts) {
  const std::string text = error_of([&] { adapter_config(more); }, ErrorKind::data);
  expect_parts(text, parts);
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(AdapterConfig, OfChangedWeightsIsRefused) {
  for (const std::string name :
       {"pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"})
    expect_refused_adapter(R"(, "init_lora_weights": ")" + name + '"',
                           {"adapter_config.json", "init_lora_weights is \"" + name + '"',
                            "changes the model's weights", "merge_and_unload",
                            "path_initial_model_for_weight_conversion"});
  for (const std::string value :
       {"true", "false", "null", R"("gaussian")", R"("eva")", R"("orthogonal")", R"("mica")"})
    EXPECT_EQ(adapter_config(R"(, "init_lora_weights": )" + value).rank, 4);
}

TEST(AdapterConfig, ErrorsNameTheFileOnOneLine) {
  expect_refused_adapter(
      R"(, "use_dora": true)",
      {"adapter_config.json", "use_dora is true; moesh computes plain LoRA, with false"});
  expect_refused_adapter(R"(, "modules_to_save": ["lm_head"])",
                         {R"(modules_to_save is ["lm_head"]; moesh computes)"});
  for (const std::string key : {"rank_pattern", "alpha_pattern"})
    expect_refused_adapter(
        ", \"" + key + R"(": {"q_proj(": 3})",
        {"adapter_config.json: " + key + R"(: "q_proj(" is not a regular expression)"});
}

}  // namespace
}  // namespace moesh::formats
