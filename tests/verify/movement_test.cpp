// verify sees an error of ten times the noise in any tensor, and an update that is left out or made
// twice, in every dtype: of a parameter, of one expert, of one rank's shard. The values are those
// of a real run, the faults are made here.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/comm/launch.h"
#include "moesh/verify/verify.h"
#include "tests/train/device.h"

namespace moesh::verify {
namespace {

VerifyCase two_steps(const std::string& model, const std::string& dtype,
                     const std::string& optimizer = "adamw") {
  config::Settings settings = verify_defaults(2);
  for (const auto& s : test_settings()) settings.push_back(s);
  settings.push_back({"model.name", model, {"test"}});
  settings.push_back({"training.dtype", dtype, {"test"}});
  settings.push_back({"optimizer.name", optimizer, {"test"}});
  settings.push_back({"model.size", std::string("tiny"), {"test"}});
  return {.config = config::merged(settings)};
}

struct TwoSteps {
  VerifyCase c;
  VerifyReference reference = run_reference(c);

  // What one rank has, which is what the reference has.
  void each_tensor(const std::function<void(const RankTensor&)>& f) {
    const auto data = open_data(c);
    const auto world = comm::solo_group();
    VerifyCase one = c;
    one.config = one_rank(c.config);
    run_steps(one, *data, *world, nullptr, c.replays() ? &reference.routing : nullptr, f);
  }
  void each_movement(const std::function<void(const RankTensor&)>& f) {
    each_tensor([&](const RankTensor& t) {
      if (t.movement) f(t);
    });
  }
};

// What verify says of this tensor only.
std::vector<Mismatch> judged(const TwoSteps& r, const RankTensor& tensor) {
  NamedTensors only = r.reference;
  only.tensors = {{tensor.name, r.reference[tensor.name]}};
  Findings findings(1, only);
  findings.compare(tensor, 0);
  return findings.mismatches({});
}

// Where a gradient is hardly more than its noise, nobody knows where the parameter moves. (And a
// bias does not decay: of an expert without tokens it stays where it was.)
bool is_noise(const TwoSteps& r, const RankTensor& tensor,
              const std::function<at::Tensor(at::Tensor)>& unit) {
  const auto size = [&](const at::Tensor& t) { return unit(t).norm().item<double>(); };
  return size(r.reference[tensor.name] * r.reference.weight.at(tensor.name)) <=
         3 * size(r.reference.noise.at(tensor.name));
}

class MovementTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MovementTest, testing::Values("float64", "float32", "bfloat16"),
                         [](const auto& info) { return std::string(info.param); });

// Tensors of each kind: outputs, losses, gradients, norms, counts, bias, parameters, movements.
void see_ten_times_the_noise(TwoSteps r, double most_unknown = 0.1) {
  int num_tensors = 0, num_unknown = 0;
  r.each_tensor([&](const RankTensor& right) {
    const auto weight = r.reference.weight.find(right.name);
    at::Tensor error = at::ones(right.value.sizes(), right.value.options().dtype(at::kDouble));
    if (!right.exact) error = right.place(r.reference.noise.at(right.name)).clone();
    if (weight != r.reference.weight.end()) error = at::nan_to_num(error / weight->second, 0, 0, 0);
    for (std::int64_t i = 0; i < error.dim(); ++i)  // of both signs, along each dimension
      if (error.size(i) > 1) error.narrow(i, 0, error.size(i) / 2).neg_();
    // Where nobody knows where any element moves, the gradients are compared.
    if (error.count_nonzero().item<std::int64_t>() == 0) {
      EXPECT_TRUE(weight != r.reference.weight.end()) << right.name;
      ++num_unknown;
      return;
    }
    const auto with = [&](double times) {
      RankTensor wrong = right;
      wrong.value = right.value.to(at::kDouble) + times * error;
      return judged(r, wrong);
    };
    EXPECT_TRUE(with(0).empty()) << right.name;
    EXPECT_EQ(with(1).empty(), !right.exact) << right.name;
    EXPECT_FALSE(with(10).empty()) << right.name;
    ++num_tensors;
  });
  EXPECT_GT(num_tensors, 100);
  EXPECT_LT(num_unknown, most_unknown * num_tensors);
}
TEST_P(MovementTest, SeesTenTimesTheNoiseInAnyTensor) {
  for (const char* model : {"deepseek_v3", "gpt_oss"})
    see_ten_times_the_noise({two_steps(model, GetParam())});
}
// A rule that looks at whole matrices, in which the noise of one element moves all others: in
// bfloat16 nobody knows where a third of these small ones move.
TEST_P(MovementTest, SeesTenTimesTheNoiseUnderMuon) {
  see_ten_times_the_noise({two_steps("deepseek_v3", GetParam(), "muon")}, 0.5);
}

// A run and one nearby, in which the first of two gradients is off by so much. Roundings change
// `noise` of it, or as much as they should. `own` is what the dtype itself has.
std::vector<Mismatch> unexplained_of(double factor, at::ScalarType dtype, double noise = 0,
                                     double own = 0) {
  const at::Tensor g = at::linspace(1, 2, 100, at::kDouble);
  NamedTensors wide{.tensors = {{"d(a)", g}, {"d(b)", g}}};
  const double unit = dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-24;
  for (const char* name : {"d(a)", "d(b)"})
    wide.noise[name] = std::max(noise, kMostRoundings * unit) * g;
  NamedTensors run{.tensors = {{"d(a)", factor * g}, {"d(b)", g * (1 + unit)}},
                   .noise = {{"d(a)", own * g}, {"d(b)", own * g}}};
  return against_float64({run, run}, dtype, wide).unexplained;
}

TEST(Noise, IsNoMoreThanRoundingExplains) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    EXPECT_TRUE(unexplained_of(1, dtype).empty());
    const auto found = unexplained_of(1.1, dtype);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_TRUE(found[0].tensor.starts_with("d(a) of one rank")) << found[0].tensor;
    EXPECT_NEAR(found[0].factors[0], 1.1, 1e-6);
    EXPECT_EQ(unexplained_of(NAN, dtype).size(), 1u);
    EXPECT_EQ(unexplained_of(1.1, dtype, 1).size(), 0u);
    EXPECT_EQ(unexplained_of(NAN, dtype, 1).size(), 1u);
    // What cancels in a layer has more noise than follows from the weights, and not any amount.
    const double bound = kMostRoundings * (dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-24);
    EXPECT_EQ(unexplained_of(1 + 2 * bound, dtype).size(), 1u);
    EXPECT_EQ(unexplained_of(1 + 1.5 * bound, dtype, 0, bound / 2).size(), 0u);
    EXPECT_EQ(unexplained_of(1 + 1.5 * bound, dtype, 0, bound / 5).size(), 1u);
    EXPECT_EQ(unexplained_of(1 + 3 * bound, dtype, 0, 1).size(), 1u);
  }
}

// What rounding decides of gradients: one of two runs in bfloat16 has a larger d(b), and eight
// roundings change d(a) by `bound` in float64.
std::vector<std::string> decided_of(double larger, double bound, double size_in_float64 = 1,
                                    std::int64_t count = 100) {
  const at::Tensor g = at::linspace(1, 2, count, at::kDouble);
  const NamedTensors wide{
      .tensors = {{"d(a)", size_in_float64 * g}, {"d(b)", g}, {"logits", g}},
      .noise = {{"d(a)", bound * size_in_float64 * g}, {"d(b)", 0.01 * g}, {"logits", bound * g}}};
  const auto run = [&](double size) {
    return NamedTensors{.tensors = {{"d(a)", g}, {"d(b)", size * g}, {"logits", g}},
                        .noise = {{"d(a)", g}, {"d(b)", g}, {"logits", g}}};
  };
  return against_float64({run(1), run(larger)}, at::kBFloat16, wide).decided;
}

TEST(Noise, DecidesGradientsOfWhichOneChangesItsSize) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(decided_of(2.1, 0.6), Names{"d(a)"});  // only gradients
  EXPECT_EQ(decided_of(1 / 2.1, 0.6), Names{"d(a)"});
  EXPECT_EQ(decided_of(1.9, 0.6), Names{});
  EXPECT_EQ(decided_of(2.1, 0.4), Names{}) << "float64 tells it";
  EXPECT_EQ(decided_of(2.1, 0.6, 1e-16), Names{}) << "a sum that cancels";
  EXPECT_EQ(decided_of(2.1, 0.6, 1, 15), Names{}) << "a few may be small by chance";
}

TEST(Noise, LeavesWhatRoundingDecides) {
  const at::Tensor g = at::ones({4}, at::kDouble), one = at::ones({}, at::kDouble);
  const auto left = [&](double noise_of_norm, const std::vector<std::string>& gradients) {
    NamedTensors run{.tensors = {{"d(a)", g},
                                 {"d(aa)", g},
                                 {"step 0 gradient norm", one},
                                 {"step 1 d(a)", g},
                                 {"step 1 gradient norm", one}},
                     .noise = {{"step 0 gradient norm", noise_of_norm * one},
                               {"step 1 gradient norm", 0 * one}}};
    leave_decided(run, gradients);
    std::vector<std::string> names;
    for (const auto& [name, weight] : run.weight) names.push_back(name);
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(left(1, {}), Names{});
  EXPECT_EQ(left(0.1, {"d(a)"}), (Names{"d(a)", "step 1 d(a)"}));
  EXPECT_EQ(left(0.3, {"d(a)"}), (Names{"d(a)", "step 0 gradient norm", "step 1 d(a)"}));
}

// Attention logits of hundreds, of a large LoRA: a mesh that sums in another order looks at another
// key, and has gradients of thirty times the size. Other models know nothing of the kind.
TEST(Noise, DecidesTheGradientsOfASoftmaxThatTurns) {
  VerifyCase c = two_steps("deepseek_v3", "bfloat16");
  const config::Origin test{"test"};
  c.config = changed(c.config, {{"data.sequence_length", std::int64_t{9}, test},
                                {"data.batch_size", std::int64_t{1}, test},
                                {"training.gradient_accumulation_steps", std::int64_t{3}, test},
                                {"moe.load_balance_coeff", 5e-4, test},
                                {"lora.rank", std::int64_t{1}, test},
                                {"lora.init_lora_weights", false, test},
                                {"model.num_dense_layers", std::int64_t{0}, test},
                                {"model.num_shared", std::int64_t{0}, test},
                                {"model.routed_scale", 0.5, test}});
  c.config = changed(c.config, config::mesh_settings({.tp = 2, .etp = 2}, "test"));
  VerifyReference reference = run_reference(c);
  EXPECT_GT(reference.left_out.gradients, 40);
  const VerifyReport report = verify_closely(c, reference);
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
  for (const char* model : {"deepseek_v3", "gpt_oss", "qwen3_moe"})
    EXPECT_EQ(run_reference(two_steps(model, "bfloat16")).left_out.gradients, 0) << model;
}

// Noise that three runs found too small by chance is measured again, an error of ten times the
// noise is not looked at twice.
TEST(Noise, IsMeasuredAgainInDoubt) {
  VerifyCase mesh = two_steps("deepseek_v3", "float32");
  mesh.config = changed(mesh.config, config::mesh_settings({.dp_shard = 2, .tp = 2}, "test"));
  const VerifyReport right = verify(mesh, run_reference(mesh));
  ASSERT_TRUE(right.holds()) << right.describe(mesh_shape(mesh.config));
  const auto with_noise_of = [&](double factor) {
    VerifyReference small = run_reference(mesh);
    for (auto& [name, noise] : small.noise) noise = noise * (right.worst_ratio / factor);
    small.graph_mismatch = "kept";
    const VerifyReport first = verify(mesh, small);
    EXPECT_FALSE(first.holds());
    EXPECT_EQ(first.is_in_doubt(), factor < 2);
    EXPECT_EQ(verify_closely(mesh, small).holds(), factor < 2);
    EXPECT_EQ(small.closer != nullptr, factor < 2);
    EXPECT_FALSE(verify(mesh, small).holds()) << "the first look at another mesh has changed";
    const auto* closer = small.closer.get();
    EXPECT_EQ(verify_closely(mesh, small).holds(), factor < 2);
    EXPECT_EQ(small.closer.get(), closer) << "it is measured once";
    EXPECT_EQ(small.graph_mismatch, "kept");
  };
  with_noise_of(1.5);
  with_noise_of(2.5);
}

// A process does what all others do: it goes by the worst of what any of them has.
TEST(Noise, OfOneRankIsInDoubtOnAllProcesses) {
  VerifyCase mesh = two_steps("qwen3_moe", "float32");
  mesh.config = changed(mesh.config, config::mesh_settings({.tp = 2}, "test"));
  VerifyReference reference = run_reference(mesh);
  for (const double error : {0.5, 1.5, 2.5}) {
    reference.unexplained = {{.tensor = "logits", .error = error, .allowed = 1}};
    const VerifyReport report = verify(mesh, reference);
    EXPECT_EQ(report.is_in_doubt(), error == 1.5);
    EXPECT_GE(report.worst_ratio, error);
  }
  comm::launch(3, [](comm::Group& world) {
    EXPECT_EQ(largest_of_ranks(world, world.rank() == 1 ? INFINITY : 1, at::kCPU), INFINITY);
    EXPECT_EQ(largest_of_ranks(world, world.rank(), at::kCPU), 2);
  });
}

// A step whose loss may be off by all that it is must only be finite, and so must what follows.
TEST(Noise, LeavesStepsThatAreLost) {
  const auto weighed = [](double distance) {
    const at::Tensor g = at::linspace(1, 2, 100, at::kDouble), loss = at::full({}, 5., at::kDouble);
    NamedTensors run{.tensors = {{"step 0 loss", loss},
                                 {"d(a)", g},
                                 {"step 1 loss", loss},
                                 {"step 1 d(a)", g},
                                 {"step 2 loss", loss},
                                 {"step 2 d(a)", g}}};
    NamedTensors nearby = run;
    nearby.tensors[2].second = loss + distance;
    note_nearby(run, nearby);
    set_noise(run, at::kFloat);
    std::vector<std::string> names;
    for (const auto& [name, weight] : run.weight)
      if (weight.eq(0).all().item<bool>()) names.push_back(name);
    return names;
  };
  EXPECT_EQ(weighed(0.9), std::vector<std::string>{});
  EXPECT_EQ(weighed(1.1),
            (std::vector<std::string>{"step 1 d(a)", "step 1 loss", "step 2 d(a)", "step 2 loss"}));
  EXPECT_EQ(weighed(NAN), weighed(1.1));
  EXPECT_EQ(weighed(INFINITY), weighed(1.1));
}

// What one rank has in two steps, of which the second has this number everywhere, with its noise.
NamedTensors with_second_step(double number, double nearby_number, bool is_skipped) {
  const at::Tensor g = at::linspace(1, 2, 100, at::kDouble), one = at::ones({}, at::kDouble);
  const auto run_of = [&](double second, double wobble) {
    return NamedTensors{.tensors = {{"step 0 loss", 5 * one},
                                    {"d(a)", g * (1 + wobble)},
                                    {"step 0 gradient norm", 10 * one},
                                    {"step 0 skipped", 0 * one},
                                    {"step 1 loss", second * one},
                                    {"step 1 d(a)", second * g},
                                    {"step 1 gradient norm", second * one},
                                    {"step 1 skipped", (is_skipped ? 1 : 0) * one}}};
  };
  NamedTensors run = run_of(number, 0);
  note_nearby(run, run_of(nearby_number, 1e-6));
  set_noise(run, at::kFloat);
  return run;
}

// The tensors that differ of a mesh that has this number in all of its second step.
std::vector<std::string> found_in(const NamedTensors& run, double number, bool is_skipped) {
  Findings findings(1, run);
  for (const auto& [name, value] : run.tensors) {
    const bool is_second = step_of(name) == 1, is_skip = name.ends_with("skipped");
    findings.compare({.name = name,
                      .value = !is_second ? value
                               : is_skip  ? at::full_like(value, is_skipped ? 1 : 0)
                                          : at::full_like(value, number),
                      .place = [](const at::Tensor& t) { return t; },
                      .exact = is_skip},
                     0);
  }
  std::vector<std::string> names;
  for (const auto& m : findings.mismatches({})) names.push_back(m.tensor);
  return names;
}

TEST(Noise, OfStepsThatAreLostMayBeAnything) {
  using Names = std::vector<std::string>;
  for (const double number : {NAN, INFINITY}) {
    const NamedTensors run = with_second_step(number, number, true);
    EXPECT_EQ(first_lost(run), 1);
    EXPECT_LT(size_of(run.noise.at("d(a)")), 1e-3) << "the step before knows nothing of it";
    for (const double of_mesh : {1., double{NAN}, double{INFINITY}})
      EXPECT_EQ(found_in(run, of_mesh, true), Names{});
    EXPECT_EQ(found_in(run, 1, false), Names{"step 1 skipped"});
  }
  // One rank is finite: so must a mesh be, but for what a run nearby is not.
  const Names all{"step 1 loss", "step 1 d(a)", "step 1 gradient norm"};
  EXPECT_EQ(found_in(with_second_step(1, 9, false), 100, false), Names{});
  EXPECT_EQ(found_in(with_second_step(1, 9, false), NAN, false), all);
  EXPECT_EQ(found_in(with_second_step(1, NAN, false), NAN, false), Names{});
  // A gradient that overflows behind a loss that does not.
  NamedTensors run = with_second_step(1, 1, true);
  EXPECT_EQ(first_lost(run), std::nullopt);
  run.noise["step 1 gradient norm"].fill_(NAN);
  EXPECT_EQ(first_lost(run), 1);
  // The first step of all comes after nothing that could have made it so.
  run.noise["step 0 loss"].fill_(NAN);
  run.noise["step 1 gradient norm"].fill_(0);
  EXPECT_EQ(first_lost(run), std::nullopt);
}

TEST(Noise, TellsWhatItLeavesOut) {
  NamedTensors run = with_second_step(NAN, NAN, true);
  run.weight["movement of a"] = at::zeros({3});
  run.weight["movement of b"] = at::ones({3});
  LeftOut found = left_out(run, 2);
  EXPECT_EQ(found.steps, 1);
  EXPECT_EQ(found.tensors, 1);
  found.against_float64 = 3;
  run.weight["d(a)"] = at::zeros({3});
  run.weight["step 0 gradient norm"] = at::zeros({});
  found.gradients = left_out(run, 2).gradients;
  EXPECT_EQ(found.describe(),
            "1 step (rounding decides the loss), 1 tensor (rounding decides where it moves), 2 "
            "gradients (rounding decides half of it), 3 tensors against float64 (rounding decides "
            "half of it)");
  EXPECT_FALSE(LeftOut{}.any());
}

// The same mistake in all runs of a dtype is no noise.
TEST(Noise, IsNotWidenedByAFaultOfTheDtype) {
  const at::Tensor g = at::linspace(1, 2, 100, at::kDouble), wobble = 1e-3 * g.sin();
  const auto noise = [&](double fault) {
    NamedTensors run{.tensors = {{"d(a)", fault * g}}};
    const NamedTensors nearby{.tensors = {{"d(a)", fault * g + wobble}}};
    note_nearby(run, nearby);
    set_noise(run, at::kFloat);
    return size_of(run.noise["d(a)"]) / fault;
  };
  EXPECT_LT(noise(3), noise(1));
}

TEST_P(MovementTest, SeesWhatIsLeftOutOrMadeTwice) {
  TwoSteps r{two_steps("deepseek_v3", GetParam())};
  int num_seen = 0;
  r.each_movement([&](const RankTensor& right) {
    EXPECT_TRUE(judged(r, right).empty()) << right.name;
    if (is_noise(r, right, [](const at::Tensor& t) { return t; })) return;
    for (const double factor : {0.0, 2.0, -1.0}) {
      RankTensor wrong = right;
      wrong.value = right.value * factor;
      const auto found = judged(r, wrong);
      ASSERT_EQ(found.size(), 1u) << right.name << " times " << factor;
      EXPECT_NEAR(found[0].factors[0], factor, 1e-2) << right.name;
    }
    ++num_seen;
  });
  EXPECT_GT(num_seen, 30);
}

TEST_P(MovementTest, SeesOneExpertThatStays) {
  TwoSteps r{two_steps("gpt_oss", GetParam())};
  int num_seen = 0;
  r.each_movement([&](const RankTensor& right) {
    if (!right.movement->by_expert) return;
    for (std::int64_t e = 0; e < right.value.size(0); ++e) {
      if (is_noise(r, right, [e](const at::Tensor& t) { return t[e]; })) continue;
      RankTensor wrong = right;
      wrong.value = right.value.clone();
      wrong.value[e].zero_();
      EXPECT_FALSE(judged(r, wrong).empty()) << right.name << ", expert " << e;
      ++num_seen;
    }
  });
  EXPECT_GT(num_seen, 75);
}

// A rank has one eighth of the rows, and they stay: beside the whole it is little.
TEST_P(MovementTest, SeesOneShardThatStays) {
  TwoSteps r{two_steps("qwen3_moe", GetParam())};
  int num_seen = 0;
  r.each_movement([&](const RankTensor& right) {
    const std::int64_t rows = right.value.size(0), length = rows / 8;
    if (length == 0 || right.value.numel() < 8 * 16) return;  // of a few, rounding decides
    for (std::int64_t start = 0; start + length <= rows; start += length) {
      const auto shard = [=](const at::Tensor& t) { return t.narrow(0, start, length); };
      if (is_noise(r, right, shard)) continue;
      RankTensor wrong = right;
      wrong.value = at::zeros_like(shard(right.value));
      wrong.place = shard;
      EXPECT_FALSE(judged(r, wrong).empty()) << right.name << ", rows from " << start;
      ++num_seen;
    }
  });
  EXPECT_GT(num_seen, 150);
}

}  // namespace
}  // namespace moesh::verify
