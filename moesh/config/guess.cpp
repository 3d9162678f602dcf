#include "moesh/config/merge.h"

#include <algorithm>
#include <map>

#include "moesh/config/options.h"

namespace moesh::config {
namespace {

// Levenshtein: letters to insert, delete or exchange.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row[b.size()];
}

std::string after_last_dot(const std::string& name) { return name.substr(name.rfind('.') + 1); }

}  // namespace

std::optional<std::string> nearest_name(const std::string& wrong,
                                        const std::vector<std::string>& names) {
  const std::string key = after_last_dot(wrong);
  std::optional<std::string> best;
  std::size_t best_cost = std::string::npos;
  for (const std::string& name : names) {
    // The right key in a wrong section, or in none, is nearer than the right section with a wrong
    // key.
    const std::size_t of_all = edit_distance(wrong, name),
                      of_key = edit_distance(key, after_last_dot(name));
    // A key of which more than half is wrong is another word, whatever its section is.
    const bool is_near = of_key <= key.size() / 2 || (key == wrong && of_all <= wrong.size() / 2);
    const std::size_t cost = std::min(of_all, of_key + 1);
    if (is_near && cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

const std::vector<Guesses>& guesses() {
  static const std::vector<Guesses> all{
      {"--training.steps",
       {"train_iters", "max_steps", "num_steps", "iters", "max_iters", "lr_decay_iters",
        "total_steps", "iterations", "num_iterations", "train_steps"}},
      {"--training.seed", {"seed", "random_seed", "manual_seed"}},
      {"--training.dtype=bfloat16", {"bf16", "bfloat16"}},
      {"--training.dtype=float32", {"fp32", "float32", "tf32"}},
      {"--training.dtype=float64", {"fp64", "float64"}},
      {"--training.dtype=bfloat16: moesh does not compute in float16", {"fp16", "float16", "half"}},
      {"--training.dtype",
       {"mixed_precision_param", "mixed_precision", "precision", "amp", "torch_dtype",
        "params_dtype"}},
      {"--training.device=cuda", {"gpu", "cuda"}},
      {"--training.device=cpu", {"cpu", "no_cuda", "use_cpu"}},
      {"--training.max_norm",
       {"clip_grad", "max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad_norm",
        "gradient_clip_val"}},
      {"--training.max_minutes", {"exit_duration_in_mins", "time_limit"}},
      {"--training.global_batch_size",
       {"global_batch_size", "train_batch_size", "gbs", "global_batch"}},
      {"--training.gradient_accumulation_steps",
       {"gradient_accumulation_steps", "grad_accum", "grad_accum_steps", "accumulate_grad_batches",
        "num_micro_batches"}},

      {"--data.batch_size",
       {"batch_size", "micro_batch_size", "local_batch_size", "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu", "bs", "mbs", "batch", "micro_batch", "batchsize"}},
      {"--data.sequence_length",
       {"sequence_length", "seq_len", "seq_length", "max_seq_length", "max_seq_len", "max_length",
        "context_length", "block_size", "n_ctx", "length", "seqlen", "seq", "sequence",
        "max_seqlen", "context_len"}},
      {"--data.path",
       {"data_path", "dataset_path", "train_file", "train_data", "train_data_path", "dataset_name",
        "data", "dataset"}},
      {"--data.kind", {"dataset_type"}},
      {"--data.tokenizer",
       {"tokenizer", "tokenizer_path", "tokenizer_model", "tokenizer_name", "hf_assets_path"}},
      {"--data.packing", {"packing", "pack"}},
      {"--validation.source.0.path",
       {"valid_data_path", "validation_file", "val_data", "eval_data"}},
      {"--validation.interval", {"eval_interval", "eval_steps", "val_check_interval"}},
      {"--validation.steps", {"eval_iters", "limit_val_batches"}},

      {"--optimizer.lr", {"lr", "learning_rate", "max_lr", "peak_lr"}},
      {"--optimizer.name", {"optim", "optimizer"}},
      {"--optimizer.weight_decay", {"weight_decay", "wd"}},
      {"--optimizer.beta1", {"adam_beta1", "beta1"}},
      {"--optimizer.beta2", {"adam_beta2", "beta2"}},
      {"--optimizer.eps", {"adam_eps", "adam_epsilon"}},
      {"--lr_scheduler.kind",
       {"lr_decay_style", "lr_scheduler_type", "decay_type", "lr_schedule", "scheduler",
        "lr_scheduler"}},
      {"--lr_scheduler.warmup_steps",
       {"lr_warmup_iters", "warmup_steps", "warmup", "warmup_iters", "num_warmup_steps"}},
      {"--lr_scheduler.min_lr_factor, a fraction of optimizer.lr", {"min_lr", "lr_min"}},

      {"--parallelism.tensor_parallel_degree",
       {"tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel", "tp_size",
        "tp_degree"}},
      {"--parallelism.context_parallel_degree",
       {"context_parallel_size", "context_parallel", "cp_size", "cp_degree"}},
      {"--parallelism.expert_parallel_degree",
       {"expert_model_parallel_size", "expert_parallel_size", "expert_parallel", "ep_size",
        "ep_degree"}},
      {"--parallelism.expert_tensor_parallel_degree",
       {"expert_tensor_parallel_size", "expert_tensor_parallel"}},
      {"--parallelism.pipeline_parallel_degree",
       {"pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel", "pp_size",
        "pp_degree"}},
      {"--parallelism.pipeline_parallel_schedule", {"pp_schedule", "schedule"}},
      {"--parallelism.data_parallel_shard_degree",
       {"use_distributed_optimizer", "zero_stage", "zero", "zero_optimization"}},
      {"--parallelism.moe_dispatcher", {"moe_token_dispatcher_type"}},
      {"the number of ranks is the product of the mesh's sizes, as in --mesh dp_shard=8",
       {"gpus", "num_gpus", "ngpu", "n_gpus", "devices", "nproc", "nproc_per_node", "world_size",
        "nnodes", "num_nodes", "ranks", "num_ranks", "workers", "num_processes"}},

      {"--model.dim", {"hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim"}},
      {"--model.num_layers", {"num_layers", "num_hidden_layers", "n_layers", "n_layer", "layers"}},
      {"--model.num_heads", {"num_attention_heads", "num_heads", "n_heads", "n_head", "heads"}},
      {"--model.num_kv_heads",
       {"num_query_groups", "num_key_value_heads", "n_kv_heads", "kv_heads"}},
      {"--model.ffn", {"ffn_hidden_size", "intermediate_size"}},
      {"--model.moe_ffn", {"moe_ffn_hidden_size", "moe_intermediate_size", "moe_inter_dim"}},
      {"--model.num_experts",
       {"num_experts", "n_experts", "num_local_experts", "n_routed_experts", "experts"}},
      {"--model.top_k",
       {"moe_router_topk", "num_experts_per_tok", "num_experts_per_token", "experts_per_token",
        "top_k", "topk"}},
      {"--model.vocab_size", {"vocab_size", "vocab"}},
      {"--model.rope_theta", {"rotary_base", "rope_theta"}},
      {"--model.norm_eps", {"rms_norm_eps", "layernorm_epsilon", "norm_epsilon"}},
      {"--model.max_sequence", {"max_position_embeddings"}},
      {"--model.size", {"flavor", "model_size"}},
      {"--model hf:FOLDER", {"model_name_or_path", "model_path", "pretrained", "model_dir"}},

      {"--moe.balance_loss_weight",
       {"moe_aux_loss_coeff", "aux_loss", "aux_loss_weight", "aux_loss_coef", "aux_loss_coeff",
        "balance_loss_coeff", "switch_loss_weight", "sequence_loss_weight"}},
      {"--moe.balance_over", {"moe_router_load_balancing_type"}},
      {"--model.balance_loss", {"router_aux_loss_coef"}},
      {"--moe.z_loss_weight", {"moe_z_loss_coeff", "z_loss"}},
      {"--moe.load_balance_coeff", {"moe_router_bias_update_rate", "bias_update_speed"}},
      {"--moe.force_load_balance", {"moe_router_force_load_balancing"}},
      {"--activation_checkpoint.mode=full",
       {"gradient_checkpointing", "activation_checkpointing", "recompute"}},
      {"--activation_checkpoint.mode", {"recompute_granularity", "ac_mode"}},

      {"--checkpoint.folder for checkpoints, --metrics.folder for metrics",
       {"output_dir", "output", "out", "out_dir", "outdir", "work_dir", "default_root_dir"}},
      {"--checkpoint.folder",
       {"save", "save_dir", "checkpoint_dir", "ckpt_dir", "ckpt", "checkpoint.dir",
        "checkpoint.path"}},
      {"--checkpoint.initial_load", {"load", "initial_load_path", "init_from", "load_checkpoint"}},
      {"--checkpoint.enable, which also resumes from the newest checkpoint in checkpoint.folder",
       {"resume", "resume_from_checkpoint", "enable_checkpoint", "auto_resume"}},
      {"--checkpoint.interval",
       {"save_interval", "save_steps", "checkpoint_interval", "save_every"}},
      {"--checkpoint.keep_latest_k", {"save_total_limit", "keep_last"}},
      {"--checkpoint.async", {"async_mode", "async_save"}},

      {"--metrics.folder", {"dump_folder", "log_dir", "logdir", "logging_dir", "metrics.dir"}},
      {"--metrics.log_freq", {"log_interval", "logging_steps", "log_every", "log_freq"}},
      {"--metrics.enable_tensorboard", {"tensorboard", "tensorboard_dir", "report_to"}},
      {"--profile.steps, as in --profile.steps=10:12",
       {"profile", "profiling", "enable_profiling"}},
      {"--log-level debug", {"verbose", "debug", "v"}},
      {"--debug.timeout_seconds", {"distributed_timeout_minutes", "timeout", "ddp_timeout"}},

      {"a run has training.steps optimizer steps: an epoch is as many as the sequences of the data "
       "take",
       {"epochs", "num_epochs", "num_train_epochs", "max_epochs"}},
      {"--training.freeze", {"freeze", "frozen", "freeze_layers", "trainable"}},
      {"--lora.rank", {"lora", "peft", "lora_r", "lora_rank", "r", "use_lora", "lora_dim"}},
      {"--lora.alpha", {"lora_alpha"}},
      {"--lora.targets",
       {"target_modules", "target_parameters", "lora_target", "lora_target_modules"}},
      {"--lora.dropout", {"lora_dropout", "dropout"}},
      {"--lora.adapter", {"adapter", "adapter_name_or_path", "lora_path", "peft_path"}},
      {"moesh computes with kernels of its own or of LibTorch (--kernels.gpu): nothing is compiled "
       "in a run",
       {"compile", "compile.", "torch_compile", "use_flash_attn", "attn_implementation",
        "flash_attn"}},
      {"moesh writes metrics.jsonl, --metrics.enable_csv and --metrics.enable_tensorboard",
       {"wandb", "wandb_project", "use_wandb", "wandb."}},
      {"moesh keeps everything on its device; --activation_checkpoint.mode=full and a larger "
       "dp_shard save memory",
       {"offload", "cpu_offload", "offload_optimizer"}},
  };
  return all;
}

std::optional<std::string> axis_elsewhere(const std::string& axis) {
  static const std::map<std::string, std::string> names{
      {"dp", "dp_shard"},      {"fsdp", "dp_shard"},     {"data_parallel", "dp_shard"},
      {"ddp", "dp_replicate"}, {"hsdp", "dp_replicate"}, {"expert", "ep"},
      {"tensor", "tp"},        {"context", "cp"},        {"pipeline", "pp"}};
  const auto found = names.find(axis);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string> answer_to(const std::string& wrong, const std::string& value) {
  std::string name = wrong;
  std::replace(name.begin(), name.end(), '-', '_');
  const std::string key = after_last_dot(name);
  for (const Degree& d : degrees())
    if (d.axis == axis_elsewhere(key).value_or(key))
      return "--mesh " + d.axis + "=" + (value.empty() || value == "true" ? "2" : value);
  const auto find = [](const std::string& text) -> std::optional<std::string> {
    for (const Guesses& g : guesses())
      if (std::find(g.names.begin(), g.names.end(), text) != g.names.end()) return g.answer;
    return std::nullopt;
  };
  // In its section; a key that is known elsewhere, in whatever section; any key of a section that
  // is.
  for (const std::string& text : {name, key, name.substr(0, name.find('.')) + "."})
    if (auto answer = find(text)) return answer;
  return std::nullopt;
}

}  // namespace moesh::config
