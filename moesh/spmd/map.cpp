#include "moesh/spmd/map.h"

#include <utility>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"

namespace moesh::raw {

at::Tensor check_rows(const at::Tensor& x, at::Tensor y, std::int64_t num_dims, const char* what) {
  MOESH_CHECK(x.dim() >= num_dims && y.dim() >= num_dims &&
                  x.sizes().slice(0, static_cast<size_t>(num_dims)) ==
                      y.sizes().slice(0, static_cast<size_t>(num_dims)),
              what, " made ", y.sizes(), " of ", x.sizes(), ": the first ", num_dims,
              " dimensions number the rows, and a function of rows leaves them as they are");
  return y;
}

at::Tensor map_linear(const at::Tensor& x,
                      const std::function<at::Tensor(const at::Tensor&)>& forward,
                      std::function<at::Tensor(const at::Tensor&)> adjoint) {
  return attach(x, forward(x.detach()), std::move(adjoint));
}

}  // namespace moesh::raw
