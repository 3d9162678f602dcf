// Boxes of parameters and where they are on disk, against one element at a time.
#include "moesh/checkpoint/part.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/disk.h"
#include "tests/checkpoint/support.h"

namespace moesh::checkpoint {
namespace {

using formats::DiskTable;
using formats::DiskTensor;

TEST(Runs, CoverABoxInOrderAndAreAsLongAsTheyCanBe) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 500; ++repeat) {
    const auto num_dims = 1 + random() % 4;
    Sizes view;
    Region box;
    for (std::size_t d = 0; d < num_dims; ++d) {
      view.push_back(1 + random() % 4);
      box.start.push_back(random() % view[d]);
      box.length.push_back(1 + random() % (view[d] - box.start[d]));
    }
    const at::Tensor all = at::arange(num_elements(view)).reshape(view);
    at::Tensor inside = all;
    for (std::size_t d = 0; d < num_dims; ++d)
      inside = inside.narrow(d, box.start[d], box.length[d]);
    inside = inside.flatten().contiguous();
    std::int64_t next = 0, last_end = -1;
    each_run(view, box, [&](std::int64_t in_view, std::int64_t in_box, std::int64_t length) {
      EXPECT_EQ(in_box, next);
      EXPECT_NE(in_view, last_end) << "two runs could be one";
      for (std::int64_t i = 0; i < length; ++i)
        EXPECT_EQ(inside[in_box + i].item<std::int64_t>(), in_view + i);
      next += length, last_end = in_view + length;
    });
    EXPECT_EQ(next, inside.numel());
  }
}

// Experts of every model, in the ways they are found on disk. E experts, F width, D model
constexpr std::int64_t E = 4, F = 6, D = 5;

DiskTable stacked_in_out(bool interleaved) {
  const Sizes view = interleaved ? Sizes{E, D, F, 2} : Sizes{E, D, 2, F};
  const std::size_t part = interleaved ? 3 : 2, width = interleaved ? 2 : 3;
  DiskTable table;
  table.tensors = {
      {.name = "gate_up_proj",
       .shape = {E, D, 2 * F},
       .view = view,
       .sources =
           {{.param = "w1", .offset = {0, 0, 0}, .dims = {0, width, 1}, .fixed = {{part, 0}}},
            {.param = "w3", .offset = {0, 0, 0}, .dims = {0, width, 1}, .fixed = {{part, 1}}}},
       .dtype = formats::Dtype::f32}};
  return table;
}

std::vector<TensorPart> experts(const Region& region, bool filled) {
  std::vector<TensorPart> parts;
  for (const char* name : {"w1", "w3"}) {
    at::Tensor whole = at::arange(E * F * D, at::kFloat).reshape({E, F, D}) +
                       (name == std::string("w1") ? 0 : 1000);
    if (!filled) whole.zero_();
    at::Tensor part = whole;
    for (std::size_t d = 0; d < 3; ++d) part = part.narrow(d, region.start[d], region.length[d]);
    parts.push_back({.name = name,
                     .shape = {E, F, D},
                     .region = region,
                     .owned = true,
                     .value = part.contiguous()});
  }
  return parts;
}

TEST(Layouts, InOutHalvesAndInterleavedAreWhatTorchMakesOfThem) {
  for (const bool interleaved : {false, true}) {
    const DiskTable table = stacked_in_out(interleaved);
    table.validate();
    const TemporaryFolder folder;
    const auto plan = plan_files("model", table.tensors, 1 << 20);
    const auto path = folder.path() / "model.safetensors";
    formats::OutputFile out(path, formats::OutputFile::Mode::create);
    out.reserve(plan[0].size);
    out.write(0, plan[0].header);
    // Written in four uneven pieces, read in three others.
    for (const Region& r : {Region{{0, 0, 0}, {1, F, D}}, Region{{1, 0, 0}, {3, 2, D}},
                            Region{{1, 2, 0}, {3, 4, 1}}, Region{{1, 2, 1}, {3, 4, 4}}}) {
      const auto parts = experts(r, true);
      EXPECT_TRUE(owns_some(plan[0].tensors[0], by_name(parts)));
      write_tensor(out, plan[0].tensors[0], by_name(parts));
    }
    const at::Tensor w1 = at::arange(E * F * D, at::kFloat).reshape({E, F, D}), w3 = w1 + 1000;
    const at::Tensor wanted =
        interleaved ? at::stack({w1, w3}, -1).permute({0, 2, 1, 3}).reshape({E, D, 2 * F})
                    : at::cat({w1, w3}, 1).permute({0, 2, 1}).contiguous();
    const std::string bytes = bytes_of(path).substr(plan[0].header.size());
    ASSERT_EQ(bytes.size(), wanted.nbytes());
    EXPECT_EQ(std::memcmp(bytes.data(), wanted.contiguous().const_data_ptr(), bytes.size()), 0);

    const auto source = TensorFolder::weights(folder.path());
    check_names(source, table);
    for (const Region& r : {Region{{0, 1, 2}, {4, 5, 3}}, Region{{2, 0, 0}, {1, F, D}},
                            Region{{0, 0, 0}, {0, F, D}}}) {
      const auto parts = experts(r, false), want = experts(r, true);
      Loader(source, table).load(parts);
      for (std::size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(at::equal(parts[i].value, want[i].value)) << i;
    }
  }
}

TEST(Loading, BoxesOfTensorsThatAreLargerThanASlab) {
  // [3, 700, 2100] floats: 5.9 MB an index of the first dimension; a row of [1, 3'000'000] alone is
  // larger than a slab.
  for (const Sizes& shape : {Sizes{3, 700, 2100}, Sizes{2, 3'000'000}, Sizes{2'500'000, 2}}) {
    const TemporaryFolder folder;
    DiskTable table;
    table.tensors = {formats::whole_tensor("w", "w", shape)};
    table.tensors[0].dtype = formats::Dtype::f32;
    const at::Tensor whole = at::arange(num_elements(shape), at::kFloat).reshape(shape);
    const auto plan = plan_files("model", table.tensors, 1);
    formats::OutputFile out(folder.path() / "model.safetensors", formats::OutputFile::Mode::create);
    out.reserve(plan[0].size);
    out.write(0, plan[0].header);
    const std::vector<TensorPart> all{
        {.name = "w", .region = {Sizes(shape.size(), 0), shape}, .owned = true, .value = whole}};
    write_tensor(out, plan[0].tensors[0], by_name(all));
    const auto source = TensorFolder::weights(folder.path());
    std::mt19937 random(3);
    for (int i = 0; i < 4; ++i) {
      Region box;
      at::Tensor wanted = whole;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        box.start.push_back(random() % shape[d]);
        box.length.push_back(1 + random() % (shape[d] - box.start[d]));
        wanted = wanted.narrow(d, box.start[d], box.length[d]);
      }
      const TensorPart part{
          .name = "w", .region = box, .owned = true, .value = at::zeros(box.length, at::kDouble)};
      Loader(source, table).load({part});
      EXPECT_TRUE(at::equal(part.value, wanted.to(at::kDouble))) << box.start << box.length;
    }
  }
}

TEST(Layouts, TablesOfTheModelsCoverEveryTensorAndEveryParameter) {
  const OneRankScope scope;
  for (const auto& name : models::model_names())
    for (const char* size : {"tiny", "debug"}) {
      const auto config = models::built_in(name, size);
      std::map<std::string, std::int64_t> wanted;
      const auto model = models::make_model(config, {.device = at::kMeta});
      model->each_param([&](Stored& w, bool) { wanted[w.spec.name] = num_elements(w.spec.shape); });
      if (models::facts(config).stores_expert_bias)
        for (auto* router : model->routers())
          wanted[models::expert_bias_name(router->gate().name())] = router->config().num_experts;
      for (const auto layout : formats::kExpertLayouts) {
        const auto table = models::on_disk(config).table(layout);
        table.validate();
        std::map<std::string, std::int64_t> covered;
        for (const auto& t : table.tensors)
          for (const auto& s : t.sources) {
            std::int64_t n = 1;
            for (const auto d : s.dims) n *= t.view[d];
            covered[s.param] += n;
          }
        EXPECT_EQ(covered, wanted) << name << " " << size << " " << to_string(layout);
      }
    }
}

// As transformers 4 wrote them, and 5 writes them: fields that name the same model.
TEST(ConfigJson, OfEveryModelComesInTwoVersions) {
  const std::string sizes =
      R"("vocab_size":96,"hidden_size":32,"num_hidden_layers":2,"num_attention_heads":8,"num_key_value_heads":4,
      "num_experts_per_tok":2,"max_position_embeddings":128,"intermediate_size":24,)";
  struct Case {
    std::string type, four, five;
  };
  const std::vector<Case> cases{
      {"qwen3_moe",
       R"("num_experts":8,"moe_intermediate_size":24,"head_dim":8,"rope_theta":1e6,"rope_scaling":null,"sliding_window":4096,
          "use_sliding_window":false,"mlp_only_layers":[])",
       R"("num_local_experts":8,"moe_intermediate_size":24,"head_dim":8,"rope_parameters":{"rope_type":"default","rope_theta":1000000},
          "sliding_window":null,"mlp_only_layers":null)"},
      {"mixtral",
       R"("num_local_experts":8,"rope_theta":1000000.0,"sliding_window":null,"torch_dtype":"bfloat16")",
       R"("num_experts":8,"head_dim":4,"rope_parameters":{"rope_type":"default","rope_theta":1e6},"dtype":"float32")"},
      {"llama4_text",
       R"("num_local_experts":8,"intermediate_size_mlp":48,"head_dim":4,"rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3",
          "factor":16.0,"low_freq_factor":1.0,"high_freq_factor":1.0,"original_max_position_embeddings":64},"no_rope_layers":[],
          "attn_temperature_tuning":4)",
       R"("num_local_experts":8,"intermediate_size_mlp":48,"head_dim":4,"rope_parameters":{"rope_type":"llama3","rope_theta":5e5,
          "factor":16,"low_freq_factor":1,"high_freq_factor":1,"original_max_position_embeddings":64},"no_rope_layers":[1,1],
          "moe_layers":[0,1],"layer_types":["chunked_attention","chunked_attention"],"attn_temperature_tuning":true,
          "attention_chunk_size":8192)"},
      {"gpt_oss",
       R"("num_local_experts":8,"head_dim":8,"rope_theta":150000,"rope_scaling":{"rope_type":"yarn","factor":32.0,"beta_fast":32.0,
          "beta_slow":1.0,"truncate":false,"original_max_position_embeddings":4096},"swiglu_limit":7.0,"sliding_window":128,
          "layer_types":["sliding_attention","full_attention"])",
       R"("num_local_experts":8,"head_dim":8,"rope_parameters":{"rope_theta":150000.0,"rope_type":"yarn","factor":32.0,"truncate":false,
          "original_max_position_embeddings":4096},"swiglu_limit":7,"swiglu_alpha":1.702)"},
      {"qwen2_moe",
       R"("num_experts":8,"moe_intermediate_size":24,"shared_expert_intermediate_size":40,"rope_theta":1e6,"sliding_window":32768,
          "use_sliding_window":false,"max_window_layers":21)",
       R"("num_local_experts":8,"moe_intermediate_size":24,"shared_expert_intermediate_size":40,"qkv_bias":true,"sliding_window":0,
          "rope_parameters":{"rope_type":"default","rope_theta":1000000},"layer_types":["full_attention","full_attention"])"},
      {"qwen3_next",
       R"("num_experts":8,"moe_intermediate_size":24,"shared_expert_intermediate_size":40,"head_dim":8,"rope_theta":1e7,"rope_scaling":null,
          "partial_rotary_factor":0.25,"linear_num_key_heads":4,"linear_num_value_heads":8,"full_attention_interval":2,
          "decoder_sparse_step":1,"mlp_only_layers":[],"output_router_logits":false)",
       R"("num_experts":8,"moe_intermediate_size":24,"shared_expert_intermediate_size":40,"head_dim":8,"linear_num_key_heads":4,
          "linear_num_value_heads":8,"rope_parameters":{"rope_type":"default","rope_theta":1e7,"partial_rotary_factor":0.25},
          "linear_conv_kernel_dim":4,"full_attention_interval":2,"layer_types":["linear_attention","full_attention"])"},
      {"olmoe",
       R"("num_experts":8,"clip_qkv":null,"rope_theta":10000.0,"rope_scaling":null,"norm_topk_prob":false)",
       R"("num_local_experts":8,"rope_parameters":{"rope_type":"default","rope_theta":10000.0},"router_aux_loss_coef":0.01)"},
      {"glm4_moe",
       R"("n_routed_experts":8,"moe_intermediate_size":24,"first_k_dense_replace":1,"n_shared_experts":1,"head_dim":8,"rope_theta":1e6,
          "partial_rotary_factor":0.5,"rope_scaling":null,"n_group":1,"topk_group":1,"routed_scaling_factor":1.0)",
       R"("num_local_experts":8,"moe_intermediate_size":24,"first_k_dense_replace":1,"n_shared_experts":1,"head_dim":8,
          "rope_parameters":{"rope_type":"default","rope_theta":1e6,"partial_rotary_factor":0.5},"norm_topk_prob":true)"},
      {"minimax_m2",
       R"("num_local_experts":8,"head_dim":8,"rotary_dim":4,"rope_theta":5000000,"scoring_func":"sigmoid","use_qk_norm":true,
          "qk_norm_type":"per_layer","use_routing_bias":true,"shared_intermediate_size":0,"attn_type_list":[1,1])",
       R"("num_experts":8,"head_dim":8,"rope_parameters":{"rope_type":"default","rope_theta":5e6,"partial_rotary_factor":0.5})"},
      {"granitemoe",
       R"("num_local_experts":8,"rope_theta":10000,"rope_scaling":null,"embedding_multiplier":12,"logits_scaling":6,
          "attention_multiplier":0.015625,"residual_multiplier":0.22)",
       R"("num_local_experts":8,"rope_parameters":{"rope_type":"default","rope_theta":10000.0},"embedding_multiplier":12.0,
          "logits_scaling":6.0,"attention_multiplier":0.015625,"residual_multiplier":0.22)"}};
  for (const auto& c : cases) {
    const auto normal = [&](const std::string& more) {
      const std::string text = "{\"model_type\":\"" + c.type + "\"," + sizes + more + "}";
      return models::on_disk(models::config_of(text, "config.json"))
          .config_json(formats::Dtype::f32);
    };
    EXPECT_EQ(normal(c.four), normal(c.five)) << c.type;
    EXPECT_THROW(normal(c.four + R"(,"hidden_act":"gelu")"), Error);
  }
}

// What moesh writes it reads as the same model, and transformers' own defaults are not assumed
// silently.
TEST(ConfigJson, OfEveryBuiltInModelIsReadAsItWasWritten) {
  for (const auto& name : models::model_names())
    for (const auto& size : models::model_sizes(name)) {
      const std::string text =
          models::on_disk(models::built_in(name, size)).config_json(formats::Dtype::f32);
      EXPECT_EQ(models::on_disk(models::config_of(text, "x")).config_json(formats::Dtype::f32),
                text)
          << name << " " << size;
    }
}

TEST(Layouts, AWrongTableIsRefused) {
  auto expect_refused = [](DiskTensor t, const std::string& why) {
    DiskTable table;
    table.tensors = {std::move(t)};
    try {
      table.validate();
      ADD_FAILURE() << why;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
  };
  DiskTensor t = stacked_in_out(false).tensors[0];
  t.sources.pop_back();
  expect_refused(t, "its sources fill 120");
  t = stacked_in_out(false).tensors[0];
  t.sources[1].fixed = {{2, 0}};
  expect_refused(t, "overlap");
  t.view = {E, D, 2, F + 1};
  expect_refused(t, "another number of elements");
  t = stacked_in_out(false).tensors[0];
  t.sources[0].dims = {0, 1, 1};
  expect_refused(t, "every dimension of the view once");
}

TEST(ConfigJson, VersionsFourAndFiveAreTheSameModel) {
  const auto text = [](const std::string& rope) {
    return R"({"model_type":"deepseek_v3","vocab_size":96,"hidden_size":32,"num_hidden_layers":3,"first_k_dense_replace":1,
      "intermediate_size":48,"moe_intermediate_size":24,"num_attention_heads":4,"q_lora_rank":null,"kv_lora_rank":16,
      "qk_nope_head_dim":8,"qk_rope_head_dim":4,"v_head_dim":8,"n_routed_experts":8,"n_shared_experts":1,"num_experts_per_tok":2,
      "n_group":2,"topk_group":1,"norm_topk_prob":true,"routed_scaling_factor":1.5,"rms_norm_eps":1e-05,"max_position_embeddings":128,
      "attention_bias":false,)" +
           rope + "}";
  };
  const auto normal = [&](const std::string& rope) {
    return models::on_disk(models::config_of(text(rope), "config.json"))
        .config_json(formats::Dtype::f32);
  };
  const std::string v4 = normal(
      R"("rope_theta":5000,"rope_scaling":{"type":"yarn","factor":40,"beta_fast":32,"beta_slow":1,
      "mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":4096},"torch_dtype":"float32")");
  const std::string v5 =
      normal(R"("rope_parameters":{"rope_type":"yarn","rope_theta":5000.0,"factor":40.0,"mscale":1,
      "mscale_all_dim":1,"original_max_position_embeddings":4096},"dtype":"bfloat16")");
  EXPECT_EQ(v4, v5);
  EXPECT_EQ(models::on_disk(models::config_of(v5, "x")).config_json(formats::Dtype::f32), v5);
  EXPECT_EQ(normal(R"("rope_theta":5000,"rope_scaling":null)"),
            normal(R"("rope_parameters":{"rope_type":"default","rope_theta":5000})"));
  EXPECT_NE(normal(R"("rope_theta":5000)"), normal(R"("rope_theta":5001)"));
  for (const char* bad : {R"("rope_parameters":{"rope_type":"longrope"})", R"("hidden_act":"gelu")",
                          R"("attention_bias2":0,"scoring_func":"softmax")"})
    EXPECT_THROW(normal(bad), Error) << bad;
}

}  // namespace
}  // namespace moesh::checkpoint
