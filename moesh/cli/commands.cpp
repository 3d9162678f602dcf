#include "moesh/cli/commands.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/base/version.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/config/merge.h"
#include "moesh/train/build.h"
#include "moesh/train/loop.h"

namespace moesh::cli {

using namespace config;
using namespace train;
namespace {

constexpr const char* kHelp = "help";

RunSummary run_train(const Args& args) {
  const Config config = load_config(args);
  std::signal(SIGPIPE, SIG_IGN);  // a console that is gone ends printing, not training
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
    std::printf("metrics: %s/metrics.jsonl; moesh report %s draws them\n",
                printable(s.folder).c_str(), printable(s.folder).c_str());
  std::fputs(for_terminal(s.trace).c_str(), stdout);
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

int run_demo(const Arguments& given) {
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
  const auto num_last = static_cast<std::ptrdiff_t>(std::min<size_t>(20, s.losses.size()));
  const double last = std::accumulate(s.losses.end() - num_last, s.losses.end(), 0.0) /
                      static_cast<double>(num_last);
  std::printf("\nSummary: loss %.3f -> %.3f (mean of the last %td of %lld steps) on 8 ranks",
              s.losses.front(), last, num_last, static_cast<long long>(s.num_steps));
  if (s.entropy) std::printf(" (floor %.3f)", *s.entropy);
  std::printf("; the mesh %s what one rank computes; %.0f s in all.\n",
              verified == 0 ? "computes" : "DOES NOT compute", seconds_since(start));
  return verified;
}

// How much each [[optimizer.group]] and training.freeze match, from shapes only.
std::map<std::string, std::string> match_notes(const Config& config) {
  std::map<std::string, std::string> notes;
  const auto note = [](std::int64_t num_parameters, std::int64_t num_tensors) {
    return detail::concat(with_commas(num_parameters), " parameters in ", with_commas(num_tensors),
                          num_tensors == 1 ? " tensor" : " tensors");
  };
  const auto matches = group_matches(config);
  for (std::size_t i = 0; i < matches.size(); ++i)
    notes[detail::concat("optimizer.group.", i, ".match")] =
        note(matches[i].num_parameters, matches[i].num_tensors);
  const auto of_freeze = train::frozen(config);
  if (!of_freeze.names.empty())
    notes["training.freeze"] =
        note(of_freeze.num_parameters, static_cast<std::int64_t>(of_freeze.names.size()));
  if (config.lora.base != "compute")
    notes["lora.base"] = train::describe_quantization(train::quantization(config));
  return notes;
}

int run_print_config(const Arguments& given) {
  const Config config = load_config(given.rest());
  std::printf("%s", for_terminal(print_config(config, match_notes(config))).c_str());
  return 0;
}

// All commands, on one screen.
void print_commands() {
  std::printf("usage: moesh COMMAND [OPTIONS]\n\n");
  for (const Command& c : commands()) std::printf("%s", c.line().c_str());
  std::printf(
      "\n"
      "moesh help COMMAND, or moesh COMMAND --help, lists the options of a command. Every command takes\n"
      "--log-level debug, info, warn, error or off. moesh --version prints the version.\n"
      "\n"
      "  moesh train --model deepseek_v3:debug --mesh dp_shard=2,tp=2,ep=4 --steps 100\n"
      "  moesh verify --model deepseek_v3:tiny --mesh tp=2,ep=2 --dtype float64\n"
      "\n%s",
      kExitCodes);
}

// One command; with the options of a configuration where it takes them. Of these only --model is
// looked at, which says whose keys are listed: a user who asks for help does not know the others
// yet.
void print_help_of(const Command& command, const Args& args) {
  std::printf("%s", command.describe().c_str());
  if (!command.takes_config || command.name == kHelp) return;
  Args model;
  for (std::size_t i = 0; i < args.size() && model.empty(); ++i)
    if (args[i].starts_with("--model="))
      model = {args[i]};
    else if (args[i] == "--model" && i + 1 < args.size())
      model = {args[i], args[i + 1]};
  std::printf("\n%s", help_text(load_config(model)).c_str());
}

int run_help(const Arguments& given) {
  Args args = given.rest();
  if (args.empty()) {
    print_commands();
    return 0;
  }
  MOESH_CHECK(!args[0].starts_with("-"), ErrorKind::config, "help has the option '", args[0],
              "' and no command; name one, as in moesh help train --model gpt_oss:tiny");
  const Command& command = find_command(commands(), args[0]);
  args.erase(args.begin());
  print_help_of(command, args);
  return 0;
}

int run_train_command(const Arguments& given) {
  return static_cast<int>(run_train(given.rest()).interrupted ? ExitCode::stopped : ExitCode::done);
}

// Which lines of the log are shown, as the variable MOESH_LOG says it.
void use_log_level(const std::string& text) {
  const std::optional<LogLevel> level = parse_log_level(text);
  MOESH_CHECK(level, ErrorKind::config, "--log-level is '", text,
              "'; it takes debug, info, warn, error or off");
  set_log_level(*level);
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> all{
      {.name = "train",
       .words = "",
       .help = "train a model on a mesh of ranks",
       .takes_config = true,
       .options = {},
       .run = run_train_command,
       .details = "Ranks are threads of this process; under mpirun, srun and torchrun they are "
                  "spread over its processes."},
      {.name = "verify",
       .words = "",
       .help = "prove that a mesh computes what one rank computes",
       .takes_config = true,
       .options = {{"--steps", "N", "number of optimizer steps to compare (default 2)"},
                   {"--sweep", "N",
                    "verify every mesh of up to N ranks, instead of the configured one; 5-8: every "
                    "mesh of 5 to 8 ranks"},
                   {"--sample", "COUNT", "verify only COUNT of these meshes, chosen at random"},
                   {"--sample-seed", "N", "random seed of --sample (default 0)"},
                   {"--shard", "I/N",
                    "verify the I-th of N parts of these meshes, from 1/N to N/N"},
                   {"--json", "FILE", "write the result as JSON"},
                   {"--dump", "FOLDER",
                    "write the compared tensors, as FOLDER/mesh.safetensors and "
                    "FOLDER/one_rank.safetensors"},
                   {"--golden", "FILE",
                    "compare with what transformers computed (recorded by tools/record_golden.py) "
                    "for the weights of --model hf:FOLDER"}},
       .run = run_verify,
       .details = "It runs the first steps of the training run on the mesh and on one rank, and "
                  "compares every tensor. The exit code is 0 only if all of them agree. It takes "
                  "the options of train."},
      {.name = "compare",
       .words = "A B",
       .help = "compare two sets of tensors, from any framework",
       .options = {{"--tolerance", "X", "relative error that is allowed (default: by dtype)"},
                   {"--rename", "P=R",
                    "P is a regular expression for names in A, R the name in B; may be given "
                    "several times",
                    true},
                   {"--all", "", "print every tensor, not only those that differ"}},
       .run = run_compare,
       .details = "A and B are safetensors files, or folders of them. B is the reference."},
      {.name = "estimate",
       .words = "",
       .help = "estimate the memory, traffic and time of a run, or find the best mesh for it",
       .takes_config = true,
       .options =
           {{"--cluster", "C",
             "estimate seconds on this cluster: h100x8:256 is 256 nodes of 8 H100; a TOML "
             "file describes any other"},
            {"--schedule", "[FILE.svg]",
             "with --cluster: draw what each rank of the pipeline does, and when"},
            {"--search", "[N]",
             "list the fastest ways to run on N H100, or with --cluster on all of its GPUs; "
             "options that are set are kept"},
            {"--overlap", "",
             "with --cluster and a mesh: the step with each dispatcher, one micro-batch at a "
             "time and two"},
            {"--memory", "SIZE", "memory of a rank that the run must fit into, as in 80GiB"},
            {"--json", "FILE", "write the result as JSON"}},
       .run = run_estimate,
       .details = "Nothing is trained, and neither the ranks nor the device need to exist. It "
                  "takes the options of train."},
      {.name = "report",
       .words = "RUN...",
       .help = "draw the curves of one or more runs as an HTML page",
       .options = {{"--out", "FILE", "page to write (default report.html)"},
                   {"--serve", "PORT",
                    "serve the page on http://127.0.0.1:PORT instead; it follows runs that are "
                    "still training"}},
       .run = run_report,
       .details = "RUN is the folder of a run (metrics.folder), or the result of verify --json."},
      {.name = "demo",
       .words = "",
       .help = "train a small DeepSeek-V3 on eight ranks, then verify that mesh",
       .options = {},
       .run = run_demo,
       .details = "This is what `make run` does. It takes no options; train and verify do."},
      {.name = "convert",
       .words = "FROM TO",
       .help = "convert the folder of a model to another layout or dtype, or add a LoRA adapter",
       .options = {{"--layout", "per_expert|stacked",
                    "layout of the routed experts (default: as they are)"},
                   {"--dtype", "float32|bfloat16|float16|float64",
                    "dtype of the written weights (default: as they are)"},
                   {"--float8", "",
                    "write projections and experts in float8, with a scale for each block of 128 "
                    "x 128, as DeepSeek-V3 is published"},
                   {"--adapter", "FOLDER", "LoRA adapter of PEFT or moesh, with --merge"},
                   {"--merge", "", "add what the adapter adds to the weights themselves"}},
       .run = run_convert,
       .details = "FROM is a checkpoint of moesh or the folder of a Hugging Face model; TO must "
                  "not exist yet."},
      {.name = "inspect",
       .words = "PATH",
       .help = "show what a checkpoint, the folder of a model or a file of tokens contains",
       .options = {{"--check", "",
                    "compare every byte with its checksum; the exit code is 0 only if all agree"},
                   {"--document", "N", "number of the document to print (default 0)"},
                   {"--tokenizer", "PATH",
                    "tokenizer.json to decode tokens with (default: the one they were made with)"}},
       .run = run_inspect,
       .details =
           "For a file of tokens (PREFIX.bin with PREFIX.idx) it prints a document. If there is "
           "a PREFIX.mask, tokens that a model is trained to predict are green on a terminal, and "
           "between [[ and ]] elsewhere."},
      {.name = "tokenize",
       .words = "INPUT...",
       .help = "turn texts, or with Python chats, into files of token ids",
       .options = {{"--tokenizer", "PATH", "tokenizer.json, or the folder that holds it"},
                   {"--out", "PREFIX", "write PREFIX.bin and PREFIX.idx"},
                   {"--field", "NAME",
                    "field of a JSONL object that holds the text (default text)"},
                   {"--append-eod", "", "end each document with the eos_token of the folder"},
                   {"--eod", "TOKEN", "end each document with this token"},
                   {"--with-template", "", "add the tokens that the tokenizer puts around a text"},
                   {"--chats", "FORMAT",
                    "format of chats: auto, messages, prompt_completion, sharegpt, alpaca or none "
                    "(default auto: chats if the first line of JSONL has no text)"},
                   {"--chat-template", "FILE",
                    "template to write chats with, instead of that of the tokenizer's folder"},
                   {"--chat-fields", "A=B,...",
                    "names of fields in this file, as in messages=turns,role=speaker"},
                   {"--template-variable", "NAME=VALUE",
                    "variable of the template, as in enable_thinking=false", /*may_repeat=*/true},
                   {"--roles", "A,B", "roles whose turns are trained on (default assistant)"},
                   {"--no-end-of-turn", "", "do not train on the tokens that end a turn"},
                   {"--format", "text|jsonl", "format of inputs whose names do not say it"},
                   {"--on-error", "stop|skip",
                    "stop at a line that cannot be read, or skip it (default stop)"},
                   {"--threads", "N", "number of threads (default: one for each core)"},
                   {"--save-interval", "SECONDS", "most work that a crash may cost (default 30)"},
                   {"--check", "PREFIX",
                    "compare every byte of the files of PREFIX with its checksum instead"}},
       .run = run_tokenize,
       .details =
           "INPUT is a *.txt or *.jsonl file, also packed as .gz or .zst, a folder, a glob, "
           "or - for standard input. A run that was stopped continues where it was. Chats need "
           "Python: `python -m moesh tokenize` takes the same arguments and writes "
           "PREFIX.mask as well (docs/chats.md)."},
      {.name = "generate",
       .words = "FOLDER",
       .help = "continue a prompt with a model",
       .takes_config = true,
       .options = {{"--prompt", "TEXT", "text to continue"},
                   {"--prompt-ids", "1,2,3", "token ids to continue; the answer is ids too"},
                   {"--max-new-tokens", "N", "largest number of new tokens (default 64)"},
                   {"--ignore-eos", "", "do not stop at the model's end token"},
                   {"--temperature", "X",
                    "sampling temperature (default 0: always the likeliest token)"},
                   {"--top-p", "X",
                    "sample from the likeliest tokens whose probabilities add up to X (default 1: "
                    "from all)"},
                   {"--seed", "N", "random seed of the sampling (default 0)"},
                   {"--tokenizer", "PATH",
                    "tokenizer.json to use instead of the folder's; bytes: each byte is a token"}},
       .run = run_generate,
       .details = "FOLDER is a checkpoint, a folder of checkpoints (the newest is used), or the "
                  "folder of a Hugging Face model. It takes the options of train, such as --mesh."},
      {.name = "print-config",
       .words = "",
       .help = "print every option with its value and where the value came from",
       .takes_config = true,
       .options = {},
       .run = run_print_config,
       .details = "It takes the options of train; --config reads its output."},
      {.name = kHelp,
       .words = "[COMMAND]",
       .help = "list the commands, or the options of one command",
       .takes_config = true,
       .options = {},
       .run = run_help,
       .details = "moesh help train --model gpt_oss:tiny lists the keys of that model."},
  };
  return all;
}

int run_command(const Args& args) {
  const CommandLine line = read_command_line(commands(), args);
  if (line.log_level) use_log_level(*line.log_level);
  if (line.wants_version) {
    std::printf("moesh %s (torch %s)\n", version().c_str(), torch_version().c_str());
    return 0;
  }
  if (!line.command) {
    print_commands();
    return line.wants_help ? 0 : static_cast<int>(ExitCode::usage);
  }
  if (line.wants_help) {
    print_help_of(*line.command, line.given.rest());
    return 0;
  }
  return line.command->run(line.given);
}

}  // namespace moesh::cli
