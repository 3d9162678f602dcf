// The products of experts, and of any rows, in float8.
#include "moesh/kernels/cuda/float8.h"
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

Error float8_product(const Float8Product& f, Stream stream) {
  if (f.depth % 16 != 0) return "the depth of a product in float8 is to be a multiple of 16";
  if (f.num_rows == 0) return nullptr;
  const std::int64_t pairs = f.depth / 2, pitch = scale_pitch(f.num_rows);
  GroupedLaunch l({.num_rows = f.num_rows,
                   .model = f.width,
                   .ffn = pairs,
                   .num_experts = f.num_experts,
                   .ends_E = f.ends_E,
                   .score_R = f.score});
  GroupedParams& p = l.params;
  p.width = static_cast<int>(f.width);
  p.depth = static_cast<int>(pairs);
  p.num_rows = static_cast<int>(f.num_rows);
  p.num_parts = f.a[1].codes ? 2 : 1;
  for (int i = 0; i < 2; ++i) {
    if (f.a[i].codes) {
      p.a[i] = l.map(f.a[i].codes, pairs, f.num_rows, 1, kTileK, kTileM);
      p.scales_a[i] =
          l.map_of_scales(f.a[i].scales, pitch, float8_tiles(f.depth), grouped::kScales);
    }
    const Float8Weight& b = f.b[i];
    if (b.codes) {
      p.b[i] = l.map(b.codes, pairs, f.width, f.num_experts, kTileK, 128);
      const auto columns = static_cast<int>(float8_tiles(f.width)),
                 steps = static_cast<int>(float8_tiles(f.depth));
      p.scales_b[i] = {b.scales, std::int64_t{columns} * steps, b.transposed ? 1 : steps,
                       b.transposed ? columns : 1};
    }
    if (f.out[i]) p.out[i] = l.map(f.out[i], f.width, f.num_rows, 1, 64, kSlab);
  }
  p.elementwise.bias[0] = static_cast<const bf16*>(f.bias);
  p.elementwise.rows_RD = p.elementwise.gate_RF = static_cast<bf16*>(f.out[0]);
  p.elementwise.up_RF = static_cast<bf16*>(f.out[1]);
  if (f.out[1]) return l.launch<Gemm::up8>(stream);
  return f.a[1].codes ? l.launch<Gemm::dx8>(stream) : l.launch<Gemm::down8>(stream);
}

}  // namespace moesh::kernels::cuda
