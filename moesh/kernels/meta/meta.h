#pragma once
// The versions for the device meta: shapes alone, with the memory that the versions of another
// device would use. Arguments are already checked. Routed rows spread evenly over the experts.

#include "moesh/kernels/attention.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/sort.h"
#include "moesh/kernels/topk.h"

namespace moesh::kernels::meta {

/// The device whose memory tensors on meta stand for: that of the DryRun, else the CPU.
at::DeviceType modelled_device();

TopK top_k(const at::Tensor& scores_TE, std::int64_t k);
/// The counts are on the host, where meta can have values too.
Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range);
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R);
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);
ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input);
ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  const ExpertsSaved& saved, const at::Tensor& dy);
/// Where the modelled device has a kernel of ours.
AttentionOutput attention_forward(const AttentionInput& input);
AttentionGradients attention_backward(const AttentionInput& input);

}  // namespace moesh::kernels::meta
