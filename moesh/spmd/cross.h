#pragma once
#include "moesh/base/error.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// Where dp and cp carry one letter and tp another, the two views agree only if ep x etp is exactly
/// tp.
inline void check_crossing(bool same_letter_everywhere) {
  if (same_letter_everywhere) return;
  const auto& s = current_mesh().shape();
  MOESH_CHECK(
      s.ep * s.etp == s.tp, ErrorKind::config,
      "a tensor with one letter on dp and cp and another on tp crosses the views only where ep * etp is tp; ep = ",
      s.ep, ", etp = ", s.etp, ", tp = ", s.tp, ". Bring it to the same letter on all axes first.");
}

/// Dense -> Sparse: the same tensor in the other view.
template <auto L>
auto sparse(const Tensor<L>& x) {
  constexpr Sparse to = cross(L);
  check_crossing(all_equal(L));
  return assume<to>(x.local());
}

/// Sparse -> Dense.
template <auto L>
auto dense(const Tensor<L>& x) {
  constexpr Dense to = cross(L);
  check_crossing(all_equal(L));
  return assume<to>(x.local());
}

}  // namespace moesh
