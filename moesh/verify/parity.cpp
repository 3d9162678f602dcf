#include "moesh/verify/parity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "moesh/base/error.h"

namespace moesh::verify {
namespace {

// Fewer may hardly have a gradient, and rounding decides where they go.
constexpr std::int64_t kFewElements = 16;

double size_of(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.to(at::kDouble).norm().item<double>();
}
double inner_product(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) * b.to(at::kDouble)).sum().item<double>();
}

using NamedList = std::vector<std::pair<std::string, at::Tensor>>;

const at::Tensor* find(const NamedList& list, const std::string& name) {
  const auto found =
      std::ranges::find_if(list, [&](const auto& entry) { return entry.first == name; });
  return found == list.end() ? nullptr : &found->second;
}

// The smallest |ref| that a gradient is measured against: some are exactly zero.
double gradient_floor(const NamedTensors& reference) {
  double squares = 0;
  int count = 0;
  for (const auto& [name, value] : reference.tensors)
    if (name.starts_with("d(")) squares += std::pow(size_of(value), 2), ++count;
  return 1e-3 * std::sqrt(squares) / std::sqrt(std::max(1, count));
}

// How much of a gradient is rounding in the reference, as a mean over all of them: of a small one
// alone its own says little, and a mesh may round it worse.
double gradient_rounding(const NamedTensors& reference, double floor) {
  double squares = 0;
  int count = 0;
  for (const auto& [name, wide] : reference.wide)
    if (name.starts_with("d(")) {
      const at::Tensor value = reference[name].to(at::kDouble);
      squares += std::pow(size_of(value - wide) / std::max(size_of(value), floor), 2), ++count;
    }
  return std::sqrt(squares / std::max(1, count));
}

// How much an element of a movement counts: by its gradient, and by a hundredth of the mean
// besides, so that elements that only decay count, too.
at::Tensor movement_weight(const at::Tensor& gradient, double mean) {
  return mean > 0 ? gradient.to(at::kDouble).abs() + 0.01 * mean
                  : at::ones(gradient.sizes(), gradient.options().dtype(at::kDouble));
}

double typical_movement(const at::Tensor& moved, const at::Tensor& gradient, double mean) {
  return size_of(moved.to(at::kDouble) * movement_weight(gradient, mean)) /
         std::sqrt(std::max<double>(1, static_cast<double>(moved.numel())));
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
  if (const at::Tensor* found = find(tensors, name)) return *found;
  throw Error(ErrorKind::internal, "the reference has no tensor '" + name + "'");
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
      floor_(gradient_floor(reference)),
      gradient_rounding_(gradient_rounding(reference, floor_)),
      by_rank_(static_cast<size_t>(num_ranks), std::vector<Finding>(reference.tensors.size())) {
  for (size_t i = 0; i < reference.tensors.size(); ++i)
    places_.emplace(reference.tensors[i].first, i);
}

double Findings::Finding::ratio() const {
  return allowed > 0 ? error / allowed : error > 0 ? INFINITY : 0;
}

// The worst of the units that are judged by themselves.
Findings::Finding Findings::judge_movement(const RankTensor& tensor) const {
  const Movement& movement = *tensor.movement;
  const auto mine = [&](const at::Tensor& whole) { return tensor.place(whole).to(at::kDouble); };
  const at::Tensor* gradient = find(reference_.gradients, tensor.name);
  const at::Tensor* wide = find(reference_.wide, tensor.name);
  MOESH_CHECK(gradient, "parity: the reference has no gradient for '", tensor.name, "'");
  const double mean = size_of(*gradient) / std::sqrt(std::max<double>(1, gradient->numel()));
  const at::Tensor weight = movement_weight(tensor.place(*gradient), mean);
  const at::Tensor expected = mine(reference_[tensor.name]) * weight,
                   value = tensor.value.to(at::kDouble) * weight;
  // What an element moves in the mean. One more is counted with each unit: where a shard is a few
  // elements with hardly a gradient, rounding decides where they go.
  const double typical = typical_movement(reference_[tensor.name], *gradient, mean);
  const at::Tensor rounding = wide ? expected - mine(*wide) * weight : at::Tensor();
  const auto judge_unit = [&](const auto& of) {
    const double size = size_of(of(expected)), error = size_of(of(value) - of(expected));
    const double rounded = wide ? std::min(4 * size_of(of(rounding)), size / 2) : 0;
    const double scale = std::hypot(size, typical);
    const bool known = std::isfinite(scale) && std::isfinite(rounded);
    double allowed = known ? std::max(movement.tolerance * scale, rounded) : 0;
    // What does not move at all is wrong by its size, however little that is beside the others.
    if (of(expected).numel() >= kFewElements) allowed = std::min(allowed, 0.9 * size);
    return Finding{.error = std::isfinite(error) ? error : INFINITY,
                   .allowed = allowed,
                   .factor = size > 0 ? inner_product(of(value), of(expected)) / (size * size) : 1};
  };
  if (!movement.by_expert) return judge_unit([](const at::Tensor& t) { return t; });
  Finding worst;
  for (std::int64_t e = 0; e < value.size(0); ++e) {
    const Finding found = judge_unit([&](const at::Tensor& t) { return t[e]; });
    if (e == 0 || found.ratio() > worst.ratio()) worst = found;
  }
  return worst;
}

Findings::Finding Findings::judge(const RankTensor& tensor, int rank) const {
  const at::Tensor& whole = reference_[tensor.name];
  const at::Tensor expected = tensor.place(whole).to(at::kDouble),
                   value = tensor.value.to(at::kDouble);
  MOESH_CHECK(value.sizes() == expected.sizes(), "parity: rank ", rank, " has ", value.sizes(),
              " of '", tensor.name, "', where the reference has ", expected.sizes());
  if (tensor.movement) return judge_movement(tensor);
  const at::Tensor delta = value - expected;
  const bool finite = delta.numel() == 0 || at::isfinite(delta).all().item<bool>();
  const double size =
      std::max(size_of(whole), tensor.name.starts_with("d(") ? floor_ : tensor.floor);
  const double square = inner_product(expected, expected);
  // Of a reference that is not finite nothing is known: no value may pass for it.
  const auto allowed = [&](double s) {
    return tensor.exact || !std::isfinite(s) ? 0 : tolerance_ * s;
  };
  Finding found{.error = finite ? size_of(delta) : INFINITY,
                .allowed = allowed(size),
                .factor = square > 0 ? inner_product(value, expected) / square : 1};
  if (const at::Tensor* wide = find(reference_.wide, tensor.name);
      wide && !tensor.exact && std::isfinite(size)) {
    found.allowed = std::max(found.allowed, 4 * size_of(whole.to(at::kDouble) - *wide));
    // Of what this rank holds, and of one element more, as a few may have hardly a gradient.
    if (tensor.name.starts_with("d(")) {
      const double own =
          std::hypot(size_of(expected), size / std::sqrt(std::max<double>(1, whole.numel())));
      found.allowed = std::max(found.allowed, std::min(4 * gradient_rounding_, 0.25) * own);
    }
  }
  if (tensor.tokens && finite && delta.numel() > 0) {
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
