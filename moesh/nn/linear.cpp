#include "moesh/nn/linear.h"

#include "moesh/fsdp/float8_counts.h"

namespace moesh::nn {
namespace {

class Float8Products final : public LinearProducts {
 public:
  Float8Products(const Stored& w)
      : tile_(w.spec.float8_tile), codes_(w.float8), counts_(float8_counts(w)) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& w) const override {
    auto sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    const at::Tensor rows = x.flatten(0, -2);
    if (counts_.defined() && counts_.has_inputs && !raw::is_second_run())
      kernels::count_float8_rows(counts_.activations(), rows, tile_);
    const at::Tensor y = codes_ ? kernels::float8_product_with(rows, codes_->codes, false)
                                : kernels::float8_product(rows, w.t(), tile_);
    return y.view(sizes);
  }
  at::Tensor backward(const at::Tensor& rows, const at::Tensor& w) const override {
    if (counts_.defined() && counts_.has_gradients)
      kernels::count_float8_rows(counts_.gradients(), rows, tile_);
    return codes_ ? kernels::float8_product_with(rows, codes_->codes, true)
                  : kernels::float8_product(rows, w, tile_);
  }

 private:
  std::int64_t tile_;
  std::shared_ptr<Float8Copy> codes_;
  kernels::Float8Counts counts_;
};

}  // namespace

OwnProducts float8_products(const Stored& w) { return c10::make_intrusive<Float8Products>(w); }

}  // namespace moesh::nn
