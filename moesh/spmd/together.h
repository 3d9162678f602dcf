#pragma once
// Several tensors with the same rows in one message: rows, their scores, their experts. A row of
// the message is the bytes of its parts side by side, so that each keeps its dtype and its bits.
// Gradients travel the same way. Where they are terms of a sum, the receiver adds them, in the
// order of the ranks and in float32 or wider, and rounds once: what a reduction does.

#include <tuple>
#include <vector>

#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
/// [N, ..] each -> [N, words], and back: `like` has the dtypes and the sizes of a row.
at::Tensor pack_rows(const std::vector<at::Tensor>& parts);
std::vector<at::Tensor> unpack_rows(const at::Tensor& packed, const std::vector<at::Tensor>& like);

std::vector<at::Tensor> gather_together(const std::vector<at::Tensor>& xs, Axes axes,
                                        const std::vector<std::int64_t>& rows);
}  // namespace raw

/// The plain results of one message, as the typed tensors Out...
template <class... Out>
std::tuple<Out...> typed_parts(const std::vector<at::Tensor>& plain) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return std::tuple<Out...>{Out::assume(plain[i])...};
  }(std::index_sequence_for<Out...>());
}

/// S -> R of several tensors [rows[r], ..] in one message; backward: one message, P -> S.
template <Axes A, auto... Ls>
auto all_gather_together(const std::vector<std::int64_t>& rows, const Tensor<Ls>&... xs) {
  return typed_parts<Tensor<transition(Ls, A, Place::R, Step::all_gather)>...>(
      raw::gather_together({xs.local()...}, A, rows));
}

}  // namespace moesh
