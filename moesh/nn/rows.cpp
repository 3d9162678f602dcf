#include "moesh/nn/rows.h"

#include "moesh/kernels/rows.h"
#include "moesh/spmd/attach.h"

namespace moesh::nn {

at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& index, const at::Tensor& inverse) {
  return raw::attach(x, kernels::gather_rows(x.detach(), index), [inverse](const at::Tensor& grad) {
    return kernels::gather_rows(grad.contiguous(), inverse);
  });
}

at::Tensor spread_rows(const at::Tensor& x_ND, const at::Tensor& token_R,
                       const at::Tensor& inverse_NK) {
  return raw::attach(x_ND, kernels::gather_rows(x_ND.detach(), token_R),
                     [inverse_NK](const at::Tensor& grad) {
                       return kernels::combine_rows(grad.contiguous(), inverse_NK);
                     });
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& token_R,
                        const at::Tensor& inverse_NK) {
  return raw::attach(rows_RD, kernels::combine_rows(rows_RD.detach(), inverse_NK),
                     [token_R](const at::Tensor& grad) {
                       return kernels::gather_rows(grad.contiguous(), token_R);
                     });
}

}  // namespace moesh::nn
