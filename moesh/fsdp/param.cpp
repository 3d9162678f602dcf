#include "moesh/fsdp/param.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/fsdp/device_random.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/kernels/quantized.h"
#include "moesh/kernels/update.h"
#include "moesh/spmd/attach.h"
#include "moesh/types/token.h"

namespace moesh {

bool is_first_holder(const Stored& w) {
  return !w.is_of_other_stage && current_mesh().coordinate(w.replicas) == 0;
}

namespace raw {
namespace {

// Cuts one dimension of a region; sizes of all parts are returned.
std::vector<std::int64_t> cut(Region& region, std::int64_t dim, int parts, int part) {
  const auto d = static_cast<size_t>(dim);
  const Pieces pieces{region.length[d], parts};
  region.start[d] += pieces.start(part);
  region.length[d] = pieces.length(part);
  return pieces.lengths();
}

// The values at consecutive indices of the whole tensor.
void fill(const Init& init, const Random& random, std::uint64_t first, std::span<double> out) {
  switch (init.kind) {
    case Init::Distribution::zeros: std::fill(out.begin(), out.end(), 0.0); return;
    case Init::Distribution::ones: std::fill(out.begin(), out.end(), init.scale); return;
    case Init::Distribution::normal:
      random.normals(first, out);
      for (double& x : out) x *= init.scale;
      return;
    case Init::Distribution::uniform:
      for (double& x : out) x = init.scale * (2 * random.uniform(first++) - 1);
      return;
    case Init::Distribution::log_uniform:
      for (double& x : out)
        x = std::log(Init::kLeast + (init.scale - Init::kLeast) * random.uniform(first++));
      return;
  }
}

// Element i of the region gets the value of its index in the whole tensor. A device makes its own,
// within a rounding of what the host would send: a model of 1 B parameters is there in less than a
// second.
at::Tensor make_values(const ParamSpec& spec, const Region& region, const Init& init) {
  const auto options = at::TensorOptions(spec.device).dtype(spec.dtype);
  if (spec.device.is_meta()) return at::empty(region.length, options);  // only shapes
  if (!spec.device.is_cpu()) {
    at::Tensor out = at::empty(region.length, options);
    fill_on_device(out, spec.shape, region.start, init, Random(init.seed, spec.name));
    return out;
  }
  at::Tensor out = at::empty(region.length, at::TensorOptions(at::kDouble));
  auto* data = out.data_ptr<double>();
  const Random random(init.seed, spec.name);
  const auto dims = spec.shape.size();
  const std::int64_t width =
      region.length[dims - 1];  // the innermost dimension is consecutive in the whole, too
  in_parallel(out.numel(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end;) {
      std::int64_t rest = i / width, index = region.start[dims - 1] + i % width,
                   stride = spec.shape[dims - 1];
      for (size_t d = dims - 1; d-- > 0;) {
        index += (region.start[d] + rest % region.length[d]) * stride;
        rest /= region.length[d];
        stride *= spec.shape[d];
      }
      const std::int64_t row_end = std::min(end, i - i % width + width);
      fill(init, random, static_cast<std::uint64_t>(index),
           {data + i, static_cast<size_t>(row_end - i)});
      i = row_end;
    }
  });
  return out.to(options);
}

}  // namespace

void in_parallel(std::int64_t n, const std::function<void(std::int64_t, std::int64_t)>& f) {
  const Pieces pieces{n, n < 65536 ? 1 : at::get_num_threads()};
  std::vector<std::thread> threads;
  for (std::int64_t t = 1; t < pieces.parts; ++t)
    threads.emplace_back(f, pieces.start(t), pieces.start(t) + pieces.length(t));
  f(0, pieces.length(0));
  for (auto& t : threads) t.join();
}

Stored make_stored(const ParamSpec& spec, Axes cutting, Axes storage, Axes replicas,
                   const Init& init) {
  const auto& mesh = current_mesh();
  const auto num_dims = static_cast<std::int64_t>(spec.shape.size());
  MOESH_CHECK(!spec.name.empty(), ErrorKind::config,
              "a parameter has no name; its name is the stream of its random numbers");
  MOESH_CHECK(num_dims >= 1, ErrorKind::config, "parameter '", spec.name,
              "' has no dimension; give a scalar the shape {1}");
  MOESH_CHECK(spec.storage_dim >= 0 && spec.storage_dim < num_dims, ErrorKind::config,
              "parameter '", spec.name, "': storage_dim ", spec.storage_dim, " of a tensor with ",
              num_dims, " dimensions");
  Stored w{.spec = spec, .cutting = cutting, .storage = storage, .replicas = replicas};
  w.compute = {std::vector<std::int64_t>(spec.shape.size(), 0), spec.shape};
  Axes seen = none;
  for (const auto& [axis, dim] : spec.cuts) {
    MOESH_CHECK(contains(cutting, axis) && dim >= 0 && dim < num_dims, ErrorKind::config,
                "parameter '", spec.name, "' is cut on ", to_string(axis), " along dimension ", dim,
                ": its layout is cut on ", to_string(cutting), " and it has ", num_dims,
                " dimensions");
    cut(w.compute, dim, mesh.size(axis), mesh.coordinate(axis));
    seen = seen | axis;
  }
  MOESH_CHECK(seen == cutting, ErrorKind::config, "parameter '", spec.name,
              "': its layout is cut on ", to_string(cutting), " and .cuts names ", to_string(seen),
              "; name the dimension of each, as in .cuts = {{tp, 0}}");
  w.shard = w.compute;
  w.storage_sizes = cut(w.shard, spec.storage_dim, mesh.size(storage), mesh.coordinate(storage));
  w.value = make_values(spec, w.shard, init).requires_grad_(true);
  if (!spec.trained) freeze(w);
  return w;
}

void freeze(Stored& w) {
  w.spec.trained = false;
  w.value = w.value.detach().to(w.spec.at_rest());
  w.copy = nullptr, w.float8 = nullptr;
}

void quantize(Stored& w, const kernels::Quantization& how, double deviation) {
  w.quantized = std::make_shared<kernels::QuantizedBox>(
      kernels::quantize(how, w.value.detach(), w.shard.start, w.spec.shape, deviation));
  w.spec.trained = false;
  w.value = at::empty({0}, w.value.options().dtype(w.spec.at_rest()));
  w.copy = nullptr, w.float8 = nullptr;
}

at::Tensor numbers(const Stored& w) {
  return w.quantized ? kernels::dequantize(*w.quantized, w.spec.of_work()) : w.value.detach();
}

at::Tensor gradient(const Stored& w) {
  const at::Tensor& grad = w.value.grad();
  return grad.defined() ? kernels::cast(grad, w.spec.dtype) : grad;
}

std::int64_t num_bytes_at_rest(const Stored& w) {
  return w.quantized ? w.quantized->num_bytes() : static_cast<std::int64_t>(w.value.nbytes());
}

void keep_copy(Stored& w) {
  if (w.spec.of_work() == w.spec.at_rest()) return;
  if (w.spec.float8_tile > 0 && current_mesh().group(w.storage)->size() == 1 &&
      kernels::takes_float8_weight(w.value.detach(), w.spec.of_work(), w.spec.float8_tile)) {
    w.float8 = std::make_shared<Float8Copy>(kernels::empty_weight_codes(w.value.detach()), -1);
    return;
  }
  w.copy = std::make_shared<ComputeCopy>();
  w.copy->value = at::empty(w.shard.length, w.value.detach().options().dtype(w.spec.of_work()));
  w.copy->version = -1;
}

at::Tensor current_copy(const Stored& w) {
  if (!w.copy) return {};
  const auto version = static_cast<std::int64_t>(w.value._version());
  if (w.copy->version != version) {
    const at::NoGradGuard no_grad;
    // Through an alias with a version of its own: autograd may hold it from a forward before.
    kernels::cast_into(w.copy->value.variable_data(), w.value.detach());
    w.copy->version = version;
  }
  return w.copy->value;
}

void forget_codes(const Stored& w) {
  if (w.float8) w.float8->version = -1;
}

// What `use` gives of a weight whose codes are all that is read.
at::Tensor renew_codes(const Stored& w) {
  const auto version = static_cast<std::int64_t>(w.value._version());
  if (w.float8->version != version) kernels::write_weight_codes(w.float8->codes, w.value.detach());
  w.float8->version = version;
  return not_computed(w.compute.length, w.value.options().dtype(w.spec.of_work()));
}

void note_copy_written(const Stored& w) {
  if (w.copy) w.copy->version = static_cast<std::int64_t>(w.value._version());
}

at::Tensor use(const Stored& w, Axes replicas, LateGradient late) {
  const auto& mesh = current_mesh();
  const auto storage_group = mesh.group(w.storage);
  const auto replica_group = mesh.group(replicas);
  // Also where ranks that have it do the same work with it, and need no sum of their gradients.
  mesh.group(w.replicas)
      ->expect_same(w.quantized ? w.quantized->codes : w.value.detach(), w.spec.name);
  const auto same_work = mesh.group(without(w.replicas, replicas));
  const at::Tensor out = storage_group->size() > 1 ? gather_shards(w, storage_group)
                         : w.float8                ? renew_codes(w)
                                                   : cast_value(w);
  const StepState* step = StepState::current();
  if (step && step->float8_counts && w.spec.float8_tile > 0)
    step->float8_counts->add_weight(w, out);
  const auto later = step && late == LateGradient::may_be ? step->weights_later : nullptr;
  return attach(
      w.value, out,
      [term = GradientTerm{.leaf = w.value,
                           .grad = {},
                           .dtype = w.spec.dtype,
                           .storage = storage_group,
                           .replicas = replica_group,
                           .same_work = same_work,
                           .dim = w.spec.storage_dim,
                           .sizes = w.storage_sizes,
                           .name = w.spec.name},
       later, reductions = step ? step->reductions : nullptr](const at::Tensor& grad) {
        GradientTerm mine = term;
        mine.grad = grad;
        if (!later || !later->is_open()) return reduce(mine, reductions);
        later->add([mine, reductions] { reduce_to_leaf(mine, reductions); });
        return at::Tensor();
      },
      later);
}

at::Tensor gather(const Stored& w, const at::Tensor& shard) {
  MOESH_CHECK(shard.defined(), ErrorKind::config, "parameter '", w.spec.name,
              "' has no gradient: no backward has reached it");
  const at::NoGradGuard no_grad;
  const auto group = current_mesh().group(w.storage);
  return group->size() == 1
             ? shard
             : run(Step::all_gather, shard, *group, w.spec.storage_dim, w.storage_sizes);
}

}  // namespace raw

Region shard_on(const Stored& w, int rank) {
  const auto& mesh = current_mesh();
  Region region{std::vector<std::int64_t>(w.spec.shape.size(), 0), w.spec.shape};
  for (const auto& [axis, dim] : w.spec.cuts)
    raw::cut(region, dim, mesh.size(axis), mesh.coordinate(rank, axis));
  raw::cut(region, w.spec.storage_dim, mesh.size(w.storage), mesh.coordinate(rank, w.storage));
  return region;
}

}  // namespace moesh
