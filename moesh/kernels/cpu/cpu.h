#pragma once
// The CPU versions of the public functions. Arguments are already checked; tensors are contiguous
// (those of attention need not be).

#include "moesh/kernels/attention.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/sort.h"
#include "moesh/kernels/topk.h"

namespace moesh::kernels::cpu {

TopK top_k(const at::Tensor& scores_TE, std::int64_t k);
Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range);
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R);
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);
ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input);
ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  const ExpertsSaved& saved, const at::Tensor& dy);
AttentionOutput attention_forward(const AttentionConfig& config, const AttentionInput& input);
AttentionGradients attention_backward(const AttentionConfig& config, const AttentionInput& input,
                                      const at::Tensor& lse_BhL, const at::Tensor& dy_BLhv);

}  // namespace moesh::kernels::cpu
