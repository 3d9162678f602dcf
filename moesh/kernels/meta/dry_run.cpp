#include "moesh/kernels/meta/dry_run.h"

#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/Parallel.h>
#include <ATen/core/PythonOpRegistrationTrampoline.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_to_copy_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>

#include "moesh/base/error.h"
#include "moesh/kernels/meta/work.h"

namespace moesh::kernels::meta {

// LibTorch's own functions of meta tensors, where Python has put others over them.

/// `import torch` replaces the functions of the device meta by ones that are written in Python:
/// slow, and with other temporaries. Puts those that a step calls in front again, for as long as
/// the library lives; nothing where no Python is there.
void restore_native(torch::Library& library);

namespace {

std::atomic<at::DeviceType> modelled{at::kCPU};

/// Gives no memory and counts what was asked for. The size of a block is kept where its memory
/// would be.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const auto bytes = (static_cast<std::int64_t>(n) + rounding - 1) / rounding * rounding;
    live += bytes;
    peak = std::max(peak, live);
    return {nullptr, bytes == 0 ? nullptr : new std::int64_t(bytes), &release,
            c10::Device(c10::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override {}

  static inline std::int64_t live = 0, peak = 0, rounding = 1;

 private:
  static void release(void* block) {
    const std::unique_ptr<std::int64_t> bytes(static_cast<std::int64_t*>(block));
    if (bytes) live -= *bytes;
  }
};

CountingAllocator& counting_allocator() {
  static CountingAllocator allocator;  // storages point at it for as long as they live
  return allocator;
}

// The host reads zeros from meta. Checks of values (is a label wrong, is a score NaN) then
// find nothing.
std::atomic<std::int64_t> reads{0};

at::Scalar read_scalar(const at::Tensor& x) {
  ++reads;
  return at::isFloatingType(x.scalar_type()) ? at::Scalar(0.0) : at::Scalar(0);
}

at::Tensor to_copy(const at::Tensor& x, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> pin, bool non_blocking,
                   std::optional<at::MemoryFormat> format) {
  if (device.value_or(x.device()).is_meta())
    return at::compositeexplicitautograd::_to_copy(x, dtype, layout, device, pin, non_blocking,
                                                   format);
  ++reads;
  return at::zeros(x.sizes(), at::TensorOptions(*device).dtype(dtype.value_or(x.scalar_type())));
}

at::Tensor index_select(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  auto shape = x.sizes().vec();
  shape[static_cast<size_t>(at::maybe_wrap_dim(dim, x.dim()))] = index.numel();
  return at::empty(shape, x.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& /*indices*/,
                                    std::int64_t num_weights, std::int64_t /*padding_index*/,
                                    bool /*scale_by_frequency*/) {
  return at::empty({num_weights, grad.size(-1)}, grad.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> embedding_bag(
    const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets, bool,
    std::int64_t, bool, const std::optional<at::Tensor>&, bool, std::int64_t) {
  return {at::empty({offsets.size(0), weight.size(1)}, weight.options()), at::empty_like(indices),
          at::empty_like(offsets), at::empty_like(offsets)};
}

at::Tensor extreme(const at::Tensor& x) { return at::empty({}, x.options()); }

at::Tensor absolute(const at::Tensor& x) { return at::empty_like(x); }

at::Tensor logical_pair(const at::Tensor& a, const at::Tensor& b) {
  return at::empty(at::infer_size(a.sizes(), b.sizes()), a.options().dtype(at::kBool));
}
at::Tensor where(const at::Tensor& condition, const at::Tensor& a, const at::Tensor& b) {
  return at::empty(at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes())),
                   b.options());
}
at::Tensor logical_one(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options().dtype(at::kBool));
}

at::Tensor& masked_fill(at::Tensor& x, const at::Tensor& /*mask*/, const at::Scalar& /*value*/) {
  return x;
}

at::Tensor searchsorted(const at::Tensor& /*sorted*/, const at::Tensor& x, bool int32, bool,
                        std::optional<c10::string_view>, const std::optional<at::Tensor>&) {
  return at::empty(x.sizes(), x.options().dtype(int32 ? at::kInt : at::kLong));
}

// Sums of rows, in segments from one offset to the next.
at::Tensor segment_reduce(const at::Tensor& rows, c10::string_view,
                          const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                          const std::optional<at::Tensor>& offsets, std::int64_t, bool,
                          const std::optional<at::Scalar>&) {
  return at::empty({offsets->size(0) - 1, rows.size(1)}, rows.options());
}

// [R, A] by [e, A, B] in groups of rows -> [R, B]; [A, R] by [R, B] in groups of R -> [e, A, B].
at::Tensor grouped_mm(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& ends,
                      const std::optional<at::Tensor>& /*bias*/,
                      std::optional<at::ScalarType> dtype) {
  const auto options = a.options().dtype(dtype.value_or(a.scalar_type()));
  if (b.dim() == 3) return at::empty({a.size(0), b.size(2)}, options);
  return at::empty({ends->size(0), a.size(0), b.size(1)}, options);
}

void adamw(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
           at::TensorList, double, double, double, double, double, bool, bool,
           const std::optional<at::Tensor>&, const std::optional<at::Tensor>&) {}

// Fused attention: the output by positions, then heads, and one number for each query.
std::tuple<at::Tensor, at::Tensor> sdpa(const at::Tensor& q, const at::Tensor& /*k*/,
                                        const at::Tensor& v, double, bool,
                                        const std::optional<at::Tensor>& /*mask*/,
                                        std::optional<double>) {
  return {at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2),
          at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_backward(
    const at::Tensor& /*dy*/, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& /*y*/, const at::Tensor& /*lse*/, double, bool,
    const std::optional<at::Tensor>& /*mask*/, std::optional<double>) {
  // The kernels of CUDA sum d(q) in float32.
  const at::Tensor sums = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

}  // namespace

at::DeviceType modelled_device() { return modelled; }

struct DryRun::Parts {
  // meta has one allocator and one set of operations: a dry run on another thread is waited for.
  Parts() {
    MOESH_CHECK(owner != std::this_thread::get_id(), "a dry run within a dry run");
    mutex.lock();
    owner = std::this_thread::get_id();
  }
  ~Parts() {
    owner = std::thread::id();
    mutex.unlock();
  }

  static inline std::atomic<std::thread::id> owner;
  static inline std::mutex mutex;
  // The second is in front of the first.
  torch::Library native{torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__};
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__};
  c10::Allocator* outer = c10::GetAllocator(c10::kMeta);
  int num_threads = at::get_num_threads();
};

DryRun::DryRun(c10::DeviceType device) : parts_(std::make_unique<Parts>()) {
  restore_native(parts_->native);
  auto& m = parts_->library;
  m.impl("_local_scalar_dense", TORCH_FN(read_scalar));
  m.impl("_to_copy", TORCH_FN(to_copy));
  m.impl("index_select", TORCH_FN(index_select));
  m.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
  m.impl("_embedding_bag_forward_only", TORCH_FN(embedding_bag));
  m.impl("min", TORCH_FN(extreme));
  m.impl("max", TORCH_FN(extreme));
  m.impl("abs", TORCH_FN(absolute));
  m.impl("logical_and", TORCH_FN(logical_pair));
  m.impl("logical_or", TORCH_FN(logical_pair));
  m.impl("logical_not", TORCH_FN(logical_one));
  m.impl("where.self", TORCH_FN(where));
  m.impl("masked_fill_.Scalar", TORCH_FN(masked_fill));
  m.impl("searchsorted.Tensor", TORCH_FN(searchsorted));
  m.impl("segment_reduce", TORCH_FN(segment_reduce));
  m.impl("_grouped_mm", TORCH_FN(grouped_mm));
  m.impl("_fused_adamw_", TORCH_FN(adamw));
  m.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(sdpa));
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(sdpa_backward));
  modelled = device;
  reads = 0;
  take_work();
  CountingAllocator::live = CountingAllocator::peak = 0;
  CountingAllocator::rounding =
      device == c10::kCPU ? 1 : 512;  // blocks of CUDA's caching allocator
  c10::SetAllocator(c10::kMeta, &counting_allocator(), /*priority=*/1);
  // The work that is left on the host is small, and waking threads for it costs more.
  at::set_num_threads(1);
}

DryRun::~DryRun() {
  at::set_num_threads(parts_->num_threads);
  c10::SetAllocator(c10::kMeta, parts_->outer, /*priority=*/1);
  modelled = at::kCPU;
}

std::int64_t DryRun::num_reads() const { return reads; }
std::int64_t DryRun::live() { return CountingAllocator::live; }
std::int64_t DryRun::peak() { return CountingAllocator::peak; }
void DryRun::reset_peak() { CountingAllocator::peak = CountingAllocator::live; }

namespace {

// Which of the functions that are called alike it is follows from the operator.
template <class Op>
void put(torch::Library& library, typename Op::schema* function) {
  std::string name = Op::name;
  if (const std::string overload = Op::overload_name; !overload.empty()) name += "." + overload;
  library.impl(name.c_str(), function);
}

void restore_arithmetic(torch::Library& m) {
  using namespace at::_ops;
  namespace meta = at::meta;
  namespace composite = at::compositeexplicitautograd;
  put<add_Tensor>(m, meta::add), put<add__Tensor>(m, meta::add_);
  put<sub_Tensor>(m, meta::sub), put<sub__Tensor>(m, meta::sub_);
  put<mul_Tensor>(m, meta::mul), put<mul__Tensor>(m, meta::mul_);
  put<div_Tensor>(m, meta::div), put<div__Tensor>(m, meta::div_);
  put<add_Scalar>(m, composite::add), put<add__Scalar>(m, composite::add_);
  put<sub_Scalar>(m, composite::sub), put<sub__Scalar>(m, composite::sub_);
  put<mul_Scalar>(m, composite::mul), put<mul__Scalar>(m, composite::mul_);
  put<div_Scalar>(m, composite::div), put<div__Scalar>(m, composite::div_);
  put<remainder_Tensor>(m, meta::remainder), put<remainder_Scalar>(m, composite::remainder);
  put<mul_out>(m, meta::mul_outf), put<div_Tensor_mode>(m, meta::div);
  put<div_Scalar_mode>(m, composite::div);
  put<mm>(m, meta::mm), put<mm_out>(m, meta::mm_outf), put<bmm>(m, meta::bmm);
  put<addmm>(m, meta::addmm), put<addmm_>(m, meta::addmm_);
  put<sum>(m, composite::sum), put<sum_dim_IntList>(m, meta::sum);
  put<mean>(m, composite::mean), put<mean_dim>(m, meta::mean);
  put<cumsum>(m, meta::cumsum), put<amax>(m, meta::amax), put<argmax>(m, meta::argmax);
  put<topk>(m, meta::topk_symint), put<pow_Tensor_Scalar>(m, meta::pow);
  put<rsqrt>(m, meta::rsqrt), put<at::_ops::exp>(m, meta::exp), put<at::_ops::log>(m, meta::log);
  put<neg>(m, meta::neg), put<sigmoid>(m, meta::sigmoid), put<silu>(m, meta::silu);
  put<softplus>(m, meta::softplus), put<softplus_backward>(m, meta::softplus_backward);
  put<sigmoid_backward>(m, meta::sigmoid_backward), put<silu_backward>(m, meta::silu_backward);
  put<_softmax>(m, meta::_softmax), put<_softmax_backward_data>(m, meta::_softmax_backward_data);
  put<clamp>(m, meta::clamp), put<clamp_min>(m, meta::clamp_min);
  put<clamp_max>(m, meta::clamp_max), put<clamp_max_>(m, meta::clamp_max_);
  put<rsqrt_>(m, meta::rsqrt_), put<exp_>(m, meta::exp_), put<aminmax>(m, meta::aminmax);
  put<at::_ops::cos>(m, meta::cos), put<at::_ops::sin>(m, meta::sin);
  put<at::_ops::sqrt>(m, meta::sqrt), put<reciprocal>(m, meta::reciprocal);
  put<sign>(m, meta::sign), put<at::_ops::log1p>(m, meta::log1p);
  put<at::_ops::floor>(m, meta::floor), put<at::_ops::tanh>(m, meta::tanh);
  put<eq_Scalar>(m, meta::eq), put<eq_Tensor>(m, meta::eq);
  put<ne_Scalar>(m, meta::ne), put<ne_Tensor>(m, meta::ne);
  put<lt_Scalar>(m, meta::lt), put<lt_Tensor>(m, meta::lt);
  put<le_Scalar>(m, meta::le), put<le_Tensor>(m, meta::le);
  put<gt_Scalar>(m, meta::gt), put<gt_Tensor>(m, meta::gt);
  put<ge_Scalar>(m, meta::ge), put<ge_Tensor>(m, meta::ge);
}

void restore_the_rest(torch::Library& m) {
  using namespace at::_ops;
  namespace meta = at::meta;
  namespace composite = at::compositeexplicitautograd;
  put<zeros>(m, composite::zeros_symint), put<ones>(m, composite::ones_symint);
  put<zeros_like>(m, composite::zeros_like), put<ones_like>(m, composite::ones_like);
  put<empty_like>(m, composite::empty_like), put<new_zeros>(m, composite::new_zeros_symint);
  put<new_empty>(m, composite::new_empty_symint), put<arange_start_out>(m, meta::arange_outf);
  put<arange>(m, composite::arange), put<arange_start>(m, composite::arange);
  put<fill__Scalar>(m, meta::fill_), put<fill__Tensor>(m, meta::fill_);
  put<zero_>(m, meta::zero_), put<masked_fill_Scalar>(m, composite::masked_fill);
  put<cat>(m, meta::cat), put<stack>(m, composite::stack);
  put<_reshape_alias>(m, meta::_reshape_alias_symint);
  put<_unsafe_view>(m, composite::_unsafe_view_symint);
  put<gather>(m, meta::gather), put<embedding>(m, composite::embedding_symint);
  put<scatter_src>(m, meta::scatter), put<scatter_value>(m, meta::scatter);
  put<scatter_add>(m, meta::scatter_add), put<scatter_add_>(m, meta::scatter_add_);
  put<index_add>(m, meta::index_add), put<index_add_>(m, meta::index_add_);
}

}  // namespace

void restore_native(torch::Library& library) {
  if (!at::impl::PythonOpRegistrationTrampoline::getInterpreter()) return;
  restore_arithmetic(library);
  restore_the_rest(library);
}

}  // namespace moesh::kernels::meta
