#include "moesh/nn/vocabulary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "moesh/base/error.h"
#include "moesh/base/label.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/weights_later.h"
#include "moesh/types/token.h"

namespace moesh::nn {
namespace {

using enum Place;

/// This rank's words of the vocabulary.
struct VocabularyShard {
  explicit VocabularyShard(std::int64_t vocab) {
    const auto& mesh = current_mesh();
    const Pieces cut{vocab, mesh.size(tp)};
    group = mesh.group(tp);
    start = cut.start(mesh.coordinate(tp)), length = cut.length(mesh.coordinate(tp));
    most = cut.length(0);
  }
  std::shared_ptr<comm::Group> group;
  std::int64_t start = 0, length = 0, most = 0;  // of this rank; of the rank with most of them
};

void check_labels(const at::Tensor& labels_N, std::int64_t vocab) {
  check_values(
      labels_N.ne(kIgnoredLabel).logical_and(labels_N.lt(0).logical_or(labels_N.ge(vocab))),
      labels_N, [vocab](std::int64_t label) {
        return detail::concat("label ", label, " is outside of the vocabulary of ", vocab,
                              "; ignored positions have the label ", kIgnoredLabel);
      });
}

// sum += a b, where the sum may be of a wider type. (Only CUDA's product gives one.)
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (sum.scalar_type() == a.scalar_type())
    sum.addmm_(a, b);
  else if (sum.is_cuda())
    at::addmm_out(sum, sum, a, b, sum.scalar_type());
  else
    sum += at::mm(a, b);
}

/// The loss, and its gradients where they are wanted.
struct Loss {
  at::Tensor sum, dx, dw;
};

// The logits of a chunk become their gradient, and both products with it are taken at once: nothing
// of size [N, V] outlives its chunk.
Loss loss_in_chunks(const at::Tensor& x_ND, const at::Tensor& weight_VD, const at::Tensor& labels_N,
                    const VocabularyShard& words, std::int64_t chunk, bool with_gradients,
                    bool is_trained) {
  const at::NoGradGuard no_grad;
  const auto wide = wide_dtype(x_ND.scalar_type());
  const at::Tensor valid_N = labels_N.ne(kIgnoredLabel).to(wide);
  const at::Tensor column_N = labels_N - words.start;
  const at::Tensor label_N =
      column_N.masked_fill(column_N.lt(0).logical_or(column_N.ge(words.length)), -1);
  Loss loss{.sum = at::zeros({}, valid_N.options())};
  if (with_gradients) {
    loss.dx = at::empty_like(x_ND);
    if (is_trained) loss.dw = at::zeros(weight_VD.sizes(), weight_VD.options().dtype(wide));
  }
  for (std::int64_t begin = 0; begin < x_ND.size(0); begin += chunk) {
    const auto part = [&](const at::Tensor& t) {
      return t.narrow(0, begin, std::min(chunk, x_ND.size(0) - begin));
    };
    const at::Tensor logits = at::mm(part(x_ND), weight_VD.t());
    const auto own = kernels::logit_sums(logits, part(label_N));
    const at::Tensor max_N = words.group->all_reduce(own.max_N, comm::ReduceOp::max);
    const at::Tensor mine = own.sum_N * (own.max_N - max_N).exp();
    // One message for both sums: [N, 2].
    const at::Tensor sums = words.group->all_reduce(at::stack({mine, own.picked_N}, 1));
    const at::Tensor total_N = sums.select(1, 0).log() + max_N;
    loss.sum += ((total_N - sums.select(1, 1)) * part(valid_N)).sum();
    if (!with_gradients) continue;
    const at::Tensor d = kernels::logit_gradient_(logits, part(label_N), total_N, part(valid_N));
    at::Tensor dx = part(loss.dx);
    at::mm_out(dx, d, weight_VD);
    if (is_trained) add_product(loss.dw, d.t(), part(x_ND));
  }
  return loss;
}

at::Tensor differentiable_loss(const at::Tensor& x, const at::Tensor& weight, const Loss& loss) {
  return raw::differentiable({x, weight}, [&]() -> raw::Differentiable {
    const auto backward = [dtype = weight.scalar_type()](const raw::Tensors& saved,
                                                         const raw::Tensors& dy) {
      // In one pass each: nothing of these sizes besides, at the moment when the step holds most.
      at::Tensor dw;
      if (saved[1].defined()) {
        dw = at::empty_like(saved[1], at::TensorOptions(dtype));
        at::mul_out(dw, saved[1], dy[0]);
      }
      return raw::Tensors{saved[0].mul_(dy[0]), dw};
    };
    return {{loss.sum.detach()}, {loss.dx, loss.dw}, backward};
  })[0];
}

// A frequent word has as many terms as it has places, most of which bfloat16 would lose. CUDA's
// kernels sum in float32 anyway.
at::Tensor gradient_of_rows(const at::Tensor& dy, const at::Tensor& index, std::int64_t size) {
  const auto sum = [&](const at::Tensor& terms) {
    return at::embedding_backward(terms, index, size, /*padding_idx=*/-1,
                                  /*scale_grad_by_freq=*/false, /*sparse=*/false);
  };
  const auto device = dy.is_meta() ? kernels::meta::modelled_device() : dy.device().type();
  if (device != at::kCPU) return sum(dy);
  return sum(dy.to(wide_dtype(dy.scalar_type()))).to(dy.scalar_type());
}

// Rows of the weights. Nothing waits for their gradient, so it may be left for later (to the sink):
// until then the rows' own gradients are kept, which are much smaller. `anchor` leads backward
// here.
at::Tensor rows_of(const at::Tensor& weight_VD, const at::Tensor& index) {
  at::Tensor anchor = at::zeros({0}, weight_VD.options()).requires_grad_(true);
  const auto sink = raw::sink_for(anchor, {weight_VD});
  const at::Tensor w = sink->is_empty() ? weight_VD : weight_VD.detach();
  if (sink->is_empty()) anchor = anchor.detach();
  return raw::differentiable({anchor, w}, [&]() -> raw::Differentiable {
    const auto backward = [sink, size = w.size(0)](const raw::Tensors& saved,
                                                   const raw::Tensors& dy) -> raw::Tensors {
      const auto gradient = [index = saved[0], size, dy = dy[0]] {
        return gradient_of_rows(dy, index, size);
      };
      if (sink->is_empty()) return {{}, gradient()};
      sink->leave([sink, gradient] { sink->give({gradient()}); });
      return {};
    };
    return {{at::embedding(w, index)}, {index}, backward};
  })[0];
}

}  // namespace

Embedding::Embedding(const std::string& name, std::int64_t vocab, std::int64_t dim,
                     const ModuleOptions& o)
    : weight_(o.spec(name + ".weight", {vocab, dim}, {{tp, 0}}), o.init) {
  weight_.stored().spec.is_matrix = false;
}

Tensor<Dense{T, T, P}> Embedding::operator()(const at::Tensor& ids_BL) const {
  const at::Tensor weight = local(use(weight_));
  const auto start = weight_.stored().compute.start[0], size = weight_.stored().compute.length[0];
  const auto vocab = weight_.stored().spec.shape[0];
  check_values(ids_BL.lt(0).logical_or(ids_BL.ge(vocab)), ids_BL, [vocab](std::int64_t token) {
    return detail::concat("token ", token, " is outside of the vocabulary of ", vocab,
                          "; the data and the model must use the same tokenizer");
  });
  at::Tensor rows;
  if (size == 0) {  // zeros that still depend on the weight
    rows = at::matmul(at::zeros({ids_BL.size(0), ids_BL.size(1), 0}, weight.options()), weight);
  } else {
    const at::Tensor mine = ids_BL.ge(start).logical_and(ids_BL.lt(start + size));
    rows = rows_of(weight, (ids_BL - start).clamp(0, size - 1));
    rows = rows * mine.unsqueeze(-1).to(rows.scalar_type());
  }
  return assume<Dense{T, T, P}>(rows);
}

std::int64_t loss_chunk(std::int64_t words) {
  constexpr std::int64_t kNumbers = 1 << 26, kTokens = 1024;
  return std::max<std::int64_t>(1, kNumbers / std::max<std::int64_t>(1, words) / kTokens) * kTokens;
}

Tensor<Dense{P, P, I}> cross_entropy(const Tensor<Dense{T, T, R}>& x_ND,
                                     const Tensor<Dense{R, R, F}>& weight_VD,
                                     const at::Tensor& labels_N, std::int64_t vocab,
                                     std::int64_t chunk) {
  const at::Tensor &x = local(x_ND), &weight = local(weight_VD);
  const VocabularyShard words(vocab);
  MOESH_CHECK(x.dim() == 2 && weight.size(0) == words.length && labels_N.numel() == x.size(0),
              ErrorKind::internal, "cross_entropy: x ", x.sizes(), ", weight ", weight.sizes(),
              ", labels ", labels_N.sizes(), ", and this rank has ", words.length, " of ", vocab,
              " words");
  check_labels(labels_N, vocab);
  const bool with_gradients =
      at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  const auto loss = loss_in_chunks(x.detach(), weight.detach(), labels_N, words,
                                   chunk > 0 ? chunk : loss_chunk(words.most), with_gradients,
                                   weight.requires_grad());
  return assume<Dense{P, P, I}>(with_gradients ? differentiable_loss(x, weight, loss) : loss.sum);
}

Tensor<Dense{T, T, R}> best_words(const Tensor<Dense{T, T, R}>& x_ND,
                                  const Tensor<Dense{R, R, F}>& weight_VD, std::int64_t vocab) {
  const at::NoGradGuard no_grad;
  const at::Tensor &x = local(x_ND), &weight = local(weight_VD);
  const VocabularyShard words(vocab);
  const std::int64_t chunk = loss_chunk(words.most);
  const at::Tensor best_N = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  for (std::int64_t begin = 0; begin < x.size(0); begin += chunk) {
    const std::int64_t length = std::min(chunk, x.size(0) - begin);
    at::Tensor max = at::full({length}, -std::numeric_limits<double>::infinity(),
                              x.options().dtype(wide_dtype(x.scalar_type()))),
               word = at::full({length}, vocab, best_N.options());
    if (words.length > 0) {
      const auto own = at::mm(x.narrow(0, begin, length), weight.t()).max(1);
      max = std::get<0>(own).to(max.scalar_type()), word = std::get<1>(own) + words.start;
    }
    const at::Tensor largest = words.group->all_reduce(max, comm::ReduceOp::max);
    best_N.narrow(0, begin, length)
        .copy_(
            words.group->all_reduce(word.masked_fill(max.ne(largest), vocab), comm::ReduceOp::min));
  }
  return assume<Dense{T, T, R}>(best_N);
}

}  // namespace moesh::nn
