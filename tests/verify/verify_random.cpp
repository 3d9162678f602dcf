// Random runs on random meshes against one rank: model, size, dtype, mesh, schedule, options and
// keys of the model are drawn.
//   verify_random --count 5000 --seed 1     prints what does not hold as a command of moesh

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/config/options.h"
#include "moesh/train/build.h"
#include "moesh/verify/verify_all.h"

using namespace moesh;
using namespace moesh::verify;
namespace {

using Args = std::vector<std::string>;

// The random numbers of one case, one after the other.
class Draw {
 public:
  Draw(std::uint64_t seed, std::uint64_t number)
      : random_(seed, "case " + std::to_string(number)) {}
  std::size_t below(std::size_t bound) { return random_.below(next_++, bound); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class List>
  auto one_of(const List& list) {
    return list[below(list.size())];
  }

 private:
  Random random_;
  std::uint64_t next_ = 0;
};

std::string text_of(const config::Value& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text ? *text : formats::to_toml(value);
}

// What an option or a key may be besides its value; the rules of the configuration refuse some.
std::vector<std::string> other_values(const config::Value& value,
                                      const std::vector<std::string>& choices = {}) {
  if (!choices.empty()) return choices;
  if (std::holds_alternative<bool>(value)) return {"true", "false"};
  std::vector<std::string> all;
  if (const auto* whole = std::get_if<std::int64_t>(&value))
    for (const std::int64_t n : {std::int64_t{1}, *whole - 1, *whole / 2, *whole + 1, *whole * 2})
      all.push_back(std::to_string(n));
  if (const auto* real = std::get_if<double>(&value))
    for (const double x : {*real / 2, *real * 2, *real == 0 ? 0.01 : 0.0})
      all.push_back(formats::to_toml(x));
  return all;
}

// What is drawn elsewhere, needs a file or a GPU, or is no business of a step.
bool is_drawn(const config::Option& o) {
  static const std::set<std::string> others{"training.dtype", "training.device", "kernels.gpu",
                                            "kernels.graph",  "data.path",       "data.kind",
                                            "data.packing",   "data.shuffle"};
  return o.effect != config::Effect::output && !others.contains(o.name) && o.section() != "model" &&
         o.section() != "checkpoint" && o.section() != "debug" && !o.name.ends_with("_degree") &&
         o.name != "parallelism.pipeline_parallel_schedule";
}

// A text in files, so that data come from them.
Args data_of_files(Draw& draw, const std::filesystem::path& folder) {
  Args args{"--model.vocab_size=257"};
  const bool is_jsonl = draw.one_in(2);
  args.push_back("--data.path=" + (folder / (is_jsonl ? "corpus.jsonl" : "corpus.txt")).string());
  if (is_jsonl && draw.one_in(2)) args.emplace_back("--data.packing=best_fit");
  if (draw.one_in(2)) args.emplace_back("--data.shuffle=false");
  return args;
}

std::filesystem::path write_files() {
  const auto folder = std::filesystem::temp_directory_path() / "moesh_verify_random";
  std::filesystem::create_directories(folder);
  std::ofstream text(folder / "corpus.txt"), jsonl(folder / "corpus.jsonl");
  for (int i = 0; i < 400; ++i) {
    text << "sentence " << i * i << "\n";
    jsonl << "{\"text\": \"sentence " << i * i << "\"}\n";
  }
  return folder;
}

struct RandomCase {
  Args args;
  VerifyCase c;
  std::string command() const {
    std::string text = "moesh verify --steps " + std::to_string(c.steps);
    for (const std::string& arg : args) text += " '" + arg + "'";
    return text;
  }
};

// The case of these arguments on a mesh, all as a command line says it; the model is made to fit.
RandomCase on_mesh(Args args, const SweepMesh& mesh, int steps) {
  const auto defaults = verify_defaults(steps);
  const Config plain = load_config(args, defaults), fits = fitted(plain, mesh);
  const auto was = model_values(plain), now = model_values(fits);
  for (std::size_t i = 0; i < now.size(); ++i)
    if (was[i] != now[i]) args.push_back("--" + now[i].first + "=" + text_of(now[i].second));
  for (const auto& degree : config::degrees())
    if (const auto size = degree.size(mesh.shape); size > 1)
      args.push_back("--" + degree.option + "=" + std::to_string(size));
  if (mesh.shape.pp > 1)
    args.push_back("--parallelism.pipeline_parallel_schedule=" + mesh.schedule);
  const Config config = load_config(args, defaults);
  return {args, {meshes_of(config, std::nullopt).front(), steps}};
}

// Only the model knows whether QK-clip has something to scale, and which names groups match; and
// whether it is so large that its runs, which are kept to be compared, fill the memory.
void check_model(const Config& config) {
  constexpr std::int64_t kMostParameters = 50'000'000;
  const OneRankScope scope;
  const Config one = one_rank(config);
  const auto model = train::make_model(one, at::kMeta);
  train::make_optimizer(*model, one);
  std::int64_t num_parameters = 0;
  model->each_param(
      [&](const Stored& w, bool) { num_parameters += c10::multiply_integers(w.spec.shape); });
  MOESH_CHECK(num_parameters <= kMostParameters, ErrorKind::config, num_parameters,
              " parameters are more than a random case has");
}

RandomCase draw_case(std::uint64_t seed, std::uint64_t number,
                     const std::filesystem::path& folder) {
  Draw draw(seed, number);
  const std::string name = draw.one_of(models::model_names());
  const bool takes_cp = models::facts(models::built_in(name, "tiny")).takes_cp();
  const std::vector<SweepMesh> meshes =
      Sweep{.least_ranks = 1, .most_ranks = 8, .with_cp = takes_cp}.meshes();
  const SweepMesh mesh = draw.one_of(meshes);
  const int steps = draw.one_in(8) ? 1 : draw.one_in(8) ? 3 : 2;
  const bool is_debug = draw.one_in(32);
  const auto dtypes = config::find_option("training.dtype")->rule.choices;
  RandomCase found = on_mesh(
      {"--model=" + name + (is_debug ? ":debug" : ":tiny"), "--dtype=" + draw.one_of(dtypes)}, mesh,
      steps);
  Args chosen{found.args[0], found.args[1]};
  // What the rules refuse beside the others is left out again.
  const auto add = [&](const Args& more) {
    Args args = chosen;
    args.insert(args.end(), more.begin(), more.end());
    try {
      RandomCase next = on_mesh(args, mesh, steps);
      check_model(next.c.config);
      found = std::move(next);
      chosen = args;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::config) throw;
    }
  };
  const auto add_value = [&](const std::string& name, const std::vector<std::string>& values) {
    if (!values.empty()) add({"--" + name + "=" + draw.one_of(values)});
  };
  if (draw.one_in(10)) add(data_of_files(draw, folder));
  add({"--data.sequence_length=" + std::to_string(1 + draw.below(10)),
       "--data.batch_size=" + std::to_string(1 + draw.below(3))});
  if (draw.one_in(6)) {  // tiles that tiny sizes are multiples of
    add({"--training.float8_tile=" + draw.one_of(Args{"2", "4"}), "--training.float8=blockwise"});
    if (draw.one_in(2)) add({"--training.float8_dense=blockwise"});
    if (draw.one_in(2)) add({"--training.float8_rows=blockwise"});
  }
  for (const auto& o : config::options())
    if (is_drawn(o) && draw.one_in(6))
      add_value(o.name, other_values(o.default_in(found.c.config), o.rule.choices));
  for (const auto& [name, value] : model_values(found.c.config))
    if (name != "model.vocab_size" && draw.one_in(is_debug ? 20 : 8))
      add_value(name, other_values(value));
  if (draw.one_in(6))
    add({"--optimizer.group.0.match=" + draw.one_of(Args{"norm", "experts", "o_proj", "embed"}),
         "--optimizer.group.0.lr_scale=0.5", "--optimizer.group.0.weight_decay=0.3"});
  return found;
}

// The cases of a dtype and a size.
struct Row {
  int num_cases = 0, num_held = 0;
  double worst = 0;
  std::string worst_tensor = {};
};

}  // namespace

int main(int argc, char** argv) try {
  int first = 0, count = 100;
  std::uint64_t seed = 1;
  bool is_verbose = false;
  CLI::App app("Compares random runs on random meshes with one rank");
  app.add_option("--count", count, "how many")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--seed", seed, "random seed")->capture_default_str();
  app.add_option("--first", first, "number of the first case, to repeat one or to cut the work")
      ->capture_default_str();
  app.add_flag("--verbose", is_verbose, "print every case");
  CLI11_PARSE(app, argc, argv);

  const auto folder = write_files();
  const auto start = std::chrono::steady_clock::now();
  std::map<std::string, Row> rows;
  int num_failed = 0;
  for (int number = first; number < first + count; ++number) {
    const RandomCase drawn = draw_case(seed, static_cast<std::uint64_t>(number), folder);
    const Config& config = drawn.c.config;
    VerifyReport report;
    try {
      VerifyReference reference = run_reference(drawn.c);
      report = verify_closely(drawn.c, reference);
    } catch (const std::exception& e) {
      report.error = e.what();
    }
    Row& row = rows[config.model.size + " " + config.training.dtype];
    ++row.num_cases, row.num_held += report.holds(), num_failed += !report.holds();
    if (report.worst_ratio > row.worst)
      row.worst = report.worst_ratio, row.worst_tensor = report.worst_tensor;
    if (is_verbose || !report.holds())
      std::printf("%d: %.2g %s: %s\n  %s\n", number, report.worst_ratio,
                  report.worst_tensor.c_str(), drawn.command().c_str(),
                  report.describe(mesh_shape(config)).c_str());
    std::fflush(stdout);
  }
  for (const auto& [name, row] : rows)
    std::printf("%-16s %5d of %5d hold, largest error %.2g of what is allowed (%s)\n", name.c_str(),
                row.num_held, row.num_cases, row.worst, row.worst_tensor.c_str());
  std::printf("%d of %d cases hold, seed %llu, %.0f s\n", count - num_failed, count,
              static_cast<unsigned long long>(seed),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return num_failed == 0 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "verify_random: %s\n", e.what());
  return 2;
}
