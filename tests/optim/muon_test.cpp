// Muon against its formula, written out for one rank, and on meshes against one rank: bit for bit,
// since the owner of a matrix has all of it.
#include "moesh/optim/rules.h"

#include <gtest/gtest.h>

#include "moesh/optim/optimizer.h"
#include "tests/comm/trace.h"
#include "tests/optim/muon_check.h"
#include "tests/optim/take_step.h"
#include "tests/support.h"

namespace moesh::optim {
namespace {

using namespace muon_check;

std::map<std::string, at::Tensor> train_alone(const MuonConfig& config) {
  std::map<std::string, at::Tensor> values;
  on_mesh({}, [&](const Mesh&) { values = train(config); });
  return values;
}

TEST(Muon, IsItsFormula) {
  for (const MuonConfig& c :
       {kMuon, MuonConfig{.momentum = 0.6, .nesterov = false, .weight_decay = 0},
        MuonConfig{.momentum = 0, .by_head = true, .numbers_in_round = 50}})
    EXPECT_EQ(complaint({}, c), "");
}

TEST(Muon, GivesTheBitsOfOneRankOnMeshes) {
  for (const bool by_head : {false, true}) {
    MuonConfig config = kMuon;
    config.by_head = by_head;
    if (by_head) config.numbers_in_round = 10;
    const auto whole = train_alone(config);
    const auto all = meshes();
    for (std::size_t i = by_head ? 1 : 0; i < all.size(); i += 4)
      on_mesh(all[i], [&](const Mesh& mesh) {
        const auto values = train(config);
        Matrices().each_param([&](auto& p) {
          EXPECT_TRUE(at::equal(values.at(p.name()), slice(whole.at(p.name()), p.stored().compute)))
              << p.name() << " on " << mesh.shape().describe();
        });
      });
  }
}

// A run sets each flag by its own key, and not by its opposite.
TEST(Muon, IsMadeOfTheValuesOfARun) {
  const auto moved = [](const Optimizer::RulePtr& rule) {
    at::Tensor result;
    on_mesh({}, [&](const Mesh&) {
      ParamSpec spec = Matrices::head_spec();
      spec.dtype = at::kFloat;  // float64 is worked on in float64
      Param<Dense{I, I, F}> w(spec, Model::init());
      ParamList list;
      list.add(w);
      Optimizer optimizer(list, rule);
      for (int step = 0; step < 2; ++step) {
        w.stored().value.mutable_grad() = whole_gradient(spec, step);
        take_step(optimizer, kRate);
      }
      result = local(value(w)).clone();
    });
    return result;
  };
  std::vector<at::Tensor> all;
  for (const bool nesterov : {false, true})
    for (const bool float32 : {false, true})
      for (const bool by_head : {false, true}) {
        const at::Tensor made = moved(find_rule("muon").make({{"muon_momentum", 0.8},
                                                              {"nesterov", nesterov},
                                                              {"muon_float32", float32},
                                                              {"muon_by_head", by_head},
                                                              {"weight_decay", 0.3}}));
        EXPECT_TRUE(at::equal(made, moved(std::make_shared<Muon>(MuonConfig{
                                        .momentum = 0.8,
                                        .nesterov = nesterov,
                                        .weight_decay = 0.3,
                                        .newton_schulz = float32 ? at::kFloat : at::kBFloat16,
                                        .by_head = by_head}))));
        for (const at::Tensor& other : all) EXPECT_FALSE(at::equal(made, other));
        all.push_back(made);
      }
}

// The direction has no scale, so only what is kept tells that of the mean.
TEST(Muon, KeepsTheMeanOfTheGradients) {
  on_mesh({}, [](const Mesh&) {
    Param<Dense{I, I, I}> w(Model::spec("w", {3, 2}, {}), Model::init());
    ParamList list;
    list.add(w);
    Optimizer optimizer(list, std::make_shared<Muon>(kMuon));
    const at::Tensor g = whole_gradient(w.stored().spec, 0);
    w.stored().value.mutable_grad() = g.clone();
    take_step(optimizer, kRate);
    const at::Tensor kept = optimizer.state().at(0).value;
    EXPECT_TRUE(at::allclose(kept, (1 - kMuon.momentum) * g, 1e-14)) << kept;
  });
}

// Two messages for all parameters, and no rank has much more than its share of the matrices: the
// second message is what it sends home.
TEST(Muon, SendsEachMatrixToOneOfManyOwners) {
  std::vector<std::int64_t> bytes(4);
  on_mesh({.dp_replicate = 2, .dp_shard = 2}, [&](const Mesh& mesh) {
    const comm::Trace trace;
    train(kMuon, 1);
    std::vector<std::int64_t> messages;
    for (const auto& call : trace.entries())
      if (call.op == comm::Collective::all_to_all) messages.push_back(call.bytes);
    ASSERT_EQ(messages.size(), 2u);
    bytes[static_cast<std::size_t>(mesh.rank())] = messages[1];
  });
  const std::int64_t num = 9 * 4 + 7 * 5 + 12 * 5 + 2 * 5 * 21 + 2;  // to each of two replicas
  std::int64_t sum = 0;
  for (const std::int64_t b : bytes) sum += b;
  EXPECT_EQ(sum, 2 * num * static_cast<std::int64_t>(sizeof(double)));
  for (const std::int64_t b : bytes) EXPECT_LT(b, sum * 2 / 5);
}

// Matrices of 36 and 35 numbers fill a round of 4 x 10; those after them are larger, or the last.
TEST(Muon, TakesParametersInRounds) {
  on_mesh({.dp_shard = 4}, [&](const Mesh&) {
    MuonConfig config = kMuon;
    config.numbers_in_round = 10;
    const comm::Trace trace;
    train(config, 1);
    int num_messages = 0;
    for (const auto& call : trace.entries())
      num_messages += call.op == comm::Collective::all_to_all;
    EXPECT_EQ(num_messages, 2 * 5) << "uncut and row; heads; up; down; small";
  });
}

// Five steps, of three products each: x x' [n, n], its square, and that times x, n <= m.
TEST(Muon, CountsItsProducts) {
  const OneRankScope scope;
  const Matrices all;
  EXPECT_EQ(muon_flops(all.up.stored(), false), 5 * 5 * (2 * 3 * 3 * 7 + 2 * 27 + 2 * 3 * 3 * 7));
  EXPECT_EQ(muon_flops(all.heads.stored(), false), 5 * (2 * 25 * 12 + 2 * 125 + 2 * 25 * 12));
  EXPECT_EQ(muon_flops(all.heads.stored(), true), 4 * 5 * (2 * 9 * 5 + 2 * 27 + 2 * 9 * 5));
}

TEST(Muon, LeavesTablesAndVectorsToAdamW) {
  on_mesh({}, [](const Mesh&) {
    const auto is_for = find_rule("muon").is_for;
    ParamSpec table = Model::spec("embedding", {6, 4}, {});
    EXPECT_TRUE(is_for(Param<Dense{I, I, I}>(table).stored()));
    table.is_matrix = false;
    EXPECT_FALSE(is_for(Param<Dense{I, I, I}>(table).stored()));
    EXPECT_FALSE(is_for(Param<Dense{I, I, I}>(Model::spec("norm", {6}, {})).stored()));
    EXPECT_EQ(find_rule("muon").rule_of_others, "adamw");
  });
}

TEST(Muon, RefusesWhatItCannotDo) {
  EXPECT_EQ(error_of([] { Muon(MuonConfig{.momentum = 1}); }, ErrorKind::config),
            "Muon: momentum is 1; it takes 0 or more and less than 1, such as 0.95");
  EXPECT_EQ(error_of([] { Muon(MuonConfig{.weight_decay = -1}); }, ErrorKind::config),
            "Muon: weight_decay is -1; it takes 0 or more, such as 0.1");
}

}  // namespace
}  // namespace moesh::optim
