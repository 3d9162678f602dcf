#include "moesh/kernels/topk.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  MOESH_CHECK(scores_TE.defined() && scores_TE.dim() == 2 &&
                  (scores_TE.scalar_type() == at::kFloat || scores_TE.scalar_type() == at::kDouble),
              ErrorKind::data, "scores_TE is ", describe(scores_TE),
              "; pass float32 or float64 scores [tokens, experts]");
  MOESH_CHECK(k >= 1 && k <= scores_TE.size(1), ErrorKind::config, "top-k takes ", k, " of ",
              scores_TE.size(1), " experts; choose 1 to ", scores_TE.size(1));
  const at::NoGradGuard no_grad;
  return kernels_for(scores_TE.device()).top_k(scores_TE.contiguous(), k);
}

}  // namespace moesh::kernels
