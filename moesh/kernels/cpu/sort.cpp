#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/cpu.h"

namespace moesh::kernels::cpu {

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  const std::int64_t num_routed = experts_TK.numel(), k = experts_TK.size(1);
  const auto* expert = experts_TK.const_data_ptr<std::int64_t>();
  Sorted out;
  out.inverse_TK = at::empty_like(experts_TK);
  out.counts_e = at::empty({range.count}, experts_TK.options());
  auto* inverse = out.inverse_TK.mutable_data_ptr<std::int64_t>();
  auto* counts = out.counts_e.mutable_data_ptr<std::int64_t>();
  std::fill_n(counts, range.count, 0);
  for (std::int64_t i = 0; i < num_routed; ++i) {
    MOESH_CHECK(expert[i] >= 0 && expert[i] < num_experts, ErrorKind::data, "token ", i / k,
                " chose expert ", expert[i], " of ", num_experts, " (choice ", i % k, ")");
    const std::int64_t local = expert[i] - range.first;
    if (local >= 0 && local < range.count) ++counts[local];
  }
  std::vector<std::int64_t> next(
      static_cast<size_t>(range.count));  // where the next row of each expert goes
  std::int64_t num_rows = 0;
  for (std::int64_t e = 0; e < range.count; ++e) next[e] = num_rows, num_rows += counts[e];
  out.order_R = at::empty({num_rows}, experts_TK.options());
  out.token_R = at::empty({num_rows}, experts_TK.options());
  auto* order = out.order_R.mutable_data_ptr<std::int64_t>();
  auto* token = out.token_R.mutable_data_ptr<std::int64_t>();
  for (std::int64_t t = 0, i = 0; i < num_routed; ++t) {
    for (std::int64_t end = i + k; i < end; ++i) {
      const std::int64_t local = expert[i] - range.first;
      if (local < 0 || local >= range.count) {
        inverse[i] = -1;
        continue;
      }
      const std::int64_t position = next[local]++;
      inverse[i] = position, order[position] = i, token[position] = t;
    }
  }
  return out;
}

}  // namespace moesh::kernels::cpu
