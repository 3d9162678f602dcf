#include "moesh/verify/parity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "moesh/base/error.h"

namespace moesh::verify {
namespace {

constexpr double kFewElements = 16;

double size_of(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.to(at::kDouble).norm().item<double>();
}
double inner_product(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) * b.to(at::kDouble)).sum().item<double>();
}

bool is_gradient(const std::string& name) { return name.starts_with("d("); }
bool is_gradient_norm(const std::string& name) { return name.ends_with(" gradient norm"); }

// What a gradient has in the mean.
double typical_gradient(const NamedTensors& reference) {
  double squares = 0;
  int count = 0;
  for (const auto& [name, value] : reference.tensors)
    if (is_gradient(name)) squares += std::pow(size_of(value), 2), ++count;
  return std::sqrt(squares / std::max(1, count));
}

// By how much a dtype rounds 1 at most.
double roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return 0x1p-53;
    case at::kFloat: return 0x1p-24;
    case at::kHalf: return 0x1p-11;
    default: return 0x1p-8;
  }
}

double root_mean_square(const at::Tensor& x) {
  return size_of(x) / std::sqrt(std::max<double>(1, static_cast<double>(x.numel())));
}

// For each row (index of dim 0), or for a whole vector.
at::Tensor root_mean_square_of_rows(const at::Tensor& x) {
  if (x.numel() == 0) return x;
  std::vector<std::int64_t> dims(static_cast<size_t>(x.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  if (x.dim() >= 2) dims.erase(dims.begin());
  return x.square().mean(dims, /*keepdim=*/true).sqrt();
}

// Where every element of its row is zero: of a single element zero may be rounding.
at::Tensor is_empty_row(const at::Tensor& t) {
  if (t.dim() < 2 || t.numel() == 0) return t.eq(0).all();
  std::vector<std::int64_t> rows(static_cast<size_t>(t.dim()), 1);
  rows[0] = t.size(0);
  return t.eq(0).flatten(1).all(1).reshape(rows);
}

// The median over the gradients of how much of each is noise.
double typical_noise(const NamedTensors& run) {
  std::vector<double> all;
  for (const auto& [name, noise] : run.noise)
    if (const double size = size_of(run[name]); is_gradient(name) && size > 0)
      all.push_back(size_of(noise) / size);
  if (all.empty()) return 0;
  std::ranges::nth_element(all, all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2));
  return all[all.size() / 2];
}

// The mean of the factors over the ranks of each axis, where it is the same for every line of ranks
// along that axis. A reduction left out over an axis gives exactly 1 / size there, one too many
// gives size.
std::map<std::string, double> axis_means(const std::vector<double>& factors,
                                         const MeshShape& shape) {
  std::map<std::string, double> means;
  for (Axes axis : {dp_replicate, dp_shard, cp, tp, efsdp, ep, etp}) {
    const int size = shape.size(axis);
    if (size == 1) continue;
    std::map<int, double> lines;
    for (size_t r = 0; r < factors.size(); ++r)
      if (!std::isnan(factors[r]))
        lines[shape.group_number(static_cast<int>(r), axis)] += factors[r] / size;
    if (lines.empty()) continue;
    const auto [low, high] =
        std::minmax_element(lines.begin(), lines.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    if (high->second - low->second <= 1e-6 * std::abs(high->second))
      means[to_string(axis)] = high->second;
  }
  return means;
}

}  // namespace

at::Tensor slice(at::Tensor x, const Region& r) {
  for (size_t d = 0; d < r.start.size(); ++d)
    x = x.narrow(static_cast<std::int64_t>(d), r.start[d], r.length[d]);
  return x;
}

const at::Tensor& NamedTensors::operator[](const std::string& name) const {
  const auto found =
      std::ranges::find_if(tensors, [&](const auto& entry) { return entry.first == name; });
  if (found != tensors.end()) return found->second;
  throw Error(ErrorKind::internal, "the reference has no tensor '" + name + "'");
}

void set_noise(NamedTensors& run, at::ScalarType dtype, const NamedTensors& other,
               at::ScalarType other_dtype) {
  const double scale = std::min(1.0, roundoff(dtype) / roundoff(other_dtype));
  const auto distance = [&](const at::Tensor& a, const at::Tensor& b) {
    return (a.to(at::kDouble) - b.to(at::kDouble)).abs_() * scale;
  };
  for (const auto& [name, value] : run.tensors) run.noise[name] = distance(value, other[name]);
  const double typical = typical_noise(run), gradient = typical_gradient(run);
  // One rank may find a zero that a mesh, which sums in another order, misses by some roundings.
  constexpr double kRoundings = 4;
  const auto at_least = [&](const at::Tensor& noise, const at::Tensor& value) {
    const double of_zero =
        kRoundings * roundoff(dtype) * gradient / std::sqrt(std::max<double>(1, noise.numel()));
    return at::maximum(noise, typical * value.to(at::kDouble).abs()).clamp_min(of_zero);
  };
  for (const auto& [name, value] : run.tensors) {
    at::Tensor& noise = run.noise[name];
    noise = is_gradient(name) || is_gradient_norm(name)
                ? at_least(noise, value)
                : at::maximum(noise, 2 * roundoff(dtype) * value.to(at::kDouble).abs());
  }
  for (const auto& [name, gradients] : run.gradients) {
    const std::string param = name.substr(name.rfind(' ') + 1);
    const at::Tensor stored = run[param].to(at::kDouble).abs() * roundoff(run[param].scalar_type()),
                     moved = run[name].to(at::kDouble);
    // A step goes by the sign of its gradient, or by a quotient of two: the smallest counts.
    at::Tensor g = at::full_like(moved, INFINITY), measured = at::zeros_like(moved);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor size = gradients[i].to(at::kDouble).abs();
      g = at::where(is_empty_row(size), g, at::minimum(g, size));
      measured = at::hypot(measured, distance(gradients[i], other.gradients.at(name)[i]));
    }
    g = at::where(g.isinf(), 0, g);
    const at::Tensor noise = at_least(at::maximum(measured, root_mean_square_of_rows(measured)), g);
    // Where the whole gradient is noise, a zero of it is noise as well.
    const bool is_known = size_of(g) > kNoiseAllowed * size_of(noise);
    const at::Tensor has_none =
        is_known ? is_empty_row(g + measured) : at::zeros_like(g, at::kBool);
    // An element may have moved little because its steps cancel.
    const at::Tensor movement = at::hypot(moved, at::full_like(moved, root_mean_square(moved)));
    const double as_it_is = gradient > 0 ? gradient : 1;
    run.weight[name] = at::where(has_none, as_it_is, g);
    run.noise[name] =
        at::where(has_none, as_it_is * stored, at::hypot(movement * noise, g * stored));
    run.noise[param] =
        at::where(has_none, stored, at::hypot(movement * (noise / g).clamp_max(1), stored));
  }
}

std::string Mismatch::describe(const MeshShape& mesh) const {
  std::ostringstream os;
  os << tensor << ": |delta| = " << error << ", allowed " << allowed << "; worst on rank "
     << worst_rank;
  if (worst_batch >= 0) os << " at batch " << worst_batch << ", position " << worst_position;
  os << "; factor by rank";
  for (double f : factors) os << ' ' << (std::isnan(f) ? "-" : detail::concat(f));
  for (const auto& [axis, mean] : means) os << "; mean over " << axis << ' ' << mean;
  os << " (mesh " << mesh.describe() << ")";
  return os.str();
}

Findings::Findings(int num_ranks, const NamedTensors& reference, double tolerance)
    : num_ranks_(num_ranks),
      reference_(reference),
      tolerance_(tolerance),
      floor_(1e-3 * typical_gradient(reference)),
      by_rank_(static_cast<size_t>(num_ranks), std::vector<Finding>(reference.tensors.size())) {
  for (size_t i = 0; i < reference.tensors.size(); ++i)
    places_.emplace(reference.tensors[i].first, i);
}

double Findings::Finding::ratio() const {
  return allowed > 0 ? error / allowed : error > 0 ? INFINITY : 0;
}

Findings::Finding Findings::judge_unit(const RankTensor& tensor,
                                       const std::function<at::Tensor(at::Tensor)>& unit,
                                       const at::Tensor& value) const {
  const auto mine = [&](const at::Tensor& whole) {
    return unit(tensor.place(whole)).to(at::kDouble);
  };
  const at::Tensor& whole = reference_[tensor.name];
  const auto weight = reference_.weight.find(tensor.name),
             noise = reference_.noise.find(tensor.name);
  at::Tensor expected = mine(whole), found = unit(value);
  if (weight != reference_.weight.end())
    expected = expected * mine(weight->second), found = found * mine(weight->second);
  const double error = size_of(found - expected), square = inner_product(expected, expected);
  double allowed =
      tolerance_ * std::max(size_of(whole), is_gradient(tensor.name) ? floor_ : tensor.floor);
  if (noise != reference_.noise.end()) {
    double rounding = size_of(mine(noise->second));
    const auto count = static_cast<double>(expected.numel());
    // The noise of a few may be small by chance.
    if (count < kFewElements)
      rounding = std::max(rounding, root_mean_square(noise->second) * std::sqrt(count));
    allowed += kNoiseAllowed * rounding;
    // What does not move at all is wrong by its size.
    if (const double size = std::sqrt(square); tensor.movement && size > 3 * rounding)
      allowed = std::min(allowed, 0.9 * size);
  }
  // Nothing is known of a reference that is not finite: no value may pass for it.
  if (tensor.exact || !std::isfinite(allowed)) allowed = 0;
  return {.error = std::isfinite(error) ? error : INFINITY,
          .allowed = allowed,
          .factor = square > 0 ? inner_product(found, expected) / square : 1};
}

Findings::Finding Findings::judge(const RankTensor& tensor, int rank) const {
  const auto sizes = tensor.place(reference_[tensor.name]).sizes().vec();
  const at::Tensor value = tensor.value.to(at::kDouble);
  MOESH_CHECK(value.sizes() == sizes, "parity: rank ", rank, " has ", value.sizes(), " of '",
              tensor.name, "', where the reference has ", sizes);
  if (tensor.movement && tensor.movement->by_expert && value.size(0) > 0) {
    Finding worst;
    for (std::int64_t e = 0; e < value.size(0); ++e) {
      const Finding found = judge_unit(tensor, [e](const at::Tensor& t) { return t[e]; }, value);
      if (e == 0 || found.ratio() > worst.ratio()) worst = found;
    }
    return worst;
  }
  Finding found = judge_unit(tensor, [](const at::Tensor& t) { return t; }, value);
  if (tensor.tokens && std::isfinite(found.error) && value.numel() > 0) {
    const at::Tensor delta = value - tensor.place(reference_[tensor.name]).to(at::kDouble);
    const std::int64_t worst = delta.abs().sum(-1).argmax().item<std::int64_t>();
    const std::int64_t sequence = worst / delta.size(-2);
    found.batch = static_cast<double>(tensor.tokens->batch + sequence +
                                      sequence / delta.size(-3) * tensor.tokens->skipped);
    found.position = static_cast<double>(tensor.tokens->position + worst % delta.size(-2));
  }
  return found;
}

void Findings::compare(const RankTensor& tensor, int rank) {
  Finding found = judge(tensor, rank);
  found.compared = 1;
  const std::lock_guard lock(mutex_);
  Finding& mine = by_rank_[static_cast<size_t>(rank)][places_.at(tensor.name)];
  MOESH_CHECK(mine.compared == 0, "parity: rank ", rank, " compares '", tensor.name, "' twice");
  mine = found;
}

void Findings::exchange(comm::Group& world, at::Device device) {
  constexpr std::int64_t kFields = sizeof(Finding) / sizeof(double);
  const auto rank = static_cast<size_t>(world.rank());
  at::Tensor mine;
  {
    const std::lock_guard lock(mutex_);
    mine =
        at::from_blob(by_rank_[rank].data(),
                      {1, static_cast<std::int64_t>(by_rank_[rank].size()) * kFields}, at::kDouble)
            .clone();
  }
  const at::Tensor all =
      world.all_gather(mine.to(device), std::vector<std::int64_t>(by_rank_.size(), 1))
          .cpu()
          .contiguous();
  const std::lock_guard lock(mutex_);
  for (size_t r = 0; r < by_rank_.size(); ++r) {
    const auto* from =
        reinterpret_cast<const Finding*>(all[static_cast<std::int64_t>(r)].data_ptr<double>());
    by_rank_[r].assign(from, from + by_rank_[r].size());
  }
}

std::vector<Mismatch> Findings::collect() const {
  std::vector<Mismatch> all;
  for (size_t i = 0; i < reference_.tensors.size(); ++i) {
    Mismatch m{.tensor = reference_.tensors[i].first,
               .factors = std::vector<double>(by_rank_.size(), NAN)};
    double worst = -1;
    for (size_t r = 0; r < by_rank_.size(); ++r) {
      const Finding& f = by_rank_[r][i];
      if (f.compared == 0) continue;
      m.factors[r] = f.factor;
      if (f.ratio() <= worst) continue;
      worst = f.ratio();
      m.error = f.error, m.allowed = f.allowed, m.worst_rank = static_cast<int>(r);
      m.worst_batch = static_cast<std::int64_t>(f.batch),
      m.worst_position = static_cast<std::int64_t>(f.position);
    }
    all.push_back(std::move(m));
  }
  return all;
}

std::string Findings::left_out(std::size_t place, const MeshShape& shape) const {
  // All ranks of a stage have it, or none.
  const int of_stage = num_ranks_ / shape.pp;
  std::vector<int> counts(static_cast<size_t>(shape.pp));
  int count = 0;
  for (int r = 0; r < num_ranks_; ++r)
    if (by_rank_[static_cast<size_t>(r)][place].compared != 0)
      ++counts[static_cast<size_t>(shape.coordinate(r, pp))], ++count;
  const bool is_whole =
      std::all_of(counts.begin(), counts.end(), [&](int n) { return n == 0 || n == of_stage; });
  if (count > 0 && is_whole) return "";
  return detail::concat(" (compared on ", count, " of ", count == 0 ? num_ranks_ : of_stage,
                        " ranks)");
}

std::vector<Mismatch> Findings::mismatches(const MeshShape& shape) const {
  const std::lock_guard lock(mutex_);
  std::vector<Mismatch> found;
  for (size_t i = 0; i < reference_.tensors.size(); ++i)
    if (const std::string why = left_out(i, shape); !why.empty())
      found.push_back({.tensor = reference_.tensors[i].first + why, .error = INFINITY});
  for (Mismatch& m : collect()) {
    if (m.error <= m.allowed) continue;
    m.means = axis_means(m.factors, shape);
    found.push_back(std::move(m));
  }
  return found;
}

Findings::Worst Findings::worst() const {
  const std::lock_guard lock(mutex_);
  Worst worst;
  for (const Mismatch& m : collect())
    if (m.allowed > 0 && m.error / m.allowed > worst.ratio)
      worst = {.ratio = m.error / m.allowed, .tensor = m.tensor};
  return worst;
}

}  // namespace moesh::verify
