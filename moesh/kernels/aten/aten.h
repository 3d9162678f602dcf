#pragma once
// The versions for accelerators: LibTorch ops only, so that they also run (and are tested) on CPU
// tensors. Arguments are already checked; tensors are contiguous.

#include "moesh/kernels/experts.h"
#include "moesh/kernels/sort.h"
#include "moesh/kernels/topk.h"

namespace moesh::kernels::aten {

TopK top_k(const at::Tensor& scores_TE, std::int64_t k);
Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range);
at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R);
at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK);
ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input);
ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  const ExpertsSaved& saved, const at::Tensor& dy);

}  // namespace moesh::kernels::aten
