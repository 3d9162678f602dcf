#pragma once
// Routing of no router's making: for every token experts at random, in files for moe.replay.

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>

#include "moesh/config/config.h"
#include "moesh/formats/token_file.h"
#include "moesh/train/build.h"
#include "moesh/train/routing.h"

namespace moesh {

inline void write_npy(const std::filesystem::path& path, const at::Tensor& values) {
  using formats::IdType;
  const auto type = values.scalar_type() == at::kInt     ? IdType::int32
                    : values.scalar_type() == at::kShort ? IdType::int16
                    : values.scalar_type() == at::kByte  ? IdType::uint8
                                                         : IdType::int64;
  const at::Tensor all = values.contiguous();
  std::ofstream(path, std::ios::binary)
      << formats::npy_header(type, all.sizes())
      << std::string_view(static_cast<const char*>(all.const_data_ptr()), all.nbytes());
}

/// int64 [layers, tokens of a step, K]
inline at::Tensor random_routing(const config::Config& config, std::uint64_t seed) {
  const OneRankScope scope;
  const auto model = models::make_model(config.model.architecture, {.device = at::kMeta});
  const std::int64_t tokens = sample_order(config).num_per_step() * config.data.sequence_length;
  at::manual_seed(seed);
  return std::get<1>(at::rand({model->num_moe_layers(), tokens, model->num_experts()})
                         .topk(train::router_config(config).top_k));
}

inline void write_routing(const std::filesystem::path& folder, const config::Config& config,
                          std::int64_t steps, at::ScalarType type = at::kShort) {
  std::filesystem::create_directories(folder);
  for (std::int64_t step = 1; step <= steps; ++step)
    write_npy(folder / train::routing_name(step),
              random_routing(config, static_cast<std::uint64_t>(step)).to(type));
}

}  // namespace moesh
