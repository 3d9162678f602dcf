#pragma once
// One table of functions for each kind of device. The public functions (top_k, experts_forward ..)
// check their arguments and call the entry of the table for the device of their tensors.
// To add a backend: a file that makes its table, and its place in table.cpp.

#include <ATen/core/grad_mode.h>

#include <span>
#include <string>

#include "moesh/kernels/attention.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/float8.h"
#include "moesh/kernels/routing.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/kernels/update.h"

namespace moesh::kernels {

using SortKernel = Sorted(const at::Tensor& experts_TK, std::int64_t num_experts,
                          ExpertRange range);
using SumOfSquaresKernel = at::Tensor(const std::vector<at::Tensor>& tensors);

/// Arguments are already checked, tensors are contiguous (heads, and rows of a norm, need not be),
/// and no gradient is recorded. Every table begins as that of LibTorch's ops.
struct KernelTable {
  const char* name = "";
  decltype(kernels::top_k)* top_k = nullptr;
  decltype(kernels::gate_forward)* gate_forward = nullptr;
  decltype(kernels::gate_backward)* gate_backward = nullptr;
  decltype(kernels::weigh_forward)* weigh_forward = nullptr;
  decltype(kernels::weigh_backward)* weigh_backward = nullptr;
  decltype(kernels::count_choices)* count_choices = nullptr;
  decltype(kernels::balance_sums)* balance_sums = nullptr;
  decltype(kernels::balance_sums_backward)* balance_sums_backward = nullptr;
  SortKernel* sort_by_expert = nullptr;
  decltype(kernels::rank_major_to_expert_major)* rank_major_to_expert_major = nullptr;
  decltype(kernels::gather_rows)* gather_rows = nullptr;
  decltype(kernels::combine_rows)* combine_rows = nullptr;
  decltype(kernels::experts_forward)* experts_forward = nullptr;
  decltype(kernels::experts_backward)* experts_backward = nullptr;
  decltype(kernels::pack_float8)* pack_float8 = nullptr;
  decltype(kernels::unpack_float8)* unpack_float8 = nullptr;
  decltype(kernels::float8_product)* float8_product = nullptr;  // w_KN may be a transposed view
  /// Null: none; LibTorch's operations compute what own kernels do not take.
  bool (*takes_float8_product)(const at::Tensor& rows_MK, const at::Tensor& w_KN,
                               std::int64_t tile) = nullptr;
  decltype(kernels::write_weight_codes)* write_weight_codes = nullptr;  // null: likewise
  decltype(kernels::float8_product_with)* float8_product_with = nullptr;
  decltype(kernels::norm_forward)* norm_forward = nullptr;
  decltype(kernels::norm_backward)* norm_backward = nullptr;
  decltype(kernels::rotate_forward)* rotate_forward = nullptr;
  decltype(kernels::rotate_backward)* rotate_backward = nullptr;
  decltype(kernels::latent_heads_forward)* latent_heads_forward = nullptr;
  decltype(kernels::latent_heads_backward)* latent_heads_backward = nullptr;
  decltype(kernels::delta_rule_forward)* delta_rule_forward = nullptr;
  decltype(kernels::delta_rule_backward)* delta_rule_backward = nullptr;
  decltype(kernels::convolution_forward)* convolution_forward = nullptr;
  decltype(kernels::convolution_backward)* convolution_backward = nullptr;
  decltype(kernels::swiglu_forward)* swiglu_forward = nullptr;
  decltype(kernels::swiglu_backward)* swiglu_backward = nullptr;
  decltype(kernels::add_sinks_)* add_sinks_ = nullptr;  // y need not be contiguous
  decltype(kernels::sink_gradient)* sink_gradient = nullptr;
  decltype(kernels::logit_sums)* logit_sums = nullptr;
  decltype(kernels::logit_gradient_)* logit_gradient_ = nullptr;
  decltype(kernels::cast_all)* cast_all = nullptr;
  decltype(kernels::adamw_)* adamw_ = nullptr;
  SumOfSquaresKernel* sum_of_squares = nullptr;
  // Null: none, attention is composed of LibTorch ops.
  decltype(kernels::takes_attention)* takes_attention = nullptr;  // null: all, if it has kernels
  decltype(kernels::attention_forward)* attention_forward = nullptr;
  decltype(kernels::attention_backward)* attention_backward = nullptr;

  /// Own kernels do not take everything. Both say why not, or "" if they do; null takes everything.
  /// They are asked in every call, so the answer for a device is worth keeping.
  std::string (*refuses_device)(at::Device device) = nullptr;
  std::string (*refuses_experts)(const ExpertsConfig& config,
                                 const ExpertsWeights& weights) = nullptr;
};

const KernelTable& cpu_kernels();
/// LibTorch ops only: any device, and what is not in the table of a device.
const KernelTable& aten_kernels();
/// Shapes only, with the memory that the kernels of the modelled device would use.
const KernelTable& meta_kernels();
/// Own kernels that every GPU of compute capability 8.0 or later runs; without experts and gate.
/// Where they were not compiled, a table that refuses every device.
const KernelTable& ampere_kernels();
/// The same, and those for compute capability 9.0.
const KernelTable& hopper_kernels();

/// The first of `tables` that takes the device, if gpu_kernels() allows it, else LibTorch's. An
/// Error(config) with the reason of the last where none does and nothing else may run.
const KernelTable& first_that_takes(std::span<const KernelTable* const> tables, at::Device device);
/// That table, unless it refuses these experts: then LibTorch's, or an Error(config).
const KernelTable& for_experts(const KernelTable& table, const ExpertsConfig& config,
                               const ExpertsWeights& weights);

/// The table for tensors on this device; honours gpu_kernels().
const KernelTable& kernels_for(at::Device device);
/// The table for these experts, on the device of their weights.
const KernelTable& kernels_for(const ExpertsConfig& config, const ExpertsWeights& weights);

/// A tensor that a kernel takes as it lies in memory.
struct AsItLies {
  const at::Tensor& tensor;
};
inline const at::Tensor& plain(const AsItLies& t) { return t.tensor; }
template <class T>
const T& plain(const T& no_tensor) {
  return no_tensor;
}
/// The entry of the table for this device, on tensors without gaps and without autograd.
template <class R, class... Parameters, class... Arguments>
R call(at::Device device, R (*KernelTable::*kernel)(Parameters...), const Arguments&... arguments) {
  const at::NoGradGuard no_grad;
  return (kernels_for(device).*kernel)(plain(arguments)...);
}

}  // namespace moesh::kernels
