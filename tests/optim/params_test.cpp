#include "moesh/optim/params.h"

#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/optim/optimizer.h"
#include "moesh/optim/rules.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"

namespace moesh::optim {
namespace {

template <class F>
std::string message(const MeshShape& shape, F f) {
  try {
    on_mesh(shape, f);
    return "nothing was thrown";
  } catch (const Error& e) {
    return e.what();
  }
}

TEST(ParamList, KeepsTheOrderAndWhatDecays) {
  on_mesh({}, [](const Mesh&) {
    Model model;
    const ParamList list = model.list();
    std::vector<std::string> names;
    for (const auto& entry : list) names.push_back(entry.stored->spec.name);
    EXPECT_EQ(names, (std::vector<std::string>{"norm", "w", "experts", "bias", "sink"}));
    EXPECT_EQ(list[0].decay, Decay::off);
    EXPECT_EQ(list[1].decay, Decay::on);
    EXPECT_EQ(list[1].stored, &model.w.stored())
        << "it points at the parameter, it does not copy it";
  });
}

TEST(ParamList, RefusesASecondParameterOfOneName) {
  EXPECT_EQ(message({},
                    [](const Mesh&) {
                      Model model;
                      ParamList list = model.list();
                      list.add(model.w);
                    }),
            "two parameters are called 'w': each has a name of its own, and is added once");
}

TEST(ParamList, RefusesWhatCannotBeUpdated) {
  EXPECT_EQ(
      message(
          {},
          [](const Mesh&) {
            Param<Dense{I, I, I}> half(
                {.name = "half", .shape = {3}, .dtype = at::kBFloat16, .device = test_device()});
            ParamList list;
            list.add(half);
          }),
      "parameter 'half' has c10::BFloat16 master weights; small updates would round to nothing. Use float32 or float64, and set "
      ".compute to the type of the work");
  EXPECT_EQ(message({},
                    [](const Mesh&) {
                      Param<Dense{I, I, I}> nothing;
                      ParamList list;
                      list.add(nothing);
                    }),
            "a parameter without a value is added to the list; construct it first");
  EXPECT_EQ(message({}, [](const Mesh&) { grad_norm(ParamList{}); }),
            "an empty list of parameters; add(w) some");
  EXPECT_EQ(message({}, [](const Mesh&) { Optimizer(ParamList{}, std::make_shared<Sgd>()); }),
            "an empty list of parameters; add(w) some");
}

// A gradient that is missing is an error, never a zero: on one rank, and also if only one rank of
// several misses it.
TEST(ParamList, NamesAParameterWithoutAGradient) {
  const std::string expected =
      "parameter 'bias' has no gradient: no backward has reached it since the last step. A parameter "
      "that is not trained is frozen (training.freeze)";
  const auto forget = [](const Mesh& mesh, auto use_list) {
    Model model;
    model.set_gradients();
    if (mesh.rank() == mesh.shape().num_ranks() - 1)
      model.bias.stored().value.mutable_grad().reset();
    use_list(model);
  };
  for (const MeshShape& shape : {MeshShape{}, MeshShape{.tp = 2, .ep = 2}}) {
    const auto in_norm = message(shape, [&](const Mesh& mesh) {
      forget(mesh, [](Model& model) { grad_norm(model.list()); });
    });
    EXPECT_NE(in_norm.find(expected), std::string::npos) << in_norm;
    const auto in_step = message(shape, [&](const Mesh& mesh) {
      forget(mesh, [](Model& model) {
        Optimizer sgd(model.list(), std::make_shared<Sgd>());
        const at::Tensor before = model.norm.stored().value.detach().clone();
        try {
          take_step(sgd, 0.1);
        } catch (const Error&) {
          EXPECT_TRUE(at::equal(model.norm.stored().value.detach(), before))
              << "not half a step either";
          EXPECT_EQ(sgd.num_steps(), 0);
          throw;
        }
      });
    });
    EXPECT_NE(in_step.find(expected), std::string::npos) << in_step;
  }
}

}  // namespace
}  // namespace moesh::optim
