#pragma once
// For every option a legal value that is not its default, and what else must be set for that value
// to make a difference.

#include <map>
#include <string>
#include <vector>

#include "moesh/config/options.h"

namespace moesh::config {

/// Files that options name. A test that only reads configurations need not have them.
struct OtherFiles {
  std::string text = "corpus.txt", jsonl = "corpus.jsonl", weights = "weights",
              tokenizer = "tokenizer.json", token_folder = "tokens", adapter = "adapter",
              routing = "routing";
};

struct OtherValue {
  std::string value;                 // as the command line has it
  std::vector<std::string> needs{};  // further arguments, with and without the value
};

inline OtherValue other_value(const Option& o, const OtherFiles& files = {}) {
  const std::string bytes = "--model.vocab_size=257", tp = "--parallelism.tensor_parallel_degree=2",
                    pp = "--parallelism.pipeline_parallel_degree=2",
                    layers = "--model.num_layers=4", steps = "--training.steps=4",
                    wsd = "--lr_scheduler.kind=wsd", muon = "--optimizer.name=muon",
                    lora = "--lora.rank=2";
  const std::map<std::string, OtherValue> chosen{
      {"model.size",
       {"debug", {"--model.dim=32", "--model.num_layers=2", "--model.vocab_size=96"}}},
      {"training.steps", {"4"}},
      {"training.global_batch_size", {"6"}},
      {"training.max_norm", {"0.001"}},
      {"training.freeze", {"*.gate.weight"}},
      {"training.float8", {"blockwise", {"--training.float8_tile=4"}}},
      {"training.float8_dense", {"blockwise", {"--training.float8_tile=4"}}},
      {"training.float8_rows", {"blockwise", {"--training.float8_tile=4"}}},
      {"training.float8_tile",
       {"4", {"--training.float8=blockwise", "--model.dim=128", "--model.moe_ffn=128"}}},
      {"training.mtp_loss_weight", {"0.1", {"--model.num_mtp_layers=1"}}},
      {"data.path", {files.text, {bytes}}},
      {"data.kind", {"text", {bytes, "--data.path=" + files.jsonl}}},
      {"data.document_mask", {"false"}},
      {"data.packing", {"best_fit", {bytes, "--data.path=" + files.jsonl}}},
      {"data.tokenizer",
       {files.tokenizer,
        {bytes, "--data.path=" + files.text, "--data.token_folder=" + files.token_folder}}},
      {"data.shuffle", {"false", {bytes, "--data.path=" + files.text}}},
      {"parallelism.context_parallel_cut",
       {"balanced", {"--parallelism.context_parallel_degree=2"}}},
      {"parallelism.expert_parallel_degree", {"2", {tp}}},
      {"parallelism.expert_tensor_parallel_degree", {"2", {tp}}},
      {"parallelism.sequence_parallel", {"false", {tp}}},
      {"parallelism.fsdp_reshard_after_forward",
       {"false", {"--parallelism.data_parallel_shard_degree=2"}}},
      {"parallelism.overlap_reductions", {"false", {"--parallelism.data_parallel_shard_degree=2"}}},
      {"parallelism.overlap_experts",
       {"true", {"--mesh=tp=2,ep=2", "--training.gradient_accumulation_steps=2"}}},
      {"parallelism.pipeline_parallel_schedule", {"zbv", {layers, pp}}},
      {"parallelism.pipeline_parallel_layers_per_stage",
       {"3,1", {layers, pp, "--parallelism.data_parallel_shard_degree=2"}}},
      {"parallelism.moe_dispatcher", {"all_to_all", {"--mesh=tp=2,ep=2"}}},
      {"parallelism.ranks_per_node",
       {"2", {"--mesh=dp_shard=4,ep=4", "--parallelism.moe_dispatcher=two_hops"}}},
      {"moe.replay", {files.routing}},
      {"lora.alpha", {"3", {lora}}},
      {"lora.targets", {"o_proj", {lora}}},
      {"lora.use_rslora", {"true", {lora}}},
      {"lora.rank_pattern", {"o_proj=3", {lora}}},
      {"lora.alpha_pattern", {"o_proj=3", {lora}}},
      {"lora.init_lora_weights", {"false", {"--lora.rank=2"}}},
      {"lora.dropout", {"0.4", {lora}}},
      {"lora.adapter", {files.adapter}},
      {"lora.base", {"stored", {lora}}},
      {"activation_checkpoint.mode", {"full", {tp}}},
      {"optimizer.eps", {"0.1"}},
      {"optimizer.momentum", {"0.5", {"--optimizer.name=sgd"}}},
      {"optimizer.muon_momentum", {"0.5", {muon}}},
      {"optimizer.nesterov", {"false", {muon}}},
      {"optimizer.muon_float32", {"true", {muon, "--dtype=float32"}}},
      {"optimizer.muon_by_head", {"true", {muon}}},
      {"optimizer.qk_clip", {"0.02"}},
      {"lr_scheduler.kind", {"linear", {steps}}},
      {"lr_scheduler.decay_ratio", {"0.9", {wsd, steps}}},
      {"lr_scheduler.min_lr_factor", {"0.5", {steps}}},
      {"profile.steps", {"1:1"}},
      {"checkpoint.initial_load", {files.weights}}};
  if (const auto found = chosen.find(o.name); found != chosen.end()) return found->second;
  const Value initial = o.initial();
  if (const auto* flag = std::get_if<bool>(&initial)) return {*flag ? "false" : "true"};
  if (const auto* whole = std::get_if<std::int64_t>(&initial)) return {std::to_string(*whole + 1)};
  if (const auto* real = std::get_if<double>(&initial))
    return {formats::to_toml(*real == 0 ? 0.5 : *real / 2)};
  if (o.rule.choices.empty()) return {"other"};
  return {o.rule.choices[std::get<std::string>(initial) == o.rule.choices[0] ? 1 : 0]};
}

}  // namespace moesh::config
