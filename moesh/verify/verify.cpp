#include "moesh/verify/verify.h"

#include <ATen/ATen.h>

#include <mutex>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/build.h"

namespace moesh::verify {

using namespace train;
namespace {

using enum Place;

// Tokens by global index: the batch is the same on every mesh. Labels are the next tokens, shifted
// before any cut; some are ignored.
models::MicroBatch make_batch(const VerifyCase& c, const Mesh& mesh, int step, int micro) {
  const std::int64_t num_sequences = c.batch * mesh.size(dp), length = c.sequence + 1;
  const auto vocab = static_cast<std::uint64_t>(models::facts(c.model).vocab_size);
  const Random random(c.options.seed, "verify tokens"), dropped(c.options.seed, "verify labels");
  at::Tensor ids = at::empty({c.batch, length}, at::kLong),
             labels = at::empty({c.batch, c.sequence}, at::kLong);
  auto id = ids.accessor<std::int64_t, 2>(), label = labels.accessor<std::int64_t, 2>();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t sample =
        (static_cast<std::int64_t>(step) * c.accumulation + micro) * num_sequences +
        mesh.coordinate(dp) * c.batch + b;
    for (std::int64_t i = 0; i < length; ++i)
      id[b][i] = static_cast<std::int64_t>(
          random.below(static_cast<std::uint64_t>(sample * length + i), vocab));
    for (std::int64_t i = 0; i < c.sequence; ++i) {
      const bool is_ignored =
          dropped.uniform(static_cast<std::uint64_t>(sample * c.sequence + i)) < c.ignored;
      label[b][i] = is_ignored ? -100 : id[b][i + 1];
    }
  }
  const auto device = c.options.device;
  return {.input_ids_BL = ids.narrow(1, 0, c.sequence).contiguous().to(device),
          .labels_BL = labels.to(device)};
}

using Routing = std::vector<std::vector<std::unique_ptr<nn::RoutingRecord>>>;

// A record for each step and MoE layer; all micro-batches of a step stand one behind the other.
Routing make_records(const VerifyCase& c, models::Model& model) {
  Routing routing;
  for (int step = 0; step < c.steps; ++step) {
    routing.emplace_back();
    for (auto* router : model.routers())
      routing.back().push_back(std::make_unique<nn::RoutingRecord>(
          c.batch * c.sequence * c.accumulation, router->config().top_k));
  }
  return routing;
}

// Runs the steps; `report` gets what this rank has of each tensor. The one rank of a reference
// fills `record`.
template <class Report>
void run_steps(const VerifyCase& c, const Mesh& mesh, Routing* record, Routing* replay,
               Report report) {
  const auto model = models::make_model(c.model, c.options);
  if (record) *record = make_records(c, *model);
  const auto optimizer = make_optimizer(*model, c.optimizer);
  const nn::Tokens tokens(mesh, c.batch, c.sequence, c.sequence_parallel);
  const auto whole_tensor = [](const at::Tensor& t) { return t; };
  const auto of_dp = [&](const at::Tensor& t) {
    return t.narrow(0, mesh.coordinate(dp) * c.batch, c.batch);
  };
  const std::int64_t first_sequence = mesh.coordinate(dp) * c.batch;

  StepOptions options{.max_norm = c.max_norm, .bias_coeff = c.bias_coeff};
  options.forward = {.sequence_parallel = c.sequence_parallel,
                     .recompute = c.recompute,
                     .auxiliary = c.auxiliary,
                     .reshard = c.reshard,
                     .capture = true};
  for (int step = 0; step < c.steps; ++step) {
    std::vector<models::MicroBatch> batches;
    for (int micro = 0; micro < c.accumulation; ++micro)
      batches.push_back(make_batch(c, mesh, step, micro));
    options.forward.record = record ? &(*record)[static_cast<size_t>(step)] : nullptr;
    options.forward.replay = replay ? &(*replay)[static_cast<size_t>(step)] : nullptr;
    const Gradients g = accumulate_gradients(*model, batches, options);
    const std::string at = "step " + std::to_string(step) + " ";
    for (size_t i = 0; i < g.counts_E.size(); ++i)
      report(
          Part{at + "counts of MoE layer " + std::to_string(i), g.counts_E[i], whole_tensor, true});
    report(Part{at + "loss", at::full({}, g.loss, at::kDouble), whole_tensor});
    report(Part{at + "total loss", at::full({}, g.total_loss, at::kDouble), whole_tensor});
    if (step == 0) {
      const Pieces vocab{models::facts(c.model).vocab_size, mesh.size(tp)};
      report(Part{"logits", g.last.logits_BLV,
                  [&](const at::Tensor& t) {
                    return tokens.my_block(of_dp(t)).narrow(2, vocab.start(mesh.coordinate(tp)),
                                                            vocab.length(mesh.coordinate(tp)));
                  },
                  false, TokenOrigin{first_sequence, tokens.block_start()}});
      report(Part{"d(input)", g.last.input.grad(),
                  [&](const at::Tensor& t) { return tokens.mine(of_dp(t)); }, false,
                  TokenOrigin{first_sequence, tokens.mine_start()}});
      model->each_param([&](Stored& w, bool) {
        report(Part{"d(" + w.spec.name + ")", raw::gather(w, w.value.grad()),
                    [region = w.compute](const at::Tensor& t) { return slice(t, region); }});
      });
    }
    const Update update = apply_gradients(*model, *optimizer, g, c.lr, options);
    report(Part{at + "gradient norm", at::full({}, update.grad_norm, at::kDouble), whole_tensor});
  }
  int layer = 0;
  for (auto* router : model->routers())
    report(Part{"expert bias of MoE layer " + std::to_string(layer++), router->expert_bias(),
                whole_tensor});
  model->each_param([&](Stored& w, bool) {
    report(Part{w.spec.name, raw::gather(w, w.value.detach()),
                [region = w.compute](const at::Tensor& t) { return slice(t, region); }});
  });
}

}  // namespace

double VerifyCase::tolerance() const {
  return options.dtype == at::kDouble ? 1e-9 : options.dtype == at::kFloat ? 1e-4 : 2e-2;
}

std::string VerifyReport::describe(const MeshShape& mesh) const {
  if (holds()) return mesh.describe() + ": holds";
  std::ostringstream os;
  os << mesh.describe() << ": ";
  if (!error.empty()) os << "threw: " << error;
  size_t shown = 0;
  for (const auto& m : mismatches) {
    if (++shown > 6) {
      os << "\n  and " << mismatches.size() - 6 << " more";
      break;
    }
    os << "\n  " << m.describe(mesh);
  }
  return os.str();
}

VerifyReference run_reference(const VerifyCase& c, int num_dp) {
  VerifyCase whole = c;
  whole.batch = c.batch * num_dp;
  whole.options.dispatcher = nn::Dispatcher::local;
  whole.recompute = false;
  VerifyReference result;
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto keep = [](auto& tensors) {
    return [&tensors](const Part& part) {
      tensors.emplace_back(part.name, part.value.detach().clone());
    };
  };
  run_steps(whole, mesh, &result.routing, nullptr, keep(result.tensors));
  if (c.options.dtype == at::kBFloat16) {  // what its rounding alone does
    whole.options.dtype = at::kFloat;
    run_steps(whole, mesh, nullptr, &result.routing, keep(result.wide));
  }
  return result;
}

VerifyReport verify(const VerifyCase& c, const VerifyReference& reference, const MeshShape& shape,
                    const comm::LaunchOptions& options, NamedTensors* values) {
  MOESH_CHECK(
      !values || comm::num_launched_processes() == 0, ErrorKind::config,
      "the tensors of a mesh can be put together in one process only; run without mpirun or srun");
  if (values)
    for (const auto& [name, value] : reference.tensors)
      values->tensors.emplace_back(name, at::zeros_like(value));
  std::mutex put_together;
  VerifyReport report;
  Findings findings(shape.num_ranks(), reference, c.tolerance());
  auto& routing = const_cast<VerifyReference&>(reference).routing;
  for (const auto& step : routing)
    for (const auto& r : step) r->num_flipped = 0, r->largest_margin = 0;
  try {
    comm::launch(
        shape.num_ranks(),
        [&](comm::Group& world) {
          if (world.rank() == 0) report.is_first = true;
          const Mesh mesh(world, shape);
          const MeshScope scope(mesh);
          run_steps(c, mesh, nullptr, c.replays() ? &routing : nullptr, [&](const Part& part) {
            findings.compare(part, world.rank());
            if (!values) return;
            const std::lock_guard lock(put_together);
            part.place((*values)[part.name]).copy_(part.value.detach());
          });
          findings.share(world, c.options.device);
        },
        options);
  } catch (const std::exception& e) {
    report.error = e.what();
  }
  if (report.error.empty()) report.mismatches = findings.mismatches(shape.validated());
  report.worst_ratio = findings.worst_ratio();
  if (c.replays())
    for (const auto& step : routing)
      for (const auto& r : step) {
        report.num_flipped += r->num_flipped;
        report.largest_margin = std::max<double>(report.largest_margin, r->largest_margin);
      }
  return report;
}

VerifyCase fitted(VerifyCase c, const MeshShape& shape) {
  const auto fit = [](std::int64_t value, std::int64_t divisor) {
    return value % divisor == 0 ? value : divisor * std::max<std::int64_t>(1, value / divisor);
  };
  std::visit(
      [&](auto& m) {
        m.num_heads = fit(m.num_heads, shape.tp);
        if constexpr (requires { m.num_kv_heads; }) {
          m.num_kv_heads = fit(m.num_kv_heads, shape.tp);
          m.num_heads = fit(m.num_heads, m.num_kv_heads);
        }
        if constexpr (requires { m.num_groups; }) {
          m.num_experts = fit(m.num_experts, shape.ep);
          if (m.num_experts % m.num_groups != 0 || m.num_experts / m.num_groups < 2)
            m.num_groups = m.top_groups = 1;
          m.top_k = std::min(m.top_k, m.num_experts / m.num_groups * m.top_groups);
        } else {
          m.num_experts = fit(m.num_experts, shape.ep);
          m.top_k = std::min(m.top_k, m.num_experts);
        }
      },
      c.model);
  return c;
}

}  // namespace moesh::verify
