#include "tests/kernels/float8_check.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/routing.h"

namespace moesh::float8_check {
namespace {

using Matrix = std::vector<std::vector<double>>;

Matrix zeros(std::size_t rows, std::size_t columns) {
  return Matrix(rows, std::vector<double>(columns, 0));
}
Matrix matrix(const at::Tensor& t) {
  const at::Tensor x = t.cpu().to(at::kDouble).contiguous();
  Matrix m = zeros(static_cast<std::size_t>(x.size(0)), static_cast<std::size_t>(x.size(1)));
  const double* from = x.data_ptr<double>();
  for (auto& row : m)
    for (double& number : row) number = *from++;
  return m;
}
Matrix transposed(const Matrix& m) {
  Matrix t = zeros(m[0].size(), m.size());
  for (std::size_t i = 0; i < m.size(); ++i)
    for (std::size_t j = 0; j < m[i].size(); ++j) t[j][i] = m[i][j];
  return t;
}

// Sign, exponent of four bits, three of the mantissa; 127 is no number.
double e4m3(unsigned bits) {
  const unsigned exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double size = exponent == 0
                          ? std::ldexp(mantissa / 8.0, -6)
                          : std::ldexp(1 + mantissa / 8.0, static_cast<int>(exponent) - 7);
  return bits & 128 ? -size : size;
}

double scale_of(double largest) {
  double scale = std::ldexp(1.0, -140);
  while (scale < std::max(largest, 1e-27) / 448) scale *= 2;
  return scale;
}

// The nearest code, of two the even one.
unsigned code_of(double x) {
  unsigned best = 0;
  for (unsigned bits = 0; bits < 127; ++bits) {
    const double off = std::abs(e4m3(bits) - std::abs(x)),
                 least = std::abs(e4m3(best) - std::abs(x));
    if (off < least || (off == least && bits % 2 == 0)) best = bits;
  }
  return std::signbit(x) ? best | 128 : best;
}

struct Codes {
  std::size_t rows, columns;  // of a block
  std::vector<std::vector<unsigned>> codes;
  Matrix scales;
  double scale(std::size_t i, std::size_t j) const { return scales[i / rows][j / columns]; }
  double code(std::size_t i, std::size_t j) const { return e4m3(codes[i][j]); }
};

Codes quantized(const Matrix& m, std::size_t rows, std::size_t columns) {
  const std::size_t R = m.size(), C = m[0].size();
  Codes q{rows, columns, std::vector(R, std::vector<unsigned>(C)),
          zeros((R + rows - 1) / rows, (C + columns - 1) / columns)};
  for (std::size_t i = 0; i < R; ++i)
    for (std::size_t j = 0; j < C; ++j) {
      double& largest = q.scales[i / rows][j / columns];
      largest = std::max(largest, std::abs(static_cast<double>(static_cast<float>(m[i][j]))));
    }
  for (auto& row : q.scales)
    for (double& x : row) x = scale_of(x);
  for (std::size_t i = 0; i < R; ++i)
    for (std::size_t j = 0; j < C; ++j)
      q.codes[i][j] = code_of(static_cast<double>(static_cast<float>(m[i][j])) / q.scale(i, j));
  return q;
}

// Y = a w^T, of rows [M, K] and a weight [N, K], block after block.
Matrix product(const Matrix& a, const Matrix& w, std::size_t tile) {
  const Codes qa = quantized(a, 1, tile), qb = quantized(w, tile, tile);
  Matrix y = zeros(a.size(), w.size());
  for (std::size_t m = 0; m < a.size(); ++m)
    for (std::size_t n = 0; n < w.size(); ++n)
      for (std::size_t begin = 0; begin < w[0].size(); begin += tile) {
        double inner = 0;
        for (std::size_t k = begin; k < std::min(begin + tile, w[0].size()); ++k)
          inner += qa.code(m, k) * qb.code(n, k);
        y[m][n] += qa.scale(m, begin) * qb.scale(n, begin) * inner;
      }
  return y;
}

at::Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype, double size = 1) {
  return at::randn(sizes, at::kDouble).mul_(size).to(dtype);
}
// Sizes that change by powers of two over the features: neighbours have other scales.
at::Tensor uneven(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::Tensor columns = at::arange(sizes.back(), at::kDouble).remainder(11).mul(-3).exp2();
  const at::Tensor rows = at::arange(sizes[sizes.size() - 2], at::kDouble).remainder(7).exp2();
  return normal(sizes, at::kDouble).mul_(columns).mul_(rows.unsqueeze(1)).to(dtype);
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 1e-2;
}

// Each number within the tolerance of the largest, as sums round.
std::string difference(const std::string& what, const at::Tensor& found, const Matrix& wanted,
                       double allowed) {
  if (static_cast<std::size_t>(found.size(0)) != wanted.size() ||
      static_cast<std::size_t>(found.size(1)) != wanted[0].size())
    return detail::concat(what, " is ", found.sizes());
  const Matrix m = matrix(found);
  double largest = 0;
  for (const auto& row : wanted)
    for (double x : row) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < m.size(); ++i)
    for (std::size_t j = 0; j < m[i].size(); ++j)
      if (!(std::abs(m[i][j] - wanted[i][j]) <= allowed * largest))
        return detail::concat(what, " (", i, ", ", j, ") is ", m[i][j], ", and not ", wanted[i][j]);
  return "";
}

std::string compared(const std::string& what, const kernels::QuantizedBox& box, const at::Tensor& x,
                     std::int64_t rows, std::int64_t columns) {
  const Codes wanted =
      quantized(matrix(x), static_cast<std::size_t>(rows), static_cast<std::size_t>(columns));
  if (auto text = difference(what + " scale", box.scales, wanted.scales, 0); !text.empty())
    return text;
  Matrix codes = zeros(wanted.codes.size(), wanted.codes[0].size());
  for (std::size_t i = 0; i < codes.size(); ++i)
    for (std::size_t j = 0; j < codes[i].size(); ++j) codes[i][j] = wanted.codes[i][j];
  return difference(what + " code", box.codes, codes, 0);
}

// Numbers, those that are not 0 and get the code 0, and codes of the largest magnitude.
using Counts = std::array<std::int64_t, 3>;
Counts& operator+=(Counts& a, const Counts& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}
Counts counts_of(const Matrix& m, std::int64_t rows, std::int64_t columns) {
  const Codes q = quantized(m, static_cast<std::size_t>(rows), static_cast<std::size_t>(columns));
  Counts counts{};
  for (std::size_t i = 0; i < m.size(); ++i)
    for (std::size_t j = 0; j < m[i].size(); ++j) {
      counts[0] += 1;
      counts[1] += q.code(i, j) == 0 && m[i][j] != 0;
      counts[2] += std::abs(q.code(i, j)) == 448;
    }
  return counts;
}
std::string difference(const std::string& what, const at::Tensor& found, const Counts& wanted) {
  const at::Tensor host = found.cpu();
  const auto* count = host.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (count[i] != wanted[i])
      return detail::concat(what, ": count ", i, " is ", count[i], ", and not ", wanted[i]);
  return "";
}

double silu(double x) { return x / (1 + std::exp(-x)); }

}  // namespace

std::string codes_complaint() {
  at::manual_seed(5);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t tile : {1, 4, 16, 128})
      for (const auto& [rows, columns] : {std::pair{5, 16}, {16, 33}, {9, 4}, {130, 7}, {3, 129}}) {
        at::Tensor x = uneven({rows, columns}, dtype);
        // Zeros, and numbers at the largest code and at the middle of two codes.
        x.select(0, 0).zero_();
        x.select(0, 1).fill_(448), x.select(0, 1).narrow(0, 0, 1).fill_(1.0625);
        x.select(0, 2).fill_(449), x.select(0, 2).narrow(0, columns - 1, 1).fill_(-0.0009765625);
        for (const at::Tensor& t : {x, x.t().contiguous().t()}) {
          if (auto text = compared("tile", kernels::float8_tiles(t, tile), t, 1, tile);
              !text.empty())
            return text;
          if (auto text = compared("block", kernels::float8_blocks(t, tile), t, tile, tile);
              !text.empty())
            return text;
        }
        if (rows != 5) continue;  // a stack of weights: each its own
        const at::Tensor stack = uneven({3, rows, columns}, dtype);
        const at::Tensor all = kernels::float8_weight(stack, tile);
        for (std::int64_t e = 0; e < 3; ++e)
          if (!all[e].equal(kernels::float8_weight(stack[e], tile)))
            return "block of another weight of the stack";
      }
  for (const double odd : {INFINITY, NAN}) {
    at::Tensor x = at::ones({2, 8});
    x[0][5] = odd;
    const at::Tensor is_odd = kernels::float8_rows(x, 4).isnan();
    if (!is_odd.equal(at::arange(16).view({2, 8}).div(4, "floor").eq(1)))
      return "tile of what is not finite is not NaN";
  }
  return "";
}

std::string counts_complaint() {
  at::manual_seed(7);
  const auto fresh = [] { return at::zeros({3}, at::kLong); };
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t tile : {4, 16, 128})
      for (const auto& [rows, columns] : {std::pair{5, 16}, {16, 33}, {130, 40}}) {
        at::Tensor x = uneven({rows, columns}, dtype);
        x.select(0, 0).zero_(), x.select(1, 3).zero_();
        // Around the least code, and around those of the largest magnitude.
        x.select(0, 1).fill_(440).narrow(0, 0, 1).fill_(0.0009765625);
        x.select(0, 2).fill_(-448).narrow(0, 0, 1).fill_(0.0009765626);
        x.select(0, 4).fill_(430);
        const at::Tensor token_R = at::tensor({2, 0, 1, 2, 4, 2}, at::kInt);
        const at::Tensor all = fresh(), some = fresh(), weight = fresh();
        kernels::count_float8_rows(all, x, tile);
        kernels::count_float8_rows(some, x, tile, token_R);
        kernels::count_float8_weight(weight, x, tile);
        Counts of_some{};
        for (std::int64_t r = 0; r < token_R.size(0); ++r)
          of_some += counts_of(matrix(x.narrow(0, token_R[r].item<std::int64_t>(), 1)), 1, tile);
        for (const auto& text : {difference("rows", all, counts_of(matrix(x), 1, tile)),
                                 difference("rows of tokens", some, of_some),
                                 difference("weight", weight, counts_of(matrix(x), tile, tile))})
          if (!text.empty()) return text;
      }
  return "";
}

std::string packed_complaint() {
  at::manual_seed(7);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const auto& [rows, width, tile] :
         {std::tuple{5, 12, 4}, {1, 3, 3}, {0, 8, 4}, {3, 16, 2}, {7, 384, 128}}) {
      const at::Tensor x = uneven({rows, width}, dtype);
      if (rows > 2) x[1].zero_(), x[2].neg_();
      const at::Tensor packed = kernels::pack_float8(x, tile);
      const std::int64_t used = width + width / tile, size = (used + 7) / 8 * 8;
      if (packed.scalar_type() != at::kLong || packed.size(0) != rows || packed.size(1) * 8 != size)
        return detail::concat("packed rows are ", packed.sizes());
      if (rows == 0) continue;
      const Codes wanted = quantized(matrix(x), 1, static_cast<std::size_t>(tile));
      const at::Tensor bytes = packed.view(at::kByte);
      const at::Tensor back = kernels::unpack_float8(packed, width, tile, dtype);
      Matrix all = zeros(static_cast<std::size_t>(rows), static_cast<std::size_t>(size)),
             numbers = zeros(static_cast<std::size_t>(rows), static_cast<std::size_t>(width));
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t j = 0; j < numbers[i].size(); ++j) {
          all[i][j] = wanted.codes[i][j];
          numbers[i][j] = wanted.scale(i, j) * wanted.code(i, j);
        }
        for (std::size_t t = 0; t < wanted.scales[i].size(); ++t)
          all[i][numbers[i].size() + t] = std::log2(wanted.scales[i][t]) + 127;
      }
      if (auto text = difference("packed byte", bytes, all, 0); !text.empty()) return text;
      if (back.scalar_type() != dtype) return "unpacked rows have another dtype";
      if (auto text = difference("unpacked number", back, numbers, 0); !text.empty()) return text;
      if (!back.equal(kernels::float8_rows(x, tile))) return "unpacked rows are not rounded ones";
    }
  for (const double odd : {INFINITY, NAN}) {
    at::Tensor x = at::ones({2, 8});
    x[0][5] = odd;
    const at::Tensor back = kernels::unpack_float8(kernels::pack_float8(x, 4), 8, 4, at::kFloat);
    if (!back.isnan().equal(at::arange(16).view({2, 8}).div(4, "floor").eq(1)))
      return "packed tile of what is not finite is not NaN";
  }
  return "";
}

std::string product_complaint(at::ScalarType dtype) {
  at::manual_seed(6);
  for (const std::size_t tile : {4, 16, 128})
    for (const auto& [m, n, k] : {std::tuple{5, 16, 16}, {3, 7, 33}, {1, 130, 5}, {6, 12, 200}}) {
      const at::Tensor a = uneven({m, k}, dtype), w = uneven({n, k}, dtype),
                       wide = uneven({k, n}, dtype);
      const auto t = static_cast<std::int64_t>(tile);
      if (auto text =
              difference("product with a transposed weight", kernels::float8_product(a, w.t(), t),
                         product(matrix(a), matrix(w), tile), tolerance(dtype));
          !text.empty())
        return text;
      if (auto text =
              difference("product", kernels::float8_product(a, wide, t),
                         product(matrix(a), transposed(matrix(wide)), tile), tolerance(dtype));
          !text.empty())
        return text;
    }
  return "";
}

std::string experts_complaint(at::ScalarType dtype) {
  using namespace kernels;
  at::manual_seed(8);
  constexpr std::int64_t T = 6, D = 12, F = 8, E = 3, K = 2, kTile = 4;
  const at::Tensor experts_TK =
      at::tensor({0, 1, 2, 0, 1, 2, 0, 1, 0, 2, 1, 0}, at::kLong).view({T, K});
  const Sorted sorted = sort_by_expert(experts_TK, E);
  const ExpertsWeights w{uneven({E, F, D}, dtype), uneven({E, F, D}, dtype),
                         uneven({E, D, F}, dtype)};
  at::Tensor x = uneven({T, D}, dtype), dy = uneven({T, D}, dtype);
  x.select(1, 3).mul_(1e-6), dy.select(1, 5).mul_(1e-6), dy.select(1, 6).zero_();
  const at::Tensor scores_TK = at::rand({T, K}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  for (const ScoreSide side : {ScoreSide::before, ScoreSide::after}) {
    const bool before = side == ScoreSide::before;
    const at::Tensor counts = at::zeros({3, 3}, at::kLong);
    const ExpertsConfig config{
        .scores = side, .float8_tile = kTile, .float8_counts = {.counts = counts}};
    Counts of_activations{}, of_gradients{};
    const auto out =
        experts_forward(config, w,
                        {x, sorted.ends_e, gather_rows(scores_TK.flatten(), sorted.order_R),
                         sorted.token_R, sorted.inverse_TK});
    const auto g = experts_backward(config, w, out.saved, dy);
    const auto as_run = [&](const Matrix& m) {  // as it is stored between two products
      Matrix rounded = m;
      for (auto& row : rounded)
        for (double& n : row) n = at::full({}, n, at::kDouble).to(dtype).item<double>();
      return rounded;
    };
    Matrix y = zeros(T, D), dx = zeros(T, D), d_scores = zeros(T, K);
    std::vector<Matrix> d1(E, zeros(F, D)), d3(E, zeros(F, D)), d2(E, zeros(D, F));
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t k = 0; k < K; ++k) {
        const auto e = experts_TK[t][k].item<std::int64_t>();
        const auto i = static_cast<std::size_t>(e);
        const double s = scores_TK[t][k].item<double>();
        const Matrix row = matrix(x.narrow(0, t, 1)), d_row = matrix(dy.narrow(0, t, 1));
        const Matrix w1 = matrix(w.w1_eFD[e]), w3 = matrix(w.w3_eFD[e]), w2 = matrix(w.w2_eDF[e]);
        const Matrix a = as_run(product(row, w1, kTile)), b = as_run(product(row, w3, kTile));
        Matrix h = zeros(1, F), d_a = zeros(1, F), d_b = zeros(1, F);
        const Matrix d_h = as_run(product(d_row, transposed(w2), kTile));
        double d_score = 0;
        for (std::size_t f = 0; f < F; ++f) {
          const double gate = before ? s * a[0][f] : a[0][f], up = before ? s * b[0][f] : b[0][f];
          const double sigmoid = 1 / (1 + std::exp(-gate));
          const double plain = silu(gate) * up, d = before ? d_h[0][f] : s * d_h[0][f];
          h[0][f] = before ? plain : s * plain;
          double dg = d * up * (sigmoid + silu(gate) * (1 - sigmoid)), du = d * silu(gate);
          d_score += before ? dg * a[0][f] + du * b[0][f] : d_h[0][f] * plain;
          d_a[0][f] = before ? s * dg : dg, d_b[0][f] = before ? s * du : du;
        }
        h = as_run(h), d_a = as_run(d_a), d_b = as_run(d_b);
        for (const Matrix& m : {row, h}) of_activations += counts_of(m, 1, kTile);
        for (const Matrix& m : {d_row, d_a, d_b}) of_gradients += counts_of(m, 1, kTile);
        const Matrix one = product(h, w2, kTile);
        const Matrix of_a = product(d_a, transposed(w1), kTile),
                     of_b = product(d_b, transposed(w3), kTile);
        d_scores[static_cast<std::size_t>(t)][static_cast<std::size_t>(k)] = d_score;
        for (std::size_t d = 0; d < D; ++d) {
          y[static_cast<std::size_t>(t)][d] += one[0][d];
          dx[static_cast<std::size_t>(t)][d] += of_a[0][d] + of_b[0][d];
          for (std::size_t f = 0; f < F; ++f) {  // not in float8
            d1[i][f][d] += d_a[0][f] * row[0][d], d3[i][f][d] += d_b[0][f] * row[0][d];
            d2[i][d][f] += d_row[0][d] * h[0][f];
          }
        }
      }
    const auto of_rows = gather_rows(g.scores_R, sorted.inverse_TK.flatten()).view({T, K});
    // In bfloat16 the gradients of gate and up are rounded twice, and codes may be others.
    const double allowed = dtype == at::kBFloat16 ? 6e-2 : tolerance(dtype);
    std::vector<std::string> all{difference("y", out.y, y, allowed),
                                 difference("d(x)", g.x, dx, allowed),
                                 difference("d(scores)", of_rows, d_scores, allowed)};
    for (std::int64_t e = 0; e < E; ++e) {
      const auto i = static_cast<std::size_t>(e);
      all.push_back(difference("d(w1)", g.weights.w1_eFD[e], d1[i], allowed));
      all.push_back(difference("d(w3)", g.weights.w3_eFD[e], d3[i], allowed));
      all.push_back(difference("d(w2)", g.weights.w2_eDF[e], d2[i], allowed));
    }
    if (dtype == at::kDouble) {  // else some codes are their neighbours
      all.push_back(difference("activations", counts[0], of_activations));
      all.push_back(difference("gradients", counts[1], of_gradients));
    }
    for (const auto& text : all)
      if (!text.empty()) return text;
  }
  return "";
}

}  // namespace moesh::float8_check
