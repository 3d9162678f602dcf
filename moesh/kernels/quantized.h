#pragma once
// Weights in few bits with a scale for each block of them, as some models are published. What is
// not trained may rest so, and becomes numbers where it is used. LibTorch ops, on every device.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace moesh::kernels {

/// How a tensor [.., rows, columns] is quantized:
///   float8  a byte (e4m3) for each number, and a float32 scale for each block (DeepSeek-V3);
///   mxfp4   a byte for each two numbers of a row (e2m1, the first in the low half), and for each 32
///           of a row a byte, the exponent of a power of two (GPT-OSS).
struct Quantization {
  enum class Format { float8, mxfp4 } kind = Format::float8;
  std::int64_t rows = 128, columns = 128;  // of a block with one scale

  static Quantization mxfp4() { return {Format::mxfp4, 1, 32}; }
  const char* name() const { return kind == Format::float8 ? "float8" : "MXFP4"; }
  /// Numbers along each dimension of a tensor that share a byte of codes, or a scale.
  std::vector<std::int64_t> code_block(std::size_t num_dims) const;
  std::vector<std::int64_t> scale_block(std::size_t num_dims) const;
  bool operator==(const Quantization&) const = default;
};

/// Blocks that a box has a part of, counted in blocks.
struct BlockBox {
  std::vector<std::int64_t> start, length;
};
BlockBox covering(const std::vector<std::int64_t>& start, const std::vector<std::int64_t>& length,
                  const std::vector<std::int64_t>& block);

/// A box of a quantized tensor, wherever it begins: bytes and scales that it has a part of are
/// whole here.
struct QuantizedBox {
  Quantization how;
  std::vector<std::int64_t> start, length;  // in the tensor
  at::Tensor codes;                         // bytes
  at::Tensor scales;                        // float32, or bytes: exponents

  std::int64_t num_bytes() const;
};

/// The largest exponent of MXFP4 that is taken: beyond, numbers of the type are too large for
/// float32.
inline constexpr std::int64_t kMostExponent = 248;

/// Random weights [box] of this standard deviation, in another form: rounded to what the codes say
/// with scales that follow from the deviation and from the number of the block in the tensor
/// [shape], so that no number depends on how a tensor is cut.
QuantizedBox quantize(const Quantization& how, const at::Tensor& values,
                      const std::vector<std::int64_t>& start,
                      const std::vector<std::int64_t>& shape, double deviation);

/// The numbers, in this dtype: a code times its scale in float32, then rounded.
at::Tensor dequantize(const QuantizedBox& box, at::ScalarType dtype);
/// The same into contiguous memory of the shape of the box.
void dequantize_into(const at::Tensor& to, const QuantizedBox& box);

}  // namespace moesh::kernels
