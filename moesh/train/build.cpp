#include "moesh/train/build.h"

#include <ATen/ops/arange.h>
#include <c10/util/accumulate.h>
#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/checkpoint/load.h"
#include "moesh/config/options.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/disk.h"
#include "moesh/optim/rules.h"
#include "moesh/optim/schedule.h"

namespace moesh::train {
namespace {

models::Recompute recompute(const Config& config) {
  using enum models::Recompute;
  config::check_option(config, "activation_checkpoint.mode");
  const std::string& mode = config.activation_checkpoint.mode;
  return mode == "full" ? full : mode == "selective" ? selective : none;
}

// Where the layers of each stage begin and end, of those that a rank of pp has.
std::vector<models::LayerRange> stages_of(const Config& config, int rank) {
  if (config.parallelism.pipeline_parallel_degree == 1) return {};
  const auto schedule = schedule_of(pipeline_options(config), 1);
  std::vector<models::LayerRange> mine;
  std::int64_t begin = 0;
  int stage = 0;
  for (const int num_layers : stage_plan(config)) {
    if (schedule.rank_with(stage++) == rank) mine.push_back({begin, begin + num_layers});
    begin += num_layers;
  }
  return mine;
}

}  // namespace

nn::RouterConfig router_config(const Config& config) {
  nn::RouterConfig router = std::visit(
      [](const auto& m) {
        nn::RouterConfig r = m.plan().moe.router;
        r.num_experts = m.num_experts, r.top_k = m.top_k;
        return r;
      },
      config.model.architecture);
  router.forced_balance = config.moe.force_load_balance;
  return router;
}

namespace {

// By the name of a parameter, those that its values have in a checkpoint: layers.0.mlp.experts.w1
// is ..experts.0.gate_proj.weight and so on there.
class NamesInFiles {
 public:
  NamesInFiles() = default;
  explicit NamesInFiles(const Config& config) {
    for (const auto& t : on_disk(config).table(formats::ExpertLayout::per_expert).tensors)
      for (const auto& source : t.sources)
        if (!t.is_copy && t.name != source.param) names_[source.param].push_back(t.name);
  }
  const std::vector<std::string>& of(const std::string& param) const {
    static const std::vector<std::string> none;
    const auto found = names_.find(param);
    return found == names_.end() ? none : found->second;
  }

 private:
  std::map<std::string, std::vector<std::string>> names_;
};

// The names between the commas of training.freeze.
std::vector<std::string> globs_of(const Config& config) {
  std::vector<std::string> globs = split(config.training.freeze, ',');
  if (globs.back().empty()) globs.pop_back();  // nothing, or a comma at the end
  for (std::string& glob : globs) {
    glob.erase(0, glob.find_first_not_of(' '));
    glob.erase(glob.find_last_not_of(' ') + 1);
    MOESH_CHECK(!glob.empty(), ErrorKind::config, describe_option(config, "training.freeze"),
                ": a name between its commas is empty; write names of parameters, as in "
                "*.gate.weight");
  }
  return globs;
}

// The three kinds of names which have most in common with the one that matches nothing: letters
// with which their parts begin. All layers, and all experts, are one kind.
std::string close_names(const std::string& glob, const std::set<std::string>& names) {
  const auto in_common = [](const std::string& a, const std::string& b) {
    return std::ranges::mismatch(a, b).in1 - a.begin();
  };
  std::set<std::pair<std::int64_t, std::string>> kinds;  // the nearest first
  for (const std::string& name : names) {
    const auto parts = split(name, '.');
    std::int64_t score = 0;
    for (const std::string& wanted : split(glob, '.')) {
      std::int64_t most = 0;
      for (const auto& part : parts) most = std::max<std::int64_t>(most, in_common(wanted, part));
      score += most;
    }
    std::string kind;
    for (const auto& part : parts) {
      const bool is_number =
          std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c); });
      kind += (kind.empty() ? "" : ".") + (is_number ? "*" : part);
    }
    kinds.insert({-score, kind});
  }
  std::string text;
  int num = 0;
  for (const auto& [score, kind] : kinds)
    if (num++ < 3) text += (text.empty() ? "" : ", ") + kind;
  return text;
}

}  // namespace

std::function<bool(const std::string&)> Frozen::is_frozen() const {
  if (names.empty()) return {};
  return [all = names](const std::string& name) { return all.contains(name); };
}

Frozen frozen(const Config& config) {
  Frozen found;
  const auto globs = globs_of(config);
  if (has_lora(config)) {
    MOESH_CHECK(globs.empty(), ErrorKind::config, describe_option(config, "training.freeze"),
                ", and with LoRA all of the model is frozen; leave out training.freeze");
    const OneRankScope scope;
    const auto model = models::make_model(config.model.architecture, {.device = at::kMeta});
    model->each_param([&](Stored& w, bool) {
      found.names.insert(w.spec.name);
      found.num_parameters += c10::multiply_integers(w.spec.shape);
    });
    return found;
  }
  if (globs.empty()) return found;
  const NamesInFiles in_files(config);
  const OneRankScope scope;  // what a name matches may be on another stage
  const auto model = models::make_model(config.model.architecture, {.device = at::kMeta});
  std::set<std::string> names;
  std::size_t num_tensors = 0;
  std::vector<bool> is_used(globs.size());
  model->each_param([&](Stored& w, bool) {
    const std::string& name = w.spec.name;
    const auto& all = in_files.of(name);
    names.insert(name), ++num_tensors;
    names.insert(all.begin(), all.end());
    for (std::size_t i = 0; i < globs.size(); ++i) {
      const auto matches = [&](const std::string& n) {
        return fnmatch(globs[i].c_str(), n.c_str(), 0) == 0;
      };
      bool is_matched = matches(name);
      if (!is_matched) {
        const auto some = std::ranges::find_if(all, matches),
                   other = std::ranges::find_if_not(all, matches);
        MOESH_CHECK(some == all.end() || other == all.end(), ErrorKind::config,
                    describe_option(config, "training.freeze"), ": ", globs[i], " matches ", *some,
                    " and not ", *other, ": both are of one parameter, ", name,
                    ", which is trained or not; match them all");
        is_matched = some != all.end();
      }
      if (!is_matched) continue;
      is_used[i] = true;
      if (!found.names.insert(name).second) continue;
      found.num_parameters += c10::multiply_integers(w.spec.shape);
    }
  });
  for (std::size_t i = 0; i < globs.size(); ++i)
    MOESH_CHECK(is_used[i], ErrorKind::config, describe_option(config, "training.freeze"), ": ",
                globs[i], " matches no parameter; the nearest names are ",
                close_names(globs[i], names));
  MOESH_CHECK(found.names.size() < num_tensors, ErrorKind::config,
              describe_option(config, "training.freeze"), ": all ", num_tensors,
              " parameters are frozen, and nothing is left to train; name fewer");
  return found;
}

std::map<std::string, kernels::Quantization> quantization(const Config& config) {
  config::check_option(config, "lora.base");
  if (!has_lora(config) || config.lora.base == "compute") return {};
  if (const auto& folder = config.checkpoint.initial_load; !folder.empty()) {
    const auto source = checkpoint::TensorFolder::weights(folder);
    const auto names = on_disk(config);
    const auto table = names.table(checkpoint::find_layout(source, names));
    auto found = checkpoint::Loader(source, table).quantization();
    MOESH_CHECK(!found.empty(), ErrorKind::config, describe_option(config, "lora.base"),
                ", and no tensor of '", folder, "' is in float8 or MXFP4; leave out lora.base");
    return found;
  }
  auto published = models::published_quantization(config.model.architecture);
  MOESH_CHECK(!published.empty(), ErrorKind::config, describe_option(config, "lora.base"),
              ", and no weight of ", models::name(config.model.architecture),
              " of these sizes is published in float8 or MXFP4; name a folder that has such "
              "weights in checkpoint.initial_load, or leave out lora.base");
  return published;
}

std::string describe_quantization(const std::map<std::string, kernels::Quantization>& all) {
  std::map<std::string, int> counts;
  for (const auto& [param, how] : all) ++counts[how.name()];
  std::string text;
  for (const auto& [kind, count] : counts)
    text += detail::concat(text.empty() ? "" : ", ", count, count == 1 ? " tensor" : " tensors",
                           " in ", kind);
  return text.empty() ? "no tensor is in float8 or MXFP4" : text;
}

std::unique_ptr<models::Model> make_model(const Config& config, at::Device device) {
  // By the device of the run, which an estimate counts for on another.
  const at::Device of_run(config.training.device);
  const nn::Dispatcher way =
      nn::resolve(dispatcher(config), current_mesh().shape(), router_config(config),
                  device.is_meta() ? nn::planned_exchange(of_run) : nn::transport_of(of_run));
  auto model = models::make_model(config.model.architecture,
                                  {.dtype = scalar_type(config),
                                   .device = device,
                                   .seed = static_cast<std::uint64_t>(config.training.seed),
                                   .dispatcher = way,
                                   .forced_balance = config.moe.force_load_balance,
                                   .score_before_experts = score_before_experts(config),
                                   .gpu_kernels = gpu_kernels(config),
                                   .weight_copies = config.kernels.weight_copies,
                                   .lora = lora(config).of(config.model.architecture),
                                   .float8 = float8(config),
                                   .is_frozen = frozen(config).is_frozen(),
                                   .quantization =
                                       [all = quantization(config)](const std::string& name) {
                                         const auto found = all.find(name);
                                         return found == all.end() ? std::nullopt
                                                                   : std::optional(found->second);
                                       },
                                   .stages = stages_of(config, current_mesh().coordinate(pp))});
  open_channels(*model, pipeline_options(config));
  return model;
}

std::unique_ptr<models::Model> make_model(const Config& config) {
  return make_model(config, device(config));
}

namespace {

// The settings of [[optimizer.group]] for each parameter, by its own name or by those in files.
class GroupOfParam {
 public:
  explicit GroupOfParam(const Config& config) : groups_(param_groups(config)) {
    if (groups_.size() > 0) in_files_ = NamesInFiles(config);
  }

  const optim::Groups& groups() const { return groups_; }
  const std::vector<std::string>& in_files(const std::string& param) const {
    return in_files_.of(param);
  }
  std::optional<std::size_t> find(const std::string& param) const {
    return groups_.find(param, in_files(param));
  }

 private:
  optim::Groups groups_;
  NamesInFiles in_files_;
};

// Matches in the whole model: what a group matches may be on another stage.
std::vector<optim::GroupMatch> group_matches(const Config& config, const GroupOfParam& groups) {
  if (groups.groups().size() == 0) return {};
  const OneRankScope scope;
  const auto model =
      models::make_model(config.model.architecture,
                         {.device = at::kMeta, .lora = lora(config).of(config.model.architecture)});
  std::vector<optim::GroupMatch> matches(groups.groups().size());
  std::vector<std::string> names;
  model->each_param([&](Stored& w, bool) {
    names.push_back(w.spec.name);
    const auto& in_files = groups.in_files(w.spec.name);
    names.insert(names.end(), in_files.begin(), in_files.end());
    const auto found = groups.find(w.spec.name);
    if (!found) return;
    ++matches[*found].num_tensors;
    matches[*found].num_parameters += std::accumulate(
        w.spec.shape.begin(), w.spec.shape.end(), std::int64_t{1}, std::multiplies<std::int64_t>());
  });
  optim::check_matches(groups.groups(), matches, names);
  return matches;
}

// How a rule moves parameters of no group, then of each group.
using Ways = std::vector<optim::Optimizer::RuleChoice>;
Ways ways_of(const optim::RuleKind& kind, const Config& config, const optim::Groups& groups) {
  optim::RuleValues values;
  for (const auto& key : kind.keys) {
    const config::Value value = config::find_option("optimizer." + key)->get(config);
    const auto* is_on = std::get_if<bool>(&value);
    values[key] = is_on ? (*is_on ? 1 : 0) : std::get<double>(value);
  }
  Ways ways{{kind.make(values)}};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    optim::RuleValues own = values;
    const bool is_own = groups[i].weight_decay >= 0;
    if (is_own) own["weight_decay"] = groups[i].weight_decay;
    ways.push_back({is_own ? kind.make(own) : ways[0].rule, groups[i].lr_scale});
  }
  return ways;
}

}  // namespace

std::vector<optim::GroupMatch> group_matches(const Config& config) {
  return group_matches(config, GroupOfParam(config));
}

namespace {

void check_qk_clip(models::Model& model, const Config& config) {
  if (config.optimizer.qk_clip == 0) return;
  for (nn::Attention* attention : model.attentions()) {
    const auto rows = attention->logit_rows();
    MOESH_CHECK(!rows.empty(), ErrorKind::config, describe_option(config, "optimizer.qk_clip"),
                ", and ", config.model.name,
                " normalises queries and keys, or cuts them off, after the weights that would be "
                "scaled; set optimizer.qk_clip to 0");
    for (const nn::LogitRows& r : rows)
      MOESH_CHECK(r.weight->spec.trained, ErrorKind::config,
                  describe_option(config, "optimizer.qk_clip"), ", and ", r.weight->spec.name,
                  ", which it would scale, is frozen; set optimizer.qk_clip to 0, or train the "
                  "weight");
  }
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(models::Model& model, const Config& config) {
  check_qk_clip(model, config);
  const GroupOfParam group_of(config);
  group_matches(config, group_of);  // one that matches nothing throws
  const optim::Groups& groups = group_of.groups();
  optim::ParamList params;
  model.each_param([&](Stored& w, bool decays) {
    const auto found = group_of.find(w.spec.name);
    const bool is_asked = found && groups[*found].weight_decay >= 0;
    params.add(w, decays || is_asked ? optim::Decay::on : optim::Decay::off);
  });
  const optim::RuleKind& kind = optim::find_rule(config.optimizer.name);
  const Ways ways = ways_of(kind, config, groups);
  const Ways of_others =
      kind.is_for ? ways_of(optim::find_rule(kind.rule_of_others), config, groups) : ways;
  return std::make_unique<optim::Optimizer>(
      params, [group_of, is_for = kind.is_for, ways, of_others](const auto& entry) {
        const auto found = group_of.find(entry.stored->spec.name);
        return (is_for && !is_for(*entry.stored) ? of_others : ways)[found ? *found + 1 : 0];
      });
}

PipelineOptions pipeline_options(const Config& config) {
  const auto& p = config.parallelism;
  const auto degree = static_cast<int>(p.pipeline_parallel_degree);
  // Where experts are not split nothing travels, and nothing changes.
  const bool is_split = p.expert_parallel_degree * p.expert_tensor_parallel_degree > 1;
  return {.schedule = p.pipeline_parallel_schedule,
          .stages_of_a_rank = static_cast<int>(stage_plan(config).size()) / degree,
          .overlap_experts = p.overlap_experts && is_split};
}

StepOptions step_options(const Config& config) {
  config::check_option(config, "moe.balance_over");
  StepOptions options{.max_norm = config.training.max_norm,
                      // The expert bias is the model's, which LoRA freezes.
                      .bias_coeff = has_lora(config) ? 0 : config.moe.load_balance_coeff,
                      .qk_clip = config.optimizer.qk_clip,
                      .overlap = config.parallelism.overlap_reductions,
                      .pipeline = pipeline_options(config)};
  if (float8(config).has_products())
    options.float8_layers =
        models::facts(config.model.architecture).num_layers + num_mtp_layers(config);
  options.forward = {
      .sequence_parallel = config.parallelism.sequence_parallel,
      .sequence_cut = sequence_cut(config),
      .recompute = recompute(config),
      .auxiliary = {.balance_weight = config.moe.balance_loss_weight,
                    .z_weight = config.moe.z_loss_weight,
                    .balance_over = config.moe.balance_over == "sequence"
                                        ? nn::BalanceOver::sequence
                                        : nn::BalanceOver::micro_batch,
                    .mtp_weight = num_mtp_layers(config) > 0 ? config.training.mtp_loss_weight : 0},
      .reshard = config.parallelism.fsdp_reshard_after_forward,
      .watches_logits = config.optimizer.qk_clip > 0};
  return options;
}

UseGraph use_graph(const Config& config) {
  config::check_option(config, "kernels.graph");
  return config.kernels.graph == "on"    ? UseGraph::on
         : config.kernels.graph == "off" ? UseGraph::off
                                         : UseGraph::automatic;
}

std::function<double(std::int64_t step)> learning_rates(const Config& config) {
  config::check_option(config, "lr_scheduler.kind");
  optim::LrSchedule schedule = config.lr_scheduler;
  schedule.num_steps = config.training.steps;
  schedule.validate();
  return [peak = config.optimizer.lr, schedule](std::int64_t step) {
    return peak * schedule.factor(step);
  };
}

std::unique_ptr<data::Dataset> open_dataset(const Config& config) {
  return data::open_dataset(dataset_options(config));
}

std::int64_t most_documents(std::int64_t batch, std::int64_t sequence, std::int64_t num) {
  constexpr std::int64_t kTypical = 256;  // tokens of a document, or more
  std::int64_t most = batch * std::max<std::int64_t>(1, sequence / kTypical);
  while (most < num) most *= 2;
  return most;
}

std::function<std::vector<models::MicroBatch>(std::int64_t data_position)> host_batches(
    const Config& config, const data::Dataset& dataset, const Mesh& mesh) {
  return [&dataset, order = sample_order(config), rank = mesh.coordinate(dp),
          num_ahead = num_mtp_layers(config), has_mask = document_mask(config),
          has_numbers = config.lora.dropout > 0,
          is_pinned = config.training.device != "cpu"](std::int64_t data_position) {
    std::vector<models::MicroBatch> batches;
    std::int64_t num_documents = 0;
    for (std::int64_t micro = 0; micro < order.num_micro; ++micro) {
      const std::int64_t first = data_position + order.first(0, micro, rank);
      const auto b = data::make_batch(dataset, first, order.batch, num_ahead);
      models::MicroBatch batch{.input_ids_BL = b.input_ids_BL, .labels_BL = b.labels_BL};
      for (const auto& a : b.ahead) batch.ahead.push_back({a.input_ids_BL, a.labels_BL});
      if (has_mask) batch.documents.starts_BL = b.document_starts_BL;
      if (has_numbers) batch.samples_B = at::arange(first, first + order.batch, at::kLong);
      num_documents = std::max(num_documents, b.num_documents);
      // From pinned memory the copy to a GPU is not waited for.
      if (is_pinned)
        for (at::Tensor* t : batch.from_data()) *t = t->pin_memory();
      batches.push_back(std::move(batch));
    }
    // One bound for all of a step, or each pattern of bounds would be a graph.
    for (auto& b : batches)
      if (b.documents.any())
        b.documents.most = most_documents(order.batch, dataset.sequence_length(), num_documents);
    return batches;
  };
}

std::vector<models::MicroBatch> on_device(at::Device device,
                                          std::vector<models::MicroBatch> batches) {
  for (auto& b : batches)
    for (at::Tensor* t : b.from_data()) *t = t->to(device, /*non_blocking=*/true);
  return batches;
}

formats::ModelOnDisk on_disk(const Config& config) {
  return models::on_disk(config.model.architecture);
}

}  // namespace moesh::train
