// What a run does when the disk fails, lies, or is used by another run.
#include <fcntl.h>
#include <sys/wait.h>

#include <csignal>
#include <limits>

#include "moesh/base/log.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/train/metrics/sink.h"
#include "tests/checkpoint/support.h"
#include "tests/faulty_file_system.h"
#include "tests/support.h"

namespace moesh {
namespace {

using std::filesystem::path;
using Steps = std::vector<std::int64_t>;

path step(const path& folder, std::int64_t n) { return folder / checkpoint::step_name(n); }

// Every file of a run's folder, with its bytes.
std::map<std::string, std::string> all_of(const path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename() != checkpoint::kLockFile)
      files[entry.path().string()] = bytes_of(entry.path());
  return files;
}

// A finished run whose folder a second one is to go on from.
struct Finished {
  Finished() : runs(folder.path() / "c") {
    run(runs, "tp=2,ep=2", {"--steps=4", "--checkpoint.interval=2"});
    before = all_of(runs);
  }
  train::RunSummary go_on(const std::string& steps = "6") const {
    return run(runs, "tp=2,ep=2",
               {"--steps=" + steps, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"});
  }
  const TemporaryFolder folder;
  const path runs;
  std::map<std::string, std::string> before;
};

// ---------------------------------------------------------------- errors of reading

TEST(Listing, AFolderThatCannotBeListedIsNotEmpty) {
  for (const int code : {ESTALE, EACCES, EIO, EMFILE}) {
    const Finished f;
    const WithFaults faults(detail::concat("list /c 1 1000000 ", code));
    expect_parts(error_of([&] { f.go_on(); }, ErrorKind::storage), {"cannot list", "/c'"});
    EXPECT_GT(faults.files.num_hit(), 0);
    EXPECT_EQ(all_of(f.runs), f.before);
  }
}

TEST(Listing, AnErrorThatPassesIsTriedAgain) {
  const Finished f;
  const WithFaults faults(detail::concat("list /c 1 1 ", ESTALE));
  EXPECT_EQ(f.go_on().first_step, 4);
  EXPECT_EQ(faults.files.num_hit(), 1);
}

TEST(Reading, AnErrorIsNotDamageAndStopsTheRun) {
  for (const char* file : {"moesh.json", "model-00001", "optimizer/state", "config.json"})
    for (const char* call : {"open", "read"}) {
      SCOPED_TRACE(std::string(call) + " " + file);
      const Finished f;
      const WithFaults faults(detail::concat(call, " ", file, " 1 1000000 ", EIO));
      expect_parts(error_of([&] { f.go_on(); }, ErrorKind::storage), {"cannot read", file});
      EXPECT_EQ(all_of(f.runs), f.before);
    }
}

TEST(Reading, OneErrorIsTriedAgain) {
  for (const char* file : {"moesh.json", "model-00001", "optimizer/state", "config.json"}) {
    SCOPED_TRACE(file);
    const Finished f;
    const WithFaults faults(detail::concat("read ", file, " 1 1 ", EIO));
    EXPECT_EQ(f.go_on().first_step, 4);
    EXPECT_EQ(faults.files.num_hit(), 1);
  }
}

// A bit that is wrong on its way from the disk: the bytes on it are as they were.
TEST(Reading, AFlippedReadIsNotTakenForDamage) {
  for (const char* file : {"moesh.json", "model-00001", "optimizer/state", "config.json"}) {
    SCOPED_TRACE(file);
    const Finished f;
    const WithFaults faults(detail::concat("read ", file, " 1 1 flip"));
    EXPECT_EQ(f.go_on().first_step, 4);
    EXPECT_EQ(faults.files.num_hit(), 1);
  }
}

TEST(Reading, InspectSaysThatItCannotReadAndNotThatItIsDamaged) {
  const Finished f;
  const WithFaults faults(detail::concat("read model-00001 1 1000000 ", EIO));
  expect_parts(error_of([&] { checkpoint::find_damage(step(f.runs, 4)); }, ErrorKind::storage),
               {"cannot read", "model-00001"});
}

// ---------------------------------------------------------------- what a run does not know

TEST(Unknown, CheckpointsThatAppearAreNeitherReplacedNorPurged) {
  const Finished f;
  // Later ones, of a run that was not seen at the start: two steps saved elsewhere.
  const TemporaryFolder other;
  run(other.path() / "c", "tp=2,ep=2", {"--steps=2"});
  const auto config = run_config(other.path() / "c", "tp=1", {"--steps=2"});
  comm::launch(1, [&](comm::Group& world) {
    const Mesh m(world, mesh_shape(config));
    const MeshScope scope(m);
    const auto model = train::make_model(config);
    const auto optimizer = train::make_optimizer(*model, config);
    train::Checkpointer checkpointer(config, world, *model, *optimizer);
    auto position = checkpointer.start();
    std::filesystem::copy(step(f.runs, 4), step(other.path() / "c", 4),
                          std::filesystem::copy_options::recursive);
    const auto before = all_of(other.path() / "c");
    for (const int next : {3, 4}) {
      position.step = next;
      expect_parts(error_of([&] { checkpointer.finish(position); }, ErrorKind::storage),
                   {"step-00000004", "when this run began", "nothing was changed"});
    }
    EXPECT_EQ(all_of(other.path() / "c"), before);
  });
}

TEST(Unknown, FoldersThatMoeshDidNotMakeStay) {
  const Finished f;
  const path theirs = f.runs / ".saving-notes";
  std::filesystem::create_directories(theirs);
  std::ofstream(theirs / "thesis.txt") << "three years of work";
  f.go_on();
  EXPECT_EQ(bytes_of(theirs / "thesis.txt"), "three years of work");
  std::filesystem::create_directories(f.runs / checkpoint::temporary_name(8));
  std::ofstream(f.runs / checkpoint::temporary_name(8) / "thesis.txt") << "three years of work";
  expect_parts(error_of([&] { f.go_on("8"); }, ErrorKind::storage), {"is in the way", "move it"});
  EXPECT_EQ(bytes_of(f.runs / checkpoint::temporary_name(8) / "thesis.txt"), "three years of work");
}

TEST(Unknown, ACheckpointUnderAnotherNameIsReported) {
  const Finished f;
  std::filesystem::rename(step(f.runs, 4), step(f.runs, 40));
  expect_parts(checkpoint::find_damage(step(f.runs, 40)).at(0), {"step-00000040", "of step 4"});
  const auto before = all_of(f.runs);
  expect_parts(error_of([&] { f.go_on(); }, ErrorKind::data),
               {"step-00000040", "holds step 4", "give it its own name"});
  EXPECT_EQ(all_of(f.runs), before);
}

TEST(Unknown, AWholeCheckpointThatTheRunCannotUseIsNotTakenForDamaged) {
  const Finished f;
  auto manifest = formats::read_manifest(step(f.runs, 4).string());
  manifest.extra.erase("optimizer_steps");
  std::ofstream(step(f.runs, 4) / "moesh.json") << formats::write_manifest(manifest);
  const auto before = all_of(f.runs);
  expect_parts(error_of([&] { f.go_on(); }, ErrorKind::data), {"has no optimizer_steps"});
  EXPECT_EQ(all_of(f.runs), before);
}

TEST(Unknown, WhatALinkPointsToStays) {
  const Finished f;
  // Another folder of moesh's, under a name that a save leaves behind.
  const path theirs = f.folder.path() / "theirs", old = f.folder.path() / "old";
  std::filesystem::create_directories(theirs);
  for (const char* name : {"moesh.json", "thesis.txt"}) std::ofstream(theirs / name) << "years";
  std::filesystem::create_directory_symlink(theirs, f.runs / checkpoint::temporary_name(9));
  // A checkpoint that lies on another disk: when it is purged, the link goes.
  std::filesystem::rename(step(f.runs, 2), old);
  std::filesystem::create_directory_symlink(old, step(f.runs, 2));
  const auto kept = all_of(old);
  f.go_on();
  EXPECT_EQ(bytes_of(theirs / "thesis.txt"), "years");
  EXPECT_EQ(bytes_of(theirs / "moesh.json"), "years");
  EXPECT_EQ(checkpoint::saved_steps(f.runs), (Steps{4, 6}));
  EXPECT_EQ(all_of(old), kept);
}

TEST(Unknown, InspectReportsFilesThatAreNotInTheManifest) {
  const Finished f;
  std::ofstream(step(f.runs, 4) / "optimizer" / "extra.bin") << "x";
  const auto damage = checkpoint::find_damage(step(f.runs, 4));
  ASSERT_EQ(damage.size(), 1u);
  expect_parts(damage[0], {"optimizer/extra.bin", "not in the manifest"});
}

TEST(Unknown, HalfPurgedCheckpointsAreRemovedByTheNextRun) {
  const Finished f;
  std::filesystem::rename(step(f.runs, 2), f.runs / checkpoint::purged_name(2));
  std::filesystem::remove(f.runs / checkpoint::purged_name(2) / "config.json");
  f.go_on();
  EXPECT_FALSE(std::filesystem::exists(f.runs / checkpoint::purged_name(2)));
}

// ---------------------------------------------------------------- the lock

TEST(Lock, ASecondRunIsRefusedBeforeItTouchesAnything) {
  const Finished f;
  const checkpoint::FolderLock lock(f.runs);
  expect_parts(error_of([&] { f.go_on(); }, ErrorKind::config),
               {"is used by process " + std::to_string(getpid()), "since", "another folder"});
  EXPECT_EQ(all_of(f.runs), f.before);
}

TEST(Lock, EndsWithTheProcessHoweverThatEnds) {
  const TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const checkpoint::FolderLock lock(folder.path());
    if (write(ready[1], "x", 1) == 1) pause();
    _exit(1);
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  expect_parts(error_of([&] { checkpoint::FolderLock second(folder.path()); }, ErrorKind::config),
               {"process " + std::to_string(child)});
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const checkpoint::FolderLock second(folder.path());
}

TEST(Lock, AFileSystemWithoutLocksIsAWarning) {
  const Finished f;
  const WithFaults faults(detail::concat("lock .lock 1 1 ", ENOLCK));
  EXPECT_EQ(f.go_on().first_step, 4);
}

// Two processes want one folder in the same moment: one of them gets it.
TEST(Lock, OfTwoAtOnceOneIsRefused) {
  for (int round = 0; round < 25; ++round) {
    const TemporaryFolder folder;
    int go[2], ends[2];
    ASSERT_EQ(pipe(go), 0);
    ASSERT_EQ(pipe(ends), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < 2; ++i) {
      children.push_back(fork());
      if (children.back() != 0) continue;
      char byte;
      close(go[1]);
      close(ends[1]);
      if (read(go[0], &byte, 1) != 0) _exit(9);  // until the parent closes it
      try {
        const checkpoint::FolderLock lock(folder.path() / "c");
        _exit(read(ends[0], &byte, 1) == 0 ? 0 : 9);  // held until both have tried
      } catch (const Error& e) {
        _exit(e.kind() == ErrorKind::config ? 2 : 9);
      }
    }
    for (const int end : {go[0], go[1], ends[0]}) close(end);
    int status = 0;
    ASSERT_GT(wait(&status), 0);  // the one that is refused
    EXPECT_EQ(WEXITSTATUS(status), 2);
    close(ends[1]);
    ASSERT_GT(wait(&status), 0);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

TEST(Lock, TheMetricsOfTwoRunsDoNotMix) {
  const Finished f;
  const auto config = run_config(f.folder.path() / "other", "tp=1");
  const path file = f.folder.path() / "metrics" / "metrics.jsonl";
  const std::string before = bytes_of(file);
  for (const std::int64_t first : {0, 2, 4}) {  // with and without lines that are left out
    const auto held = train::open_sinks(config, {.first_step = 4});
    expect_parts(
        error_of([&] { train::open_sinks(config, {.first_step = first}); }, ErrorKind::config),
        {"metrics.folder", "is used by another run"});
    EXPECT_EQ(bytes_of(file), before);
  }
  {
    const auto held =
        train::open_sinks(config, {.first_step = 2});  // written anew, and held as before
    error_of([&] { train::open_sinks(config, {.first_step = 2}); }, ErrorKind::config);
  }
  train::open_sinks(config, {.first_step = 2});
}

// On which another run replaces a file after it was opened and before it is locked.
class ReplacedBeforeTheLock final : public formats::FileSystem {
 public:
  explicit ReplacedBeforeTheLock(path file) : file_(std::move(file)) {
    formats::set_file_system(this);
  }
  ~ReplacedBeforeTheLock() override { formats::set_file_system(nullptr); }
  int lock(int file) override {
    if (num_locks++ == 0) {
      std::ofstream(path(file_).concat(".theirs")) << "{\"step\":1}\n";
      std::filesystem::rename(path(file_).concat(".theirs"), file_);
    }
    return FileSystem::lock(file);
  }
  int num_locks = 0;

 private:
  path file_;
};

TEST(Lock, OfMetricsIsThatOfTheFileWhichHasTheName) {
  const Finished f;
  const auto config = run_config(f.folder.path() / "other", "tp=1");
  const path file = f.folder.path() / "metrics" / "metrics.jsonl";
  {
    const ReplacedBeforeTheLock files(file);
    const auto sinks = train::open_sinks(config, {.first_step = 4});
    EXPECT_EQ(files.num_locks, 2);
    // The file that has the name is held, not the one that it replaced.
    error_of([&] { train::open_sinks(config, {.first_step = 4}); }, ErrorKind::config);
  }
  EXPECT_EQ(bytes_of(file), "{\"step\":1}\n");
}

// ---------------------------------------------------------------- lies

// A bit of what is written is another, and the disk says that all went well.
TEST(Lies, EveryFlippedWriteIsFoundBeforeTheCheckpointIsPublished) {
  const Finished f;
  int num_found = 0;
  for (int n = 1; n <= 30; ++n) {
    SCOPED_TRACE(n);
    const WithFaults faults(detail::concat("write .saving- ", n, " 1 flip"));
    EXPECT_EQ(faults.files.num_hit(), 0);
    const auto text = error_of([&] { f.go_on(); }, ErrorKind::storage);
    ASSERT_EQ(faults.files.num_hit(), 1);
    num_found += text.find("read back with other") != std::string::npos;
    EXPECT_EQ(all_of(f.runs), f.before);
  }
  EXPECT_EQ(num_found, 30);
}

TEST(Lies, AReadThatFlipsABitIsNotCertified) {
  for (int n = 1; n <= 6; ++n) {  // five files and the manifest
    SCOPED_TRACE(n);
    const Finished f;
    const WithFaults faults(detail::concat("read .saving- ", n, " 1 flip"));
    error_of([&] { f.go_on(); }, ErrorKind::storage);
    EXPECT_EQ(all_of(f.runs), f.before);
  }
}

// ---------------------------------------------------------------- errors of writing

TEST(Writing, AnErrorOfAnyCallStopsTheRunAndChangesNothing) {
  int num_faults = 0;
  for (const char* call : {"open", "write", "reserve", "sync", "make_folder"})
    for (const int n : {1, 2, 5}) {
      SCOPED_TRACE(detail::concat(call, " ", n));
      const Finished f;
      const WithFaults faults(detail::concat(call, " .saving- ", n, " 1 ", ENOSPC));
      try {
        f.go_on();
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::storage) << e.what();
        EXPECT_EQ(all_of(f.runs), f.before);
        ++num_faults;
      }
    }
  EXPECT_GE(num_faults, 12);
}

TEST(Writing, WhatCannotBeDoneIsKnownBeforeTheFirstStep) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  const auto first = [&](const std::string& fault, const std::vector<std::string>& parts) {
    SCOPED_TRACE(fault);
    const WithFaults faults(fault);
    expect_parts(error_of([&] { run(runs, "tp=2", {"--steps=2"}); }, ErrorKind::storage), parts);
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "metrics" / "metrics.jsonl"));
  };
  first("free_bytes /c 1 1 0", {"a checkpoint of this run has", "has room for 1000"});
  first(detail::concat("write .lock 1 1 ", ENOSPC), {"cannot write", ".lock", "No space left"});
  first(detail::concat("open .lock 1 1 ", EROFS), {"cannot open", "Read-only file system"});
  std::filesystem::remove_all(runs);
  std::ofstream(runs) << "a file";
  first("none none 1 1 0", {"cannot create", "Not a directory"});
}

// The checkpoint has its name already: it counts.
TEST(Writing, AnErrorAfterTheRenameDoesNotUndoIt) {
  for (const char* option : {"--checkpoint.async", "--checkpoint.async=false"})
    for (const std::string call : {"sync /c$", "remove .purging-"}) {
      SCOPED_TRACE(call + option);
      const Finished f;
      const WithFaults faults(detail::concat(call, " 1 1000 ", EIO));
      EXPECT_EQ(
          run(f.runs, "tp=2,ep=2",
              {"--steps=8", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1", option})
              .num_steps,
          4);
      EXPECT_GT(faults.files.num_hit(), 0);
      EXPECT_EQ(checkpoint::saved_steps(f.runs).back(), 8);
      EXPECT_TRUE(checkpoint::find_damage(step(f.runs, 8)).empty());
    }
}

TEST(Writing, ARunThatHasNothingLeftToDoNeedsNoRoom) {
  const Finished f;
  const WithFaults faults("free_bytes /c 1 1000 0");
  EXPECT_EQ(f.go_on("4").num_steps, 0);
  error_of([&] { f.go_on("5"); }, ErrorKind::storage);
}

TEST(Writing, AFolderOfMetricsThatCannotBeIsNamedByItsOwnOption) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "metrics") << "a file";
  const auto text =
      error_of([&] { run(folder.path() / "c", "tp=1", {"--steps=1"}); }, ErrorKind::storage);
  expect_parts(text, {"metrics.folder", "Not a directory"});
  EXPECT_EQ(text.find("checkpoint.folder"), std::string::npos) << text;
}

// ---------------------------------------------------------------- metrics

TEST(Metrics, AreNotLostWhenARunDiesWhileItTakesThemOver) {
  const Finished f;
  const path file = f.folder.path() / "metrics" / "metrics.jsonl";
  const std::string kept = bytes_of(file);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), '\n'), 4);
  std::ofstream(file, std::ios::app) << "{\"step\":5,\"los";  // cut off by a kill
  for (int n = 1; n <= 40; ++n) {
    SCOPED_TRACE(n);
    const pid_t child = fork();
    if (child == 0) {
      const WithFaults faults(detail::concat("any metrics ", n, " 1 kill"));
      train::open_sinks(run_config(f.runs, "tp=1"), {.first_step = 4});
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(bytes_of(file).substr(0, kept.size()), kept);
  }
  EXPECT_EQ(bytes_of(file), kept);  // the last ones were not killed
}

TEST(Metrics, OfTheRunBeforeAreNotLostWhenOneDiesAsItBegins) {
  const Finished f;
  const path folder = f.folder.path() / "metrics", file = folder / "metrics.jsonl",
             earlier = folder / "earlier" / "0001" / "metrics.jsonl";
  const std::string before = bytes_of(file), config = bytes_of(folder / "config.toml");
  for (int n = 1; n <= 40; ++n) {
    SCOPED_TRACE(n);
    const pid_t child = fork();
    if (child == 0) {
      const WithFaults faults(detail::concat("any metrics ", n, " 1 kill"));
      train::open_sinks(run_config(f.runs, "tp=1"), {});
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(bytes_of(std::filesystem::exists(earlier) ? earlier : file), before);
  }
  EXPECT_EQ(bytes_of(earlier), before);
  EXPECT_EQ(bytes_of(earlier.parent_path() / "config.toml"), config);
  EXPECT_FALSE(std::filesystem::exists(folder / "earlier" / "0002")) << "no step was taken since";
}

std::vector<std::string> lines;  // of the log
std::mutex lines_mutex;
struct KeepLines {
  KeepLines() {
    lines.clear();
    set_log_sink([](LogLevel, const std::string& line) {
      const std::lock_guard lock(lines_mutex);
      lines.push_back(line);
    });
  }
  ~KeepLines() { set_log_sink(nullptr); }
};

TEST(Metrics, AFullDiskIsReportedAtOnce) {
  const TemporaryFolder folder;
  const KeepLines keep;
  const WithFaults faults(detail::concat("append metrics.jsonl 3 2 ", ENOSPC));
  EXPECT_EQ(run(folder.path() / "c", "tp=1", {"--steps=6"}).num_steps, 6);
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  expect_parts(text, {"metrics from step 3 on are lost", "No space left", "2 lines could not"});
  EXPECT_EQ(bytes_of(folder.path() / "metrics" / "metrics.jsonl").find("\"step\":3"),
            std::string::npos);
}

// ---------------------------------------------------------------- changes between two runs

TEST(Changes, OfTheDataStopARunUnlessTheyAreAccepted) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c", text = folder.path() / "corpus.txt";
  std::ofstream(text) << std::string(4000, 'a');
  const Args first{"--steps=2", "--model.vocab_size=257", "--data.path=" + text.string()};
  run(runs, "tp=1", first);
  const auto refused = [&](const std::string& option, const std::string& said) {
    SCOPED_TRACE(option);
    Args options = first;
    options.insert(options.end(), {"--steps=3", option});
    expect_parts(error_of([&] { run(runs, "tp=1", options); }, ErrorKind::config),
                 {said, "checkpoint.accept_changes"});
  };
  refused("--data.sequence_length=16", "data.sequence_length was 8 and is 16");
  refused("--data.seed=5", "data.seed was 0 and is 5");
  refused("--data.shuffle=false", "data.shuffle was true and is false");
  std::ofstream(text) << std::string(3999, 'a') + "b";
  refused("--steps=3", "data.fingerprint was 4000-");
  const KeepLines keep;
  Args accepted = first;
  accepted.insert(accepted.end(),
                  {"--steps=3", "--checkpoint.accept_changes", "--data.batch_size=3"});
  EXPECT_EQ(run(runs, "tp=1", accepted).first_step, 2);
  std::string said;
  for (const auto& line : lines) said += line + "\n";
  expect_parts(said, {"data.fingerprint was 4000-", "data.batch_size was 2 and is 3"});
}

// ---------------------------------------------------------------- runs that diverge

TEST(Diverged, ARunStopsAndKeepsTheLastHealthyCheckpoint) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  run(runs, "tp=2", {"--steps=2"});
  const Args wild{"--steps=40",
                  "--optimizer.lr=1e30",
                  "--optimizer.eps=1e-30",
                  "--checkpoint.interval=1",
                  "--checkpoint.keep_latest_k=1",
                  "--training.max_skipped_steps=5"};
  expect_parts(error_of([&] { run(runs, "tp=2", wild); }, ErrorKind::diverged),
               {"the run has diverged: 5 steps in a row, 4 to 8", "the largest weight is",
                "optimizer.lr", "resume from", "step-00000002"});
  // Step 3 was taken, and made the weights with which nothing can be computed.
  const auto steps = checkpoint::saved_steps(runs);
  EXPECT_EQ(steps, (Steps{2, 7}));
  EXPECT_FALSE(formats::read_manifest(step(runs, steps.front()).string())
                   .extra.contains(checkpoint::kSkippedSteps));
  EXPECT_TRUE(formats::read_manifest(step(runs, steps.back()).string())
                  .extra.contains(checkpoint::kSkippedSteps));
  // The count goes on with the run.
  expect_parts(error_of([&] { run(runs, "tp=2", wild); }, ErrorKind::diverged),
               {"5 steps in a row"});
}

// Some numbers of one gate are so large that logits overflow, in the second of three MoE layers.
TEST(Diverged, NamesTheRouterThatIsNotFinite) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  const Args model{"--model=qwen3_moe:tiny", "--model.num_layers=3"};
  Args options = model;
  options.push_back("--steps=1");
  run(runs, "tp=1", options);
  const path weights = step(runs, 1);
  std::filesystem::remove(weights / "moesh.json");  // nobody compares checksums
  for (const auto& entry : std::filesystem::directory_iterator(weights)) {
    if (entry.path().extension() != ".safetensors") continue;
    const formats::SafetensorsFile file(entry.path());
    for (const auto& t : file.header().tensors) {
      if (t.name != "model.layers.1.mlp.gate.weight") continue;
      std::fstream stream(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(static_cast<std::streamoff>(file.header().data_start + t.begin));
      const std::vector<float> huge(4, std::numeric_limits<float>::max());
      stream.write(reinterpret_cast<const char*>(huge.data()), sizeof(float) * huge.size());
    }
  }
  for (const char* mesh : {"tp=1", "dp_shard=2,tp=2,ep=2"}) {
    SCOPED_TRACE(mesh);
    Args broken = model;
    broken.insert(broken.end(), {"--checkpoint.initial_load=" + weights.string(), "--steps=9",
                                 "--training.max_skipped_steps=3"});
    const auto text =
        error_of([&] { run(folder.path() / mesh, mesh, broken); }, ErrorKind::diverged);
    expect_parts(text,
                 {"diverged in step 1: router 'model.layers.1.", "hold a NaN", "gate weight"});
  }
}

}  // namespace
}  // namespace moesh
