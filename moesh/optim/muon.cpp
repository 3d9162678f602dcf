// n, m rows and columns of a matrix; "part": the box of a matrix that a rank has.
#include "moesh/optim/rules.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/fsdp/param.h"

namespace moesh::optim {
namespace {

constexpr int kNumSteps = 5;

// So many steps of x <- a x + (b x x' + c (x x')^2) x for each matrix of a stack [count, n, m]:
// singular values go to about 1.
at::Tensor orthogonal(const at::Tensor& stack) {
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315, kEps = 1e-7;
  const bool is_tall = stack.size(1) > stack.size(2);
  at::Tensor x = is_tall ? stack.transpose(1, 2) : stack;
  x = x.div(x.norm(2, {1, 2}, /*keepdim=*/true).clamp_min(kEps));
  for (int i = 0; i < kNumSteps; ++i) {
    const at::Tensor gram = x.bmm(x.transpose(1, 2));
    x = at::baddbmm(x, at::baddbmm(gram, gram, gram, b, c), x, a);
  }
  return is_tall ? x.transpose(1, 2) : x;
}

// Rows and columns of a matrix.
struct Box {
  std::int64_t row = 0, column = 0, rows = 0, columns = 0;
  std::int64_t numel() const { return rows * columns; }
  at::Tensor of(const at::Tensor& matrix) const {
    return matrix.narrow(0, row, rows).narrow(1, column, columns);
  }
};

// How a parameter consists of matrices: those of its experts, of its heads, or one.
struct Matrices {
  Matrices(const Stored& w, bool by_head) : is_stack(w.spec.shape.size() == 3) {
    const auto& shape = w.spec.shape;
    count = is_stack ? shape[0] : by_head ? w.spec.num_heads : 1;
    n = is_stack ? shape[1] : shape[0] / count;
    m = shape.back();
  }
  /// The part of matrix k that lies in a region of the parameter.
  Box part(const Region& r, std::int64_t k) const {
    if (is_stack) {
      const bool has = k >= r.start[0] && k < r.start[0] + r.length[0];
      return {r.start[1], r.start[2], has ? r.length[1] : 0, r.length[2]};
    }
    const std::int64_t begin = std::max(r.start[0], k * n),
                       end = std::min(r.start[0] + r.length[0], (k + 1) * n);
    return {begin - k * n, r.start[1], std::max<std::int64_t>(end - begin, 0), r.length[1]};
  }
  /// The same of the tensor of that region, a view: [part.rows, part.columns].
  at::Tensor view(const at::Tensor& shard, const Region& r, std::int64_t k) const {
    if (is_stack) return shard[k - r.start[0]];
    return shard.narrow(0, k * n + part(r, k).row - r.start[0], part(r, k).rows);
  }
  /// FLOPs of orthogonal() for one of them.
  double cost() const {
    const auto least = static_cast<double>(std::min(n, m)),
               most = static_cast<double>(std::max(n, m));
    return kNumSteps * 2 * least * least * (2 * most + least);
  }

  bool is_stack;
  std::int64_t count, n, m;
};

// A parameter in a round: its direction, which becomes that of the update.
struct Task {
  const Stored* stored;
  at::Tensor direction;  // [shard], in the type of the work
  Matrices matrices;
  std::vector<Region> regions = {};  // by rank of the stage
  std::vector<int> replicas = {};    // likewise: ranks of one number have all of it among them
  std::vector<int> owners = {};      // by matrix
};

// The pieces that are sent to one rank, or received from it, in order.
struct PartsToSend {
  std::vector<at::Tensor> all;
  std::int64_t numel = 0;
  void add(const at::Tensor& t) {
    all.push_back(t.reshape({-1}));
    numel += t.numel();
  }
};

class PartExchange {
 public:
  PartExchange(comm::Group& group, const at::TensorOptions& options)
      : group_(group),
        options_(options),
        send_(static_cast<std::size_t>(group.size())),
        receive_(static_cast<std::size_t>(group.size()), 0),
        places_(static_cast<std::size_t>(group.size())) {}

  void send(int to, const at::Tensor& t) { send_[static_cast<std::size_t>(to)].add(t); }
  /// Receives what the other rank sends in the same order.
  void receive(int from, at::Tensor to) {
    receive_[static_cast<std::size_t>(from)] += to.numel();
    places_[static_cast<std::size_t>(from)].push_back(std::move(to));
  }
  void run() {
    std::vector<at::Tensor> all{at::empty({0}, options_)};
    comm::Rows to;
    for (const auto& pieces : send_) {
      all.insert(all.end(), pieces.all.begin(), pieces.all.end());
      to.push_back(pieces.numel);
    }
    const at::Tensor got = group_.all_to_all(at::cat(all), to, receive_);
    std::int64_t at = 0;
    for (const auto& places : places_)
      for (const at::Tensor& place : places) {
        place.copy_(got.narrow(0, at, place.numel()).view(place.sizes()));
        at += place.numel();
      }
  }

 private:
  comm::Group& group_;
  at::TensorOptions options_;
  std::vector<PartsToSend> send_;
  comm::Rows receive_;
  std::vector<std::vector<at::Tensor>> places_;
};

// The owner of each matrix: of the ranks that have a part of it the one with the least to do.
void choose_owners(Task& task, const comm::Group& group, std::vector<double>& load) {
  const auto& mesh = current_mesh();
  for (int world_rank : group.members()) {
    task.regions.push_back(shard_on(*task.stored, world_rank));
    task.replicas.push_back(mesh.coordinate(world_rank, task.stored->replicas));
  }
  for (std::int64_t k = 0; k < task.matrices.count; ++k) {
    int owner = -1;
    for (int q = 0; q < group.size(); ++q)
      if (task.matrices.part(task.regions[static_cast<std::size_t>(q)], k).numel() > 0 &&
          (owner < 0 || load[static_cast<std::size_t>(q)] < load[static_cast<std::size_t>(owner)]))
        owner = q;
    load[static_cast<std::size_t>(owner)] += task.matrices.cost();
    task.owners.push_back(owner);
  }
}

// f(task, k, owner): every matrix, in one order on all ranks.
template <class Fn>
void each_matrix(const std::vector<Task>& tasks, Fn f) {
  for (const Task& task : tasks)
    for (std::int64_t k = 0; k < task.matrices.count; ++k)
      f(task, k, task.owners[static_cast<std::size_t>(k)]);
}

// The matrices that this rank owns. Those of one shape are a stack, since a GPU is faster at one
// product of many matrices than at many products; both walks are in the order of each_matrix.
class OwnMatrices {
 public:
  OwnMatrices(const std::vector<Task>& tasks, int me, const at::TensorOptions& options) {
    each_matrix(tasks, [&](const Task& t, std::int64_t, int owner) {
      if (owner == me) ++stack_of(t).count;
    });
    for (auto& [shape, stack] : stacks_)
      stack.matrices = at::empty({stack.count, shape.first, shape.second}, options);
  }
  at::Tensor next(const Task& task) {
    Stack& stack = stack_of(task);
    return stack.matrices[stack.next++];
  }
  void orthogonalize() {
    constexpr std::int64_t kNumbersAtOnce = 1 << 24;  // enough for a GPU; bounds the memory of sums
    for (auto& [shape, stack] : stacks_) {
      const std::int64_t numel = shape.first * shape.second;
      for (const at::Tensor& some :
           stack.matrices.split(std::max<std::int64_t>(1, kNumbersAtOnce / numel)))
        some.copy_(orthogonal(some));
      stack.next = 0;
    }
  }

 private:
  struct Stack {
    std::int64_t count = 0, next = 0;
    at::Tensor matrices;
  };
  Stack& stack_of(const Task& t) { return stacks_[{t.matrices.n, t.matrices.m}]; }

  std::map<std::pair<std::int64_t, std::int64_t>, Stack> stacks_;  // by rows and columns
};

// Each direction becomes that of the update: parts go to their owner, and come back.
void orthogonalize(std::vector<Task>& tasks, comm::Group& group, std::vector<double>& load) {
  for (Task& task : tasks) choose_owners(task, group, load);
  const int me = group.rank();
  const auto options = tasks.front().direction.options();
  const auto part_on = [](const Task& t, int q, std::int64_t k) {
    return t.matrices.part(t.regions[static_cast<std::size_t>(q)], k);
  };
  const auto own_view = [&](const Task& t, std::int64_t k) {
    return t.matrices.view(t.direction, t.regions[static_cast<std::size_t>(me)], k);
  };
  OwnMatrices own(tasks, me, options);
  PartExchange there(group, options), back(group, options);
  each_matrix(tasks, [&](const Task& t, std::int64_t k, int owner) {
    const auto replica = [&](int q) { return t.replicas[static_cast<std::size_t>(q)]; };
    if (part_on(t, me, k).numel() > 0 && replica(me) == replica(owner))
      there.send(owner, own_view(t, k));
    if (owner != me) return;
    const at::Tensor whole = own.next(t);
    for (int q = 0; q < group.size(); ++q)
      if (const Box part = part_on(t, q, k); part.numel() > 0 && replica(q) == replica(me))
        there.receive(q, part.of(whole));
  });
  there.run();
  own.orthogonalize();
  each_matrix(tasks, [&](const Task& t, std::int64_t k, int owner) {
    if (part_on(t, me, k).numel() > 0) back.receive(owner, own_view(t, k));
    if (owner != me) return;
    const at::Tensor whole = own.next(t);
    for (int q = 0; q < group.size(); ++q)
      if (const Box part = part_on(t, q, k); part.numel() > 0) back.send(q, part.of(whole));
  });
  back.run();
}

}  // namespace

void MuonConfig::validate() const {
  MOESH_CHECK(momentum >= 0 && momentum < 1, ErrorKind::config, "Muon: momentum is ", momentum,
              "; it takes 0 or more and less than 1, such as 0.95");
  MOESH_CHECK(std::isfinite(weight_decay) && weight_decay >= 0, ErrorKind::config,
              "Muon: weight_decay is ", weight_decay, "; it takes 0 or more, such as 0.1");
  MOESH_CHECK(newton_schulz == at::kBFloat16 || newton_schulz == at::kFloat, ErrorKind::config,
              "Muon: Newton-Schulz in ", newton_schulz, "; it takes bfloat16 or float32");
}

bool is_for_muon(const Stored& w) { return w.spec.is_matrix && w.spec.shape.size() >= 2; }

double muon_flops(const Stored& w, bool by_head) {
  const Matrices matrices(w, by_head);
  return static_cast<double>(matrices.count) * matrices.cost();
}

Muon::Muon(const MuonConfig& config) : config_(config) { config_.validate(); }

std::vector<StateSpec> Muon::state(const Stored& /*w*/) const {
  return {{.name = "momentum_buffer"}};
}

void Muon::update(const std::vector<ParamInStep>& params, const RuleStep& step) const {
  comm::Group& group = *current_mesh().group(kTokenAxes);  // all ranks of the stage
  std::vector<double> load(static_cast<std::size_t>(group.size()), 0);
  const double keep = config_.momentum;
  for (std::size_t begin = 0, end = 0; begin < params.size(); begin = end) {
    std::vector<Task> tasks;
    const std::int64_t most = config_.numbers_in_round * group.size();
    for (std::int64_t numbers = 0; end < params.size() && numbers < most; ++end) {
      const ParamInStep& p = params[end];
      const Stored& w = *p.stored;
      MOESH_CHECK(is_for_muon(w), ErrorKind::internal, "Muon is given '", w.spec.name,
                  "', which is not a matrix");
      // Products are rounded before they are added, so that no bit depends on where a shard begins.
      const at::Tensor g = step.clipped(p).mul_(1 - keep);
      const at::Tensor mean = p.state[0].mul(keep).add_(g);
      const at::Tensor direction = config_.nesterov ? mean.mul(keep).add_(g) : mean;
      step.write(p.state[0], mean);
      const auto work = w.spec.dtype == at::kDouble ? at::kDouble : config_.newton_schulz;
      tasks.push_back({&w, direction.to(work), Matrices(w, config_.by_head)});
      numbers += tasks.back().matrices.count * tasks.back().matrices.n * tasks.back().matrices.m;
    }
    orthogonalize(tasks, group, load);
    for (std::size_t i = begin; i < end; ++i) {
      const ParamInStep& p = params[i];
      const Task& task = tasks[i - begin];
      const double size =
          0.2 * std::sqrt(static_cast<double>(std::max(task.matrices.n, task.matrices.m)));
      at::Tensor value = p.value;
      if (p.decay == Decay::on) value = value.mul(1 - step.lr() * config_.weight_decay);
      step.write(p.value, value.sub(task.direction.to(value.scalar_type()).mul(step.lr() * size)));
      // Here, so that a CUDA graph makes it anew in every replay, after the update.
      moesh::raw::current_copy(*p.stored);
    }
  }
}

}  // namespace moesh::optim
