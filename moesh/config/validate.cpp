// The rules of a configuration, on its final values.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>

#include "moesh/base/text.h"
#include "moesh/config/config.h"
#include "moesh/config/options.h"
#include "moesh/formats/file.h"
#include "moesh/models/disk.h"
#include "moesh/pipeline/schedule.h"
#include "moesh/pipeline/stage_plan.h"

namespace moesh::config {
namespace {

using models::divisors;

constexpr const char* kPipeline = "parallelism.pipeline_parallel_degree";
constexpr const char* kSchedule = "parallelism.pipeline_parallel_schedule";
constexpr const char* kLayersPerStage = "parallelism.pipeline_parallel_layers_per_stage";
constexpr const char* kReplicate = "parallelism.data_parallel_replicate_degree";
constexpr const char* kShard = "parallelism.data_parallel_shard_degree";
constexpr const char* kContext = "parallelism.context_parallel_degree";
constexpr const char* kTensor = "parallelism.tensor_parallel_degree";
constexpr const char* kExperts = "parallelism.expert_parallel_degree";
constexpr const char* kExpertTensor = "parallelism.expert_tensor_parallel_degree";

// Every degree that is not 1, with its origin: the reader sees which one to change.
std::string describe_degrees(const Config& c) {
  std::string text;
  for (const Degree& d : degrees())
    if (std::get<std::int64_t>(find_option(d.option)->get(c)) != 1)
      text += (text.empty() ? "" : ", ") + describe_option(c, d.option);
  return text.empty() ? "every degree of [parallelism] is 1" : text;
}

// The sizes of nodes with which every node has the same number of ep ranks.
std::vector<std::string> sharing_sizes(const Config& c) {
  std::vector<std::string> all;
  MeshShape shape = mesh_shape(c);
  for (const std::int64_t n : divisors(shape.ep * shape.etp)) {
    shape.ranks_per_node = static_cast<int>(n);
    if (shape.num_nodes_of_ep() > 0) all.push_back(std::to_string(n));
  }
  return all;
}

void check_mesh(const Config& c, int world_size) {
  const ParallelismSection& p = c.parallelism;
  // Before any product is taken in integers.
  double dense_ranks = 1, expert_ranks = 1;
  for (const Degree& d : degrees())
    (d.axis == "ep" || d.axis == "etp" ? expert_ranks : dense_ranks) *=
        static_cast<double>(std::get<std::int64_t>(find_option(d.option)->get(c)));
  MOESH_CHECK(std::max(dense_ranks, expert_ranks) <= std::numeric_limits<int>::max(),
              ErrorKind::config, describe_degrees(c), ": a mesh of ",
              std::max(dense_ranks, expert_ranks), " ranks; choose degrees with a smaller product");

  const std::int64_t dense =
      p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree;
  const std::int64_t experts = p.expert_parallel_degree * p.expert_tensor_parallel_degree;
  if (dense % experts != 0) {
    // Which value to offer depends on which of the two can be fixed without the other.
    const bool keep_etp = dense % p.expert_tensor_parallel_degree == 0;
    const std::int64_t kept = keep_etp ? p.expert_tensor_parallel_degree : 1;
    throw Error(
        ErrorKind::config,
        detail::concat(describe_option(c, kExperts), ", ", describe_option(c, kExpertTensor),
                       ": their product ", experts,
                       " does not divide dp_shard * cp * tp = ", p.data_parallel_shard_degree,
                       " * ", p.context_parallel_degree, " * ", p.tensor_parallel_degree, " = ",
                       dense, ", and the experts use the same ranks; with ", kExpertTensor, " = ",
                       kept, " set ", kExperts, " to one of ", divisors(dense / kept)));
  }
  const MeshShape shape = mesh_shape(c);
  if (world_size == 0 || shape.num_ranks() == world_size) return;
  // The shards can make up the difference where the experts still fit.
  const std::int64_t others = shape.num_ranks() / shape.dp_shard;
  const bool shards_can =
      world_size % others == 0 && world_size / shape.pp / shape.dp_replicate % experts == 0;
  throw Error(
      ErrorKind::config,
      detail::concat(describe_degrees(c), ": a mesh of ", counted(shape.num_ranks(), "rank"),
                     ", and ", world_size == 1 ? "there is " : "there are ", world_size, "; start ",
                     counted(shape.num_ranks(), "rank"), ", or ",
                     shards_can ? detail::concat("set ", kShard, " to ", world_size / others)
                                : detail::concat("choose degrees whose product is ", world_size)));
}

// `working` is a number that all values which work divide.
void check_divides(const Config& c, const char* option, std::int64_t degree, const char* key,
                   std::int64_t count, std::int64_t working) {
  MOESH_CHECK(count % degree == 0, ErrorKind::config, describe_option(c, option), ", and ",
              describe_option(c, std::string("model.") + key),
              ", which is not divisible by it; set ", option, " to one of ", divisors(working));
}

void check_model(const Config& c, const models::ModelFacts& facts) {
  MOESH_CHECK(models::name(c.model.architecture) == c.model.name, "model.name is ", c.model.name,
              ", and the architecture is that of ", models::name(c.model.architecture),
              "; make a Config by merged() and changed()");
  if (const auto broken = models::broken_rule(c.model.architecture)) {
    std::string text;
    for (const std::string& key : broken->keys)
      text += (text.empty() ? "" : ", and ") + describe_option(c, "model." + key);
    throw Error(ErrorKind::config, text + broken->cure);
  }
  const ParallelismSection& p = c.parallelism;
  const std::int64_t heads =
      std::gcd(std::gcd(facts.num_heads, facts.num_kv_heads), facts.num_key_heads);
  check_divides(c, kTensor, p.tensor_parallel_degree, "num_heads", facts.num_heads, heads);
  check_divides(c, kTensor, p.tensor_parallel_degree, "num_kv_heads", facts.num_kv_heads, heads);
  check_divides(c, kTensor, p.tensor_parallel_degree, "num_key_heads", facts.num_key_heads, heads);
  MOESH_CHECK(
      facts.takes_cp() || p.context_parallel_degree == 1, ErrorKind::config,
      describe_option(c, kContext), ", and ", describe_option(c, "model.name"),
      ", whose layers carry a state from token to token: ranks cannot split a sequence; set ",
      kContext, " to 1, and use ", kTensor, " instead");
  const std::int64_t ranks =
      p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree;
  check_divides(c, kExperts, p.expert_parallel_degree, "num_experts", facts.num_experts,
                std::gcd(facts.num_experts, ranks / p.expert_tensor_parallel_degree));
  MOESH_CHECK(facts.max_sequence == 0 || c.data.sequence_length <= facts.max_sequence,
              ErrorKind::config, describe_option(c, "data.sequence_length"), ", and ",
              describe_option(c, "model.max_sequence"), "; set data.sequence_length to ",
              facts.max_sequence, " or less");
}

// After the model: its layers make up the stages.
void check_pipeline(const Config& c, const models::ModelFacts& facts) {
  const ParallelismSection& p = c.parallelism;
  const std::int64_t degree = p.pipeline_parallel_degree;
  const std::string& layers = p.pipeline_parallel_layers_per_stage;
  pipeline::StagePlan plan;
  try {
    if (!layers.empty()) plan = pipeline::given_plan(layers, static_cast<int>(facts.num_layers));
  } catch (const Error& e) {
    throw Error(ErrorKind::config,
                detail::concat(describe_option(c, kLayersPerStage), ": ", e.what()));
  }
  if (degree == 1) return;
  const int wanted = pipeline::stages_of_a_rank(p.pipeline_parallel_schedule);
  if (layers.empty()) {
    const std::int64_t each = wanted == 0 ? pipeline::kStagesOfARank : wanted,
                       most = facts.num_layers / each;
    MOESH_CHECK(facts.num_layers >= degree * each, ErrorKind::config, describe_option(c, kPipeline),
                ", with ", each, each == 1 ? " stage" : " stages", " on each rank (",
                describe_option(c, kSchedule), "), and ", describe_option(c, "model.num_layers"),
                "; every stage has at least one layer: set ", kPipeline, " to ",
                std::max<std::int64_t>(1, most), most > 1 ? " or less" : "",
                facts.num_layers >= degree ? ", or a schedule with one stage a rank" : "",
                ", or model.num_layers to ", degree * each, " or more");
    return;
  }
  const auto num_stages = static_cast<std::int64_t>(plan.size());
  MOESH_CHECK(num_stages % degree == 0, ErrorKind::config, describe_option(c, kLayersPerStage),
              ", which makes ", num_stages, " stages, and ", describe_option(c, kPipeline),
              "; every rank needs the same number: set ", kPipeline, " to one of ",
              divisors(num_stages));
  const std::int64_t each = num_stages / degree;
  MOESH_CHECK(wanted == 0 ? each >= 2 : each == wanted, ErrorKind::config,
              describe_option(c, kLayersPerStage), ", which makes ", num_stages, " stages, ", each,
              " on each rank (", describe_option(c, kPipeline), "), and ",
              describe_option(c, kSchedule), ", which takes ",
              wanted == 0   ? "two or more"
              : wanted == 1 ? "one"
                            : "two",
              " on each; write as many numbers, or choose another schedule");
}

// A tile of float8 never crosses ranks, so that a mesh has the codes of one rank. Experts and rows
// that travel have whole tiles only; in others the last tile of a dimension that no rank cuts may
// be short.
void check_float8(const Config& c) {
  const kernels::Float8 tiles = float8(c);
  if (!tiles.any()) return;
  struct Features {
    std::string what;  // "model.moe_ffn is 24 (...)"
    std::string key;   // by which it can be changed
    const char* degree;
    std::int64_t size, parts;
  };
  std::vector<Features> all;
  if (tiles.rows > 0)
    all.push_back(
        {describe_option(c, "training.float8_rows") + ", and " + describe_option(c, "model.dim"),
         "model.dim", kExpertTensor,
         std::visit([](const auto& m) { return m.dim; }, c.model.architecture), 1});
  const OneRankScope scope;
  models::make_model(c.model.architecture, {.device = at::kMeta, .float8 = tiles})
      ->each_param([&](const Stored& w, bool) {
        const auto num_dims = static_cast<std::int64_t>(w.spec.shape.size());
        const bool is_expert = contains(w.cutting, ep);
        const char* degree = is_expert ? kExpertTensor : kTensor;
        for (std::int64_t dim = num_dims - 2; w.spec.float8_tile > 0 && dim < num_dims; ++dim) {
          const std::int64_t size = w.spec.shape[static_cast<std::size_t>(dim)];
          const bool is_cut =
              std::ranges::any_of(w.spec.cuts, [&](const auto& cut) { return cut.second == dim; });
          const std::int64_t parts =
              is_cut ? std::get<std::int64_t>(find_option(degree)->get(c)) : 1;
          const std::string key = is_cut ? "model.moe_ffn" : "model.dim";
          if (is_expert)
            all.push_back({describe_option(c, key), key, degree, size, parts});
          else if (parts > 1)
            all.push_back({detail::concat("dimension ", dim, " of ", w.spec.name, " is ", size),
                           "that size", degree, size, parts});
        }
      });
  const std::int64_t tile = c.training.float8_tile;
  std::int64_t working = tile;
  for (const Features& f : all)
    working = std::gcd(working, f.size % f.parts ? 1 : f.size / f.parts);
  for (const Features& f : all) {
    const std::int64_t whole = tile * f.parts, below = f.size / whole * whole;
    MOESH_CHECK(f.size % whole == 0, ErrorKind::config, describe_option(c, "training.float8_tile"),
                ", ", f.parts > 1 ? describe_option(c, f.degree) + ", " : "", "and ", f.what,
                ", which is not a number of whole tiles on each rank; set training.float8_tile to ",
                working, " or ", f.key, " to ", below > 0 ? detail::concat(below, " or ") : "",
                below + whole, f.parts > 1 ? detail::concat(", or lower ", f.degree) : "");
  }
}

// A checkpoint is also a model for others: what they compute with its config.json must be what was
// trained. Better now than at the first save.
void check_export(const Config& c, const models::ModelFacts& facts) {
  if (!c.checkpoint.enable) return;
  if (const auto lost = models::lost_key(c.model.architecture))
    throw Error(ErrorKind::config,
                detail::concat(describe_option(c, "model." + lost->name), ", and ",
                               describe_option(c, "checkpoint.enable"), ", but a config.json of ",
                               c.model.name, " has no place for it; set model.", lost->name, " to ",
                               lost->read_back, ", or checkpoint.enable to false"));
  MOESH_CHECK(
      score_before_experts(c).value_or(facts.score_before_experts) == facts.score_before_experts,
      ErrorKind::config, describe_option(c, "moe.score_before_experts"), ", and ",
      describe_option(c, "checkpoint.enable"), ", but other programs that read a config.json of ",
      c.model.name, " multiply what ", facts.score_before_experts ? "goes into" : "comes out of",
      " an expert; set moe.score_before_experts to auto, or checkpoint.enable to false");
}

// A file, by the options that name it and its kind.
void check_file(const Config& c, const models::ModelFacts& facts, const std::string& path_option,
                const std::string& path, const std::string& kind_option,
                const std::string& kind_asked) {
  const std::string kind_name = data::resolved_kind(kind_asked, path, kind_option);
  const data::DatasetKind& kind = data::find_kind(kind_name);
  MOESH_CHECK(kind.reads_file || path.empty(), ErrorKind::config, describe_option(c, kind_option),
              ", and ", describe_option(c, path_option), "; leave out the path, or set ",
              kind_option, " to ", joined_by_or(data::dataset_choices(/*reads_file=*/true)));
  MOESH_CHECK(!kind.reads_file || !path.empty(), ErrorKind::config, describe_option(c, kind_option),
              ", and ", describe_option(c, path_option), "; name a file, or set ", kind_option,
              " to ", joined_by_or(data::dataset_choices(/*reads_file=*/false)));
  if (facts.vocab_size == 0) return;
  MOESH_CHECK(kind.reads_file || c.data.synthetic_successors <= facts.vocab_size, ErrorKind::config,
              describe_option(c, "data.synthetic_successors"), ", and ",
              describe_option(c, "model.vocab_size"), "; set data.synthetic_successors to ",
              facts.vocab_size, " or less");
  if (facts.vocab_size >= kind.num_tokens || !c.data.tokenizer.empty()) return;
  const std::string or_synthetic =
      path_option == "data.path" ? ", or leave data.path empty for the synthetic language" : "";
  // A larger model does not help where the name is wrong.
  MOESH_CHECK(formats::exists(path), ErrorKind::config, describe_option(c, path_option),
              ", and there is no such file; name one that is there", or_synthetic);
  throw Error(
      ErrorKind::config,
      detail::concat(describe_option(c, path_option), ", and a file is read as ", kind.num_tokens,
                     " different tokens (bytes, and one that ends a document), but ",
                     describe_option(c, "model.vocab_size"), "; set model.vocab_size to ",
                     kind.num_tokens, " or more, or data.tokenizer to the tokenizer of the model",
                     or_synthetic));
}

// The entries of a list of files: each names one, and no two are called the same.
void check_sources(const Config& c, const models::ModelFacts& facts, const std::string& table,
                   const std::vector<data::SourceOptions>& sources) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::string entry = detail::concat(table, ".", i, "."), path = entry + "path";
    const std::string& name = sources[i].name.empty() ? sources[i].path : sources[i].name;
    MOESH_CHECK(!sources[i].path.empty(), ErrorKind::config, describe_option(c, path),
                "; name a file");
    MOESH_CHECK(names.insert(name).second, ErrorKind::config, describe_option(c, path),
                ", and another entry of ", table, " is called '", name, "' too; set ", entry,
                "name to tell them apart");
    check_file(c, facts, path, sources[i].path, entry + "kind", sources[i].kind);
  }
}

// The files of a run, each by the option that names it.
struct NamedFile {
  std::string option;
  const data::DatasetKind* kind;
};
std::vector<NamedFile> files_of(const Config& c) {
  std::vector<NamedFile> files;
  const auto add = [&](const std::string& option, const std::string& path,
                       const std::string& kind) {
    if (!path.empty()) files.push_back({option, &data::find_kind(data::resolved_kind(kind, path))});
  };
  add("data.path", c.data.path, c.data.kind);
  for (std::size_t i = 0; i < c.data.source.size(); ++i)
    add(detail::concat("data.source.", i, ".path"), c.data.source[i].path, c.data.source[i].kind);
  for (std::size_t i = 0; i < c.validation.source.size(); ++i)
    add(detail::concat("validation.source.", i, ".path"), c.validation.source[i].path,
        c.validation.source[i].kind);
  return files;
}

// Without a tokenizer the bytes of a text are tokens, and mean nothing among the ids of another.
void check_one_language(const Config& c) {
  const auto files = files_of(c);
  const auto is_text = [](const NamedFile& f) { return f.kind->num_tokens > 0; };
  const auto text = std::find_if(files.begin(), files.end(), is_text),
             ids = std::find_if_not(files.begin(), files.end(), is_text);
  MOESH_CHECK(text != files.end() || c.data.tokenizer.empty(), ErrorKind::config,
              describe_option(c, "data.tokenizer"),
              ", and there is no file of text to read with it; leave it out");
  if (text == files.end() || ids == files.end() || !c.data.tokenizer.empty()) return;
  throw Error(ErrorKind::config,
              detail::concat(describe_option(c, text->option), ", whose bytes are tokens, and ",
                             describe_option(c, ids->option),
                             ", which holds token ids; set data.tokenizer to the tokenizer that "
                             "made the ids, or leave out one of them"));
}

void check_data(const Config& c, const models::ModelFacts& facts) {
  MOESH_CHECK(c.data.source.empty() || c.data.path.empty(), ErrorKind::config,
              describe_option(c, "data.path"), ", and ", describe_option(c, "data.source.0.path"),
              "; make the first an entry of data.source, or leave out one of them");
  MOESH_CHECK(c.data.source.empty() || c.data.kind == "auto", ErrorKind::config,
              describe_option(c, "data.kind"), ", and ", describe_option(c, "data.source.0.path"),
              "; each entry of data.source has a kind of its own: set data.source.0.kind");
  if (c.data.source.empty())
    check_file(c, facts, "data.path", c.data.path, "data.kind", c.data.kind);
  check_sources(c, facts, "data.source", c.data.source);
  check_sources(c, facts, "validation.source", c.validation.source);
  check_one_language(c);
  MOESH_CHECK(c.optimizer.qk_clip == 0 || c.data.packing != "best_fit", ErrorKind::config,
              describe_option(c, "optimizer.qk_clip"), ", and ", describe_option(c, "data.packing"),
              ", which fills up sequences with padding, whose logits would count; set data.packing "
              "to cut, or optimizer.qk_clip to 0");
}

// After the mesh: its product of ranks is one that fits.
void check_batch(const Config& c) {
  constexpr const char* kGlobal = "training.global_batch_size";
  const std::int64_t global = c.training.global_batch_size, num_dp = sample_order(c).num_dp,
                     asked = c.training.gradient_accumulation_steps;
  if (global == 0) return;
  if (global % num_dp != 0)
    throw Error(ErrorKind::config,
                detail::concat(describe_option(c, kGlobal), ", which is not divisible by the ",
                               num_dp, " data-parallel ranks: ", describe_degrees(c), "; set ",
                               kGlobal, " to a multiple of ", num_dp,
                               ", or dp_replicate * dp_shard to one of ", divisors(global)));
  const std::int64_t of_a_rank = global / num_dp;
  MOESH_CHECK(of_a_rank % c.data.batch_size == 0, ErrorKind::config, describe_option(c, kGlobal),
              ", ", of_a_rank, " sequences for each of ", num_dp, " data-parallel ranks, and ",
              describe_option(c, "data.batch_size"),
              ", which does not divide that; set data.batch_size to one of ", divisors(of_a_rank));
  // 1 is its default, and print-config writes it.
  MOESH_CHECK(asked == 1 || asked == num_micro_batches(c), ErrorKind::config,
              describe_option(c, "training.gradient_accumulation_steps"), ", and ",
              describe_option(c, kGlobal), ", which takes ", num_micro_batches(c),
              " micro-batches of ", c.data.batch_size, " sequences on ", num_dp,
              " data-parallel ranks; leave out one of them");
}

void check_routing(const Config& c, const models::ModelFacts& facts) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int16_t>::max() + 1;  // from 0 on
  MOESH_CHECK(c.moe.record.empty() || facts.num_experts <= kMost, ErrorKind::config,
              describe_option(c, "moe.record"), ", and ", describe_option(c, "model.num_experts"),
              ": its files hold up to ", kMost, " experts; leave moe.record out");
  if (c.moe.replay.empty()) return;
  const auto is_same = [](const std::string& a, const std::string& b) {
    return std::filesystem::weakly_canonical(a) == std::filesystem::weakly_canonical(b);
  };
  MOESH_CHECK(c.moe.record.empty() || !is_same(c.moe.record, c.moe.replay), ErrorKind::config,
              describe_option(c, "moe.record"), ", and so is ", describe_option(c, "moe.replay"),
              ": the files would be written while they are read; set moe.record to another folder");
  MOESH_CHECK(!c.moe.force_load_balance, ErrorKind::config,
              describe_option(c, "moe.force_load_balance"), ", and ",
              describe_option(c, "moe.replay"), ": both choose the experts; leave out one of them");
}

void check_schedule(const Config& c) {
  const std::int64_t steps = c.training.steps, warmup = c.lr_scheduler.warmup_steps;
  MOESH_CHECK(warmup <= steps, ErrorKind::config, describe_option(c, "lr_scheduler.warmup_steps"),
              ", and ", describe_option(c, "training.steps"), "; set lr_scheduler.warmup_steps to ",
              steps, " or less");
  if (c.lr_scheduler.kind != "wsd") return;
  const std::int64_t decay = std::llround(c.lr_scheduler.decay_ratio *
                                          static_cast<double>(steps));  // as the schedule rounds
  MOESH_CHECK(warmup + decay <= steps, ErrorKind::config,
              describe_option(c, "lr_scheduler.decay_ratio"), ", so ", decay,
              " steps of decay begin before the warm-up ends: ",
              describe_option(c, "lr_scheduler.warmup_steps"), ", ",
              describe_option(c, "training.steps"), "; set lr_scheduler.decay_ratio to ",
              formats::to_toml(static_cast<double>(steps - warmup) / static_cast<double>(steps)),
              " or less, or lr_scheduler.warmup_steps to ", steps - decay, " or less");
}

}  // namespace

std::string describe_option(const Config& config, const std::string& option) {
  const Option* o = find_option(option);
  const auto cell = find_cell(option);
  const auto value = o ? o->get(config) : cell ? cell->get(config) : model_value(config, option);
  MOESH_CHECK(value, "no option is called ", option);
  return detail::concat(option, " is ", formats::to_toml(*value), " (", config.origin(option).text,
                        ")");
}

void check_option(const Config& config, const std::string& option) {
  const std::string text = describe_option(config, option);
  const Option& o = *find_option(option);
  ValueRule rule = o.rule;
  if (option == "model.size") {  // it depends on the model
    check_option(config, "model.name");
    if (config.model.size.empty()) return;
    rule.choices = models::model_sizes(config.model.name);
  }
  MOESH_CHECK(rule.allows(o.get(config)), ErrorKind::config, text, "; it takes ",
              rule.describe(o.initial()));
}

void validate(const Config& config, int world_size) {
  MOESH_CHECK(world_size >= 0, "validate: a world of ", world_size, " ranks");
  const models::ModelFacts facts = models::facts(config.model.architecture);
  for (const Option& o : options()) check_option(config, o.name);
  for (const Cell& cell : cells(config))
    MOESH_CHECK(cell.column->rule.allows(cell.get(config)), ErrorKind::config,
                describe_option(config, cell.name()), "; it takes ",
                cell.column->rule.describe(cell.column->initial));
  check_mesh(config, world_size);
  check_batch(config);
  check_model(config, facts);
  check_float8(config);
  check_pipeline(config, facts);
  check_export(config, facts);
  check_data(config, facts);
  check_routing(config, facts);
  check_schedule(config);
  profile_steps(config);                          // throws where it names none
  param_groups(config);                           // throws if a pattern is invalid
  if (config.lora.adapter.empty()) lora(config);  // throws where a target matches no weight
  MOESH_CHECK(!config.checkpoint.enable || !config.checkpoint.folder.empty(), ErrorKind::config,
              describe_option(config, "checkpoint.folder"), ", and ",
              describe_option(config, "checkpoint.enable"),
              "; set checkpoint.folder to where checkpoints are to be saved, such as "
              "outputs/checkpoints");
  MOESH_CHECK(!config.parallelism.overlap_experts ||
                  config.parallelism.pipeline_parallel_degree == 1 ||
                  pipeline::can_be_joined(config.parallelism.pipeline_parallel_schedule),
              ErrorKind::config, describe_option(config, "parallelism.overlap_experts"), ", ",
              describe_option(config, kPipeline), ", and ", describe_option(config, kSchedule),
              ", where no forward stands beside a backward; set ", kSchedule, " to ",
              joined_by_or(pipeline::joined_schedule_names()));
  MOESH_CHECK(config.parallelism.moe_dispatcher != "local" ||
                  config.parallelism.expert_parallel_degree *
                          config.parallelism.expert_tensor_parallel_degree ==
                      1,
              ErrorKind::config, describe_option(config, "parallelism.moe_dispatcher"),
              ", and ranks split the experts: ", describe_option(config, kExperts), ", ",
              describe_option(config, kExpertTensor),
              "; set parallelism.moe_dispatcher to auto, all_to_all or all_gather");
  MOESH_CHECK(
      config.parallelism.moe_dispatcher != "two_hops" || mesh_shape(config).num_nodes_of_ep() > 0,
      ErrorKind::config, describe_option(config, "parallelism.moe_dispatcher"), ", and nodes of ",
      mesh_shape(config).ranks_per_node,
      " ranks do not share those of the experts evenly: ", describe_option(config, kExperts), ", ",
      describe_option(config, kExpertTensor), "; set parallelism.ranks_per_node to ",
      joined_by_or(sharing_sizes(config)),
      ", or parallelism.moe_dispatcher to auto, all_to_all or all_gather");
}

}  // namespace moesh::config
