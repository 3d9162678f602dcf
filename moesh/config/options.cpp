#include "moesh/config/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "moesh/config/tables.h"
#include "moesh/models/registry.h"
#include "moesh/optim/registry.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::config {
namespace {

Rule at_least(double least) { return {.least = least}; }
Rule above(double least) { return {.least = least, .above = true}; }
Rule between(double least, double most) { return {.least = least, .most = most}; }
Rule fraction_below_one() { return {.least = 0, .most = 1, .below = true}; }
Rule one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }

std::vector<std::string> dispatcher_names() {
  std::vector<std::string> names;
  for (const nn::Dispatcher d : nn::kDispatchers) names.emplace_back(nn::to_string(d));
  return names;
}

// The name of an option is its place in Config, so neither can be wrong alone.
#define MOESH_OPTION(effect, section, key, ...)                                   \
  make_option<Effect::effect, &Config::section, &decltype(Config::section)::key>( \
      #section "." #key, __VA_ARGS__)

std::vector<Option> make_options() {
  return {
      MOESH_OPTION(numbers, model, name, "architecture", one_of(models::model_names())),
      MOESH_OPTION(numbers, model, size, "built-in configuration of it"),

      MOESH_OPTION(numbers, training, steps, "optimizer steps", at_least(1)),
      MOESH_OPTION(numbers, training, seed, "seed of the initial weights", at_least(0)),
      MOESH_OPTION(numbers, training, dtype, "type of computation, not of master weights",
                   one_of({"float64", "float32", "bfloat16"})),
      MOESH_OPTION(speed, training, device, "where tensors are", one_of({"cpu", "cuda"})),
      MOESH_OPTION(
          numbers, training, global_batch_size,
          "sequences of an optimizer step over all ranks, in as many micro-batches as that "
          "takes; 0: as gradient_accumulation_steps says",
          at_least(0)),
      MOESH_OPTION(numbers, training, gradient_accumulation_steps,
                   "micro-batches of an optimizer step", at_least(1)),
      MOESH_OPTION(numbers, training, max_norm, "gradients are scaled down to this norm; 0: never",
                   at_least(0)),
      MOESH_OPTION(output, training, max_minutes,
                   "the run ends after the step in which they pass; 0: never", at_least(0)),
      MOESH_OPTION(output, training, max_skipped_steps,
                   "so many steps in a row without a finite gradient end the run; 0: never",
                   at_least(0)),

      MOESH_OPTION(numbers, data, path, "file to train on; empty: the built-in synthetic language"),
      MOESH_OPTION(numbers, data, kind, data::dataset_help(), one_of(data::dataset_choices())),
      MOESH_OPTION(numbers, data, batch_size, "sequences of a data-parallel rank in a micro-batch",
                   at_least(1)),
      MOESH_OPTION(numbers, data, sequence_length, "tokens of a sequence", at_least(1)),
      MOESH_OPTION(numbers, data, seed,
                   "seed of the order of sequences, and of the synthetic language", at_least(0)),
      MOESH_OPTION(numbers, data, shuffle, "read a file in another random order each epoch"),
      MOESH_OPTION(numbers, data, synthetic_successors,
                   "tokens that may follow a token of the synthetic language", between(1, 64)),
      MOESH_OPTION(numbers, data, document_mask,
                   "tokens see their own document alone, and positions count from its start; auto: "
                   "where files have several (jsonl, indexed)",
                   one_of({"auto", "true", "false"})),
      MOESH_OPTION(numbers, data, packing,
                   "cut: documents one behind the other, cut into sequences; best_fit: whole ones "
                   "in each sequence, and padding",
                   one_of({data::kCut, data::kBestFit})),
      MOESH_OPTION(
          numbers, data, tokenizer,
          "tokenizer.json, or its folder, for files of text; empty: their bytes are tokens"),
      MOESH_OPTION(output, data, token_folder, "where the tokens made of text are kept"),

      MOESH_OPTION(output, validation, interval,
                   "steps from one validation to the next; the last step always has one",
                   at_least(1)),
      MOESH_OPTION(output, validation, steps,
                   "how much of each file: so many times the sequences of an optimizer step",
                   at_least(1)),

      // Each data-parallel rank brings its own batch. The other axes split the same work.
      MOESH_OPTION(numbers, parallelism, data_parallel_replicate_degree,
                   "dp_replicate: copies of the sharded model (HSDP)", at_least(1)),
      MOESH_OPTION(numbers, parallelism, data_parallel_shard_degree,
                   "dp_shard: ranks that split the storage of parameters (FSDP)", at_least(1)),
      MOESH_OPTION(speed, parallelism, context_parallel_degree, "cp: ranks that split a sequence",
                   at_least(1)),
      MOESH_OPTION(speed, parallelism, tensor_parallel_degree,
                   "tp: ranks that split heads, widths and vocabulary", at_least(1)),
      MOESH_OPTION(speed, parallelism, expert_parallel_degree, "ep: ranks that split the experts",
                   at_least(1)),
      MOESH_OPTION(speed, parallelism, expert_tensor_parallel_degree,
                   "etp: ranks that split the width of each expert", at_least(1)),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_degree,
                   "pp: ranks that split the layers, each with one stage or several", at_least(1)),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_schedule,
                   "pp: the order in which stages work on micro-batches",
                   one_of(pipeline::schedule_names())),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_layers_per_stage,
                   "pp: layers of each stage, as in 4,5,5,4, or of all but the last, as in 5; "
                   "empty: balanced by FLOPs, one stage a rank (interleaved_1f1b, zbv: two)"),
      MOESH_OPTION(speed, parallelism, sequence_parallel,
                   "tp ranks hold different tokens between the blocks"),
      MOESH_OPTION(speed, parallelism, fsdp_reshard_after_forward,
                   "free gathered parameters after forward, gather again in backward"),
      MOESH_OPTION(speed, parallelism, overlap_reductions,
                   "sum the gradients of a block over the ranks while backward goes on, in one "
                   "message"),
      MOESH_OPTION(speed, parallelism, moe_dispatcher, "how tokens reach experts",
                   one_of(dispatcher_names())),

      MOESH_OPTION(numbers, optimizer, name, "update rule", one_of(optim::rule_names())),
      MOESH_OPTION(numbers, optimizer, lr, "learning rate after warm-up", above(0)),
      MOESH_OPTION(numbers, optimizer, beta1, "AdamW: decay of the mean of gradients",
                   fraction_below_one()),
      MOESH_OPTION(numbers, optimizer, beta2, "AdamW: decay of the mean of squares",
                   fraction_below_one()),
      MOESH_OPTION(numbers, optimizer, eps, "AdamW: added to the root of the mean of squares",
                   above(0)),
      MOESH_OPTION(numbers, optimizer, weight_decay,
                   "decay of weights; AdamW: decoupled, SGD: in the gradient", at_least(0)),
      MOESH_OPTION(numbers, optimizer, momentum, "SGD: decay of the mean of gradients; 0: none",
                   fraction_below_one()),

      MOESH_OPTION(numbers, lr_scheduler, kind, "how the learning rate falls after warm-up",
                   one_of({"cosine", "linear", "wsd", "constant"})),
      MOESH_OPTION(numbers, lr_scheduler, warmup_steps, "steps of linear growth from 0",
                   at_least(0)),
      MOESH_OPTION(numbers, lr_scheduler, decay_ratio,
                   "wsd: fraction of all steps, at the end, in which the rate falls",
                   between(0, 1)),
      MOESH_OPTION(numbers, lr_scheduler, min_lr_factor,
                   "the rate ends at this fraction of optimizer.lr", between(0, 1)),

      MOESH_OPTION(
          numbers, moe, load_balance_coeff,
          "step of the expert bias (balance without a loss); 0: none, which is the default "
          "of all models but deepseek_v3",
          at_least(0))
          .with_default([](const models::ModelFacts& m) -> Value { return m.load_balance_coeff; }),
      MOESH_OPTION(
          numbers, moe, score_before_experts,
          "scores multiply what goes into an expert, or what comes out of it; auto: as the "
          "model does it",
          one_of({"auto", "true", "false"})),
      MOESH_OPTION(numbers, moe, switch_loss_weight,
                   "balance loss over the global micro-batch, of each layer; the default is the "
                   "model's own (router_aux_loss_coef * top_k / layers with experts; "
                   "deepseek_v3: 0)",
                   at_least(0))
          .with_default([](const models::ModelFacts& m) -> Value { return m.switch_loss_weight; }),
      MOESH_OPTION(numbers, moe, sequence_loss_weight,
                   "balance loss within each sequence; the default is 1e-4 for deepseek_v3, else 0",
                   at_least(0))
          .with_default(
              [](const models::ModelFacts& m) -> Value { return m.sequence_loss_weight; }),
      MOESH_OPTION(numbers, moe, z_loss_weight, "loss that keeps the router's logits small",
                   at_least(0)),
      MOESH_OPTION(numbers, moe, force_load_balance,
                   "for benchmarks: experts by token number, not by score"),

      MOESH_OPTION(speed, activation_checkpoint, mode,
                   "full: keep only the inputs of blocks, recompute the rest; selective: keep the "
                   "results of attention and the pre-activations of experts and MLPs as well",
                   one_of({"none", "selective", "full"})),

      MOESH_OPTION(speed, kernels, gpu,
                   "own: moesh's kernels, or an error that says why not; library: LibTorch's; "
                   "auto: own where they can",
                   one_of({"auto", "own", "library"})),
      MOESH_OPTION(
          speed, kernels, graph,
          "on: a step is a CUDA graph, or an error that says why not; off: it is not; auto: "
          "on one GPU, where it can be",
          one_of({"auto", "off", "on"})),
      MOESH_OPTION(speed, kernels, weight_copies,
                   "keep a bfloat16 copy of the weights, which AdamW writes with them: 2 bytes a "
                   "parameter, and no cast in a step"),

      // A run that goes on from a checkpoint computes what it would have computed without a stop.
      MOESH_OPTION(output, checkpoint, enable,
                   "save, and go on from the newest checkpoint of the folder"),
      MOESH_OPTION(output, checkpoint, folder,
                   "of the checkpoints of the run, step-00000123 and so on"),
      MOESH_OPTION(output, checkpoint, interval,
                   "steps from one checkpoint to the next; the last step is always saved",
                   at_least(1)),
      MOESH_OPTION(speed, checkpoint, async, "copy, and write while training goes on"),
      MOESH_OPTION(output, checkpoint, keep_latest_k, "how many are kept; 0: all", at_least(0)),
      MOESH_OPTION(output, checkpoint, resume,
                   "false: begin anew; the folder must not hold checkpoints yet"),
      MOESH_OPTION(output, checkpoint, accept_changes,
                   "go on although the data, its order or its sequence length are others"),
      MOESH_OPTION(numbers, checkpoint, initial_load,
                   "folder of weights (Hugging Face or moesh) to begin with"),
      MOESH_OPTION(output, checkpoint, export_dtype,
                   "type of saved weights; auto: as the master weights",
                   one_of({"auto", "float32", "bfloat16"})),
      MOESH_OPTION(output, checkpoint, max_shard_size,
                   "bytes of tensors in one file of a checkpoint", at_least(1)),

      MOESH_OPTION(output, metrics, log_freq, "steps from one log line to the next", at_least(1)),
      MOESH_OPTION(output, metrics, folder,
                   "of the run; one that was there before goes to earlier/ in it; empty: nowhere"),
      MOESH_OPTION(output, metrics, enable_tensorboard, "event files, in tensorboard/ in it"),
      MOESH_OPTION(output, metrics, enable_csv, "metrics.csv, beside metrics.jsonl"),
      MOESH_OPTION(output, metrics, expert_counts_freq,
                   "steps from one record of the tokens of every expert to the next", at_least(1)),
      MOESH_OPTION(output, metrics, peak_tflops,
                   "of one device, which TFLOP/s are compared with; 0: as its maker says, where "
                   "moesh knows it (bfloat16 on GPUs)",
                   at_least(0)),
      MOESH_OPTION(output, metrics, quiet, "print warnings and errors alone"),

      MOESH_OPTION(output, profile, steps,
                   "the first and the last step to write a trace of, as in 10:12; empty: none"),

      MOESH_OPTION(speed, debug, checked,
                   "compare every collective and every replicated value over the ranks"),
      MOESH_OPTION(speed, debug, timeout_seconds, "how long a rank waits for the others",
                   {.least = 0, .most = 1e6, .above = true}),
  };
}
#undef MOESH_OPTION

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

// A whole text as a number; nullopt if any of it is something else.
template <class T>
std::optional<T> number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Value> from_text(const std::string& text, const Value& like) {
  if (std::holds_alternative<std::string>(like)) return text;
  if (std::holds_alternative<bool>(like)) {
    if (text == "true" || text == "false") return text == "true";
    return std::nullopt;
  }
  if (std::holds_alternative<std::int64_t>(like)) {
    if (const auto whole = number<std::int64_t>(text)) return *whole;
    return std::nullopt;
  }
  if (const auto real = number<double>(text)) return *real;
  return std::nullopt;
}

std::string plain(double bound) {
  return bound == std::floor(bound) ? std::to_string(static_cast<std::int64_t>(bound))
                                    : formats::to_toml(bound);
}

}  // namespace

bool Rule::allows(const Value& value) const {
  if (const auto* text = std::get_if<std::string>(&value))
    return choices.empty() || std::find(choices.begin(), choices.end(), *text) != choices.end();
  if (std::holds_alternative<bool>(value)) return true;
  const auto* whole = std::get_if<std::int64_t>(&value);
  const double x = whole ? static_cast<double>(*whole) : std::get<double>(value);
  return std::isfinite(x) && (above ? x > least : x >= least) && (below ? x < most : x <= most);
}

std::string Rule::describe(const Value& like) const {
  if (std::holds_alternative<bool>(like)) return "true or false";
  if (std::holds_alternative<std::string>(like)) {
    if (choices.empty()) return "a text";
    std::string text = choices.front();
    for (std::size_t i = 1; i < choices.size(); ++i)
      text += (i + 1 < choices.size() ? ", " : " or ") + choices[i];
    return text;
  }
  const std::string what = std::holds_alternative<std::int64_t>(like) ? "an integer" : "a number";
  return std::isfinite(least) ? what + (above ? " " : ", ") + range() : what;
}

std::string Rule::range() const {
  if (!std::isfinite(most)) return above ? "above " + plain(least) : plain(least) + " or more";
  if (!above && !below) return plain(least) + " to " + plain(most);
  return (above ? "above " + plain(least) : plain(least) + " or more") +
         (below ? " and below " : ", at most ") + plain(most);
}

const std::vector<Option>& options() {
  static const std::vector<Option> all = make_options();
  return all;
}

const Option* find_option(const std::string& name) {
  for (const Option& o : options())
    if (o.name == name) return &o;
  return nullptr;
}

std::string nearest_name(const std::string& wrong, const std::vector<std::string>& names) {
  std::string best;
  std::size_t best_cost = std::string::npos;
  for (const std::string& name : names) {
    // The right key in a wrong section, or in none, is nearer than the right section with a wrong
    // key.
    const std::size_t cost = std::min(
        edit_distance(wrong, name), edit_distance(after_last_dot(wrong), after_last_dot(name)) + 1);
    if (cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

std::optional<std::string> name_elsewhere(const std::string& name) {
  static const std::map<std::string, std::string> names{
      // torchtitan
      {"seq_len", "data.sequence_length"},
      {"local_batch_size", "data.batch_size"},
      {"global_batch_size", "training.global_batch_size"},
      {"mixed_precision_param", "training.dtype"},
      {"dataset", "data.kind"},
      {"dataset_path", "data.path"},
      {"flavor", "model.size"},
      {"decay_type", "lr_scheduler.kind"},
      {"enable_checkpoint", "checkpoint.enable"},
      {"initial_load_path", "checkpoint.initial_load"},
      {"async_mode", "checkpoint.async"},
      {"dump_folder", "metrics.folder"},
      // Megatron
      {"tensor_model_parallel_size", "parallelism.tensor_parallel_degree"},
      {"context_parallel_size", "parallelism.context_parallel_degree"},
      {"expert_model_parallel_size", "parallelism.expert_parallel_degree"},
      {"expert_tensor_parallel_size", "parallelism.expert_tensor_parallel_degree"},
      {"pipeline_model_parallel_size", "parallelism.pipeline_parallel_degree"},
      {"seq_length", "data.sequence_length"},
      {"micro_batch_size", "data.batch_size"},
      {"train_iters", "training.steps"},
      {"bf16", "training.dtype"},
      {"fp16", "training.dtype"},
      {"clip_grad", "training.max_norm"},
      {"lr", "optimizer.lr"},
      {"min_lr", "lr_scheduler.min_lr_factor"},
      {"lr_warmup_iters", "lr_scheduler.warmup_steps"},
      {"lr_decay_style", "lr_scheduler.kind"},
      {"adam_beta1", "optimizer.beta1"},
      {"adam_beta2", "optimizer.beta2"},
      {"adam_eps", "optimizer.eps"},
      {"hidden_size", "model.dim"},
      {"num_attention_heads", "model.num_heads"},
      {"num_query_groups", "model.num_kv_heads"},
      {"ffn_hidden_size", "model.ffn"},
      {"moe_ffn_hidden_size", "model.moe_ffn"},
      {"moe_router_topk", "model.top_k"},
      {"moe_aux_loss_coeff", "moe.switch_loss_weight"},
      {"moe_z_loss_coeff", "moe.z_loss_weight"},
      {"moe_router_bias_update_rate", "moe.load_balance_coeff"},
      {"moe_router_force_load_balancing", "moe.force_load_balance"},
      {"moe_token_dispatcher_type", "parallelism.moe_dispatcher"},
      {"recompute_granularity", "activation_checkpoint.mode"},
      {"save", "checkpoint.folder"},
      {"load", "checkpoint.initial_load"},
      {"save_interval", "checkpoint.interval"},
      {"log_interval", "metrics.log_freq"},
      // transformers
      {"per_device_train_batch_size", "data.batch_size"},
      {"train_batch_size", "training.global_batch_size"},
      {"max_steps", "training.steps"},
      {"learning_rate", "optimizer.lr"},
      {"max_grad_norm", "training.max_norm"},
      {"num_hidden_layers", "model.num_layers"},
      {"num_key_value_heads", "model.num_kv_heads"},
      {"num_experts_per_tok", "model.top_k"},
      {"moe_intermediate_size", "model.moe_ffn"},
  };
  std::string key = after_last_dot(name);
  std::replace(key.begin(), key.end(), '-', '_');
  const auto found = names.find(key);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string> axis_elsewhere(const std::string& axis) {
  static const std::map<std::string, std::string> names{
      {"dp", "dp_shard"}, {"fsdp", "dp_shard"}, {"ddp", "dp_replicate"}, {"hsdp", "dp_replicate"},
      {"expert", "ep"},   {"tensor", "tp"},     {"context", "cp"},       {"pipeline", "pp"}};
  const auto found = names.find(axis);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

Value converted(const Setting& setting, const Value& like, const Rule& rule) {
  std::optional<Value> value;
  if (setting.is_text)
    value = from_text(std::get<std::string>(setting.value), like);
  else if (setting.value.index() == like.index())
    value = setting.value;
  else if (const auto* flag = std::get_if<bool>(&setting.value);
           flag && rule.allows(std::string("true")) && !rule.choices.empty())
    value = std::string(*flag ? "true" : "false");  // of auto, true and false
  else if (std::holds_alternative<double>(like) &&
           std::holds_alternative<std::int64_t>(setting.value))
    value = static_cast<double>(std::get<std::int64_t>(setting.value));
  MOESH_CHECK(
      value.has_value(), ErrorKind::config, setting.name, " is ",
      setting.is_text ? std::get<std::string>(setting.value) : formats::to_toml(setting.value),
      " (", setting.origin.text, "); it takes ", rule.describe(like));
  return *value;
}

const std::vector<Degree>& degrees() {
  static const std::vector<Degree> all{
      {"pp", "parallelism.pipeline_parallel_degree",
       [](const MeshShape& s) -> std::int64_t { return s.pp; }},
      {"dp_replicate", "parallelism.data_parallel_replicate_degree",
       [](const MeshShape& s) -> std::int64_t { return s.dp_replicate; }},
      {"dp_shard", "parallelism.data_parallel_shard_degree",
       [](const MeshShape& s) -> std::int64_t { return s.dp_shard; }},
      {"cp", "parallelism.context_parallel_degree",
       [](const MeshShape& s) -> std::int64_t { return s.cp; }},
      {"tp", "parallelism.tensor_parallel_degree",
       [](const MeshShape& s) -> std::int64_t { return s.tp; }},
      {"ep", "parallelism.expert_parallel_degree",
       [](const MeshShape& s) -> std::int64_t { return s.ep; }},
      {"etp", "parallelism.expert_tensor_parallel_degree",
       [](const MeshShape& s) -> std::int64_t { return s.etp; }}};
  return all;
}

const std::vector<ShortForm>& short_forms() {
  static const std::vector<ShortForm> all{{"steps", "training.steps"},
                                          {"dtype", "training.dtype"},
                                          {"device", "training.device"},
                                          {"max-minutes", "training.max_minutes"},
                                          {"quiet", "metrics.quiet"}};
  return all;
}

std::string numbers_of(const Config& config) {
  std::string text;
  for (const Option& o : options())
    if (o.effect == Effect::numbers) text += o.name + "=" + formats::to_toml(o.get(config)) + "\n";
  for (const Cell& cell : cells(config))
    if (cell.table->effect == Effect::numbers)
      text += cell.name() + "=" + formats::to_toml(cell.get(config)) + "\n";
  for (const auto& [name, value] : model_values(config))
    text += name + "=" + formats::to_toml(value) + "\n";
  return text;
}

Value read(const models::ModelKey& key) {
  return std::visit([](const auto* target) -> Value { return *target; }, key.target);
}

std::vector<std::pair<std::string, Value>> model_values(const Config& config) {
  models::AnyConfig copy = config.model.architecture;  // keys point into what they are taken of
  std::vector<std::pair<std::string, Value>> values;
  for (const models::ModelKey& key : models::keys(copy))
    values.emplace_back("model." + key.name, read(key));
  return values;
}

std::optional<Value> model_value(const Config& config, const std::string& name) {
  for (const auto& [key, value] : model_values(config))
    if (key == name) return value;
  return std::nullopt;
}

}  // namespace moesh::config
