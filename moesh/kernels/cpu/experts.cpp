// Grouped SwiGLU on the CPU. Every GEMM is made of small ones: a block of rows (gathered, if rows
// are indices into tokens) times a panel of 64 columns of a weight, packed as the library's
// microkernels want it. Both live in the caches of one core.
//
// Experts go through in groups, so that what lies between two GEMMs stays in the cache and is never
// as large as [R, F]:
//   forward   1  (expert, row block)       g, u = x w1', x w3';  h = act(g, u)
//             2  (token chunk, D panel)    y += h w2'              experts in order
//   backward  1  (expert, row block)       dh = dy w2;  dg, du, h, d(score), parts of d(bias)
//             2  (expert, tile)            dw2 = dy' h;  dw1 = dg' x;  dw3 = du' x
//                (token chunk, D panel)    dx += dg w1 + du w3     experts in order
// A task of the last kind owns a rectangle of the output and visits all experts of the group: rows
// of one expert are sorted by token, so those of a chunk of tokens are one range. So K rows meet in
// one token without a scatter, a lock or an [R, D] tensor, and in an order which depends on nothing
// but the routing. T tokens, D model, F ffn, e local experts, K top-k, R rows at their experts

#include "moesh/kernels/experts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "moesh/kernels/cpu/combine.h"
#include "moesh/kernels/cpu/weight_gradients.h"

namespace moesh::kernels::cpu {

bool is_resident(const void* p) {
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char state = 0;
  return mincore(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(p) / page * page), page,
                 &state) == 0 &&
         (state & 1);
#else
  return false;
#endif
}

namespace {

template <class T>
ExpertsOutput forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                      const ExpertsInput& input) {
  using A = Accumulate<T>;
  const ExpertsJob<T> job(config, weights, input);
  const auto& ops = simd_ops<T>();
  const int64_t F = job.F, D = job.D;
  ExpertsOutput out{
      at::empty_like(input.x),
      {input, at::empty({job.R, F}, input.x.options()), at::empty({job.R, F}, input.x.options())}};
  T* gate = data<T>(out.saved.gate_RF);
  T* up = data<T>(out.saved.up_RF);
  const at::Tensor h_holder = at::empty({job.most_group_rows(), job.Fp}, input.x.options());
  T* h = data<T>(h_holder);

  const RowView<T> x = job.rows(input.x);
  const Right<T> w1{job.w1, F, D, true}, w3{job.w3, F, D, true};
  const int64_t most = job.most_block_rows();
  const int64_t bytes =
      space<T>(most * padded<T>(D)) + 2 * space<T>(Panel<T>::size(D)) + space<A>(2 * most * kPanel);
  const Combine<T, 1> down(job, {{{h, job.Fp, Right<T>{job.w2, D, F, true}}}}, job.b2, job.post,
                           data<T>(out.y));
  const int64_t workers = job.workers(std::max(job.num_blocks(), down.num_tasks()));
  const Scratch scratch(workers, std::max(bytes, down.scratch_bytes()));

  const auto up_and_gate = [&](const RowBlock& block, const ExpertGroup& group, Arena arena) {
    const int64_t m = block.rows(), r0 = block.begin;
    T* h_block = h + (r0 - group.kept_from) * job.Fp;
    const auto a = left_operand(x.from(r0, 0), m, D, arena.take<T>(most * padded<T>(D)));
    Panel<T> gate_panel(w1, Walk::columns, arena), up_panel(w3, Walk::columns, arena);
    A* c = arena.take<A>(2 * most * kPanel);
    for (int64_t f0 = 0; f0 < F; f0 += kPanel) {
      const int64_t n = std::min(kPanel, F - f0);
      T* g = gate + r0 * F + f0;
      T* u = up + r0 * F + f0;
      A *cg = c, *cu = c + m * kPanel;
      int64_t ldc = kPanel;
      if constexpr (std::is_same_v<T, A>) cg = g, cu = u, ldc = F;
      multiply<T>(m, n, f0, a.data, a.ld, w1, gate_panel, block.expert, cg, ldc, false);
      multiply<T>(m, n, f0, a.data, a.ld, w3, up_panel, block.expert, cu, ldc, false);
      ops.activate({.clamped = job.clamped,
                    .rows = m,
                    .columns = n,
                    .g = cg,
                    .u = cu,
                    .ld_gu = ldc,
                    .pre = job.pre ? job.pre + r0 : nullptr,
                    .post = job.post ? job.post + r0 : nullptr,
                    .b1 = job.b1 + block.expert * F + f0,
                    .b3 = job.b3 + block.expert * F + f0,
                    .h = h_block + f0,
                    .ld_h = job.Fp});
      if constexpr (!std::is_same_v<T, A>) {
        ops.put_rows(cg, ldc, m, n, nullptr, nullptr, g, F);
        ops.put_rows(cu, ldc, m, n, nullptr, nullptr, u, F);
      }
    }
    if (job.Fp > F) {
      for (int64_t r = 0; r < m; ++r) h_block[r * job.Fp + F] = T{};
    }
  };
  for (const ExpertGroup& group : job.groups) {
    run_tasks(group.num_blocks(), workers, [&](int64_t task, int64_t worker) {
      up_and_gate(job.blocks[group.block_begin + task], group, scratch.arena(worker));
      gemm_done();
    });
    run_tasks(down.num_tasks(), workers, [&](int64_t task, int64_t worker) {
      down.run(task, group, scratch.arena(worker));
      gemm_done();
    });
  }
  return out;
}

template <class T>
typename WeightGradients<T>::Result result_in(const ExpertsWeights& d) {
  return {data<T>(d.w1_eFD), data<T>(d.w3_eFD), data<T>(d.w2_eDF), data<T>(d.b2_eD)};
}

/// The products that `backward` has left, from what it kept: dg, du and h of all rows.
template <class T>
void weight_half(const ExpertsJob<T>& job, const ExpertsInput& input, const at::Tensor& dy,
                 const at::Tensor& kept, const ExpertsWeights& d) {
  const T* rows = data<T>(kept);
  const int64_t size = job.R * job.Fp;
  const WeightGradients<T> gradients(job, job.rows(input.x), job.rows(dy), rows, rows + size,
                                     rows + 2 * size, result_in<T>(d));
  int64_t num_tasks = 0;
  for (const ExpertGroup& group : job.groups)
    num_tasks = std::max(num_tasks, gradients.num_tasks(group));
  const int64_t workers = job.workers(num_tasks);
  const Scratch scratch(workers, gradients.scratch_bytes());
  for (const ExpertGroup& group : job.groups)
    run_tasks(gradients.num_tasks(group), workers, [&](int64_t task, int64_t worker) {
      gradients.run(task, group, scratch.arena(worker));
      gemm_done();
    });
}

template <class T>
ExpertsGradients backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                          const ExpertsSaved& saved, const at::Tensor& dy) {
  using A = Accumulate<T>;
  const bool later = config.weights_later;
  const auto owned = std::make_shared<ExpertsJob<T>>(config, weights, saved.input);
  if (later) owned->keep_all_rows();
  const ExpertsJob<T>& job = *owned;
  const auto& ops = simd_ops<T>();
  const int64_t F = job.F, D = job.D;
  ExpertsGradients out;
  out.x = at::empty_like(saved.input.x);
  if (!later) out.weights = empty_products(weights);
  out.weights.b1_eF = fresh(weights.b1_eF), out.weights.b3_eF = fresh(weights.b3_eF);
  if (config.scores != ScoreSide::none) out.scores_R = at::zeros_like(saved.input.scores_R);
  const int64_t group_size = (later ? job.R : job.most_group_rows()) * job.Fp;
  const at::Tensor between = at::empty({3, group_size}, dy.options());
  T* dg = data<T>(between);
  T* du = dg + group_size;
  T* h = du + group_size;

  const RowView<T> x = job.rows(saved.input.x), dy_rows = job.rows(dy);
  const Right<T> w2{job.w2, D, F, false};
  const int64_t most = job.most_block_rows();
  const bool biases = weights.b1_eF.defined() || weights.b3_eF.defined();
  const at::Tensor bias_parts =
      biases ? at::zeros({job.num_blocks(), 2, F}, job.b1_holder.options()) : at::Tensor();
  A* d_scores = data<A>(out.scores_R);

  const int64_t bytes =
      space<T>(most * padded<T>(D)) + space<T>(Panel<T>::size(D)) + space<A>(most * kPanel);
  const WeightGradients<T> gradients(job, x, dy_rows, dg, du, h, result_in<T>(out.weights));
  const auto num_gradient_tasks = [&](const ExpertGroup& group) {
    return later ? 0 : gradients.num_tasks(group);
  };
  const Combine<T, 2> to_x(
      job,
      {{{dg, job.Fp, Right<T>{job.w1, F, D, false}}, {du, job.Fp, Right<T>{job.w3, F, D, false}}}},
      nullptr, nullptr, data<T>(out.x));
  int64_t num_tasks = job.num_blocks();
  for (const ExpertGroup& group : job.groups)
    num_tasks = std::max(num_tasks, num_gradient_tasks(group) + to_x.num_tasks());
  const int64_t workers = job.workers(num_tasks);
  const Scratch scratch(workers,
                        std::max({bytes, gradients.scratch_bytes(), to_x.scratch_bytes()}));

  const auto through_activation = [&](int64_t block_index, const ExpertGroup& group, Arena arena) {
    const RowBlock& block = job.blocks[block_index];
    const int64_t m = block.rows(), r0 = block.begin, e = block.expert,
                  at0 = (r0 - group.kept_from) * job.Fp;
    const auto a = left_operand(dy_rows.from(r0, 0), m, D, arena.take<T>(most * padded<T>(D)));
    Panel<T> panel(w2, Walk::columns, arena);
    A* c = arena.take<A>(most * kPanel);
    A* parts = biases ? data<A>(bias_parts) + block_index * 2 * F : nullptr;
    for (int64_t f0 = 0; f0 < F; f0 += kPanel) {
      const int64_t n = std::min(kPanel, F - f0), at = at0 + f0;
      multiply<T>(m, n, f0, a.data, a.ld, w2, panel, e, c, kPanel, false);
      ops.activate_backward({.clamped = job.clamped,
                             .rows = m,
                             .columns = n,
                             .g = data<T>(saved.gate_RF) + r0 * F + f0,
                             .u = data<T>(saved.up_RF) + r0 * F + f0,
                             .ld_gu = F,
                             .pre = job.pre ? job.pre + r0 : nullptr,
                             .post = job.post ? job.post + r0 : nullptr,
                             .b1 = job.b1 + e * F + f0,
                             .b3 = job.b3 + e * F + f0,
                             .dh = c,
                             .ld_dh = kPanel,
                             .dg = dg + at,
                             .du = du + at,
                             .h = h + at,
                             .ld_out = job.Fp,
                             .d_pre = job.pre ? d_scores + r0 : nullptr,
                             .d_post = job.post ? d_scores + r0 : nullptr,
                             .db1 = parts ? parts + f0 : nullptr,
                             .db3 = parts ? parts + F + f0 : nullptr});
    }
    if (job.b2 && job.post)
      ops.dot_rows({a.data, a.ld, nullptr}, m, D, job.b2 + e * D, d_scores + r0);
    if (job.Fp > F) {
      for (int64_t r = 0; r < m; ++r) {
        for (T* part : {dg, du, h}) part[at0 + r * job.Fp + F] = T{};
      }
    }
  };
  for (const ExpertGroup& group : job.groups) {
    run_tasks(group.num_blocks(), workers, [&](int64_t task, int64_t worker) {
      through_activation(group.block_begin + task, group, scratch.arena(worker));
      gemm_done();
    });
    run_tasks(to_x.num_tasks() + num_gradient_tasks(group), workers,
              [&](int64_t task, int64_t worker) {
                if (task < to_x.num_tasks())
                  to_x.run(task, group, scratch.arena(worker));  // the larger tasks first
                else
                  gradients.run(task - to_x.num_tasks(), group, scratch.arena(worker));
                gemm_done();
              });
  }

  if (biases) {  // a few numbers: summed here, in the order of the blocks
    const at::Tensor sums = at::zeros({2, job.num_experts, F}, job.b1_holder.options());
    A* sum = data<A>(sums);
    const A* part = data<A>(bias_parts);
    for (int64_t i = 0; i < job.num_blocks(); ++i) {
      for (int64_t side = 0; side < 2; ++side) {
        A* to = sum + (side * job.num_experts + job.blocks[i].expert) * F;
        for (int64_t f = 0; f < F; ++f) to[f] += part[(2 * i + side) * F + f];
      }
    }
    if (weights.b1_eF.defined()) out.weights.b1_eF.copy_(sums[0]);
    if (weights.b3_eF.defined()) out.weights.b3_eF.copy_(sums[1]);
  }
  if (later)
    out.weights_later = [owned, input = saved.input, dy, between,
                         biases = std::exchange(out.weights, {}), shapes = shapes_of(weights)] {
      ExpertsWeights d = empty_products(shapes);
      d.b1_eF = biases.b1_eF, d.b3_eF = biases.b3_eF;
      weight_half(*owned, input, dy, between, d);
      return d;
    };
  return out;
}

}  // namespace

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  return for_dtype(input.x.scalar_type(),
                   [&](auto t) { return forward<decltype(t)>(config, weights, input); });
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  return for_dtype(dy.scalar_type(),
                   [&](auto t) { return backward<decltype(t)>(config, weights, saved, dy); });
}

}  // namespace moesh::kernels::cpu
