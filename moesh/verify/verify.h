#pragma once
// The same steps on one rank and on a mesh, compared: the noise that is allowed, the meshes that
// are tried, and the comparison.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/config/config.h"
#include "moesh/config/merge.h"
#include "moesh/models/model.h"
#include "moesh/train/build.h"
#include "moesh/verify/parity.h"

namespace moesh::verify {

// What rounding does to each tensor of a run, which tells how far a mesh may be off. Nothing here
// compares with another dtype, but for against_float64: a fault of one dtype does not widen what is
// allowed in it.

/// The type whose rounding tells the noise of a run: its own, or bfloat16 where products are in
/// float8. A code jumps by a step where a number passes the middle between two of them. In float32
/// a mesh may see that at one number of a thousand tensors, and runs that are one rounding away at
/// another one; weights that begin as far away as bfloat16 rounds make every tensor see jumps. In
/// float64 nobody comes so near to the middle.
at::ScalarType noise_type(const config::Config& config);

std::string movement_name(const std::string& param);
/// Names the largest logits of each head, by which QK-clip goes.
std::string largest_logits_name(nn::Attention& attention, std::int64_t step);

/// Makes a run on one rank another one, which is as near to it as rounding allows: every weight
/// begins up to one rounding away (or some more), so that everything after it is rounded otherwise.
class Nearby {
 public:
  Nearby(const NamedTensors& run, at::ScalarType dtype, std::uint64_t seed, double roundings = 1)
      : run_(run), dtype_(dtype), seed_(seed), roundings_(roundings) {}
  void move_weights(models::Model& model) const;
  /// AdamW moves an element by about the learning rate, however small its gradient is: one whose
  /// gradient is noise goes either way, and later steps see it. That happens to few elements, and
  /// to others in each run, so gradients are moved as far as they may be off before they are
  /// applied: then all such elements go either way.
  void move_gradients(models::Model& model, std::int64_t step) const;
  /// 1 or -1 for each element.
  at::Tensor signs(const Stored& w) const;

 private:
  at::Tensor draw(const Stored& w, std::int64_t step) const;  // in [-1, 1)
  const NamedTensors& run_;
  at::ScalarType dtype_;
  std::uint64_t seed_;
  double roundings_;
};

/// How many runs nearby tell the noise, and how many do where a mesh is off by little more than
/// what is allowed: a few may be near by chance.
constexpr std::uint64_t kNumNearby = 3, kNumNearbyInDoubt = 12;

/// The noise of each tensor is the largest distance of the runs nearby, element by element.
void note_nearby(NamedTensors& run, const NamedTensors& nearby);
/// After the last of them. They are few samples, and may be near by chance: a gradient has at least
/// the median of what all gradients have, relative to its size, and any tensor what storing it
/// costs. The noise of a gradient norm is that of all its gradients together. Steps that are lost
/// tell nothing of others, and are not compared: their weight is 0. They must only be finite, where
/// one rank and all runs nearby are, and be skipped or not as one rank skips them.
void set_noise(NamedTensors& run, at::ScalarType dtype, double roundings = 1);

/// The first step that is noise: its loss may be off by all that it is, or is not finite. The steps
/// before it have made errors grow until no linear bound holds. The first step of a run has none
/// before it, and is never lost.
std::optional<std::int64_t> first_lost(const NamedTensors& run);

/// What a comparison leaves out, since rounding decides it.
struct LeftOut {
  std::int64_t steps = 0;            // that are lost
  std::int64_t tensors = 0;          // of which no element is compared, besides those of such steps
  std::int64_t gradients = 0;        // the same, of gradients and their norms
  std::int64_t against_float64 = 0;  // tensors that may be anything there
  bool any() const { return steps + tensors + gradients + against_float64 > 0; }
  /// In words, for one line.
  std::string describe() const;
};
/// What a run of so many steps leaves out, without against_float64.
LeftOut left_out(const NamedTensors& run, std::int64_t steps);

/// The noise of parameters and of their movements follows from that of the gradients: it is what
/// the update rule makes of gradients that are as far off as they may be, for all signs of the
/// steps. Where a gradient may have either sign, the rule may do anything, and only the gradient is
/// compared: the weight of these elements is 0, and of all elements after a step that is lost.
/// Errors of a movement are taken relative to what is allowed for that very element.
void set_movement_noise(NamedTensors& run, const config::Config& one_rank, std::int64_t steps);

/// What rounding does not explain, of runs in `dtype` (a run with its noise, and those nearby):
/// each tensor of the first step may be as far from its value in float64 as runs in float64 whose
/// weights are off by kMostRoundings of `dtype`. Where that is less than kNoiseAllowed times its
/// own noise it may be off by so much, but by no more than kMostOfBound times as far: what cancels
/// within a layer is off by more than weights can tell, and a fault of the dtype has noise as well.
/// Such steps are small, but not too small for a clamp to open or a norm of numbers near zero to
/// turn. A tensor of which they change half may be anything that is finite.
struct AgainstFloat64 {
  std::vector<Mismatch> unexplained;
  std::int64_t num_that_may_be_anything = 0;
  /// The gradients among these, where the runs have some gradient of twice the size of others. A
  /// softmax of large logits makes such: where it turns from one key to another, and hardly
  /// elsewhere, gradients grow a hundredfold, so no few runs tell how large they may be. A sum that
  /// cancels is none: it is zero in float64, and stays so.
  std::vector<std::string> decided;
};
/// Compares nothing of these gradients, in any step, nor of norms that may be anything with them.
void leave_decided(NamedTensors& run, const std::vector<std::string>& gradients);
AgainstFloat64 against_float64(const std::vector<NamedTensors>& runs, at::ScalarType dtype,
                               const NamedTensors& in_float64);
/// The tensors of a run of which that is asked.
bool is_bounded(const std::string& name);
/// On the way from the weights to a tensor there are so many more roundings. 0.1 to 0.4 of them was
/// the most that random runs have, and 0.7 where q, k and v are clamped.
constexpr double kMostRoundings = 8;
/// 1.13 was the most in some 2,000 random runs, of convolutions in float32.
constexpr double kMostOfBound = 2;
double roundings_in_float64(at::ScalarType dtype);

// Which meshes a sweep goes through: all of some sizes, a sample of them, one piece of the list.

/// `count` different meshes, the same for a seed on every machine.
struct MeshSample {
  int count;
  std::uint64_t seed = 0;
};

/// One of `count` pieces of a list, for machines that share the work: element i is in piece
/// i mod count, so every piece has meshes of every size.
struct SweepShard {
  int index = 1, count = 1;  // index from 1
};

/// A mesh, the schedule of its pipeline where it has one, whether the embedding is the head as
/// well: then both ends of the pipeline have it; and how its cp cuts sequences: meshes take turns.
/// Where nodes share ep, tokens take two hops.
struct SweepMesh {
  MeshShape shape;
  std::string schedule = "1f1b";
  bool is_tied = false;
  std::string cut = "auto";

  std::string describe() const;
};

/// Meshes of up to this many ranks go through every schedule; larger ones take one each, in turn.
constexpr int kEverySchedule = 4;
/// One in this many pipelines is tied: some of every schedule.
constexpr int kEveryTied = 3;

struct Sweep {
  int least_ranks = 1, most_ranks = 1;
  std::optional<MeshSample> sample = {};
  SweepShard shard = {};
  bool with_cp = true;  // false: only meshes whose cp is 1

  /// By number of ranks, never empty: a sweep of nothing would hold.
  std::vector<SweepMesh> meshes() const;
};

/// "8" is every mesh of up to 8 ranks, "5-8" every one of 5 to 8; throws Error (config) for what is
/// neither.
Sweep parse_sweep(const std::string& text);
/// "2/5" is the second of five pieces.
SweepShard parse_shard(const std::string& text);

// The proof that a mesh computes what one device computes: the first optimizer steps of a run, on
// the mesh of its configuration and on one rank, everything compared.

using config::Config;

struct VerifyCase {
  Config config;
  std::int64_t steps = 2;  // optimizer steps to compare, the first of the run
  double ignored = 0.1;    // fraction of labels that do not count, besides what the data ignores
  /// In narrow dtypes near ties would flip: the mesh takes the routing of the reference.
  bool replays() const { return config.training.dtype != "float64"; }
};

/// Where a proof wants other values than a training run, for `steps` steps: few tokens, and an odd
/// number of them; documents that end anywhere; auxiliary losses and an expert bias that count.
config::Settings verify_defaults(std::int64_t steps);

/// A mesh of one with the sequences of all ranks and the plainest path: what the mesh is compared
/// with. It cuts the step into micro-batches of another size, since that must not matter either.
Config one_rank(const Config& config);

/// Why one_rank cuts a step as the mesh does, so that verify says nothing of other ways; empty: it
/// does not.
std::string why_cut_alike(const Config& config);

/// With one micro-batch more than its pipeline has ranks, enough for every rank to work on several
/// at once, unless the user has set another number.
Config with_micro_batches(const Config& config, const std::string& origin);

/// On a mesh of a sweep, with heads, experts, layers and a global batch that it divides, and with a
/// few micro-batches for its pipeline: as they are where they fit. The embedding of a tied one is
/// the head, whatever the model says.
Config fitted(const Config& config, const SweepMesh& mesh);

/// By step.
using Routing = std::vector<std::unique_ptr<RoutingRecord>>;

struct VerifyReference : NamedTensors {
  Routing routing = {};
  std::vector<Mismatch> unexplained = {};  // by noise: no mesh holds then
  LeftOut left_out = {};
  std::string graph_mismatch = {};  // what graph_mismatch() says
  /// With noise that kNumNearbyInDoubt runs told, made for the first mesh that is in doubt.
  std::unique_ptr<VerifyReference> closer = {};
};

struct VerifyReport {
  std::vector<Mismatch> mismatches;
  std::string error;
  bool is_first = false;  // this process holds rank 0: it prints for all
  std::int64_t num_flipped = 0;
  double largest_margin = 0;
  /// With a golden file in bfloat16: tensors that rounding may change by half, along themselves.
  std::int64_t num_vague = 0;
  double worst_ratio = 0;         // the largest |delta| / allowed, of all processes
  std::string worst_tensor = {};  // which has it
  LeftOut left_out = {};
  bool holds() const { return mismatches.empty() && error.empty(); }
  /// Whether it does not hold, by so little that noise which is measured more closely may explain
  /// it: the same on all processes.
  bool is_in_doubt() const;
  /// Takes what was found to differ, and the worst of it.
  void add(const Findings& findings, const MeshShape& shape);
  void add_flips(const RoutingRecord& routing);
  /// The information to act on: the first tensor that differs, factors, axes, the worst token and
  /// rank.
  std::string describe(const MeshShape& mesh) const;
};

/// Launches the ranks of a mesh. What they throw is the report's error. It is thrown again where it
/// is no verdict on the mesh: it came before any of them began, memory was not enough, or it is of
/// what was asked for (config, data, storage).
void launch_for(VerifyReport& report, const Config& config,
                const std::function<void(comm::Group& world)>& f);

/// The run's data, with further labels that do not count.
std::unique_ptr<data::Dataset> open_data(const VerifyCase& c);

/// What each rank does, on the mesh of the configuration: `report` gets what it has of each tensor.
/// One rank may record its routing, and do a run nearby instead. Steps from `first_replayed` on
/// replay one.
void run_steps(const VerifyCase& c, const data::Dataset& data, comm::Group& world, Routing* record,
               Routing* replay, const std::function<void(const RankTensor&)>& report,
               const Nearby* nearby = nullptr, std::int64_t first_replayed = 0);

/// The largest of the numbers that the ranks have, on all of them.
double largest_of_ranks(comm::Group& world, double mine, at::Device device);

/// The case on one_rank(c.config), with what rounding does to it.
VerifyReference run_reference(const VerifyCase& c, std::uint64_t num_nearby = kNumNearby);

/// `values`, if given, gets the tensors that the ranks have, put together; all ranks must be
/// threads of this process.
VerifyReport verify(const VerifyCase& c, const VerifyReference& reference,
                    NamedTensors* values = nullptr);

/// verify(); where the report is in doubt, it is the mesh's turn again with reference.closer. The
/// first look at other meshes stays what it was.
VerifyReport verify_closely(const VerifyCase& c, VerifyReference& reference,
                            NamedTensors* values = nullptr);

}  // namespace moesh::verify
