#include "moesh/nn/linear.h"

namespace moesh::nn {
namespace {

class Float8Products final : public LinearProducts {
 public:
  Float8Products(std::int64_t tile, std::shared_ptr<Float8Copy> codes)
      : tile_(tile), codes_(std::move(codes)) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& w) const override {
    auto sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    const at::Tensor rows = x.flatten(0, -2);
    const at::Tensor y = codes_ ? kernels::float8_product_with(rows, codes_->codes, false)
                                : kernels::float8_product(rows, w.t(), tile_);
    return y.view(sizes);
  }
  at::Tensor backward(const at::Tensor& rows, const at::Tensor& w) const override {
    return codes_ ? kernels::float8_product_with(rows, codes_->codes, true)
                  : kernels::float8_product(rows, w, tile_);
  }

 private:
  std::int64_t tile_;
  std::shared_ptr<Float8Copy> codes_;
};

}  // namespace

OwnProducts float8_products(std::int64_t tile, const std::shared_ptr<Float8Copy>& codes) {
  if (tile == 0) return {};
  return c10::make_intrusive<Float8Products>(tile, codes);
}

}  // namespace moesh::nn
