#include "moesh/checkpoint/load.h"

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "moesh/base/error.h"

namespace moesh::checkpoint {
namespace {

using formats::Dtype;

constexpr const char *kInverse = "_scale_inv", *kBlocks = "_blocks", *kScales = "_scales";

// Elements of a file's tensor, from `first` on.
template <class T>
std::vector<T> read(const StoredTensor& from, std::int64_t first, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  from.file->read(from.file->file().header().data_start + from.info->begin +
                      static_cast<std::uint64_t>(first) * sizeof(T),
                  std::as_writable_bytes(std::span(to)));
  return to;
}

formats::TensorInfo info_of(const StoredTensor& values, std::string name,
                            std::vector<std::int64_t> shape) {
  return {.name = std::move(name),
          .dtype = Dtype::bf16,
          .shape = std::move(shape),
          .begin = values.info->begin,
          .end = values.info->end};
}

std::int64_t num_blocks(std::int64_t size, std::int64_t block) {
  return (size + block - 1) / block;
}

class Float8Blocks final : public Quantized {
 public:
  Float8Blocks(const kernels::Quantization& how, StoredTensor values, StoredTensor scales)
      : Quantized(how, values, scales, info_of(values, values.info->name, values.info->shape)) {}

  bool has_finite_scales() const override {
    const auto all = read<float>(scales_, 0, scales_.info->shape[0] * scales_.info->shape[1]);
    return std::all_of(all.begin(), all.end(), [](float x) { return std::isfinite(x); });
  }

  void decode(std::int64_t first, std::span<float> to) const override {
    static const auto numbers = [] {
      std::array<float, 256> all;
      for (unsigned bits = 0; bits < all.size(); ++bits)
        all[bits] =
            c10::Float8_e4m3fn(static_cast<std::uint8_t>(bits), c10::Float8_e4m3fn::from_bits());
      return all;
    }();
    const std::int64_t columns = info_.shape[1], count = static_cast<std::int64_t>(to.size());
    const std::int64_t scale_columns = scales_.info->shape[1];
    const std::int64_t first_block = first / columns / how_.rows,
                       last_block = (first + count - 1) / columns / how_.rows;
    const auto values = read<std::uint8_t>(values_, first, count);
    const auto scales = read<float>(scales_, first_block * scale_columns,
                                    (last_block - first_block + 1) * scale_columns);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = (first + i) / columns, column = (first + i) % columns;
      const std::int64_t scale =
          (row / how_.rows - first_block) * scale_columns + column / how_.columns;
      to[static_cast<std::size_t>(i)] =
          numbers[values[static_cast<std::size_t>(i)]] * scales[static_cast<std::size_t>(scale)];
    }
  }
  formats::DiskTensor stored_order(const formats::DiskTensor& tensor) const override {
    return tensor;
  }
};

class Mxfp4 final : public Quantized {
 public:
  static constexpr std::int64_t kGroup = 32;  // numbers with one exponent
  static constexpr std::uint8_t kNan = 255;   // as an exponent

  Mxfp4(StoredTensor values, StoredTensor scales, const std::string& name)
      : Quantized(kernels::Quantization::mxfp4(), values, scales,
                  info_of(values, name,
                          {values.info->shape[0], values.info->shape[2] * kGroup,
                           values.info->shape[1]})) {}

  bool has_finite_scales() const override {
    const auto& shape = scales_.info->shape;
    const auto all = read<std::uint8_t>(scales_, 0, shape[0] * shape[1] * shape[2]);
    return std::find(all.begin(), all.end(), kNan) == all.end();
  }
  void decode(std::int64_t first, std::span<float> to) const override {
    static constexpr float kNumbers[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const std::int64_t end = first + static_cast<std::int64_t>(to.size());
    const std::int64_t first_byte = first / 2, first_group = first / kGroup;
    const auto bytes = read<std::uint8_t>(values_, first_byte, (end + 1) / 2 - first_byte);
    const auto exponents =
        read<std::uint8_t>(scales_, first_group, (end - 1) / kGroup - first_group + 1);
    for (std::int64_t i = first; i < end; ++i) {
      const unsigned byte = bytes[static_cast<std::size_t>(i / 2 - first_byte)],
                     bits = i % 2 == 0 ? byte & 15 : byte >> 4;
      const std::uint8_t exponent = exponents[static_cast<std::size_t>(i / kGroup - first_group)];
      const float size = exponent == kNan ? std::numeric_limits<float>::quiet_NaN()
                                          : std::ldexp(kNumbers[bits & 7], exponent - 127);
      to[static_cast<std::size_t>(i - first)] = bits & 8 ? -size : size;
    }
  }
  // [E, N, 32 G] lies here where the model has [E, 32 G, N]: dimension 1 of a view is its last.
  formats::DiskTensor stored_order(const formats::DiskTensor& tensor) const override {
    formats::DiskTensor stored = tensor;
    const auto moved = [last = tensor.view.size() - 1](std::size_t dim) {
      return dim == 0 ? 0 : dim == 1 ? last : dim - 1;
    };
    for (std::size_t d = 0; d < tensor.view.size(); ++d) stored.view[moved(d)] = tensor.view[d];
    for (auto& source : stored.sources) {
      for (auto& dim : source.dims) dim = moved(dim);
      for (auto& [dim, at] : source.fixed) dim = moved(dim);
    }
    return stored;
  }
};

}  // namespace

std::vector<std::unique_ptr<Quantized>> find_quantized(
    const std::map<std::string, StoredTensor>& tensors, const std::filesystem::path& folder,
    const kernels::Quantization& block) {
  std::vector<std::unique_ptr<Quantized>> all;
  for (const auto& [name, values] : tensors) {
    const auto& shape = values.info->shape;
    const auto refuse_unless = [&](bool fits, const StoredTensor& scales,
                                   const std::string& wanted) {
      MOESH_CHECK(fits, ErrorKind::data, "'", folder.string(), "': tensor '", name, "' ", shape,
                  " has scales '", scales.info->name, "' of shape ", scales.info->shape,
                  " and type ", formats::name_of(scales.info->dtype), "; ", wanted);
    };
    if (values.info->dtype == Dtype::f8_e4m3) {
      const auto scales = tensors.find(name + kInverse);
      if (scales == tensors.end()) continue;
      const auto& s = *scales->second.info;
      refuse_unless(shape.size() == 2 && s.shape.size() == 2 && s.dtype == Dtype::f32,
                    scales->second, "a matrix of F32 is read");
      refuse_unless(s.shape[0] == num_blocks(shape[0], block.rows) &&
                        s.shape[1] == num_blocks(shape[1], block.columns),
                    scales->second,
                    detail::concat("one for each block of ", block.rows, " x ", block.columns,
                                   " is read (weight_block_size of config.json)"));
      all.push_back(std::make_unique<Float8Blocks>(block, values, scales->second));
    } else if (name.ends_with(kBlocks) && values.info->dtype == Dtype::u8) {
      const std::string model_name = name.substr(0, name.size() - std::string(kBlocks).size());
      const auto scales = tensors.find(model_name + kScales);
      if (scales == tensors.end()) continue;
      const auto& s = *scales->second.info;
      refuse_unless(shape.size() == 4 && shape[3] == Mxfp4::kGroup / 2 && s.dtype == Dtype::u8 &&
                        s.shape == std::vector<std::int64_t>(shape.begin(), shape.end() - 1),
                    scales->second, "blocks [E, N, G, 16] with a byte U8 for each are read");
      all.push_back(std::make_unique<Mxfp4>(values, scales->second, model_name));
    }
  }
  return all;
}

}  // namespace moesh::checkpoint
