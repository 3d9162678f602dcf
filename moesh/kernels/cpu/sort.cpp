#include "moesh/kernels/rows.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <vector>

#include "moesh/base/error.h"

namespace moesh::kernels::cpu {
namespace {

at::Tensor int32s(at::IntArrayRef sizes) { return at::empty(sizes, at::kInt); }

std::int32_t* data(const at::Tensor& t) { return t.mutable_data_ptr<std::int32_t>(); }

/// Leaves where the rows of each expert begin.
std::int32_t counts_to_starts(std::vector<std::int32_t>& counts) {
  const std::int32_t total = std::accumulate(counts.begin(), counts.end(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), counts.begin(), 0);
  return total;
}

}  // namespace

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  const auto num_routed = static_cast<std::int32_t>(experts_TK.numel()),
             k = static_cast<std::int32_t>(experts_TK.size(1));
  const auto* expert = experts_TK.const_data_ptr<std::int64_t>();
  std::vector<std::int32_t> next(static_cast<size_t>(range.count));
  for (std::int32_t i = 0; i < num_routed; ++i) {
    MOESH_CHECK(expert[i] >= 0 && expert[i] < num_experts, ErrorKind::data, "token ", i / k,
                " chose expert ", expert[i], " of ", num_experts, " (choice ", i % k, ")");
    const std::int64_t local = expert[i] - range.first;
    if (local >= 0 && local < range.count) ++next[local];
  }
  const std::int32_t num_rows = counts_to_starts(next);
  Sorted out{.order_R = int32s({num_rows}),
             .token_R = int32s({num_rows}),
             .inverse_TK = int32s(experts_TK.sizes()),
             .ends_e = int32s({range.count})};
  std::int32_t *order = data(out.order_R), *token = data(out.token_R),
               *inverse = data(out.inverse_TK);
  for (std::int32_t t = 0, i = 0; i < num_routed; ++t) {
    for (const std::int32_t end = i + k; i < end; ++i) {
      const std::int64_t local = expert[i] - range.first;
      if (local < 0 || local >= range.count) {
        inverse[i] = -1;
        continue;
      }
      const std::int32_t position = next[local]++;
      inverse[i] = position, order[position] = i, token[position] = t;
    }
  }
  std::copy(next.begin(), next.end(), data(out.ends_e));  // where the next row would go
  return out;
}

Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device /*device*/) {
  const std::int64_t num_ranks = counts_re.size(0), num_experts = counts_re.size(1);
  const auto* count = counts_re.const_data_ptr<std::int64_t>();
  std::vector<std::int32_t> next(static_cast<size_t>(num_experts));
  for (std::int64_t i = 0; i < counts_re.numel(); ++i)
    next[i % num_experts] += static_cast<std::int32_t>(count[i]);
  const std::int32_t num_rows = counts_to_starts(next);
  Reordered out{.index_R = int32s({num_rows}),
                .inverse_R = int32s({num_rows}),
                .ends_e = int32s({num_experts})};
  std::int32_t *index = data(out.index_R), *inverse = data(out.inverse_R), row = 0;
  for (std::int64_t i = 0; i < num_ranks * num_experts; ++i) {
    for (std::int64_t n = 0; n < count[i]; ++n, ++row) {
      const std::int32_t position = next[i % num_experts]++;
      index[position] = row, inverse[row] = position;
    }
  }
  std::copy(next.begin(), next.end(), data(out.ends_e));
  return out;
}

}  // namespace moesh::kernels::cpu
