#include "moesh/models/disk.h"
#include "moesh/models/disk_json.h"

namespace moesh::models {

void read(const JsonValue& json, MixtralConfig& c) {
  read_grouped(json, {.theta = 1e6, .norm_eps = 1e-5}, c);
  c.moe_ffn = count(json, "intermediate_size");
  c.window = field(json, "sliding_window") ? count(json, "sliding_window") : 0;
}

JsonObject fields(const MixtralConfig& c) {
  const JsonValue window = c.window > 0 ? JsonValue{c.window} : JsonValue{};
  return joined(grouped_json(c), {{"intermediate_size", {c.moe_ffn}},
                                  {"num_local_experts", {c.num_experts}},
                                  {"sliding_window", window}});
}

std::vector<formats::DiskTensor> tensors(const MixtralConfig&, const LayerExperts& x,
                                         formats::ExpertLayout layout) {
  return layout == formats::ExpertLayout::per_expert ? one_by_one(x, "w1", "w3", "w2")
                                                     : stacked_out_in(x);
}

}  // namespace moesh::models
