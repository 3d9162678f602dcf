// Checks that mistakes in a layer or a step must not pass: the parity of a layer, of a whole step
// with its optimizer, and two files of gradients.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "moesh/base/error.h"
#include "moesh/verify/compare.h"
#include "moesh/verify/verify.h"
#include "tests/kernels/float8_check.h"
#include "tests/kernels/quantized_check.h"
#include "tests/mutants/check.h"
#include "tests/nn/delta_net_check.h"
#include "tests/nn/dropout_check.h"
#include "tests/nn/layer_parity.h"
#include "tests/train/device.h"
#include "tests/train/lora_check.h"
#include "tests/train/loss_check.h"

namespace moesh {
namespace {

using mutants::Check;
using mutants::Settings;

verify::LayerCase layer_case() {
  verify::LayerCase c;
  c.layer.router = {.num_experts = 8, .top_k = 2, .normalize = true};
  c.layer.experts = {.num_experts = 8, .dim = 6, .ffn = 8};
  c.options.dtype = at::kDouble;
  c.options.device = test_device();
  c.layer.dispatcher = nn::Dispatcher::all_to_all;
  c.options.init = {.kind = Init::Distribution::normal, .scale = 0.6, .seed = 9};
  c.batch = 2, c.sequence = 7;
  return c;
}

template <class Report>
std::string first_of(const Report& report, const MeshShape& mesh) {
  if (!report.error.empty()) return "threw: " + report.error;
  return report.holds() ? "" : report.mismatches[0].describe(mesh);
}

const mutants::Provide layer("layer", [](Settings& settings) -> Check {
  verify::LayerCase c = layer_case();
  const MeshShape mesh = settings.take_mesh();
  c.sequence = static_cast<std::int64_t>(settings.take("sequence", 7));
  c.sequence_parallel = settings.take("sequence_parallel", 1) != 0;
  c.equal_scores = settings.take("equal_scores") != 0;
  if (settings.take("two_hops") != 0) c.layer.dispatcher = nn::Dispatcher::two_hops;
  if (settings.take("all_gather") != 0) c.layer.dispatcher = nn::Dispatcher::all_gather;
  if (settings.take("local") != 0) c.layer.dispatcher = nn::Dispatcher::local;
  if (settings.take("shared") != 0) c.layer.shared_ffn = 5;
  if (settings.take("float8_rows") != 0) c.options.float8.rows = 3;
  c.z_weight = settings.take("z_weight");
  c.layer.router.forced_balance = settings.take("forced_balance") != 0;
  if (settings.take("biases") != 0) {
    c.layer.experts.biases = true;
    c.layer.experts.activation = kernels::Activation::clamped_swiglu;
  }
  auto options = test_options();
  options.timeout = std::chrono::seconds(5);
  const auto reference = std::make_shared<verify::LayerResult>(
      verify::run_reference(c, mesh.dp_replicate * mesh.dp_shard));
  return [=] {
    return first_of(verify::compare_layer({c}, {reference.get()}, mesh, options)[0], mesh);
  };
});

// One step of a small model on a mesh, in float64 if the settings do not name another dtype.
verify::VerifyCase step_case(const MeshShape& mesh, const config::Settings& more = {}) {
  config::Settings settings = verify::verify_defaults(1);
  for (const auto& s : {config::mesh_settings(mesh, "test"), test_settings(), more})
    settings.insert(settings.end(), s.begin(), s.end());
  return {config::merged(settings), 1};
}

const config::Setting kBalancedCut{
    "parallelism.context_parallel_cut", std::string("balanced"), {"test"}};

const mutants::Provide step("step", [](Settings& settings) -> Check {
  const MeshShape mesh = settings.take_mesh();
  config::Settings more{{"training.max_norm", 0.01, {"test"}}};
  for (const std::string dtype : {"float32", "bfloat16"})
    if (settings.take(dtype) != 0) more.push_back({"training.dtype", dtype, {"test"}});
  if (settings.take("olmoe") != 0) more.push_back({"model.name", std::string("olmoe"), {"test"}});
  if (settings.take("group") != 0) {
    more.push_back({"optimizer.group.0.match", std::string("embed_tokens"), {"test"}});
    more.push_back({"optimizer.group.0.lr_scale", 0.25, {"test"}});
  }
  if (settings.take("qk_clip") != 0) more.push_back({"optimizer.qk_clip", 0.02, {"test"}});
  if (settings.take("muon") != 0) more.push_back({"optimizer.name", std::string("muon"), {"test"}});
  const bool has_copies = settings.take("weight_copies") != 0;
  if (has_copies) {
    more.push_back({"kernels.weight_copies", true, {"test"}});
    more.push_back({"optimizer.lr", 0.003, {"test"}});  // an old copy shows in the loss
  }
  if (settings.take("balanced") != 0) more.push_back(kBalancedCut);
  if (settings.take("overlap") != 0)
    more.push_back({"parallelism.overlap_experts", true, {"test"}});
  if (settings.take("selective") != 0)
    more.push_back({"activation_checkpoint.mode", std::string("selective"), {"test"}});
  if (settings.take("one_document") != 0)
    more.push_back({"data.document_mask", std::string("false"), {"test"}});
  // The schedule of a pipeline; a model of three layers has no more than three stages.
  for (const std::string schedule :
       {"gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"})
    if (settings.take(schedule) != 0)
      more.push_back({"parallelism.pipeline_parallel_schedule", schedule, {"test"}});
  if (const auto layers = settings.take("layers"); layers != 0)
    more.push_back({"model.num_layers", static_cast<std::int64_t>(layers), {"test"}});
  const bool keeps_gathers = settings.take("kept") != 0;
  if (keeps_gathers) more.push_back({"parallelism.fsdp_reshard_after_forward", false, {"test"}});
  if (settings.take("freeze") != 0)
    more.push_back({"training.freeze", std::string("*.self_attn.*,model.norm.weight"), {"test"}});
  if (settings.take("lora") != 0) {
    more.push_back({"lora.rank", std::int64_t{3}, {"test"}});
    more.push_back({"lora.init_lora_weights", false, {"test"}});  // of a zero B, A has no gradient
  }
  if (settings.take("mtp") != 0)
    more.push_back({"model.num_mtp_layers", std::int64_t{2}, {"test"}});
  if (settings.take("dropout") != 0) more.push_back({"lora.dropout", 0.4, {"test"}});
  if (settings.take("sequences") != 0)
    more.push_back({"data.batch_size", std::int64_t{2}, {"test"}});
  if (settings.take("stored") != 0) more.push_back({"lora.base", std::string("stored"), {"test"}});
  if (settings.take("tied") != 0) more.push_back({"model.tie_embeddings", true, {"test"}});
  if (const auto micro = settings.take("micro"); micro != 0)
    more.push_back(
        {"training.gradient_accumulation_steps", static_cast<std::int64_t>(micro), {"test"}});
  auto c = step_case(mesh, more);
  if (has_copies || keeps_gathers) c.steps = 2;
  const auto reference = std::make_shared<verify::VerifyReference>(verify::run_reference(c));
  return [=]() -> std::string {
    try {
      return first_of(verify::verify(c, *reference), mesh);
    } catch (const Error& e) {
      return std::string("it throws: ") + e.what();
    }
  };
});

// One rank and a mesh would make the same mistake: what LoRA adds, and where it lies in a folder,
// by their formulas.
const mutants::Provide lora("lora", [](Settings& settings) -> Check {
  const bool is_order = settings.take("order") != 0;
  const std::string model = settings.take("gpt_oss") != 0 ? "gpt_oss" : "qwen3_moe";
  return [=] {
    return is_order ? lora_check::order_complaint(model) : lora_check::sum_complaint(model);
  };
});

// Which numbers dropout drops, and the layer with it, by their formulas.
const mutants::Provide dropout("dropout", [](Settings&) -> Check {
  return [] { return dropout_check::complaint(); };
});

// What the codes of quantized weights stand for, by the formulas of both kinds.
const mutants::Provide quantized("quantized", [](Settings& settings) -> Check {
  const auto kind = settings.take("mxfp4") != 0 ? kernels::Quantization::Format::mxfp4
                                                : kernels::Quantization::Format::float8;
  return [=] { return quantized_check::complaint(kind); };
});

// Products in float8 by the definition.
const mutants::Provide float8("float8", [](Settings& settings) -> Check {
  if (settings.take("codes") != 0) return [] { return float8_check::codes_complaint(); };
  if (settings.take("counts") != 0) return [] { return float8_check::counts_complaint(); };
  if (settings.take("packed") != 0) return [] { return float8_check::packed_complaint(); };
  if (settings.take("product") != 0)
    return [] { return float8_check::product_complaint(at::kDouble); };
  MOESH_CHECK(settings.take("experts") != 0, ErrorKind::config,
              "float8 takes codes, counts, packed, product or experts");
  return [] { return float8_check::experts_complaint(at::kDouble); };
});

// One step on a mesh against one rank, which makes the same mistake, but cuts the step otherwise.
const mutants::Provide cuts("cuts", [](Settings& settings) -> Check {
  const MeshShape mesh = settings.take_mesh();
  if (settings.take("micro_batch") != 0) {
    const auto c = step_case({}, {{"moe.balance_over", std::string("micro_batch"), {"test"}}});
    return [=]() -> std::string {
      verify::VerifyCase halves = c;
      halves.config =
          changed(c.config, {{"data.batch_size", c.config.data.batch_size / 2, {"test"}},
                             {"training.gradient_accumulation_steps", std::int64_t{2}, {"test"}}});
      const auto loss = [](const verify::VerifyCase& v) {
        return verify::run_reference(v)["step 0 total loss"].item<double>();
      };
      if (std::abs(loss(c) - loss(halves)) > 1e-9) return "";
      return "it is the same over a micro-batch and over its halves";
    };
  }
  config::Settings more{{"training.gradient_accumulation_steps",
                         static_cast<std::int64_t>(settings.take("micro", 1)),
                         {"test"}}};
  if (settings.take("float32") != 0)
    more.push_back({"training.dtype", std::string("float32"), {"test"}});
  if (settings.take("olmoe") != 0) more.push_back({"model.name", std::string("olmoe"), {"test"}});
  if (settings.take("float8") != 0) {
    more.push_back({"training.float8_dense", std::string("blockwise"), {"test"}});
    more.push_back({"training.float8_tile", std::int64_t{4}, {"test"}});
  }
  const auto c = step_case(mesh, more);
  return [=] { return first_of(verify::verify(c, verify::run_reference(c)), mesh); };
});

// The same of a model whose attention has a window.
const mutants::Provide windowed_step("windowed_step", [](Settings& settings) -> Check {
  const MeshShape mesh = settings.take_mesh();
  config::Settings more{{"model.name", std::string("gpt_oss"), {"test"}}};
  if (settings.take("balanced") != 0) more.push_back(kBalancedCut);
  const auto c = step_case(mesh, more);
  const auto reference = std::make_shared<verify::VerifyReference>(verify::run_reference(c));
  return [=] { return first_of(verify::verify(c, *reference), mesh); };
});

// The loss terms of a step against their formulas.
const mutants::Provide losses_of_a_step("losses", [](Settings& settings) -> Check {
  const MeshShape mesh = settings.take_mesh();
  const bool sequence_parallel = settings.take("sequence_parallel", 1) != 0;
  const auto mask = settings.take("none_in_one_sequence") != 0 ? losses::Mask::none_in_one_sequence
                    : settings.take("few") != 0                ? losses::Mask::few
                                                               : losses::Mask::all;
  return [=] { return losses::step_complaint(mesh, mask, sequence_parallel); };
});

// Two files of gradients, of ep=4 and ep=2, without verify: compare finds the tensor
// and the factor, and only the tensors of experts differ.
// One rank and a mesh would make the same mistake: two runs are compared instead.
const mutants::Provide score_sides("score_sides", [](Settings&) -> Check {
  return []() -> std::string {
    const auto loss = [](const char* before) {
      return verify::run_reference(step_case(
          {}, {{"moe.score_before_experts", std::string(before), {"test"}}}))["step 0 loss"]
          .item<double>();
    };
    return loss("true") == loss("false") ? "the same numbers before and after the experts" : "";
  };
});

const mutants::Provide compare("compare", [](Settings&) -> Check {
  const auto reference =
      std::make_shared<verify::VerifyReference>(verify::run_reference(step_case({.dp_shard = 4})));
  return [=]() -> std::string {
    const auto folder =
        std::filesystem::path(testing::TempDir()) / ("moesh_gradients_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder);
    const auto gradients = [&](const MeshShape& mesh, const std::string& name) {
      verify::NamedTensors values, only;
      verify::verify(step_case(mesh), *reference, &values);
      for (const auto& t : values.tensors)
        if (t.first.starts_with("d(")) only.tensors.push_back(t);
      verify::write_tensors((folder / name).string(), only);
      return (folder / name).string();
    };
    const auto found = verify::compare(gradients({.dp_shard = 4, .ep = 4}, "a.safetensors"),
                                       gradients({.dp_shard = 4, .ep = 2}, "b.safetensors"));
    std::filesystem::remove_all(folder);
    if (found.same()) return "";
    for (const auto& t : found.tensors)
      if ((t.state == verify::ComparedTensor::Verdict::differs) !=
          (t.name.find(".experts.w") != std::string::npos))
        return t.name + " is not an expert's, or does not differ";
    const auto* first = found.first_difference();
    return first->name + ": " + first->diagnosis();
  };
});

// Logits of a sequence [L, V] with a window in some layers: of all positions at once, or, on a
// mesh, of the last ones one after the other, with what is kept of those before.
constexpr std::int64_t kPastLength = 9, kPrompt = 4;

at::Tensor logits_of(const std::string& name, const MeshShape& shape, bool one_by_one) {
  struct Logits : nn::Probe {
    at::Tensor all_BLV;
    bool wants_logits() const override { return true; }
    void on_logits(const at::Tensor& logits_BLV) override { all_BLV = logits_BLV.clone(); }
  };
  const auto config = models::built_in(name, "tiny");
  const at::Tensor ids = (at::arange(kPastLength) * 31 + 7).remainder(96).unsqueeze(0);
  at::Tensor result;
  comm::launch(shape.num_ranks(), [&](comm::Group& world) {
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    const at::NoGradGuard no_grad;
    const auto model = models::make_model(config, {.dtype = at::kDouble, .seed = 3});
    at::Tensor found_LV = at::zeros({kPastLength, 96}, at::kDouble);
    if (one_by_one) {
      nn::ModelKvCache kv_cache;
      for (std::int64_t begin = 0, end = kPrompt; end <= kPastLength; begin = end, ++end)
        found_LV[end - 1] = model->next_logits(ids.narrow(1, begin, end - begin), kv_cache, {})[0];
    } else {
      Logits probe;
      model->forward({.input_ids_BL = ids, .labels_BL = ids},
                     {.pass = nn::Pass::evaluation, .probe = &probe});
      found_LV = probe.all_BLV[0];
    }
    if (world.rank() == 0) result = found_LV;
  });
  return result;
}

const mutants::Provide kv_cache("kv_cache", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  const std::string name = settings.take("qwen3_next") != 0 ? "qwen3_next" : "gpt_oss";
  const at::Tensor wanted_LV = logits_of(name, {}, false);
  return [=]() -> std::string {
    const at::Tensor found_LV = logits_of(name, shape, true);
    for (std::int64_t i = kPrompt - 1; i < kPastLength; ++i)
      if ((found_LV[i] - wanted_LV[i]).abs().max().item<double>() > 1e-10)
        return "logits of token " + std::to_string(i);
    return "";
  };
});

// A layer of Gated DeltaNet against its formula.
const mutants::Provide delta_net("delta_net", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  const bool has_documents = settings.take("documents") != 0;
  return [=] { return delta_net_check::complaint(shape, has_documents); };
});

const mutants::Provide evaluation("evaluation", [](Settings&) -> Check {
  return []() -> std::string {
    const auto world = comm::solo_group();
    const Mesh mesh(*world, {});
    const MeshScope scope(mesh);
    nn::Moe moe(layer_case().layer, layer_case().options);
    const nn::Tokens tokens(mesh, 1, 3, true);
    const at::Tensor x = at::ones({1, 3, 6}, at::TensorOptions(at::kDouble).device(test_device()));
    moe(assume<Dense{Place::T, Place::T, Place::T}>(x), tokens, {.pass = nn::Pass::evaluation});
    moe.router().update_bias(0.1);
    const at::Tensor bias = moe.router().expert_bias();
    return bias.count_nonzero().item<std::int64_t>() == 0 ? "" : "the expert bias has moved";
  };
});

}  // namespace
}  // namespace moesh
