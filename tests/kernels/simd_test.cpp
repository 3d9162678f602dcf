// Every instruction set that this machine runs, each op against a plain loop in float64.
#include "moesh/kernels/cpu/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "moesh/base/random.h"

namespace moesh::kernels::cpu {
namespace {

constexpr std::int64_t kSizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64};

double value(double x) { return x; }
double value(float x) { return x; }
double value(Bf16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
template <class T>
T make(double x) {
  if constexpr (sizeof(T) == 2) {
    const auto f = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &f, sizeof(f));
    return Bf16{static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return static_cast<T>(x);
  }
}
template <class T>
constexpr double kTolerance = sizeof(T) == 8   ? 1e-14
                              : sizeof(T) == 4 ? 2e-6
                                               : 8e-3;

template <class T>
std::vector<T> numbers(std::int64_t n, const char* name, double scale = 1) {
  std::vector<T> out;
  const Random random(1, name);
  for (std::int64_t i = 0; i < n; ++i) out.push_back(make<T>(scale * random.normal(i)));
  return out;
}

template <class T>
const SimdOps<T>& ops_of(const SimdTable& table) {
  if constexpr (sizeof(T) == 8)
    return table.f64;
  else if constexpr (sizeof(T) == 4)
    return table.f32;
  else
    return table.bf16;
}

template <class T>
class Simd : public testing::Test {
 protected:
  template <class F>
  void each(const F& f) {
    for (int i = 0; i < num_simd_tables(); ++i) {
      SCOPED_TRACE(simd_table(i).name);
      f(ops_of<T>(simd_table(i)));
    }
  }
};
using Types = testing::Types<double, float, Bf16>;
TYPED_TEST_SUITE(Simd, Types);

// Rows in another order, as tokens are.
std::vector<std::int32_t> shuffled(std::int64_t n) {
  std::vector<std::int32_t> index;
  for (std::int64_t i = 0; i < n; ++i)
    index.push_back(static_cast<std::int32_t>((i * 5 + 3) % (n + 2)));
  return index;
}

TYPED_TEST(Simd, TransposesRowsAndPads) {
  using T = TypeParam;
  this->each([&](const auto& ops) {
    for (std::int64_t rows : kSizes) {
      for (std::int64_t columns : kSizes) {
        const std::int64_t stride = columns + 3, depth = rows + 2, ld = depth + 5;
        const auto x = numbers<T>((rows + 2) * stride, "x");
        const auto index = shuffled(rows);
        for (const std::int32_t* by : {static_cast<const std::int32_t*>(nullptr), index.data()}) {
          std::vector<T> out(columns * ld, make<T>(9));
          const RowView<T> view{x.data(), stride, by};
          ops.transpose(view, rows, columns, out.data(), ld, depth);
          for (std::int64_t c = 0; c < columns; ++c) {
            for (std::int64_t r = 0; r < ld; ++r) {
              const double want = r < rows ? value(view.row(r)[c]) : r < depth ? 0 : 9;
              ASSERT_EQ(value(out[c * ld + r]), want)
                  << rows << " x " << columns << " at " << r << ", " << c;
            }
          }
        }
      }
    }
  });
}

TYPED_TEST(Simd, PacksPanels) {
  using T = TypeParam;
  this->each([&](const auto& ops) {
    for (std::int64_t k : kSizes) {
      for (std::int64_t n : kSizes) {
        for (bool pairs : {false, true}) {
          if (pairs && sizeof(T) != 2) continue;
          const std::int64_t depth = (k + 3) / 2 * 2, stride = n + 1, wide = k + 2;
          // Element (r, c) of a panel.
          const auto at = [&](const std::vector<T>& panel, std::int64_t r, std::int64_t c) {
            return value(pairs ? panel[r / 2 * 2 * kPanelColumns + 2 * c + r % 2]
                               : panel[r * kPanelColumns + c]);
          };
          const auto x = numbers<T>((k + 2) * stride, "x"), w = numbers<T>(n * wide, "w");
          const auto index = shuffled(k);
          const RowView<T> view{x.data(), stride, index.data()};
          std::vector<T> panel(depth * kPanelColumns, make<T>(9));
          ops.pack(view, nullptr, k, depth, n, pairs, panel.data());
          for (std::int64_t r = 0; r < depth; ++r) {
            for (std::int64_t c = 0; c < n; ++c)
              ASSERT_EQ(at(panel, r, c), r < k ? value(view.row(r)[c]) : 0) << k << " x " << n;
          }
          std::vector<T> turned(depth * kPanelColumns, make<T>(9));
          ops.pack_transposed(w.data(), w.data(), wide, n, k, pairs, turned.data());
          for (std::int64_t r = 0; r < (pairs ? (k + 1) / 2 * 2 : k); ++r) {
            for (std::int64_t c = 0; c < n; ++c)
              ASSERT_EQ(at(turned, r, c), r < k ? value(w[c * wide + r]) : 0) << k << " x " << n;
          }
        }
      }
    }
  });
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Activated {
  double h, dg, du;
};
Activated activated(bool clamped, double g, double u) {
  if (!clamped) {
    const double s = sigmoid(g);
    return {g * s * u, u * (s + g * s * (1 - s)), g * s};
  }
  const double gc = std::min(g, 7.0), uc = std::clamp(u, -7.0, 7.0), s = sigmoid(1.702 * gc);
  return {(uc + 1) * gc * s, g > 7 ? 0 : (uc + 1) * (s + 1.702 * gc * s * (1 - s)),
          std::abs(u) > 7 ? 0 : gc * s};
}

TYPED_TEST(Simd, Activates) {
  using T = TypeParam;
  using A = Accumulate<T>;
  this->each([&](const auto& ops) {
    for (std::int64_t columns : kSizes) {
      for (bool clamped : {false, true}) {
        for (bool plain : {false, true}) {
          const std::int64_t rows = 3, ld = columns + 2;
          const auto g = numbers<T>(rows * ld, "g", 5), u = numbers<T>(rows * ld, "u", 5);
          std::vector<A> wide_g, wide_u;
          for (std::int64_t i = 0; i < rows * ld; ++i)
            wide_g.push_back(value(g[i])), wide_u.push_back(value(u[i]));
          const auto dh = numbers<A>(rows * ld, "dh"), pre = numbers<A>(rows, "pre"),
                     post = numbers<A>(rows, "post");
          const auto b1 = plain ? std::vector<A>(columns) : numbers<A>(columns, "b1"),
                     b3 = plain ? b1 : numbers<A>(columns, "b3");
          std::vector<T> h(rows * ld), again(rows * ld), dg(rows * ld), du(rows * ld);
          std::vector<A> d_pre(rows, 1), d_post(rows, 1), db1(columns, 1), db3(columns, 1);
          ops.activate({clamped, rows, columns, wide_g.data(), wide_u.data(), ld,
                        plain ? nullptr : pre.data(), post.data(), b1.data(), b3.data(), h.data(),
                        ld});
          ops.activate_backward({clamped,
                                 rows,
                                 columns,
                                 g.data(),
                                 u.data(),
                                 ld,
                                 plain ? nullptr : pre.data(),
                                 post.data(),
                                 b1.data(),
                                 b3.data(),
                                 dh.data(),
                                 ld,
                                 dg.data(),
                                 du.data(),
                                 again.data(),
                                 ld,
                                 plain ? nullptr : d_pre.data(),
                                 d_post.data(),
                                 plain ? nullptr : db1.data(),
                                 plain ? nullptr : db3.data()});
          std::vector<double> sum1(columns, 1), sum3(columns, 1);
          for (std::int64_t r = 0; r < rows; ++r) {
            double sum_pre = 1, sum_post = 1;
            const double p = plain ? 1 : pre[r];
            for (std::int64_t j = 0; j < columns; ++j) {
              const std::int64_t i = r * ld + j;
              const auto v = activated(clamped, p * value(g[i]) + b1[j], p * value(u[i]) + b3[j]);
              const double tol = kTolerance<T> * 40;
              const double d = post[r] * dh[i];
              ASSERT_NEAR(value(h[i]), post[r] * v.h, tol);
              ASSERT_EQ(value(again[i]), value(h[i]));
              ASSERT_NEAR(value(dg[i]), p * d * v.dg, tol);
              ASSERT_NEAR(value(du[i]), p * d * v.du, tol);
              sum_pre += d * (v.dg * value(g[i]) + v.du * value(u[i])), sum_post += dh[i] * v.h;
              sum1[j] += d * v.dg, sum3[j] += d * v.du;
            }
            const double tol = (sizeof(A) == 8 ? 1e-11 : 2e-4) * columns;
            ASSERT_NEAR(d_post[r], sum_post, tol);
            if (!plain) ASSERT_NEAR(d_pre[r], sum_pre, tol);
          }
          for (std::int64_t j = 0; j < columns && !plain; ++j) {
            ASSERT_NEAR(db1[j], sum1[j], sizeof(A) == 8 ? 1e-11 : 1e-3);
            ASSERT_NEAR(db3[j], sum3[j], sizeof(A) == 8 ? 1e-11 : 1e-3);
          }
        }
      }
    }
  });
}

TYPED_TEST(Simd, AddsAndStoresRows) {
  using T = TypeParam;
  using A = Accumulate<T>;
  this->each([&](const auto& ops) {
    for (std::int64_t columns : {1, 3, 16, 31, 32, 33, 64}) {
      const std::int64_t rows = 12, ld = 70;
      const auto c = numbers<A>(rows * ld, "c"), scale = numbers<A>(rows, "scale"),
                 bias = numbers<A>(columns, "bias");
      const auto index = shuffled(rows);
      std::vector<A> acc(20 * ld, 1);
      ops.add_rows(c.data(), ld, rows, columns, index.data(), 0, scale.data(), bias.data(),
                   acc.data(), ld);
      std::vector<T> out(rows * 64), memory(rows * 64 + 64);
      T* streamed = memory.data();  // whole lines can go past the caches
      while (reinterpret_cast<std::uintptr_t>(streamed) % 64) ++streamed;
      ops.put_rows(c.data(), ld, rows, columns, scale.data(), bias.data(), out.data(), 64);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t j = 0; j < columns; ++j) {
          const double want = c[r * ld + j] + static_cast<double>(scale[r]) * bias[j];
          ASSERT_NEAR(acc[index[r] * ld + j], 1 + want, kTolerance<A> * 8);
          ASSERT_NEAR(value(out[r * 64 + j]), want, kTolerance<T> * 8);
        }
      }
      ops.put_rows(c.data(), ld, rows, columns, nullptr, nullptr, out.data(), 64);
      ops.stream_rows(c.data(), ld, rows, columns, streamed, 64);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t j = 0; j < columns; ++j)
          ASSERT_EQ(value(streamed[r * 64 + j]), value(out[r * 64 + j]));
      }
    }
  });
}

TYPED_TEST(Simd, SumsRows) {
  using T = TypeParam;
  using A = Accumulate<T>;
  this->each([&](const auto& ops) {
    for (std::int64_t columns : kSizes) {
      const std::int64_t rows = 5, stride = columns + 1;
      const auto x = numbers<T>((rows + 2) * stride, "x");
      const auto index = shuffled(rows);
      const auto scale = numbers<A>(rows, "scale"), v = numbers<A>(columns, "v");
      const RowView<T> view{x.data(), stride, index.data()};
      std::vector<A> sums(columns, 2), dots(rows, 2);
      ops.sum_rows(view, rows, columns, scale.data(), sums.data());
      ops.dot_rows(view, rows, columns, v.data(), dots.data());
      const std::vector<std::int32_t> positions{2, -1, 0, 2};
      std::vector<T> combined(columns);
      ops.combine(x.data(), stride, positions.data(), 4, columns, combined.data());
      for (std::int64_t j = 0; j < columns; ++j) {
        double want = 2;
        for (std::int64_t r = 0; r < rows; ++r) want += scale[r] * value(view.row(r)[j]);
        ASSERT_NEAR(sums[j], want, kTolerance<A> * 20);
        ASSERT_NEAR(value(combined[j]), 2 * value(x[2 * stride + j]) + value(x[j]),
                    kTolerance<T> * 8);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        double want = 2;
        for (std::int64_t j = 0; j < columns; ++j) want += v[j] * value(view.row(r)[j]);
        ASSERT_NEAR(dots[r], want, kTolerance<A> * 100);
      }
    }
  });
}

TYPED_TEST(Simd, RoundsToEvenAndKeepsNan) {
  using T = TypeParam;
  if constexpr (sizeof(T) == 2) {
    this->each([&](const auto& ops) {
      const std::vector<float> in{1.00390625f,   1.01171875f,
                                  -0.0f,         std::numeric_limits<float>::infinity(),
                                  std::nanf(""), 3e38f};
      std::vector<T> out(in.size());
      ops.put_rows(in.data(), 0, 1, static_cast<std::int64_t>(in.size()), nullptr, nullptr,
                   out.data(), 0);
      EXPECT_EQ(value(out[0]), 1.0);  // halfway: to even
      EXPECT_EQ(value(out[1]), 1.015625);
      EXPECT_EQ(out[2].bits, 0x8000);
      EXPECT_TRUE(std::isinf(value(out[3])));
      EXPECT_TRUE(std::isnan(value(out[4])));
      EXPECT_NEAR(value(out[5]) / 3e38, 1, 4e-3);
    });
  } else {
    this->each([&](const auto& ops) {
      const std::vector<T> in{T(1.00390625), std::numeric_limits<T>::quiet_NaN()};
      std::vector<T> out(2);
      ops.put_rows(in.data(), 0, 1, 2, nullptr, nullptr, out.data(), 0);
      EXPECT_EQ(out[0], in[0]);
      EXPECT_TRUE(std::isnan(out[1]));
    });
  }
}

TEST(SimdGemm, MultipliesAnySize) {
  for (int i = 0; i < num_simd_tables(); ++i) {
    for (std::int64_t m : {1, 3, 4, 5, 9}) {
      for (std::int64_t n : {1, 15, 16, 17, 40}) {
        for (std::int64_t k : {1, 2, 33}) {
          const auto a = numbers<double>(m * (k + 1), "a"), b = numbers<double>(k * (n + 2), "b");
          std::vector<double> c(m * (n + 3), 1);
          for (bool add : {false, true})
            simd_table(i).f64.gemm(m, n, k, a.data(), k + 1, b.data(), n + 2, c.data(), n + 3, add);
          for (std::int64_t r = 0; r < m; ++r) {
            for (std::int64_t j = 0; j < n; ++j) {
              double want = 0;
              for (std::int64_t p = 0; p < k; ++p) want += a[r * (k + 1) + p] * b[p * (n + 2) + j];
              ASSERT_NEAR(c[r * (n + 3) + j], 2 * want, 1e-12);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesh::kernels::cpu
