// The MoE layer on every mesh of up to 8 ranks against one rank.
//   moe_sweep             a selection: every mesh and every pair of options at least once
//   moe_sweep --all       every combination of options on every mesh

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include "tests/nn/sweep.h"

using namespace moesh;

int main(int argc, char** argv) try {
  bool all = false;
  int max_ranks = 8, per_mesh = 3, part = 0, parts = 1;
  std::string dtype_name = "float64", device = "cpu";
  CLI::App app("Compares the MoE layer on every mesh with the layer on one rank");
  app.add_flag("--all", all, "every option on every mesh, instead of a selection");
  app.add_option("--ranks", max_ranks, "meshes of up to so many ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--per-mesh", per_mesh, "cases for each mesh in a selection")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--dtype", dtype_name, "float64, float32 or bfloat16")
      ->capture_default_str()
      ->check(CLI::IsMember({"float64", "float32", "bfloat16"}));
  app.add_option("--device", device, "cpu, or cuda: all ranks use it")->capture_default_str();
  app.add_option("--part", part, "with --parts: which part of the meshes")->capture_default_str();
  app.add_option("--parts", parts, "cut the meshes into so many parts, for several processes")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const auto dtype = dtype_name == "float64"   ? at::kDouble
                     : dtype_name == "float32" ? at::kFloat
                                               : at::kBFloat16;
  comm::LaunchOptions options;
  options.timeout = std::chrono::seconds(60);
  options.device = at::Device(device == "cuda" ? "cuda:0" : device);
  const auto every = sweep::every_choice();

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  sweep::Totals totals;
  int mesh_number = 0;
  for (int n = 1; n <= max_ranks; ++n) {
    for (const auto& shape : all_mesh_shapes(n)) {
      if (mesh_number % parts != part) {
        ++mesh_number;
        continue;
      }
      sweep::run_mesh(on_nodes_in_turn(shape, static_cast<size_t>(mesh_number)),
                      all ? every : sweep::select(mesh_number, per_mesh), dtype, options, totals);
      ++mesh_number;
      if (all && mesh_number % 20 == 0)
        std::printf("%d meshes, %d cases, %d failed, %.0f s\n", mesh_number, totals.num_cases,
                    totals.num_failed, seconds()),
            std::fflush(stdout);
    }
  }
  for (const auto& text : totals.failures) std::printf("%s\n", text.c_str());
  std::printf("%s: %d meshes, %d cases, %zu of %zu pairs of options, %d failed, %.1f s\n",
              dtype_name.c_str(), totals.num_meshes, totals.num_cases, totals.pairs.size(),
              sweep::num_pairs(), totals.num_failed, seconds());
  if (dtype != at::kDouble)
    std::printf("routing replayed: %lld choices would have flipped, largest margin %.3g\n",
                static_cast<long long>(totals.num_flipped), totals.largest_margin);
  if (parts == 1 && max_ranks == 8 && totals.num_meshes != 333) {
    std::printf("%d meshes ran; there are 333 of up to 8 ranks\n", totals.num_meshes);
    return 1;
  }
  const bool covered =
      all || max_ranks < 8 || parts > 1 || totals.pairs.size() == sweep::num_pairs();
  if (!covered) std::printf("some pair of options never ran: raise --per-mesh\n");
  return totals.num_failed == 0 && covered ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "moe_sweep: %s\n", e.what());
  return 2;
}
