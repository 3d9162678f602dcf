#include "moesh/config/config.h"

#include <charconv>

#include "moesh/config/options.h"
#include "moesh/config/tables.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::config {

Origin Config::origin(const std::string& option) const {
  if (const auto found = origins.find(option); found != origins.end()) return found->second;
  if (const Option* o = find_option(option)) {
    const bool is_default = o->get(*this) == o->default_in(*this);
    if (is_default && o->of_model) return {model.name + ":" + model.size, true};
    return {is_default ? "default" : "set by the program", is_default};
  }
  if (const auto cell = find_cell(option)) return {"default", true};
  MOESH_CHECK(model_value(*this, option), "no option is called ", option);
  return {model.name + ":" + model.size, true};
}

MeshShape mesh_shape(const Config& config) {
  const ParallelismSection& p = config.parallelism;
  return MeshShape{.pp = static_cast<int>(p.pipeline_parallel_degree),
                   .dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                   .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                   .cp = static_cast<int>(p.context_parallel_degree),
                   .tp = static_cast<int>(p.tensor_parallel_degree),
                   .ep = static_cast<int>(p.expert_parallel_degree),
                   .etp = static_cast<int>(p.expert_tensor_parallel_degree)}
      .validated();
}

std::optional<StepRange> profile_steps(const Config& config) {
  constexpr const char* kSteps = "profile.steps";
  constexpr std::int64_t kMost = 100;  // hundreds of thousands of operators on each rank
  const std::string& text = config.profile.steps;
  if (text.empty()) return std::nullopt;
  StepRange range;
  const char *at = text.data(), *end = at + text.size();
  const auto take = [&](std::int64_t& number) {
    const auto [next, error] = std::from_chars(at, end, number);
    at = next;
    return error == std::errc{};
  };
  bool is_range = take(range.first);
  range.last = range.first;
  if (is_range && at != end) is_range = *at++ == ':' && take(range.last);
  MOESH_CHECK(is_range && at == end, ErrorKind::config, describe_option(config, kSteps),
              "; it takes the first and the last step, as in 10:12, or one step");
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

at::Device device(const Config& config) {
  return comm::device_for(at::Device(config.training.device), comm::local_process());
}

comm::LaunchOptions launch_options(const Config& config) {
  return {.timeout = std::chrono::milliseconds(
              static_cast<std::int64_t>(config.debug.timeout_seconds * 1000)),
          .checked = config.debug.checked,
          .device = at::Device(config.training.device)};
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
  if (config.training.global_batch_size == 0) return config.training.gradient_accumulation_steps;
  return config.training.global_batch_size / (config.data.batch_size * num_dp(config));
}

pipeline::StagePlan stage_plan(const Config& config) {
  const ParallelismSection& p = config.parallelism;
  const auto num_layers = static_cast<int>(models::facts(config.model.architecture).num_layers);
  if (p.pipeline_parallel_degree == 1) return {num_layers};
  if (!p.pipeline_parallel_layers_per_stage.empty())
    return pipeline::given_plan(p.pipeline_parallel_layers_per_stage, num_layers);
  const auto flops = models::flops_of_parts(config.model.architecture, config.data.sequence_length);
  const int each = pipeline::stages_of_a_rank(p.pipeline_parallel_schedule);
  return pipeline::balanced_plan(
      {.layers = flops.layers, .embedding = 0, .head = flops.head},
      static_cast<int>(p.pipeline_parallel_degree) * (each == 0 ? 2 : each));
}

optim::Groups param_groups(const Config& config) {
  std::vector<optim::GroupOptions> groups;
  for (std::size_t i = 0; i < config.optimizer.group.size(); ++i) {
    const GroupSection& g = config.optimizer.group[i];
    MOESH_CHECK(g.weight_decay >= 0 || g.weight_decay == -1, ErrorKind::config,
                describe_option(config, detail::concat("optimizer.group.", i, ".weight_decay")),
                "; it takes 0 or more, or -1: as optimizer.weight_decay says");
    groups.push_back(
        {.match = g.match,
         .lr_scale = g.lr_scale,
         .weight_decay = g.weight_decay < 0 ? std::nullopt : std::optional(g.weight_decay)});
  }
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
  for (const SourceSection& s : config.data.source)
    if (has_several(s.kind, s.path)) return true;
  return false;
}

data::DatasetOptions dataset_options(const Config& config) {
  std::vector<data::SourceOptions> sources;
  for (const SourceSection& s : config.data.source)
    sources.push_back({.kind = s.kind,
                       .path = s.path,
                       .name = s.name.empty() ? s.path : s.name,
                       .weight = s.weight});
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

data::DatasetOptions validation_options(const Config& config, const ValidationSource& source) {
  data::DatasetOptions options = dataset_options(config);
  options.kind = source.kind, options.path = source.path;
  options.sources.clear(), options.shuffle = false;
  return options;
}

}  // namespace moesh::config
