#include "moesh/nn/linear.h"

namespace moesh::nn {
namespace {

class Float8Products final : public LinearProducts {
 public:
  explicit Float8Products(std::int64_t tile) : tile_(tile) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& w) const override {
    auto sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    return kernels::float8_product(x.flatten(0, -2), w.t(), tile_).view(sizes);
  }
  at::Tensor backward(const at::Tensor& rows, const at::Tensor& w) const override {
    return kernels::float8_product(rows, w, tile_);
  }

 private:
  std::int64_t tile_;
};

}  // namespace

OwnProducts float8_products(std::int64_t tile) {
  if (tile == 0) return {};
  return c10::make_intrusive<Float8Products>(tile);
}

}  // namespace moesh::nn
