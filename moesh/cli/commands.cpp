#include "moesh/cli/commands.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/exit_code.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/version.h"
#include "moesh/cli/arguments.h"
#include "moesh/cli/train_command.h"
#include "moesh/cli/usage.h"
#include "moesh/comm/fake/fake_group.h"
#include "moesh/comm/roll.h"
#include "moesh/config/merge.h"
#include "moesh/train/build.h"
#include "moesh/train/loop.h"

namespace moesh::cli {

using namespace config;
using namespace train;
namespace {

const char* kUsage =
    "usage: moesh COMMAND [OPTIONS]\n"
    "\n"
    "  train          train a model; ranks are threads of this process, or MPI's under mpirun, srun\n"
    "  verify         prove that a mesh computes what one rank computes; exit code 0 only if\n"
    "                 everything agrees; takes train's options\n"
    "                   --steps N        optimizer steps to compare (default 2)\n"
    "                   --sweep N        every mesh of up to N ranks, instead of the configured one;\n"
    "                                    5-8: of 5 to 8\n"
    "                   --sample COUNT   so many of them, drawn with --sample-seed N (default 0)\n"
    "                   --shard I/N      the I-th of N pieces of what is left, 1/N to N/N\n"
    "                   --json FILE      the result as JSON\n"
    "                   --dump FOLDER    what was compared, as FOLDER/mesh.safetensors and\n"
    "                                    FOLDER/one_rank.safetensors\n"
    "                   --golden FILE    instead: what transformers computed (tools/record_golden.py)\n"
    "                                    for the checkpoint of --checkpoint.initial_load=FOLDER\n"
    "  compare A B    two safetensors files, or folders of them, of any framework, name by name;\n"
    "                 B is the reference\n"
    "                   --tolerance X    relative error that is allowed (default: by dtype)\n"
    "                   --rename P=R     the name in B of what A calls P (a regular expression); may\n"
    "                                    be given several times\n"
    "                   --all            print every tensor, not only those that differ\n"
    "  estimate       parameters, memory of a rank and bytes that it sends in a step, without\n"
    "                 running it; takes train's options\n"
    "                   --cluster h100x8:256   seconds of a step on 256 nodes of 8 H100 (or a\n"
    "                                    TOML file); takes pp, and with it\n"
    "                                    --search         the fastest meshes of all GPUs\n"
    "                                    --schedule [FILE.svg]   what each rank of pp does when\n"
    "                   --search N       the best meshes of N ranks that fit, those that send the\n"
    "                                    fewest bytes a token first; degrees that are set stay as\n"
    "                                    they are\n"
    "                   --memory SIZE    what a rank has, as in 80GiB\n"
    "                   --json FILE      the result as JSON\n"
    "  report RUN...  the runs of these folders (metrics.folder) as one HTML file, over each other; a\n"
    "                 FILE.json is the result of verify --json\n"
    "                   --out FILE       what is written (default report.html)\n"
    "                   --serve PORT     instead: the page on http://127.0.0.1:PORT, which follows runs\n"
    "                                    that are still training\n"
    "  demo           train a small DeepSeek-V3 on eight ranks of this process, then verify that\n"
    "                 very mesh (this is `make run`)\n"
    "  convert FROM TO   a folder of a model (Hugging Face or moesh) as another\n"
    "                   --layout per_expert|stacked   how routed experts are laid out\n"
    "                   --dtype float32|bfloat16|...  of the weights\n"
    "  inspect FOLDER what is in a checkpoint, or in any folder of a model\n"
    "                   --check          compare every byte with its checksum; exit code 0 only if\n"
    "                                    all is well\n"
    "  tokenize INPUT...   texts (*.txt, *.jsonl, also .gz and .zst; folders, globs, -) as PREFIX.bin\n"
    "                 and PREFIX.idx; run again, it goes on where it stopped\n"
    "                   --tokenizer PATH a tokenizer.json, or its folder\n"
    "                   --out PREFIX     what is written\n"
    "                   --field NAME     of a JSONL object that holds the text (default text)\n"
    "                   --append-eod     close documents with the eos_token of the folder\n"
    "                   --eod TOKEN      close documents with this token\n"
    "                   --with-template  add the tokens that the tokenizer puts around a text\n"
    "                   --format text|jsonl   of inputs whose names do not say it\n"
    "                   --on-error stop|skip  a line that cannot be read (default stop)\n"
    "                   --threads N      default: one for each core\n"
    "                   --save-interval SECONDS  of work that a crash may cost (default 30)\n"
    "                   --check PREFIX   instead: compare every byte with its checksum\n"
    "  generate FOLDER   what a model says after a prompt: of a checkpoint, a run's folder of them, or\n"
    "                 any folder of a model; takes train's options, such as --mesh and --dtype\n"
    "                   --prompt TEXT    or --prompt-ids 1,2,3, which prints ids as well\n"
    "                   --max-new-tokens N   default 64; it stops at the model's eos before\n"
    "                   --ignore-eos     it does not\n"
    "                   --temperature X  of the draw (default 0: always the likeliest token)\n"
    "                   --top-p X        draw from the likeliest tokens that together have this\n"
    "                                    probability (default 1: from all)\n"
    "                   --seed N         of the draw (default 0)\n"
    "                   --tokenizer PATH instead of the folder's; bytes: each byte is a token\n"
    "  print-config   the effective values, and where each came from; takes train's options\n"
    "  help           this text and every option; with --model NAME:SIZE those of that model\n"
    "  --version      the version of moesh and of the LibTorch that it was built with\n"
    "\n"
    "Options: --config FILE, --section.key=value, and the short forms --mesh, --model, --steps,\n"
    "--dtype, --device, --max-minutes, --quiet. Every command takes --log-level debug, info, warn,\n"
    "error or off.\n"
    "\n"
    "  moesh train --model deepseek_v3:debug --mesh dp_shard=2,tp=2,ep=4 --steps 100\n"
    "  moesh verify --model deepseek_v3:tiny --mesh tp=2,ep=2 --dtype float64\n";

RunSummary run_train(const Args& args) {
  const Config config = load_config(args);
  const RunSummary s = train_in_memory(config);
  if (config.metrics.quiet) return s;
  if (s.num_steps == 0) {  // this process does not hold rank 0, or goes on from the last step
    if (s.first_step > 0)
      std::printf("nothing to do: the checkpoint is of step %lld\n",
                  static_cast<long long>(s.first_step));
    return s;
  }
  std::printf("%s after %s: loss %.4f; first step after %.2f s, then %.3f s a step\n",
              s.interrupted ? "stopped" : "done",
              counted(s.first_step + s.num_steps, "step").c_str(), s.losses.back(),
              s.first_step_seconds, s.step_seconds);
  if (s.entropy) std::printf("the data's entropy, which no model can beat: %.4f\n", *s.entropy);
  if (!s.folder.empty())
    std::printf("metrics: %s/metrics.jsonl; moesh report %s draws them\n", s.folder.c_str(),
                s.folder.c_str());
  return s;
}

// Enough of a model to learn the synthetic language, small enough for eight ranks on a laptop.
const Args kDemoModel = {"--model=deepseek_v3:tiny", "--model.dim=64", "--model.moe_ffn=32",
                         "--mesh=dp_shard=2,cp=2,tp=2,ep=2,etp=2"};
const Args kDemoTraining = {"--steps=300",
                            "--data.batch_size=8",
                            "--data.sequence_length=64",
                            "--optimizer.lr=1e-2",
                            "--lr_scheduler.warmup_steps=20",
                            "--metrics.log_freq=50"};

Args joined(Args a, const Args& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

int run_demo(const Args& args) {
  expect_words(args, 0, "moesh demo (it takes no options; moesh train and moesh verify do)");
  const auto start = std::chrono::steady_clock::now();
  std::printf("Training:\n\n");
  const RunSummary s = run_train(joined(kDemoModel, kDemoTraining));
  if (s.interrupted || s.losses.empty()) return static_cast<int>(ExitCode::stopped);
  std::printf(
      "\nThe same mesh against one rank: loss, logits, every gradient, counts, bias, parameters "
      "after two steps:\n\n");
  std::fflush(stdout);
  const int verified = run_verify(joined(kDemoModel, {"--dtype=float64"}));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto num_last = static_cast<std::ptrdiff_t>(std::min<size_t>(20, s.losses.size()));
  const double last = std::accumulate(s.losses.end() - num_last, s.losses.end(), 0.0) /
                      static_cast<double>(num_last);
  std::printf("\nSummary: loss %.3f -> %.3f (mean of the last %td of %lld steps) on 8 ranks",
              s.losses.front(), last, num_last, static_cast<long long>(s.num_steps));
  if (s.entropy) std::printf(" (floor %.3f)", *s.entropy);
  std::printf("; the mesh %s what one rank computes; %.0f s in all.\n",
              verified == 0 ? "computes" : "DOES NOT compute", seconds);
  return verified;
}

// How much each [[optimizer.group]] matches, of the shapes alone.
std::map<std::string, std::string> group_notes(const Config& config) {
  std::map<std::string, std::string> notes;
  if (config.optimizer.group.empty()) return notes;
  comm::Ledger unused;
  const Mesh mesh(mesh_shape(config), /*rank=*/0,
                  [&](const std::string& name, int rank, const std::vector<int>& members) {
                    return comm::fake_group(name, rank, members, unused);
                  });
  const MeshScope scope(mesh);
  const auto matches = group_matches(*make_model(config, at::kMeta), param_groups(config));
  for (std::size_t i = 0; i < matches.size(); ++i)
    notes[detail::concat("optimizer.group.", i, ".match")] = detail::concat(
        with_commas(matches[i].num_parameters), " parameters in ",
        with_commas(matches[i].num_tensors), matches[i].num_tensors == 1 ? " tensor" : " tensors");
  return notes;
}

int run_named(Args all);

}  // namespace

int run_command(const Args& all) {
  try {
    return run_named(all);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::internal, "LibTorch: " + comm::text_of(std::current_exception()));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::config, "not enough memory for what was asked for");
  }
}

namespace {

// Which lines of the log are shown, as the variable MOESH_LOG says it.
void take_log_level(Args& args) {
  const auto text = take(args, "--log-level");
  if (!text) return;
  const std::optional<LogLevel> level = parse_log_level(*text);
  MOESH_CHECK(level, ErrorKind::config, "--log-level is '", *text,
              "'; it takes debug, info, warn, error or off");
  set_log_level(*level);
}

[[noreturn]] void throw_unknown(const std::string& command) {
  throw Error(
      ErrorKind::config,
      "there is no command '" + command +
          "'; the commands are train, verify, compare, estimate, report, demo, convert, inspect, "
          "tokenize, generate, print-config and help");
}

// Of one command; with the options of a configuration where it takes them.
void print_help_of(const std::string& command, Args args) {
  const std::string usage = usage_of(kUsage, command);
  if (usage.empty()) throw_unknown(command);
  std::printf("%s\nExit codes and all commands: moesh help\n", usage.c_str());
  if (command != "train" && usage.find("train's options") == std::string::npos) return;
  const auto model = take(args, "--model");
  std::printf("\n%s", help_text(load_config(model ? Args{"--model", *model} : Args{})).c_str());
}

int run_named(Args all) {
  take_log_level(all);
  const Args rest(all.begin() + (all.empty() ? 0 : 1), all.end());
  if (all.empty() || all[0] == "help" || all[0] == "--help" || all[0] == "-h") {
    // --model names the one whose keys are shown.
    std::printf("%s\n%s\n%s", kUsage, kExitCodes, help_text(load_config(rest)).c_str());
    return all.empty() ? 2 : 0;
  }
  if (all[0] == "--version") {
    std::printf("moesh %s (torch %s)\n", version().c_str(), torch_version().c_str());
    return 0;
  }
  if (std::find(rest.begin(), rest.end(), "--help") != rest.end()) {
    print_help_of(all[0], rest);
    return 0;
  }
  if (all[0] == "train")
    return static_cast<int>(run_train(rest).interrupted ? ExitCode::stopped : ExitCode::done);
  if (all[0] == "compare") return run_compare(rest);
  if (all[0] == "estimate") return run_estimate(rest);
  if (all[0] == "report") return run_report(rest);
  if (all[0] == "demo") return run_demo(rest);
  if (all[0] == "verify") return run_verify(rest);
  if (all[0] == "convert") return run_convert(rest);
  if (all[0] == "inspect") return run_inspect(rest);
  if (all[0] == "tokenize") return run_tokenize(rest);
  if (all[0] == "generate") return run_generate(rest);
  if (all[0] == "print-config") {
    const Config config = load_config(rest);
    std::printf("%s", print_config(config, group_notes(config)).c_str());
    return 0;
  }
  throw_unknown(all[0]);
}

}  // namespace
}  // namespace moesh::cli
