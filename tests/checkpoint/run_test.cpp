// Runs that are saved, interrupted and resumed.
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <ATen/ops/equal.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "moesh/base/log.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/formats/token_file.h"
#include "tests/checkpoint/support.h"
#include "tests/support.h"

namespace moesh {
namespace {

using std::filesystem::path;

path step(const path& folder, std::int64_t n) { return folder / checkpoint::step_name(n); }

struct Case {
  std::string mesh;
  Args options;
};

// The run that was never stopped, and the one that resumes from its fourth step: 20 further losses,
// and every file at the end.
void expect_bit_identical_resume(const Case& c) {
  SCOPED_TRACE(c.mesh);
  const TemporaryFolder folder;
  Args options{"--steps=24", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=0",
               "--optimizer.lr=1e-2", "--moe.load_balance_coeff=0.01"};
  options.insert(options.end(), c.options.begin(), c.options.end());
  const auto whole = run(folder.path() / "whole", c.mesh, options);
  ASSERT_EQ(whole.losses.size(), 24u);
  EXPECT_LT(whole.losses.back(), whole.losses.front());
  std::filesystem::create_directories(folder.path() / "resumed");
  std::filesystem::copy(step(folder.path() / "whole", 4), step(folder.path() / "resumed", 4),
                        std::filesystem::copy_options::recursive);
  const auto resumed = run(folder.path() / "resumed", c.mesh, options);
  EXPECT_EQ(resumed.first_step, 4);
  EXPECT_EQ(resumed.losses, std::vector<double>(whole.losses.begin() + 4, whole.losses.end()));
  for (const auto n : {8, 24})
    expect_same_contents(step(folder.path() / "whole", n), step(folder.path() / "resumed", n));
}

TEST(Resume, GivesTheSameBitsOnEveryMesh) {
  expect_bit_identical_resume(
      {"dp_shard=2,tp=2,ep=2",
       {"--optimizer.group.0.match=embed", "--optimizer.group.0.lr_scale=0.5",
        "--optimizer.group.1.match=norm", "--optimizer.group.1.weight_decay=0.2"}});
  expect_bit_identical_resume(
      {"dp_replicate=2,cp=2,ep=2",
       {"--dtype=bfloat16", "--checkpoint.export_dtype=bfloat16", "--checkpoint.async"}});
  expect_bit_identical_resume({"dp_shard=2,cp=2,tp=2,ep=2,etp=2",
                               {"--dtype=float64", "--optimizer.name=sgd", "--optimizer.lr=0.05"}});
}

TEST(Resume, DataGoesOnWhereItWasWithAnotherBatch) {
  const TemporaryFolder folder;
  run(folder.path() / "c", "dp_shard=2", {"--steps=3", "--data.batch_size=2"});
  run(folder.path() / "c", "dp_shard=2", {"--steps=5", "--data.batch_size=3"});
  EXPECT_EQ(formats::read_manifest(step(folder.path() / "c", 5).string()).data_position,
            3 * 4 + 2 * 6);
}

// The same global batch on one rank, on meshes with other dp and micro-batches, and resumed on one
// of them from another: losses in float64 are the same but for rounding. (Every model and loss:
// Matrix.OneGlobalBatchIsTheSameHoweverItIsCut.)
TEST(GlobalBatch, GivesTheSameLossesOnEveryDpAndAfterAResumeOnAnother) {
  const TemporaryFolder folder;
  int number = 0;
  const auto anew = [&] { return folder.path() / std::to_string(number++); };
  const auto losses = [&](const path& at, const std::string& mesh, const char* batch, int steps) {
    return run(at, mesh,
               {"--model=qwen3_moe:tiny", "--dtype=float64", "--lr_scheduler.kind=constant",
                "--training.global_batch_size=8", std::string("--data.batch_size=") + batch,
                "--moe.balance_loss_weight=0.1", "--checkpoint.accept_changes",
                "--steps=" + std::to_string(steps)})
        .losses;
  };
  const auto expected = losses(anew(), "tp=1", "1", 4);
  ASSERT_EQ(expected.size(), 4u);
  const auto expect_near = [&](const std::vector<double>& found, std::size_t first) {
    ASSERT_EQ(found.size(), expected.size() - first);
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], expected[first + i], 1e-12) << "step " << first + i + 1;
  };
  expect_near(losses(anew(), "dp_shard=2", "1", 4), 0);
  expect_near(losses(anew(), "dp_shard=8", "1", 4), 0);
  expect_near(losses(anew(), "tp=1", "8", 4), 0);
  expect_near(losses(anew(), "pp=2,dp_shard=2", "2", 4), 0);
  const path resumed = anew();
  losses(resumed, "dp_shard=2", "1", 2);
  expect_near(losses(resumed, "dp_replicate=4", "2", 4), 2);
}

// Tokenizer and the like go from the folder that a run begins with into its checkpoints, and on.
TEST(Companions, TravelWithTheModel) {
  const TemporaryFolder folder;
  const path first = step(folder.path() / "first", 1), second = folder.path() / "second";
  run(folder.path() / "first", "tp=1", {"--steps=1"});
  const std::map<std::string, std::string> given{{"tokenizer.json", "{\"a\": 1}"},
                                                 {"chat_template.jinja", "{{ x }}"},
                                                 {"generation_config.json", "{}"},
                                                 {"vocab.txt", std::string("a\0b", 3)}};
  for (const auto& [name, text] : given) std::ofstream(first / name, std::ios::binary) << text;
  std::ofstream(first / "pytorch_model.bin") << "weights";
  std::filesystem::create_directory(first / "onnx.json");
  // What cannot travel is left behind, and ends no run.
  for (const char* name : {"caf\xe9.txt", "back\\slash.txt"}) std::ofstream(first / name) << "x";
  std::filesystem::create_symlink("nowhere", first / "gone.json");
  ASSERT_EQ(mkfifo((first / "pipe.json").c_str(), 0600), 0);
  const auto expect_all = [&](const path& at) {
    for (const auto& [name, text] : given) EXPECT_EQ(bytes_of(at / name), text) << at / name;
    EXPECT_FALSE(std::filesystem::exists(at / "pytorch_model.bin"));
    EXPECT_EQ(checkpoint::find_damage(at), std::vector<std::string>());
  };
  const std::string begin = "--checkpoint.initial_load=" + first.string();
  run(second, "dp_shard=2,tp=2", {"--steps=2", "--checkpoint.interval=1", begin});
  expect_all(step(second, 1));
  expect_all(step(second, 2));
  // A run that goes on needs the first folder no more.
  std::filesystem::remove_all(folder.path() / "first");
  run(second, "tp=2", {"--steps=3"});
  expect_all(step(second, 3));
  // The folder of which only the model was taken.
  const path bare = folder.path() / "bare";
  std::filesystem::create_directory(bare);
  for (const char* name : {"config.json", "tokenizer.json"})
    std::filesystem::copy(step(second, 3) / name, bare / name);
  run(folder.path() / "third", "tp=1", {"--steps=1", "--model=hf:" + bare.string()});
  EXPECT_EQ(bytes_of(step(folder.path() / "third", 1) / "tokenizer.json"),
            given.at("tokenizer.json"));
}

// What lies elsewhere is nothing of the model, and may be nobody's to publish: a link to it does
// not travel. The cache of a hub has its files beside its snapshots.
TEST(Companions, LinksThatLeadOutOfTheFolderStay) {
  const TemporaryFolder folder;
  const path hub = folder.path() / "hub", first = hub / "snapshots" / "abc",
             second = folder.path() / "second";
  run(folder.path() / "saved", "tp=1", {"--steps=1"});
  std::filesystem::create_directories(hub / "blobs");
  std::filesystem::create_directories(first.parent_path());
  std::filesystem::rename(step(folder.path() / "saved", 1), first);
  std::ofstream(folder.path() / "secret") << "years";
  std::ofstream(hub / "blobs" / "1f") << "{}";
  std::ofstream(first / "vocab.txt") << "abc";
  std::filesystem::create_symlink("../../../secret", first / "notes.txt");
  std::filesystem::create_symlink("../../blobs/1f", first / "tokenizer.json");
  std::filesystem::create_symlink("vocab.txt", first / "words.txt");
  testing::internal::CaptureStderr();
  run(second, "tp=1", {"--steps=1", "--checkpoint.initial_load=" + first.string()});
  expect_parts(testing::internal::GetCapturedStderr(),
               {"notes.txt", "is left out", "a link to a file outside"});
  EXPECT_FALSE(formats::exists(step(second, 1) / "notes.txt"));
  EXPECT_EQ(bytes_of(step(second, 1) / "tokenizer.json"), "{}");
  EXPECT_EQ(bytes_of(step(second, 1) / "words.txt"), "abc");
}

// One that is not as it was written is told of, and goes no further; the run goes on.
TEST(Companions, AreComparedWithTheManifest) {
  const TemporaryFolder folder;
  const path first = folder.path() / "first", second = folder.path() / "second";
  run(first, "tp=1", {"--steps=1"});
  std::ofstream(step(first, 1) / "tokenizer.json") << "{\"a\": 1}";
  std::ofstream(step(first, 1) / "vocab.txt") << "abc";
  run(second, "tp=1", {"--steps=1", "--checkpoint.initial_load=" + step(first, 1).string()});
  std::ofstream(step(second, 1) / "vocab.txt") << "abd";
  std::ofstream(step(second, 1) / "later.txt") << "put there since";
  testing::internal::CaptureStderr();
  run(second, "dp_shard=2", {"--steps=2"});
  expect_parts(testing::internal::GetCapturedStderr(), {"vocab.txt", "is left out", "damaged"});
  EXPECT_EQ(bytes_of(step(second, 2) / "tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(bytes_of(step(second, 2) / "later.txt"), "put there since");
  EXPECT_FALSE(formats::exists(step(second, 2) / "vocab.txt"));
}

// The ids of the tokens that begin and end a text do not matter to training, and matter to code
// that generates: they come with the folder and go into every checkpoint.
TEST(Companions, TokenIdsStayInConfigJson) {
  const TemporaryFolder folder;
  const path first = folder.path() / "first", second = folder.path() / "second";
  run(first, "tp=1", {"--steps=1"});
  const path given = step(first, 1) / "config.json";
  std::filesystem::remove(step(first, 1) / formats::kManifestFile);  // others have none
  formats::JsonValue json = formats::read_json(given.string());
  EXPECT_EQ(json.find("eos_token_id"), nullptr);
  auto& fields = std::get<formats::JsonObject>(json.value);
  fields.emplace_back("eos_token_id",
                      formats::JsonValue{formats::JsonList{{std::int64_t{3}}, {std::int64_t{5}}}});
  fields.emplace_back("bos_token_id", formats::JsonValue{std::int64_t{7}});
  fields.emplace_back("pad_token_id", formats::JsonValue{});
  std::ofstream(given) << formats::to_json(json);
  run(second, "dp_shard=2", {"--steps=1", "--checkpoint.initial_load=" + step(first, 1).string()});
  std::filesystem::remove_all(first);
  run(second, "tp=2", {"--steps=2"});
  for (const int i : {1, 2}) {
    const auto kept = formats::read_json((step(second, i) / "config.json").string());
    for (const char* key : {"eos_token_id", "bos_token_id", "pad_token_id"}) {
      ASSERT_TRUE(kept.find(key)) << key;
      EXPECT_EQ(*kept.find(key), *json.find(key)) << key;
    }
  }
}

// Counts what is read of weights, and how many threads read at the same time.
class CountingFileSystem final : public formats::FileSystem {
 public:
  CountingFileSystem() { formats::set_file_system(this); }
  ~CountingFileSystem() override { formats::set_file_system(nullptr); }
  ssize_t read(int file, void* to, std::size_t count, std::uint64_t offset) override {
    const int readers = ++num_readers;
    for (int most = most_readers; most < readers;)
      most_readers.compare_exchange_weak(most, readers);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const auto result = FileSystem::read(file, to, count, offset);
    --num_readers;
    if (result > 0) num_bytes += result;
    return result;
  }
  std::atomic<int> num_readers = 0, most_readers = 0;
  std::atomic<std::int64_t> num_bytes = 0;
};

struct Loaded {
  std::int64_t num_bytes;
  int most_readers;
  std::vector<at::Tensor> values;  // of rank 0
};

Loaded load_counted(const path& folder, const std::string& mesh) {
  const auto c = config::load_config({"--model=hf:" + folder.string(), "--mesh", mesh});
  Loaded loaded;
  std::unique_ptr<CountingFileSystem> counting;
  comm::launch(mesh_shape(c).num_ranks(), [&](comm::Group& world) {
    const Mesh m(world, mesh_shape(c));
    const MeshScope scope(m);
    const auto model = train::make_model(c);
    if (world.rank() == 0) counting = std::make_unique<CountingFileSystem>();
    world.barrier();
    train::load_initial_weights(c, *model);
    world.barrier();
    if (world.rank() == 0)
      model->each_param([&](Stored& w, bool) { loaded.values.push_back(w.value.detach()); });
  });
  loaded.num_bytes = counting->num_bytes, loaded.most_readers = counting->most_readers;
  return loaded;
}

// A folder of fifty files: several are read at a time, and a rank reads those with its experts.
TEST(Folders, OfManyFilesAreReadInParallelAndByEachRankInPart) {
  const TemporaryFolder folder;
  const Args model{"--steps=1",           "--model=qwen3_moe:tiny", "--model.dim=128",
                   "--model.moe_ffn=256", "--model.num_experts=32", "--model.num_layers=2"};
  Args small_files = model;
  small_files.push_back("--checkpoint.max_shard_size=300000");
  run(folder.path() / "one", "tp=1", model);
  run(folder.path() / "many", "tp=1", small_files);
  const path one = step(folder.path() / "one", 1), many = step(folder.path() / "many", 1);
  std::int64_t size = 0, num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(many))
    if (entry.path().extension() == ".safetensors")
      size += static_cast<std::int64_t>(entry.file_size()), ++num_files;
  ASSERT_GT(num_files, 40);
  std::filesystem::remove(many / formats::kManifestFile);  // as others publish them

  const Loaded by_one = load_counted(many, "tp=1"), of_one_file = load_counted(one, "tp=1");
  EXPECT_GT(by_one.most_readers, 1);
  ASSERT_EQ(by_one.values.size(), of_one_file.values.size());
  for (std::size_t i = 0; i < by_one.values.size(); ++i)
    EXPECT_TRUE(at::equal(by_one.values[i], of_one_file.values[i])) << i;
  // Headers are read by all, weights of experts by one rank of four.
  const Loaded by_four = load_counted(many, "dp_shard=4,ep=4");
  EXPECT_GE(by_one.num_bytes, size);
  EXPECT_LT(by_four.num_bytes, 2 * by_one.num_bytes)
      << "four ranks have read " << by_four.num_bytes << " bytes of " << size;
  std::printf("%lld files, %lld bytes: one rank reads %lld, four together %lld\n",
              static_cast<long long>(num_files), static_cast<long long>(size),
              static_cast<long long>(by_one.num_bytes), static_cast<long long>(by_four.num_bytes));
}

TEST(Reshard, FromAnyMeshToAnyOtherAndBackGivesTheSameBytes) {
  // Fifteen pairs: every axis changes its size in some of them.
  const std::vector<std::pair<std::string, std::string>> pairs{
      {"tp=1", "dp_shard=8,ep=8"},
      {"tp=1", "tp=2,etp=2"},
      {"dp_shard=2,tp=2,ep=2", "tp=4,ep=4"},
      {"dp_shard=2,tp=2,ep=4", "dp_replicate=2,tp=2,ep=2"},
      {"dp_shard=3", "tp=2,ep=2"},
      {"dp_shard=2,cp=2,tp=2,ep=2,etp=2", "dp_shard=3"},
      {"cp=2,tp=2,ep=2", "cp=4,ep=1"},
      {"tp=4,etp=4", "tp=4,ep=4"},
      {"dp_replicate=2,dp_shard=2", "dp_shard=4,ep=2,etp=2"},
      {"dp_replicate=2,cp=2,tp=2,ep=4", "dp_shard=2,cp=3,ep=2"},
      {"dp_shard=8", "tp=8,ep=4,etp=2"},
      {"dp_shard=5", "dp_replicate=3,tp=2,ep=2"},
      {"tp=1", "pp=3"},
      {"pp=2,tp=2,ep=2", "dp_shard=3"},
      {"pp=3,dp_shard=2", "pp=2,dp_replicate=2"},
  };
  const TemporaryFolder folder;
  run(folder.path() / "start", "dp_shard=2,tp=2,ep=2", {"--steps=2", "--optimizer.lr=1e-2"});
  int number = 0;
  for (const auto& [a, b] : pairs) {
    SCOPED_TRACE(a + " and " + b);
    const path here = folder.path() / std::to_string(number++);
    pass_on(folder.path() / "start", here / "a", a);
    pass_on(here / "a", here / "b", b);
    pass_on(here / "b", here / "back", a);
    for (const char* other : {"a", "b", "back"})
      expect_same_contents(step(folder.path() / "start", 2), step(here / other, 2));
  }
}

TEST(Reshard, EveryModelInItsOwnLayout) {
  for (const std::string& name : models::model_names()) {
    SCOPED_TRACE(name);
    const bool takes_cp = models::facts(models::built_in(name, "tiny")).takes_cp();
    const TemporaryFolder folder;
    const Args model{"--model=" + name + ":tiny", "--moe.load_balance_coeff=0.01"};
    Args options = model;
    options.insert(options.end(), {"--steps=2", "--optimizer.lr=1e-2"});
    run(folder.path() / "start", "dp_shard=2,tp=2,ep=2", options);
    const std::vector<std::string> meshes{"tp=4,ep=2,etp=2", "dp_replicate=2,dp_shard=3,ep=1",
                                          "pp=2,tp=2", "tp=1",
                                          takes_cp ? "cp=2,tp=2,ep=4" : "dp_shard=2,tp=2,ep=4"};
    path last = folder.path() / "start";
    for (const auto& mesh : meshes) {
      const path next = folder.path() / mesh;
      pass_on(last, next, mesh, model);
      expect_same_contents(step(last, 2), step(next, 2));
      last = next;
    }
  }
}

// A tied embedding is on both ends of a pipeline, and saved once; stages are in any order.
TEST(Reshard, APipelineThatTurnsBackAndTiedEnds) {
  const TemporaryFolder folder;
  const Args model{"--model.tie_embeddings=true", "--model.num_layers=4",
                   "--training.gradient_accumulation_steps=2"};
  const auto with = [&](const Args& more) {
    Args all = model;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  run(folder.path() / "start", "dp_shard=2", with({"--steps=2", "--optimizer.lr=1e-2"}));
  path last = folder.path() / "start";
  for (const std::string schedule : {"zbv", "1f1b", "interleaved_1f1b"}) {
    const path next = folder.path() / schedule;
    pass_on(last, next, "pp=2,tp=2",
            with({"--parallelism.pipeline_parallel_schedule=" + schedule}));
    expect_same_contents(step(last, 2), step(next, 2));
    last = next;
  }
}

// Where the files of a model have no place for an expert bias, its checkpoints keep it all the
// same, and weights that are taken from one bring it along.
TEST(ExpertBias, OfEveryModelStaysInItsCheckpoints) {
  for (const std::string& name : models::model_names()) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const auto trained = [&](const std::string& coeff) {
      const path at = folder.path() / coeff;
      run(at, "tp=2,ep=2",
          {"--model=" + name + ":tiny", "--steps=2", "--moe.load_balance_coeff=" + coeff});
      return step(at, 2);
    };
    const path with = trained("0.01"), without = trained("0");
    EXPECT_NE(train::keeps_bias_apart(with),
              models::facts(models::built_in(name, "tiny")).stores_expert_bias);
    EXPECT_FALSE(train::keeps_bias_apart(without));
    for (const auto& from : {with, without}) {
      const auto c = config::load_config(
          {"--model=" + name + ":tiny", "--checkpoint.initial_load=" + from.string()});
      comm::launch(1, [&](comm::Group& world) {
        const Mesh mesh(world, {});
        const MeshScope scope(mesh);
        const auto model = train::make_model(c);
        train::load_initial_weights(c, *model);
        for (auto* router : model->routers())
          EXPECT_EQ(router->expert_bias().any().item<bool>(), from == with);
      });
    }
  }
}

TEST(Shards, SmallFilesHoldTheSameTensors) {
  const TemporaryFolder folder;
  run(folder.path() / "start", "tp=2,ep=2", {"--steps=1"});
  pass_on(folder.path() / "start", folder.path() / "small", "dp_shard=2",
          {"--checkpoint.max_shard_size=20000"});
  EXPECT_GT(contents(step(folder.path() / "small", 1)).size(), 10u);
  pass_on(folder.path() / "small", folder.path() / "back", "dp_shard=4,ep=2");
  expect_same_contents(step(folder.path() / "start", 1), step(folder.path() / "back", 1));
}

TEST(Keep, OnlyTheLatestStay) {
  const TemporaryFolder folder;
  run(folder.path() / "c", "tp=2",
      {"--steps=7", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2"});
  EXPECT_EQ(checkpoint::saved_steps(folder.path() / "c"), (std::vector<std::int64_t>{6, 7}));
}

void flip(const path& file, std::uint64_t at, int bit) {
  std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(f.get() ^ (1 << bit));
  f.seekp(static_cast<std::streamoff>(at));
  f.put(byte);
}

TEST(Damage, AnyFlippedBitAndAnyTruncationIsFound) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  run(runs, "tp=2,ep=2", {"--steps=1", "--checkpoint.max_shard_size=100000"});
  const path saved = step(runs, 1);
  std::vector<path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(saved))
    if (entry.is_regular_file()) files.push_back(entry.path());
  ASSERT_TRUE(checkpoint::find_damage(saved).empty());
  pass_on(runs, folder.path() / "fine", "tp=1");
  std::mt19937_64 random(7);
  for (int i = 0; i < 400; ++i) {
    const path& file = files[random() % files.size()];
    const auto size = std::filesystem::file_size(file);
    const auto at = random() % size;
    const int bit = static_cast<int>(random() % 8);
    const bool truncates = i % 4 == 0;
    SCOPED_TRACE(
        detail::concat(file.string(), " byte ", at, truncates ? " is the end" : " is flipped"));
    const std::string before = truncates ? bytes_of(file) : "";
    if (truncates)
      std::filesystem::resize_file(file, at);
    else
      flip(file, at, bit);
    const auto damage = checkpoint::find_damage(saved);
    ASSERT_EQ(damage.size(), 1u);
    EXPECT_NE(damage[0].find(file.filename().string()), std::string::npos) << damage[0];
    // run.toml is for people: loading does not read it.
    if (i % 4 < 2 && file.filename() != "run.toml")
      EXPECT_THROW(pass_on(runs, folder.path() / "nowhere", "tp=1"), Error);
    if (truncates)
      std::ofstream(file, std::ios::binary) << before;
    else
      flip(file, at, bit);
  }
  EXPECT_TRUE(checkpoint::find_damage(saved).empty());
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "nowhere"));
}

std::vector<std::string> lines;  // of the log
std::mutex lines_mutex;
void keep_line(LogLevel, const std::string& line) {
  const std::lock_guard lock(lines_mutex);
  lines.push_back(line);
  // A disk that is full until someone has noticed.
  if (line.find("was not saved") != std::string::npos) {
    rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
}
struct KeepLines {
  KeepLines() : before(log_level()) {
    lines.clear(), set_log_level(LogLevel::info), set_log_sink(keep_line);
  }
  ~KeepLines() { set_log_sink(nullptr), set_log_level(before); }
  LogLevel before;
};
std::string all_lines() {
  std::string text;
  for (const auto& l : lines) text += l + "\n";
  return text;
}

TEST(Damage, TrainingSaysSoAndTakesTheOneBefore) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  const Args options{"--steps=8", "--checkpoint.interval=2"};
  const auto whole = run(runs, "tp=2,ep=2", options);
  const auto end = contents(step(runs, 8));
  flip(step(runs, 8) / "model-00001-of-00001.safetensors", 50'000, 3);
  std::filesystem::remove(step(runs, 6) / "moesh.json");
  const KeepLines keep;
  const auto again = run(runs, "tp=2,ep=2", options);
  EXPECT_EQ(again.first_step, 4);
  EXPECT_EQ(again.losses, std::vector<double>(whole.losses.begin() + 4, whole.losses.end()));
  expect_parts(all_lines(),
               {"step-00000008 is not whole", "model-00001-of-00001.safetensors",
                "step-00000006 is not whole", "going on from " + step(runs, 4).string()});
  EXPECT_TRUE(checkpoint::find_damage(step(runs, 8)).empty());
  EXPECT_EQ(contents(step(runs, 8)), end);

  for (const auto n : checkpoint::saved_steps(runs))
    std::filesystem::remove(step(runs, n) / "config.json");
  expect_parts(error_of([&] { run(runs, "tp=2,ep=2", options); }, ErrorKind::data),
               {"no checkpoint in", "config.json", "choose another checkpoint.folder"});
}

// Files may not be larger than this: the nearest thing to a full disk that needs no disk.
struct SmallDisk {
  explicit SmallDisk(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{bytes, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallDisk() { setrlimit(RLIMIT_FSIZE, &before); }
  rlimit before;
};

TEST(FullDisk, IsAClearErrorAndTheOldCheckpointIsIntact) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  run(runs, "tp=2,ep=2", {"--steps=2"});
  const auto before = contents(step(runs, 2));
  {
    const SmallDisk disk(100'000);
    expect_parts(error_of([&] { run(runs, "tp=2,ep=2", {"--steps=4"}); }, ErrorKind::storage),
                 {"cannot reserve room for", "model-00001-of-00001.safetensors",
                  "checkpoint.folder", "(rank 0)"});
  }
  EXPECT_EQ(checkpoint::saved_steps(runs), std::vector<std::int64_t>{2});
  EXPECT_EQ(contents(step(runs, 2)), before);
  EXPECT_TRUE(checkpoint::find_damage(step(runs, 2)).empty());
  for (const auto& entry : std::filesystem::directory_iterator(runs))
    EXPECT_TRUE(entry.path().filename() == "step-00000002" || entry.path().filename() == ".lock");
  EXPECT_EQ(run(runs, "tp=2,ep=2", {"--steps=4"}).first_step, 2);
}

TEST(FullDisk, TrainingGoesOnWhereSavingIsAsynchronous) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  const KeepLines keep;
  {
    const SmallDisk disk(100'000);
    const auto summary =
        run(runs, "tp=2,ep=2", {"--steps=6", "--checkpoint.interval=2", "--checkpoint.async"});
    EXPECT_EQ(summary.num_steps, 6);
  }
  expect_parts(all_lines(),
               {"step 2 was not saved: cannot reserve room for", "training continues"});
  EXPECT_EQ(checkpoint::saved_steps(runs).back(), 6);
  EXPECT_TRUE(checkpoint::find_damage(step(runs, 6)).empty());
}

TEST(ReadOnlyFolder, IsAClearError) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  run(runs, "tp=1", {"--steps=1"});
  const auto before = contents(step(runs, 1));
  std::filesystem::permissions(runs, std::filesystem::perms(0555));
  const auto text = error_of(
      [&] {
        comm::launch(2, [&](comm::Group& world) {
          setfsuid(65534);  // only of this thread: the superuser may write anywhere
          checkpoint::Snapshot s;
          s.sets.emplace_back();
          s.manifest.step = 2;
          checkpoint::save(s, {.folder = runs}, world);
        });
      },
      ErrorKind::storage);
  std::filesystem::permissions(runs, std::filesystem::perms(0755));
  expect_parts(text, {"cannot create", "Permission denied", "choose a folder", "(rank 0)"});
  EXPECT_EQ(contents(step(runs, 1)), before);
}

TEST(AnotherModel, IsNamedByTheKeysThatDiffer) {
  const TemporaryFolder folder;
  run(folder.path() / "c", "tp=1", {"--steps=1"});
  expect_parts(
      error_of([&] { run(folder.path() / "c", "tp=1", {"--steps=2", "--model.moe_ffn=32"}); },
               ErrorKind::config),
      {"holds another model", "model.moe_ffn = 24"});
  expect_parts(
      error_of([&] { run(folder.path() / "c", "tp=1", {"--steps=2", "--optimizer.name=sgd"}); },
               ErrorKind::config),
      {"was saved with optimizer adamw", "optimizer.name is \"sgd\"",
       "set optimizer.name to adamw"});
  // A list of numbers is a value, too; no tensor has another shape.
  run(folder.path() / "l", "tp=1", {"--model=llama4:tiny", "--steps=1"});
  expect_parts(error_of(
                   [&] {
                     run(folder.path() / "l", "tp=1",
                         {"--model=llama4:tiny", "--steps=2", "--model.nope_step=2"});
                   },
                   ErrorKind::config),
               {"holds another model", "model.nope_step = 4"});
}

TEST(AnotherRun, IsNamedByTheKeysThatSayWhatIsTrained) {
  const TemporaryFolder folder;
  const auto refused = [&](const char* name, const Args& before, const Args& now,
                           const std::vector<std::string>& parts) {
    const auto go = [&](const char* steps, Args args) {
      args.push_back(steps);
      run(folder.path() / name, "tp=1", args);
    };
    go("--steps=1", before);
    expect_parts(error_of([&] { go("--steps=2", now); }, ErrorKind::config), parts);
  };
  refused("freeze", {}, {"--training.freeze=*.gate.weight"},
          {"trained other tensors: training.freeze was '' and is '*.gate.weight'; set it back",
           "checkpoint.initial_load="});
  refused("rank", {"--lora.rank=2"}, {"--lora.rank=3"},
          {"trained other tensors: lora.rank was '2' and is '3'; set it back",
           "in another checkpoint.folder"});
  refused("targets", {"--lora.rank=2"}, {"--lora.rank=2", "--lora.targets=o_proj"},
          {"lora.targets was 'all-linear' and is 'o_proj'"});
}

TEST(AnotherRun, IsNotBegunInTheFolderOfOne) {
  const TemporaryFolder folder;
  run(folder.path() / "c", "tp=1", {"--steps=3"});
  expect_parts(
      error_of(
          [&] { run(folder.path() / "c", "tp=1", {"--steps=2", "--checkpoint.resume=false"}); },
          ErrorKind::config),
      {"checkpoint.resume is false", "holds checkpoints of another run", "choose another folder"});
}

// Files of ids are two each, and either is noticed; so are kinds, weights, packing and tokenizer.
TEST(AnotherRun, IsNoticedByTheSourcesOfItsData) {
  const TemporaryFolder folder;
  const auto at = folder.path();
  const auto write_ids = [&](const std::string& prefix, const std::vector<std::int32_t>& lengths) {
    std::ofstream bin(prefix + ".bin", std::ios::binary), idx(prefix + ".idx", std::ios::binary);
    const auto put = [](std::ofstream& file, auto value) {
      file.write(reinterpret_cast<const char*>(&value), sizeof value);
    };
    const auto num = std::ssize(lengths);
    idx << formats::token_index_header(formats::IdType::uint16, num, num);
    std::int64_t num_tokens = 0;
    for (const auto n : lengths) put(idx, n);
    for (const auto n : lengths) put(idx, 2 * num_tokens), num_tokens += n;
    for (std::int64_t i = 0; i <= num; ++i) put(idx, i);
    for (std::int64_t i = 0; i < num_tokens; ++i) put(bin, static_cast<std::uint16_t>(i % 90));
  };
  const std::string a = at / "a", b = at / "b";
  write_ids(a, {40, 40}), write_ids(b, {30, 50});
  const Args sources{"--data.source.0.path=" + a + ".bin", "--data.source.1.path=" + b + ".idx"};
  const auto go = [&](const std::string& steps, const Args& more) {
    Args args = sources;
    args.push_back("--steps=" + steps);
    args.insert(args.end(), more.begin(), more.end());
    run(at / "c", "tp=1", args);
  };
  go("1", {});
  go("2", {});  // the same: it goes on
  const auto refused = [&](const Args& more, const std::vector<std::string>& parts) {
    expect_parts(error_of([&] { go("3", more); }, ErrorKind::config), parts);
  };
  refused({"--data.source.1.weight=2"}, {"data.source.1.weight was 1.0 and is 2.0"});
  refused({"--data.source.0.kind=uint16"}, {"data.source.0.kind was indexed and is uint16"});
  refused({"--data.packing=best_fit"}, {"data.packing was cut and is best_fit"});
  write_ids(b, {31, 49});  // the same ids, and another index
  refused({}, {"data.fingerprint was"});
  write_ids(b, {30, 50});
  go("3", {});
  std::ofstream(a + ".bin", std::ios::binary | std::ios::in | std::ios::out) << "xy";
  expect_parts(error_of([&] { go("4", {}); }, ErrorKind::config), {"data.fingerprint was"});
}

TEST(InitialLoad, BeginsWithTheWeightsAloneAndListsWhatIsMissing) {
  const TemporaryFolder folder;
  run(folder.path() / "c", "tp=2,ep=2", {"--steps=3"});
  const auto from = step(folder.path() / "c", 3);
  const Args options{"--steps=1", "--checkpoint.initial_load=" + from.string(),
                     "--training.seed=5"};
  const auto summary = run(folder.path() / "d", "dp_shard=2", options);
  const auto fresh = run(folder.path() / "e", "dp_shard=2", {"--steps=1", "--training.seed=5"});
  EXPECT_EQ(summary.first_step, 0);
  EXPECT_NE(summary.losses, fresh.losses);
  // A folder of others has no manifest.
  std::filesystem::remove(from / "moesh.json");
  EXPECT_EQ(run(folder.path() / "f", "dp_shard=2", options).losses, summary.losses);
  // One tensor is called something else: both names are in the message.
  const path file = from / "model-00001-of-00001.safetensors",
             index = from / "model.safetensors.index.json";
  for (const path& p : {file, index}) {
    std::string bytes = bytes_of(p);
    for (auto at = bytes.find("layers.1.mlp.experts.3.up_proj"); at != std::string::npos;
         at = bytes.find("layers.1.mlp.experts.3.up_proj", at))
      bytes[at + 21] = '9';
    std::ofstream(p, std::ios::binary) << bytes;
  }
  expect_parts(error_of([&] { run(folder.path() / "g", "dp_shard=2", options); }, ErrorKind::data),
               {"1 missing: model.layers.1.mlp.experts.3.up_proj.weight",
                "1 unexpected: model.layers.1.mlp.experts.9.up_proj"});
}

TEST(Signals, ATimeLimitSavesTheStepInWhichItEnds) {
  const TemporaryFolder folder;
  const auto summary = run(folder.path() / "c", "tp=2", {"--steps=1000000", "--max-minutes=1e-9"});
  EXPECT_TRUE(summary.interrupted);
  EXPECT_EQ(summary.num_steps, 1);
  EXPECT_EQ(checkpoint::saved_steps(folder.path() / "c"), std::vector<std::int64_t>{1});
}

}  // namespace
}  // namespace moesh
