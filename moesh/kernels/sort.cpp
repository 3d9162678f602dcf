#include "moesh/kernels/sort.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include "moesh/kernels/aten/aten.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/cpu/cpu.h"
#include "moesh/kernels/meta/meta.h"

namespace moesh::kernels {

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  MOESH_CHECK(experts_TK.size(1) >= 1, ErrorKind::data, "experts_TK is ", describe(experts_TK),
              "; each token chooses 1 expert or more");
  MOESH_CHECK(range.first >= 0 && range.count >= 0 && range.first + range.count <= num_experts,
              ErrorKind::config, "experts [", range.first, ", ", range.first + range.count,
              ") are not among ", num_experts, " experts");
  const at::NoGradGuard no_grad;
  const at::Tensor experts = experts_TK.contiguous();
  if (experts.is_meta()) return meta::sort_by_expert(experts, num_experts, range);
  return experts.is_cpu() ? cpu::sort_by_expert(experts, num_experts, range)
                          : aten::sort_by_expert(experts, num_experts, range);
}

Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device device) {
  check_tensor("counts_re", counts_re, at::kLong, 2);
  MOESH_CHECK(counts_re.is_cpu(), ErrorKind::data, "counts_re is on ", counts_re.device(),
              "; counts belong on the host");
  const at::Tensor counts = counts_re.contiguous();
  const std::int64_t num_ranks = counts.size(0), num_experts = counts.size(1);
  const auto* count = counts.const_data_ptr<std::int64_t>();
  Reordered out;
  out.totals_e = at::empty({num_experts}, at::kLong);
  auto* totals = out.totals_e.mutable_data_ptr<std::int64_t>();
  std::fill_n(totals, num_experts, 0);
  std::vector<std::int64_t> start(
      static_cast<size_t>(num_ranks * num_experts));  // first row of (rank, expert), as they arrive
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < num_ranks * num_experts; ++i) {
    MOESH_CHECK(count[i] >= 0, ErrorKind::data, "rank ", i / num_experts, " announces ", count[i],
                " rows for expert ", i % num_experts);
    start[i] = num_rows, num_rows += count[i], totals[i % num_experts] += count[i];
  }
  out.index_R = at::empty({num_rows}, at::kLong);
  out.inverse_R = at::empty({num_rows}, at::kLong);
  auto* index = out.index_R.mutable_data_ptr<std::int64_t>();
  auto* inverse = out.inverse_R.mutable_data_ptr<std::int64_t>();
  std::int64_t position = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    for (std::int64_t r = 0; r < num_ranks; ++r) {
      const std::int64_t i = r * num_experts + e;
      for (std::int64_t row = start[i]; row < start[i] + count[i]; ++row, ++position)
        index[position] = row, inverse[row] = position;
    }
  }
  out.index_R = out.index_R.to(device);
  out.inverse_R = out.inverse_R.to(device);
  return out;
}

}  // namespace moesh::kernels
