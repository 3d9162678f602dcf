#include "moesh/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <memory>

#include "moesh/base/error.h"
#include "moesh/optim/rules.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"

namespace moesh::optim {
namespace {

using Make = std::function<std::unique_ptr<Optimizer>(ParamList)>;
const AdamWConfig kAdamW{.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0.3};
const SgdConfig kSgd{.momentum = 0.7, .weight_decay = 0.2};
std::unique_ptr<Optimizer> make_adamw(ParamList list) {
  return std::make_unique<Optimizer>(std::move(list), std::make_shared<AdamW>(kAdamW));
}
std::unique_ptr<Optimizer> make_sgd(ParamList list) {
  return std::make_unique<Optimizer>(std::move(list), std::make_shared<Sgd>(kSgd));
}
double rate(int step) { return 0.05 / (1 + step); }

// Three steps with given gradients.
std::map<std::string, at::Tensor> train(Model& model, const Make& make, int num_steps = 3) {
  const auto optimizer = make(model.list());
  for (int step = 0; step < num_steps; ++step) {
    model.set_gradients(step);
    take_step(*optimizer, rate(step));
  }
  return model.values();
}

std::map<std::string, at::Tensor> train_alone(const Make& make, int num_steps = 3) {
  std::map<std::string, at::Tensor> values;
  on_mesh({}, [&](const Mesh&) {
    Model model;
    values = train(model, make, num_steps);
  });
  return values;
}

// Bit for bit: an update looks at one element, wherever it is stored.
void expect_same_bits_on_every_mesh(const Make& make) {
  const auto expected = train_alone(make);
  for (const auto& shape : meshes())
    on_mesh(shape, [&](const Mesh& mesh) {
      Model model;
      const auto values = train(model, make);
      model.each_param([&](auto& p) {
        EXPECT_TRUE(
            at::equal(values.at(p.name()), slice(expected.at(p.name()), p.stored().compute)))
            << p.name() << " on " << mesh.shape().describe();
      });
    });
}

TEST(AdamW, GivesTheBitsOfOneRankOnEveryMesh) { expect_same_bits_on_every_mesh(make_adamw); }
TEST(Sgd, GivesTheBitsOfOneRankOnEveryMesh) { expect_same_bits_on_every_mesh(make_sgd); }

// What the textbook says, element by element.
void expect_formula(const Make& make,
                    const std::function<void(double& w, double g, double* state, double lr,
                                             double decay, int t)>& f,
                    double weight_decay) {
  const auto values = train_alone(make);
  on_mesh({}, [&](const Mesh&) {
    Model model;
    for (const auto& entry : model.list()) {
      const auto& spec = entry.stored->spec;
      at::Tensor w = entry.stored->value.detach().cpu().clone();
      std::vector<std::array<double, 2>> state(static_cast<std::size_t>(w.numel()));
      const double decay = entry.decay == Decay::on ? weight_decay : 0;
      for (int t = 1; t <= 3; ++t) {
        const at::Tensor g = whole_gradient(spec, t - 1).cpu();
        for (std::int64_t i = 0; i < w.numel(); ++i)
          f(w.data_ptr<double>()[i], g.data_ptr<double>()[i],
            state[static_cast<std::size_t>(i)].data(), rate(t - 1), decay, t);
      }
      EXPECT_TRUE(at::allclose(values.at(spec.name).cpu(), w, 1e-13, 1e-14)) << spec.name;
    }
  });
}

TEST(AdamW, IsTheTextbookUpdate) {
  expect_formula(
      make_adamw,
      [](double& w, double g, double* state, double lr, double decay, int t) {
        double &m = state[0], &v = state[1];
        m = kAdamW.beta1 * m + (1 - kAdamW.beta1) * g;
        v = kAdamW.beta2 * v + (1 - kAdamW.beta2) * g * g;
        const double m_hat = m / (1 - std::pow(kAdamW.beta1, t)),
                     v_hat = v / (1 - std::pow(kAdamW.beta2, t));
        w = w - lr * decay * w - lr * m_hat / (std::sqrt(v_hat) + kAdamW.eps);
      },
      kAdamW.weight_decay);
}

TEST(Sgd, IsTheTextbookUpdate) {
  expect_formula(
      make_sgd,
      [](double& w, double g, double* state, double lr, double decay, int) {
        state[0] = kSgd.momentum * state[0] + (g + decay * w);
        w -= lr * state[0];
      },
      kSgd.weight_decay);
}

TEST(Sgd, WithoutMomentumHasNoState) {
  const Make make = [](ParamList list) {
    return std::make_unique<Optimizer>(std::move(list),
                                       std::make_shared<Sgd>(SgdConfig{.momentum = 0}));
  };
  on_mesh({}, [&](const Mesh&) {
    Model model;
    EXPECT_TRUE(make(model.list())->state().empty());
  });
  expect_formula(
      make, [](double& w, double g, double*, double lr, double, int) { w -= lr * g; }, 0);
}

// torch's own optimizers, on the same values and gradients; in float32 to its precision.
template <class Torch, class Options>
void expect_as_torch(const Make& make, const Options& base, at::ScalarType dtype,
                     double tolerance) {
  on_mesh({}, [&](const Mesh&) {
    ParamSpec spec{.name = "w", .shape = {37, 11}, .dtype = dtype, .device = test_device()};
    Param<Dense{I, I, I}> mine(spec, Model::init());
    ParamList list;
    list.add(mine);
    at::Tensor theirs = mine.stored().value.detach().clone().requires_grad_(true);
    Torch reference(std::vector<at::Tensor>{theirs}, base);
    const auto optimizer = make(list);
    for (int step = 0; step < 20; ++step) {
      const at::Tensor g = whole_gradient(spec, step);
      mine.stored().value.mutable_grad() = g.clone();
      theirs.mutable_grad() = g.clone();
      static_cast<Options&>(reference.param_groups()[0].options()).lr(rate(step));
      take_step(*optimizer, rate(step));
      reference.step();
    }
    EXPECT_EQ(mine.stored().value.scalar_type(), dtype);
    EXPECT_TRUE(at::allclose(mine.stored().value.detach(), theirs.detach(), tolerance, tolerance));
  });
}

TEST(AdamW, IsTorchs) {
  torch::optim::AdamWOptions options(0.1);
  options.betas({kAdamW.beta1, kAdamW.beta2}).eps(kAdamW.eps).weight_decay(kAdamW.weight_decay);
  expect_as_torch<torch::optim::AdamW>(make_adamw, options, at::kDouble, 1e-13);
  expect_as_torch<torch::optim::AdamW>(make_adamw, options, at::kFloat, 2e-6);
}

TEST(Sgd, IsTorchs) {
  torch::optim::SGDOptions options(0.1);
  options.momentum(kSgd.momentum).weight_decay(kSgd.weight_decay);
  expect_as_torch<torch::optim::SGD>(make_sgd, options, at::kDouble, 1e-13);
  expect_as_torch<torch::optim::SGD>(make_sgd, options, at::kFloat, 2e-6);
}

TEST(Optimizer, TakesAGradientThatIsNotContiguous) {
  on_mesh({}, [](const Mesh&) {
    Model a, b;
    const auto rule = std::make_shared<AdamW>();
    Optimizer one(a.list(), rule), other(b.list(), rule);
    a.set_gradients(), b.set_gradients();
    auto& g = b.w.stored().value.mutable_grad();
    g = g.t().contiguous().t();
    take_step(one, 0.1), take_step(other, 0.1);
    EXPECT_TRUE(at::equal(a.w.stored().value.detach(), b.w.stored().value.detach()));
  });
}

TEST(Optimizer, LeavesNoGradientAndTheLeafInPlace) {
  for (const Make& make : {Make(make_adamw), Make(make_sgd)})
    on_mesh({.dp_shard = 2, .tp = 2, .ep = 4}, [&](const Mesh&) {
      Model model;
      const auto optimizer = make(model.list());
      std::vector<void*> places;
      for (const auto& entry : optimizer->params())
        places.push_back(entry.stored->value.data_ptr());
      model.set_gradients();
      take_step(*optimizer, 0.1);
      std::size_t i = 0;
      for (const auto& entry : optimizer->params()) {
        EXPECT_FALSE(entry.stored->value.grad().defined()) << entry.stored->spec.name;
        EXPECT_TRUE(entry.stored->value.is_leaf() && entry.stored->value.requires_grad())
            << entry.stored->spec.name;
        EXPECT_EQ(entry.stored->value.data_ptr(), places[i++]) << entry.stored->spec.name;
      }
      model.set_gradients();
      const auto before = model.values();
      optimizer->zero_grad();  // a skipped step: nothing moves and nothing stays
      for (const auto& entry : optimizer->params())
        EXPECT_FALSE(entry.stored->value.grad().defined());
      for (const auto& [name, value] : model.values())
        EXPECT_TRUE(at::equal(value, before.at(name))) << name;
      EXPECT_EQ(optimizer->num_steps(), 1);
    });
}

// The whole way: use, backward, step; the gradient is that of the value before the step.
TEST(Optimizer, MovesWhatUseGives) {
  on_mesh({.dp_shard = 2, .tp = 2}, [](const Mesh& mesh) {
    Model model;
    ParamList list;
    list.add(model.w);
    Optimizer sgd(list, std::make_shared<Sgd>(SgdConfig{.momentum = 0}));
    for (int step = 0; step < 2; ++step) {
      const at::Tensor before = local(value(model.w));
      const at::Tensor x = local(use(model.w));
      (x * x).sum().backward();  // on both storage ranks: d = 2 * 2 * x
      take_step(sgd, 0.125);
      EXPECT_TRUE(at::allclose(local(value(model.w)), before * 0.5, 1e-14, 1e-14))
          << mesh.shape().describe();
    }
  });
}

TEST(Optimizer, StateIsShapedLikeTheShardAndRestoresTheRun) {
  for (const Make& make : {Make(make_adamw), Make(make_sgd)}) {
    const auto expected = train_alone(make, 4);
    on_mesh({.dp_shard = 2, .tp = 2, .ep = 2}, [&](const Mesh&) {
      Model first, second;
      const auto a = make(first.list()), b = make(second.list());
      for (int step = 0; step < 2; ++step) {
        first.set_gradients(step);
        take_step(*a, rate(step));
      }
      const auto from = a->state(), to = b->state();
      ASSERT_EQ(from.size(), to.size());
      for (std::size_t i = 0; i < from.size(); ++i) {
        EXPECT_EQ(from[i].name, to[i].name);
        EXPECT_EQ(from[i].value.sizes().vec(), from[i].param->shard.length) << from[i].name;
        EXPECT_EQ(from[i].value.scalar_type(), from[i].param->spec.dtype) << from[i].name;
        EXPECT_TRUE(from[i].is_sharded);
        EXPECT_FALSE(from[i].value.requires_grad());
        at::Tensor(to[i].value).copy_(from[i].value);
      }
      b->set_num_steps(a->num_steps());
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < a->params().size(); ++i)
        b->params()[i].stored->value.copy_(a->params()[i].stored->value);
      for (int step = 2; step < 4; ++step) {
        second.set_gradients(step);
        take_step(*b, rate(step));
      }
      const auto values = second.values();
      second.each_param([&](auto& p) {
        EXPECT_TRUE(
            at::equal(values.at(p.name()), slice(expected.at(p.name()), p.stored().compute)))
            << p.name();
      });
    });
  }
  on_mesh({}, [](const Mesh&) {
    Model model;
    std::vector<std::string> names;
    for (const auto& s : make_adamw(model.list())->state()) names.push_back(s.name);
    EXPECT_EQ(names[0], "norm.exp_avg");
    EXPECT_EQ(names[1], "norm.exp_avg_sq");
    EXPECT_EQ(make_sgd(model.list())->state()[1].name, "w.momentum_buffer");
  });
}

TEST(OptimizerErrors, NameTheValueAndTheCure) {
  const auto message = [](auto f) {
    try {
      f();
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::config);
      return std::string(e.what());
    }
  };
  const double nan = std::nan("");
  EXPECT_NO_THROW(AdamW(AdamWConfig{.beta1 = 0, .beta2 = 0}));
  EXPECT_EQ(message([] { AdamW(AdamWConfig{.beta1 = 1}); }),
            "AdamW: beta1 is 1; it takes 0 or more and less than 1, such as 0.9");
  EXPECT_EQ(message([] { AdamW(AdamWConfig{.beta2 = -0.5}); }),
            "AdamW: beta2 is -0.5; it takes 0 or more and less than 1, such as 0.95");
  EXPECT_EQ(message([] { AdamW(AdamWConfig{.eps = 0}); }),
            "AdamW: eps is 0; it takes a positive number, such as 1e-8");
  EXPECT_EQ(message([&] { AdamW(AdamWConfig{.weight_decay = nan}); }),
            "AdamW: weight_decay is nan; it takes 0 or more, such as 0.1");
  EXPECT_EQ(message([] { Sgd(SgdConfig{.momentum = 1.5}); }),
            "SGD: momentum is 1.5; it takes 0 (none) or more and less than 1, such as 0.9");
  EXPECT_EQ(message([] { Sgd(SgdConfig{.weight_decay = -1}); }),
            "SGD: weight_decay is -1; it takes 0 or more, such as 1e-4");
  on_mesh({}, [&](const Mesh&) {
    Model model;
    model.set_gradients();
    Optimizer sgd(model.list(), std::make_shared<Sgd>());
    EXPECT_EQ(message([&] { take_step(sgd, -0.1); }),
              "a step with learning rate -0.1; it takes a number from 0 on");
    EXPECT_EQ(message([&] { take_step(sgd, nan); }),
              "a step with learning rate nan; it takes a number from 0 on");
    EXPECT_EQ(message([&] { AdamW({.beta1 = nan}); }),
              "AdamW: beta1 is nan; it takes 0 or more and less than 1, such as 0.9");
    EXPECT_THROW(sgd.set_num_steps(-1), Error);
    EXPECT_EQ(sgd.num_steps(), 0);
  });
}

}  // namespace
}  // namespace moesh::optim
