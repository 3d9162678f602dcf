#include "moesh/train/pipeline.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/base/turns.h"
#include "moesh/comm/group.h"
#include "moesh/comm/mesh.h"
#include "moesh/comm/observers.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/nn/tokens.h"
#include "moesh/pipeline/execute.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/spmd/backward.h"

namespace moesh::train {
namespace {

// What the thread of a rank has by now, for another thread of the same rank.
class OfRank {
 public:
  explicit OfRank(at::Device device) {
    if (!device.is_cuda()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_ = guard.getStream(guard.getDevice());
  }

  void run(const std::function<void()>& f) const {
    const at::ThreadLocalStateGuard torch(torch_);  // among others: backward in its own thread
    at::set_num_threads(num_threads_);
    if (stream_) {
      const c10::impl::VirtualGuardImpl guard(stream_->device_type());
      guard.setDevice(stream_->device());
      guard.exchangeStream(*stream_);
    }
    const MeshScope mesh(mesh_);
    const auto observers = comm::use_observers_of(observers_);
    comm::flight::use(recorder_);
    const kernels::UseGpuKernels kernels(kernels_);
    const auto checks = nn::CheckLater::use(checks_);
    f();
  }

 private:
  at::ThreadLocalState torch_;
  int num_threads_ = at::get_num_threads();
  std::optional<c10::Stream> stream_;
  const Mesh& mesh_ = current_mesh();
  comm::ThreadObservers& observers_ = comm::thread_observers();
  std::shared_ptr<comm::flight::Recorder> recorder_ = comm::flight::current();
  kernels::GpuKernels kernels_ = kernels::gpu_kernels();
  nn::CheckLater* checks_ = nn::CheckLater::current();
};

}  // namespace

void in_lanes(StepState& state, at::Device device,
              const std::function<void(int lane, StepState& state)>& f) {
  const OfRank rank(device);
  std::vector<std::function<void()>> lanes{[&] { f(0, state); }};
  for (int lane = 1; lane < kNumLanes; ++lane)
    lanes.emplace_back([&, lane] {
      rank.run([&] {
        StepState part(&state);
        f(lane, part);
      });
    });
  take_turns(lanes);
}

namespace {

using pipeline::Action;
using pipeline::ActionKind;

// The stages of one rank at work.
template <bool Sp>
class StageActor final : public pipeline::Actor {
 public:
  StageActor(models::Model& model, const std::vector<models::MicroBatch>& batches,
             const models::ForwardOptions& options, const pipeline::Schedule& schedule,
             StepState* state, const OnForward& on_forward)
      : model_(model),
        batches_(batches),
        options_(options),
        schedule_(schedule),
        rank_(current_mesh().coordinate(pp)),
        state_(state),
        on_forward_(on_forward) {
    options_.head_apart = state != nullptr;
    if (state && has_weight_halves(schedule, rank_)) state->leave_weights();
    for (int stage = 0; stage < schedule.num_stages; ++stage)
      if (schedule.rank_with(stage) == rank_) index_.emplace(stage, index_.size());
  }

  void start_receive(const Action& taker, int from) override {
    const auto sizes = model_.stream_sizes(batch_of(taker), options_);
    const auto like = model_.stream_options();
    if (taker.kind == ActionKind::forward)
      streams_.emplace(key_of(taker), ArrivingStream(sizes, like, from, label_of(taker)));
    else
      gradients_.emplace(key_of(taker), ArrivingGradient(sizes, like, from, label_of(taker)));
  }

  void run(const Action& a) override {
    RECORD_USER_SCOPE(to_string(a));
    const comm::flight::ActivityScope doing(describe(a));
    if (a.kind == ActionKind::forward)
      forward(a);
    else
      backward(a);
  }

  // In two lanes, the backward first, which begins with more to send: where it starts to move rows
  // the forward goes on, and so on in turn. Gradients are added by the backward, and by what the
  // forward does for the head.
  void run_together(const Action& forward, const Action& backward) override {
    in_lanes(*state_, model_.stream_options().device(),
             [&](int lane, StepState&) { run(lane == 0 ? backward : forward); });
  }

  void start_send(const Action& maker, int to) override {
    const auto label = label_of(*taker_of(maker));
    const auto send = [&](auto& made) {
      sent_.emplace(sent_key(maker), moesh::start_send(std::exchange(made, {}), to, label));
    };
    if (maker.kind == ActionKind::forward)
      send(made_stream_);
    else
      send(made_gradient_);
  }

  void finish_send(const Action& maker) override {
    const auto found = sent_.find(sent_key(maker));
    const comm::flight::ActivityScope doing("the send after " + describe(maker));
    found->second.wait();
    sent_.erase(found);
  }

  // After the last action.
  void finish() {
    if (state_) state_->finish_weights();
  }

 private:
  using Stream = nn::Stream<Sp>;
  using Gradient = typename Stream::Gradient;
  using ArrivingStream = Arriving<Stream::layout>;
  using ArrivingGradient = Arriving<Gradient::layout>;
  using Key = std::pair<int, int>;             // stage, micro-batch
  using SentKey = std::tuple<bool, int, int>;  // whether it is a gradient, stage, micro-batch

  // What a forward leaves for its backward.
  struct Live {
    Stream input;  // of the first stage: undefined
    OutputEdge<Stream::layout> out;
    std::optional<Gradient> of_head;  // of the last stage: the gradient of what it gave
    nn::TokenSum own_losses;
  };

  static bool has_weight_halves(const pipeline::Schedule& s, int rank) {
    const auto& actions = s.ranks[static_cast<std::size_t>(rank)];
    return std::any_of(actions.begin(), actions.end(),
                       [](const Action& a) { return a.kind == ActionKind::backward_weight; });
  }
  static Key key_of(const Action& a) { return {a.stage, a.micro_batch}; }
  static SentKey sent_key(const Action& a) {
    return {a.kind != ActionKind::forward, a.stage, a.micro_batch};
  }
  const models::MicroBatch& batch_of(const Action& a) const {
    return batches_[static_cast<std::size_t>(a.micro_batch)];
  }
  std::optional<Action> taker_of(const Action& maker) const {
    const auto to = schedule_.target(maker);
    return to ? std::optional(Action{maker.kind, *to, maker.micro_batch}) : std::nullopt;
  }
  // The same on both sides of a message.
  std::int64_t label_of(const Action& taker) const {
    const std::int64_t of_kind = taker.kind == ActionKind::forward ? 0 : schedule_.num_stages;
    return (of_kind + taker.stage) * schedule_.num_micro_batches + taker.micro_batch;
  }
  bool stays_here(const Action& maker) const {
    const auto taker = taker_of(maker);
    return taker && schedule_.rank_with(taker->stage) == rank_;
  }

  template <class Received, class Handed>
  static auto take(Received& received, Handed& handed, const Key& key) {
    if (auto found = handed.extract(key)) return found.mapped();
    auto arriving = received.extract(key);
    MOESH_CHECK(arriving, "stage ", key.first, " has no input for micro-batch ", key.second);
    const InSection section(Section::waiting);
    return arriving.mapped().wait();
  }

  void forward(const Action& a) {
    Live live;
    if (a.stage > 0) live.input = as_input(take(streams_, handed_streams_, key_of(a)));
    models::ForwardResult result;
    {
      const InSection section(Section::forward);
      result = model_.forward_stage(index_.at(a.stage), live.input, batch_of(a), options_);
    }
    on_forward_(a, result);
    if (const auto taker = taker_of(a)) {
      const Stream& stream = std::get<Stream>(result.stream);
      if (stays_here(a))
        handed_streams_.emplace(key_of(*taker), stream);
      else
        made_stream_ = stream;
    }
    if (!state_) return;
    live.out = OutputEdge(std::get<Stream>(result.stream));
    live.own_losses = result.blocks_loss;
    if (!taker_of(a)) live.of_head = backward_of_head(result);
    live_.emplace(key_of(a), std::move(live));
  }

  // At once: the gradient of the head is there with the loss, as large as the head, and would be
  // kept for each micro-batch whose backward is still to come. What multi-token prediction adds is
  // behind the head's input as well, with the balance losses of its layers.
  Gradient backward_of_head(const models::ForwardResult& result) {
    const InSection section(Section::backward);
    const auto weights = state_->weights_at_once();
    moesh::backward(result.head_loss);
    state_->start_sums();  // what the norm has left for later goes with the blocks'
    return grad(std::get<Stream>(result.head_input));
  }

  void backward(const Action& a) {
    if (a.kind == ActionKind::backward_weight) return backward_weight(a);
    const auto live = live_.extract(key_of(a));
    MOESH_CHECK(live, "backward of stage ", a.stage, " without its forward");
    const auto& [input, out, of_head, own_losses] = live.mapped();
    const Gradient gradient = of_head ? *of_head : take(gradients_, handed_gradients_, key_of(a));
    const InSection section(Section::backward);
    if (a.kind == ActionKind::backward_input) {
      moesh::backward(out, gradient, own_losses);
      halves_.emplace(key_of(a), state_->take_weights());
    } else {
      // Weights fill the time in which another action's rows are awaited.
      const auto weights = state_->weights_at_once();
      moesh::backward(out, gradient, own_losses);
    }
    state_->start_sums();
    const auto taker = taker_of(a);
    if (!taker) return;
    if (stays_here(a))
      handed_gradients_.emplace(key_of(*taker), grad(input));
    else
      made_gradient_ = grad(input);
  }

  void backward_weight(const Action& a) {
    auto half = halves_.extract(key_of(a));
    MOESH_CHECK(half, "the weights of stage ", a.stage, " without their inputs");
    const InSection section(Section::backward);
    half.mapped().run();
    state_->start_sums();
  }

  models::Model& model_;
  const std::vector<models::MicroBatch>& batches_;
  models::ForwardOptions options_;
  const pipeline::Schedule& schedule_;
  int rank_;
  StepState* state_;
  const OnForward& on_forward_;
  std::map<int, std::size_t> index_;  // of a stage among this rank's
  std::map<Key, Live> live_;
  std::map<Key, WeightHalf> halves_;
  // By the action that takes it: from another rank, and from a stage of this one.
  std::map<Key, ArrivingStream> streams_;
  std::map<Key, ArrivingGradient> gradients_;
  std::map<Key, Stream> handed_streams_;
  std::map<Key, Gradient> handed_gradients_;
  // What the last actions made, until it is sent; then by the action that made it.
  Stream made_stream_;
  Gradient made_gradient_;
  std::map<SentKey, comm::Handle> sent_;
};

// Every lane takes the next micro-batch in turn. The lanes do the same things, one always a little
// ahead, so that gradients of a parameter are added in the order of the micro-batches.
template <bool Sp>
void run_lanes(models::Model& model, const std::vector<models::MicroBatch>& batches,
               const models::ForwardOptions& options, const pipeline::Schedule& schedule,
               StepState& state, const OnForward& on_forward) {
  // What a block does not free would be there once for each lane.
  if (!options.reshard) state.keep_gathers();
  // Before the first of them gathers anything ahead: it is for all.
  for (int lane = 1; lane < kNumLanes; ++lane) raw::add_taker(*state.gathering);
  in_lanes(state, model.stream_options().device(), [&](int lane, StepState& own) {
    StageActor<Sp> actor(model, batches, options, schedule, &own, on_forward);
    for (const Action& a : schedule.ranks[0]) {
      if (a.micro_batch % kNumLanes != lane) continue;
      actor.run(a);
      // Also where a micro-batch has awaited nothing: they end in their order.
      if (a.kind == ActionKind::backward) next_turn();
    }
    actor.finish();
    if (lane > 0) raw::remove_taker(*own.gathering);
  });
}

template <bool Sp>
void run(models::Model& model, const std::vector<models::MicroBatch>& batches,
         const models::ForwardOptions& options, const pipeline::Schedule& schedule,
         StepState* state, const OnForward& on_forward, bool overlap_experts) {
  // Without pp one micro-batch is under way, and backward frees its parameters as it goes.
  if (state && !options.reshard && schedule.num_ranks() > 1) state->keep_gathers();
  if (overlap_experts && state && schedule.num_ranks() == 1 && batches.size() > 1)
    return run_lanes<Sp>(model, batches, options, schedule, *state, on_forward);
  StageActor<Sp> actor(model, batches, options, schedule, state, on_forward);
  const int buffers = schedule.num_ranks() == 1 ? 1 : enough_buffers(schedule);  // simulates it
  pipeline::execute(schedule, current_mesh().coordinate(pp), actor, {.num_buffers = buffers});
  actor.finish();
}

int rank_of_end(const pipeline::Schedule& s, bool is_last) {
  return s.rank_with(is_last ? s.num_stages - 1 : 0);
}

}  // namespace

pipeline::Schedule schedule_of(const PipelineOptions& options, std::size_t num_micro_batches) {
  return schedule_of(options, current_mesh().size(pp), num_micro_batches);
}
pipeline::Schedule schedule_of(const PipelineOptions& options, int num_ranks,
                               std::size_t num_micro_batches) {
  const int m = static_cast<int>(num_micro_batches);
  if (num_ranks == 1) return pipeline::one_f_one_b(1, m);
  return pipeline::make_schedule(options.schedule, num_ranks, options.stages_of_a_rank, m,
                                 options.overlap_experts);
}

void open_channels(const models::Model& model, const PipelineOptions& options) {
  if (current_mesh().size(pp) == 1) return;
  const auto s = schedule_of(options, 1);
  std::set<comm::Channel> channels;  // both ways
  const auto add = [&](int a, int b) {
    if (a != b) channels.insert({a, b}), channels.insert({b, a});
  };
  for (int stage = 0; stage + 1 < s.num_stages; ++stage)
    add(s.rank_with(stage), s.rank_with(stage + 1));
  if (model.has_tied_ends()) add(rank_of_end(s, false), rank_of_end(s, true));
  current_mesh().group(pp)->open_channels({channels.begin(), channels.end()});
}

void run_pipeline(models::Model& model, const std::vector<models::MicroBatch>& batches,
                  const models::ForwardOptions& options, const pipeline::Schedule& schedule,
                  StepState* state, const OnForward& on_forward, bool overlap_experts) {
  if (options.sequence_parallel)
    run<true>(model, batches, options, schedule, state, on_forward, overlap_experts);
  else
    run<false>(model, batches, options, schedule, state, on_forward, overlap_experts);
}

void add_tied_gradients(models::Model& model, const pipeline::Schedule& schedule) {
  Stored* w = model.tied_to_other_end();
  if (!w || !w->spec.trained) return;
  const int rank = current_mesh().coordinate(pp), first = rank_of_end(schedule, false),
            other = rank == first ? rank_of_end(schedule, true) : first;
  const auto& group = current_mesh().group(pp);
  const at::Tensor mine = raw::gradient(*w);
  comm::Handle theirs = group->start_recv(mine.sizes(), mine.options(), other),
               sent = group->start_send(mine, other);
  const at::Tensor sum = mine + theirs.wait();  // the same bits on both sides
  sent.wait();
  w->value.mutable_grad() = sum;
}

}  // namespace moesh::train
