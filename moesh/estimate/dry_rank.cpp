#include "moesh/estimate/dry_rank.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "moesh/comm/launch.h"
#include "moesh/pipeline/schedule.h"
#include "moesh/train/step.h"

namespace moesh::estimate {

using namespace train;
namespace {

using kernels::meta::DryRun;

std::int64_t bytes(const at::Tensor& t) { return static_cast<std::int64_t>(t.nbytes()); }

// Looks at the memory before and after each action of the schedule, which are scopes of a profile
// with the names of pipeline::to_string: "F2.0"; and at the kernels within.
class ActionWatch {
 public:
  explicit ActionWatch(const comm::SentBytes& sent) : sent_(sent) {
    watching_ = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
              if (is_action(f.name())) watching_->before();
              watching_->begin_phase(f.name());
              return nullptr;
            },
            [](const at::RecordFunction& f, at::ObserverContext*) {
              watching_->end_phase();
              if (is_action(f.name())) watching_->after(f.name());
            })
            .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~ActionWatch() {
    at::removeCallback(handle_);
    watching_ = nullptr;
  }
  ActionWatch(const ActionWatch&) = delete;
  ActionWatch& operator=(const ActionWatch&) = delete;

  /// A stream of so many bytes comes from another rank before the forward which holds it on, and
  /// one that a forward gives to another rank is freed with its send.
  LiveMemory found(const pipeline::Schedule& schedule, int rank, std::int64_t stream) const {
    const auto& actions = schedule.ranks[static_cast<std::size_t>(rank)];
    LiveMemory live{
        .num_alive = most_alive(actions), .num_halves = most_halves(actions), .stages = {}};
    const auto crosses = [&](int stage) {  // from this stage to the next
      return stage >= 0 && stage + 1 < schedule.num_stages &&
             schedule.rank_with(stage) != schedule.rank_with(stage + 1);
    };
    for (auto [stage, of_stage] : stages_) {
      of_stage.activation += stream * (crosses(stage - 1) - crosses(stage));
      of_stage.kept = kept_of(stage);
      live.stages.push_back(of_stage);
    }
    return live;
  }

  /// The peak of the whole step; that of the allocator begins again with each action.
  std::int64_t peak() const { return std::max(peak_, DryRun::peak()); }
  const PassWork& work() const { return work_; }

 private:
  // Within an action everything belongs to it but what is named otherwise.
  void begin_phase(const char* name) {
    take_work();
    const auto starts = [&](const char* text) { return std::string_view(name).starts_with(text); };
    kernels::meta::WorkLedger* to = phases_.empty() ? nullptr : phases_.back();
    if (is_action(name)) {
      to = name[0] == 'F' ? &work_.forward : &work_.backward;
      if (name[0] == 'F') sent_before_ = sent_.ledger();
    } else if (starts("forward again")) {
      to = &work_.again;
    } else if (starts("start to gather") || starts("start to reduce") || starts("await the sum") ||
               starts("add to a gradient")) {
      to = nullptr;
    }
    phases_.push_back(to);
  }
  void end_phase() {
    take_work();
    phases_.pop_back();
  }
  void take_work() {
    const auto work = kernels::meta::take_work();
    if (phases_.empty() || !phases_.back()) return;
    for (const auto& [kernel, count] : work) (*phases_.back())[kernel] += count;
  }

  static bool is_action(const char* name) {
    if (std::string_view("FBIW").find(name[0]) == std::string_view::npos) return false;
    char* end = nullptr;
    std::strtol(name + 1, &end, 10);
    return end != name + 1 && *end == '.';
  }

  // What the halves for the weights free, on average: sums that travel are of one half at its
  // beginning and of another at its end. The first one leaves the gradients as well.
  std::int64_t kept_of(int stage) const {
    const auto found = freed_.find(stage);
    if (found == freed_.end()) return 0;
    const std::vector<std::int64_t>& all = found->second;
    const std::size_t from = all.size() > 1 ? 1 : 0;
    std::int64_t sum = 0;
    for (std::size_t i = from; i < all.size(); ++i) sum += all[i];
    return std::max<std::int64_t>(0, sum / static_cast<std::int64_t>(all.size() - from));
  }

  void before() {
    before_ = DryRun::live();
    peak_ = std::max(peak_, DryRun::peak());
    DryRun::reset_peak();
  }

  void after(const char* name) {
    const auto stage = static_cast<int>(std::strtol(name + 1, nullptr, 10));
    const std::int64_t added = DryRun::live() - before_;
    StageLive& s = stages_[stage];
    const char kind = name[0];
    if (kind == 'F') {
      add(work_.sent_in_forward, sent_.ledger(), 1);
      add(work_.sent_in_forward, sent_before_, -1);
    }
    std::int64_t& inside = kind == 'F' ? s.in_forward : kind == 'W' ? s.in_weights : s.in_backward;
    inside = std::max(inside, DryRun::peak() - before_);
    // The first two forwards of the last stage leave sums of the head's gradient that travel as
    // well, and the third, which awaits the first, the gradient itself.
    if (kind == 'F')
      s.activation = ++num_forwards_[stage] <= 4 ? added : std::max(s.activation, added);
    if (kind == 'W') freed_[stage].push_back(-added);
  }

  static inline ActionWatch* watching_ = nullptr;  // one dry run goes on at a time
  const comm::SentBytes& sent_;
  comm::Ledger sent_before_;
  PassWork work_;
  std::vector<kernels::meta::WorkLedger*> phases_;  // from the outermost on; null: is not counted
  at::CallbackHandle handle_;
  std::int64_t before_ = 0, peak_ = 0;
  std::map<int, StageLive> stages_;
  std::map<int, int> num_forwards_;                 // of a stage
  std::map<int, std::vector<std::int64_t>> freed_;  // by each half for the weights, of a stage
};

int first_rank(const Config& config, int rank_of_pp, int rank_of_cp) {
  const MeshShape shape = mesh_shape(config);
  // pp is the slowest axis, and only tp is faster than cp.
  return rank_of_pp * (shape.num_ranks() / shape.pp) + rank_of_cp * shape.tp;
}

}  // namespace

DryRank::DryRank(const Config& config, int rank_of_pp, int rank_of_cp)
    : config_(config),
      rank_of_pp_(rank_of_pp),
      memory_(at::Device(config.training.device).type()),
      mesh_(mesh_shape(config), first_rank(config, rank_of_pp, rank_of_cp), comm::fake_group),
      scope_(mesh_),
      model_(make_model(config, at::kMeta)),  // the real device may not be on this machine
      optimizer_(make_optimizer(*model_, config)) {}

// Before the first backward: what it will take. One rank with one micro-batch adds nothing to what
// backward makes, which is in the type of the work.
std::int64_t DryRank::gradient_bytes(const Stored& w) const {
  if (!w.spec.trained) return 0;
  if (w.value.grad().defined()) return bytes(w.value.grad());
  const bool stays = mesh_.shape().num_ranks() == 1 && num_micro_batches(config_) == 1;
  const auto type = stays ? w.spec.compute.value_or(w.spec.dtype) : w.spec.dtype;
  return w.value.numel() * static_cast<std::int64_t>(c10::elementSize(type));
}

StateMemory DryRank::state() const {
  StateMemory s;
  model_->each_param([&](const Stored& w, bool) {
    s.weights += raw::num_bytes_at_rest(w);
    s.gradients += gradient_bytes(w);
  });
  for (const auto& entry : optimizer_->state()) s.optimizer += bytes(entry.value);
  return s;
}

// Moments are spread over the parameters by their sizes.
StateMemory DryRank::expert_state() const {
  StateMemory s;
  model_->each_param([&](const Stored& w, bool) {
    if (w.storage != efsdp) return;
    s.weights += raw::num_bytes_at_rest(w);
    s.gradients += gradient_bytes(w);
  });
  const StateMemory all = state();
  s.optimizer = all.gradients == 0 ? 0
                                   : static_cast<std::int64_t>(static_cast<double>(all.optimizer) *
                                                               static_cast<double>(s.gradients) /
                                                               static_cast<double>(all.gradients));
  return s;
}

std::int64_t DryRank::tp_gradients() const {
  std::int64_t sum = 0;
  model_->each_param([&](const Stored& w, bool) {
    if (w.spec.trained && contains(w.replicas, tp)) sum += bytes(w.value);
  });
  return sum;
}

std::int64_t DryRank::num_stage_parameters() const {
  std::int64_t sum = 0;
  model_->each_param([&](const Stored& w, bool) { sum += c10::multiply_integers(w.spec.shape); });
  return sum;
}

void DryRank::make_gradients() {
  model_->each_param([](Stored& w, bool) {
    if (w.spec.trained) w.value.mutable_grad() = at::zeros_like(w.value.detach());
  });
}

std::vector<models::MicroBatch> DryRank::batches(std::int64_t num) const {
  const auto batch = config_.data.batch_size, sequence = config_.data.sequence_length;
  const auto ids = [&] {
    return at::empty({batch, sequence}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  };
  std::vector<models::MicroBatch> all;
  for (std::int64_t i = 0; i < num; ++i) {
    all.push_back({.input_ids_BL = ids(), .labels_BL = ids()});
    for (std::int64_t k = 0; k < num_mtp_layers(config_); ++k)
      all.back().ahead.push_back({ids(), ids()});
    if (config_.lora.dropout > 0)
      all.back().samples_B = at::empty({batch}, at::TensorOptions(at::kMeta).dtype(at::kLong));
    if (document_mask(config_)) all.back().documents = {ids(), most_documents(batch, sequence, 0)};
  }
  return all;
}

Estimate DryRank::step(std::int64_t num_micro) {
  Estimate e{.mesh = mesh_.shape(),
             .rank_of_pp = rank_of_pp_,
             .num_parameters = model_->num_parameters(),
             .num_active_parameters = model_->num_active_parameters(),
             .num_stage_parameters = num_stage_parameters(),
             .num_tokens = mesh_.size(dp) * config_.data.batch_size * config_.data.sequence_length *
                           num_micro,
             .tp_gradients = tp_gradients()};
  const StepOptions options = step_options(config_);
  const auto schedule = schedule_of(options.pipeline, static_cast<std::size_t>(num_micro));
  DryRun::reset_peak();  // making a model looks at the shapes of all of it
  ActionWatch watch(sent_);
  auto micro_batches = batches(num_micro);
  std::int64_t tokens = 0;
  for (const at::Tensor* t : micro_batches[0].from_data()) tokens += bytes(*t);
  const auto stream =
      c10::multiply_integers(model_->stream_sizes(micro_batches[0], options.forward)) *
      static_cast<std::int64_t>(
          c10::elementSize(c10::typeMetaToScalarType(model_->stream_options().dtype())));
  optimizer_->begin_step(learning_rates(config_)(0));
  UnreadStep gradients = start_gradients(*model_, std::move(micro_batches), options);
  // Those of one micro-batch on one rank are in the type of the work.
  e.state = state(), e.expert_state = expert_state();
  finish_step(*model_, *optimizer_, std::move(gradients), options);
  e.live = watch.found(schedule, rank_of_pp_, stream);
  e.live.tokens = tokens;
  e.peak = watch.peak();
  e.num_reads = memory_.num_reads();
  e.traffic = sent_.ledger();
  e.work = watch.work();
  return e;
}

}  // namespace moesh::estimate
