#include "moesh/kernels/meta/native.h"

#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/core/PythonOpRegistrationTrampoline.h>

#include <string>

namespace moesh::kernels::meta {
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
