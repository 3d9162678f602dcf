#include "moesh/verify/parity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "moesh/base/error.h"

namespace moesh::verify {
namespace {

double size_of(const at::Tensor& x) {
  return x.numel() == 0 ? 0 : x.to(at::kDouble).norm().item<double>();
}
double inner_product(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) * b.to(at::kDouble)).sum().item<double>();
}

// The smallest |ref| that a gradient is measured against: some are exactly zero.
double gradient_floor(const NamedTensors& reference) {
  double squares = 0;
  int count = 0;
  for (const auto& [name, value] : reference.tensors)
    if (name.starts_with("d(")) squares += std::pow(size_of(value), 2), ++count;
  return 1e-3 * std::sqrt(squares) / std::sqrt(std::max(1, count));
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
      lines[shape.group_number(static_cast<int>(r), axis)] += factors[r] / size;
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
  for (const auto& [key, value] : tensors)
    if (key == name) return value;
  throw Error(ErrorKind::internal, "the reference has no tensor '" + name + "'");
}

std::string Mismatch::describe(const MeshShape& mesh) const {
  std::ostringstream os;
  os << tensor << ": |delta| = " << error << ", allowed " << allowed << "; worst on rank "
     << worst_rank;
  if (worst_batch >= 0) os << " at batch " << worst_batch << ", position " << worst_position;
  os << "; factor by rank";
  for (double f : factors) os << ' ' << f;
  for (const auto& [axis, mean] : means) os << "; mean over " << axis << ' ' << mean;
  os << " (mesh " << mesh.describe() << ")";
  return os.str();
}

Findings::Findings(int num_ranks, const NamedTensors& reference, double tolerance)
    : num_ranks_(num_ranks),
      reference_(reference),
      tolerance_(tolerance),
      floor_(gradient_floor(reference)),
      by_rank_(static_cast<size_t>(num_ranks)) {}

void Findings::compare(const RankTensor& tensor, int rank) {
  const at::Tensor& whole = reference_[tensor.name];
  const at::Tensor expected = tensor.place(whole).to(at::kDouble),
                   value = tensor.value.to(at::kDouble);
  MOESH_CHECK(value.sizes() == expected.sizes(), "parity: rank ", rank, " has ", value.sizes(),
              " of '", tensor.name, "', where the reference has ", expected.sizes());
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
  for (const auto& [name, wide] : reference_.wide)
    if (name == tensor.name && !tensor.exact && std::isfinite(size))
      found.allowed = std::max(found.allowed, 4 * size_of(whole.to(at::kDouble) - wide));
  if (tensor.tokens && finite && delta.numel() > 0) {
    const std::int64_t worst = delta.abs().sum(-1).argmax().item<std::int64_t>();
    found.batch = static_cast<double>(tensor.tokens->batch + worst / delta.size(1));
    found.position = static_cast<double>(tensor.tokens->position + worst % delta.size(1));
  }
  const std::lock_guard lock(mutex_);
  auto& mine = by_rank_[static_cast<size_t>(rank)];
  if (mine.size() == names_.size()) names_.push_back(tensor.name);
  MOESH_CHECK(names_[mine.size()] == tensor.name, "parity: rank ", rank, " compares '", tensor.name,
              "' where others compare '", names_[mine.size()], "'");
  mine.push_back(found);
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
    if (!by_rank_[r].empty()) continue;  // a rank of this process
    const auto* from =
        reinterpret_cast<const Finding*>(all[static_cast<std::int64_t>(r)].data_ptr<double>());
    by_rank_[r].assign(from, from + all.size(1) / kFields);
  }
}

std::vector<Mismatch> Findings::collect() const {
  std::vector<Mismatch> all;
  for (size_t i = 0; i < names_.size(); ++i) {
    Mismatch m{
        .tensor = names_[i], .error = -1, .factors = std::vector<double>(by_rank_.size(), 1)};
    for (size_t r = 0; r < by_rank_.size(); ++r) {
      if (by_rank_[r].size() <= i) continue;
      const Finding& f = by_rank_[r][i];
      m.allowed = f.allowed, m.factors[r] = f.factor;
      if (f.error <= m.error) continue;
      m.error = f.error, m.worst_rank = static_cast<int>(r);
      m.worst_batch = static_cast<std::int64_t>(f.batch),
      m.worst_position = static_cast<std::int64_t>(f.position);
    }
    all.push_back(std::move(m));
  }
  return all;
}

std::vector<Mismatch> Findings::mismatches(const MeshShape& shape) const {
  const std::lock_guard lock(mutex_);
  std::vector<Mismatch> found;
  // Every tensor of the reference must have been compared on every rank.
  for (const auto& [name, value] : reference_.tensors) {
    const auto place =
        static_cast<size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
    const auto count = std::count_if(by_rank_.begin(), by_rank_.end(), [&](const auto& rank) {
      return place < names_.size() && rank.size() > place;
    });
    if (count != num_ranks_)
      found.push_back({.tensor = name + " (compared on " + std::to_string(count) + " of " +
                                 std::to_string(num_ranks_) + " ranks)",
                       .error = INFINITY});
  }
  for (Mismatch& m : collect()) {
    if (m.error <= m.allowed) continue;
    m.means = axis_means(m.factors, shape);
    found.push_back(std::move(m));
  }
  return found;
}

double Findings::worst_ratio() const {
  const std::lock_guard lock(mutex_);
  double worst = 0;
  for (const Mismatch& m : collect())
    if (m.allowed > 0) worst = std::max(worst, m.error / m.allowed);
  return worst;
}

}  // namespace moesh::verify
