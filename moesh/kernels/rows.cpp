#include "moesh/kernels/rows.h"

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

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  MOESH_CHECK(x.defined() && (x.dim() == 1 || x.dim() == 2), ErrorKind::data, "x is ", describe(x),
              "; pass [rows] or [rows, columns]");
  check_tensor("index_R", index_R, at::kInt, 1);
  check_same_device("index_R", index_R, "x", x);
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).gather_rows(x.contiguous(), index_R.contiguous());
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  MOESH_CHECK(rows_RD.defined() && (rows_RD.dim() == 1 || rows_RD.dim() == 2) &&
                  is_kernel_dtype(rows_RD.scalar_type()),
              ErrorKind::data, "rows_RD is ", describe(rows_RD),
              "; pass float64, float32 or bfloat16 of 1 or 2 dimensions");
  check_tensor("inverse_TK", inverse_TK, at::kInt, 2);
  check_same_device("inverse_TK", inverse_TK, "rows_RD", rows_RD);
  const at::NoGradGuard no_grad;
  return kernels_for(rows_RD.device()).combine_rows(rows_RD.contiguous(), inverse_TK.contiguous());
}

}  // namespace moesh::kernels
