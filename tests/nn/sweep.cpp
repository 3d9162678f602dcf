#include "tests/nn/sweep.h"

#include "moesh/base/random.h"

namespace moesh::sweep {
namespace {

using verify::LayerCase;
using verify::LayerResult;

constexpr int kNumOptions = static_cast<int>(std::size(Choice::kLevels));

constexpr int kAutomatic = 3;  // of Choice::dispatcher

Choice from_levels(const std::vector<int>& v) { return {v[0], v[1], v[2], v[3], v[4], v[5], v[6]}; }

// The single-rank run that a case is compared with does not depend on how the mesh cuts it.
std::string reference_key(const LayerCase& c, int num_dp) {
  LayerCase whole = c;
  whole.batch *= num_dp;
  whole.sequence_parallel = true;
  whole.layer.dispatcher = nn::Dispatcher::local;
  const auto& r = c.layer.router;
  return whole.describe() + " " + std::to_string(static_cast<int>(r.scoring)) +
         std::to_string(r.num_groups) + std::to_string(r.gate_bias) +
         std::to_string(r.forced_balance) + std::to_string(r.normalize) + std::to_string(r.scale) +
         std::to_string(c.balance_weight) + std::to_string(c.z_weight) +
         std::to_string(static_cast<int>(c.balance_over)) +
         std::to_string(static_cast<int>(c.layer.experts.activation)) +
         std::to_string(c.options.float8.rows);
}

}  // namespace

int num_choices() {
  int n = 1;
  for (int levels : Choice::kLevels) n *= levels;
  return n;
}

Choice choice(int number) {
  std::vector<int> v;
  for (int levels : Choice::kLevels) v.push_back(number % levels), number /= levels;
  return from_levels(v);
}

std::vector<Choice> select(int mesh_number, int per_mesh) {
  std::vector<Choice> chosen;
  const Random random(2026, "sweep");
  for (int i = 0; i < per_mesh; ++i) {
    const auto index =
        static_cast<std::uint64_t>(mesh_number) * 1000 + static_cast<std::uint64_t>(i);
    chosen.push_back(
        choice(static_cast<int>(random.below(index, static_cast<std::uint64_t>(num_choices())))));
  }
  return chosen;
}

std::vector<Choice> every_choice() {
  std::vector<Choice> all;
  for (int i = 0; i < num_choices(); ++i)
    if (choice(i).dispatcher != kAutomatic) all.push_back(choice(i));
  return all;
}

size_t num_pairs() {
  size_t n = 0;
  for (int a = 0; a < kNumOptions; ++a)
    for (int b = a + 1; b < kNumOptions; ++b)
      n += static_cast<size_t>(Choice::kLevels[a] * Choice::kLevels[b]);
  return n;
}

LayerCase make_case(const Choice& o, const MeshShape& shape, at::ScalarType dtype,
                    at::Device device) {
  using kernels::Activation;
  using kernels::ScoreSide;
  LayerCase c;
  const std::int64_t experts = std::max(4, 2 * shape.ep), parts = shape.cp * shape.tp;
  c.layer.router = {.num_experts = experts, .top_k = 2, .normalize = true};
  c.layer.experts = {.num_experts = experts,
                     .dim = 6,
                     .ffn = 2 * shape.etp,
                     .scores = o.side ? ScoreSide::before : ScoreSide::after};
  constexpr nn::Dispatcher kWays[] = {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather,
                                      nn::Dispatcher::two_hops, nn::Dispatcher::automatic};
  c.layer.dispatcher = kWays[o.dispatcher];
  c.layer.shared_ffn = o.shared ? 2 * shape.tp + 1 : 0;
  c.options.dtype = dtype;
  c.options.device = device;
  c.options.init = {.kind = Init::Distribution::normal, .scale = 0.6, .seed = 5};
  c.batch = o.batch ? 3 : 1;
  c.sequence = o.length == 0   ? 2 * parts
               : o.length == 1 ? 2 * parts + 1
                               : std::max(1, shape.tp - 1);
  c.sequence_parallel = o.sequence_parallel;
  c.replay = dtype != at::kDouble;
  switch (o.variant) {
    case 0:  // DeepSeek-V3: sigmoid, groups, normalised, scaled
      c.layer.router.num_groups = experts % 4 == 0 ? 2 : 1;
      c.layer.router.scale = 2.5;
      c.balance_weight = 0.3;
      break;
    case 1:  // softmax, every auxiliary loss, F that etp does not divide, rows in float8
      c.layer.router.scoring = nn::Scoring::softmax;
      c.layer.router.normalize = false;
      c.layer.experts.ffn = 2 * shape.etp + 1;
      c.balance_weight = 0.5, c.z_weight = 0.1;
      c.options.float8.rows = 3;
      break;
    case 2:  // GPT-OSS: biases, clamped, softmax over the chosen
      c.layer.router.scoring = nn::Scoring::softmax_chosen;
      c.layer.router.normalize = false;
      c.layer.router.gate_bias = true;
      c.layer.experts.activation = Activation::clamped_swiglu;
      c.layer.experts.biases = true;
      break;
    default:  // forced balance by global token, one expert a token
      c.layer.router.forced_balance = true;
      c.layer.router.top_k = 1;
      c.layer.router.normalize = false;
      c.balance_weight = 0.5, c.balance_over = nn::BalanceOver::micro_batch;
  }
  return c;
}

void run_mesh(const MeshShape& shape, const std::vector<Choice>& choices, at::ScalarType dtype,
              const comm::LaunchOptions& options, Totals& totals) {
  static std::map<std::string, LayerResult> cache;
  if (cache.size() > 4000) cache.clear();
  const int num_dp = shape.dp_replicate * shape.dp_shard;
  std::vector<LayerCase> cases;
  std::vector<const LayerResult*> references;
  for (const auto& o : choices) {
    cases.push_back(make_case(o, shape, dtype, options.device));
    const auto key = reference_key(cases.back(), num_dp);
    auto found = cache.find(key);
    if (found == cache.end())
      found = cache.emplace(key, verify::run_reference(cases.back(), num_dp)).first;
    references.push_back(&found->second);
  }
  const auto reports = verify::compare_layer(cases, references, shape, options);
  ++totals.num_meshes;
  for (size_t i = 0; i < reports.size(); ++i) {
    ++totals.num_cases;
    totals.num_flipped += reports[i].num_flipped;
    totals.largest_margin = std::max(totals.largest_margin, reports[i].largest_margin);
    const auto v = choices[i].levels();
    for (int a = 0; a < kNumOptions; ++a)
      for (int b = a + 1; b < kNumOptions; ++b)
        totals.pairs.insert(std::to_string(a) + "=" + std::to_string(v[static_cast<size_t>(a)]) +
                            "," + std::to_string(b) + "=" +
                            std::to_string(v[static_cast<size_t>(b)]));
    if (reports[i].holds()) continue;
    ++totals.num_failed;
    if (totals.failures.size() < 20)
      totals.failures.push_back(reports[i].describe(cases[i], shape));
  }
}

}  // namespace moesh::sweep
