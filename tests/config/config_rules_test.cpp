// Every rule, from a file and from the command line: the message names the option, its value, where
// it came from, and a value that works, and that value does work.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "moesh/config/options.h"
#include "moesh/fsdp/param.h"
#include "moesh/train/build.h"
#include "tests/support.h"

namespace moesh::config {
namespace {

using Values = std::vector<std::pair<std::string, Value>>;

struct Case {
  Values values;                   // what is asked for
  std::vector<std::string> texts;  // parts of the message
  Values cure;                     // what the message says would work
  Values given = {};               // what else is set, always on the command line
  int world_size = 0;
};

std::string plain(const Value& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text ? *text : formats::to_toml(value);
}

// A TOML file with these values, and the line of each.
struct Written {
  std::string text;
  std::map<std::string, int> lines;
  explicit Written(const Values& values) {
    std::map<std::string, Values> sections;
    for (const auto& [name, value] : values)
      sections[name.substr(0, name.find('.'))].emplace_back(name, value);
    int line = 0;
    for (const auto& [section, of_section] : sections) {
      text += "[" + section + "]\n", ++line;
      for (const auto& [name, value] : of_section) {
        text += name.substr(name.find('.') + 1) + " = " + formats::to_toml(value) + "\n";
        lines[name] = ++line;
      }
    }
  }
};

std::vector<std::string> arguments(const Values& values) {
  std::vector<std::string> args;
  for (const auto& [name, value] : values) args.push_back("--" + name + "=" + plain(value));
  return args;
}

void check(std::vector<std::string> args, const Case& c) {
  const auto given = arguments(c.given);
  args.insert(args.end(), given.begin(), given.end());
  validate(load_config(args), c.world_size);
}

void expect_case(const Case& c) {
  const std::string named = c.values.front().first;
  SCOPED_TRACE(named + " = " + plain(c.values.front().second));
  const std::string says = named + " is " + formats::to_toml(c.values.front().second);

  const Written written(c.values);
  const TemporaryFile file("run.toml", written.text);
  std::vector<std::string> parts = c.texts;
  parts.push_back(says + " (" + file.path() + ":" + std::to_string(written.lines.at(named)) + ")");
  expect_parts(error_of([&] { check({"--config", file.path()}, c); }, ErrorKind::config), parts);

  parts.back() = says + " (command line)";
  expect_parts(error_of([&] { check(arguments(c.values), c); }, ErrorKind::config), parts);

  // The cure on the command line overrides a bad file, and a good file does not hide what the
  // command line brings.
  std::vector<std::string> args = arguments(c.cure);
  args.insert(args.begin(), {"--config", file.path()});
  EXPECT_NO_THROW(check(args, c));
  const bool all_overridden = std::all_of(c.cure.begin(), c.cure.end(), [&](const auto& cure) {
    return written.lines.contains(cure.first);
  });
  if (!all_overridden) return;
  const TemporaryFile good("good.toml", Written(c.cure).text);
  args = arguments(c.values);
  args.insert(args.begin(), {"--config", good.path()});
  expect_parts(error_of([&] { check(args, c); }, ErrorKind::config), parts);
}

// Values that the range or the choices of an option exclude.
std::vector<Value> excluded(const Option& o) {
  const Value initial = o.initial();
  const ValueRule& rule = o.rule;
  if (std::holds_alternative<std::string>(initial))
    return rule.choices.empty() ? std::vector<Value>{} : std::vector<Value>{std::string("other")};
  std::vector<Value> values;
  if (std::holds_alternative<std::int64_t>(initial)) {
    values.emplace_back(static_cast<std::int64_t>(rule.least) - 1);
    if (std::isfinite(rule.most)) values.emplace_back(static_cast<std::int64_t>(rule.most) + 1);
  }
  if (std::holds_alternative<double>(initial)) {
    values.emplace_back(rule.above ? rule.least : rule.least - 0.5);
    if (std::isfinite(rule.most)) values.emplace_back(rule.below ? rule.most : rule.most + 0.5);
    for (double x : {std::nan(""), HUGE_VAL, -HUGE_VAL}) values.emplace_back(x);
  }
  return values;
}

TEST(ConfigRules, TheRangeOfEveryOption) {
  int num_values = 0;
  for (const Option& o : options())
    for (const Value& value : excluded(o)) {
      expect_case({.values = {{o.name, value}},
                   .texts = {"it takes " + o.rule.describe(o.initial())},
                   .cure = {{o.name, o.initial()}}});
      ++num_values;
    }
  EXPECT_GT(num_values, 60);
}

TEST(ConfigRules, TilesOfFloat8StayOnARank) {
  const Values experts{{"training.float8", std::string("blockwise")}},
      dense{{"training.float8_dense", std::string("blockwise")}},
      split{{"training.float8", std::string("blockwise")},
            {"parallelism.tensor_parallel_degree", std::int64_t{2}},
            {"parallelism.expert_tensor_parallel_degree", std::int64_t{2}}};
  const std::string tile = "training.float8_tile";
  // deepseek_v3:tiny has a width of 32, and experts of 24.
  expect_case({.values = {{tile, std::int64_t{16}}},
               .texts = {"model.moe_ffn is 24 (deepseek_v3:tiny)", "set training.float8_tile to 8",
                         "model.moe_ffn to 16 or 32"},
               .cure = {{tile, std::int64_t{8}}},
               .given = experts});
  expect_case({.values = {{tile, std::int64_t{24}}},
               .texts = {"model.dim is 32 (deepseek_v3:tiny)", "set training.float8_tile to 8",
                         "model.dim to 24 or 48"},
               .cure = {{tile, std::int64_t{8}}},
               .given = experts});
  expect_case({.values = {{tile, std::int64_t{8}}},
               .texts = {"model.moe_ffn is 24 (deepseek_v3:tiny)",
                         "parallelism.expert_tensor_parallel_degree is 2 (command line)",
                         "set training.float8_tile to 4", "model.moe_ffn to 16 or 32",
                         "or lower parallelism.expert_tensor_parallel_degree"},
               .cure = {{tile, std::int64_t{4}}},
               .given = split});
  const Values rows{{"training.float8_rows", std::string("blockwise")}};
  expect_case({.values = {{tile, std::int64_t{24}}},
               .texts = {"training.float8_rows is \"blockwise\" (command line)",
                         "model.dim is 32 (deepseek_v3:tiny)", "set training.float8_tile to 8",
                         "model.dim to 24 or 48"},
               .cure = {{tile, std::int64_t{8}}},
               .given = rows});
  Values of_16 = rows;  // experts are 24 wide
  of_16.emplace_back(tile, std::int64_t{16});
  EXPECT_NO_THROW(check({}, {.values = {}, .texts = {}, .cure = {}, .given = of_16}));
  // Dense projections may end with a short tile, except where ranks split them.
  EXPECT_NO_THROW(check({}, {.values = {}, .texts = {}, .cure = {}, .given = dense}));
  Values of_tp = dense;
  of_tp.emplace_back("parallelism.tensor_parallel_degree", std::int64_t{4});
  expect_case({.values = {{tile, std::int64_t{16}}},
               .texts = {"parallelism.tensor_parallel_degree is 4 (command line)",
                         "dimension 0 of model.layers.0.self_attn.q_b_proj.weight is 96",
                         "set training.float8_tile to 2", "that size to 64 or 128"},
               .cure = {{tile, std::int64_t{2}}},
               .given = of_tp});
}

TEST(ConfigRules, EveryNumberHasARange) {
  for (const Option& o : options()) {
    const Value initial = o.initial();
    const bool is_number =
        std::holds_alternative<double>(initial) || std::holds_alternative<std::int64_t>(initial);
    EXPECT_EQ(std::isfinite(o.rule.least), is_number) << o.name;
    EXPECT_TRUE(o.rule.allows(initial)) << o.name;
    for (const std::string& choice : o.rule.choices) EXPECT_TRUE(o.rule.allows(choice)) << o.name;
  }
}

TEST(ConfigRules, AValueOfTheWrongType) {
  for (const Option& o : options()) {
    if (std::holds_alternative<std::string>(o.initial())) {
      const TemporaryFile file(
          "run.toml",
          Written({{o.name, std::int64_t{5}}}).text);  // on the command line 5 is a text
      expect_parts(
          error_of([&] { load_config({"--config", file.path()}); }, ErrorKind::config),
          {o.name + " is 5 (" + file.path() + ":2)", "it takes " + o.rule.describe(o.initial())});
      continue;
    }
    const TemporaryFile file("run.toml", Written({{o.name, std::string("three")}}).text);
    expect_parts(error_of([&] { load_config({"--config", file.path()}); }, ErrorKind::config),
                 {o.name + " is \"three\" (" + file.path() + ":2)",
                  "it takes " + o.rule.describe(o.initial())});
    for (const std::string text : {"three", "", "1x", "--"})
      expect_parts(
          error_of([&] { load_config({"--" + o.name + "=" + text}); }, ErrorKind::config),
          {o.name + " is " + text + " (command line)", "it takes " + o.rule.describe(o.initial())});
  }
  expect_parts(error_of([] { load_config({"--training.steps=1.5"}); }, ErrorKind::config),
               {"training.steps is 1.5", "an integer"});
  expect_parts(
      error_of([] { load_config({"--training.steps=99999999999999999999"}); }, ErrorKind::config),
      {"an integer"});
  const TemporaryFile file("run.toml", "[optimizer]\nlr = 1\n");
  EXPECT_EQ(load_config({"--config", file.path()}).optimizer.lr, 1.0);  // an integer is a number
}

std::int64_t n(std::int64_t value) { return value; }

TEST(ConfigRules, TheMeshAndTheWorld) {
  const std::string p = "parallelism.", tp = p + "tensor_parallel_degree",
                    ep = p + "expert_parallel_degree", etp = p + "expert_tensor_parallel_degree",
                    shard = p + "data_parallel_shard_degree", cp = p + "context_parallel_degree",
                    replicate = p + "data_parallel_replicate_degree";
  expect_case({.values = {{ep, n(3)}, {tp, n(2)}, {shard, n(2)}},
               .texts = {"does not divide dp_shard * cp * tp = 2 * 1 * 2 = 4",
                         "set " + ep + " to one of [1, 2, 4]"},
               .cure = {{ep, n(4)}}});
  expect_case({.values = {{etp, n(4)}, {ep, n(2)}, {tp, n(4)}},
               .texts = {"with " + etp + " = 4 set " + ep + " to one of [1]"},
               .cure = {{ep, n(1)}}});
  expect_case({.values = {{etp, n(3)}, {cp, n(2)}},
               .texts = {"with " + etp + " = 1 set " + ep + " to one of [1, 2]"},
               .cure = {{etp, n(1)}, {ep, n(2)}}});
  // Replicas do not split experts.
  expect_case({.values = {{ep, n(2)}, {replicate, n(2)}},
               .texts = {"to one of [1]"},
               .cure = {{ep, n(1)}}});
  expect_case(
      {.values = {{tp, n(2)}, {cp, n(2)}},
       .texts = {"a mesh of 4 ranks, and there are 8", "start 4 ranks", "set " + shard + " to 2"},
       .cure = {{shard, n(2)}},
       .world_size = 8});
  // Four shards would make 4 ranks, but eight ranks split the experts.
  expect_case({.values = {{shard, n(8)}, {ep, n(8)}},
               .texts = {"there are 4", "whose product is 4"},
               .cure = {{shard, n(4)}, {ep, n(4)}},
               .world_size = 4});
  expect_case({.values = {{tp, n(4)}},
               .texts = {"there are 6", "whose product is 6"},
               .cure = {{tp, n(3)}, {shard, n(2)}},
               .given = {{"model.num_heads", n(12)}},
               .world_size = 6});
  expect_case({.values = {{shard, n(1) << 62}, {tp, n(1) << 62}},
               .texts = {"smaller product"},
               .cure = {{shard, n(1)}, {tp, n(1)}}});
  expect_case({.values = {{ep, n(1) << 62}, {etp, n(1) << 62}},
               .texts = {"smaller product"},
               .cure = {{ep, n(1)}, {etp, n(1)}}});
  expect_parts(error_of([] { validate({}, 2); }, ErrorKind::config),
               {"every degree of [parallelism] is 1", "a mesh of 1 rank"});
  expect_parts(error_of([] { validate({}, 2); }, ErrorKind::config),
               {"data_parallel_shard_degree to 2"});
}

TEST(ConfigRules, TheModel) {
  const std::string tp = "parallelism.tensor_parallel_degree",
                    ep = "parallelism.expert_parallel_degree";
  expect_case({.values = {{tp, n(4)}},
               .texts = {"model.num_heads is 6 (command line)", "to one of [1, 2, 3, 6]"},
               .cure = {{tp, n(3)}},
               .given = {{"model.num_heads", n(6)}}});
  expect_case({.values = {{tp, n(4)}},
               .texts = {"model.num_kv_heads is 2", "to one of [1, 2]"},
               .cure = {{tp, n(2)}},
               .given = {{"model.name", std::string("qwen3_moe")}, {"model.num_kv_heads", n(2)}}});
  expect_case(
      {.values = {{ep, n(4)}, {tp, n(4)}},
       .texts = {"model.num_experts is 6", "to one of [1, 2]"},  // 3 and 6 do not divide the ranks
       .cure = {{ep, n(2)}},
       .given = {{"model.num_experts", n(6)}}});
  expect_case({.values = {{"data.sequence_length", n(129)}},
               .texts = {"model.max_sequence is 128", "to 128 or less"},
               .cure = {{"data.sequence_length", n(128)}},
               .given = {{"model.max_sequence", n(128)}}});
  expect_case({.values = {{"data.synthetic_successors", n(6)}},
               .texts = {"model.vocab_size is 5", "to 5 or less"},
               .cure = {{"data.synthetic_successors", n(5)}},
               .given = {{"model.vocab_size", n(5)}}});
  expect_case({.values = {{"data.path", std::string("no/such/corpus.txt")}},
               .texts = {"there is no such file", "leave data.path empty"},
               .cure = {{"data.path", std::string()}}});
  const TemporaryFile corpus("corpus.txt", "text");
  expect_case({.values = {{"data.path", corpus.path()}},
               .texts = {"257 different tokens", "model.vocab_size is 96 (deepseek_v3:tiny)",
                         "model.vocab_size to 257 or more", "leave data.path empty"},
               .cure = {{"data.path", std::string()}}});
  expect_case(
      {.values = {{"parallelism.moe_dispatcher", std::string("local")}, {ep, n(2)}, {tp, n(2)}},
       .texts = {"auto, all_to_all or all_gather", ep + " is 2"},
       .cure = {{"parallelism.moe_dispatcher", std::string("all_to_all")}}});
  expect_case(
      {.values = {{"parallelism.moe_dispatcher", std::string("two_hops")},
                  {"parallelism.ranks_per_node", n(3)},
                  {ep, n(4)},
                  {tp, n(4)},
                  {"model.num_heads", n(4)}},
       .texts = {"nodes of 3 ranks do not share", ep + " is 4", "ranks_per_node to 1, 2 or 4"},
       .cure = {{"parallelism.ranks_per_node", n(2)}}});
  expect_case({.values = {{"checkpoint.folder", std::string()}, {"checkpoint.enable", true}},
               .texts = {"checkpoint.enable is true", "set checkpoint.folder to"},
               .cure = {{"checkpoint.folder", std::string("checkpoints")}}});
}

TEST(ConfigRules, KeysOfTheModel) {
  const auto model_case = [](const std::string& model, const Values& values,
                             const std::vector<std::string>& texts, const Values& cure) {
    expect_case({.values = values, .texts = texts, .cure = cure, .given = {{"model.name", model}}});
  };
  model_case("deepseek_v3", {{"model.num_groups", n(3)}},
             {"model.num_experts is 8 (deepseek_v3:tiny)", "model.num_groups to one of [1, 2, 4]"},
             {{"model.num_groups", n(4)}});
  model_case("deepseek_v3", {{"model.num_groups", n(8)}},
             {"groups must be equal", "model.num_groups to one of [1, 2, 4]"},
             {{"model.num_groups", n(4)}});
  model_case("deepseek_v3", {{"model.top_groups", n(3)}},
             {"model.num_groups is 2", "model.top_groups to 2 or less"},
             {{"model.top_groups", n(2)}});
  model_case("deepseek_v3", {{"model.top_k", n(5)}},
             {"model.top_groups is 1", "model.num_groups is 2", "a token may use 4 experts",
              "model.top_k to 4 or less", "model.top_groups to 2 or more"},
             {{"model.top_k", n(4)}});
  model_case("deepseek_v3", {{"model.top_k", n(5)}}, {}, {{"model.top_groups", n(2)}});
  model_case("deepseek_v3", {{"model.qk_rope_dim", n(3)}},
             {"rotated in pairs", "model.qk_rope_dim to 4"}, {{"model.qk_rope_dim", n(4)}});
  model_case("deepseek_v3", {{"model.num_dense_layers", n(9)}},
             {"model.num_layers is 3", "model.num_dense_layers to 3 or less"},
             {{"model.num_dense_layers", n(3)}});
  for (const auto& name : models::model_names()) {
    if (name == "deepseek_v3" || name == "glm4_moe_lite") continue;
    model_case(name, {{"model.num_kv_heads", n(3)}},
               {"model.num_heads is 8 (" + name + ":tiny)", "is not divisible by it",
                "model.num_kv_heads to one of [1, 2, 4, 8]"},
               {{"model.num_kv_heads", n(2)}});
    model_case(name, {{"model.head_dim", n(7)}}, {"rotated in pairs", "model.head_dim to 8"},
               {{"model.head_dim", n(8)}});
    model_case(name, {{"model.top_k", n(9)}},
               {"model.num_experts is 8", "model.top_k to 8 or less"}, {{"model.top_k", n(8)}});
  }
  model_case("glm4_moe", {{"model.rotary_dim", n(10)}},
             {"model.head_dim is 8", "model.rotary_dim to 8 or a smaller even number"},
             {{"model.rotary_dim", n(8)}});
  for (const char* key : {"model.dim", "model.q_lora_rank", "model.kv_lora_rank"})
    model_case("deepseek_v3", {{key, n(1)}}, {"only its sign", std::string(key) + " to 2"},
               {{key, n(2)}});
  for (const char* key : {"model.key_dim", "model.value_dim"})
    model_case("qwen3_next", {{key, n(1)}}, {"only its sign", std::string(key) + " to 2"},
               {{key, n(2)}});
  model_case("minimax_m2", {{"model.rotary_dim", n(3)}}, {"rotated in pairs"},
             {{"model.rotary_dim", n(2)}});
  model_case("qwen3_next", {{"model.num_key_heads", n(3)}},
             {"model.num_value_heads is 8", "model.num_key_heads to one of [1, 2, 4, 8]"},
             {{"model.num_key_heads", n(2)}});
  // A state goes from token to token.
  expect_case(
      {.values = {{"parallelism.context_parallel_degree", n(2)}},
       .texts = {"model.name is \"qwen3_next\"", "set parallelism.context_parallel_degree to 1",
                 "parallelism.tensor_parallel_degree instead"},
       .cure = {{"parallelism.context_parallel_degree", n(1)}},
       .given = {{"model.name", std::string("qwen3_next")}}});
  model_case("glm4_moe", {{"model.num_groups", n(3)}}, {"model.num_groups to one of"},
             {{"model.num_groups", n(1)}});
}

// What validation lets through, a model can be made of, and a step can be taken with: no rule is
// hidden in the ranks.
TEST(ConfigRules, EveryKeyThatIsAllowedRuns) {
  int num_run = 0, num_refused = 0;
  for (const auto& name : models::model_names())
    for (const auto& [key, value] : model_values(load_config({"--model=" + name}))) {
      if (!std::holds_alternative<std::int64_t>(value)) continue;
      for (const char* other : {"0", "1", "3", "9"}) {
        SCOPED_TRACE(name + " " + key + "=" + other);
        Config config;
        try {
          config = load_config({"--model=" + name, "--" + key + "=" + other, "--steps=1",
                                "--data.sequence_length=1", "--data.synthetic_successors=1",
                                "--data.batch_size=1"});
        } catch (const Error& e) {
          EXPECT_EQ(e.kind(), ErrorKind::config);
          expect_parts(e.what(), {key + " is " + other + " (command line)"});
          ++num_refused;
          continue;
        }
        EXPECT_NO_THROW({
          const OneRankScope scope;
          const auto model = train::make_model(config);
          const auto data = train::open_dataset(config);
          train::accumulate_gradients(*model, train::step_batches(config, *data, current_mesh(), 0),
                                      train::step_options(config));
        });
        ++num_run;
      }
    }
  EXPECT_GT(num_run, 150);
  EXPECT_GT(num_refused, 50);
}

// Files of routing have 16 bits for the number of an expert.
TEST(ConfigRules, RecordedExpertsFitIntoTheFiles) {
  const auto with = [](const char* experts) {
    return config::load_config({experts, "--moe.record=routing"});
  };
  EXPECT_NO_THROW(with("--model.num_experts=32768"));
  expect_parts(error_of([&] { with("--model.num_experts=32776"); }, ErrorKind::config),
               {"moe.record is \"routing\" (command line)", "model.num_experts is 32776",
                "up to 32768 experts"});
}

// What a checkpoint's config.json could not say is refused before the first step.
TEST(ConfigRules, WhatACheckpointCouldNotSay) {
  const std::string side = "moe.score_before_experts", enable = "checkpoint.enable";
  for (const auto& name : models::model_names()) {
    const bool before = name == "llama4";
    expect_case({.values = {{side, std::string(before ? "false" : "true")}, {enable, true}},
                 .texts = {enable + " is true", "config.json of " + name,
                           before ? "goes into an expert" : "comes out of an expert",
                           "set " + side + " to auto, or " + enable + " to false"},
                 .cure = {{side, std::string("auto")}},
                 .given = {{"model.name", name}}});
    const std::vector<std::string> args{"--model=" + name, "--" + side + "=",
                                        "--checkpoint.enable=true"};
    EXPECT_NO_THROW(load_config({args[0], args[1] + (before ? "true" : "false"), args[2]}));
    EXPECT_NO_THROW(load_config({args[0], args[1] + (before ? "false" : "true")}));
  }
  expect_case({.values = {{"model.window", n(3)}, {enable, true}},
               .texts = {enable + " is true", "config.json of llama4 has no place for it",
                         "set model.window to 0, or " + enable + " to false"},
               .cure = {{"model.window", n(0)}},
               .given = {{"model.name", std::string("llama4")}}});
  expect_case({.values = {{"model.attention_bias", true}, {enable, true}},
               .texts = {"config.json of mixtral has no place for it"},
               .cure = {{enable, false}},
               .given = {{"model.name", std::string("mixtral")}}});
}

// Every key of every model, with another value: it is read back from its config.json, or refused.
TEST(ConfigRules, EveryKeyIsInConfigJsonOrRefused) {
  std::set<std::string> lost;
  for (const auto& name : models::model_names())
    for (const auto& [key, value] : model_values(load_config({"--model=" + name}))) {
      const auto* flag = std::get_if<bool>(&value);
      const auto* whole = std::get_if<std::int64_t>(&value);
      const std::string other = flag    ? (*flag ? "false" : "true")
                                : whole ? std::to_string(2 * *whole + 2)
                                        : formats::to_toml(2 * std::get<double>(value) + 1);
      std::vector<std::string> args{"--model=" + name, "--" + key + "=" + other,
                                    "--checkpoint.enable"};
      try {
        load_config(args);
      } catch (const Error& e) {
        if (std::string(e.what()).find("has no place for it") != std::string::npos)
          lost.insert(name + " " + key);
        // The heads of OLMoE are as wide as its files say: the model by the number of heads.
        const bool is_of_heads = name == "olmoe" && key == "model.dim";
        expect_parts(e.what(), {(is_of_heads ? "model.head_dim" : key) + " is "});
      }
    }
  EXPECT_EQ(lost, (std::set<std::string>{
                      "glm4_moe model.window", "granitemoe model.window", "llama4 model.window",
                      "minimax_m2 model.attention_bias", "minimax_m2 model.window",
                      "mixtral model.attention_bias", "olmoe model.dim", "olmoe model.head_dim",
                      "olmoe model.window", "qwen2_moe model.window", "qwen3_next model.window"}));
}

// What [model] sets is named where it was set, from both sides.
TEST(ConfigRules, FactsThatModelKeysHaveSet) {
  const TemporaryFile file("run.toml", "[model]\ntop_k = 9\n");
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"--config", file.path()}, {"--model.top_k=9"}}) {
    expect_parts(
        error_of([&] { load_config(args); }, ErrorKind::config),
        {"model.top_k is 9 (" + (args.size() == 2 ? file.path() + ":2" : "command line") + ")",
         "model.num_experts is 8 (deepseek_v3:tiny)", "model.top_k to 8 or less"});
  }
}

TEST(ConfigRules, DataAndSchedule) {
  expect_case({.values = {{"data.kind", std::string("text")}},
               .texts = {"data.path is \"\" (default)", "name a file"},
               .cure = {{"data.kind", std::string("auto")}}});
  expect_case({.values = {{"data.kind", std::string("jsonl")}},
               .texts = {"name a file"},
               .cure = {{"data.path", std::string("a.jsonl")}},
               .given = {{"model.vocab_size", n(257)}}});
  expect_case(
      {.values = {{"data.kind", std::string("synthetic")}, {"data.path", std::string("a.txt")}},
       .texts = {"data.path is \"a.txt\"", "leave out the path"},
       .cure = {{"data.kind", std::string("auto")}},
       .given = {{"model.vocab_size", n(257)}}});
  expect_case({.values = {{"lr_scheduler.warmup_steps", n(11)}, {"training.steps", n(10)}},
               .texts = {"training.steps is 10", "warmup_steps to 10 or less"},
               .cure = {{"lr_scheduler.warmup_steps", n(10)}}});
  expect_case({.values = {{"lr_scheduler.decay_ratio", 0.9},
                          {"lr_scheduler.kind", std::string("wsd")},
                          {"lr_scheduler.warmup_steps", n(2)},
                          {"training.steps", n(10)}},
               .texts = {"decay_ratio to 0.8 or less", "warmup_steps to 1 or less"},
               .cure = {{"lr_scheduler.decay_ratio", 0.8}}});
}

TEST(ConfigRules, LinksAreAFileOfFourNumbers) {
  const std::string whole =
      "node_bandwidth_gbs = 4\nnode_latency_us = 0\nnetwork_bandwidth_gbs = 0.5\n"
      "network_latency_us = 20\n";
  const auto with = [](const std::string& text) {
    const TemporaryFile file("links.toml", text);
    return launch_options(load_config({"--debug.links=" + file.path(), "--mesh=dp_shard=4",
                                       "--parallelism.ranks_per_node=2"}))
        .links;
  };
  const auto links = with(whole);
  ASSERT_TRUE(links);
  EXPECT_EQ(links->inside.bandwidth, 4e9);
  EXPECT_EQ(links->inside.latency, 0);
  EXPECT_EQ(links->between.bandwidth, 0.5e9);
  EXPECT_NEAR(links->between.latency, 20e-6, 1e-12);
  EXPECT_EQ(links->ranks_per_node, 2);
  EXPECT_FALSE(launch_options(load_config({})).links);
  const auto error = [&](const std::string& text) {
    return error_of([&] { with(text); }, ErrorKind::config);
  };
  expect_parts(error("node_latency_us = 1\n"), {"links.toml lacks", "network_bandwidth_gbs"});
  expect_parts(error("speed = 1\n"), {"links.toml:1: speed is not a key", "network_latency_us"});
  expect_parts(error("node_bandwidth_gbs = 0\n"), {"node_bandwidth_gbs is 0", "above 0"});
  expect_parts(error("node_latency_us = true\n"), {"node_latency_us is true", "0 or more"});
}

TEST(ConfigRules, ProfiledStepsAreOneOrARange) {
  const auto steps = [](const std::string& text) {
    const auto range = profile_steps(
        load_config({"--steps=30", "--metrics.folder=runs", "--profile.steps=" + text}));
    return std::pair(range->first, range->last);
  };
  EXPECT_EQ(steps("3"), std::pair(3l, 3l));
  EXPECT_EQ(steps("10:12"), std::pair(10l, 12l));
  EXPECT_FALSE(profile_steps(load_config({})));
  for (const char* text : {"x", "3:", "3-5", "3:5:", ":3", "3:x"})
    expect_parts(error_of([&] { steps(text); }, ErrorKind::config),
                 {"profile.steps is", text, "as in 10:12, or one step"});
  expect_parts(error_of([&] { steps("0"); }, ErrorKind::config), {"counted from 1"});
}

}  // namespace
}  // namespace moesh::config
