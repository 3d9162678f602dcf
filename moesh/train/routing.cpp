#include "moesh/train/routing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/token_file.h"

namespace moesh::train {
namespace {

using formats::IdType;

// [L, T, K] of a step.
std::vector<std::int64_t> sizes_of_step(const Config& config, const models::Model& model) {
  return {model.num_moe_layers(), sample_order(config).num_per_step() * config.data.sequence_length,
          router_config(config).top_k};
}

at::ScalarType type_of(IdType type, const std::string& name) {
  switch (type) {
    case IdType::uint8: return at::kByte;
    case IdType::int16: return at::kShort;
    case IdType::int32: return at::kInt;
    case IdType::int64: return at::kLong;
    default:
      throw Error(ErrorKind::data,
                  detail::concat(name, " has values of type ", formats::to_string(type),
                                 "; it takes uint8, int16, int32 or int64"));
  }
}

}  // namespace

std::string routing_name(std::int64_t step) { return checkpoint::step_name(step) + ".npy"; }

std::optional<nn::StepRouting> read_routing(const Config& config, const models::Model& model,
                                            std::int64_t step) {
  if (config.moe.replay.empty()) return std::nullopt;
  const std::string path = (std::filesystem::path(config.moe.replay) / routing_name(step)).string();
  MOESH_CHECK(formats::exists(path), ErrorKind::data, describe_option(config, "moe.replay"),
              ", and there is no '", path, "', the routing of step ", step, "; write it",
              step > 1 ? detail::concat(", or set training.steps to ", step - 1) : "");
  const auto file = std::make_shared<const formats::MappedFile>(path);
  const formats::NpyHeader header = formats::parse_npy(file->bytes(), path);
  const auto type = type_of(header.type, path);
  const at::IntArrayRef sizes(header.sizes);
  const auto wanted = sizes_of_step(config, model);
  MOESH_CHECK(
      sizes == at::IntArrayRef(wanted), ErrorKind::data, path, " has the shape ", sizes,
      ", and a step of this run is ", at::IntArrayRef(wanted),
      ": MoE layers (model.num_layers, model.num_mtp_layers), tokens of all ranks and "
      "micro-batches (training.global_batch_size, data.sequence_length), experts of a token "
      "(model.top_k); write files for these values, or set those of the files");
  MOESH_CHECK(header.data_start % formats::size_of(header.type) == 0, ErrorKind::data, path,
              " has values that begin at byte ", header.data_start,
              ", and they are aligned; write it with numpy.save");
  // It is never written to.
  void* values = const_cast<char*>(file->bytes().data() + header.data_start);
  return nn::StepRouting{
      .experts_LTK = at::from_blob(values, sizes, [file](void*) {}, type), .name = path};
}

at::Tensor RoutingRecorder::on_choice(const nn::Choice& c) {
  at::Tensor experts_NK = nn::RoutingProbe::on_choice(c);
  if (records && c.pass != nn::Pass::recompute && !c.for_balance)
    parts_.push_back({c.layer, nn::places_in_step(c), experts_NK.to(at::kCPU, at::kShort)});
  return experts_NK;
}

at::Tensor RoutingRecorder::experts(std::int64_t layer, std::int64_t first, std::int64_t count,
                                    std::int64_t top_k) const {
  at::Tensor experts_TK = at::full({count, top_k}, -1, at::kInt);
  for (const RoutedPart& part : parts_) {
    if (part.layer != layer) continue;
    const at::Tensor here =
        part.places_N.ge(first).logical_and(part.places_N.lt(first + count)).nonzero().squeeze(1);
    experts_TK.index_copy_(0, part.places_N.index_select(0, here) - first,
                           part.experts_NK.index_select(0, here).to(at::kInt));
  }
  return experts_TK;
}

RoutingFiles::RoutingFiles(const Config& config, const models::Model& model, comm::Group& world)
    : config_(config), model_(model), world_(world) {
  if (config.moe.record.empty()) return;
  checkpoint::together(world, [&] {
    if (world.rank() == 0) checkpoint::make_folders(config.moe.record);
  });
  probe_.records = true;
}

StepOptions RoutingFiles::with_probe(StepOptions options) {
  if (!config_.moe.replay.empty() || !config_.moe.record.empty()) options.forward.probe = &probe_;
  return options;
}

void RoutingFiles::begin_step(std::int64_t step) {
  const InSection section(Section::data);
  given_ = read_routing(config_, model_, step);
  probe_.replay = given_ ? &*given_ : nullptr;
  probe_.begin();
}

void RoutingFiles::end_step(std::int64_t step) {
  if (!probe_.records) return;
  const InSection section(Section::saving);
  write(std::filesystem::path(config_.moe.record) / routing_name(step));
}

// There as a whole, or as it was. Rank 0 writes a piece of a layer at a time: a whole step's would
// be more than a rank has memory for.
void RoutingFiles::write(const std::filesystem::path& path) const {
  constexpr std::int64_t kMostTokens = 1 << 20;  // of a piece
  const std::filesystem::path partial = path.string() + ".partial";
  const auto sizes = sizes_of_step(config_, model_);
  std::optional<formats::OutputFile> file;
  std::uint64_t written = 0;
  const auto on_rank_0 = [&](const auto& f) {
    checkpoint::together(world_, [&] {
      if (world_.rank() == 0) f();
    });
  };
  const auto append = [&](std::string_view bytes) {
    file->write(written, bytes);
    written += bytes.size();
  };
  on_rank_0([&] {
    formats::file_system().remove(partial);
    file.emplace(partial, formats::OutputFile::Mode::create);
    append(formats::npy_header(IdType::int16, sizes));
  });
  for (std::int64_t layer = 0; layer < sizes[0]; ++layer)
    for (std::int64_t first = 0; first < sizes[1]; first += kMostTokens) {
      const at::Tensor mine_TK =
          probe_.experts(layer, first, std::min(kMostTokens, sizes[1] - first), sizes[2]);
      // -1 is less than any expert: the rank that has a token knows better.
      const at::Tensor all_TK = world_.all_reduce(mine_TK.to(device(config_)), comm::ReduceOp::max)
                                    .to(at::kCPU, at::kShort);
      on_rank_0(
          [&] { append({static_cast<const char*>(all_TK.const_data_ptr()), all_TK.nbytes()}); });
    }
  on_rank_0([&] {
    file->sync();
    file.reset();
    if (formats::file_system().rename(partial, path) != 0) formats::fail_at(partial, "move", errno);
  });
}

}  // namespace moesh::train
