#include "moesh/config/options.h"

#include <algorithm>
#include <cmath>

#include "moesh/base/text.h"
#include "moesh/models/registry.h"
#include "moesh/optim/rules.h"
#include "moesh/optim/schedule.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::config {
namespace {

ValueRule at_least(double least) { return {.least = least}; }
ValueRule above(double least) { return {.least = least, .above = true}; }
ValueRule between(double least, double most) { return {.least = least, .most = most}; }
ValueRule fraction_below_one() { return {.least = 0, .most = 1, .below = true}; }
ValueRule one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }

std::vector<std::string> dispatcher_names() {
  std::vector<std::string> names;
  for (const nn::Dispatcher d : nn::kDispatchers) names.emplace_back(nn::to_string(d));
  return names;
}

// The name of an option is its place in Config, so the two cannot differ.
#define MOESH_OPTION(effect, section, key, ...)                                   \
  make_option<Effect::effect, &Config::section, &decltype(Config::section)::key>( \
      #section "." #key, __VA_ARGS__)

std::vector<Option> make_options() {
  return {
      MOESH_OPTION(numbers, model, name, "architecture of the model",
                   one_of(models::model_names())),
      MOESH_OPTION(numbers, model, size,
                   "built-in size of that architecture; empty: every key of it is given"),

      MOESH_OPTION(numbers, training, steps, "number of optimizer steps", at_least(1)),
      MOESH_OPTION(numbers, training, seed, "random seed of the initial weights", at_least(0)),
      MOESH_OPTION(numbers, training, dtype,
                   "dtype of the computation; master weights are always float32 or float64",
                   one_of({"float64", "float32", "bfloat16"})),
      MOESH_OPTION(speed, training, device, "device of all tensors", one_of({"cpu", "cuda"})),
      MOESH_OPTION(numbers, training, global_batch_size,
                   "sequences in an optimizer step, over all ranks; moesh takes as many "
                   "micro-batches as that needs; 0: training.gradient_accumulation_steps decides",
                   at_least(0)),
      MOESH_OPTION(numbers, training, gradient_accumulation_steps,
                   "micro-batches in an optimizer step", at_least(1)),
      MOESH_OPTION(numbers, training, max_norm,
                   "largest gradient norm: larger gradients are scaled down to it; 0: no clipping",
                   at_least(0)),
      MOESH_OPTION(numbers, training, mtp_loss_weight,
                   "weight of the loss of multi-token prediction, the mean over the depths of "
                   "model.num_mtp_layers",
                   at_least(0)),
      MOESH_OPTION(
          numbers, training, freeze,
          "names of parameters that are not trained, separated by commas; * stands for any "
          "text, as in *.gate.weight; empty: all are trained"),
      MOESH_OPTION(numbers, training, float8,
                   "blockwise: experts multiply in float8, with a scale for each tile of their "
                   "inputs and each block of their weights; gradients of weights stay in "
                   "training.dtype",
                   one_of({"off", "blockwise"})),
      MOESH_OPTION(numbers, training, float8_dense,
                   "the same for the projections of attention, of MLPs and of shared experts",
                   one_of({"off", "blockwise"})),
      MOESH_OPTION(numbers, training, float8_rows,
                   "blockwise: routed experts get tokens, and gradients of their outputs, rounded "
                   "to float8 with a scale for each tile, and between ranks these travel so; what "
                   "comes back is in training.dtype",
                   one_of({"off", "blockwise"})),
      MOESH_OPTION(numbers, training, float8_tile,
                   "features in a tile of float8, rows and columns of a block; kernels of GPUs are "
                   "made for 128, smaller ones are for tests",
                   between(1, 128)),
      MOESH_OPTION(output, training, max_minutes,
                   "stop the run after this many minutes, at the end of a step; 0: no limit",
                   at_least(0)),
      MOESH_OPTION(
          output, training, max_skipped_steps,
          "stop the run after this many steps in a row without a finite gradient; 0: never",
          at_least(0)),

      MOESH_OPTION(numbers, data, path, "file to train on; empty: a built-in synthetic language"),
      MOESH_OPTION(numbers, data, kind, data::dataset_help(), one_of(data::dataset_choices())),
      MOESH_OPTION(numbers, data, batch_size,
                   "sequences in a micro-batch, for each data-parallel rank", at_least(1)),
      MOESH_OPTION(numbers, data, sequence_length, "tokens in a sequence", at_least(1)),
      MOESH_OPTION(numbers, data, seed,
                   "random seed of the order of sequences and of the synthetic language",
                   at_least(0)),
      MOESH_OPTION(numbers, data, shuffle, "read the file in a new random order in each epoch"),
      MOESH_OPTION(numbers, data, synthetic_successors,
                   "synthetic language: how many different tokens may follow a token",
                   between(1, 64)),
      MOESH_OPTION(numbers, data, document_mask,
                   "tokens attend only to their own document, and positions count from its "
                   "start; auto: true for files that hold several documents (jsonl, indexed)",
                   one_of({"auto", "true", "false"})),
      MOESH_OPTION(numbers, data, packing,
                   "cut: join the documents and cut them into sequences; best_fit: keep "
                   "documents whole and pad the rest of a sequence",
                   one_of({data::kCut, data::kBestFit})),
      MOESH_OPTION(numbers, data, tokenizer,
                   "tokenizer.json, or the folder that holds it, for text files; empty: each "
                   "byte is a token"),
      MOESH_OPTION(output, data, token_folder, "folder for the tokens of text files"),

      MOESH_OPTION(output, validation, interval,
                   "steps between two validations; the last step is always validated", at_least(1)),
      MOESH_OPTION(output, validation, steps,
                   "length of a validation, for each file, in optimizer steps' worth of sequences",
                   at_least(1)),

      // Each data-parallel rank brings its own batch. The other axes split the same work.
      MOESH_OPTION(numbers, parallelism, data_parallel_replicate_degree,
                   "dp_replicate: number of copies of the sharded model (HSDP)", at_least(1)),
      MOESH_OPTION(numbers, parallelism, data_parallel_shard_degree,
                   "dp_shard: ranks over which parameters are sharded (FSDP)", at_least(1)),
      MOESH_OPTION(speed, parallelism, context_parallel_degree,
                   "cp: ranks that split each sequence", at_least(1)),
      MOESH_OPTION(
          speed, parallelism, context_parallel_cut,
          "cp: contiguous: one piece of the sequence for each rank; balanced: one from the "
          "beginning and one from the end, so that all have as much attention to compute; "
          "auto: balanced, unless windows or chunks leave little to gain",
          one_of({"auto", "contiguous", "balanced"})),
      MOESH_OPTION(speed, parallelism, tensor_parallel_degree,
                   "tp: ranks that split heads, widths and the vocabulary", at_least(1)),
      MOESH_OPTION(speed, parallelism, expert_parallel_degree, "ep: ranks that split the experts",
                   at_least(1)),
      MOESH_OPTION(speed, parallelism, expert_tensor_parallel_degree,
                   "etp: ranks that split the width of each expert", at_least(1)),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_degree,
                   "pp: ranks that split the layers, with one stage or several on each",
                   at_least(1)),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_schedule,
                   "pp: order in which the stages work on micro-batches",
                   one_of(pipeline::schedule_names())),
      MOESH_OPTION(speed, parallelism, pipeline_parallel_layers_per_stage,
                   "pp: number of layers in each stage, as in 4,5,5,4, or in all stages but the "
                   "last, as in 5; empty: balanced by FLOPs, one stage on each rank "
                   "(interleaved_1f1b, zbv, dualpipev: two)"),
      MOESH_OPTION(speed, parallelism, sequence_parallel,
                   "split the tokens over the tp ranks between the blocks"),
      MOESH_OPTION(speed, parallelism, fsdp_reshard_after_forward,
                   "free gathered parameters after forward and gather them again in backward"),
      MOESH_OPTION(speed, parallelism, overlap_reductions,
                   "reduce the gradients of a block in one message, while backward computes the "
                   "next block"),
      MOESH_OPTION(speed, parallelism, overlap_experts,
                   "two micro-batches at a time: one computes while rows of the other travel to "
                   "their experts or back; with pp (1f1b, interleaved_1f1b, dualpipev) the forward "
                   "of one beside the backward of another"),
      MOESH_OPTION(speed, parallelism, moe_dispatcher,
                   "collectives that bring tokens to their experts", one_of(dispatcher_names())),
      MOESH_OPTION(
          speed, parallelism, ranks_per_node,
          "ranks on each node, between which links are slower: two_hops sends a token to a "
          "node once; 0: as the launcher says, or one node",
          between(0, 1e6)),

      MOESH_OPTION(numbers, optimizer, name, "update rule", one_of(optim::rule_names())),
      MOESH_OPTION(numbers, optimizer, lr, "learning rate after warm-up", above(0)),
      MOESH_OPTION(numbers, optimizer, beta1, "AdamW: decay of the running mean of gradients",
                   fraction_below_one()),
      MOESH_OPTION(numbers, optimizer, beta2,
                   "AdamW: decay of the running mean of squared gradients", fraction_below_one()),
      MOESH_OPTION(numbers, optimizer, eps,
                   "AdamW: added to the square root of the mean of squares", above(0)),
      MOESH_OPTION(numbers, optimizer, weight_decay,
                   "weight decay; AdamW and Muon: decoupled; SGD: added to the gradient",
                   at_least(0)),
      MOESH_OPTION(numbers, optimizer, momentum,
                   "SGD: decay of the running mean of gradients; 0: no momentum",
                   fraction_below_one()),

      MOESH_OPTION(numbers, optimizer, muon_momentum,
                   "Muon: decay of the running mean of gradients", fraction_below_one()),
      MOESH_OPTION(numbers, optimizer, nesterov, "Muon: Nesterov's momentum"),
      MOESH_OPTION(numbers, optimizer, muon_float32,
                   "Muon: orthogonalize in float32 instead of bfloat16 (float64 runs: float64)"),
      MOESH_OPTION(numbers, optimizer, muon_by_head,
                   "Muon: every head of MLA's up-projections is a matrix of its own"),
      MOESH_OPTION(numbers, optimizer, qk_clip,
                   "QK-clip: largest attention logit; heads that had a larger one in a step have "
                   "their query and key weights scaled down to it (100 is customary); 0: off",
                   at_least(0)),

      MOESH_OPTION(numbers, lr_scheduler, kind, "shape of the learning rate after warm-up",
                   one_of(optim::lr_schedule_names())),
      MOESH_OPTION(numbers, lr_scheduler, warmup_steps,
                   "steps in which the learning rate grows linearly from 0", at_least(0)),
      MOESH_OPTION(numbers, lr_scheduler, decay_ratio,
                   "wsd: fraction of all steps, at the end, in which the learning rate falls",
                   between(0, 1)),
      MOESH_OPTION(numbers, lr_scheduler, min_lr_factor,
                   "final learning rate, as a fraction of optimizer.lr", between(0, 1)),

      MOESH_OPTION(numbers, moe, load_balance_coeff,
                   "step size of the expert bias, which balances experts without a loss; 0: no "
                   "bias, the default of models that have none",
                   at_least(0))
          .with_default([](const models::ModelFacts& m) -> Value { return m.load_balance_coeff; }),
      MOESH_OPTION(numbers, moe, score_before_experts,
                   "multiply the input of an expert by its score, instead of the output; auto: "
                   "as the model does it",
                   one_of({"auto", "true", "false"})),
      MOESH_OPTION(numbers, moe, balance_loss_weight,
                   "weight of each layer's balance loss; the default is the model's own "
                   "(router_aux_loss_coef * top_k / layers with experts; deepseek_v3: 1e-4)",
                   at_least(0))
          .with_default([](const models::ModelFacts& m) -> Value { return m.balance_loss_weight; }),
      MOESH_OPTION(numbers, moe, balance_over,
                   "tokens that a balance loss is taken over: each sequence, or the micro-batch of "
                   "all ranks, which depends on how a step is cut",
                   one_of({"sequence", "micro_batch"})),
      MOESH_OPTION(numbers, moe, z_loss_weight,
                   "weight of the loss that keeps the router's logits small", at_least(0)),
      MOESH_OPTION(numbers, moe, force_load_balance,
                   "for benchmarks: choose experts by token number, not by score"),
      MOESH_OPTION(output, moe, record,
                   "folder for the experts that every token went to, an .npy file for each step; "
                   "empty: they are not written"),
      MOESH_OPTION(numbers, moe, replay,
                   "folder with such files, which choose the experts of every token in place of "
                   "the routers; empty: the routers choose"),

      MOESH_OPTION(numbers, lora, rank,
                   "rank of what LoRA adds to weights: only that is trained; 0: no LoRA, the "
                   "weights themselves are trained",
                   at_least(0)),
      MOESH_OPTION(numbers, lora, alpha,
                   "what LoRA adds is multiplied by alpha / rank, or with lora.use_rslora by "
                   "alpha / sqrt(rank)",
                   above(0)),
      MOESH_OPTION(numbers, lora, targets,
                   "weights that LoRA adds to, separated by commas: names or their ends, as in "
                   "q_proj,v_proj,experts.gate_up_proj, or regular expressions; all-linear: all "
                   "of attention, MLPs and experts"),
      MOESH_OPTION(numbers, lora, use_rslora, "divide lora.alpha by the square root of the rank"),
      MOESH_OPTION(numbers, lora, rank_pattern,
                   "other ranks of some targets, as in down_proj=4,layers.0.*=16: the first "
                   "pattern that the end of a name matches counts"),
      MOESH_OPTION(numbers, lora, alpha_pattern,
                   "other alphas of some targets, in the form of lora.rank_pattern"),
      MOESH_OPTION(numbers, lora, init_lora_weights,
                   "begin with B = 0, where LoRA adds nothing; false: with a random B, for "
                   "comparisons"),
      MOESH_OPTION(numbers, lora, dropout,
                   "fraction of the inputs of A that is dropped in training, in dense layers; it "
                   "depends on token and feature, not on the mesh",
                   fraction_below_one()),
      MOESH_OPTION(numbers, lora, adapter,
                   "folder of a LoRA adapter (PEFT or moesh) to go on from: it sets ranks, alphas "
                   "and targets"),
      MOESH_OPTION(
          numbers, lora, base,
          "how the frozen model is kept in memory: compute: in the dtype of the run; stored: "
          "what checkpoint.initial_load has in float8 or MXFP4 stays so, and is decoded block by "
          "block; without a folder, random weights in the form in which the model is published",
          one_of({"compute", "stored"})),

      MOESH_OPTION(speed, activation_checkpoint, mode,
                   "full: keep only the inputs of blocks and recompute the rest in backward; "
                   "selective: also keep the results of attention and the pre-activations of "
                   "experts and MLPs",
                   one_of({"none", "selective", "full"})),

      MOESH_OPTION(speed, kernels, gpu,
                   "own: moesh's kernels, or an error that says why they cannot run; library: "
                   "LibTorch's kernels; auto: moesh's where they can run",
                   one_of({"auto", "own", "library"})),
      MOESH_OPTION(speed, kernels, graph,
                   "on: run a step as a CUDA graph, or fail with the reason; off: never; auto: "
                   "on one GPU, where a graph can be captured",
                   one_of({"auto", "off", "on"})),
      MOESH_OPTION(
          speed, kernels, weight_copies,
          "keep a bfloat16 copy of the weights, written by AdamW (for weights that own kernels "
          "read in float8: their codes, made once a step): it takes 2 bytes a parameter and "
          "saves the casts in a step"),

      // A run that goes on from a checkpoint computes what it would have computed without a stop.
      MOESH_OPTION(output, checkpoint, enable,
                   "save checkpoints, and resume from the newest one in checkpoint.folder"),
      MOESH_OPTION(output, checkpoint, folder, "folder for checkpoints (step-00000123 and so on)"),
      MOESH_OPTION(output, checkpoint, interval,
                   "steps between two checkpoints; the last step is always saved", at_least(1)),
      MOESH_OPTION(speed, checkpoint, async, "copy the state and write it while training goes on"),
      MOESH_OPTION(output, checkpoint, keep_latest_k, "number of checkpoints to keep; 0: all",
                   at_least(0)),
      MOESH_OPTION(output, checkpoint, resume,
                   "false: begin a new run; checkpoint.folder must not hold checkpoints yet"),
      MOESH_OPTION(output, checkpoint, accept_changes,
                   "resume although the data, its order or its sequence length have changed"),
      MOESH_OPTION(numbers, checkpoint, initial_load,
                   "folder of the initial weights (Hugging Face or moesh)"),
      MOESH_OPTION(output, checkpoint, export_dtype,
                   "dtype of saved weights; auto: that of the master weights",
                   one_of({"auto", "float32", "bfloat16"})),
      MOESH_OPTION(output, checkpoint, max_shard_size,
                   "largest size of a checkpoint file, in bytes of tensors", at_least(1)),

      MOESH_OPTION(output, metrics, log_freq, "steps between two log lines", at_least(1)),
      MOESH_OPTION(output, metrics, folder,
                   "folder for metrics; the files of an earlier run there move to earlier/; "
                   "empty: write none"),
      MOESH_OPTION(output, metrics, enable_tensorboard,
                   "also write TensorBoard event files, in tensorboard/ of metrics.folder"),
      MOESH_OPTION(output, metrics, enable_csv, "also write metrics.csv"),
      MOESH_OPTION(output, metrics, expert_counts_freq,
                   "steps between two records of how many tokens each expert had", at_least(1)),
      MOESH_OPTION(output, metrics, float8_freq,
                   "steps between two counts of what float8 rounds to 0 and to its largest code; "
                   "0: none",
                   at_least(0)),
      MOESH_OPTION(output, metrics, peak_tflops,
                   "peak TFLOP/s of one device, to compare with; 0: the maker's figure, where "
                   "moesh knows it (bfloat16 on GPUs)",
                   at_least(0)),
      MOESH_OPTION(output, metrics, quiet, "print only warnings and errors"),

      MOESH_OPTION(output, profile, steps,
                   "first and last step to trace, as in 10:12; empty: no trace"),

      MOESH_OPTION(speed, debug, checked,
                   "compare every collective and every replicated value across the ranks"),
      MOESH_OPTION(speed, debug, timeout_seconds,
                   "seconds that a rank waits for the others before the run fails",
                   {.least = 0, .most = 1e6, .above = true}),
      MOESH_OPTION(speed, debug, links,
                   "TOML file with latencies and bandwidths inside a node and between nodes: every "
                   "exchange takes at least as long; empty: as fast as it can"),
  };
}
#undef MOESH_OPTION

std::optional<Value> from_text(const std::string& text, const Value& like) {
  if (std::holds_alternative<std::string>(like)) return text;
  if (std::holds_alternative<bool>(like)) {
    if (text == "true" || text == "false") return text == "true";
    return std::nullopt;
  }
  if (std::holds_alternative<std::int64_t>(like)) {
    if (const auto whole = number_of<std::int64_t>(text)) return *whole;
    return std::nullopt;
  }
  if (const auto real = number_of<double>(text)) return *real;
  return std::nullopt;
}

std::string plain(double bound) {
  return bound == std::floor(bound) ? std::to_string(static_cast<std::int64_t>(bound))
                                    : formats::to_toml(bound);
}

}  // namespace

bool ValueRule::allows(const Value& value) const {
  if (const auto* text = std::get_if<std::string>(&value))
    return choices.empty() || std::find(choices.begin(), choices.end(), *text) != choices.end();
  if (std::holds_alternative<bool>(value)) return true;
  const auto* whole = std::get_if<std::int64_t>(&value);
  const double x = whole ? static_cast<double>(*whole) : std::get<double>(value);
  return std::isfinite(x) && (above ? x > least : x >= least) && (below ? x < most : x <= most);
}

std::string ValueRule::describe(const Value& like) const {
  if (std::holds_alternative<bool>(like)) return "true or false";
  if (std::holds_alternative<std::string>(like)) {
    if (choices.empty()) return "a text";
    return joined_by_or(choices);
  }
  const std::string what = std::holds_alternative<std::int64_t>(like) ? "an integer" : "a number";
  return std::isfinite(least) ? what + (above ? " " : ", ") + range() : what;
}

std::string ValueRule::range() const {
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

Value converted(const Setting& setting, const Value& like, const ValueRule& rule) {
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
  static const std::vector<Degree> all{{pp, "parallelism.pipeline_parallel_degree"},
                                       {dp_replicate, "parallelism.data_parallel_replicate_degree"},
                                       {dp_shard, "parallelism.data_parallel_shard_degree"},
                                       {cp, "parallelism.context_parallel_degree"},
                                       {tp, "parallelism.tensor_parallel_degree"},
                                       {ep, "parallelism.expert_parallel_degree"},
                                       {etp, "parallelism.expert_tensor_parallel_degree"}};
  return all;
}

const std::vector<ShortForm>& short_forms() {
  static const std::vector<ShortForm> all{
      {"steps", "training.steps"},   {"dtype", "training.dtype"},
      {"device", "training.device"}, {"max-minutes", "training.max_minutes"},
      {"adapter", "lora.adapter"},   {"quiet", "metrics.quiet"}};
  return all;
}

std::string model_title(const Config& config) {
  const ModelSection& m = config.model;
  if (!m.folder.empty()) return m.name + " of " + printable(m.folder);
  return m.size.empty() ? m.name : m.name + " " + m.size;
}

std::string model_argument(const Config& config) {
  const ModelSection& m = config.model;
  if (!m.folder.empty()) return "hf:" + m.folder;
  return m.size.empty() ? m.name : m.name + ":" + m.size;
}

models::AnyConfig built_in_model(const ModelSection& m) {
  return models::built_in(m.name, m.size.empty() ? models::model_sizes(m.name).front() : m.size);
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
