#pragma once
// A parameter: its compute layout is in the type, its FSDP storage is data. tp, ep and etp cut
// first, FSDP shards the result: dense parameters over dp_shard x cp, expert parameters over efsdp.
// `use(w)` makes it a compute tensor.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/kernels/float8.h"
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

namespace kernels {
struct Quantization;
struct QuantizedBox;
}  // namespace kernels

/// A box in the whole tensor: where a rank's part begins, and its extent.
struct Region {
  std::vector<std::int64_t> start, length;
  bool operator==(const Region&) const = default;
};

/// Description of a parameter: name, whole shape, which dimension each cutting axis cuts ({tp, 0}),
/// the dimension that FSDP shards.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<std::pair<Axes, std::int64_t>> cuts = {};
  std::int64_t storage_dim = 0;
  at::ScalarType dtype = at::kFloat;  // of the master weights and of the gradient's reduction
  std::optional<at::ScalarType> compute = {};  // what `use` casts to; the same if not given
  at::Device device = at::kCPU;
  // The matrices that rules for matrices move as one: a map from features to features. Embedding,
  // head, router's gate and biases of experts are not.
  bool is_matrix = true;
  std::int64_t num_heads = 1;    // whose own matrices lie stacked along dimension 0
  std::int64_t float8_tile = 0;  // of products with it in float8 (kernels/float8.h); 0: none are
  /// A parameter that is not trained (frozen) has no gradient, no master weights and no state of an
  /// optimizer: it rests in the type of the work.
  bool trained = true;

  at::ScalarType of_work() const { return compute.value_or(dtype); }
  /// In which the value rests.
  at::ScalarType at_rest() const { return trained ? dtype : of_work(); }
};

/// Values by global index, so that they do not depend on the mesh. The stream is the parameter's
/// name.
struct Init {
  enum class Distribution { zeros, ones, normal, uniform, log_uniform } kind = Distribution::zeros;
  // Standard deviation, or half width of the uniform interval around 0; of log_uniform, which is
  // the logarithm of numbers that are uniform in [kLeast, scale], the upper end.
  double scale = 1;
  std::uint64_t seed = 0;
  static constexpr double kLeast = 0.01;  // of the numbers of log_uniform
};

/// A copy of a value in the type of the work. It belongs to the value at `version`; code that
/// writes the value in place makes the copy old.
struct ComputeCopy {
  at::Tensor value;
  std::int64_t version;
};

/// The same in float8, of a weight whose products own kernels compute: `use` does not cast then.
struct Float8Copy {
  kernels::WeightCodes codes;
  std::int64_t version;
};

/// The part of a parameter that this rank stores.
struct Stored {
  ParamSpec spec;
  Axes cutting = none;    // the axes on which every rank has another slice (F, E)
  Axes storage = none;    // the axes over which it is stored in shards
  Axes replicas = none;   // the axes on which the gradient is summed after the shards are
  Region compute, shard;  // what `use` gives, and what this rank stores of it
  std::vector<std::int64_t> storage_sizes;  // of each storage rank along storage_dim
  at::Tensor value;                         // [shard.length]; a leaf with a gradient, if trained
  /// A frozen parameter may stay quantized: then `value` is empty. Null: it is not quantized.
  std::shared_ptr<kernels::QuantizedBox> quantized = {};
  std::shared_ptr<ComputeCopy> copy = {};   // null: `use` casts every time
  std::shared_ptr<Float8Copy> float8 = {};  // null: they round every time
  /// The head of a model whose embedding is on another stage: that stage counts and saves it.
  bool is_of_other_stage = false;
};

/// Whether this rank of the current mesh counts and saves the shard; one of the ranks with the same
/// shard does.
bool is_first_holder(const Stored& w);

namespace raw {
/// f(begin, end) over [0, n), divided among the threads that ATen uses here. (at::parallel_for is
/// serial in code built without OpenMP.)
void in_parallel(std::int64_t n,
                 const std::function<void(std::int64_t begin, std::int64_t end)>& f);
Stored make_stored(const ParamSpec& spec, Axes cutting, Axes storage, Axes replicas,
                   const Init& init);
/// From now on the parameter is not trained.
void freeze(Stored& w);
/// From now on it is not trained and stays quantized: its values, of this standard deviation, are
/// rounded.
void quantize(Stored& w, const kernels::Quantization& how, double deviation);
/// The numbers of the shard, which are its value unless it is quantized; without autograd.
at::Tensor numbers(const Stored& w);
/// The gradient of the shard, in the type of the master weights; undefined: it has none.
/// (`value.grad()` may have the type of the work: backward leaves it so if nothing is added.)
at::Tensor gradient(const Stored& w);
/// Memory of the stored value.
std::int64_t num_bytes_at_rest(const Stored& w);
/// From now on the value is kept in the type of the work as well, if that is another one; or its
/// codes in float8, if these are all that is read of it.
void keep_copy(Stored& w);
/// Codes are to be made again before they are used.
void forget_codes(const Stored& w);
/// That copy, cast anew if the value was written since; undefined without one.
at::Tensor current_copy(const Stored& w);
/// The value has just been written, and the copy with it.
void note_copy_written(const Stored& w);
/// Whether the gradient of a parameter may be left for later (StepState::leave_weights).
enum class LateGradient { may_be, never };
/// Enters the replica axes, gathers the shards, casts. Backward, of what is trained: cast,
/// reduce_scatter over the storage ranks, one all_reduce of the small shard over the replicas.
at::Tensor use(const Stored& w, Axes replicas, LateGradient late);
/// The whole compute part of something shaped like the shard (a gradient, an optimizer's state),
/// without autograd.
at::Tensor gather(const Stored& w, const at::Tensor& shard);
}  // namespace raw

/// A parameter rests invariant (I) where it is not cut, and F or E where it is; dp and cp (edp)
/// belong to its storage.
template <Layout L>
constexpr L check_param(L layout) {
  for (Place p : places(layout))
    if (p != Place::I && p != Place::F && p != Place::E)
      throw "a parameter is I, F or E on each axis: it enters work (R) through use(w)";
  if (places(layout)[0] != Place::I)
    throw "a parameter is I on dp (edp): FSDP is its storage, not its meaning";
  if constexpr (std::same_as<L, Dense>)
    if (layout.cp != Place::I) throw "a parameter is I on cp: FSDP is its storage, not its meaning";
  return layout;
}

template <auto L>
class Param {
  static constexpr auto checked = check_param(L);
  static constexpr bool is_dense = std::same_as<std::remove_const_t<decltype(L)>, Dense>;

 public:
  static constexpr auto layout = L;
  static constexpr Axes storage_axes = is_dense ? fsdp : efsdp;
  static constexpr Axes cutting_axes = axes_with(L, Place::F) | axes_with(L, Place::E);
  /// The axes on which the value is the same and which are not storage: dp_replicate, and tp (ep,
  /// etp) where it is I.
  static constexpr Axes replica_axes =
      dp_replicate | (axes_with(L, Place::I) & (is_dense ? tp : kExpertAxes));

  Param() = default;
  explicit Param(const ParamSpec& spec, const Init& init = {})
      : stored_(raw::make_stored(spec, cutting_axes, storage_axes, replica_axes, init)) {}

  const std::string& name() const { return stored_.spec.name; }
  const Stored& stored() const { return stored_; }
  Stored& stored() { return stored_; }

 private:
  Stored stored_;
};

/// I -> R on every axis where the parameter is not cut, except those in Stay, where both sides do
/// the same work (a norm on a residual stream that is I on tp).
template <Axes Stay = none, auto L>
auto use(const Param<L>& w, raw::LateGradient late = raw::LateGradient::may_be) {
  constexpr auto entered = [] {
    auto out = L;
    for (Axes axis : std::remove_const_t<decltype(L)>::axes)
      if (on(L, axis) == Place::I && !contains(Stay, axis)) out = with(out, axis, Place::R);
    if ((Stay & (Param<L>::storage_axes | dp_replicate)) != none)
      throw "use<Stay>: dp and cp (edp) are storage and always enter";
    return out;
  }();
  constexpr Axes replicas = without(Param<L>::replica_axes, Stay);
  return assume<entered>(raw::use(w.stored(), replicas, late));
}

// A parameter that was not entered: the compiler's message is the cure.
template <class... Xs>
inline constexpr bool kParameterEntersThroughUse = false;
template <auto A, auto B>
auto linear(const Tensor<A>&, const Param<B>&) {
  static_assert(kParameterEntersThroughUse<Param<B>>,
                "a parameter enters work through use(w): linear(x, use(w))");
}
template <auto A, auto B>
auto operator+(const Tensor<A>&, const Param<B>&) {
  static_assert(kParameterEntersThroughUse<Param<B>>,
                "a parameter enters work through use(w): x + use(w)");
}
template <auto A, auto B>
auto operator*(const Tensor<A>&, const Param<B>&) {
  static_assert(kParameterEntersThroughUse<Param<B>>,
                "a parameter enters work through use(w): x * use(w)");
}

/// The gradient of the whole compute part, gathered from the shards: I where the parameter is, its
/// own slice where it is cut.
template <auto L>
Tensor<L> grad(const Param<L>& w) {
  return assume<L>(raw::gather(w.stored(), raw::gradient(w.stored())));
}

/// The value of the whole compute part, without autograd.
template <auto L>
Tensor<L> value(const Param<L>& w) {
  return assume<L>(raw::gather(w.stored(), w.stored().value.detach()));
}

/// The mesh of a world of one, as long as the scope lives: for names and whole shapes, which do not
/// depend on a mesh.
class OneRankScope {
 private:
  std::shared_ptr<comm::Group> world_ = comm::solo_group();
  Mesh mesh_{*world_, {}};
  MeshScope scope_{mesh_};
};

/// The part of a parameter that another rank of the stage stores.
Region shard_on(const Stored& w, int rank);

}  // namespace moesh
