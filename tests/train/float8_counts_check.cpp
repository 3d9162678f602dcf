#include "tests/train/float8_counts_check.h"

#include <ATen/ATen.h>

#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "tests/spmd/device.h"

namespace moesh::float8_counts_check {

using namespace train;

Config config_of(const Args& more) {
  Args args{"--model=deepseek_v3:tiny",
            "--model.num_layers=2",
            "--model.moe_ffn=16",
            "--model.num_mtp_layers=1",
            "--dtype=float64",
            "--data.sequence_length=12",
            "--data.batch_size=1",
            "--training.global_batch_size=4",
            "--training.float8=blockwise",
            "--training.float8_dense=blockwise",
            "--training.float8_tile=4"};
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

namespace {

// Features of which some are much smaller than their neighbours, and become 0.
void make_uneven(models::Model& model) {
  const at::NoGradGuard no_grad;
  model.each_param([](Stored& w, bool) {
    if (w.spec.shape.size() != 1 || w.value.numel() == 0) return;
    const at::Tensor place = at::arange(w.shard.start[0], w.shard.start[0] + w.shard.length[0]);
    w.value.mul_(place.remainder(4).eq(1).to(at::kDouble).mul(-17).exp2());
  });
}

at::Tensor counts_on(comm::Group& world, const Config& config) {
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  make_uneven(*model);
  const auto dataset = open_dataset(config);
  StepOptions options = step_options(config);
  options.counts_float8 = true;
  return accumulate_gradients(*model, step_batches(config, *dataset, mesh, 0), options)
      .float8_counts;
}

}  // namespace

at::Tensor counts(const Args& more) {
  const Config config = config_of(more);
  at::Tensor of_first;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        const at::Tensor mine = counts_on(world, config);
        if (world.rank() == 0) of_first = mine;
      },
      test_options());
  return of_first;
}

std::string complaint(const Args& way, const at::Tensor& wanted) {
  constexpr const char *kProducts[] = {"experts", "dense projections"},
                       *kNumbers[] = {"activations", "gradients", "weights"},
                       *kCounts[] = {"numbers", "zeros", "largest codes"};
  const at::Tensor found = counts(way);
  for (std::int64_t layer = 0; layer < wanted.size(0); ++layer)
    for (std::int64_t p = 0; p < 2; ++p)
      for (std::int64_t n = 0; n < 3; ++n)
        for (std::int64_t c = 0; c < 3; ++c) {
          const auto a = found[layer][p][n][c].item<std::int64_t>(),
                     b = wanted[layer][p][n][c].item<std::int64_t>();
          if (a != b)
            return detail::concat(kCounts[c], " of ", kNumbers[n], " of ", kProducts[p],
                                  " of layer ", layer, ": ", a, ", and ", b, " on one rank");
        }
  return "";
}

}  // namespace moesh::float8_counts_check
