#include "moesh/verify/golden.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "moesh/base/error.h"
#include "moesh/base/label.h"
#include "moesh/checkpoint/load.h"
#include "moesh/config/options.h"
#include "moesh/data/dataset.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/train/checkpointer.h"

namespace moesh::verify {

using namespace train;
namespace {

constexpr const char* kFolder = "model.folder";
constexpr const char* kInitialLoad = "checkpoint.initial_load";

at::Tensor read_tensor(const checkpoint::TensorFolder& from, const std::string& name) {
  const auto found = from.tensors().find(name);
  MOESH_CHECK(found != from.tensors().end(), ErrorKind::data, "'", from.path().string(),
              "' has no tensor '", name, "'; record it with tools/record_golden.py");
  const auto* file = found->second.file;
  const auto* info = found->second.info;
  const at::Tensor t =
      at::empty(info->shape, at::TensorOptions(checkpoint::torch_dtype(info->dtype, name)));
  file->file().read(file->file().header().data_start + info->begin,
                    {static_cast<std::byte*>(t.data_ptr()), t.nbytes()});
  return t;
}

// checkpoint.initial_load, or else model.folder, which becomes it. The last of the settings
// decides, as in a merge.
std::filesystem::path take_checkpoint(config::Settings& settings,
                                      const std::filesystem::path& file) {
  std::string initial, folder;
  for (const auto& s : settings)
    if (s.name == kInitialLoad || s.name == kFolder)
      (s.name == kFolder ? folder : initial) = std::get<std::string>(converted(s, std::string()));
  MOESH_CHECK(!folder.empty() || !initial.empty(), ErrorKind::config, "--golden ", file.string(),
              " needs the checkpoint for which it was recorded: add --model hf:FOLDER");
  MOESH_CHECK(folder.empty() || initial.empty() || folder == initial, ErrorKind::config,
              "--golden ", file.string(),
              " was recorded for one checkpoint, and there are two: ", kFolder, " is '", folder,
              "' and ", kInitialLoad, " is '", initial, "'; leave out one of them");
  std::erase_if(settings, [](const auto& s) { return s.name == kFolder; });
  if (!initial.empty()) return initial;
  settings.push_back({kInitialLoad, folder, {"--model hf:" + folder}});
  return folder;
}

// A setting that asks for another value than the checkpoint or the file has: there is nothing to
// compare such a run with.
[[noreturn]] void refuse(const config::Setting& s, const std::string& has) {
  const auto* text = std::get_if<std::string>(&s.value);
  throw Error(
      ErrorKind::config,
      detail::concat(s.name, " is ", text ? *text : formats::to_toml(s.value), " (", s.origin.text,
                     "), and ", has, ", for which the golden file was recorded; leave it out"));
}

// The settings of the model must fit the checkpoint.
void check_model_settings(const config::Settings& settings, const config::RequestedModel& given) {
  using config::Setting;
  const Config config = config::merged({}, given);
  const auto text_of = [](const Setting& s) {
    return std::get<std::string>(converted(s, std::string()));
  };
  for (const Setting& s : settings) {
    if (s.name == "model.name" && text_of(s) != config.model.name)
      refuse(s, given.origin + " is of " + config.model.name);
    if (s.name == "model.size") {
      const Config named = config::merged(
          {{"model.name", config.model.name, s.origin}, {"model.size", text_of(s), s.origin}});
      for (const auto& [key, value] : model_values(named)) {
        const auto is_set = [&key](const Setting& other) { return other.name == key; };
        if (model_value(config, key) != value &&
            std::none_of(settings.begin(), settings.end(), is_set))
          refuse(s, detail::concat(given.origin, " has ", key, " = ",
                                   formats::to_toml(*model_value(config, key)), ", not ",
                                   formats::to_toml(value)));
      }
    }
    if (config::find_option(s.name)) continue;
    const auto value = model_value(config, s.name);  // without a value, the merge says so
    if (value && converted(s, *value) != *value)
      refuse(s, detail::concat(given.origin, " has ", formats::to_toml(*value)));
  }
}

// The file has one micro-batch, its loss is only cross-entropy, and routers chose the experts.
Config golden_config(config::Settings settings, const config::RequestedModel& model,
                     const std::filesystem::path& file, const at::Tensor& input_ids_BL) {
  check_model_settings(settings, model);
  const auto num_sequences = input_ids_BL.size(0), length = input_ids_BL.size(1);
  const config::Origin origin{file.string()};
  std::erase_if(settings,
                [](const auto& s) { return s.name == "model.name" || s.name == "model.size"; });
  config::Settings of_file{{"data.sequence_length", length, origin},
                           {"training.gradient_accumulation_steps", std::int64_t{1}, origin}};
  for (const char* weight : {"moe.balance_loss_weight", "moe.z_loss_weight"})
    of_file.push_back({weight, 0.0, origin});
  of_file.push_back({"moe.replay", std::string(), origin});
  const auto num_dp = sample_order(merged(settings, model)).num_dp;
  MOESH_CHECK(num_sequences % num_dp == 0, ErrorKind::config, "the golden file has ", num_sequences,
              " sequences, which do not divide over dp_replicate * dp_shard = ", num_dp,
              " ranks; choose another mesh, or record more sequences");
  of_file.push_back({"data.batch_size", num_sequences / num_dp, origin});
  for (const config::Setting& fixed : of_file)
    for (const config::Setting& s : settings)
      if (s.name == fixed.name && converted(s, fixed.value) != fixed.value)
        refuse(s, detail::concat(file.string(), " has ", formats::to_toml(fixed.value)));
  for (const config::Setting& s : settings)
    if (s.name == "training.global_batch_size")
      if (const auto global = std::get<std::int64_t>(converted(s, std::int64_t{0}));
          global != 0 && global != num_sequences)  // 0: not set
        refuse(s, detail::concat(file.string(), " has ", num_sequences, " sequences"));
  settings.insert(settings.end(), of_file.begin(), of_file.end());
  return merged(settings, model);
}

using NamedList = std::vector<std::pair<std::string, at::Tensor>>;

// Gradients of the weights; with LoRA, of what it adds.
void read_gradients(const checkpoint::TensorFolder& source, const std::filesystem::path& folder,
                    const Config& config, at::ScalarType dtype, NamedList& to) {
  const std::set<std::string> others{"input_ids", "labels", "document_starts", "logits", "loss"};
  // The gradients lie as the weights do; an expert bias has none.
  const models::AnyConfig& model = config.model.architecture;
  const auto names = models::on_disk(model);
  const models::Lora added = lora(config);
  auto table =
      added.any()
          ? models::adapter_table(model, added)
          : names.table(checkpoint::find_layout(checkpoint::TensorFolder::weights(folder), names));
  std::erase_if(table.tensors,
                [](const auto& t) { return t.name.ends_with(".e_score_correction_bias"); });
  for (auto& t : table.tensors) t.name = "grad." + t.name;
  table.ignored = [&](std::string_view name) { return others.contains(std::string(name)); };
  checkpoint::check_names(source, table);
  std::vector<checkpoint::TensorPart> parts;
  const OneRankScope scope;
  const auto shapes = models::make_model(model, {.device = at::kMeta, .lora = added.of(model)});
  shapes->each_param([&](Stored& w, bool) {
    if (added.any() && !models::is_of_lora(w.spec.name)) return;
    const auto& shape = w.spec.shape;
    parts.push_back({.name = w.spec.name,
                     .shape = shape,
                     .region = {std::vector<std::int64_t>(shape.size(), 0), shape},
                     .owned = false,
                     .value = at::empty(shape, dtype)});
  });
  checkpoint::Loader(source, table).load(parts);
  for (const auto& p : parts) to.emplace_back("d(" + p.name + ")", p.value);
}

// One forward and backward of the file's batch on the mesh of a configuration: `report` gets what
// this rank has of each tensor.
void run_golden(const Golden& golden, const Config& config, comm::Group& world,
                std::unique_ptr<RoutingRecord>* record, RoutingRecord* replay,
                const std::function<void(const RankTensor&)>& report,
                const Nearby* nearby = nullptr) {
  const std::int64_t batch = config.data.batch_size,
                     vocab = models::facts(config.model.architecture).vocab_size;
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  load_initial_weights(config, *model);
  if (nearby) nearby->move_weights(*model);
  if (record)
    *record = std::make_unique<RoutingRecord>(model->num_moe_layers(), golden.input_ids_BL.numel(),
                                              router_config(config).top_k);
  const auto of_dp = [&](const at::Tensor& t) {
    return t.narrow(0, mesh.coordinate(dp) * batch, batch);
  };
  StepOptions options = step_options(config);
  VerifyProbe probe;
  probe.record = record ? record->get() : nullptr;
  probe.replay_from(replay);
  options.forward.probe = &probe;
  models::MicroBatch batch_of_dp{.input_ids_BL = of_dp(golden.input_ids_BL),
                                 .labels_BL = of_dp(golden.labels_BL)};
  if (golden.document_starts_BL.defined())
    batch_of_dp.documents = {of_dp(golden.document_starts_BL), golden.input_ids_BL.numel()};
  for (at::Tensor* t : batch_of_dp.from_data()) *t = t->to(device(config));
  const Gradients g = accumulate_gradients(*model, {batch_of_dp}, options);
  const nn::Tokens tokens(mesh, batch, config.data.sequence_length,
                          options.forward.sequence_parallel, options.forward.sequence_cut);
  const Pieces words{vocab, mesh.size(tp)};
  report({"loss", at::full({}, g.loss, at::kDouble), [](const at::Tensor& t) { return t; }});
  if (!probe.logits_BLV.empty())
    report({"logits", probe.logits_BLV.front().cpu(),
            [&](const at::Tensor& t) {
              return tokens.my_span(of_dp(t)).narrow(2, words.start(mesh.coordinate(tp)),
                                                     words.length(mesh.coordinate(tp)));
            },
            false, TokenOrigin{mesh.coordinate(dp) * batch, tokens.span_ranges()}});
  model->each_param([&](Stored& w, bool) {
    if (!w.spec.trained) return;
    RankTensor gradient{"d(" + w.spec.name + ")", raw::gather(w, raw::gradient(w)).cpu(),
                        [region = w.compute](const at::Tensor& t) { return slice(t, region); }};
    gradient.by_expert = contains(w.cutting, ep);
    report(gradient);
  });
}

// Where near ties go in float32, and what rounding does in the dtype of the configuration.
struct Rounding {
  std::unique_ptr<RoutingRecord> routing;
  NamedTensors run;

  explicit Rounding(const Golden& golden) {
    const auto world = comm::solo_group();
    const config::Origin origin{"one rank"};
    const Config narrow =
        changed(one_rank(golden.config),
                {{"data.batch_size", golden.input_ids_BL.size(0), origin},
                 {"training.gradient_accumulation_steps", std::int64_t{1}, origin}});
    const Config wide = changed(narrow, {{"training.dtype", std::string("float32"), origin}});
    const auto keep = [](NamedTensors& to) {
      return [&to](const RankTensor& t) { to.tensors.emplace_back(t.name, t.value.clone()); };
    };
    NamedTensors in_float32;
    run_golden(golden, wide, *world, &routing, nullptr, keep(in_float32));
    run_golden(golden, narrow, *world, nullptr, routing.get(), keep(run));
    // A factor is one number, which three runs may have alike by chance.
    for (std::uint64_t i = 0; i < kNumNearbyInDoubt; ++i) {
      const Nearby nearby(run, scalar_type(narrow), i);
      NamedTensors other;
      run_golden(golden, narrow, *world, nullptr, routing.get(), keep(other), &nearby);
      note_nearby(run, other);
      for (const auto& [name, value] : run.tensors)
        if (is_bounded(name)) run.off[name].push_back((other[name] - value).to(at::kDouble));
    }
    set_noise(run, scalar_type(narrow));
    routing->forget_flips();
  }
};

}  // namespace

Golden read_golden(const std::filesystem::path& file, const config::Settings& given) {
  config::Settings settings = given;
  const auto folder = take_checkpoint(settings, file);
  const std::string described = (folder / "config.json").string();
  auto model = models::config_of(checkpoint::read_config(folder), described);
  // transformers, which records such files, does not compute multi-token prediction.
  std::visit(
      [](auto& c) {
        if constexpr (requires { c.num_mtp_layers; }) c.num_mtp_layers = 0;
      },
      model);
  const auto source = checkpoint::TensorFolder::of_file(file);
  Golden golden;
  golden.input_ids_BL = read_tensor(source, "input_ids"),
  golden.labels_BL = read_tensor(source, "labels");
  MOESH_CHECK(
      golden.input_ids_BL.dim() == 2 && golden.labels_BL.sizes() == golden.input_ids_BL.sizes(),
      ErrorKind::data, "'", file.string(), "': input_ids ", golden.input_ids_BL.sizes(),
      " and labels ", golden.labels_BL.sizes(), "; both are [batch, length]");
  MOESH_CHECK(golden.input_ids_BL.numel() > 0 &&
                  at::isIntegralType(golden.input_ids_BL.scalar_type(), false) &&
                  golden.labels_BL.scalar_type() == golden.input_ids_BL.scalar_type(),
              ErrorKind::data, "'", file.string(), "': input_ids ", golden.input_ids_BL.sizes(),
              " of ", golden.input_ids_BL.scalar_type(), " and labels of ",
              golden.labels_BL.scalar_type(),
              "; both are whole numbers, and there is at least one");
  const auto vocab = models::facts(model).vocab_size;
  for (const auto* ids : {&golden.input_ids_BL, &golden.labels_BL}) {
    const auto least = ids->min().item<std::int64_t>(), most = ids->max().item<std::int64_t>();
    const bool is_label = ids == &golden.labels_BL;
    MOESH_CHECK((least >= 0 || (is_label && least == kIgnoredLabel)) && most < vocab,
                ErrorKind::data, "'", file.string(), "': ", is_label ? "labels" : "input_ids",
                " from ", least, " to ", most, ", and the model of '", folder.string(), "' has ",
                vocab, " tokens");
  }
  if (source.tensors().contains("document_starts")) {
    golden.document_starts_BL = read_tensor(source, "document_starts");
    const auto& starts = golden.document_starts_BL;
    const auto fits = [&] {
      const at::Tensor position = at::arange(golden.input_ids_BL.size(1));
      return starts.ge(0).logical_and(starts.le(position)).all().item<bool>();
    };
    MOESH_CHECK(starts.sizes() == golden.input_ids_BL.sizes() &&
                    starts.scalar_type() == at::kLong && fits(),
                ErrorKind::data, "'", file.string(), "': document_starts ", starts.sizes(), " of ",
                starts.scalar_type(), "; they are Long ", golden.input_ids_BL.sizes(),
                ", from 0 to the position of each token");
  }
  golden.config =
      golden_config(settings, {model, described, folder.string()}, file, golden.input_ids_BL);
  golden.tensors = {{"loss", read_tensor(source, "loss").to(at::kDouble)},
                    {"logits", read_tensor(source, "logits")}};
  const auto dtype = golden.tensors.back().second.scalar_type();
  golden.tolerance =
      dtype == at::kDouble && golden.config.training.dtype == "float64" ? 1e-9 : 1e-4;
  read_gradients(source, folder, golden.config, dtype, golden.tensors);
  return golden;
}

VerifyReport verify_golden(const Golden& golden) {
  const Config& config = golden.config;
  const MeshShape shape = mesh_shape(config);
  VerifyReport report;
  NamedTensors expected = golden;
  std::optional<Rounding> rounding;
  if (golden.replays()) {
    rounding.emplace(golden);
    expected.noise = rounding->run.noise, expected.off = rounding->run.off;
  }
  Findings findings(shape.num_ranks(), expected, golden.tolerance);
  launch_for(report, config, [&](comm::Group& world) {
    run_golden(golden, config, world, nullptr, rounding ? rounding->routing.get() : nullptr,
               [&](const RankTensor& t) { findings.compare(t, world.rank()); });
    findings.exchange(world, device(config));
  });
  report.add(findings, shape);
  if (rounding) report.add_flips(*rounding->routing);
  report.num_vague = findings.num_vague();
  return report;
}

}  // namespace moesh::verify
