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
#include "moesh/cli/memory_errors.h"
#include "moesh/cli/train_command.h"
#include "moesh/comm/roll.h"
#include "moesh/config/merge.h"
#include "moesh/train/build.h"
#include "moesh/train/loop.h"

namespace moesh::cli {

using namespace config;
using namespace train;
namespace {

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
  std::fputs(s.trace.c_str(), stdout);
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

int run_demo(const Given& given) {
  given.expect_words(0);
  const auto start = std::chrono::steady_clock::now();
  std::printf("Training:\n\n");
  const RunSummary s = run_train(joined(kDemoModel, kDemoTraining));
  if (s.interrupted || s.losses.empty()) return static_cast<int>(ExitCode::stopped);
  std::printf(
      "\nThe same mesh against one rank: loss, logits, every gradient, counts, bias, parameters "
      "after two steps:\n\n");
  std::fflush(stdout);
  const int verified = run_command(joined(joined({"verify"}, kDemoModel), {"--dtype=float64"}));
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
  const auto matches = group_matches(config);
  for (std::size_t i = 0; i < matches.size(); ++i)
    notes[detail::concat("optimizer.group.", i, ".match")] = detail::concat(
        with_commas(matches[i].num_parameters), " parameters in ",
        with_commas(matches[i].num_tensors), matches[i].num_tensors == 1 ? " tensor" : " tensors");
  return notes;
}

int run_print_config(const Given& given) {
  const Config config = load_config(given.rest());
  std::printf("%s", print_config(config, group_notes(config)).c_str());
  return 0;
}

// All commands, and the options of a configuration; --model names the one whose keys are shown.
int run_help(const Given& given) {
  std::printf("usage: moesh COMMAND [OPTIONS]\n\n");
  for (const Command& c : commands()) std::printf("%s", c.describe().c_str());
  std::printf(
      "  --version      the version of moesh and of the LibTorch that it was built with\n"
      "\n"
      "Options: --config FILE, --section.key=value, and the short forms --mesh, --model, --steps,\n"
      "--dtype, --device, --max-minutes, --quiet. Every command takes --help, and --log-level debug,\n"
      "info, warn, error or off.\n"
      "\n"
      "  moesh train --model deepseek_v3:debug --mesh dp_shard=2,tp=2,ep=4 --steps 100\n"
      "  moesh verify --model deepseek_v3:tiny --mesh tp=2,ep=2 --dtype float64\n"
      "\n%s\n%s",
      kExitCodes, help_text(load_config(given.rest())).c_str());
  return 0;
}

int run_train_command(const Given& given) {
  return static_cast<int>(run_train(given.rest()).interrupted ? ExitCode::stopped : ExitCode::done);
}

// Of one command; with the options of a configuration where it takes them. Of the others --model
// alone is looked at: help is for who does not know them yet.
void print_help_of(const Command& command, const Args& args) {
  std::printf("%s\nExit codes and all commands: moesh help\n", command.describe().c_str());
  if (!command.takes_config) return;
  Args model;
  for (std::size_t i = 0; i < args.size() && model.empty(); ++i)
    if (args[i].starts_with("--model="))
      model = {args[i]};
    else if (args[i] == "--model" && i + 1 < args.size())
      model = {args[i], args[i + 1]};
  std::printf("\n%s", help_text(load_config(model)).c_str());
}

// Which lines of the log are shown, as the variable MOESH_LOG says it.
void use_log_level(const std::string& text) {
  const std::optional<LogLevel> level = parse_log_level(text);
  MOESH_CHECK(level, ErrorKind::config, "--log-level is '", text,
              "'; it takes debug, info, warn, error or off");
  set_log_level(*level);
}

int run_named(const Args& args) {
  const CommandLine line = read_command_line(commands(), args);
  if (line.log_level) use_log_level(*line.log_level);
  if (line.wants_version) {
    std::printf("moesh %s (torch %s)\n", version().c_str(), torch_version().c_str());
    return 0;
  }
  if (!line.command) {
    run_help({});
    return line.wants_help ? 0 : static_cast<int>(ExitCode::usage);
  }
  if (line.wants_help) {
    print_help_of(*line.command, line.given.rest());
    return 0;
  }
  return line.command->run(line.given);
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> all{
      {.name = "train",
       .words = "",
       .help = "train a model; ranks are threads of this process, or MPI's under mpirun, srun",
       .takes_config = true,
       .options = {},
       .run = run_train_command},
      {.name = "verify",
       .words = "",
       .help = "prove that a mesh computes what one rank computes; exit code 0 only if everything "
               "agrees",
       .takes_config = true,
       .options = {{"--steps", "N", "optimizer steps to compare (default 2)"},
                   {"--sweep", "N",
                    "every mesh of up to N ranks, instead of the configured one; "
                    "5-8: of 5 to 8"},
                   {"--sample", "COUNT", "so many of them, drawn"},
                   {"--sample-seed", "N", "of the draw (default 0)"},
                   {"--shard", "I/N", "the I-th of N pieces of what is left, 1/N to N/N"},
                   {"--json", "FILE", "the result as JSON"},
                   {"--dump", "FOLDER",
                    "what was compared, as FOLDER/mesh.safetensors and "
                    "FOLDER/one_rank.safetensors"},
                   {"--golden", "FILE",
                    "instead: what transformers computed "
                    "(tools/record_golden.py) for the checkpoint of "
                    "--checkpoint.initial_load=FOLDER"}},
       .run = run_verify},
      {.name = "compare",
       .words = "A B",
       .help = "two safetensors files, or folders of them, of any framework, name by name; B is "
               "the reference",
       .options = {{"--tolerance", "X", "relative error that is allowed (default: by dtype)"},
                   {"--rename", "P=R",
                    "the name in B of what A calls P (a regular expression); "
                    "may be given several times",
                    true},
                   {"--all", "", "print every tensor, not only those that differ"}},
       .run = run_compare},
      {.name = "estimate",
       .words = "",
       .help = "parameters, memory of a rank and bytes that it sends in a step, without running it",
       .takes_config = true,
       .options = {{"--cluster", "C",
                    "seconds of a step on it: h100x8:256 are 256 nodes of 8 "
                    "H100, and a TOML file describes any"},
                   {"--schedule", "[FILE.svg]", "with --cluster: what each rank of pp does when"},
                   {"--search", "[N]",
                    "the best meshes of N ranks that fit, those that send the "
                    "fewest bytes a token first; degrees that are set stay as "
                    "they are; with --cluster the fastest of all its GPUs"},
                   {"--memory", "SIZE", "what a rank has, as in 80GiB"},
                   {"--json", "FILE", "the result as JSON"}},
       .run = run_estimate},
      {.name = "report",
       .words = "RUN...",
       .help = "the runs of these folders (metrics.folder) as one HTML file, over each other; a "
               "FILE.json is the result of verify --json",
       .options = {{"--out", "FILE", "what is written (default report.html)"},
                   {"--serve", "PORT",
                    "instead: the page on http://127.0.0.1:PORT, which follows "
                    "runs that are still training"}},
       .run = run_report},
      {.name = "demo",
       .words = "",
       .help = "train a small DeepSeek-V3 on eight ranks of this process, then verify that very "
               "mesh (this is `make run`)",
       .options = {},
       .run = run_demo,
       .note = "(it takes no options; moesh train and moesh verify do)"},
      {.name = "convert",
       .words = "FROM TO",
       .help = "a folder of a model (Hugging Face or moesh) as another",
       .options = {{"--layout", "per_expert|stacked", "how routed experts are laid out"},
                   {"--dtype", "float32|bfloat16|...", "of the weights"}},
       .run = run_convert},
      {.name = "inspect",
       .words = "FOLDER",
       .help = "what is in a checkpoint, or in any folder of a model",
       .options = {{"--check", "",
                    "compare every byte with its checksum; exit code 0 only if all "
                    "is well"}},
       .run = run_inspect},
      {.name = "tokenize",
       .words = "INPUT...",
       .help = "texts (*.txt, *.jsonl, also .gz and .zst; folders, globs, -) as PREFIX.bin and "
               "PREFIX.idx; run again, it goes on where it stopped",
       .options = {{"--tokenizer", "PATH", "a tokenizer.json, or its folder"},
                   {"--out", "PREFIX", "what is written"},
                   {"--field", "NAME", "of a JSONL object that holds the text (default text)"},
                   {"--append-eod", "", "close documents with the eos_token of the folder"},
                   {"--eod", "TOKEN", "close documents with this token"},
                   {"--with-template", "", "add the tokens that the tokenizer puts around a text"},
                   {"--format", "text|jsonl", "of inputs whose names do not say it"},
                   {"--on-error", "stop|skip", "a line that cannot be read (default stop)"},
                   {"--threads", "N", "default: one for each core"},
                   {"--save-interval", "SECONDS", "of work that a crash may cost (default 30)"},
                   {"--check", "PREFIX", "instead: compare every byte with its checksum"}},
       .run = run_tokenize},
      {.name = "generate",
       .words = "FOLDER",
       .help = "what a model says after a prompt: of a checkpoint, a run's folder of them, or any "
               "folder of a model",
       .takes_config = true,
       .options = {{"--prompt", "TEXT", "or --prompt-ids"},
                   {"--prompt-ids", "1,2,3", "which prints ids as well"},
                   {"--max-new-tokens", "N", "default 64; it stops at the model's eos before"},
                   {"--ignore-eos", "", "it does not"},
                   {"--temperature", "X", "of the draw (default 0: always the likeliest token)"},
                   {"--top-p", "X",
                    "draw from the likeliest tokens that together have this "
                    "probability (default 1: from all)"},
                   {"--seed", "N", "of the draw (default 0)"},
                   {"--tokenizer", "PATH", "instead of the folder's; bytes: each byte is a token"}},
       .run = run_generate},
      {.name = "print-config",
       .words = "",
       .help = "the effective values, and where each came from",
       .takes_config = true,
       .options = {},
       .run = run_print_config},
      {.name = "help",
       .words = "",
       .help = "this text and every option; with --model NAME:SIZE those of that model",
       .takes_config = true,
       .options = {},
       .run = run_help},
  };
  return all;
}

int run_command(const Args& args) {
  try {
    return run_named(args);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::internal, "LibTorch: " + comm::text_of(std::current_exception()));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::config, "not enough memory for what was asked for");
  }
}

}  // namespace moesh::cli
