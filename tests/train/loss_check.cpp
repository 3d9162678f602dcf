#include "tests/train/loss_check.h"

#include <cmath>
#include <sstream>

#include "moesh/base/random.h"
#include "moesh/models/registry.h"
#include "moesh/train/step.h"
#include "moesh/types/token.h"
#include "tests/spmd/device.h"

namespace moesh::losses {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 7, kMicro = 2, kVocab = 96;

at::Tensor unseen(at::IntArrayRef shape) { return at::full(shape, NAN, at::kDouble); }

// What all ranks have computed of a micro-batch, each its own rows.
struct Seen {
  std::vector<Routed> layers;
  at::Tensor logits_SLV;
};

// The router of this model chooses on its logits, so that a probe sees them.
class Recorder final : public nn::Probe {
 public:
  Recorder(const Mesh& mesh, std::vector<Seen>& seen)
      : mesh_(mesh), tokens_(mesh, kBatch, kLength, true), seen_(seen) {}

  at::Tensor on_choice(const nn::Choice& c) override {
    if (c.for_balance) return c.experts_NK;
    Routed& r = seen_[static_cast<size_t>(c.micro_batch)].layers[static_cast<size_t>(c.layer)];
    const at::Tensor rows = c.tokens.global_ids();
    r.logits_TE.index_copy_(0, rows, c.scores_NE.cpu());
    r.experts_TK.index_copy_(0, rows, c.experts_NK.cpu());
    return c.experts_NK;
  }
  bool wants_logits() const override { return true; }
  void on_logits(const at::Tensor& logits_BLV) override {
    const Pieces words{kVocab, mesh_.size(tp)};
    tokens_
        .my_span(seen_[num_forward_++].logits_SLV.narrow(0, mesh_.coordinate(dp) * kBatch, kBatch))
        .narrow(2, words.start(mesh_.coordinate(tp)), words.length(mesh_.coordinate(tp)))
        .copy_(logits_BLV.detach().cpu());
  }

 private:
  const Mesh& mesh_;
  nn::Tokens tokens_;
  std::vector<Seen>& seen_;
  size_t num_forward_ = 0;
};

// [S, L + 1] of a micro-batch.
at::Tensor token_ids(std::int64_t micro, std::int64_t sequences) {
  const Random random(7, static_cast<std::uint64_t>(micro));
  at::Tensor ids = at::empty({sequences, kLength + 1}, at::kLong);
  for (std::int64_t i = 0; i < ids.numel(); ++i)
    ids.data_ptr<std::int64_t>()[i] =
        static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(i), kVocab));
  return ids;
}

struct Term {
  const char* name;
  size_t part;  // of the auxiliary losses
  models::Auxiliary weights;
  at::Tensor (*formula)(const Routed&, const at::Tensor& valid_SL, std::int64_t num_step);
};
const Term kTerms[] = {{"balance over sequences", 0, {.balance_weight = 1}, balance_over_sequences},
                       {"balance over the micro-batch",
                        0,
                        {.balance_weight = 1, .balance_over = nn::BalanceOver::micro_batch},
                        balance_over_micro_batch},
                       {"z loss", 1, {.z_weight = 1}, z_loss}};

std::string differs(const std::string& what, double got, double expected) {
  if (std::abs(got - expected) <= 1e-10 * std::max(1.0, std::abs(expected))) return "";
  std::ostringstream os;
  os << what << ": " << got << ", and its formula gives " << expected;
  return os.str();
}

struct Run {
  std::vector<Seen> seen;
  train::Gradients gradients;  // those of the first rank: all ranks have the same numbers
};

Run run_step(const MeshShape& shape, const std::vector<at::Tensor>& ids,
             const std::vector<at::Tensor>& labels, const train::StepOptions& asked) {
  const auto config = models::built_in("gpt_oss", "tiny");
  Run run;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        const auto model =
            models::make_model(config, {.dtype = at::kDouble, .device = test_device(), .seed = 3});
        if (world.rank() == 0) {
          const auto tokens = ids[0].size(0) * kLength;
          for (size_t m = 0; m < ids.size(); ++m) {
            Seen s{.logits_SLV = unseen({ids[0].size(0), kLength, kVocab})};
            for (const auto* router : model->routers())
              s.layers.push_back(
                  {.logits_TE = unseen({tokens, router->config().num_experts}),
                   .experts_TK = at::full({tokens, router->config().top_k}, -1, at::kLong)});
            run.seen.push_back(s);
          }
        }
        world.barrier();
        Recorder recorder(mesh, run.seen);
        train::StepOptions options = asked;
        options.forward.probe = &recorder;
        std::vector<models::MicroBatch> batches;
        const auto mine = [&](const at::Tensor& t) {
          return t.narrow(0, mesh.coordinate(dp) * kBatch, kBatch).contiguous().to(test_device());
        };
        for (size_t m = 0; m < ids.size(); ++m)
          batches.push_back(
              {.input_ids_BL = mine(ids[m].narrow(1, 0, kLength)), .labels_BL = mine(labels[m])});
        const auto g = train::accumulate_gradients(*model, batches, options);
        world.barrier();
        if (world.rank() == 0) run.gradients = g;
      },
      test_options());
  for (auto& s : run.seen)
    for (auto& r : s.layers) r.probabilities_TE = r.logits_TE.softmax(1);
  return run;
}

}  // namespace

std::string step_complaint(const MeshShape& shape, Mask mask, bool sequence_parallel) {
  const std::int64_t sequences = kBatch * shape.dp_replicate * shape.dp_shard;
  const at::Tensor valid = valid_tokens(mask, sequences, kLength);
  std::vector<at::Tensor> ids, labels;
  for (std::int64_t m = 0; m < kMicro; ++m) {
    ids.push_back(token_ids(m, sequences));
    labels.push_back(ids.back().narrow(1, 1, kLength).masked_fill(valid.logical_not(), -100));
  }
  const auto num_step = std::max<std::int64_t>(1, kMicro * valid.sum().item<std::int64_t>());
  for (const Term& term : kTerms) {
    train::StepOptions options;
    options.forward.sequence_parallel = sequence_parallel;
    options.forward.auxiliary = term.weights;
    const Run run = run_step(shape, ids, labels, options);
    double entropy = 0, auxiliary = 0;
    for (size_t m = 0; m < ids.size(); ++m) {
      const Seen& s = run.seen[m];
      entropy +=
          cross_entropy(s.logits_SLV.flatten(0, 1), labels[m].flatten(), num_step).item<double>();
      for (const Routed& r : s.layers) auxiliary += term.formula(r, valid, num_step).item<double>();
    }
    std::string found = differs("cross-entropy", run.gradients.loss, entropy);
    for (size_t i = 0; i < run.gradients.counts_E.size() && found.empty(); ++i) {
      at::Tensor expected = at::zeros_like(run.gradients.counts_E[i]);
      for (const Seen& s : run.seen) expected += counts(s.layers[i], valid);
      if (!run.gradients.counts_E[i].equal(expected))
        found = "expert counts of MoE layer " + std::to_string(i);
    }
    if (found.empty())
      found = differs(term.name, run.gradients.total_loss - run.gradients.loss, auxiliary);
    for (size_t i = 0; i < run.gradients.auxiliary.size() && found.empty(); ++i)
      found = differs(detail::concat("part ", i, " of the log, for ", term.name),
                      run.gradients.auxiliary[i], i == term.part ? auxiliary : 0);
    if (!found.empty()) return found + "; labels: " + to_string(mask);
  }
  return "";
}

}  // namespace moesh::losses
