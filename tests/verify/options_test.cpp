// Every option of the table, through the command line: what it says of its effect is true of the
// run that `verify` and its sweep perform. An option that verify would ignore fails here.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "moesh/verify/verify_all.h"
#include "tests/checkpoint/support.h"
#include "tests/comm/trace.h"
#include "tests/config/other_value.h"
#include "tests/data/small_tokenizer.h"
#include "tests/tier.h"
#include "tests/train/random_routing.h"

namespace moesh::verify {
namespace {

using config::Effect;
using config::Option;

// The files that options name: a text, the same as JSONL, and weights of another seed.
const config::OtherFiles& files() {
  static const TemporaryFolder folder;
  static const config::OtherFiles all = [] {
    const auto at = folder.path();
    std::ofstream(at / "tokenizer.json") << small_tokenizer_json();
    std::ofstream text(at / "corpus.txt"), jsonl(at / "corpus.jsonl");
    for (int i = 0; i < 200; ++i) {
      text << "sentence " << i * i << "\n";
      jsonl << "{\"text\": \"sentence " << i * i << "\"}\n";
    }
    run(at / "run", "tp=1", {"--steps=1", "--training.seed=9"});
    run(at / "lora", "tp=1", {"--steps=1", "--lora.rank=2"});
    write_routing(at / "routing", load_config(Args{}, verify_defaults(2)), 2);
    return config::OtherFiles{.text = at / "corpus.txt",
                              .jsonl = at / "corpus.jsonl",
                              .weights = at / "run" / checkpoint::step_name(1),
                              .tokenizer = at / "tokenizer.json",
                              .token_folder = at / "tokens",
                              .adapter = at / "lora" / checkpoint::step_name(1),
                              .routing = at / "routing"};
  }();
  return all;
}

// As the command makes it of its arguments.
VerifyCase case_of(const Args& args) { return {load_config(args, verify_defaults(2))}; }

// The case without the value of an option, and with it.
struct Pair {
  VerifyCase before, after;
  explicit Pair(const Option& o) {
    auto [value, args] = config::other_value(o, files());
    before = case_of(args);
    args.push_back("--" + o.name + "=" + value);
    after = case_of(args);
  }
};

// What one rank computes, without the noise of a reference, which takes eight runs.
NamedTensors one_run(const VerifyCase& of) {
  VerifyCase c = of;
  c.config = one_rank(of.config);
  NamedTensors result;
  Routing routing;
  run_steps(c, *open_data(c), *comm::solo_group(), &routing, nullptr, [&](const RankTensor& t) {
    const at::Tensor value = t.value.detach();
    result.tensors.emplace_back(t.name, (t.tokens ? value.flatten(0, 1) : value).clone());
  });
  return result;
}

bool same(const NamedTensors& a, const NamedTensors& b) {
  return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const auto& x, const auto& y) {
                      return x.first == y.first && x.second.sizes() == y.second.sizes() &&
                             x.second.equal(y.second);
                    });
}

// What rank 0 of a mesh sends: the collectives of the steps, in their order.
std::vector<std::string> messages(const VerifyCase& c) {
  std::vector<std::string> all;
  const auto data = open_data(c);
  comm::launch(
      mesh_shape(c.config).num_ranks(),
      [&](comm::Group& world) {
        const comm::Trace trace;
        run_steps(c, *data, world, nullptr, nullptr, [](const RankTensor&) {});
        if (world.rank() != 0) return;
        for (const auto& e : trace.entries())
          all.push_back(detail::concat(e.group, " ", to_string(e.op), " ", e.bytes));
      },
      launch_options(c.config));
  return all;
}

// Options that change speed, and show in no message of a step.
const std::map<std::string, std::string> kUnseen{
    {"training.device", "the tests run on one device at a time"},
    {"kernels.gpu", "the CPU has one set of kernels; see KernelsOfTheGpu"},
    {"kernels.graph", "steps on the CPU are not graphs; see step_gpu_test"},
    {"kernels.weight_copies", "what is cast is not sent; see Copies in step_test"},
    {"checkpoint.async", "verify saves nothing"},
    {"debug.checked", "what it sends is not the program's doing, and is not traced"},
    {"debug.timeout_seconds", "nobody waits that long"},
    {"debug.links", "messages take longer, and are the same; see Paced in comm"}};

std::vector<std::string> names_with(Effect effect) {
  std::vector<std::string> names;
  for (const Option& o : config::options())
    if (o.effect == effect && !kUnseen.contains(o.name)) names.push_back(o.name);
  return names;
}
const auto kName = [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
};

class Numbers : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Numbers, testing::ValuesIn(names_with(Effect::numbers)), kName);

TEST_P(Numbers, AreThoseOfTheOption) {
  const Option& o = *config::find_option(GetParam());
  const Pair pair(o);
  const auto reference = run_reference(pair.after);
  EXPECT_FALSE(same(one_run(pair.before), reference)) << "verify does not see " << o.name;
  const auto report = verify(pair.after, reference);
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(pair.after.config));
}

// A sweep goes through all meshes: the degrees are its own.
std::vector<std::string> names_in_sweeps() {
  auto names = names_with(Effect::numbers);
  std::erase_if(names, [](const auto& name) { return name.starts_with("parallelism."); });
  return names;
}

class Sweep : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Sweep, testing::ValuesIn(names_in_sweeps()), kName);

TEST_P(Sweep, RunsWithTheOption) {
  const Option& o = *config::find_option(GetParam());
  const MeshShape mesh{.tp = 2, .ep = 2};
  Pair pair(o);
  pair.before.config = fitted(pair.before.config, {mesh});
  pair.after.config = fitted(pair.after.config, {mesh});
  EXPECT_FALSE(same(one_run(pair.before), one_run(pair.after)))
      << "the sweep does not see " << o.name;
  // That a mesh agrees is also known of Numbers: in `make test` for every fourth option.
  const auto names = names_in_sweeps();
  const auto at = std::find(names.begin(), names.end(), o.name) - names.begin();
  if (!is_long() && at % 4 != 0) return;
  const auto reference = run_reference(pair.after);
  const auto report = verify(pair.after, reference);
  EXPECT_TRUE(report.holds()) << report.describe(mesh);
}

class Speed : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Speed, testing::ValuesIn(names_with(Effect::speed)), kName);

TEST_P(Speed, ChangesMessagesAndNoNumber) {
  const Option& o = *config::find_option(GetParam());
  const Pair pair(o);
  EXPECT_TRUE(messages(pair.before) != messages(pair.after))
      << "verify does not run with " << o.name;
  const auto reference = run_reference(pair.after);
  EXPECT_TRUE(same(one_run(pair.before), reference)) << o.name << " changes numbers";
  const auto report = verify(pair.after, reference);
  EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(pair.after.config));
}

class Output : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Output, testing::ValuesIn(names_with(Effect::output)), kName);

TEST_P(Output, ChangesNoNumber) {
  const Pair pair(*config::find_option(GetParam()));
  EXPECT_TRUE(same(one_run(pair.before), one_run(pair.after)));
}

// The keys of a model need no list: they are in the one object of which the model is made.
TEST(ModelKeys, ReachVerify) {
  EXPECT_FALSE(same(one_run(case_of({})), one_run(case_of({"--model.moe_ffn=16"}))));
}

// Lists have no place in the table of options.
TEST(ParamGroups, ReachVerify) {
  const Args others{"--optimizer.group.0.match=\\.gate\\.", "--optimizer.group.0.lr_scale=0.5",
                    "--optimizer.group.1.match=experts", "--optimizer.group.1.weight_decay=0.7"};
  const auto plain = one_run(case_of({"--mesh=tp=2,ep=2"}));
  for (std::size_t count : {2, 4}) {
    Args args{"--mesh=tp=2,ep=2"};
    args.insert(args.end(), others.begin(), others.begin() + static_cast<std::ptrdiff_t>(count));
    const VerifyCase c = case_of(args);
    const auto reference = run_reference(c);
    EXPECT_FALSE(same(plain, reference)) << count;
    const auto report = verify(c, reference);
    EXPECT_TRUE(report.holds()) << report.describe(mesh_shape(c.config));
  }
}

// What the option sets, the model of verify carries.
TEST(KernelsOfTheGpu, AreThoseOfTheOption) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  for (const char* asked : {"library", "own", "auto"}) {
    const Config config = case_of({std::string("--kernels.gpu=") + asked}).config;
    EXPECT_STREQ(kernels::to_string(train::make_model(config)->gpu_kernels()), asked);
  }
}

TEST(OneRank, IsTheSameRunOnAMeshOfOne) {
  const Config config = case_of({"--mesh=dp_replicate=2,dp_shard=2,tp=2,ep=2",
                                 "--data.batch_size=3", "--activation_checkpoint.mode=full"})
                            .config;
  const Config one = one_rank(config);
  EXPECT_EQ(mesh_shape(one).num_ranks(), 1);
  EXPECT_EQ(one.data.batch_size, 6);
  EXPECT_EQ(sample_order(one).num_per_step(), sample_order(config).num_per_step());
  EXPECT_EQ(config.data.batch_size, 3);
}

TEST(OneRank, CutsTheStepOtherwise) {
  struct Cut {
    Args args;
    std::int64_t num_micro, batch;
  };
  for (const auto& [args, num_micro, batch] :
       {Cut{{"--data.batch_size=2"}, 2, 1}, Cut{{"--data.batch_size=9"}, 3, 3},
        Cut{{"--data.batch_size=1", "--mesh=dp_shard=5"}, 5, 1},
        Cut{{"--data.batch_size=2", "--training.gradient_accumulation_steps=3"}, 1, 6},
        Cut{{"--training.global_batch_size=8", "--data.batch_size=2", "--mesh=dp_shard=2"}, 1, 8},
        Cut{{"--training.global_batch_size=8", "--data.batch_size=4", "--mesh=dp_shard=2"}, 4, 2},
        Cut{{"--data.batch_size=1"}, 1, 1},
        Cut{{"--data.batch_size=4", "--moe.balance_over=micro_batch", "--mesh=dp_shard=2"},
            1,
            8}}) {
    const Config config = case_of(args).config, one = one_rank(config);
    EXPECT_EQ(num_micro_batches(one), num_micro) << args[0];
    EXPECT_EQ(one.data.batch_size, batch) << args[0];
    EXPECT_EQ(why_cut_alike(config).empty(), num_micro != num_micro_batches(config)) << args[0];
  }
  EXPECT_EQ(why_cut_alike(case_of({"--moe.balance_over=micro_batch"}).config),
            "moe.balance_over is micro_batch, and that loss depends on how a step is cut");
  EXPECT_EQ(why_cut_alike(
                case_of({"--moe.balance_over=micro_batch", "--moe.balance_loss_weight=0"}).config),
            "");
}

// Codes jump, and a run in float32 must know how far that goes; float64 sees none.
TEST(Noise, OfFloat8IsMeasuredFromAsFarAsBfloat16Rounds) {
  const auto of = [](const std::string& dtype, const std::string& key) {
    return noise_type(case_of({"--dtype=" + dtype, "--training." + key + "=blockwise",
                               "--training.float8_tile=4"})
                          .config);
  };
  for (const char* key : {"float8", "float8_dense", "float8_rows"}) {
    EXPECT_EQ(of("float32", key), at::kBFloat16);
    EXPECT_EQ(of("bfloat16", key), at::kBFloat16);
    EXPECT_EQ(of("float64", key), at::kDouble);
  }
  EXPECT_EQ(noise_type(case_of({"--dtype=float32"}).config), at::kFloat);
}

TEST(Fitted, FindsSizesOfWholeTiles) {
  const Args float8{"--training.float8=blockwise", "--training.float8_dense=blockwise",
                    "--training.float8_tile=4"};
  for (const auto& model : models::model_names()) {
    Args args = float8;
    args.push_back("--model=" + model);
    const Config config = case_of(args).config;
    EXPECT_EQ(model_values(fitted(config, {})), model_values(config)) << model;
    for (const MeshShape& mesh : {MeshShape{.tp = 3, .ep = 3}, MeshShape{.tp = 4, .etp = 4},
                                  MeshShape{.dp_shard = 5, .etp = 5}})
      EXPECT_NO_THROW(fitted(config, {mesh})) << model << " on " << mesh.describe();
  }
}

TEST(Fitted, KeepsWhatTheMeshDivides) {
  const Config config = case_of({"--model=qwen3_moe"}).config;
  EXPECT_EQ(model_values(fitted(config, {{.tp = 4, .ep = 2}})), model_values(config));
  const Config three = fitted(config, {{.tp = 3, .ep = 3}});
  EXPECT_EQ(models::facts(three.model.architecture).num_heads % 3, 0);
  EXPECT_EQ(models::facts(three.model.architecture).num_experts % 3, 0);
  const Config of_eight = case_of({"--training.global_batch_size=8"}).config;
  EXPECT_EQ(fitted(of_eight, {{.dp_shard = 4}}).training.global_batch_size, 8);
  EXPECT_EQ(fitted(of_eight, {{.dp_shard = 3}}).training.global_batch_size, 6);
  for (const bool is_tied : {false, true}) {
    const Config pipeline = fitted(config, {{.pp = 2}, "1f1b", is_tied});
    EXPECT_EQ(verify::is_tied(pipeline), is_tied);
    EXPECT_EQ(verify::is_tied(one_rank(pipeline)), is_tied) << "what it is compared with";
  }
}

}  // namespace
}  // namespace moesh::verify
