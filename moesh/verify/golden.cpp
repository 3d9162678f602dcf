#include "moesh/verify/golden.h"

#include <ATen/ATen.h>

#include <set>

#include "moesh/base/error.h"
#include "moesh/checkpoint/load.h"
#include "moesh/models/disk.h"
#include "moesh/spmd/one_rank.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/checkpointer.h"

namespace moesh::verify {

using namespace train;
namespace {

at::Tensor read_tensor(const checkpoint::TensorFolder& from, const std::string& name) {
  const auto found = from.tensors().find(name);
  MOESH_CHECK(found != from.tensors().end(), ErrorKind::data, "'", from.path().string(),
              "' has no tensor '", name, "'; record it with tools/record_golden.py");
  const auto& [file, info] = found->second;
  const at::Tensor t =
      at::empty(info->shape, at::TensorOptions(checkpoint::torch_dtype(info->dtype, name)));
  file->file().read(file->file().header().data_start + info->begin,
                    {static_cast<std::byte*>(t.data_ptr()), t.nbytes()});
  return t;
}

}  // namespace

Golden read_golden(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const models::AnyConfig& config) {
  const auto source = checkpoint::TensorFolder::of_file(file);
  const std::set<std::string> others{"input_ids", "labels", "logits", "loss"};
  Golden golden;
  golden.input_ids_BL = read_tensor(source, "input_ids"),
  golden.labels_BL = read_tensor(source, "labels");
  MOESH_CHECK(
      golden.input_ids_BL.dim() == 2 && golden.labels_BL.sizes() == golden.input_ids_BL.sizes(),
      ErrorKind::data, "'", file.string(), "': input_ids ", golden.input_ids_BL.sizes(),
      " and labels ", golden.labels_BL.sizes(), "; both are [batch, length]");
  golden.tensors = {{"loss", read_tensor(source, "loss").to(at::kDouble)},
                    {"logits", read_tensor(source, "logits")}};

  // The gradients lie as the weights do; an expert bias has none.
  const auto model = models::on_disk(config);
  auto table =
      model.table(checkpoint::find_layout(checkpoint::TensorFolder::weights(folder), model));
  std::erase_if(table.tensors,
                [](const auto& t) { return t.name.ends_with(".e_score_correction_bias"); });
  for (auto& t : table.tensors) t.name = "grad." + t.name;
  table.ignored = [&](std::string_view name) { return others.contains(std::string(name)); };
  checkpoint::check_names(source, table);
  std::vector<checkpoint::Part> parts;
  const OneRankScope scope;
  models::make_model(config, {.device = at::kMeta})->each_param([&](Stored& w, bool) {
    const auto& shape = w.spec.shape;
    parts.push_back({.name = w.spec.name,
                     .shape = shape,
                     .region = {std::vector<std::int64_t>(shape.size(), 0), shape},
                     .owned = false,
                     .value = at::empty(shape, at::kFloat)});
  });
  checkpoint::Loader(source, table).load(parts);
  for (const auto& p : parts) golden.tensors.emplace_back("d(" + p.name + ")", p.value);
  return golden;
}

VerifyReport verify_golden(const Golden& golden, const std::filesystem::path& folder,
                           const ModelSetup& setup, const Config& config) {
  const MeshShape shape = mesh_shape(config);
  const int num_dp = shape.dp_replicate * shape.dp_shard;
  const auto num_sequences = golden.input_ids_BL.size(0), length = golden.input_ids_BL.size(1);
  MOESH_CHECK(num_sequences % num_dp == 0, ErrorKind::config, "the golden file has ", num_sequences,
              " sequences, which do not divide over dp_replicate * dp_shard = ", num_dp,
              " ranks; choose another mesh, or record more sequences");
  const std::int64_t batch = num_sequences / num_dp, vocab = setup.facts().vocab_size;
  VerifyReport report;
  Findings findings(shape.num_ranks(), golden, golden_tolerance(config));
  const auto run = [&](comm::Group& world) {
    if (world.rank() == 0) report.is_first = true;
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    const auto model = make_model(setup, config);
    load_weights(folder, on_disk(setup), *model, world.rank());
    const auto of_dp = [&](const at::Tensor& t) {
      return t.narrow(0, mesh.coordinate(dp) * batch, batch);
    };
    StepOptions options;
    options.forward = {.sequence_parallel = config.parallelism.sequence_parallel,
                       .recompute = config.activation_checkpoint.mode == "full",
                       .reshard = config.parallelism.fsdp_reshard_after_forward,
                       .capture = true};
    const Gradients g =
        accumulate_gradients(*model,
                             {{.input_ids_BL = of_dp(golden.input_ids_BL).to(device(config)),
                               .labels_BL = of_dp(golden.labels_BL).to(device(config))}},
                             options);
    const auto compare = [&](const Part& part) { findings.compare(part, world.rank()); };
    const nn::Tokens tokens(mesh, batch, length, options.forward.sequence_parallel);
    const Pieces words{vocab, mesh.size(tp)};
    compare({"loss", at::full({}, g.loss, at::kDouble), [](const at::Tensor& t) { return t; }});
    compare({"logits", g.last.logits_BLV.cpu(),
             [&](const at::Tensor& t) {
               return tokens.my_block(of_dp(t)).narrow(2, words.start(mesh.coordinate(tp)),
                                                       words.length(mesh.coordinate(tp)));
             },
             false, TokenOrigin{mesh.coordinate(dp) * batch, tokens.block_start()}});
    model->each_param([&](Stored& w, bool) {
      compare({"d(" + w.spec.name + ")", raw::gather(w, w.value.grad()).cpu(),
               [region = w.compute](const at::Tensor& t) { return slice(t, region); }});
    });
    findings.share(world, device(config));
  };
  try {
    comm::launch(shape.num_ranks(), run, launch_options(config));
  } catch (const std::exception& e) {
    report.error = e.what();
  }
  if (report.error.empty()) report.mismatches = findings.mismatches(shape);
  report.worst_ratio = findings.worst_ratio();
  return report;
}

double golden_tolerance(const Config& config) {
  return scalar_type(config) == at::kBFloat16 ? 2e-2 : 1e-4;
}

}  // namespace moesh::verify
