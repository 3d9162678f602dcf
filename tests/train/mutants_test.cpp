// Checks that mistakes in what a run reads must not pass: documents against each of them by itself,
// the samples of a step and of a resumed run, and what validation leaves behind.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <map>
#include <mutex>

#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/data/dataset.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/validation.h"
#include "moesh/verify/verify.h"
#include "tests/checkpoint/support.h"
#include "tests/mutants/check.h"
#include "tests/support.h"
#include "tests/train/float8_counts_check.h"
#include "tests/train/random_routing.h"
#include "tests/train/reference_check.h"

namespace moesh {
namespace {

using mutants::Check;
using mutants::Settings;

constexpr std::int64_t kLength = 8;

models::MicroBatch batch_of(const at::Tensor& ids) {
  return {.input_ids_BL = ids.narrow(1, 0, ids.size(1) - 1),
          .labels_BL = ids.narrow(1, 1, ids.size(1) - 1)};
}

// The sum of a model's losses on a batch, on every rank of a mesh.
double loss_of(const MeshShape& shape, const std::string& name, const models::MicroBatch& batch) {
  double loss = 0;
  comm::launch(shape.num_ranks(), [&](comm::Group& world) {
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    const at::NoGradGuard no_grad;
    const auto model = models::make_model(models::built_in(name, "tiny"), {.dtype = at::kDouble});
    const auto result = model->forward(batch, {.pass = nn::Pass::evaluation});
    const double sum = whole(all_reduce<kTokenAxes>(result.cross_entropy)).item<double>();
    if (world.rank() == 0) loss = sum;
  });
  return loss;
}

// model.balance_loss is the coefficient of the library's one loss, over the tokens of all layers
// together, which is top_k where experts are balanced. Here each layer has a loss, which is 1 then:
// all of them together must weigh as much.
const mutants::Provide balance("balance", [](Settings& settings) -> Check {
  const int layers = static_cast<int>(settings.take("layers"));
  return [layers]() -> std::string {
    const auto config = config::load_config({"--model=mixtral:tiny", "--model.top_k=2",
                                             "--model.num_layers=" + std::to_string(layers),
                                             "--model.balance_loss=0.3"});
    const double of_all = config.moe.balance_loss_weight * layers, wanted = 0.3 * 2;
    if (std::abs(of_all - wanted) < 1e-12) return "";
    return detail::concat("the balance loss weighs ", of_all, " in all layers, and not ", wanted);
  };
});

// A sequence of two documents, of which only one has labels, against only that one on one rank.
const mutants::Provide documents("documents", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  const std::string model = settings.take("llama4") != 0       ? "llama4"
                            : settings.take("qwen3_next") != 0 ? "qwen3_next"
                                                               : "qwen3_moe";
  return [shape, model]() -> std::string {
    at::manual_seed(3);
    const at::Tensor ids = at::randint(90, {1, kLength + 1}, at::kLong);
    for (const std::int64_t border : {3, 5})
      for (const bool is_second : {false, true}) {
        const std::int64_t begin = is_second ? border : 0,
                           length = is_second ? kLength - border : border;
        models::MicroBatch packed = batch_of(ids);
        packed.documents = {at::zeros({1, kLength}, at::kLong), 2};
        packed.documents.starts_BL.narrow(1, border, kLength - border).fill_(border);
        packed.labels_BL = at::full({1, kLength}, kIgnoredLabel, at::kLong);
        packed.labels_BL.narrow(1, begin, length).copy_(ids.narrow(1, begin + 1, length));
        const double alone = loss_of({}, model, batch_of(ids.narrow(1, begin, length + 1))),
                     among = loss_of(shape, model, packed);
        if (std::abs(alone - among) > 1e-9 * alone)
          return detail::concat("the loss of document ", is_second ? 1 : 0, " is ", among,
                                " beside another, and ", alone, " alone");
      }
    return "";
  };
});

// What float8 rounds to 0 and to its largest code, against one rank.
const mutants::Provide float8_counts("float8_counts", [](Settings& settings) -> Check {
  const MeshShape mesh = settings.take_mesh();
  std::vector<std::string> way{detail::concat("--mesh=dp_shard=", mesh.dp_shard, ",tp=", mesh.tp)};
  if (settings.take("recompute") != 0) way.emplace_back("--activation_checkpoint.mode=full");
  return [way, one = float8_counts_check::counts({})] {
    return float8_counts_check::complaint(way, one);
  };
});

// Its samples are numbered: the first token says which one it is.
class Numbered : public data::Dataset {
 public:
  explicit Numbered(std::int64_t first) : first_(first) {}
  data::Sample get(std::int64_t index) const override {
    const std::lock_guard lock(mutex_);
    ++seen_[index];
    return {.tokens =
                std::vector<data::TokenId>(kLength + 1, static_cast<data::TokenId>(first_ + index)),
            .documents = std::vector<std::int64_t>(kLength + 1, 0)};
  }
  std::int64_t sequence_length() const override { return kLength; }
  std::int64_t vocab_size() const override { return 90; }
  std::string describe() const override { return "numbers"; }
  std::map<std::int64_t, int> take_seen() const {
    const std::lock_guard lock(mutex_);
    return std::exchange(seen_, {});
  }

 private:
  std::int64_t first_;
  mutable std::mutex mutex_;
  mutable std::map<std::int64_t, int> seen_;
};

std::unique_ptr<data::Mixture> make_mixture() {
  std::vector<data::MixturePart> parts;
  parts.push_back({"a", 2, std::make_unique<Numbered>(0)});
  parts.push_back({"b", 1, std::make_unique<Numbered>(40)});
  return std::make_unique<data::Mixture>(std::move(parts));
}

// The samples of the first two steps, in the order of ranks and micro-batches, are those of the
// mixture in its order.
const mutants::Provide mixture("mixture", [](Settings& settings) -> Check {
  const MeshShape shape = settings.take_mesh();
  return [shape]() -> std::string {
    config::Settings asked = config::mesh_settings(shape, "test");
    asked.push_back({"data.batch_size", std::int64_t{2}, {"test"}});
    asked.push_back({"data.sequence_length", kLength, {"test"}});
    const auto config = config::merged(asked);
    const auto dataset = make_mixture();
    const auto order = sample_order(config);
    std::map<std::int64_t, std::int64_t> found;  // token of each sample
    std::mutex mutex;
    comm::launch(shape.num_ranks(), [&](comm::Group& world) {
      const Mesh mesh(world, shape);
      for (std::int64_t step = 0; step < 2; ++step) {
        const auto batches =
            train::host_batches(config, *dataset, mesh)(step * order.num_per_step());
        const std::lock_guard lock(mutex);
        for (std::int64_t b = 0; b < order.batch; ++b)
          found[order.first(step, 0, mesh.coordinate(dp)) + b] =
              batches[0].input_ids_BL[b][0].item<std::int64_t>();
      }
    });
    for (const auto& [index, token] : found)
      if (const auto expected = dataset->get(index).tokens[0]; token != expected)
        return detail::concat("sample ", index, " is ", token, " and not ", expected);
    return "";
  };
});

const mutants::Provide validation("validation", [](Settings&) -> Check {
  return []() -> std::string {
    std::string lines;
    for (int i = 0; i < 50; ++i) lines += "a line of text\n";
    const TemporaryFile file("held_out.txt", lines);
    const auto config = config::load_config({"--model.vocab_size=257", "--data.sequence_length=8",
                                             "--validation.source.0.path=" + file.path()});
    const auto world = comm::solo_group();
    const Mesh mesh(*world, {});
    const MeshScope scope(mesh);
    const auto model = train::make_model(config);
    train::validate_model(*model, config, mesh, train::open_validation(config));
    for (auto* router : model->routers())
      if (local(router->pending_counts()).any().item<bool>())
        return "the experts that validation chose are counted";
    return "";
  };
});

// A whole run against what PyTorch computed of it.
const mutants::Provide reference_run("reference", [](Settings& settings) -> Check {
  std::string run;
  for (const std::string& name : reference::run_names())
    if (settings.take(name) != 0) run = name;
  return [run] { return reference::run_complaint(run); };
});

Args routing_args(Settings& settings, std::string& mesh) {
  mesh = settings.take_mesh().describe();
  Args args{"--dtype=float64", "--training.global_batch_size=8"};
  args.push_back("--data.batch_size=" +
                 std::to_string(static_cast<int>(settings.take("batch", 2))));
  if (settings.take("full") != 0) args.push_back("--activation_checkpoint.mode=full");
  return args;
}

// A step whose experts a file names, on a mesh against one rank.
const mutants::Provide replay("replay", [](Settings& settings) -> Check {
  std::string mesh;
  Args args = routing_args(settings, mesh);
  args.insert(args.end(), {"--mesh=" + mesh, "--data.sequence_length=7"});
  const auto folder = std::make_shared<TemporaryFolder>();
  write_routing(folder->path(), config::load_config(args), 1);
  args.push_back("--moe.replay=" + folder->path().string());
  const verify::VerifyCase c{config::load_config(args, verify::verify_defaults(1)), 1};
  const auto reference = std::make_shared<verify::VerifyReference>(verify::run_reference(c));
  return [=, kept = folder]() -> std::string {
    const auto report = verify::verify(c, *reference);
    if (!report.error.empty()) return "threw: " + report.error;
    return report.holds() ? "" : report.mismatches[0].describe(mesh_shape(c.config));
  };
});

// The files that a run on a mesh records are those of one rank.
const mutants::Provide recorded("recorded", [](Settings& settings) -> Check {
  std::string mesh;
  const Args args = routing_args(settings, mesh);
  const auto routing = [args](const std::string& on) {
    const TemporaryFolder folder;
    Args all = args;
    all.insert(all.end(), {"--steps=1", "--moe.record=" + folder.path().string()});
    run(folder.path() / "c", on, all);
    return bytes_of(folder.path() / train::routing_name(1));
  };
  const std::string wanted = routing("tp=1");
  return [=]() -> std::string {
    return routing(mesh) == wanted ? "" : "the experts of some tokens are others";
  };
});

// Three steps on two data-parallel ranks, with two sequences each, then three on one.
const mutants::Provide resume_elsewhere("resume_elsewhere", [](Settings&) -> Check {
  return []() -> std::string {
    const TemporaryFolder folder;
    const Numbered data(0);
    train::train(run_config(folder.path() / "c", "dp_shard=2", {"--steps=3"}), data);
    auto seen = data.take_seen();
    train::train(run_config(folder.path() / "c", "tp=1", {"--steps=6"}), data);
    for (const auto& [index, count] : data.take_seen()) seen[index] += count;
    for (std::int64_t i = 0; i < 18; ++i)
      if (seen[i] != 1)
        return detail::concat("sample ", i, seen[i] == 0 ? " is not seen" : " is seen twice");
    return "";
  };
});

}  // namespace
}  // namespace moesh
