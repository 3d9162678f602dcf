#include "moesh/config/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "moesh/models/registry.h"
#include "moesh/optim/registry.h"

namespace moesh::config {
namespace {

template <auto Section, auto Member>
Option option(std::string name, std::string help, Rule rule = {}) {
  using T = std::remove_cvref_t<decltype((Config{}.*Section).*Member)>;
  return {.name = std::move(name),
          .help = std::move(help),
          .rule = std::move(rule),
          .get = [](const Config& c) -> Value { return (c.*Section).*Member; },
          .set = [](Config& c, const Value& value) { (c.*Section).*Member = std::get<T>(value); }};
}

Rule at_least(double least) { return {.least = least}; }
Rule above(double least) { return {.least = least, .above = true}; }
Rule between(double least, double most) { return {.least = least, .most = most}; }
Rule fraction_below_one() { return {.least = 0, .most = 1, .below = true}; }
Rule one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }

// The name of an option is its place in Config, so neither can be wrong alone.
#define MOESH_OPTION(section, key, ...) \
  option<&Config::section, &decltype(Config::section)::key>(#section "." #key, __VA_ARGS__)

std::vector<Option> make_options() {
  return {
      MOESH_OPTION(model, name, "architecture", one_of(models::model_names())),
      MOESH_OPTION(model, size, "built-in configuration of it"),

      MOESH_OPTION(training, steps, "optimizer steps", at_least(1)),
      MOESH_OPTION(training, seed, "seed of the initial weights", at_least(0)),
      MOESH_OPTION(training, dtype, "type of computation, not of master weights",
                   one_of({"float64", "float32", "bfloat16"})),
      MOESH_OPTION(training, device, "where tensors live", one_of({"cpu", "cuda"})),
      MOESH_OPTION(training, gradient_accumulation_steps, "micro-batches of an optimizer step",
                   at_least(1)),
      MOESH_OPTION(training, max_norm, "gradients are scaled down to this norm; 0: never",
                   at_least(0)),
      MOESH_OPTION(training, max_minutes,
                   "the run ends after the step in which they pass; 0: never", at_least(0)),

      MOESH_OPTION(data, path, "file to train on; empty: the built-in synthetic language"),
      MOESH_OPTION(data, kind, data::dataset_help(), one_of(data::dataset_choices())),
      MOESH_OPTION(data, batch_size, "sequences of a data-parallel rank in a micro-batch",
                   at_least(1)),
      MOESH_OPTION(data, sequence_length, "tokens of a sequence", at_least(1)),
      MOESH_OPTION(data, seed, "seed of the order of sequences, and of the synthetic language",
                   at_least(0)),
      MOESH_OPTION(data, shuffle, "sequences of a file in another random order each epoch"),
      MOESH_OPTION(data, synthetic_successors,
                   "tokens that may follow a token of the synthetic language", between(1, 64)),

      MOESH_OPTION(parallelism, data_parallel_replicate_degree,
                   "dp_replicate: copies of the sharded model (HSDP)", at_least(1)),
      MOESH_OPTION(parallelism, data_parallel_shard_degree,
                   "dp_shard: ranks that share the storage of parameters (FSDP)", at_least(1)),
      MOESH_OPTION(parallelism, context_parallel_degree, "cp: ranks that share a sequence",
                   at_least(1)),
      MOESH_OPTION(parallelism, tensor_parallel_degree,
                   "tp: ranks that share heads, widths and vocabulary", at_least(1)),
      MOESH_OPTION(parallelism, expert_parallel_degree, "ep: ranks that share the experts",
                   at_least(1)),
      MOESH_OPTION(parallelism, expert_tensor_parallel_degree,
                   "etp: ranks that share the width of each expert", at_least(1)),
      MOESH_OPTION(parallelism, sequence_parallel,
                   "tp ranks hold different tokens between the blocks"),
      MOESH_OPTION(parallelism, fsdp_reshard_after_forward,
                   "free gathered parameters after forward, gather again in backward"),
      MOESH_OPTION(parallelism, moe_dispatcher, "how tokens reach experts",
                   one_of({"auto", "local", "all_to_all", "all_gather"})),

      MOESH_OPTION(optimizer, name, "update rule", one_of(optim::rule_names())),
      MOESH_OPTION(optimizer, lr, "learning rate after warm-up", above(0)),
      MOESH_OPTION(optimizer, beta1, "AdamW: decay of the mean of gradients", fraction_below_one()),
      MOESH_OPTION(optimizer, beta2, "AdamW: decay of the mean of squares", fraction_below_one()),
      MOESH_OPTION(optimizer, eps, "AdamW: added to the root of the mean of squares", above(0)),
      MOESH_OPTION(optimizer, weight_decay, "decoupled decay of weights", at_least(0)),
      MOESH_OPTION(optimizer, momentum, "SGD: decay of the mean of gradients; 0: none",
                   fraction_below_one()),

      MOESH_OPTION(lr_scheduler, kind, "how the learning rate falls after warm-up",
                   one_of({"cosine", "linear", "wsd", "constant"})),
      MOESH_OPTION(lr_scheduler, warmup_steps, "steps of linear growth from 0", at_least(0)),
      MOESH_OPTION(lr_scheduler, decay_ratio,
                   "wsd: part of all steps in which the rate falls, at the end", between(0, 1)),
      MOESH_OPTION(lr_scheduler, min_lr_factor, "the rate ends at this part of optimizer.lr",
                   between(0, 1)),

      MOESH_OPTION(moe, load_balance_coeff,
                   "step of the expert bias (balance without a loss); 0: none", at_least(0)),
      MOESH_OPTION(moe, switch_loss_weight, "balance loss over the global micro-batch",
                   at_least(0)),
      MOESH_OPTION(moe, sequence_loss_weight, "balance loss within each sequence", at_least(0)),
      MOESH_OPTION(moe, z_loss_weight, "loss that keeps the router's logits small", at_least(0)),
      MOESH_OPTION(moe, force_load_balance,
                   "for benchmarks: experts by token number, not by score"),

      MOESH_OPTION(activation_checkpoint, mode,
                   "full: keep only the inputs of blocks, recompute the rest",
                   one_of({"none", "full"})),

      MOESH_OPTION(checkpoint, enable, "save, and go on from the newest checkpoint of the folder"),
      MOESH_OPTION(checkpoint, folder, "of the checkpoints of the run, step-00000123 and so on"),
      MOESH_OPTION(checkpoint, interval,
                   "steps from one checkpoint to the next; the last step is always saved",
                   at_least(1)),
      MOESH_OPTION(checkpoint, async, "copy, and write while training goes on"),
      MOESH_OPTION(checkpoint, keep_latest_k, "how many are kept; 0: all", at_least(0)),
      MOESH_OPTION(checkpoint, resume,
                   "false: begin anew; the folder must not hold checkpoints yet"),
      MOESH_OPTION(checkpoint, initial_load,
                   "folder of weights (Hugging Face or moesh) to begin with"),
      MOESH_OPTION(checkpoint, export_dtype, "type of saved weights; auto: as the master weights",
                   one_of({"auto", "float32", "bfloat16"})),
      MOESH_OPTION(checkpoint, max_shard_size, "bytes of tensors in one file of a checkpoint",
                   at_least(1)),

      MOESH_OPTION(metrics, log_freq, "steps from one log line to the next", at_least(1)),
      MOESH_OPTION(metrics, folder, "where metrics are written; empty: nowhere"),

      MOESH_OPTION(debug, checked,
                   "compare every collective and every replicated value over the ranks"),
      MOESH_OPTION(debug, timeout_seconds, "how long a rank waits for the others",
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

std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

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
    const std::size_t cost =
        std::min(edit_distance(wrong, name), edit_distance(last_part(wrong), last_part(name)) + 1);
    if (cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

Value converted(const Setting& setting, const Value& like, const Rule& rule) {
  std::optional<Value> value;
  if (setting.is_text)
    value = from_text(std::get<std::string>(setting.value), like);
  else if (setting.value.index() == like.index())
    value = setting.value;
  else if (std::holds_alternative<double>(like) &&
           std::holds_alternative<std::int64_t>(setting.value))
    value = static_cast<double>(std::get<std::int64_t>(setting.value));
  MOESH_CHECK(
      value.has_value(), ErrorKind::config, setting.name, " is ",
      setting.is_text ? std::get<std::string>(setting.value) : formats::to_toml(setting.value),
      " (", setting.origin, "); it takes ", rule.describe(like));
  return *value;
}

const std::vector<Degree>& degrees() {
  static const std::vector<Degree> all{
      {"dp_replicate", "parallelism.data_parallel_replicate_degree"},
      {"dp_shard", "parallelism.data_parallel_shard_degree"},
      {"cp", "parallelism.context_parallel_degree"},
      {"tp", "parallelism.tensor_parallel_degree"},
      {"ep", "parallelism.expert_parallel_degree"},
      {"etp", "parallelism.expert_tensor_parallel_degree"}};
  return all;
}

const std::vector<ShortForm>& short_forms() {
  static const std::vector<ShortForm> all{{"steps", "training.steps"},
                                          {"dtype", "training.dtype"},
                                          {"device", "training.device"},
                                          {"max-minutes", "training.max_minutes"}};
  return all;
}

Value read(const ModelKey& key) {
  return std::visit([](const auto* target) -> Value { return *target; }, key.target);
}

}  // namespace moesh::config
