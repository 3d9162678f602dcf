#include "moesh/kernels/sort.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_num_rows(std::int64_t num_rows) {
  MOESH_CHECK(num_rows <= std::numeric_limits<std::int32_t>::max(), ErrorKind::data, num_rows,
              " rows on one rank; their indices have 32 bits. Use smaller micro-batches.");
}

}  // namespace

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  check_tensor("experts_TK", experts_TK, at::kLong, 2);
  MOESH_CHECK(experts_TK.size(1) >= 1, ErrorKind::data, "experts_TK is ", describe(experts_TK),
              "; each token chooses 1 expert or more");
  MOESH_CHECK(range.first >= 0 && range.count >= 0 && range.first + range.count <= num_experts,
              ErrorKind::config, "experts [", range.first, ", ", range.first + range.count,
              ") are not among ", num_experts, " experts");
  check_num_rows(experts_TK.numel());
  const at::NoGradGuard no_grad;
  return kernels_for(experts_TK.device())
      .sort_by_expert(experts_TK.contiguous(), num_experts, range);
}

Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device device) {
  check_tensor("counts_re", counts_re, at::kLong, 2);
  MOESH_CHECK(counts_re.is_cpu(), ErrorKind::data, "counts_re is on ", counts_re.device(),
              "; counts belong on the host");
  const at::Tensor counts = counts_re.contiguous();
  const std::int64_t num_experts = counts.size(1);
  const auto* count = counts.const_data_ptr<std::int64_t>();
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < counts.numel(); ++i) {
    MOESH_CHECK(count[i] >= 0, ErrorKind::data, "rank ", i / num_experts, " announces ", count[i],
                " rows for expert ", i % num_experts);
    num_rows += count[i];
  }
  check_num_rows(num_rows);
  const at::NoGradGuard no_grad;
  return kernels_for(device).rank_major_to_expert_major(counts, device);
}

at::Tensor counts_of(const at::Tensor& ends_e) {
  const at::NoGradGuard no_grad;
  return at::diff(ends_e, /*n=*/1, /*dim=*/0, at::zeros({1}, ends_e.options())).to(at::kLong);
}

}  // namespace moesh::kernels
