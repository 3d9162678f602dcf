#include "moesh/config/config.h"

#include <array>
#include <fstream>
#include <set>

#include "moesh/config/merge.h"
#include "moesh/config/options.h"
#include "moesh/formats/safetensors.h"
#include "moesh/models/disk.h"
#include "moesh/models/registry.h"
#include "moesh/optim/rules.h"
#include "tests/config/other_value.h"
#include "tests/support.h"

namespace moesh::config {
namespace {

TEST(Pipeline, SaysWhichStagesDoNotFit) {
  const auto error = [](const std::string& schedule, const std::string& layers) {
    return error_of(
        [&] {
          load_config({"--mesh=pp=2", "--model.num_layers=6",
                       "--parallelism.pipeline_parallel_schedule=" + schedule,
                       "--parallelism.pipeline_parallel_layers_per_stage=" + layers});
        },
        ErrorKind::config);
  };
  constexpr const char* kLayers = "parallelism.pipeline_parallel_layers_per_stage is ";
  expect_parts(error("1f1b", "2,3"), {kLayers, "which are 5, and the model has 6"});
  expect_parts(error("1f1b", "two"), {kLayers, "'two' is not a number of layers"});
  expect_parts(error("1f1b", "2,2,2"),
               {kLayers, "3 stages", "pipeline_parallel_degree is 2", "to one of [1, 3]"});
  expect_parts(error("1f1b", "2,2,1,1"), {kLayers, "4 stages, 2 on each rank", "which takes one"});
  expect_parts(error("interleaved_1f1b", "3"), {"which takes two or more"});
  expect_parts(error("zbv", "1"), {"6 stages, 3 on each rank", "which takes two"});
  expect_parts(
      error_of([] { load_config({"--mesh=pp=2", "--parallelism.pipeline_parallel_schedule=zbv"}); },
               ErrorKind::config),
      {"with 2 stages on each rank", "model.num_layers is 3",
       "to 1, or a schedule with one stage a rank, or model.num_layers to 4 or more"});
  expect_parts(
      error_of(
          [] {
            load_config({"--mesh=pp=2", "--model.num_layers=4",
                         "--parallelism.pipeline_parallel_schedule=zbv",
                         "--parallelism.overlap_experts=true"});
          },
          ErrorKind::config),
      {"parallelism.overlap_experts is true", "pipeline_parallel_schedule is \"zbv\"",
       "set parallelism.pipeline_parallel_schedule to 1f1b, interleaved_1f1b or dualpipev"});
  expect_parts(
      error_of([] { load_config({"--mesh=pp=4", "--model.num_layers=3"}); }, ErrorKind::config),
      {"set parallelism.pipeline_parallel_degree to 3 or less, or model.num_layers to 4 or more"});
  expect_parts(
      error_of([] { load_config({"--parallelism.pipeline_parallel_layers_per_stage=banana"}); },
               ErrorKind::config),
      {kLayers, "'banana' is not a number of layers"});
  EXPECT_EQ(stage_plan(load_config({"--mesh=pp=2", "--model.num_layers=6",
                                    "--parallelism.pipeline_parallel_layers_per_stage=2,4"})),
            (pipeline::StagePlan{2, 4}));
}

TEST(Config, TheCommandLineOverridesTheFileAndTheFileTheDefaults) {
  const TemporaryFile file("run.toml",
                           "[training]\nsteps = 7\nseed = 8\n\n[optimizer]\nlr = 0.5\n");
  const Config config =
      load_config({"--training.steps=9", "--config", file.path(), "--data.batch_size", "3"});
  EXPECT_EQ(config.training.steps, 9);
  EXPECT_EQ(config.training.seed, 8);
  EXPECT_EQ(config.optimizer.lr, 0.5);
  EXPECT_EQ(config.data.batch_size, 3);
  EXPECT_EQ(config.data.sequence_length, Config{}.data.sequence_length);
  EXPECT_EQ(config.origin("training.steps").text, "command line");
  EXPECT_EQ(config.origin("training.seed").text, file.path() + ":3");
  EXPECT_EQ(config.origin("optimizer.lr").text, file.path() + ":6");
  EXPECT_EQ(config.origin("data.sequence_length").text, "default");
}

TEST(Config, WithoutArgumentsItIsTheDefaultsAndTheyAreValid) {
  const Config config = load_config({});
  for (const Option& o : options()) {
    EXPECT_EQ(o.get(config), o.initial()) << o.name;
    EXPECT_EQ(config.origin(o.name).text, o.of_model ? "deepseek_v3:tiny" : "default");
  }
  EXPECT_NO_THROW(validate(config));
  EXPECT_NO_THROW(validate(config, 1));
}

TEST(Config, IsAnAggregate) {
  const Config config{.training = {.steps = 3}, .data = {.batch_size = 1}};
  EXPECT_NO_THROW(validate(config, 1));
  EXPECT_EQ(config.origin("training.steps").text, "set by the program");
  EXPECT_EQ(config.origin("training.seed").text, "default");
  expect_parts(error_of([] { validate({.training = {.steps = 0}}, 1); }, ErrorKind::config),
               {"training.steps is 0 (set by the program)"});
}

TEST(Config, EveryOptionIsReadFromTheCommandLineInBothForms) {
  for (const Option& o : options()) {
    const auto [value, needs] = other_value(o);
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), needs.begin(), needs.end());
      return load_config(more);
    };
    const Config before = with({}), config = with({"--" + o.name + "=" + value});
    EXPECT_NE(o.get(config), o.get(before)) << o.name;
    EXPECT_EQ(o.get(with({"--" + o.name, value})), o.get(config)) << o.name;
    // It changes this option and no other.
    for (const Option& other : options())
      if (other.name != o.name && !(o.name == "model.name" && other.of_model)) {
        EXPECT_EQ(other.get(config), other.get(before)) << o.name << " changes " << other.name;
      }
  }
}

TEST(Config, DefaultsOfACommandAreBelowTheFile) {
  const Settings defaults{{"training.seed", std::int64_t{4}, {"verify's default", true}},
                          {"training.steps", std::int64_t{5}, {"verify's default", true}},
                          {"moe.load_balance_coeff", 0.5, {"verify's default", true}}};
  const TemporaryFile file("run.toml", "[training]\nsteps = 7\n");
  const Config config = load_config({"--config", file.path()}, defaults);
  EXPECT_EQ(config.training.seed, 4);
  EXPECT_EQ(config.origin("training.seed").text, "verify's default");
  EXPECT_EQ(config.training.steps, 7);
  // And above what a model would have.
  EXPECT_EQ(load_config({"--model=mixtral"}, defaults).moe.load_balance_coeff, 0.5);
}

TEST(Config, TheStepOfTheExpertBiasIsTheModelsOwnUntilItIsSet) {
  const std::string name = "moe.load_balance_coeff";
  for (const auto& model : models::model_names()) {
    const Config config = load_config({"--model=" + model + ":debug"});
    const bool has_bias = models::facts(config.model.architecture).stores_expert_bias;
    EXPECT_EQ(config.moe.load_balance_coeff, has_bias ? 1e-3 : 0) << model;
    EXPECT_EQ(config.origin(name).text, model + ":debug");
    EXPECT_TRUE(config.origin(name).is_default);
    const Config asked = load_config({"--model=" + model, "--" + name + "=0.25"});
    EXPECT_EQ(asked.moe.load_balance_coeff, 0.25) << model;
    EXPECT_EQ(asked.origin(name).text, "command line");
    // Another model has its own, and what was asked for stays.
    const Settings to_deepseek{{"model.name", std::string("deepseek_v3"), {"test"}}};
    EXPECT_EQ(changed(config, to_deepseek).moe.load_balance_coeff, 1e-3) << model;
    EXPECT_EQ(changed(asked, to_deepseek).moe.load_balance_coeff, 0.25) << model;
  }
}

TEST(Config, AFlagOfThreeValuesIsReadFromAFileToo) {
  for (const std::string value : {"true", "false", "\"true\"", "\"auto\""}) {
    const TemporaryFile file("run.toml", "[moe]\nscore_before_experts = " + value + "\n");
    const auto read = score_before_experts(load_config({"--config", file.path()}));
    EXPECT_EQ(read.has_value(), value != "\"auto\"");
    EXPECT_EQ(read.value_or(false), value.find("true") != std::string::npos) << value;
  }
  const TemporaryFile file("run.toml", "[optimizer]\nname = true\n");
  expect_parts(error_of([&] { load_config({"--config", file.path()}); }, ErrorKind::config),
               {"optimizer.name is true"});
}

// Lists: in a file, on the command line over it, printed and read back.
TEST(Config, HasListsOfSources) {
  const TemporaryFile file("run.toml",
                           "[model]\nvocab_size = 300\n[[data.source]]\npath = \"a.txt\"\n"
                           "weight = 3\n[[data.source]]\npath = \"b.jsonl\"\nname = \"b\"\n");
  const Config config = load_config(
      {"--config", file.path(), "--data.source.1.weight=2", "--data.source.2.path=c.txt"});
  ASSERT_EQ(config.data.source.size(), 3u);
  EXPECT_EQ(config.data.source[0].weight, 3);
  EXPECT_EQ(config.data.source[1].path, "b.jsonl");
  EXPECT_EQ(config.data.source[1].weight, 2);
  EXPECT_EQ(config.origin("data.source.0.path").text, file.path() + ":4");
  EXPECT_EQ(config.origin("data.source.1.weight").text, "command line");
  EXPECT_EQ(config.origin("data.source.1.kind").text, "default");
  const auto options = dataset_options(config);
  EXPECT_EQ(options.sources[0].name, "a.txt");
  EXPECT_EQ(options.sources[1].name, "b");
  const TemporaryFile printed("printed.toml", print_config(config));
  const Config again = load_config({"--config", printed.path()});
  EXPECT_EQ(numbers_of(again), numbers_of(config));
  EXPECT_EQ(again.data.source.size(), 3u);
  EXPECT_NE(numbers_of(changed(config, {{"data.source.0.weight", 1.0, {"test"}}})),
            numbers_of(config));

  const auto message = [](std::vector<std::string> args) {
    args.push_back("--model.vocab_size=300");
    return error_of([&] { load_config(args); }, ErrorKind::config);
  };
  expect_parts(message({"--data.source.1.path=a.txt"}),
               {"data.source.1.path (command line) is of entry 1", "there are 0"});
  expect_parts(message({"--data.source.0.path=a.txt", "--data.source.0.weight=0"}),
               {"data.source.0.weight is 0", "above 0"});
  expect_parts(message({"--data.source.0.path=a.txt", "--data.source.0.weight=x"}),
               {"data.source.0.weight is x", "a number above 0"});
  EXPECT_EQ(load_config({"--model.vocab_size=300", "--data.source.0.path=a.txt",
                         "--data.source.0.weight=0.5"})
                .data.source[0]
                .weight,
            0.5);
  expect_parts(message({"--data.source.0.weight=1"}),
               {"data.source.0.path is \"\"", "name a file"});
  expect_parts(message({"--data.source.0.path=a.txt", "--data.path=b.txt"}),
               {"leave out one of them"});
  expect_parts(message({"--data.source.0.path=a.txt", "--data.source.1.path=a.txt"}),
               {"is called 'a.txt' too; set data.source.1.name"});
  expect_parts(message({"--data.source.0.pathh=a.txt"}), {"data.source.0.path"});
  expect_parts(message({"--data.source.0.path=a.txt", "--data.source.0.kind=synthetic"}),
               {"data.source.0.kind is \"synthetic\"", "it takes auto"});
  const TemporaryFile small("small.txt", "text");
  expect_parts(message({"--data.source.0.path=a.parquet"}), {"there is no file 'a.parquet'"});
  const TemporaryFile parquet("a.parquet", "");
  expect_parts(message({"--data.source.0.path=" + parquet.path()}),
               {"set data.source.0.kind to text", "moesh tokenize"});
  // Lists are written as lists.
  for (const char* key : {"data.source", "data.sources", "data.sources.0.path", "data.source.path"})
    expect_parts(message({std::string("--") + key + "=a.txt"}),
                 {key, "data.source is a list", "[[data.source]]", "--data.source.0.path=FILE"});
  const TemporaryFile as_list("run.toml", "[data]\nsource = [\"a.txt\"]\n");
  expect_parts(message({"--config", as_list.path()}), {"data.source is a list", "[[data.source]]"});
  // Bytes and token ids are different languages.
  const std::string vocab = "--model.vocab_size=300";
  for (const char* other : {"--data.source.1.path=b.bin", "--validation.source.0.path=b.npy"})
    expect_parts(message({vocab, "--data.source.0.path=a.txt", other}),
                 {"data.source.0.path is \"a.txt\"", "whose bytes are tokens", "holds token ids",
                  "data.tokenizer"});
  load_config({vocab, "--data.source.0.path=a.txt", "--data.source.1.path=b.bin",
               "--data.tokenizer=tokenizer.json"});
  expect_parts(message({"--data.tokenizer=tokenizer.json"}), {"no file of text"});
  // Files of ids have the tokens that they have, few as the model's may be.
  load_config({"--model.vocab_size=3", "--data.path=b.bin"});
  expect_parts(
      error_of([&] { load_config({"--data.source.0.path=" + small.path()}); }, ErrorKind::config),
      {"data.source.0.path is", "model.vocab_size"});
}

// A folder of Hugging Face says what the model is, and where the run begins.
TEST(Config, AModelComesFromTheConfigJsonOfAFolder) {
  const Config written = load_config({"--model=qwen3_moe:tiny", "--model.dim=24"});
  const auto values = model_values(written);
  const TemporaryFile json(
      "config.json", models::on_disk(written.model.architecture).config_json(formats::Dtype::f32));
  const std::string path = std::filesystem::path(json.path()).parent_path().string();
  const Config bare = load_config({"--model=hf:" + path});
  EXPECT_EQ(bare.model.name, "qwen3_moe");
  EXPECT_EQ(model_values(bare), values);
  EXPECT_EQ(bare.origin("model.dim").text, path + "/config.json");
  EXPECT_EQ(bare.checkpoint.initial_load, "") << "there are no weights";
  // It has no built-in size, and a file that says all of its keys needs none.
  EXPECT_EQ(bare.origin("moe.balance_loss_weight").text, path + "/config.json");
  const std::string text_of_bare = print_config(bare);
  EXPECT_EQ(text_of_bare.find("tiny"), std::string::npos) << text_of_bare;
  const TemporaryFile printed_bare("printed.toml", text_of_bare);
  const Config read_back = load_config({"--config", printed_bare.path()});
  EXPECT_EQ(read_back.model.size, "");
  EXPECT_EQ(model_title(read_back), "qwen3_moe");
  EXPECT_EQ(numbers_of(read_back), numbers_of(bare));

  std::ofstream(path + "/model.safetensors") << "weights";
  const Config config = load_config({"--model", "hf:" + path, "--model.top_k=1"});
  EXPECT_EQ(model_value(config, "model.top_k"), Value(std::int64_t{1}));
  EXPECT_EQ(config.origin("model.top_k").text, "command line");
  EXPECT_EQ(config.checkpoint.initial_load, path);
  const TemporaryFile file("run.toml", "[model]\nfolder = \"" + path + "\"\n");
  EXPECT_EQ(model_values(load_config({"--config", file.path()})), values);
  // Without a word of the model, that of the weights.
  EXPECT_EQ(model_values(load_config({"--checkpoint.initial_load=" + path})), values);
  EXPECT_EQ(load_config({"--checkpoint.initial_load=" + path, "--model=mixtral"}).model.name,
            "mixtral");
  const TemporaryFile printed("printed.toml", print_config(config));
  EXPECT_EQ(model_values(load_config({"--config", printed.path()})), model_values(config));

  // A recipe of its own is a key like any other.
  const TemporaryFile recipe(
      "config.json",
      models::on_disk(
          load_config({"--model=qwen3_moe:tiny", "--model.balance_loss=0.03"}).model.architecture)
          .config_json(formats::Dtype::f32));
  const std::string of_recipe = std::filesystem::path(recipe.path()).parent_path().string();
  const Config balanced = load_config({"--model=hf:" + of_recipe});
  EXPECT_EQ(model_value(balanced, "model.balance_loss"), Value(0.03));
  const std::string text = print_config(balanced);
  EXPECT_EQ(text.find("folder = \"" + of_recipe), std::string::npos) << text;
  const TemporaryFile printed_recipe("printed.toml", text);
  const Config again = load_config({"--config", printed_recipe.path()});
  EXPECT_EQ(model_values(again), model_values(balanced));
  EXPECT_EQ(again.moe.balance_loss_weight, balanced.moe.balance_loss_weight);

  // What the keys do not say is read from the folder again.
  const auto json_of = [](const Config& c) {
    return models::on_disk(c.model.architecture).config_json(formats::Dtype::f32);
  };
  std::string more = json_of(written);
  const std::string first = "\"mlp_only_layers\": [\n    0";
  ASSERT_NE(more.find(first), std::string::npos) << more;
  more.replace(more.find(first), first.size(), "\"mlp_only_layers\": [\n    1");
  std::ofstream(json.path()) << more;
  const Config layered = load_config({"--model=hf:" + path});
  ASSERT_NE(json_of(layered), json_of(written));
  const TemporaryFile printed_more("printed.toml", print_config(layered));
  EXPECT_EQ(json_of(load_config({"--config", printed_more.path()})), json_of(layered));

  const auto message = [](std::vector<std::string> args) {
    return error_of([&] { load_config(args); }, ErrorKind::config);
  };
  expect_parts(
      message({"--model=hf:" + path, "--model.size=tiny"}),
      {"model.folder is '" + path, "model.size is 'tiny' (command line)", "leave out one"});
  expect_parts(message({"--model=hf:"}), {"model.folder (command line) has no value"});
  expect_parts(message({"--model=qwen3_moe:", "--model.vocab_size=96"}),
               {"model.size is \"\" (command line), and model.", " is not set", "tiny, debug"});
  expect_parts(message({"--model=hf:" + path + "/nowhere"}),
               {"/nowhere' (command line), and there is no such folder", "config.json"});
  for (const char* given :
       {"--model=hf:deepseek-ai/DeepSeek-V3", "--model=deepseek-ai/DeepSeek-V3"})
    expect_parts(message({given}), {"moesh downloads nothing",
                                    "`hf download deepseek-ai/DeepSeek-V3 --local-dir DeepSeek-V3`",
                                    "--model hf:DeepSeek-V3"});
  for (const char* name : {"nowhere/", "/nowhere", "no/where/at-all", "./nowhere"})
    expect_parts(message({std::string("--model=hf:") + name}),
                 {"there is no such folder", "name the folder that holds"});
  for (const char* name : {"a.b/c", "x/y"})
    expect_parts(message({std::string("--model=hf:") + name}), {"hf download", name});
  expect_parts(message({"--model=hf:" + path + "/config.json"}),
               {"/config.json'", "is not a folder", "--model hf:" + path});
  expect_parts(message({"--model=" + path}), {"is a folder", "--model hf:" + path});

  // Weights that the folder's index promises are asked for, though none of them is there.
  std::filesystem::remove(path + "/model.safetensors");
  EXPECT_EQ(load_config({"--model=hf:" + path}).checkpoint.initial_load, "");
  const std::filesystem::path index = std::filesystem::path(path) / formats::kIndexFile;
  std::ofstream(index) << "{}";
  EXPECT_EQ(load_config({"--model=hf:" + path}).checkpoint.initial_load, path);
  std::filesystem::remove(index);

  const TemporaryFile of_run("metrics.jsonl", "");
  const auto run = std::filesystem::path(of_run.path()).parent_path();
  std::filesystem::create_directory(run / "step-00000020");
  expect_parts(message({"--model=hf:" + run.string()}),
               {"which has no config.json; it holds checkpoints", "/step-00000020"});
  std::ofstream(json.path()) << R"({"model_type": "bert"})";
  expect_parts(error_of([&] { load_config({"--model=hf:" + path}); }, ErrorKind::data),
               {path + "/config.json", "model_type is 'bert'"});
}

// The balance loss that a model was trained with, unless somebody asks for another.
TEST(Config, BalanceIsThatOfTheModelsRecipe) {
  const auto weights = [](std::vector<std::string> args) {
    const MoeSection moe = load_config(args).moe;
    return std::vector<double>{moe.load_balance_coeff, moe.balance_loss_weight};
  };
  using Weights = std::vector<double>;
  EXPECT_EQ(weights({"--model=deepseek_v3:671b"}), (Weights{1e-3, 1e-4}));
  // router_aux_loss_coef, times experts of a token, by layers with experts.
  EXPECT_EQ(weights({"--model=qwen3_moe:30b-a3b"}), (Weights{0, 1e-3 * (8. / 48)}));
  EXPECT_EQ(weights({"--model=qwen3_moe:tiny"}), (Weights{0, 1e-3 * (2. / 2)})) << "2 of 3";
  EXPECT_EQ(weights({"--model=mixtral:8x7b"}), (Weights{0, 0.02 * (2. / 32)}));
  EXPECT_EQ(weights({"--model=mixtral:8x22b"}), (Weights{0, 1e-3 * (2. / 56)}));
  EXPECT_EQ(weights({"--model=gpt_oss:20b"}), (Weights{0, 1e-3 * (4. / 24)}));
  EXPECT_EQ(weights({"--model=qwen3_moe:tiny", "--moe.balance_loss_weight=0"}), (Weights{0, 0}));
  EXPECT_EQ(load_config({"--model=qwen3_moe:tiny"}).origin("moe.balance_loss_weight").text,
            "qwen3_moe:tiny");
  const double scale = 2. / 3;  // of gpt_oss:tiny
  // The published folders of GPT-OSS have 0.9.
  for (const auto& [model, coefficient, wanted] :
       {std::tuple{"qwen3_moe", "0.5", 0.5}, std::tuple{"gpt_oss", "0.9", 0.9 * scale}}) {
    std::string text =
        models::on_disk(load_config({std::string("--model=") + model}).model.architecture)
            .config_json(formats::Dtype::f32);
    const std::string key = "\"router_aux_loss_coef\": 0.001";
    ASSERT_NE(text.find(key), std::string::npos) << text;
    text.replace(text.find(key), key.size(),
                 std::string("\"router_aux_loss_coef\": ") + coefficient);
    const TemporaryFile json("config.json", text);
    const std::string folder = std::filesystem::path(json.path()).parent_path().string();
    EXPECT_EQ(weights({"--model=hf:" + folder}), (Weights{0, wanted})) << model;
  }
}

TEST(Config, AVariationIsANewOne) {
  const Config config = load_config({"--model=mixtral", "--model.dim=64", "--steps=3"});
  const Config other = changed(config, {{"training.steps", std::int64_t{4}, {"test"}},
                                        {"model.moe_ffn", std::int64_t{16}, {"test"}}});
  EXPECT_EQ(config.training.steps, 3);
  EXPECT_EQ(other.training.steps, 4);
  EXPECT_EQ(describe_option(other, "training.steps"), "training.steps is 4 (test)");
  EXPECT_EQ(describe_option(other, "model.dim"), "model.dim is 64 (command line)");
  EXPECT_EQ(describe_option(other, "model.moe_ffn"), "model.moe_ffn is 16 (test)");
  EXPECT_EQ(describe_option(config, "model.moe_ffn"), "model.moe_ffn is 24 (mixtral:tiny)");
  expect_parts(
      error_of([&] { changed(config, mesh_settings({.tp = 3}, "test")); }, ErrorKind::config),
      {"parallelism.tensor_parallel_degree is 3 (test)", "model.num_heads is 8"});
  // Another model begins with its own sizes.
  const Config another = changed(other, {{"model.name", std::string("llama4"), {"test"}}});
  EXPECT_EQ(describe_option(another, "model.dim"), "model.dim is 32 (llama4:tiny)");
}

TEST(Config, AModelThatIsGivenReplacesTheBuiltInOne) {
  auto model = models::built_in<models::GptOssConfig>("tiny");
  model.num_heads = 12, model.num_kv_heads = 6;
  const Config config = merged(mesh_settings({.tp = 3}, "test"), RequestedModel{model, "a file"});
  EXPECT_EQ(config.model.name, "gpt_oss");
  EXPECT_EQ(model_value(config, "model.num_heads"), Value{std::int64_t{12}});
  EXPECT_EQ(describe_option(config, "model.num_heads"), "model.num_heads is 12 (a file)");
  EXPECT_EQ(config.origin("model.name").text, "a file");
  EXPECT_EQ(config.origin("model.size").text, "a file");
  const auto size_of = [&](const std::string& size) {
    return changed(load_config({"--model=deepseek_v3:" + size}), {},
                   RequestedModel{model, "a file"})
        .model.size;
  };
  EXPECT_EQ(size_of("671b"), "") << "gpt_oss has no such size";
  EXPECT_EQ(size_of("tiny"), "tiny");
  EXPECT_EQ(size_of("debug"), "debug");
  EXPECT_THROW(merged(mesh_settings({.tp = 5}, "test"), RequestedModel{model, "a file"}), Error);
}

TEST(Config, NumbersAreWhatTheTableSaysAndTheKeysOfTheModel) {
  const std::string before = numbers_of({});
  EXPECT_NE(before, numbers_of(load_config({"--model.dim=64"})));
  for (const Option& o : options()) {
    const auto [value, needs] = other_value(o);
    std::vector<std::string> args = needs;
    const std::string without = numbers_of(load_config(args));
    args.push_back("--" + o.name + "=" + value);
    EXPECT_EQ(numbers_of(load_config(args)) != without, o.effect == Effect::numbers) << o.name;
  }
}

TEST(Config, FlagsNegativeNumbersAndTheLastOfTwo) {
  EXPECT_TRUE(load_config({"--debug.checked"}).debug.checked);
  EXPECT_TRUE(load_config({"--debug.checked", "--steps", "3"}).debug.checked);
  EXPECT_FALSE(load_config({"--debug.checked", "false"}).debug.checked);
  expect_parts(error_of([] { load_config({"--optimizer.lr", "-1"}); }, ErrorKind::config),
               {"optimizer.lr is -1.0 (command line)", "above 0"});
  EXPECT_EQ(load_config({"--steps=3", "--training.steps=4"}).training.steps, 4);
  EXPECT_EQ(load_config({"--metrics.folder="}).metrics.folder, "");
  EXPECT_EQ(load_config({"--metrics.folder=a=b"}).metrics.folder, "a=b");
}

TEST(Config, ShortForms) {
  const Config config = load_config(
      {"--model", "deepseek_v3:debug", "--device=cuda", "--dtype", "bfloat16", "--steps=5"});
  EXPECT_EQ(config.model.name, "deepseek_v3");
  EXPECT_EQ(config.model.size, "debug");
  EXPECT_EQ(config.training.device, "cuda");
  EXPECT_EQ(config.training.dtype, "bfloat16");
  EXPECT_EQ(config.training.steps, 5);
  EXPECT_EQ(load_config({"--model=deepseek_v3"}).model.size, "tiny");
  expect_parts(
      error_of([] { load_config({"--model=deepseek_v3:huge"}); }, ErrorKind::config),
      {"model.size is \"huge\" (command line)", "tiny, debug, 16b, 671b, moonlight or kimi-k2"});
  expect_parts(error_of([] { load_config({"--model=gpt_oss:16b"}); }, ErrorKind::config),
               {"model.size is \"16b\" (command line)", "tiny, debug, 20b or 120b"});
  expect_parts(error_of([] { load_config({"--model=gpt:20b"}); }, ErrorKind::config),
               {"model.name is \"gpt\" (command line)",
                "deepseek_v3, qwen3_moe, mixtral, llama4, gpt_oss, qwen2_moe, olmoe, glm4_moe, "
                "glm4_moe_lite, minimax_m2, granitemoe or qwen3_next"});
}

TEST(Config, MeshIsShortForAllDegrees) {
  const MeshShape expected =
      MeshShape{.dp_replicate = 3, .dp_shard = 2, .cp = 2, .tp = 4, .ep = 8, .etp = 2}.validated();
  EXPECT_EQ(mesh_shape(load_config({"--mesh", "dp_replicate=3,dp_shard=2,cp=2,tp=4,ep=8,etp=2"})),
            expected);
  // What is not named is 1, also where the file says something else: the mesh is the whole mesh.
  const TemporaryFile file("run.toml", "[parallelism]\ncontext_parallel_degree = 4\n");
  const Config config = load_config({"--config", file.path(), "--mesh=tp=2,dp_shard=2"});
  EXPECT_EQ(mesh_shape(config), (MeshShape{.dp_shard = 2, .tp = 2}.validated()));
  EXPECT_EQ(config.origin("parallelism.context_parallel_degree").text, "command line, --mesh");
  EXPECT_EQ(
      mesh_shape(load_config({"--mesh", "tp=2", "--parallelism.tensor_parallel_degree=4"})).tp, 4);
  EXPECT_EQ(mesh_shape(load_config({"--mesh", "dp_shard=2 tp=2"})),
            mesh_shape(config));  // as MeshShape::describe writes it

  const auto error = [](const std::string& mesh) {
    return error_of([&] { load_config({"--mesh", mesh}); }, ErrorKind::config);
  };
  expect_parts(error("dp_shrad=2"), {"no axis 'dp_shrad'", "nearest is dp_shard",
                                     "pp, dp_replicate, dp_shard, cp, tp, ep, etp"});
  expect_parts(error("dp=2"), {"no axis 'dp'", "here it is dp_shard", "and the axes are"});
  expect_parts(error("zebra=2"), {"no axis 'zebra' to set; the axes are"});
  expect_parts(error("pipeline=2"), {"no axis 'pipeline'", "here it is pp"});
  EXPECT_EQ(mesh_shape(load_config({"--mesh", "pp=3,tp=2"})).pp, 3);
  expect_parts(error("tp"), {"'tp' has no size"});
  expect_parts(error("pp=4"), {"parallelism.pipeline_parallel_degree is 4 (command line, --mesh)",
                               "model.num_layers is 3", "to 3 or less"});
  expect_parts(error("tp=two"),
               {"parallelism.tensor_parallel_degree is two (command line, --mesh)"});
  expect_parts(error("tp=0"),
               {"parallelism.tensor_parallel_degree is 0 (command line, --mesh)", "1 or more"});
  expect_parts(error("tp=2,ep=4"),
               {"parallelism.expert_parallel_degree is 4 (command line, --mesh)"});
}

TEST(Config, UnknownKeysNameTheNearest) {
  const auto in_file = [](const std::string& text, const std::vector<std::string>& parts) {
    const TemporaryFile file("run.toml", text);
    const std::string error =
        error_of([&] { load_config({"--config", file.path()}); }, ErrorKind::config);
    expect_parts(error, parts);
    expect_parts(error, {file.path() + ":"});
  };
  in_file("[training]\nsteps = 1\nseeed = 2\n",
          {":3: unknown key training.seeed", "nearest known key is training.seed"});
  in_file("[trainig]\nsteps = 1\n",
          {":2: unknown key trainig.steps", "nearest known key is training.steps"});
  in_file("[training]\nbatch_size = 1\n",
          {":2: unknown key training.batch_size", "here it is data.batch_size"});
  in_file("steps = 1\n", {":1: unknown key steps", "nearest known key is training.steps"});
  in_file("[parallelism]\ntensor_paralel_degree = 2\n",
          {"nearest known key is parallelism.tensor_parallel_degree"});
  in_file("[a.b]\nlr = 2\n", {":2: unknown key a.b.lr", "here it is optimizer.lr"});
  in_file("[training]\nsteps = \n", {":2: "});

  const auto on_line = [](const std::vector<std::string>& args,
                          const std::vector<std::string>& parts) {
    expect_parts(error_of([&] { load_config(args); }, ErrorKind::config), parts);
  };
  on_line({"--training.stepz=4"}, {"unknown option --training.stepz (command line)",
                                   "nearest known option is --training.steps"});
  on_line({"--training.stepz"}, {"unknown option --training.stepz"});
  on_line({"--meshes", "tp=2"}, {"unknown option --meshes", "nearest known option is --mesh"});
  on_line({"--lr=3e-4"}, {"unknown option --lr (command line)", "here it is --optimizer.lr"});
  on_line({"--tensor-model-parallel-size", "2"},
          {"here it is --parallelism.tensor_parallel_degree"});
  on_line({"--micro-batch-size=2"}, {"here it is --data.batch_size"});
  on_line({"--pipeline-model-parallel-size=2"},
          {"here it is --parallelism.pipeline_parallel_degree"});
  on_line({"--num-layers=2"}, {"here it is --model.num_layers,"});
  in_file("[training]\nseq_len = 5\n",
          {":2: unknown key training.seq_len", "here it is data.sequence_length"});
  in_file("[model]\nflavor = \"debug\"\n", {":2: unknown key model.flavor", "model.size"});
  on_line({"--dtipe=float32"}, {"nearest known option is --dtype"});
  on_line({"--optimizer.grup.0.lr_scale=2"},
          {"nearest known option is --optimizer.group.0.lr_scale"});
  on_line({"--modl.routed_scale=2"}, {"nearest known option is --model.routed_scale"});
  for (const char* name : {"data.source.0xpath", "data.source..path", "data.source.x.path"})
    on_line({std::string("--") + name + "=a.txt"}, {name, "data.source is a list"});
  on_line({"training.steps=4"}, {"'training.steps=4'", "--section.key=value"});
  on_line({"--"}, {"'--'"});
  on_line({"--training.steps"},
          {"--training.steps (command line) has no value", "an integer, 1 or more"});
  on_line({"--training.steps", "--debug.checked"},
          {"--training.steps (command line) has no value"});
  on_line({"--config"}, {"--config (command line) has no value"});
  on_line({"--config="}, {"--config (command line) has no value"});
  on_line({"--mesh"}, {"--mesh (command line) has no value"});
  on_line({"--config", "a.toml", "--config=b.toml"}, {"--config b.toml", "a.toml"});
  on_line({"--config", "no_such_file.toml"}, {"no_such_file.toml", "No such file"});
}

TEST(Config, NamesOfOtherFrameworksAndGuessesLeadToOurs) {
  // Name and value, and how the answer begins.
  const std::vector<std::array<std::string, 3>> asked{
      {"training.seq_len", "8", "--data.sequence_length"},
      {"training.local_batch_size", "1", "--data.batch_size"},
      {"model.flavor", "debug", "--model.size"},
      {"tensor-model-parallel-size", "2", "--parallelism.tensor_parallel_degree"},
      {"expert-model-parallel-size", "2", "--parallelism.expert_parallel_degree"},
      {"train-iters", "9", "--training.steps"},
      {"moe-router-topk", "2", "--model.top_k"},
      {"num_key_value_heads", "2", "--model.num_kv_heads"},
      {"tp", "2", "--mesh tp=2"},
      {"fsdp", "8", "--mesh dp_shard=8"},
      {"dp", "true", "--mesh dp_shard=2"},
      {"lora.r", "8", "--lora.rank"},
      {"lr", "1e-4", "--optimizer.lr"},
      {"learning-rate", "1e-4", "--optimizer.lr"},
      {"batch-size", "4", "--data.batch_size"},
      {"micro-batch-size", "4", "--data.batch_size"},
      {"global-batch-size", "4", "--training.global_batch_size"},
      {"seq-len", "4", "--data.sequence_length"},
      {"bf16", "true", "--training.dtype=bfloat16"},
      {"fp32", "true", "--training.dtype=float32"},
      {"max-steps", "4", "--training.steps"},
      {"num-layers", "4", "--model.num_layers"},
      {"hidden-size", "4", "--model.dim"},
      {"seed", "4", "--training.seed"},
      {"gpus", "8", "the number of ranks is the product"},
      {"nproc", "8", "the number of ranks is the product"},
      {"nproc_per_node", "8", "the number of ranks is the product"},
      {"output-dir", "x", "--checkpoint.folder for checkpoints, --metrics.folder"},
      {"resume", "true", "--checkpoint.enable"},
      {"gradient_checkpointing", "true", "--activation_checkpoint.mode=full"},
      {"train_micro_batch_size_per_gpu", "1", "--data.batch_size"},
      {"expert-parallel", "2", "--parallelism.expert_parallel_degree"},
      {"data-parallel", "4", "--mesh dp_shard=4"},
      {"parallelism.tp", "2", "--mesh tp=2"},
      {"mesh.tp", "2", "--mesh tp=2"},
      {"num-experts-per-token", "2", "--model.top_k"},
      {"aux-loss-weight", "0.1", "--moe.balance_loss_weight"},
      {"batch", "4", "--data.batch_size"},
      {"seqlen", "64", "--data.sequence_length"},
      {"heads", "8", "--model.num_heads"},
      {"experts", "8", "--model.num_experts"},
      {"gbs", "8", "--training.global_batch_size"},
      {"checkpoint.dir", "x", "--checkpoint.folder"},
      {"iterations", "9", "--training.steps"},
      {"dataset", "a.txt", "--data.path"}};
  for (const auto& [name, value, answer] : asked)
    EXPECT_TRUE(answer_to(name, value).value_or("nothing").starts_with(answer))
        << name << ": " << answer_to(name, value).value_or("nothing");
  EXPECT_FALSE(answer_to("nonsense", "1"));
  const auto error = [](const std::vector<std::string>& args) {
    return error_of([&] { load_config(args); }, ErrorKind::config);
  };
  expect_parts(error({"--tp", "2"}),
               {"unknown option --tp (command line); here it is --mesh tp=2"});
  expect_parts(error({"--lora.r=8"}), {"unknown option --lora.r", "here it is --lora.rank"});
  expect_parts(error({"--bf16"}), {"here it is --training.dtype=bfloat16"});
  // No option is near these.
  const TemporaryFile file("run.toml", "[optimizer]\nzebra = 1\n");
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"--training.zebra=1"}, {"--zebra"}, {"--config", file.path()}}) {
    const std::string said = error(args);
    expect_parts(said, {"zebra", "; moesh help COMMAND lists the options"});
    EXPECT_EQ(said.find("nearest"), std::string::npos) << said;
  }

  // Every option that an answer names exists, or is a key that some model has; no name is there
  // twice.
  std::set<std::string> known{"mesh", "model", "log-level"}, names;
  for (const Option& o : options()) known.insert(o.name);
  for (const std::string& name : cell_names()) known.insert(name);
  for (const auto& model : models::model_names())
    for (const auto& [key, value] : model_values(load_config({"--model=" + model})))
      known.insert(key);
  for (const Guesses& g : guesses()) {
    for (auto at = g.answer.find("--"); at != std::string::npos; at = g.answer.find("--", at + 2)) {
      const auto end = g.answer.find_first_of(" =,:)", at);
      EXPECT_TRUE(known.contains(g.answer.substr(at + 2, end - at - 2))) << g.answer;
    }
    for (const std::string& name : g.names) EXPECT_TRUE(names.insert(name).second) << name;
  }
}

TEST(Config, ModelKeysGoToTheModel) {
  const TemporaryFile file("run.toml", "[model]\nsize = \"debug\"\ndim = 64\nrouted_scale = 3\n");
  const Config config =
      load_config({"--config", file.path(), "--model.dim=128", "--model.tie_embeddings"});
  const auto& model = std::get<models::DeepseekV3Config>(config.model.architecture);
  const auto debug = models::built_in<models::DeepseekV3Config>("debug");
  EXPECT_EQ(model.dim, 128);
  EXPECT_EQ(model.num_layers, debug.num_layers);
  EXPECT_EQ(model.routed_scale, 3.0);
  EXPECT_TRUE(model.tie_embeddings);
  EXPECT_EQ(describe_option(config, "model.dim"), "model.dim is 128 (command line)");
  EXPECT_EQ(describe_option(config, "model.routed_scale"),
            "model.routed_scale is 3.0 (" + file.path() + ":4)");
  EXPECT_EQ(describe_option(config, "model.num_layers"),
            "model.num_layers is 6 (deepseek_v3:debug)");

  const auto error = [&](const std::string& argument) {
    return error_of([&] { load_config({argument}); }, ErrorKind::config);
  };
  expect_parts(error("--model.num_layer=4"),
               {"--model.num_layer (command line)", "--model.num_layers"});
  expect_parts(error("--model.nane=x"), {"--model.name"});
  expect_parts(error("--model.dim=0"), {"model.dim is 0 (command line); it takes 1 to "});
  expect_parts(error("--model.steps=4"), {"--training.steps"});
  expect_parts(error("--model.dim=wide"), {"model.dim is wide (command line)", "an integer"});
  const TemporaryFile typo("typo.toml", "[model]\n\nnum_layer = 4\n");
  expect_parts(error_of([&] { load_config({"--config", typo.path()}); }, ErrorKind::config),
               {typo.path() + ":3: unknown key model.num_layer", "model.num_layers"});
}

TEST(Config, WhatIsPrintedReadsBackTheSame) {
  const TemporaryFile file(
      "my \"run\".toml",
      "[data]\npath = \"C:\\\\text \\\"a\\\" # b.txt\"\n[optimizer]\nlr = 3e-4\neps = "
      "1e-12\n[model]\ndim = 7\nvocab_size = 300\n");
  const Config config = load_config({"--config", file.path(), "--mesh", "dp_shard=2,tp=2,ep=4",
                                     "--debug.checked", "--model.routed_scale=0.1"});
  const std::string printed = print_config(config);
  expect_parts(printed,
               {"[training]\nsteps = 100 ", "# default\n", "lr = 3e-4 ",
                "# " + file.path() + ":4\n", "checked = true ", "# command line\n",
                "# command line, --mesh\n", "num_layers = 3 ", "# deepseek_v3:tiny\n", "dim = 7 "});

  const TemporaryFile again("again.toml", printed);
  const Config copy = load_config({"--config", again.path()});
  for (const Option& o : options()) {
    EXPECT_EQ(o.get(copy), o.get(config)) << o.name;
    EXPECT_TRUE(copy.origin(o.name).text.starts_with(again.path() + ":"))
        << o.name;  // every option is there
  }
  EXPECT_EQ(model_values(copy), model_values(config));
  EXPECT_EQ(model_value(copy, "model.dim"), Value{std::int64_t{7}});
  // Printed again it differs only in the comments.
  const auto without_comments = [](const std::string& text) {
    std::string out;
    for (const auto& entry : formats::parse_toml(text, "printed"))
      out += entry.key + "=" + formats::to_toml(entry.value) + "\n";
    return out;
  };
  EXPECT_EQ(without_comments(print_config(copy)), without_comments(printed));
}

TEST(Config, WhatIsPrintedOfEveryModelReadsBackTheSame) {
  for (const auto& name : models::model_names())
    for (const auto& size : models::model_sizes(name)) {
      SCOPED_TRACE(name + ":" + size);
      const Config config = load_config({"--model=" + name + ":" + size});
      const TemporaryFile file("run.toml", print_config(config));
      const Config copy = load_config({"--config", file.path()});
      for (const Option& o : options()) EXPECT_EQ(o.get(copy), o.get(config)) << o.name;
      EXPECT_EQ(model_values(copy), model_values(config));
    }
}

// The words of a text, however its lines are broken.
std::string words(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c != ' ' && c != '\n')
      out += c;
    else if (!out.empty() && out.back() != ' ')
      out += ' ';
  return out;
}

TEST(Config, HelpNamesEveryOption) {
  const std::string help = help_text(), in_words = words(help);
  std::string section;
  for (const Option& o : options()) {
    expect_parts(help, {"--" + o.name + "=" + formats::to_toml(o.initial())});
    expect_parts(in_words, {o.help});
    EXPECT_FALSE(o.help.empty()) << o.name;
    for (const std::string& choice : o.rule.choices) expect_parts(help, {choice});
    if (o.section() != section) expect_parts(help, {"\n[" + o.section() + "]\n"});
    section = o.section();
  }
  for (const Degree& d : degrees()) expect_parts(help, {d.axis});
  for (const ShortForm& f : short_forms()) expect_parts(help, {"--" + f.name, f.option});
  expect_parts(help, {"--config FILE", "--mesh ", "--model NAME:SIZE", "--model.num_layers=3"});
  for (const auto& name : models::model_names())
    for (const auto& size : models::model_sizes(name)) expect_parts(in_words, {name + ": ", size});
  for (std::size_t begin = 0; begin < help.size();) {
    const std::size_t end = std::min(help.find('\n', begin), help.size());
    EXPECT_LE(end - begin, 100u) << help.substr(begin, end - begin);
    begin = end + 1;
  }
}

// Every key of a rule is a number or a switch in [optimizer], and every other one there is read by
// a rule.
TEST(Config, OptimizerHasTheKeysOfTheRules) {
  std::set<std::string> keys{"name", "lr", "qk_clip"};  // of every rule
  for (const auto& kind : optim::rule_kinds())
    for (const auto& key : kind.keys) {
      keys.insert(key);
      const Option* o = find_option("optimizer." + key);
      ASSERT_NE(o, nullptr) << kind.name << " reads " << key;
      const Value initial = o->initial();
      EXPECT_TRUE(std::holds_alternative<double>(initial) || std::holds_alternative<bool>(initial))
          << key;
    }
  for (const Option& o : options())
    if (o.section() == "optimizer") EXPECT_TRUE(keys.contains(o.key())) << o.name;
  EXPECT_EQ(find_option("optimizer.name")->rule.choices, optim::rule_names());
  EXPECT_EQ(find_option("data.kind")->rule.choices, data::dataset_choices());
}

// A batch over all ranks is split into what each rank takes at a time.
TEST(Config, AGlobalBatchTakesItsMicroBatches) {
  const auto order = [](const char* mesh, const char* batch) {
    return sample_order(load_config({"--training.global_batch_size=24", mesh, batch}));
  };
  for (const auto& [mesh, batch, micro] :
       {std::tuple{"--mesh=tp=2", "--data.batch_size=2", 12},
        {"--mesh=dp_shard=4,tp=2,ep=2", "--data.batch_size=2", 3},
        {"--mesh=dp_replicate=2,dp_shard=3", "--data.batch_size=1", 4}}) {
    EXPECT_EQ(order(mesh, batch).num_micro, micro) << mesh;
    EXPECT_EQ(order(mesh, batch).num_per_step(), 24) << mesh;
  }
  const auto refused = [](std::vector<std::string> args, std::vector<std::string> parts) {
    args.push_back("--training.global_batch_size=24");
    expect_parts(error_of([&] { load_config(args); }, ErrorKind::config), parts);
  };
  refused({"--mesh=dp_shard=5"}, {"training.global_batch_size is 24 (command line)",
                                  "the 5 data-parallel ranks", "a multiple of 5"});
  refused({"--mesh=dp_shard=4", "--data.batch_size=4"},
          {"6 sequences for each of 4", "data.batch_size is 4", "[1, 2, 3, 6]"});
  refused({"--data.batch_size=2", "--training.gradient_accumulation_steps=5"},
          {"training.gradient_accumulation_steps is 5", "takes 12 micro-batches"});
  const Config both = load_config({"--training.global_batch_size=24", "--data.batch_size=2",
                                   "--training.gradient_accumulation_steps=12"});
  EXPECT_EQ(num_micro_batches(both), 12);
}

TEST(Config, ConvertsToTheTermsOfOtherFolders) {
  const Config config = load_config(
      {"--dtype=bfloat16", "--mesh=dp_replicate=2,dp_shard=3,tp=2", "--data.batch_size=4",
       "--training.gradient_accumulation_steps=5", "--data.seed=6", "--data.path=a.txt",
       "--model.vocab_size=300", "--parallelism.moe_dispatcher=all_gather",
       "--data.sequence_length=17", "--debug.timeout_seconds=2.5"});
  EXPECT_EQ(launch_options(config).timeout, std::chrono::milliseconds(2500));
  EXPECT_EQ(scalar_type(config), at::kBFloat16);
  EXPECT_EQ(scalar_type(Config{}), at::kFloat);
  EXPECT_EQ(scalar_type(Config{.training = {.dtype = "float64"}}), at::kDouble);
  EXPECT_THROW(scalar_type(Config{.training = {.dtype = "int8"}}), Error);
  EXPECT_EQ(dispatcher(config), nn::Dispatcher::all_gather);
  EXPECT_EQ(dispatcher(Config{}), nn::Dispatcher::automatic);
  expect_parts(error_of([] { dispatcher(Config{.parallelism = {.moe_dispatcher = "pigeon"}}); },
                        ErrorKind::config),
               {"moe_dispatcher is \"pigeon\""});
  for (const kernels::GpuKernels k :
       {kernels::GpuKernels::automatic, kernels::GpuKernels::own, kernels::GpuKernels::library})
    EXPECT_EQ(gpu_kernels(Config{.kernels = {.gpu = kernels::to_string(k)}}), k);
  expect_parts(error_of([] { gpu_kernels(Config{.kernels = {.gpu = "fast"}}); }, ErrorKind::config),
               {"kernels.gpu is \"fast\""});
  const auto order = sample_order(config);
  EXPECT_EQ(order.num_per_step(), 2 * 3 * 4 * 5);
  EXPECT_EQ(order.first(1, 2, 3), 120 + (2 * 6 + 3) * 4);
  const auto options = dataset_options(config);
  EXPECT_EQ(options.path, "a.txt");
  EXPECT_EQ(options.sequence_length, 17);
  EXPECT_EQ(options.vocab_size, 300);
  EXPECT_EQ(options.seed, 6u);
  EXPECT_TRUE(document_mask(Config{.data = {.document_mask = "true"}}));
  EXPECT_FALSE(document_mask(Config{.data = {.document_mask = "false"}}));
  EXPECT_TRUE(document_mask(Config{.data = {.path = "a.jsonl"}}));
  const auto validation = validation_options(
      load_config({"--model.vocab_size=300", "--data.source.0.path=a.txt"}), {.path = "b.jsonl"});
  EXPECT_EQ(validation.path, "b.jsonl");
  EXPECT_TRUE(validation.sources.empty());
  EXPECT_FALSE(validation.shuffle);
}

TEST(Config, StagesAreThoseOfTheScheduleOnEveryRank) {
  const auto num_stages = [](const std::string& mesh, const std::string& schedule) {
    Config config = load_config({"--model.num_layers=8", "--mesh=" + mesh});
    config.parallelism.pipeline_parallel_schedule = schedule;
    return stage_plan(config).size();
  };
  EXPECT_EQ(num_stages("pp=1", "zbv"), 1u);
  EXPECT_EQ(num_stages("pp=2", "1f1b"), 2u);
  EXPECT_EQ(num_stages("pp=2", "zbv"), 4u);
  EXPECT_EQ(num_stages("pp=2", "dualpipev"), 4u);
  EXPECT_EQ(num_stages("pp=2", "interleaved_1f1b"), 4u);
}

// A node has what is set, or what a launcher says.
TEST(Config, TheCutOfASequenceIsWhatTheModelWantsUntilItIsSet) {
  const auto cut = [](std::vector<std::string> args, const std::string& key = "") {
    args.insert(args.end(), {"--mesh=cp=4", "--data.sequence_length=4096"});
    if (!key.empty()) args.push_back("--parallelism.context_parallel_cut=" + key);
    return sequence_cut(load_config(args));
  };
  const std::vector<std::string> full{"--model=deepseek_v3:debug"},
      windows{"--model=mixtral:debug", "--model.window=64"}, mixed{"--model=gpt_oss:debug"},
      chunks{"--model=llama4:debug"}, only_chunks{"--model=llama4:debug", "--model.nope_step=7"};
  EXPECT_EQ(cut(full), SequenceCut::balanced);
  EXPECT_EQ(cut(windows), SequenceCut::contiguous);
  EXPECT_EQ(cut(mixed), SequenceCut::balanced);
  EXPECT_EQ(cut(chunks), SequenceCut::balanced);
  EXPECT_EQ(cut(only_chunks), SequenceCut::contiguous);
  EXPECT_EQ(cut(full, "contiguous"), SequenceCut::contiguous);
  EXPECT_EQ(cut(windows, "balanced"), SequenceCut::balanced);
  EXPECT_EQ(sequence_cut(load_config(std::vector<std::string>{"--model=qwen3_next:tiny"})),
            SequenceCut::contiguous);
}

TEST(Config, RanksOfANode) {
  const auto ranks = [](const std::vector<std::string>& args) {
    return mesh_shape(load_config(args)).ranks_per_node;
  };
  EXPECT_EQ(ranks({"--mesh=dp_shard=4"}), 0);
  EXPECT_EQ(ranks({"--mesh=dp_shard=4", "--parallelism.ranks_per_node=1"}), 1);
  const std::pair<const char*, const char*> launched[] = {{"OMPI_COMM_WORLD_SIZE", "4"},
                                                          {"OMPI_COMM_WORLD_RANK", "0"},
                                                          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  for (const auto& [name, value] : launched) ::setenv(name, value, 1);
  EXPECT_EQ(ranks({"--mesh=dp_shard=4"}), 2);
  EXPECT_EQ(ranks({"--mesh=dp_shard=4", "--parallelism.ranks_per_node=1"}), 1);
  for (const auto& [name, value] : launched) ::unsetenv(name);
  const auto is_set = [](const MeshShape& shape) {
    const Settings all = mesh_settings(shape, "test");
    return all.back().name == "parallelism.ranks_per_node" &&
           all.back().value == Value{std::int64_t{1}};
  };
  EXPECT_TRUE(is_set({.tp = 2, .ranks_per_node = 1}));
  EXPECT_EQ(mesh_settings({.tp = 2}, "test").back().name,
            "parallelism.expert_tensor_parallel_degree");
  EXPECT_EQ(mesh_argument({.dp_shard = 2, .tp = 3}), "dp_shard=2,tp=3");
  EXPECT_EQ(mesh_argument({}), "dp_shard=1");
}

TEST(Config, LoraHasRanksAndAlphasByName) {
  const auto targets = [](std::vector<std::string> args) {
    args.insert(args.end(), {"--model=mixtral:tiny", "--lora.targets=q_proj,k_proj,v_proj"});
    std::map<std::string, std::pair<std::int64_t, double>> found;
    for (const auto& [name, target] : lora(load_config(args)).targets)
      found[name.substr(name.rfind('.') + 1)] = {target.rank, target.alpha};
    return found;
  };
  using Found = decltype(targets({}));
  EXPECT_EQ(targets({"--lora.rank=4", "--lora.alpha=8", "--lora.rank_pattern=q_proj=2,k_proj=3",
                     "--lora.alpha_pattern=v_proj=1.5"}),
            (Found{{"q_proj", {2, 8}}, {"k_proj", {3, 8}}, {"v_proj", {4, 1.5}}}));
  for (const std::string option : {"lora.rank_pattern", "lora.alpha_pattern"})
    for (const std::string pattern : {"q", "o_proj", "experts.down_proj"})
      expect_parts(
          error_of([&] { targets({"--lora.rank=1", "--" + option + "=" + pattern + "=2"}); },
                   ErrorKind::config),
          {option + " has '" + pattern + "'", "no weight", "k_proj, q_proj, v_proj"});
  for (const char* text : {"q_proj", "=2", "q_proj=", "q_proj=x", "q_proj=2x", "q_proj=0", "q=1.5"})
    expect_parts(
        error_of([&] { targets({"--lora.rank=4", std::string("--lora.rank_pattern=") + text}); },
                 ErrorKind::config),
        {"lora.rank_pattern is", text, "a rank of 1 or more", "down_proj=4"});
  EXPECT_TRUE(lora(load_config({"--lora.rank=2"})).zero_b);
  EXPECT_FALSE(lora(load_config({"--lora.rank=2", "--lora.init_lora_weights=false"})).zero_b);
  EXPECT_FALSE(has_lora(Config{}));
  EXPECT_TRUE(has_lora(Config{.lora = {.rank = 1}}));
  EXPECT_TRUE(has_lora(Config{.lora = {.adapter = "folder"}}));
}

TEST(Config, GroupsOfParametersSayWhatDiffers) {
  const auto groups = param_groups(
      load_config({"--optimizer.group.0.match=gate", "--optimizer.group.0.lr_scale=0.5",
                   "--optimizer.group.1.match=norm", "--optimizer.group.1.weight_decay=0",
                   "--optimizer.group.2.match=w1", "--optimizer.group.2.weight_decay=0.5",
                   "--optimizer.group.3.match=w2", "--optimizer.group.3.weight_decay=-1"}));
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[0].match, "gate");
  EXPECT_EQ(groups[0].lr_scale, 0.5);
  EXPECT_EQ(groups[0].weight_decay, -1);
  EXPECT_EQ(groups[1].weight_decay, 0.0);
  EXPECT_EQ(groups[2].weight_decay, 0.5);
  EXPECT_EQ(groups[3].weight_decay, -1);
}

// As Python's keyword arguments come.
TEST(Config, ReadsValuesByName) {
  const TemporaryFile file("run.toml", "[data]\nbatch_size = 3\n[training]\nsteps = 7\n");
  const Config config = load_settings(read_values({{"config", file.path()},
                                                   {"mesh", std::string("tp=2")},
                                                   {"model", std::string("gpt_oss:tiny")},
                                                   {"max_minutes", 4.0},
                                                   {"training.steps", std::int64_t{5}}},
                                                  "python"),
                                      {});
  EXPECT_EQ(config.data.batch_size, 3);
  EXPECT_EQ(config.training.steps, 5);
  EXPECT_EQ(config.training.max_minutes, 4);
  EXPECT_EQ(config.model.name, "gpt_oss");
  EXPECT_EQ(mesh_shape(config).tp, 2);
  EXPECT_EQ(config.origin("training.steps").text, "python");
}

}  // namespace
}  // namespace moesh::config
