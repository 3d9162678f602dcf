#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/simd.h"
#include "moesh/kernels/cpu/tasks.h"
#include "moesh/kernels/routing.h"

namespace moesh::kernels::cpu {

namespace {

constexpr std::int64_t kGrainBytes = 1 << 16;  // less is not worth starting a thread for

std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t num_rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = num_rows;
  return sizes;
}

// All indices are checked before one of them is used.
void check_index(const char* name, const at::Tensor& index, std::int64_t num_rows) {
  const auto* p = index.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < index.numel(); ++i) {
    MOESH_CHECK(p[i] >= -1 && p[i] < num_rows, ErrorKind::data, name, " holds ", p[i], " at ", i,
                "; there are ", num_rows, " rows (-1 means none)");
  }
}

template <class T>
void combine_typed(const at::Tensor& rows, const at::Tensor& inverse_TK, at::Tensor& out) {
  const std::int64_t columns = rows.dim() == 2 ? rows.size(1) : 1, k = inverse_TK.size(1);
  const auto* from = static_cast<const T*>(rows.const_data_ptr());
  const auto* inverse = inverse_TK.const_data_ptr<std::int32_t>();
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  const auto& ops = simd_ops<T>();
  const std::int64_t row_bytes =
      std::max<std::int64_t>(1, k * columns * static_cast<std::int64_t>(sizeof(T)));
  run_ranges(inverse_TK.size(0), std::max<std::int64_t>(1, kGrainBytes / row_bytes),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t t = begin; t < end; ++t)
                 ops.combine(from, columns, inverse + t * k, k, columns, to + t * columns);
             });
}

}  // namespace

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  check_index("index_R", index_R, x.size(0));
  at::Tensor out = at::empty(with_rows(x, index_R.numel()), x.options());
  const auto bytes = static_cast<std::int64_t>((x.dim() == 2 ? x.size(1) : 1) * x.itemsize());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto* index = index_R.const_data_ptr<std::int32_t>();
  run_ranges(index_R.numel(),
             std::max<std::int64_t>(1, kGrainBytes / std::max<std::int64_t>(1, bytes)),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t i = begin; i < end; ++i) {
                 if (index[i] >= 0)
                   std::memcpy(to + i * bytes, from + index[i] * bytes, static_cast<size_t>(bytes));
                 else
                   std::memset(to + i * bytes, 0, static_cast<size_t>(bytes));
               }
             });
  return out;
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  check_index("inverse_TK", inverse_TK, rows_RD.size(0));
  at::Tensor out = at::empty(with_rows(rows_RD, inverse_TK.size(0)), rows_RD.options());
  switch (rows_RD.scalar_type()) {
    case at::kDouble: combine_typed<double>(rows_RD, inverse_TK, out); break;
    case at::kFloat: combine_typed<float>(rows_RD, inverse_TK, out); break;
    default: combine_typed<Bf16>(rows_RD, inverse_TK, out); break;
  }
  return out;
}

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

namespace {

// Keeps the best k seen so far in order. A later expert must be strictly greater to pass an earlier
// one. Returns false on a NaN.
template <class V>
bool choose(const V* scores, std::int64_t num_experts, std::int64_t k, V* values,
            std::int64_t* experts) {
  std::int64_t held = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const V score = scores[e];
    if (score != score) return false;
    if (held == k && !(score > values[k - 1])) continue;
    std::int64_t place = held < k ? held++ : k - 1;
    for (; place > 0 && score > values[place - 1]; --place)
      values[place] = values[place - 1], experts[place] = experts[place - 1];
    values[place] = score, experts[place] = e;
  }
  return true;
}

template <class V>
TopK top_k_typed(const at::Tensor& scores_TE, std::int64_t k) {
  const std::int64_t num_tokens = scores_TE.size(0), num_experts = scores_TE.size(1);
  TopK out{at::empty({num_tokens, k}, scores_TE.options()),
           at::empty({num_tokens, k}, scores_TE.options().dtype(at::kLong))};
  const V* scores = scores_TE.const_data_ptr<V>();
  V* values = out.values_TK.mutable_data_ptr<V>();
  auto* experts = out.experts_TK.mutable_data_ptr<std::int64_t>();
  std::atomic<std::int64_t> bad{num_tokens};  // the first token with a NaN
  run_ranges(
      num_tokens, std::max<std::int64_t>(1, 16384 / num_experts),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          if (choose(scores + t * num_experts, num_experts, k, values + t * k, experts + t * k))
            continue;
          std::int64_t seen = bad.load();
          while (t < seen && !bad.compare_exchange_weak(seen, t)) {
          }
          break;
        }
      });
  MOESH_CHECK(
      bad == num_tokens, ErrorKind::data, "the router scores of token ", bad.load(),
      " hold a NaN; look for a non-finite value in the token's input or in the gate weight");
  return out;
}

}  // namespace

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  return scores_TE.scalar_type() == at::kDouble ? top_k_typed<double>(scores_TE, k)
                                                : top_k_typed<float>(scores_TE, k);
}

}  // namespace moesh::kernels::cpu
