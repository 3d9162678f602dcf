#include "moesh/verify/parity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <string_view>

#include "moesh/base/error.h"

namespace moesh::verify {
namespace {

double inner_product(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) * b.to(at::kDouble)).sum().item<double>();
}

double ratio_of(double error, double allowed) {
  return allowed > 0 ? error / allowed : error > 0 ? INFINITY : 0;
}

double root_mean_square(const at::Tensor& x) {
  return size_of(x) / std::sqrt(std::max<double>(1, static_cast<double>(x.numel())));
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

std::string gradient_name(const std::string& of, std::int64_t step) {
  return (step > 0 ? "step " + std::to_string(step) + " d(" : "d(") + of + ")";
}

bool is_gradient(const std::string& name) {
  return name.starts_with("d(") ||
         (name.starts_with("step ") && name.find(" d(") != std::string::npos);
}

double size_of(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.to(at::kDouble).norm().item<double>();
}

std::int64_t step_of(const std::string& name) {
  constexpr std::string_view kStep = "step ";
  std::int64_t step = 0;
  if (name.starts_with(kStep))
    std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
  return step;
}

double typical_gradient(const NamedTensors& run, std::int64_t step) {
  struct Mean {
    double squares = 0;
    int count = 0;
    void add(double square) { squares += square, ++count; }
    double root() const { return std::sqrt(squares / std::max(1, count)); }
  } own, all;
  for (const auto& [name, value] : run.tensors) {
    if (!is_gradient(name)) continue;
    const double square = std::pow(size_of(value), 2);
    all.add(square);
    if (step_of(name) == step) own.add(square);
  }
  return all.root() < own.root() ? all.root() : own.root();  // also where the first is NaN
}

double Mismatch::ratio() const { return ratio_of(error, allowed); }

std::string Mismatch::describe(const MeshShape& mesh) const {
  std::ostringstream os;
  os << tensor << ": |delta| = " << error << (along ? " along the reference" : "") << ", allowed "
     << allowed << "; worst on rank " << worst_rank;
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

double Findings::Finding::ratio() const { return ratio_of(error, allowed); }

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
  if (weight != reference_.weight.end()) {
    const at::Tensor factor = mine(weight->second);
    const auto is_finite = [](const at::Tensor& t) { return t.isfinite().all().item<bool>(); };
    // Nothing is known of the values. A mesh may overflow where one rank does, or a run nearby.
    if (!factor.any().item<bool>() &&
        !(is_finite(whole) && (noise == reference_.noise.end() || is_finite(noise->second))))
      return {};
    expected = expected * factor, found = found * factor;
  }
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
    // The error of a tensor that does not move at all is its size.
    if (const double size = std::sqrt(square); tensor.movement && size > 3 * rounding)
      allowed = std::min(allowed, 0.9 * size);
  }
  // Nothing is known of a reference that is not finite: no value may pass for it.
  if (tensor.exact || !std::isfinite(allowed)) allowed = 0;
  Finding of_all{.error = std::isfinite(error) ? error : INFINITY,
                 .allowed = allowed,
                 .factor = square > 0 ? inner_product(found, expected) / square : 1};
  const auto off = reference_.off.find(tensor.name);
  if (off == reference_.off.end() || static_cast<double>(expected.numel()) < kFewElements ||
      !(square > 0))
    return of_all;
  // Noise of many elements is hardly along the reference, where a wrong weight shows.
  double rounding = size_of(mine(noise->second) * expected);
  for (const at::Tensor& one : off->second)
    rounding = std::max(rounding, std::abs(inner_product(mine(one), expected)));
  const double size = std::sqrt(square);
  Finding part = of_all;
  part.error = std::abs(of_all.factor - 1) * size, part.along = 1;
  part.allowed = std::min(allowed, tolerance_ * size_of(whole) + kNoiseAllowed * rounding / size);
  part.vague = of_all.vague = part.allowed > size / 2 ? 1 : 0;
  return part.ratio() > of_all.ratio() ? part : of_all;
}

Findings::Finding Findings::judge(const RankTensor& tensor, int rank) const {
  const auto sizes = tensor.place(reference_[tensor.name]).sizes().vec();
  const at::Tensor value = tensor.value.to(at::kDouble);
  MOESH_CHECK(value.sizes() == sizes, "parity: rank ", rank, " has ", value.sizes(), " of '",
              tensor.name, "', where the reference has ", sizes);
  if ((tensor.by_expert || (tensor.movement && tensor.movement->by_expert)) && value.size(0) > 0) {
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
    found.position =
        static_cast<double>(position_at(tensor.tokens->positions, worst % delta.size(-2)));
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
      m.error = f.error, m.allowed = f.allowed, m.along = f.along != 0,
      m.worst_rank = static_cast<int>(r);
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

std::int64_t Findings::num_vague() const {
  const std::lock_guard lock(mutex_);
  std::int64_t count = 0;
  for (size_t i = 0; i < reference_.tensors.size(); ++i)
    count +=
        std::ranges::any_of(by_rank_, [i](const auto& of_rank) { return of_rank[i].vague != 0; });
  return count;
}

Findings::Worst Findings::worst() const {
  const std::lock_guard lock(mutex_);
  Worst worst;
  for (const Mismatch& m : collect())
    if (m.ratio() > worst.ratio) worst = {.ratio = m.ratio(), .tensor = m.tensor};
  return worst;
}

namespace {

// The tokens in which two choices differ, and by how much the choice scores differ there.
void note_flips(const nn::Choice& c, const at::Tensor& replayed_NK, RoutingRecord& record) {
  const at::Tensor own = std::get<0>(c.experts_NK.sort(-1)),
                   other = std::get<0>(replayed_NK.sort(-1));
  const at::Tensor differs = own.ne(other).any(-1);
  const auto count = differs.sum().item<std::int64_t>();
  if (count == 0) return;
  record.num_flipped += count;
  const at::Tensor worst_own = std::get<0>(c.scores_NE.gather(1, c.experts_NK).min(-1));
  const at::Tensor worst_other = std::get<0>(c.scores_NE.gather(1, replayed_NK).min(-1));
  // Between groups of experts the scores of those left out are infinite, and say nothing.
  const at::Tensor margins = (worst_own - worst_other).abs().masked_select(differs);
  const double margin =
      margins.masked_fill(margins.isfinite().logical_not(), 0).max().item<double>();
  double seen = record.largest_margin;
  while (margin > seen && !record.largest_margin.compare_exchange_weak(seen, margin)) {
  }
}

}  // namespace

RoutingRecord::RoutingRecord(std::int64_t num_layers, std::int64_t num_tokens, std::int64_t top_k)
    : StepRouting{.experts_LTK = at::full({num_layers, num_tokens, top_k}, -1, at::kLong),
                  .for_balance_LTK = at::full({num_layers, num_tokens, top_k}, -1, at::kLong)} {}

void VerifyProbe::on_input(const at::Tensor& x_BLD) {
  inputs.push_back(x_BLD);
  if (x_BLD.requires_grad()) x_BLD.retain_grad();
}

at::Tensor VerifyProbe::on_choice(const nn::Choice& c) {
  at::Tensor experts_NK = RoutingProbe::on_choice(c);
  if (flips && c.pass != nn::Pass::recompute && !c.for_balance) note_flips(c, experts_NK, *flips);
  return experts_NK;
}

}  // namespace moesh::verify
