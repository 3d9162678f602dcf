#include "moesh/kernels/quantized.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "moesh/kernels/check.h"

namespace moesh::kernels {
namespace {

using Kind = Quantization::Format;
using Sizes = std::vector<std::int64_t>;

// Numbers that are made at once: a few temporary tensors of this size in float32.
constexpr std::int64_t kPiece = 1 << 24;

// e2m1 numbers read as e4m3 are this much too small: their exponents have another bias.
constexpr std::int64_t kBias = 6;

// The scales of numbers whose codes are e4m3.
at::Tensor factors(const QuantizedBox& box) {
  if (box.how.kind == Kind::float8) return box.scales;
  // As the bits of a float32, whose exponent has the bias 127, like those of MXFP4.
  return box.scales.to(at::kInt).add(kBias).bitwise_left_shift(23).view(at::kFloat);
}

// A scale for each number of the box along both of its last dimensions.
at::Tensor spread(const QuantizedBox& box, at::Tensor scales) {
  const auto num_dims = box.start.size();
  const Sizes block = box.how.scale_block(num_dims);
  for (const std::size_t d : {num_dims - 1, num_dims - 2}) {
    const auto dim = static_cast<std::int64_t>(d);
    scales =
        scales.repeat_interleave(block[d], dim).narrow(dim, box.start[d] % block[d], box.length[d]);
  }
  return scales;
}

// The codes of the box as e4m3.
at::Tensor as_e4m3(const QuantizedBox& box) {
  if (box.how.kind == Kind::float8) return box.codes.view(at::kFloat8_e4m3fn);
  const at::Tensor halves =
      at::stack({box.codes.bitwise_and(15), box.codes.bitwise_right_shift(4)}, -1).flatten(-2);
  const auto last = box.start.size() - 1;
  const at::Tensor bits = halves.narrow(-1, box.start[last] % 2, box.length[last]);
  return bits.bitwise_and(8)
      .bitwise_left_shift(4)
      .bitwise_or(bits.bitwise_and(7).bitwise_left_shift(2))
      .view(at::kFloat8_e4m3fn);
}

// Indices [first, first + count) of the outermost dimension.
QuantizedBox piece_of(const QuantizedBox& box, std::int64_t first, std::int64_t count) {
  QuantizedBox piece = box;
  piece.start[0] += first, piece.length[0] = count;
  const auto narrowed = [&](const at::Tensor& t, std::int64_t block) {
    const std::int64_t begin = piece.start[0] / block,
                       end = (piece.start[0] + count + block - 1) / block;
    return t.narrow(0, begin - box.start[0] / block, end - begin);
  };
  piece.codes = narrowed(box.codes, box.how.code_block(box.start.size())[0]);
  piece.scales = narrowed(box.scales, box.how.scale_block(box.start.size())[0]);
  return piece;
}

std::int64_t num_elements(const Sizes& sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n *= size;
  return n;
}

// f(piece, its first index of the outermost dimension), piece after piece.
template <class Fn>
void each_piece(const QuantizedBox& box, Fn f) {
  const std::int64_t size = box.length[0],
                     step = std::max<std::int64_t>(1, kPiece / (num_elements(box.length) / size));
  for (std::int64_t first = 0; first < size; first += step)
    f(piece_of(box, first, std::min(step, size - first)), first);
}

// The nearest codes of numbers, whose scales are there.
void write_codes(const QuantizedBox& box, const at::Tensor& values) {
  const at::Tensor scaled = values.to(at::kFloat).div(spread(box, factors(box)));
  if (box.how.kind == Kind::float8) {
    box.codes.copy_(scaled.clamp(-448, 448).to(at::kFloat8_e4m3fn).view(at::kByte));
    return;
  }
  // The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  const at::Tensor borders =
      at::tensor({0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0}, at::kFloat).to(values.device());
  const at::Tensor bits =
      at::bucketize(scaled.abs().mul(1 << kBias), borders).add(scaled.lt(0).to(at::kLong).mul(8));
  const std::int64_t before = box.start.back() % 2, after = (before + box.length.back()) % 2;
  const at::Tensor halves =
      at::constant_pad_nd(bits, {before, after}).unflatten(-1, {-1, 2}).to(at::kByte);
  box.codes.copy_(halves.select(-1, 0).bitwise_or(halves.select(-1, 1).bitwise_left_shift(4)));
}

// The number of each block of a box in the whole tensor.
at::Tensor block_numbers(const BlockBox& box, const Sizes& shape, const Sizes& block,
                         const at::TensorOptions& options) {
  at::Tensor numbers = at::zeros({1}, options.dtype(at::kLong));
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const at::Tensor along =
        at::arange(box.start[d], box.start[d] + box.length[d], options.dtype(at::kLong));
    numbers = numbers.mul((shape[d] + block[d] - 1) / block[d]).unsqueeze(-1).add(along);
  }
  return numbers.squeeze(0);
}

}  // namespace

Sizes Quantization::code_block(std::size_t num_dims) const {
  Sizes block(num_dims, 1);
  if (kind == Kind::mxfp4) block[num_dims - 1] = 2;
  return block;
}

Sizes Quantization::scale_block(std::size_t num_dims) const {
  Sizes block(num_dims, 1);
  block[num_dims - 2] = rows, block[num_dims - 1] = columns;
  return block;
}

BlockBox covering(const Sizes& start, const Sizes& length, const Sizes& block) {
  BlockBox box{start, length};
  for (std::size_t d = 0; d < start.size(); ++d) {
    box.start[d] = start[d] / block[d];
    box.length[d] = length[d] == 0 ? 0 : (start[d] + length[d] - 1) / block[d] - box.start[d] + 1;
  }
  return box;
}

std::int64_t QuantizedBox::num_bytes() const {
  return static_cast<std::int64_t>(codes.nbytes() + scales.nbytes());
}

QuantizedBox quantize(const Quantization& how, const at::Tensor& values, const Sizes& start,
                      const Sizes& shape, double deviation) {
  MOESH_CHECK(shape.size() >= 2, ErrorKind::config, "a tensor of ", at::IntArrayRef(shape),
              " is quantized; it takes two dimensions or more");
  const at::NoGradGuard no_grad;
  if (deviation == 0) deviation = 1;  // all are 0, with any scale
  const bool is_mxfp4 = how.kind == Kind::mxfp4;
  const auto bytes = values.options().dtype(at::kByte);
  QuantizedBox box{how, start, values.sizes().vec(), {}, {}};
  const BlockBox codes = covering(start, box.length, how.code_block(shape.size())),
                 scales = covering(start, box.length, how.scale_block(shape.size()));
  box.codes = at::empty(codes.length, bytes);
  box.scales = at::empty(scales.length, is_mxfp4 ? bytes : bytes.dtype(at::kFloat));
  if (values.is_meta() || values.numel() == 0) return box;

  const at::Tensor numbers =
      block_numbers(scales, shape, how.scale_block(shape.size()), values.options());
  if (is_mxfp4) {
    const auto exponent = 127 + static_cast<std::int64_t>(std::lround(std::log2(deviation / 2)));
    box.scales.copy_(numbers.remainder(2).add(exponent).clamp(0, kMostExponent));
  } else {
    box.scales.copy_(numbers.remainder(7).to(at::kDouble).div(8).add(1).mul(deviation / 16));
  }
  each_piece(box, [&](const QuantizedBox& piece, std::int64_t first) {
    write_codes(piece, values.narrow(0, first, piece.length[0]));
  });
  return box;
}

void dequantize_into(const at::Tensor& to, const QuantizedBox& box) {
  MOESH_CHECK(to.defined() && to.sizes() == at::IntArrayRef(box.length) &&
                  to.device() == box.codes.device(),
              ErrorKind::data, "numbers of ", at::IntArrayRef(box.length), " on ",
              box.codes.device(), " are made of their codes in ", describe(to));
  if (to.numel() == 0) return;
  const at::NoGradGuard no_grad;
  each_piece(box, [&](const QuantizedBox& piece, std::int64_t first) {
    to.narrow(0, first, piece.length[0])
        .copy_(as_e4m3(piece).to(at::kFloat).mul_(spread(piece, factors(piece))));
  });
}

at::Tensor dequantize(const QuantizedBox& box, at::ScalarType dtype) {
  const at::Tensor out = at::empty(box.length, box.codes.options().dtype(dtype));
  dequantize_into(out, box);
  return out;
}

}  // namespace moesh::kernels
