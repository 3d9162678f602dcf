#include "moesh/nn/vocabulary.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/dtype.h"
#include "moesh/types/token.h"

namespace moesh::nn {
namespace {

using enum Place;

constexpr std::int64_t kIgnored = -100;

}  // namespace

Embedding::Embedding(const std::string& name, std::int64_t vocab, std::int64_t dim,
                     at::ScalarType dtype, at::Device device, const Init& init)
    : weight_({.name = name + ".weight",
               .shape = {vocab, dim},
               .cuts = {{tp, 0}},
               .dtype = wide_dtype(dtype),
               .compute = dtype,
               .device = device},
              init) {}

Tensor<Dense{T, T, P}> Embedding::operator()(const at::Tensor& ids_BL) const {
  const at::Tensor weight = local(use(weight_));
  const auto start = weight_.stored().compute.start[0], size = weight_.stored().compute.length[0];
  const auto vocab = weight_.stored().spec.shape[0];
  if (ids_BL.numel() > 0) {
    const auto low = ids_BL.min().item<std::int64_t>(), high = ids_BL.max().item<std::int64_t>();
    MOESH_CHECK(low >= 0 && high < vocab, ErrorKind::data, "token ", low < 0 ? low : high,
                " is outside of the vocabulary of ", vocab,
                "; the data and the model must use the same tokenizer");
  }
  at::Tensor rows;
  if (size == 0) {  // zeros that still depend on the weight
    rows = at::matmul(at::zeros({ids_BL.size(0), ids_BL.size(1), 0}, weight.options()), weight);
  } else {
    const at::Tensor mine = ids_BL.ge(start).logical_and(ids_BL.lt(start + size));
    rows = at::embedding(weight, (ids_BL - start).clamp(0, size - 1));
    rows = rows * mine.unsqueeze(-1).to(rows.scalar_type());
  }
  return assume<Dense{T, T, P}>(rows);
}

Tensor<Dense{T, T, I}> cross_entropy(const Tensor<Dense{T, T, F}>& logits_NV,
                                     const at::Tensor& labels_N, std::int64_t vocab) {
  const auto& mesh = current_mesh();
  const auto group = mesh.group(tp);
  const Pieces cut{vocab, mesh.size(tp)};
  const std::int64_t start = cut.start(mesh.coordinate(tp)), size = cut.length(mesh.coordinate(tp));
  const at::Tensor& logits = local(logits_NV);
  const auto wide = wide_dtype(logits.scalar_type());
  const at::Tensor x = logits.detach().to(wide);
  MOESH_CHECK(x.dim() == 2 && x.size(1) == size && labels_N.numel() == x.size(0),
              ErrorKind::internal, "cross_entropy: logits ", x.sizes(), ", labels ",
              labels_N.sizes(), ", and this rank has ", size, " of ", vocab, " words");

  const auto n = x.size(0);
  const at::Tensor wrong =
      labels_N.ne(kIgnored).logical_and(labels_N.lt(0).logical_or(labels_N.ge(vocab)));
  MOESH_CHECK(!wrong.any().item<bool>(), ErrorKind::data, "label ",
              labels_N.masked_select(wrong)[0].item<std::int64_t>(),
              " is outside of the vocabulary of ", vocab, "; ignored positions have the label ",
              kIgnored);
  const at::Tensor own_max = size > 0 ? x.amax(1) : at::full({n}, -INFINITY, x.options());
  const at::Tensor max_N = group->all_reduce(own_max, comm::ReduceOp::max);
  const at::Tensor e_NV = (x - max_N.unsqueeze(1)).exp();
  const at::Tensor valid = labels_N.ne(kIgnored),
                   mine =
                       valid.logical_and(labels_N.ge(start)).logical_and(labels_N.lt(start + size));
  const at::Tensor column =
      (labels_N - start).clamp(0, std::max<std::int64_t>(size - 1, 0)).unsqueeze(1);
  const at::Tensor picked =
      size > 0 ? x.gather(1, column).squeeze(1) * mine.to(wide) : at::zeros({n}, x.options());
  // One message for both sums: [N, 2].
  const at::Tensor sums = group->all_reduce(at::stack({e_NV.sum(1), picked}, 1));
  const at::Tensor loss = (sums.select(1, 0).log() + max_N - sums.select(1, 1)) * valid.to(wide);
  const at::Tensor scale_N = sums.select(1, 0).reciprocal();
  const at::Tensor out =
      raw::attach(logits, loss, [=, dtype = logits.scalar_type()](const at::Tensor& grad) {
        const at::Tensor g = (grad * valid.to(wide)).unsqueeze(1);
        at::Tensor d = e_NV * (scale_N.unsqueeze(1) * g);
        if (size > 0) d.scatter_add_(1, column, -(g * mine.to(wide).unsqueeze(1)));
        return d.to(dtype);
      });
  return assume<Dense{T, T, I}>(out);
}

}  // namespace moesh::nn
