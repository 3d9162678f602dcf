#include "moesh/config/config.h"

#include <algorithm>
#include <cmath>

#include "moesh/base/text.h"
#include "moesh/config/options.h"
#include "moesh/formats/pattern.h"
#include "moesh/formats/toml.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::config {

Origin Config::origin(const std::string& option) const {
  if (const auto found = origins.find(option); found != origins.end()) return found->second;
  const auto of_model = [this] {
    return model.size.empty() ? origin("model.name").text : model.name + ":" + model.size;
  };
  if (const Option* o = find_option(option)) {
    const bool is_default = o->get(*this) == o->default_in(*this);
    if (is_default && o->of_model) return {of_model(), true};
    return {is_default ? "default" : "set by the program", is_default};
  }
  if (const auto cell = find_cell(option)) return {"default", true};
  MOESH_CHECK(model_value(*this, option), "no option is called ", option);
  return {of_model(), true};
}

MeshShape mesh_shape(const Config& config) {
  const ParallelismSection& p = config.parallelism;
  MeshShape shape{.pp = static_cast<int>(p.pipeline_parallel_degree),
                  .dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                  .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                  .cp = static_cast<int>(p.context_parallel_degree),
                  .tp = static_cast<int>(p.tensor_parallel_degree),
                  .ep = static_cast<int>(p.expert_parallel_degree),
                  .etp = static_cast<int>(p.expert_tensor_parallel_degree),
                  .ranks_per_node = static_cast<int>(p.ranks_per_node)};
  if (shape.ranks_per_node == 0)
    shape.ranks_per_node = comm::launched_ranks_per_node(shape.num_ranks());
  return shape.validated();
}

SequenceCut sequence_cut(const Config& config,
                         const std::vector<std::optional<nn::AttentionOptions>>& layers,
                         int num_cp) {
  check_option(config, "parallelism.context_parallel_cut");
  const std::string& cut = config.parallelism.context_parallel_cut;
  if (cut == "balanced") return SequenceCut::balanced;
  if (cut == "contiguous" || num_cp == 1) return SequenceCut::contiguous;
  return nn::cheaper_cut(layers, config.data.sequence_length, num_cp);
}

SequenceCut sequence_cut(const Config& config) {
  const auto num_cp = static_cast<int>(config.parallelism.context_parallel_degree);
  if (num_cp == 1) return sequence_cut(config, {}, num_cp);
  return sequence_cut(config, models::attention_options(config.model.architecture), num_cp);
}

std::optional<StepRange> profile_steps(const Config& config) {
  constexpr const char* kSteps = "profile.steps";
  constexpr std::int64_t kMost = 20;  // with thousands of operators each, on every rank
  const std::string& text = config.profile.steps;
  if (text.empty()) return std::nullopt;
  const auto parts = split(text, ':');
  const auto first = number_of<std::int64_t>(parts.front()),
             last = number_of<std::int64_t>(parts.back());
  MOESH_CHECK(first && last && parts.size() <= 2, ErrorKind::config,
              describe_option(config, kSteps),
              "; it takes the first and the last step, as in 10:12, or one step");
  const StepRange range{*first, *last};
  MOESH_CHECK(range.first >= 1 && range.last >= range.first, ErrorKind::config,
              describe_option(config, kSteps),
              "; steps are counted from 1, and the last is not before the first");
  MOESH_CHECK(range.last <= config.training.steps, ErrorKind::config,
              describe_option(config, kSteps), ", and ", describe_option(config, "training.steps"),
              "; name steps up to ", config.training.steps);
  MOESH_CHECK(range.last - range.first < kMost, ErrorKind::config, describe_option(config, kSteps),
              ", which are ", range.last - range.first + 1, " steps; a trace of more than ", kMost,
              " is too large to look at: name fewer");
  MOESH_CHECK(!config.metrics.folder.empty(), ErrorKind::config, describe_option(config, kSteps),
              ", and ", describe_option(config, "metrics.folder"),
              ", where the trace belongs; name a folder");
  return range;
}

at::ScalarType scalar_type(const Config& config) {
  check_option(config, "training.dtype");
  if (config.training.dtype == "float64") return at::kDouble;
  return config.training.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

kernels::Float8 float8(const Config& config) {
  for (const char* key :
       {"training.float8", "training.float8_dense", "training.float8_rows", "training.float8_tile"})
    check_option(config, key);
  const TrainingSection& t = config.training;
  const auto of = [&](const std::string& value) { return value == "off" ? 0 : t.float8_tile; };
  return {.experts = of(t.float8), .dense = of(t.float8_dense), .rows = of(t.float8_rows)};
}

at::Device device(const Config& config) {
  return comm::device_for(at::Device(config.training.device), comm::local_process());
}

comm::LaunchOptions launch_options(const Config& config) {
  return {.timeout = std::chrono::milliseconds(
              static_cast<std::int64_t>(config.debug.timeout_seconds * 1000)),
          .checked = config.debug.checked,
          .device = at::Device(config.training.device),
          .links = links(config)};
}

std::optional<comm::Links> links(const Config& config) {
  const std::string& path = config.debug.links;
  if (path.empty()) return std::nullopt;
  comm::Links links{.ranks_per_node = mesh_shape(config).ranks_per_node};
  std::map<std::string, double> values;
  for (const char* key :
       {"node_bandwidth_gbs", "node_latency_us", "network_bandwidth_gbs", "network_latency_us"})
    values[key] = -1;
  for (const formats::TomlEntry& e : formats::read_toml(path)) {
    const auto where = [&] { return detail::concat(path, ":", e.line, ": ", e.key); };
    const auto* whole = std::get_if<std::int64_t>(&e.value);
    const auto* real = std::get_if<double>(&e.value);
    const double number = whole ? static_cast<double>(*whole) : real ? *real : -1;
    MOESH_CHECK(values.contains(e.key), ErrorKind::config, where(),
                " is not a key of links; the keys are node_bandwidth_gbs, node_latency_us, "
                "network_bandwidth_gbs and network_latency_us");
    MOESH_CHECK(number >= 0 && number < 1e12 && (number > 0 || e.key.ends_with("_us")),
                ErrorKind::config, where(), " is ", formats::to_toml(e.value),
                "; a bandwidth takes a number above 0, a latency one of 0 or more");
    values[e.key] = number;
  }
  for (const auto& [key, value] : values)
    MOESH_CHECK(value >= 0, ErrorKind::config, path, " lacks ", key,
                "; links have node_bandwidth_gbs and node_latency_us, inside a node, and "
                "network_bandwidth_gbs and network_latency_us, between nodes");
  links.inside = {values["node_latency_us"] * 1e-6, values["node_bandwidth_gbs"] * 1e9};
  links.between = {values["network_latency_us"] * 1e-6, values["network_bandwidth_gbs"] * 1e9};
  return links;
}

nn::Dispatcher dispatcher(const Config& config) {
  for (const nn::Dispatcher d : nn::kDispatchers)
    if (config.parallelism.moe_dispatcher == nn::to_string(d)) return d;
  check_option(config, "parallelism.moe_dispatcher");
  throw Error(ErrorKind::internal, "no dispatcher is called " + config.parallelism.moe_dispatcher);
}

std::optional<bool> score_before_experts(const Config& config) {
  if (config.moe.score_before_experts == "auto") return std::nullopt;
  return config.moe.score_before_experts == "true";
}

kernels::GpuKernels gpu_kernels(const Config& config) {
  using enum kernels::GpuKernels;
  for (kernels::GpuKernels k : {automatic, own, library})
    if (config.kernels.gpu == kernels::to_string(k)) return k;
  check_option(config, "kernels.gpu");
  throw Error(ErrorKind::internal, "no kernels are called " + config.kernels.gpu);
}

namespace {
std::int64_t num_dp(const Config& config) {
  return config.parallelism.data_parallel_replicate_degree *
         config.parallelism.data_parallel_shard_degree;
}
}  // namespace

std::int64_t num_micro_batches(const Config& config) {
  return num_micro_batches(config, num_dp(config));
}
std::int64_t num_micro_batches(const Config& config, std::int64_t num_dp) {
  if (config.training.global_batch_size == 0) return config.training.gradient_accumulation_steps;
  return config.training.global_batch_size / (config.data.batch_size * num_dp);
}

pipeline::StagePlan stage_plan(const Config& config) {
  const ParallelismSection& p = config.parallelism;
  return stage_plan(config, static_cast<int>(p.pipeline_parallel_degree),
                    p.pipeline_parallel_schedule);
}
pipeline::StagePlan stage_plan(const Config& config, int num_ranks_of_pp,
                               const std::string& schedule, models::FlopsOfParts flops) {
  const models::AnyConfig& model = config.model.architecture;
  const auto num_layers = static_cast<int>(models::facts(model).num_layers);
  const std::string& given = config.parallelism.pipeline_parallel_layers_per_stage;
  if (num_ranks_of_pp == 1) return {num_layers};
  if (!given.empty()) return pipeline::given_plan(given, num_layers);
  if (flops.layers.empty()) flops = models::flops_of_parts(model, config.data.sequence_length);
  return pipeline::balanced_plan(
      {.layers = flops.layers, .head = flops.head},
      num_ranks_of_pp * pipeline::stages_of_a_rank(schedule, pipeline::kStagesOfARank));
}

namespace {

// down_proj=4,layers.0.*=16
std::vector<std::pair<std::string, double>> read_patterns(const Config& config, const char* option,
                                                          const std::string& text, bool is_rank) {
  std::vector<std::pair<std::string, double>> all;
  auto parts = split(text, ',');
  if (parts.back().empty()) parts.pop_back();  // nothing, or a comma at the end
  for (const std::string& part : parts) {
    const auto equals = std::min(part.rfind('='), part.size());
    const auto value = number_of<double>(part.substr(std::min(equals + 1, part.size())));
    MOESH_CHECK(equals > 0 && value && *value > 0 && (!is_rank || *value == std::floor(*value)),
                ErrorKind::config, describe_option(config, option), ", and '", part,
                "' of it is not a pattern and a ", is_rank ? "rank of 1 or more" : "number above 0",
                "; write it as in down_proj=4");
    all.emplace_back(part.substr(0, equals), *value);
    try {
      formats::Pattern{all.back().first};
    } catch (const Error& e) {
      throw Error(e.kind(), detail::concat(describe_option(config, option), ": ", e.what()));
    }
  }
  return all;
}

// The dropout of this run, whatever an adapter was trained with before.
models::Lora with_dropout(models::Lora found, const Config& config) {
  const double dropout = config.lora.dropout;
  const bool has_dense = std::any_of(found.targets.begin(), found.targets.end(), [](const auto& t) {
    return t.first.find(".experts.") == std::string::npos;
  });
  MOESH_CHECK(dropout == 0 || has_dense, ErrorKind::config, describe_option(config, "lora.dropout"),
              ", and LoRA adds only to routed experts, which have none; leave out lora.dropout, or "
              "name a dense layer in lora.targets");
  found.dropout = dropout;
  return found;
}

}  // namespace

bool has_lora(const Config& config) { return config.lora.rank > 0 || !config.lora.adapter.empty(); }

models::Lora lora(const Config& config) {
  const LoraSection& l = config.lora;
  const auto differs = [&](const char* key) {
    const Option& o = *find_option(std::string("lora.") + key);
    return o.get(config) != o.initial();
  };
  if (!l.adapter.empty()) {
    for (const char* key :
         {"rank", "alpha", "targets", "use_rslora", "rank_pattern", "alpha_pattern"})
      MOESH_CHECK(!differs(key), ErrorKind::config,
                  describe_option(config, std::string("lora.") + key), ", and ",
                  describe_option(config, "lora.adapter"),
                  ", which says that itself; leave out lora.", key);
    return with_dropout(models::read_adapter(config.model.architecture, l.adapter), config);
  }
  if (l.rank == 0) {
    MOESH_CHECK(!differs("base"), ErrorKind::config, describe_option(config, "lora.base"), ", and ",
                describe_option(config, "lora.rank"),
                ": the model itself is trained, and weights in float8 or MXFP4 cannot be; set "
                "lora.rank to 1 or more, such as 16, or leave out lora.base: they are then read "
                "as numbers of training.dtype");
    for (const char* key : {"alpha", "targets", "use_rslora", "rank_pattern", "alpha_pattern",
                            "init_lora_weights", "dropout"})
      MOESH_CHECK(
          !differs(key), ErrorKind::config, describe_option(config, std::string("lora.") + key),
          ", and ", describe_option(config, "lora.rank"),
          ": there is no LoRA; set lora.rank to 1 or more, such as 16, or leave out lora.", key);
    return {};
  }
  formats::AdapterConfig values{.rank = l.rank,
                                .alpha = l.alpha,
                                .use_rslora = l.use_rslora,
                                .rank_pattern = {},
                                .alpha_pattern = {},
                                .target_modules = {},
                                .target_parameters = {},
                                .base_model = {}};
  for (const auto& [pattern, rank] :
       read_patterns(config, "lora.rank_pattern", l.rank_pattern, /*is_rank=*/true))
    values.rank_pattern.emplace_back(pattern, static_cast<std::int64_t>(rank));
  values.alpha_pattern =
      read_patterns(config, "lora.alpha_pattern", l.alpha_pattern, /*is_rank=*/false);
  models::Lora found = models::find_targets(config.model.architecture, l.targets, values);
  found.zero_b = l.init_lora_weights;
  return with_dropout(std::move(found), config);
}

optim::Groups param_groups(const Config& config) {
  const auto& groups = config.optimizer.group;
  for (std::size_t i = 0; i < groups.size(); ++i)
    MOESH_CHECK(groups[i].weight_decay >= 0 || groups[i].weight_decay == -1, ErrorKind::config,
                describe_option(config, detail::concat("optimizer.group.", i, ".weight_decay")),
                "; it takes 0 or more, or -1: as optimizer.weight_decay says");
  return optim::Groups(groups);
}

data::SampleOrder sample_order(const Config& config) {
  return {.batch = config.data.batch_size,
          .num_dp = num_dp(config),
          .num_micro = num_micro_batches(config)};
}

bool document_mask(const Config& config) {
  if (config.data.document_mask != "auto") return config.data.document_mask == "true";
  const auto has_several = [](const std::string& kind, const std::string& path) {
    return data::find_kind(data::resolved_kind(kind, path)).has_documents;
  };
  if (config.data.source.empty()) return has_several(config.data.kind, config.data.path);
  for (const data::SourceOptions& s : config.data.source)
    if (has_several(s.kind, s.path)) return true;
  return false;
}

data::DatasetOptions dataset_options(const Config& config) {
  std::vector<data::SourceOptions> sources = config.data.source;
  for (data::SourceOptions& s : sources)
    if (s.name.empty()) s.name = s.path;
  return {.kind = config.data.kind,
          .path = config.data.path,
          .sources = std::move(sources),
          .sequence_length = config.data.sequence_length,
          .vocab_size = models::facts(config.model.architecture).vocab_size,
          .seed = static_cast<std::uint64_t>(config.data.seed),
          .shuffle = config.data.shuffle,
          .synthetic_successors = config.data.synthetic_successors,
          .packing = config.data.packing,
          .tokenizer = config.data.tokenizer,
          .token_folder = config.data.token_folder};
}

std::int64_t num_mtp_layers(const Config& config) {
  return models::facts(config.model.architecture).num_mtp_layers;
}

data::DatasetOptions validation_options(const Config& config, const data::SourceOptions& source) {
  data::DatasetOptions options = dataset_options(config);
  options.kind = source.kind, options.path = source.path;
  options.sources.clear(), options.shuffle = false;
  return options;
}

}  // namespace moesh::config
