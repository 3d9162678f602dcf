// The kernels for float8 on a GPU: each compared with the definition by LibTorch's operations on
// the same device. T tokens, D model, F ffn, E experts, K top-k, R rows at their experts

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/kernels/cuda/float8.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/experts.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/routing.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

using on_device::floats, on_device::in, on_device::indices, on_device::out;

const at::TensorOptions kBf16 = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);

at::Tensor bytes(at::IntArrayRef sizes) { return at::empty(sizes, kBf16.dtype(at::kByte)); }
at::Tensor float32(at::IntArrayRef sizes) { return at::empty(sizes, kBf16.dtype(at::kFloat)); }

// Random numbers whose tiles and blocks have very different magnitudes.
at::Tensor uneven(at::IntArrayRef sizes) {
  auto blocks = sizes.vec();
  for (auto d : {blocks.size() - 1, blocks.size() - 2}) blocks[d] = (blocks[d] + 63) / 64;
  at::Tensor scale = at::randn(blocks, kBf16.dtype(at::kFloat)).mul_(2).exp2_();
  scale = scale.repeat_interleave(64, -1).repeat_interleave(64, -2);
  const auto last = static_cast<std::int64_t>(sizes.size()) - 1;
  scale = scale.narrow(last, 0, sizes[last]).narrow(last - 1, 0, sizes[last - 1]);
  return at::randn(sizes, scale.options()).mul_(scale).to(at::kBFloat16);
}

struct Codes {
  at::Tensor codes, scales;
  operator cuda::Float8Rows() const { return {out(codes), floats(scales)}; }
};

Codes codes_of_rows(const at::Tensor& x, const at::Tensor& inverse_TK = {},
                    std::int64_t num_rows = -1, const at::Tensor& rows = {}) {
  if (num_rows < 0) num_rows = x.size(0);
  const std::int64_t C = x.size(1);
  const Codes c{bytes({num_rows, C}),
                float32({cuda::float8_tiles(C), cuda::scale_pitch(num_rows)})};
  on_device::OnDeviceOf{x}("expand8", cuda::expand8, in(x), indices(inverse_TK), out(rows),
                           cuda::Float8Rows(c), x.size(0),
                           inverse_TK.defined() ? inverse_TK.size(1) : 1, num_rows, C);
  return c;
}

struct CodedWeight {
  at::Tensor codes, transposed, scales;
  cuda::Float8Weight plain() const { return {in(codes), floats(scales), false}; }
  cuda::Float8Weight turned() const { return {in(transposed), floats(scales), true}; }
};

CodedWeight codes_of_weight(const at::Tensor& w_ENC) {
  const std::int64_t E = w_ENC.size(0), N = w_ENC.size(1), C = w_ENC.size(2);
  const CodedWeight c{bytes({E, N, C}), bytes({E, C, N}),
                      float32({E, cuda::float8_tiles(N), cuda::float8_tiles(C)})};
  on_device::OnDeviceOf{w_ENC}("float8_weight", cuda::float8_weight, in(w_ENC),
                               w_ENC.scalar_type() == at::kFloat, out(c.codes), out(c.transposed),
                               floats(c.scales), E, N, C);
  return c;
}

// NaN is one code whatever its sign.
at::Tensor without_sign_of_nan(const at::Tensor& codes) {
  return codes.where(codes.bitwise_and(127).ne(127), at::full_like(codes, 127));
}

void expect_same_codes(const at::Tensor& codes, const at::Tensor& scales_RB,
                       const QuantizedBox& want, const std::string& what) {
  EXPECT_TRUE(at::equal(without_sign_of_nan(codes), without_sign_of_nan(want.codes))) << what;
  EXPECT_TRUE(at::equal(scales_RB.nan_to_num(-1), want.scales.nan_to_num(-1))) << what;
}

at::Tensor by_rows(const at::Tensor& scales_BP, std::int64_t num_rows) {
  return scales_BP.narrow(1, 0, num_rows).t().contiguous();
}

TEST(Float8OnGpu, RowsHaveTheCodesOfTheDefinition) {
  at::manual_seed(1);
  for (const std::int64_t width : {128, 384, 1408, 200, 72}) {
    at::Tensor x = uneven({301, width});
    x[3].zero_(), x[4].mul_(1e-30), x[5].mul_(1e30), x[6].mul_(3e-38);
    x[7][1] = std::numeric_limits<double>::infinity(), x[8][0] = std::nan("");
    for (int i = 0; i < 16; ++i)
      x[9 + i].copy_(at::arange(width, kBf16).add(1).mul(0.25 * (i + 1)));
    x[30].fill_(448), x[31].fill_(450), x[32].fill_(446), x[33].fill_(-1e-27);
    const Codes got = codes_of_rows(x);
    expect_same_codes(got.codes, by_rows(got.scales, 301), float8_tiles(x, 128),
                      std::to_string(width));
  }
}

// Bytes and numbers are those of LibTorch's operations; the scale of a zero tile has a byte, too.
TEST(Float8OnGpu, PackedRowsAreThoseOfTheDefinition) {
  at::manual_seed(3);
  for (const std::int64_t width : {128, 384, 1408, 7168})
    for (const std::int64_t num_rows : {0, 1, 37, 301}) {
      const std::string what = std::to_string(num_rows) + " rows of " + std::to_string(width);
      at::Tensor x = uneven({num_rows, width});
      if (num_rows > 10) {
        x[3].zero_(), x[4].mul_(1e-30), x[5].mul_(1e30), x[6].mul_(3e-38);
        x[7][1] = std::numeric_limits<double>::infinity(), x[8][0] = std::nan("");
        x[9].fill_(448), x[10].fill_(-450);
      }
      const at::Tensor got = pack_float8(x, 128), want = aten_kernels().pack_float8(x, 128);
      ASSERT_EQ(got.sizes(), want.sizes()) << what;
      const at::Tensor a = got.view(at::kByte), b = want.view(at::kByte);
      EXPECT_TRUE(at::equal(without_sign_of_nan(a.narrow(1, 0, width)),
                            without_sign_of_nan(b.narrow(1, 0, width))))
          << what;
      EXPECT_TRUE(
          at::equal(a.narrow(1, width, a.size(1) - width), b.narrow(1, width, b.size(1) - width)))
          << what;
      const at::Tensor back = unpack_float8(got, width, 128, at::kBFloat16),
                       numbers = aten_kernels().unpack_float8(want, width, 128, at::kBFloat16);
      EXPECT_TRUE(at::equal(back.isnan(), numbers.isnan())) << what;
      EXPECT_TRUE(at::equal(back.nan_to_num(-1), numbers.nan_to_num(-1))) << what;
    }
  // A view that begins anywhere; and types that own kernels do not take.
  const at::Tensor all = uneven({3, 8 * 128}).flatten(), x = all.narrow(0, 4, 1024).view({2, 512});
  EXPECT_TRUE(at::equal(pack_float8(x, 128), aten_kernels().pack_float8(x.clone(), 128)));
  EXPECT_TRUE(at::equal(pack_float8(x.to(at::kFloat), 128), pack_float8(x, 128)));
}

TEST(Float8OnGpu, RowsComeToTheirExperts) {
  at::manual_seed(2);
  const at::Tensor x = uneven({211, 384});
  const Sorted sorted =
      sort_by_expert(at::randint(10, {211, 3}, kBf16.dtype(at::kLong)), 10, {2, 5});
  const std::int64_t R = sorted.token_R.size(0);
  const at::Tensor rows = at::empty({R, 384}, kBf16);
  const Codes got = codes_of_rows(x, sorted.inverse_TK, R, rows);
  const std::int64_t last = sorted.ends_e[-1].item<int>();
  ASSERT_GT(last, 100);
  const at::Tensor used = x.index_select(0, sorted.token_R.narrow(0, 0, last));
  EXPECT_TRUE(at::equal(rows.narrow(0, 0, last), used));
  expect_same_codes(got.codes.narrow(0, 0, last), by_rows(got.scales, last),
                    float8_tiles(used, 128), "gathered");
}

TEST(Float8OnGpu, WeightsHaveTheCodesOfTheDefinition) {
  at::manual_seed(3);
  for (const auto& [E, N, C] : {std::array<std::int64_t, 3>{3, 256, 384},
                                {1, 1408, 2048},
                                {2, 200, 72},
                                {5, 128, 136},
                                {1, 8, 640}}) {
    at::Tensor w = uneven({E, N, C});
    w[0][0][0] = std::nan("");
    const CodedWeight got = codes_of_weight(w);
    const QuantizedBox want = float8_blocks(w, 128);
    const std::string what = std::to_string(N) + " x " + std::to_string(C);
    expect_same_codes(got.codes, got.scales, want, what);
    EXPECT_TRUE(at::equal(got.transposed, got.codes.transpose(1, 2))) << what;
    // Master weights are rounded to bfloat16 first.
    const at::Tensor master = w.to(at::kFloat).mul(1.0001), narrow = master.to(at::kBFloat16);
    const WeightCodes kept = empty_weight_codes(master), wanted = empty_weight_codes(narrow);
    const UseGpuKernels use(GpuKernels::own);
    write_weight_codes(kept, master), write_weight_codes(wanted, narrow);
    EXPECT_TRUE(at::equal(kept.codes, wanted.codes)) << what;
    EXPECT_TRUE(at::equal(kept.transposed, wanted.transposed)) << what;
  }
}

struct Load {
  const char* name;
  std::vector<std::int64_t> rows;
};
const std::vector<Load> kLoads{
    {"awkward", {0, 1, 63, 64, 65, 0, 127, 128, 129, 300, 511, 0}},
    {"one", {0, 0, 777, 0}},
    {"single", {5}},
    {"even", {256, 256, 256}},
};

at::Tensor ends_of(const Load& load) {
  return at::tensor(load.rows, at::kLong).cumsum(0).to(at::kInt).to(at::kCUDA);
}

// [R, C] times each expert's [C, N], of the rounded numbers.
at::Tensor product(const Load& load, const at::Tensor& a, const at::Tensor& w_ECN) {
  const at::Tensor x = float8_rows(a, 128).to(at::kDouble),
                   w = float8_weight(w_ECN, 128).to(at::kDouble);
  at::Tensor out = at::empty({a.size(0), w.size(2)}, x.options());
  std::int64_t first = 0;
  for (std::size_t e = 0; e < load.rows.size(); first += load.rows[e++])
    out.narrow(0, first, load.rows[e]) =
        x.narrow(0, first, load.rows[e]).mm(w[static_cast<std::int64_t>(e)]);
  return out;
}

// Every row by its own norm: a wrong scale of one tile must show. A result is rounded to bfloat16,
// by up to 2e-3 (twice with a bias), and tensor cores keep about 14 bits of a sum.
void expect_rows(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor norms = want.norm(2, {1}).clamp_min(1e-20);
  const at::Tensor errors = (got.to(at::kDouble) - want).norm(2, {1}) / norms;
  const at::Tensor bad = errors.le(6e-3).logical_not();
  EXPECT_FALSE(bad.any().item<bool>())
      << what << ": " << bad.sum().item<std::int64_t>() << " of " << bad.numel()
      << " rows are wrong, the first is " << bad.nonzero()[0].item<std::int64_t>()
      << ", the largest error " << errors.nan_to_num(1e9).max().item<double>();
}

at::Tensor nans(std::int64_t rows, std::int64_t width) {
  return at::full({rows, width}, std::nan(""), kBf16);
}

struct Size {
  std::int64_t depth, width;
};

TEST(Float8OnGpu, ProductsFollowTheDefinition) {
  at::manual_seed(4);
  for (const Load& load : kLoads)
    for (const auto& [K, N] : {Size{128, 128}, Size{384, 256}, Size{1408, 640}, Size{256, 1408},
                               Size{144, 72}, Size{2048, 384}}) {
      const auto E = static_cast<std::int64_t>(load.rows.size());
      const at::Tensor ends = ends_of(load);
      const std::int64_t R = ends[-1].item<int>();
      const std::string what =
          std::string(load.name) + ", depth " + std::to_string(K) + ", width " + std::to_string(N);
      const at::Tensor a = uneven({R, K}), b = uneven({R, K});
      const at::Tensor w = uneven({E, N, K}), v = uneven({E, N, K});
      const at::Tensor wt = w.transpose(1, 2).contiguous(), vt = v.transpose(1, 2).contiguous();
      const at::Tensor bias = at::randn({E, N}, kBf16), score = float32({R}).uniform_();
      const Codes qa = codes_of_rows(a), qb = codes_of_rows(b);
      const CodedWeight qw = codes_of_weight(w), qv = codes_of_weight(v), qwt = codes_of_weight(wt),
                        qvt = codes_of_weight(vt);
      cuda::Float8Product p{.num_rows = R,
                            .width = N,
                            .depth = K,
                            .num_experts = E,
                            .ends_E = indices(ends),
                            .a = {},
                            .b = {},
                            .out = {}};
      const on_device::OnDeviceOf run(a);
      const at::Tensor of_w = product(load, a, wt), of_v = product(load, a, vt),
                       of_b = product(load, b, vt);
      for (const bool turned : {false, true}) {
        const std::string how = what + (turned ? ", transposed" : "");
        const cuda::Float8Weight one = turned ? qwt.turned() : qw.plain(),
                                 two = turned ? qvt.turned() : qv.plain();
        const at::Tensor y = nans(R, N), z = nans(R, N);
        p.a[0] = qa, p.a[1] = {}, p.b[0] = one, p.b[1] = {}, p.out[0] = out(y), p.out[1] = nullptr;
        p.bias = nullptr, p.score = nullptr;
        run("one", cuda::float8_product, p);
        expect_rows(y, of_w, how + ", one");
        if (load.rows.size() == 1) {
          y.fill_(std::nan(""));
          p.ends_E = nullptr;
          run("all", cuda::float8_product, p);
          p.ends_E = indices(ends);
          expect_rows(y, of_w, how + ", all rows of one");
        }
        y.fill_(std::nan(""));
        p.bias = in(bias), p.score = floats(score);
        run("bias", cuda::float8_product, p);
        const at::Tensor expert = at::searchsorted(ends, at::arange(R, ends.options()), true, true);
        expect_rows(y, of_w + bias.to(at::kDouble).index_select(0, expert) * score.unsqueeze(1),
                    how + ", bias");
        p.bias = nullptr, p.score = nullptr;
        y.fill_(std::nan(""));
        p.b[1] = two, p.out[1] = out(z);
        run("two", cuda::float8_product, p);
        expect_rows(y, of_w, how + ", first of two");
        expect_rows(z, of_v, how + ", second of two");
        y.fill_(std::nan(""));
        p.a[1] = qb, p.out[1] = nullptr;
        run("sum", cuda::float8_product, p);
        expect_rows(y, of_w + of_b, how + ", sum of two");
      }
    }
}

// Whole numbers have exact sums: to the bit, and the same once more.
TEST(Float8OnGpu, WholeNumbersAreExact) {
  at::manual_seed(5);
  const Load& load = kLoads[0];
  const at::Tensor ends = ends_of(load);
  const auto E = static_cast<std::int64_t>(load.rows.size());
  const std::int64_t R = ends[-1].item<int>(), K = 512, N = 384;
  const at::Tensor x = at::randint(-3, 4, {R, K}, kBf16), w = at::randint(-3, 4, {E, N, K}, kBf16);
  const Codes q = codes_of_rows(x);
  const CodedWeight qw = codes_of_weight(w);
  const at::Tensor want = product(load, x, w.transpose(1, 2)).to(at::kBFloat16);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor y = nans(R, N);
    on_device::OnDeviceOf{x}("product", cuda::float8_product,
                             cuda::Float8Product{.num_rows = R,
                                                 .width = N,
                                                 .depth = K,
                                                 .num_experts = E,
                                                 .ends_E = indices(ends),
                                                 .a = {q},
                                                 .b = {qw.plain()},
                                                 .out = {out(y)}});
    EXPECT_TRUE(at::equal(y, want));
  }
}

TEST(Float8OnGpu, DenseProductsFollowTheDefinition) {
  at::manual_seed(6);
  for (const std::int64_t M : {0, 1, 100, 1000})
    for (const auto& [K, N] : {Size{128, 128}, Size{144, 72}, Size{2048, 1536}, Size{640, 200}}) {
      const at::Tensor x = uneven({M, K}), w = uneven({N, K}), wt = w.t().contiguous();
      const std::string what = std::to_string(M) + ", " + std::to_string(K);
      if (M == 0) {
        EXPECT_EQ(float8_product(x, wt, 128).sizes(), (at::IntArrayRef{0, N}));
        continue;
      }
      const at::Tensor want =
          float8_rows(x, 128).to(at::kDouble).mm(float8_weight(wt, 128).to(at::kDouble));
      expect_rows(float8_product(x, w.t(), 128), want, what + " forward");
      expect_rows(float8_product(x, wt, 128), want, what + " backward");
      WeightCodes kept = empty_weight_codes(w);
      write_weight_codes(kept, w);
      EXPECT_TRUE(at::equal(float8_product_with(x, kept, false), float8_product(x, w.t(), 128)));
      if (N % 16 == 0) {
        EXPECT_TRUE(at::equal(float8_product_with(at::ones({M, N}, kBf16), kept, true),
                              float8_product(at::ones({M, N}, kBf16), w, 128)));
      }
    }
}

struct Case {
  Activation activation = Activation::swiglu;
  ScoreSide scores = ScoreSide::after;
  bool biases = false, indexed = true, later = false;
  std::int64_t T = 500, D = 256, F = 384, E = 6, K = 2;
};

struct Results {
  at::Tensor y;
  ExpertsGradients d;
  at::Tensor counts;  // on the host
  std::vector<std::pair<const char*, at::Tensor>> all() const {
    const ExpertsWeights& w = d.weights;
    return {{"y", y},         {"x", d.x},       {"scores", d.scores_R},
            {"w1", w.w1_eFD}, {"w3", w.w3_eFD}, {"w2", w.w2_eDF},
            {"b1", w.b1_eF},  {"b3", w.b3_eF},  {"b2", w.b2_eD}};
  }
};

// The experts as the table of the device has them beside LibTorch's.
TEST(Float8OnGpu, ExpertsFollowTheDefinition) {
  using enum ScoreSide;
  for (const Case& c :
       {Case{}, Case{.scores = before}, Case{.scores = none, .indexed = false},
        Case{.activation = Activation::clamped_swiglu, .biases = true}, Case{.later = true},
        Case{.indexed = false}, Case{.T = 1, .E = 3},
        Case{.T = 900, .D = 2048, .F = 1408, .E = 64, .K = 6}, Case{.D = 144, .F = 208}}) {
    at::manual_seed(7);
    const auto random = [&](at::IntArrayRef sizes, double width) {
      return at::randn(sizes, kBf16).div_(std::sqrt(width));
    };
    const auto D = c.D, F = c.F, E = c.E;
    const Sorted sorted = sort_by_expert(
        std::get<1>(at::rand({c.T, E}, kBf16.dtype(at::kFloat)).topk(c.K, 1)), E, {0, E});
    const std::int64_t R = c.T * c.K;
    const ExpertsWeights w{
        random({E, F, D}, static_cast<double>(D)),   random({E, F, D}, static_cast<double>(D)),
        random({E, D, F}, static_cast<double>(F)),   c.biases ? random({E, F}, 4) : at::Tensor(),
        c.biases ? random({E, F}, 4) : at::Tensor(), c.biases ? random({E, D}, 4) : at::Tensor()};
    ExpertsInput input{.x = random({c.indexed ? c.T : R, D}, 1), .ends_e = sorted.ends_e};
    if (c.indexed) input.token_R = sorted.token_R, input.inverse_TK = sorted.inverse_TK;
    if (c.scores != none) input.scores_R = float32({R}).uniform_(0.2, 1);
    const at::Tensor dy = random(input.x.sizes(), 1);
    const ExpertsConfig config{.activation = c.activation,
                               .scores = c.scores,
                               .weights_later = c.later,
                               .float8_tile = 128};
    const auto run = [&](GpuKernels kernels, const ExpertsWeights& w) {
      const UseGpuKernels use(kernels);
      const Poison poison;
      const ExpertsOutput forward = experts_forward(config, w, input);
      ExpertsConfig counted = config;
      counted.float8_counts.counts = at::zeros({3, 3}, kBf16.dtype(at::kLong));
      Results r{forward.y, experts_backward(counted, w, forward.saved, dy),
                counted.float8_counts.counts.cpu()};
      if (c.later) r.d.weights = r.d.weights_later();
      return r;
    };
    ExpertsWeights kept = w;
    for (auto& [codes, of] : {std::pair(&kept.codes.w1, w.w1_eFD),
                              {&kept.codes.w3, w.w3_eFD},
                              {&kept.codes.w2, w.w2_eDF}}) {
      *codes = empty_weight_codes(of);
      write_weight_codes(*codes, of);
    }
    const Results own = run(GpuKernels::own, w), again = run(GpuKernels::own, kept),
                  want = run(GpuKernels::library, w);
    const auto got = own.all(), same = again.all(), reference = want.all();
    const std::string what = "D " + std::to_string(D) + (c.biases ? ", biases" : "") +
                             (c.indexed ? "" : ", rows") + ", scores " +
                             std::to_string(static_cast<int>(c.scores));
    const at::Tensor off = (own.counts - want.counts).abs();
    EXPECT_TRUE(own.counts.equal(again.counts)) << what;
    EXPECT_TRUE(own.counts.select(1, 0).equal(want.counts.select(1, 0))) << what;
    EXPECT_TRUE(off.le(want.counts.div(20, "floor") + 30).all().item<bool>()) << what << off;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::string name = what + ": " + got[i].first;
      ASSERT_EQ(got[i].second.defined(), reference[i].second.defined()) << name;
      if (!got[i].second.defined()) continue;
      // A sum near the middle of two codes may get the other one, which is 6 % off.
      expect_close(got[i].second, reference[i].second, 1.5e-2, name);
      EXPECT_TRUE(at::equal(got[i].second, same[i].second)) << name << ", of kept codes";
    }
  }
}

TEST(Float8OnGpu, OwnKernelsSayWhatTheyRefuse) {
  const UseGpuKernels use(GpuKernels::own);
  const at::Tensor x = at::randn({4, 128}, kBf16), w = at::randn({2, 128, 128}, kBf16);
  const ExpertsInput input{.x = x, .ends_e = at::tensor({2, 4}, at::kInt).to(at::kCUDA)};
  const ExpertsConfig config{.scores = ScoreSide::none, .float8_tile = 64};
  EXPECT_THROW(experts_forward(config, {w, w, w}, input), Error);
}

}  // namespace
}  // namespace moesh::kernels
