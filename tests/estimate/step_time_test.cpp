// Times of steps, from layers that were measured one by one: against dry runs of the whole model,
// formulas, and searches that leave nothing out.

#include "moesh/estimate/step_time.h"

#include <gtest/gtest.h>

#include <set>

#include "moesh/config/merge.h"
#include "moesh/estimate/search_time.h"
#include "tests/tier.h"

namespace moesh::estimate {
namespace {

using Args = std::vector<std::string>;

Config load_args(const Args& args) { return config::load_config(args); }

PartProfile sum_of(const Profile& p, const ModelShape& model) {
  PartProfile sum = p.ends;
  sum.activations += p.always;
  const auto add = [](StateMemory& a, const StateMemory& b) {
    a.weights += b.weights, a.gradients += b.gradients, a.optimizer += b.optimizer;
  };
  for (const bool is_moe : model.is_moe) {
    const PartProfile& layer = p.layers.at(is_moe);
    add(sum.dense, layer.dense), add(sum.experts, layer.experts);
    sum.activations += layer.activations;
    for (const auto& [key, entry] : layer.traffic) {
      sum.traffic[key].num_bytes += entry.num_bytes;
      sum.traffic[key].num_calls += entry.num_calls;
    }
  }
  return sum;
}

// What differences of short models and sizes of dp make of a mesh is what the whole model does
// there: memory, and the bytes of every group.
TEST(Profile, AddsUpToADryRunOfTheWholeModel) {
  for (const Args& model : {Args{"--model=deepseek_v3:debug"}, Args{"--model=qwen3_moe:debug"},
                            Args{"--model=llama4:tiny", "--model.num_layers=6", "--model.dim=128",
                                 "--model.moe_ffn=128", "--model.vocab_size=512"},
                            Args{"--model=deepseek_v3:debug", "--model.num_mtp_layers=1"},
                            Args{"--model=deepseek_v3:debug", "--model.num_dense_layers=3",
                                 "--activation_checkpoint.mode=full"}})
    for (const char* mesh : {"dp_shard=2,ep=2", "dp_shard=8,tp=2,ep=4", "dp_shard=4,cp=2,ep=8",
                             "dp_replicate=2,dp_shard=4,tp=2,ep=2,etp=2", "dp_shard=16"}) {
      Args args = model;
      args.insert(args.end(), {std::string("--mesh=") + mesh, "--dtype=bfloat16", "--device=cuda",
                               "--data.sequence_length=128", "--data.batch_size=2"});
      SCOPED_TRACE(model[0] + " " + mesh);
      const Config c = load_args(args);
      Profiler profiler(c);
      const PartProfile sum = sum_of(profiler.on(mesh_shape(c)), profiler.model());
      const Estimate e = estimate(c);
      const auto near = [](double a, double b, double part) {
        EXPECT_NEAR(a, b, part * b + 4096) << a / b;
      };
      near(static_cast<double>(sum.dense.total() + sum.experts.total()),
           static_cast<double>(e.state.total()), 0.01);
      near(static_cast<double>(sum.experts.total()), static_cast<double>(e.expert_state.total()),
           0.01);
      const Estimate second = estimate(
          changed(c, {{"training.gradient_accumulation_steps", std::int64_t{2}, {"test"}}}));
      // What comes and goes (gathers, sums that travel) is that of a small dp: seldom less than the
      // dry run has, and in these small models up to a fifth more.
      const double peak = static_cast<double>(sum.dense.total() + sum.experts.total()) +
                          sum.activations,
                   of_dry_run = static_cast<double>(second.peak);
      EXPECT_GT(peak, 0.94 * of_dry_run) << peak / of_dry_run;
      EXPECT_LT(peak, 1.2 * of_dry_run) << peak / of_dry_run;
      // With copies, gradients that tp ranks sum are summed over both at once: counted as two sums.
      std::map<std::string, double> wanted, found;
      const auto name = [&](const std::string& group) {
        const bool is_sum = group.starts_with("dp_replicate") || group == "tp";
        return e.mesh.dp_replicate > 1 && is_sum ? std::string("copies") : group;
      };
      for (const auto& [key, entry] : e.traffic)
        wanted[name(key.first)] += static_cast<double>(entry.num_bytes);
      for (const auto& [key, entry] : sum.traffic)
        found[name(key.first)] += static_cast<double>(entry.num_bytes);
      for (const auto& [group, bytes] : wanted) {
        SCOPED_TRACE(group);
        near(found[group], bytes, group == "copies" ? 0.1 : 0.01);
      }
    }
}

// Also where its dense layers are the first, or named.
TEST(Profile, HasEachKindOfLayerOfEveryModel) {
  const Cluster cluster = parse_cluster("h100x2:1");
  std::vector<Config> configs;
  for (const std::string& name : models::model_names())
    configs.push_back(load_args({"--model=" + name + ":tiny"}));
  const auto change = [&](const std::string& name, const auto& f) {
    models::AnyConfig model = models::built_in(name, "debug");
    std::visit([&](auto& c) { f(c); }, model);
    configs.push_back(changed(load_args({"--model=" + name + ":debug"}), {},
                              config::RequestedModel{model, "test"}));
  };
  change("llama4", [](auto& c) {
    if constexpr (requires { c.moe_layers; }) c.moe_layers = {c.num_layers - 1};
  });
  change("qwen3_moe", [](auto& c) {
    if constexpr (requires { c.mlp_only_layers; }) c.mlp_only_layers = {c.num_layers - 1};
  });
  for (const Config& c : configs) {
    const Config on_two = changed(c, {{"training.dtype", std::string("bfloat16"), {"test"}},
                                      {"training.device", std::string("cuda"), {"test"}}});
    Profiler profiler(on_two);
    const MeshShape mesh{.dp_shard = 2};
    const Profile profile = profiler.on(mesh);
    for (const bool is_moe : model_shape(on_two).is_moe)
      EXPECT_GT(profile.layers.at(is_moe).dense.weights, 0) << c.model.name;
    EXPECT_GT(step_time(profiler, cluster, mesh, {"1f1b"}).total, 0) << c.model.name;
  }
}

TEST(Profile, FlopsAreThoseOfTheModel) {
  for (const Args& model : {Args{"deepseek_v3:debug"}, Args{"gpt_oss:tiny"}, Args{"llama4:tiny"},
                            Args{"glm4_moe:debug", "--model.num_mtp_layers=2"}}) {
    const std::string& name = model[0];
    Args args = model;
    args[0] = "--model=" + name, args.emplace_back("--data.sequence_length=64");
    const Config c = load_args(args);
    const ModelShape shape = model_shape(c);
    double sum = shape.flops.head;
    for (const double flops : shape.flops.layers) sum += flops;
    const Mesh mesh({}, 0, comm::fake_group);
    const MeshScope scope(mesh);
    const auto made = train::make_model(c, at::kMeta);
    EXPECT_NEAR(sum, made->flops_per_token(64), 1e-9 * sum) << name;
  }
}

const Args kModel = {"--model=deepseek_v3:debug",  "--model.num_layers=8",
                     "--dtype=bfloat16",           "--device=cuda",
                     "--data.sequence_length=256", "--data.batch_size=2"};
Args with(Args args, const Args& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(StepTime, OneStageHasNoBubble) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const Config c =
      load_args(with(kModel, {"--mesh=dp_shard=4,tp=2,ep=8", "--training.global_batch_size=64"}));
  Profiler profiler(c);
  const StepTime t = step_time(profiler, cluster, mesh_shape(c), {"1f1b"});
  EXPECT_EQ(t.num_micro_batches, 8);
  EXPECT_EQ(t.num_tokens, 64 * 256);
  EXPECT_NEAR(t.bubble, 0, 1e-9 * t.total);
  EXPECT_NEAR(t.compute + t.tensor + t.experts + t.storage + t.update, t.total, 1e-9 * t.total);
  EXPECT_NEAR(t.kernels.all(), t.compute, 1e-9 * t.compute);
  EXPECT_GT(t.compute, t.flops / (8 * cluster.peak_flops));
  for (const double part : {t.compute, t.tensor, t.experts, t.storage, t.update})
    EXPECT_GT(part, 0);
}

// Rows travel behind the compute of another micro-batch, as far as that takes as long: of eight all
// do, of seven those of the last do not.
TEST(StepTime, RowsOfPairsTravelBehindCompute) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const auto time_of = [&](int num_micro, const char* is_on) {
    const Config c =
        load_args(with(kModel, {"--mesh=dp_shard=8,ep=8", "--parallelism.moe_dispatcher=all_to_all",
                                "--data.sequence_length=4096",
                                std::string("--parallelism.overlap_experts=") + is_on,
                                "--training.global_batch_size=" + std::to_string(16 * num_micro)}));
    Profiler profiler(c);
    return step_time(profiler, cluster, mesh_shape(c), order_of(c));
  };
  for (const int num_micro : {7, 8}) {
    const StepTime off = time_of(num_micro, "false"), on = time_of(num_micro, "true");
    EXPECT_EQ(on.num_micro_batches, num_micro);
    EXPECT_EQ(on.compute, off.compute);
    const double hidden = off.experts - on.experts;
    const double in_pairs = num_micro == 7 ? 6.0 / 7 : 1;
    EXPECT_GT(hidden, 0);
    EXPECT_LE(hidden, in_pairs * std::min(off.experts, off.compute) * (1 + 1e-9));
    // What computes hides parameters as well, as far as rows leave the links free.
    EXPECT_NEAR(off.total - on.total, hidden - (on.storage - off.storage), 1e-9 * off.total);
    EXPECT_GT(off.total, on.total);
    EXPECT_GT(on.peak, off.peak);
  }
}

// With pp it is the other of two joined actions that computes.
TEST(StepTime, RowsOfJoinedActionsTravelBehindCompute) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const Config c =
      load_args(with(kModel, {"--parallelism.moe_dispatcher=all_to_all",
                              "--data.sequence_length=4096", "--training.global_batch_size=128"}));
  Profiler profiler(c);
  const MeshShape mesh{.pp = 2, .dp_shard = 4, .ep = 4};
  for (const char* schedule : {"1f1b", "interleaved_1f1b", "dualpipev"}) {
    SCOPED_TRACE(schedule);
    const StepTime off = step_time(profiler, cluster, mesh, {schedule}),
                   on = step_time(profiler, cluster, mesh, {schedule, true});
    EXPECT_LT(on.experts, 0.7 * off.experts);
    EXPECT_LT(on.total, off.total);
    EXPECT_NEAR(on.compute + on.tensor + on.experts + on.storage + on.bubble + on.update, on.total,
                1e-9 * on.total);
    EXPECT_NEAR(simulated(profiler, cluster, mesh, {schedule, true}, 1 << 20).time,
                on.total - on.update, 1e-9 * on.total);
  }
  // No forward stands beside a backward there.
  EXPECT_EQ(step_time(profiler, cluster, mesh, {"zbv", true}).total,
            step_time(profiler, cluster, mesh, {"zbv"}).total);
}

// Ranks of cp wait in each layer for the one whose queries see most: up to twice the mean, where
// each has one piece of a sequence.
TEST(StepTime, CountsTheAttentionOfTheLongestRank) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const auto compute = [&](const Args& more) {
    const Config c = load_args(
        with({"--model=gpt_oss:debug", "--dtype=bfloat16", "--device=cuda", "--data.batch_size=1",
              "--data.sequence_length=4096", "--mesh=dp_shard=2,cp=4"},
             more));
    Profiler profiler(c);
    return step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).compute;
  };
  const std::string key = "--parallelism.context_parallel_cut=";
  const double contiguous = compute({key + "contiguous"}), balanced = compute({key + "balanced"});
  EXPECT_GT(contiguous, 1.1 * balanced);
  EXPECT_EQ(compute({}), balanced) << "auto: half of its layers see everything";
  EXPECT_EQ(compute({"--model.num_layers=1"}),
            compute({"--model.num_layers=1", key + "contiguous"}))
      << "auto: only a window";
}

// Half of what cp ranks exchange travels behind attention of the other heads; latents do not.
TEST(StepTime, KeysOfHalfTheHeadsTravelBehindAttention) {
  const auto exposed = [](const Args& more, double bandwidth) {
    Cluster cluster = parse_cluster("h100x8:1");
    cluster.node_bandwidth = bandwidth, cluster.latency = 0;
    const Config c = load_args(with({"--dtype=bfloat16", "--device=cuda", "--data.batch_size=1",
                                     "--data.sequence_length=4096", "--mesh=dp_shard=2,cp=4"},
                                    more));
    Profiler profiler(c);
    return step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).tensor;
  };
  // On links of ever more bandwidth all that can hide does: a half.
  const Args grouped{"--model=qwen3_moe:debug"},
      one_head{"--model=qwen3_moe:debug", "--model.num_kv_heads=1"},
      latent{"--model=deepseek_v3:debug"};
  const double fast = 1e12, slow = 1e6;
  const auto ratio = [&](const Args& model) {
    return exposed(model, slow) / exposed(model, fast) * (slow / fast);
  };
  EXPECT_NEAR(ratio(one_head), 1, 1e-6);
  EXPECT_NEAR(ratio(latent), 1, 1e-6);
  EXPECT_NEAR(ratio(grouped), 2, 0.01);
}

// Layers that are alike, nothing but compute: the bubble of the formula.
TEST(StepTime, BubblesAreThoseOfTheSchedule) {
  Cluster cluster = parse_cluster("h100x8:1");
  cluster.node_bandwidth = cluster.network_bandwidth = 1e30, cluster.latency = 0;
  const Config c = load_args({"--model=qwen3_moe:debug", "--model.num_layers=32",
                              "--model.vocab_size=64", "--training.global_batch_size=320",
                              "--data.sequence_length=256", "--device=cuda"});
  Profiler profiler(c);
  for (const int p : {2, 4, 8}) {
    const MeshShape mesh{.pp = p, .dp_shard = 8 / p};
    const StepTime t = step_time(profiler, cluster, mesh, {"1f1b"});
    const double m = static_cast<double>(t.num_micro_batches);
    const double whole = t.total - t.update;
    EXPECT_NEAR(t.bubble / whole, (p - 1) / (m + p - 1), 0.02) << p;
    // The simulated schedule of all micro-batches takes as long as that of the first ones and the
    // rest at the pace of the slowest rank.
    EXPECT_NEAR(simulated(profiler, cluster, mesh, {"1f1b"}, 1 << 20).time, whole, 1e-6 * whole)
        << p;
    for (const char* name : {"interleaved_1f1b", "zero_bubble", "zbv", "dualpipev", "gpipe"}) {
      const StepTime other = step_time(profiler, cluster, mesh, {name});
      if (std::string(name) == "gpipe") {
        EXPECT_NEAR(other.total, t.total, 1e-3 * t.total);
        EXPECT_GT(other.peak, t.peak);
      } else {
        EXPECT_LT(other.bubble, t.bubble) << name;
      }
    }
  }
}

TEST(StepTime, AStageHoldsItsOwnLayers) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const Config c = load_args(with(kModel, {"--training.global_batch_size=64"}));
  Profiler profiler(c);
  const StepTime one = step_time(profiler, cluster, {.dp_shard = 8, .ep = 8}, {"1f1b"}),
                 four = step_time(profiler, cluster, {.pp = 4, .dp_shard = 2, .ep = 2}, {"1f1b"});
  EXPECT_EQ(one.layers, pipeline::StagePlan{8});
  EXPECT_EQ(four.layers.size(), 4u);
  EXPECT_EQ(one.num_tokens, four.num_tokens);
  EXPECT_LT(four.layers.back(), 8);
  const Config planned =
      load_args(with(kModel, {"--training.global_batch_size=64", "--mesh=pp=4,dp_shard=2,ep=2",
                              "--parallelism.pipeline_parallel_layers_per_stage=1,1,1,5"}));
  Profiler of_plan(planned);
  const StepTime given = step_time(of_plan, cluster, mesh_shape(planned), {"1f1b"});
  EXPECT_GT(given.total, four.total);
  EXPECT_EQ(given.layers, (pipeline::StagePlan{1, 1, 1, 5}));
  EXPECT_THROW(step_time(of_plan, cluster, {.pp = 8}, {"1f1b"}), Error);
  EXPECT_THROW(step_time(profiler, cluster, {.pp = 16}, {"1f1b"}), Error);
}

// The memory by which a mesh fits is near that of a dry run of its stages, with each schedule.
TEST(StepTime, HoldsWhatADryRunOfTheStagesHolds) {
  const Cluster cluster = parse_cluster("h100x8:2");
  for (const char* mode : {"none", "full"})
    for (const char* schedule :
         {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"}) {
      const Config c = load_args(
          {"--model=deepseek_v3:16b", "--model.num_layers=12", "--dtype=bfloat16", "--device=cuda",
           "--data.sequence_length=4096", "--data.batch_size=1", "--mesh=pp=4,dp_shard=4,ep=2",
           "--training.global_batch_size=48", std::string("--activation_checkpoint.mode=") + mode,
           std::string("--parallelism.pipeline_parallel_schedule=") + schedule});
      SCOPED_TRACE(std::string(schedule) + ", recompute " + mode);
      Profiler profiler(c);
      const double peak = step_time(profiler, cluster, mesh_shape(c), {schedule}).peak,
                   of_dry_run = static_cast<double>(estimate(c).peak);
      // Where dualpipev holds the most its backwards are whole, and need more for themselves.
      const double least = schedule == std::string("dualpipev") ? 0.94 : 0.98;
      EXPECT_GT(peak, least * of_dry_run) << peak / of_dry_run;
      EXPECT_LT(peak, 1.06 * of_dry_run) << peak / of_dry_run;
    }
}

// Micro-batches share what is gathered: it counts once, and travels once.
TEST(StepTime, HoldsGatheredParametersOnce) {
  for (const char* mode : {"none", "full"}) {
    const Config c = load_args(
        {"--model=deepseek_v3:16b", "--model.num_layers=12", "--dtype=bfloat16", "--device=cuda",
         "--data.sequence_length=1024", "--data.batch_size=1", "--mesh=pp=4,dp_shard=4,ep=2",
         "--training.global_batch_size=48", std::string("--activation_checkpoint.mode=") + mode,
         "--parallelism.fsdp_reshard_after_forward=false"});
    Profiler profiler(c);
    Cluster cluster = parse_cluster("h100x8:2");
    const double peak = step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).peak,
                 of_dry_run = static_cast<double>(estimate(c).peak);
    EXPECT_GT(peak, 0.95 * of_dry_run) << mode << " " << peak / of_dry_run;
    EXPECT_LT(peak, 1.1 * of_dry_run) << mode << " " << peak / of_dry_run;
    cluster.node_bandwidth = cluster.network_bandwidth = 1e9;  // nothing hides them
    Profiler resharding(changed(c, {{"parallelism.fsdp_reshard_after_forward", true, {"test"}}}));
    EXPECT_LT(step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).storage,
              0.8 * step_time(resharding, cluster, mesh_shape(c), {"1f1b"}).storage);
  }
}

// Four stages of four GPUs on two nodes: one of three boundaries is between them.
TEST(StepTime, SendsOverTheNetworkWhereAStageIsOnAnotherNode) {
  const Config c =
      load_args(with(kModel, {"--mesh=pp=4,dp_shard=4,ep=4", "--training.global_batch_size=64"}));
  Profiler profiler(c);
  const auto total = [&](const char* text, double bandwidth) {
    Cluster cluster = parse_cluster(text);
    cluster.network_bandwidth = bandwidth;
    return step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).total;
  };
  EXPECT_EQ(total("h100x16:1", 1e6), total("h100x16:1", 1e9));
  const double slow = total("h100x8:2", 1e6), slower = total("h100x8:2", 0.5e6);
  const double once = 2.0 * 256 * 256 * 2 / 1e6;  // bytes of a stream, in seconds
  // There and back, for the first micro-batch at least, and twice as long at half the speed.
  EXPECT_GT(slow - total("h100x8:2", 1e12), 1.9 * once);
  EXPECT_GT(slower - slow, 1.9 * once);
}

// Nearly all of this model is its head.
TEST(StepTime, ComputesTheHeadOnceAndInForward) {
  const auto with_mode = [](const char* mode) {
    return load_args({"--model=mixtral:tiny", "--model.num_layers=2", "--model.vocab_size=1000000",
                      "--dtype=bfloat16", "--device=cuda", "--mesh=pp=2",
                      "--training.global_batch_size=32",
                      std::string("--activation_checkpoint.mode=") + mode});
  };
  const Cluster cluster = parse_cluster("h100x2:1");
  const auto compute = [&](const char* mode) {
    const Config c = with_mode(mode);
    Profiler profiler(c);
    return step_time(profiler, cluster, mesh_shape(c), {"1f1b"}).compute;
  };
  EXPECT_NEAR(compute("full"), compute("none"), 0.01 * compute("none"));
  const Config c = with_mode("none");
  Profiler profiler(c);
  const auto s = simulated(profiler, cluster, mesh_shape(c), {"zero_bubble"}, 4);
  double forward = 0, all = 0;
  for (const auto& [action, start, end] : s.ranks[1]) {
    all += end - start;
    if (action.kind == pipeline::ActionKind::forward) forward += end - start;
  }
  EXPECT_GT(forward, 0.85 * all);  // the rest is the gradient of the embedding
}

const Progress kSilent = [](int, int, const TimeSearch&) {};

TEST(SearchTime, TakesMeshesThatAGivenPlanFits) {
  const Config c = load_args(with(
      kModel, {"--training.global_batch_size=256", "--parallelism.pipeline_parallel_schedule=1f1b",
               "--parallelism.pipeline_parallel_layers_per_stage=3,1,3,1"}));
  const TimeSearch found = search_time(c, parse_cluster("h100x8:1"), 1e15, 1000, kSilent);
  std::set<int> stages;
  for (const StepTime& t : found.best) stages.insert(t.mesh.pp);
  EXPECT_EQ(stages, (std::set<int>{1, 4}));
}

// With fewer choices in `make test`.
Args few_choices(Args args) {
  if (!is_long())
    for (const char* fixed :
         {"--parallelism.moe_dispatcher=all_to_all", "--activation_checkpoint.mode=selective"})
      args.push_back(fixed);
  return args;
}

// Rows are at least a per cent apart, and nothing within a per cent of a row is left out.
TEST(SearchTime, LosesNoneOfTheBest) {
  const Cluster cluster = parse_cluster("h100x4:2");
  const Config c = load_args(few_choices(with(kModel, {"--training.global_batch_size=64"})));
  int num_calls = 0, last = 0;
  const Progress count = [&](int done, int all, const TimeSearch&) {
    ++num_calls, last = all - done;
  };
  const TimeSearch all = search_time(c, cluster, 1e15, 100000, count),
                   few = search_time(c, cluster, 1e15, 3, count);
  EXPECT_GT(num_calls, 10);
  EXPECT_EQ(last, 0);
  ASSERT_EQ(few.best.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(few.best[i].tokens_per_second(), all.best[i].tokens_per_second());
    EXPECT_EQ(few.num_alike[i], all.num_alike[i]);
  }
  bool has_pp = false;
  for (const StepTime& t : all.best) {
    EXPECT_EQ(t.mesh.num_ranks(), 8);
    EXPECT_EQ(t.num_tokens, 64 * 256);
    has_pp |= t.mesh.pp > 1;
  }
  EXPECT_TRUE(has_pp);
  for (size_t i = 1; i < all.best.size(); ++i)
    EXPECT_GT(all.best[i - 1].tokens_per_second(), all.best[i].tokens_per_second());
}

// Every choice by hand gives no step that is faster and fits.
TEST(SearchTime, FindsTheFastestOfAllChoices) {
  const Cluster cluster = parse_cluster("h100x2:1");
  const Config c = load_args(few_choices(
      {"--model=deepseek_v3:debug", "--model.num_layers=4", "--dtype=bfloat16", "--device=cuda",
       "--data.sequence_length=256", "--training.global_batch_size=8"}));
  const std::vector<const char*> all_modes{"none", "selective", "full"},
      all_dispatchers{"auto", "all_to_all", "all_gather"};
  const auto modes = is_long() ? all_modes : std::vector{"selective"};
  const auto dispatchers = is_long() ? all_dispatchers : std::vector{"all_to_all"};
  std::vector<StepTime> by_hand;
  for (const char* mode : modes)
    for (const std::int64_t batch : {1, 2, 4, 8})
      for (const char* dispatcher : dispatchers) {
        Profiler profiler(
            changed(c, {{"activation_checkpoint.mode", std::string(mode), {"test"}},
                        {"parallelism.moe_dispatcher", std::string(dispatcher), {"test"}},
                        {"data.batch_size", batch, {"test"}}}));
        const auto add = [&](MeshShape mesh, const char* schedule, bool overlaps) {
          mesh.efsdp = 0;
          if (8 % (mesh.dp_replicate * mesh.dp_shard * batch) == 0)
            by_hand.push_back(step_time(profiler, cluster, mesh, {schedule, overlaps}));
        };
        for (const MeshShape& mesh : all_mesh_shapes(2))
          if (mesh.cp == 1)  // sequences are too short for cp
            for (const bool overlaps : {false, true}) add(mesh, "1f1b", overlaps);
        for (const char* schedule : {"1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"})
          add({.pp = 2}, schedule, false);
      }
  ASSERT_GT(by_hand.size(), is_long() ? 80u : 20u);
  std::vector<double> peaks;
  for (const StepTime& t : by_hand) peaks.push_back(t.peak);
  std::sort(peaks.begin(), peaks.end());
  for (const double limit : {1e15, peaks[peaks.size() / 4], peaks[3]}) {
    double fastest = 0;
    for (const StepTime& t : by_hand)
      if (t.peak <= limit) fastest = std::max(fastest, t.tokens_per_second());
    const TimeSearch found = search_time(c, cluster, limit, 1, kSilent);
    ASSERT_EQ(found.best.size(), 1u);
    EXPECT_LE(found.best[0].peak, limit);
    EXPECT_GT(found.best[0].tokens_per_second(), 0.98 * fastest) << limit;
    EXPECT_LE(found.best[0].tokens_per_second(), fastest * (1 + 1e-9)) << limit;
  }
}

TEST(SearchTime, KeepsWhatIsSetAndWhatFits) {
  const Cluster cluster = parse_cluster("h100x8:1");
  const Args set{"--training.global_batch_size=256",
                 "--mesh=pp=2,tp=2",
                 "--activation_checkpoint.mode=selective",
                 "--data.batch_size=2",
                 "--parallelism.pipeline_parallel_schedule=zbv",
                 "--parallelism.moe_dispatcher=all_to_all",
                 "--parallelism.overlap_experts=false"};
  const Config c = load_args(with(kModel, set));
  const TimeSearch found = search_time(c, cluster, 1e15, 1000, kSilent);
  ASSERT_GT(found.best.size(), 1u);
  double least = 1e15;
  for (const StepTime& t : found.best) {
    EXPECT_EQ(t.mesh.pp, 2);
    EXPECT_EQ(t.mesh.tp, 2);
    EXPECT_EQ(t.schedule, "zbv");
    EXPECT_EQ(t.recompute, "selective");
    EXPECT_EQ(t.batch_size, 2);
    least = std::min(least, t.peak);
  }
  EXPECT_TRUE(searched_options(c, found.best[0]).empty());
  const TimeSearch tight = search_time(c, cluster, least, 1000, kSilent);
  ASSERT_GE(tight.best.size(), 1u);
  for (const StepTime& t : tight.best) EXPECT_LE(t.peak, least);
  EXPECT_TRUE(search_time(c, cluster, 1000, 10, kSilent).best.empty());
}

TEST(SearchTime, ChoosesSizesThatNobodyHasSet) {
  std::vector<std::string> chosen;
  const Cluster cluster = parse_cluster("h100x8:3");
  const Config c = with_sensible_sizes(load_args({"--model=qwen3_moe:30b-a3b"}), cluster, chosen);
  EXPECT_EQ(c.training.dtype, "bfloat16");
  EXPECT_EQ(c.training.device, "cuda");
  EXPECT_EQ(c.data.sequence_length, 4096);
  EXPECT_EQ(c.training.global_batch_size, 24 * 44) << "at least 1024, a multiple of 24 x 2";
  EXPECT_EQ(chosen.size(), 4u);
  chosen.clear();
  const Config set = load_args({"--model=qwen3_moe:tiny", "--dtype=float32", "--device=cpu",
                                "--data.sequence_length=32", "--training.global_batch_size=48"});
  with_sensible_sizes(set, cluster, chosen);
  EXPECT_TRUE(chosen.empty());
  const Config seven =
      with_sensible_sizes(load_args({"--model=mixtral:debug"}), assumed_cluster(7), chosen);
  EXPECT_EQ(seven.training.global_batch_size % (7 * seven.data.batch_size), 0);
  const Config tiny = with_sensible_sizes(load_args({"--model=qwen3_moe:tiny"}), cluster, chosen);
  EXPECT_EQ(tiny.data.sequence_length, models::facts(tiny.model.architecture).max_sequence);
}

}  // namespace
}  // namespace moesh::estimate
