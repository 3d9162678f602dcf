// The state that an update rule declares is saved and loaded as declared, also where it has not the
// shape of the parameter.
#include "tests/checkpoint/support.h"
#include "tests/optim/take_step.h"

namespace moesh {
namespace {

// Counts its steps for each parameter, in its own type and shape, beside a copy of the gradient.
class Counting final : public optim::Rule {
 public:
  optim::RuleScope scope() const override { return optim::RuleScope::parameter; }
  std::vector<optim::StateSpec> state(const Stored&) const override {
    return {{.name = "last"},
            {.name = "count", .dtype = at::kLong, .shape = std::vector<std::int64_t>{3}}};
  }
  void update(const std::vector<optim::ParamInStep>& params,
              const optim::RuleStep& step) const override {
    for (const auto& p : params) {
      step.write(p.state[0], step.clipped(p));
      step.write(p.state[1], p.state[1].add(step.number().to(at::kLong)));
    }
  }
};

// f(optimizer, checkpointer), with the model of a run on a mesh.
template <class F>
void on_mesh(const std::filesystem::path& folder, const std::string& mesh, F f) {
  const auto config = run_config(folder, mesh);
  comm::launch(mesh_shape(config).num_ranks(), [&](comm::Group& world) {
    const Mesh m(world, mesh_shape(config));
    const MeshScope scope(m);
    const auto model = train::make_model(config);
    optim::ParamList params;
    model->each_param([&](Stored& w, bool) { params.add(w); });
    optim::Optimizer optimizer(params, std::make_shared<Counting>());
    train::Checkpointer checkpointer(config, world, *model, optimizer);
    f(optimizer, checkpointer);
  });
}

TEST(RuleState, ComesBackOnAnotherMeshAsItWasDeclared) {
  const TemporaryFolder folder;
  const auto saved = folder.path() / "saved";
  on_mesh(saved, "dp_shard=2,tp=2,ep=2", [](optim::Optimizer& optimizer, auto& checkpointer) {
    checkpointer.start();
    for (int step = 0; step < 3; ++step) {
      for (const auto& entry : optimizer.params())
        entry.stored->value.mutable_grad() = entry.stored->value.detach() * (step + 1.0);
      optim::take_step(optimizer, 0.1);
    }
    checkpointer.finish({.step = 3});
  });
  on_mesh(saved, "dp_replicate=2,tp=2,etp=2", [](optim::Optimizer& optimizer, auto& checkpointer) {
    EXPECT_EQ(checkpointer.start().step, 3);
    EXPECT_EQ(optimizer.num_steps(), 3);
    for (const auto& s : optimizer.state()) {
      if (s.is_sharded)
        EXPECT_TRUE(at::equal(s.value, s.param->value.detach() * 3.0)) << s.name;
      else
        EXPECT_TRUE(at::equal(s.value, at::full({3}, 1 + 2 + 3, at::kLong))) << s.name;
    }
  });
}

}  // namespace
}  // namespace moesh
