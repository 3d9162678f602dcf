#include <ATen/ops/empty.h>

#include <atomic>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/tasks.h"
#include "moesh/kernels/routing.h"

namespace moesh::kernels::cpu {
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
