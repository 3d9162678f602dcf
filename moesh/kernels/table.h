#pragma once
// One table of functions for each kind of device. The public functions (top_k, experts_forward ..)
// check their arguments and call the entry of the table for the device of their tensors.
// To add a backend: a file that makes its table, and a row in table.cpp.

#include <string>

#include "moesh/kernels/attention.h"
#include "moesh/kernels/cast.h"
#include "moesh/kernels/cross_entropy.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/gate.h"
#include "moesh/kernels/latent.h"
#include "moesh/kernels/norm.h"
#include "moesh/kernels/rope.h"
#include "moesh/kernels/sinks.h"
#include "moesh/kernels/sort.h"
#include "moesh/kernels/swiglu.h"
#include "moesh/kernels/topk.h"
#include "moesh/kernels/update.h"

namespace moesh::kernels {

using TopKKernel = TopK(const at::Tensor& scores_TE, std::int64_t k);
using SortKernel = Sorted(const at::Tensor& experts_TK, std::int64_t num_experts,
                          ExpertRange range);
using ReorderKernel = Reordered(const at::Tensor& counts_re, at::Device device);
using GateForwardKernel = at::Tensor(const at::Tensor& x_TD, const at::Tensor& gate_ED);
using GateBackwardKernel = GateGradients(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                                         const at::Tensor& d_logits_TE);
using GatherKernel = at::Tensor(const at::Tensor& x, const at::Tensor& index_R);
using CombineKernel = at::Tensor(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);
using ExpertsForwardKernel = ExpertsOutput(const ExpertsConfig& config,
                                           const ExpertsWeights& weights,
                                           const ExpertsInput& input);
using ExpertsBackwardKernel = ExpertsGradients(const ExpertsConfig& config,
                                               const ExpertsWeights& weights, ExpertsSaved saved,
                                               const at::Tensor& dy);
using AttentionForwardKernel = AttentionOutput(const AttentionConfig& config,
                                               const AttentionInput& input);
using AttentionBackwardKernel = AttentionGradients(const AttentionConfig& config,
                                                   const AttentionInput& input,
                                                   const at::Tensor& lse_BhL,
                                                   const at::Tensor& dy_BLhv);
using NormForwardKernel = NormOutput(const at::Tensor& x, const at::Tensor& weight_D, double eps);
using NormBackwardKernel = NormGradients(const at::Tensor& x, const at::Tensor& weight_D,
                                         const at::Tensor& r, const at::Tensor& dy);
using AddSinksKernel = at::Tensor(const at::Tensor& y, const at::Tensor& lse,
                                  const at::Tensor& sinks_h);
using SinkGradientKernel = at::Tensor(const at::Tensor& y, const at::Tensor& lse,
                                      const at::Tensor& sinks_h, const at::Tensor& dy);
using LogitSumsKernel = LogitSums(const at::Tensor& logits_NV, const at::Tensor& label_N);
using LogitGradientKernel = at::Tensor(const at::Tensor& logits_NV, const at::Tensor& label_N,
                                       const at::Tensor& total_N, const at::Tensor& weight_N);
using LatentForwardKernel = LatentHeads(const at::Tensor& kv, const at::Tensor& key,
                                        std::int64_t num_own);
using LatentBackwardKernel = LatentGradients(const at::Tensor& dk, const at::Tensor& dv,
                                             std::int64_t num_own);
using SwigluForwardKernel = at::Tensor(const at::Tensor& gate, const at::Tensor& up);
using SwigluBackwardKernel = SwigluGradients(const at::Tensor& gate, const at::Tensor& up,
                                             const at::Tensor& dh);
using AdamWKernel = void(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params);
using SumOfSquaresKernel = at::Tensor(const std::vector<at::Tensor>& tensors);
using CastKernel = void(const at::Tensor& to, const at::Tensor& from);
using RotateKernel = at::Tensor(const Rotation& rotation, const at::Tensor& x_BLhd);

/// Arguments are already checked, tensors are contiguous (heads, and rows of a norm, need not be),
/// and no gradient is recorded.
struct KernelTable {
  const char* name;
  TopKKernel* top_k;
  SortKernel* sort_by_expert;
  ReorderKernel* rank_major_to_expert_major;
  GateForwardKernel* gate_forward;
  GateBackwardKernel* gate_backward;
  GatherKernel* gather_rows;
  CombineKernel* combine_rows;
  ExpertsForwardKernel* experts_forward;
  ExpertsBackwardKernel* experts_backward;
  NormForwardKernel* norm_forward;
  NormBackwardKernel* norm_backward;
  RotateKernel* rotate_forward;
  RotateKernel* rotate_backward;
  AddSinksKernel* add_sinks_;  // y need not be contiguous
  SinkGradientKernel* sink_gradient;
  LogitSumsKernel* logit_sums;
  LogitGradientKernel* logit_gradient_;
  LatentForwardKernel* latent_heads_forward;
  LatentBackwardKernel* latent_heads_backward;
  SwigluForwardKernel* swiglu_forward;
  SwigluBackwardKernel* swiglu_backward;
  CastKernel* cast_into;
  AdamWKernel* adamw_;
  SumOfSquaresKernel* sum_of_squares;
  AttentionForwardKernel* attention_forward;    // null: none, attention is composed of LibTorch ops
  AttentionBackwardKernel* attention_backward;  // null: as above

  /// Own kernels of an accelerator do not take everything. Both say why not, or "" if they do; null
  /// takes everything. They are asked in every call, so the answer for a device is worth keeping.
  std::string (*refuses_device)(at::Device device) = nullptr;
  std::string (*refuses_experts)(const ExpertsConfig& config,
                                 const ExpertsWeights& weights) = nullptr;
};

const KernelTable& cpu_kernels();
/// LibTorch ops alone: any device, and what is not in the table of a device.
const KernelTable& aten_kernels();
/// Shapes alone, with the memory that the kernels of the modelled device would use.
const KernelTable& meta_kernels();
/// Own kernels for compute capability 9.0, the entries of aten where there is none; where they were
/// not compiled, a table that refuses every device.
const KernelTable& hopper_kernels();

/// `own`, unless gpu_kernels() or a refusal leads to the library. An Error(config) with the reason
/// where it refuses and nothing else may run.
const KernelTable& own_or_library(const KernelTable& own, at::Device device);
const KernelTable& own_or_library(const KernelTable& own, const ExpertsConfig& config,
                                  const ExpertsWeights& weights);

/// The table for tensors on this device; honours gpu_kernels().
const KernelTable& kernels_for(at::Device device);
/// The table for these experts, on the device of their weights.
const KernelTable& kernels_for(const ExpertsConfig& config, const ExpertsWeights& weights);

}  // namespace moesh::kernels
