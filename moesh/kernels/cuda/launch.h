#pragma once
// The kernels of the MoE layer, as plain functions: device pointers and sizes, no torch, no CUDA
// header. Experts and gate are for Hopper (compute capability 9.0), the others for compute
// capability 8.0 and later. Everything runs on `stream`, nothing waits for the
// device, nothing is allocated. bf16 tensors are void*, row-major, 16-byte aligned, without gaps.
// Same bits every time, and a row's result does not depend on the rows around it.
// T tokens, D model, F ffn, E experts, K top-k, R rows at their experts, sorted by expert
//
//   forward   gate_logits, top_k, sort, expand (x), up, down, combine (y)
//   backward  expand (dy), dh, dw2, score_gradient, bias_gradients, dx, combine (dx), expand (x), dw13,
//             gate_backward
// With LoRA, whose weights are frozen:
//   forward   low_rank (x), up, low_rank (act), down
//   backward  low_rank_db (dy), dh, low_rank_da (act), low_rank_db (d_gate, d_up), dx,
//             low_rank_da (x)
// One buffer [R, D] is enough for all of x, y, dy and dx at their experts, in this order.

#include <cstdint>

#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda {

/// A sentence that says what went wrong; null: nothing did.
using Error = const char*;
using Stream = void*;

/// Whether kernels run on this device, those of Hopper and the others: null, or why not.
Error check_hopper(int device);
Error check_ampere(int device);

// ---- experts ----

/// What LoRA adds to a product: rows [R, rank] times a matrix of each expert, which is part of the
/// same sum. up: b13 [E, 2, F, rank]; down: b2 [E, D, rank]; dh: a2 [E, rank, F]; dx: a13 [E, rank,
/// D].
struct LowRankTerm {
  const void* rows_Rr = nullptr;
  const void* matrix = nullptr;
  std::int64_t rank = 0;  // a multiple of 8; 0: nothing
};

/// Arguments that all kernels of one set of experts take.
struct GroupedExperts {
  std::int64_t num_rows;        // R: rows that the buffers hold; those in use end at ends_E[E - 1]
  std::int64_t model;           // D, a multiple of 8
  std::int64_t ffn;             // F, a multiple of 8
  std::int64_t num_experts;     // E, at most 512
  const std::int32_t* ends_E;   // end of each expert's rows
  const float* score_R;         // null: no scores
  bool score_before = false;    // the score multiplies the input of an expert, not its output
  bool clamped = false;         // GPT-OSS's activation
  const void* w1_EFD;           // gate
  const void* w3_EFD;           // up
  const void* w2_EDF;           // down
  const void* b1_EF = nullptr;  // biases; null: none
  const void* b3_EF = nullptr;
  const void* b2_ED = nullptr;
  bool frozen = false;  // nothing wants bias_gradients
  LowRankTerm added = {};
};

/// gate = W1 x, up = W3 x, and the hidden state with its score.
Error up(const GroupedExperts&, const void* x_RD, void* gate_RF, void* up_RF, void* act_RF, Stream);
/// y = W2 act (+ b2).
Error down(const GroupedExperts&, const void* act_RF, void* y_RD, Stream);

/// The number of floats per row that dh writes to d_score_terms.
constexpr std::int64_t num_score_terms(std::int64_t ffn) { return (ffn + 255) / 256; }
/// Reads gate and up, and writes d_gate and d_up over them. act as `up` made it is made again.
/// d_score_terms [num_score_terms, R], or null. With b1 or b3 and a score before the expert, what
/// is written lacks the score until bias_gradients, which comes next, unless they are frozen.
Error dh(const GroupedExperts&, const void* dy_RD, void* gate_RF, void* up_RF, void* act_RF,
         float* d_score_terms, Stream);
/// dx of each row; d_up null: only of W1.
Error dx(const GroupedExperts&, const void* d_gate_RF, const void* d_up_RF, void* dx_RD, Stream);
/// The most pairs of tiles that dw13 and dw2 work on in chunks (tiles.h), and the bytes for those.
constexpr int chunk_pairs(std::int64_t num_rows, std::int64_t model, std::int64_t ffn) {
  const int high = ceil_div(static_cast<int>(model), 2 * kTileM);
  return max_chunk_pairs(num_rows, high * ceil_div(static_cast<int>(ffn), kTileN / 2));
}
constexpr std::int64_t chunk_workspace(std::int64_t num_rows, std::int64_t model,
                                       std::int64_t ffn) {
  return 4ll * chunk_pairs(num_rows, model, ffn) * (kChunkSums + kChunkCounts);
}
/// Zeros for experts without rows. `workspace`: chunk_workspace bytes.
Error dw13(const GroupedExperts&, const void* x_RD, const void* d_gate_RF, const void* d_up_RF,
           void* dw1_EFD, void* dw3_EFD, void* workspace, Stream);
Error dw2(const GroupedExperts&, const void* dy_RD, const void* act_RF, void* dw2_EDF,
          void* workspace, Stream);

/// Sums the terms of dh in order, and adds b2's.
Error score_gradient(const GroupedExperts&, const void* dy_RD, const float* d_score_terms,
                     float* d_score_R, Stream);
/// Rows of one expert that are summed at once, and how many such sums there are at most.
constexpr std::int64_t kBiasRows = 256;
constexpr std::int64_t num_bias_terms(std::int64_t num_rows, std::int64_t num_experts) {
  return num_rows / kBiasRows + num_experts;
}
/// Sums over the rows of each expert; null: not wanted. d_gate and d_up are complete after it.
/// `terms` has room for num_bias_terms times the wider of D and F.
Error bias_gradients(const GroupedExperts&, const void* dy_RD, void* d_gate_RF, void* d_up_RF,
                     float* terms, void* db1_EF, void* db3_EF, void* db2_ED, Stream);

// ---- LoRA ----

/// The products of LoRA's matrices, which have a side of `rank`, with the rows of experts.
struct LowRank {
  std::int64_t num_rows, num_experts;
  const std::int32_t* ends_E;
  std::int64_t rank;       // a multiple of 8, at most kMaxRank
  std::int64_t width;      // of the rows, a multiple of 8
  std::int64_t num_parts;  // 1, or 2: the columns of a row go on in a second tensor
  const void* rows[2];
  const std::int32_t* token_R = nullptr;  // row i of the experts is row token_R[i]; null: row i
};
inline constexpr std::int64_t kMaxRank = 64;

/// Sums over rows: columns of a warp, warps of a block, ranks of a block, and how many blocks there
/// are at most: as many as an H200 has room for at once, so that all have equally much to do.
inline constexpr std::int64_t kLowRankColumns = 64, kLowRankWarps = 8;
constexpr std::int64_t low_rank_width(std::int64_t rank) { return rank <= 16 ? 16 : 32; }
constexpr std::int64_t low_rank_blocks_at_once(std::int64_t rank, bool is_db) {
  return 132 * (rank <= 16 ? 3 - is_db : 2 - is_db);
}
/// Blocks for the columns of a row, and for all rows: ranges of equally many, of any expert.
constexpr std::int64_t low_rank_columns(const LowRank& l) {
  const std::int64_t warps = l.num_parts * ((l.width + kLowRankColumns - 1) / kLowRankColumns);
  return (warps + kLowRankWarps - 1) / kLowRankWarps;
}
constexpr std::int64_t low_rank_ranges(const LowRank& l, bool is_db) {
  const std::int64_t ranks = low_rank_width(l.rank), most = (l.num_rows + 63) / 64,
                     blocks = low_rank_columns(l) * ((l.rank + ranks - 1) / ranks),
                     room = low_rank_blocks_at_once(l.rank, is_db) / blocks;
  return room < 1 ? 1 : room < most ? room : most;
}
/// The number of floats that low_rank_da and low_rank_db need besides their results: the sums of
/// each expert's part of a range, and with db a row's products with the columns of each block.
constexpr std::int64_t low_rank_sums(const LowRank& l, bool is_db) {
  return (low_rank_ranges(l, is_db) + l.num_experts) * l.num_parts * l.width * l.rank;
}
constexpr std::int64_t low_rank_workspace(const LowRank& l, bool is_db) {
  return low_rank_sums(l, is_db) + (is_db ? low_rank_columns(l) * l.num_rows * l.rank : 0);
}

/// low [R, rank] = scale rows a', a [E, rank, W]. Of one tensor of rows.
Error low_rank(const LowRank&, const void* a_ErW, float scale, void* low_Rr, Stream);
/// da [E, rank, W] = d_low' rows; zeros for experts without rows. Of one tensor of rows.
Error low_rank_da(const LowRank&, const void* d_low_Rr, float* workspace, void* da_ErW, Stream);
/// The rows are a gradient, and are read once for both: db [E, W, rank] = rows' low, and d_low [R,
/// rank] = scale rows b. W are the columns of all rows.
Error low_rank_db(const LowRank&, const void* b_EWr, const void* low_Rr, float scale,
                  float* workspace, void* db_EWr, void* d_low_Rr, Stream);

// ---- rows ----

/// rows[inverse[t, k]] = x[t] for all k. -1: no row. `width` is a multiple of 8.
Error expand(const void* x_TD, const std::int32_t* inverse_TK, void* rows_RD,
             std::int64_t num_tokens, std::int64_t top_k, std::int64_t width, Stream);
/// out[t] = addend[t] (null: 0) + the sum over k of rows[inverse[t, k]], in order, in float32. -1:
/// no row. `width` is a multiple of 8.
Error combine(const void* rows_RD, const std::int32_t* inverse_TK, const void* addend_TD,
              void* out_TD, std::int64_t num_tokens, std::int64_t top_k, std::int64_t width,
              Stream);

struct Sort {
  const std::int64_t* experts_TK;
  std::int64_t all_experts;  // a choice that is not one of them stops the device
  const float* weight_TK;    // null: score_R is not wanted
  std::int64_t num_tokens, top_k;
  std::int64_t first_expert, num_experts;  // those that take part; at most 512
  std::int32_t* workspace;                 // sort_workspace numbers
  std::int32_t* ends_E;                    // of the experts that take part
  std::int32_t* order_R;                   // row -> t * K + k; null: not wanted
  std::int32_t* token_R;                   // row -> t
  std::int32_t* inverse_TK;                // -1: that expert does not take part
  float* score_R;
};
std::int64_t sort_workspace(const Sort&);
/// A stable counting sort of the choices by expert.
Error sort(const Sort&, Stream);

/// The K largest of each token's scores, largest first, and the lowest expert of equals. A NaN is
/// larger than all numbers: it is chosen, and so reaches the loss. E is at most 256.
Error top_k(const float* scores_TE, std::int64_t num_tokens, std::int64_t num_experts,
            std::int64_t k, float* values_TK, std::int64_t* experts_TK, Stream);

// ---- gate ----

struct Gate {
  std::int64_t num_tokens, model;  // T, D (a multiple of 8)
  std::int64_t num_experts;        // E, at most 256
};

/// Experts in a multiple of 8, as the terms of the gate have them.
constexpr std::int64_t padded_experts(std::int64_t num_experts) {
  return (num_experts + 7) / 8 * 8;
}
/// The float32 gate as a sum of three bf16 terms, [4, padded_experts, D]: low, middle, high, high.
/// (Backward reads the last three.)
Error split_gate(const Gate&, const float* gate_ED, void* terms, Stream);
/// x gate', exact to float32 rounding.
Error gate_logits(const Gate&, const void* x_TD, const void* terms, float* logits_TE, Stream);
/// The bytes that gate_backward needs besides its results.
std::int64_t gate_workspace(const Gate&);
/// dx_TD null: not wanted. The workspace begins with d(logits) as bf16 terms [T, 3 padded_experts];
/// times the last three of the gate's they are dx.
Error gate_backward(const Gate&, const void* x_TD, const void* terms, const float* d_logits_TE,
                    void* workspace, float* d_gate_ED, void* dx_TD, Stream);

}  // namespace moesh::kernels::cuda
