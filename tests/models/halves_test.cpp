// Backward in two halves, of whole models: the gradients have the bits that they have in one.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/base/label.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/models/registry.h"
#include "moesh/spmd/weights_later.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

struct Way {
  MeshShape mesh;
  bool sequence_parallel = false, reshard = false, overlap = true;
  models::Recompute recompute = models::Recompute::none;
};

const std::vector<Way>& ways() {
  using enum models::Recompute;
  static const std::vector<Way> all{
      {.mesh = {}},
      {.mesh = {}, .recompute = full},
      {.mesh = {}, .recompute = selective},
      {.mesh = {.dp_shard = 2, .ep = 2}, .reshard = true},
      {.mesh = {.dp_shard = 2, .ep = 2}, .reshard = true, .recompute = full},
      {.mesh = {.tp = 2, .ep = 2}, .sequence_parallel = true, .recompute = selective},
      {.mesh = {.tp = 2, .etp = 2}, .overlap = false},
      {.mesh = {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}, .overlap = false, .recompute = full},
      {.mesh = {.dp_shard = 2, .cp = 2}, .reshard = true, .overlap = false},
  };
  return all;
}

// Two micro-batches, other sequences on each rank of dp, and a label that does not count.
std::vector<models::MicroBatch> batches_of(const Mesh& mesh) {
  constexpr std::int64_t vocab = 64;  // no model has fewer
  std::vector<models::MicroBatch> batches;
  for (std::int64_t i = 0; i < 2; ++i) {
    const at::Tensor ids =
        (at::arange(14) * (5 + i) + mesh.coordinate(dp)).remainder(vocab).reshape({2, 7});
    at::Tensor labels = (ids + 1).remainder(vocab);
    labels[0][2 + i] = kIgnoredLabel;
    batches.push_back({.input_ids_BL = ids.to(test_device()),
                       .labels_BL = labels.to(test_device()),
                       .num_step_tokens = at::full({}, 26, at::kDouble)});
  }
  return batches;
}

bool is_head(const Stored& w) { return w.spec.name.starts_with("lm_head"); }

// The gradients of two micro-batches; in halves the weights of both come after the inputs of both.
std::vector<at::Tensor> gradients_of(const std::string& name, at::ScalarType dtype,
                                     const Mesh& mesh, const Way& way, bool in_halves) {
  const auto model = models::make_model(models::built_in(name, "tiny"),
                                        {.dtype = dtype, .device = test_device(), .seed = 1});
  const models::ForwardOptions options{.sequence_parallel = way.sequence_parallel,
                                       .recompute = way.recompute,
                                       .auxiliary = {.balance_weight = 0.1, .z_weight = 0.01},
                                       .reshard = way.reshard};
  StepState step(way.overlap);
  if (in_halves) step.leave_weights();
  std::vector<WeightHalf> halves;
  for (const auto& batch : batches_of(mesh)) {
    backward(model->forward(batch, options).loss);
    halves.push_back(step.take_weights());
    if (!in_halves) step.start_sums();
  }
  if (in_halves && way.mesh == MeshShape{})
    model->each_param([&](Stored& w, bool) {
      EXPECT_TRUE(is_head(w) || !w.value.grad().defined()) << w.spec.name << " was not left";
    });
  EXPECT_EQ(step.bytes().now, 0) << "gathered parameters are kept for their gradients";
  for (auto& half : halves) {
    EXPECT_EQ(half.size() > 0, in_halves);
    half.run();
    step.start_sums();
  }
  step.finish_weights();
  step.finish_sums();
  std::vector<at::Tensor> gradients;
  model->each_param([&](Stored& w, bool) { gradients.push_back(w.value.grad().clone()); });
  return gradients;
}

class Halves : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, Halves, testing::ValuesIn(models::model_names()),
                         [](const auto& info) { return info.param; });

TEST_P(Halves, GiveTheSameGradients) {
  for (const auto& way : ways())
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      if (dtype == at::kBFloat16 && way.mesh != MeshShape{}) continue;
      if (way.mesh.cp > 1 && !models::facts(models::built_in(GetParam(), "tiny")).takes_cp())
        continue;
      comm::launch(
          way.mesh.num_ranks(),
          [&](comm::Group& world) {
            const Mesh mesh(world, way.mesh);
            const MeshScope scope(mesh);
            const auto whole = gradients_of(GetParam(), dtype, mesh, way, false);
            const auto halves = gradients_of(GetParam(), dtype, mesh, way, true);
            ASSERT_EQ(whole.size(), halves.size());
            for (size_t i = 0; i < whole.size(); ++i) {
              // Parts of messages lie at other addresses, by which products round differently.
              const double error = (whole[i] - halves[i]).norm().item<double>(),
                           allowed = way.mesh == MeshShape{} ? 0 : 1e-14;
              EXPECT_LE(error, allowed * whole[i].norm().item<double>())
                  << "way " << &way - ways().data() << ", " << dtype << ", parameter " << i;
            }
          },
          test_options());
    }
}

TEST(WeightsLater, ThatWereNeverDoneAreAnError) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto model = models::make_model(models::built_in("mixtral", "tiny"),
                                        {.dtype = at::kDouble, .device = test_device()});
  const at::Tensor ids = at::arange(8).reshape({1, 8}).to(test_device());
  StepState step;
  step.leave_weights();
  backward(model->forward({.input_ids_BL = ids, .labels_BL = ids}, {}).loss);
  const auto text = [&](std::size_t n) {
    return detail::concat("the step has ended, and ", n,
                          " gradients of weights were left for later and never computed");
  };
  std::size_t num = 0;
  {
    WeightHalf half = step.take_weights();
    num = half.size();
    EXPECT_GT(num, 10u);
    expect_parts(error_of([&] { step.finish_weights(); }, ErrorKind::internal), {text(num)});
    backward(model->forward({.input_ids_BL = ids, .labels_BL = ids}, {}).loss);
    expect_parts(error_of([&] { step.finish_weights(); }, ErrorKind::internal), {text(2 * num)});
    half.run();
  }
  expect_parts(error_of([&] { step.finish_weights(); }, ErrorKind::internal), {text(num)});
  step.take_weights().run();
  EXPECT_NO_THROW(step.finish_weights());
}

}  // namespace
}  // namespace moesh
