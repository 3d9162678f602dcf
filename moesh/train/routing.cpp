#include "moesh/train/routing.h"

#include <ATen/ATen.h>

#include <memory>

#include "moesh/base/error.h"
#include "moesh/base/sections.h"
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
          router_shape(config).top_k};
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
  // Nobody writes to it.
  void* values = const_cast<char*>(file->bytes().data() + header.data_start);
  return nn::StepRouting{
      .experts_LTK = at::from_blob(values, sizes, [file](void*) {}, type), .name = path};
}

RoutingFiles::RoutingFiles(const Config& config, const models::Model& model, comm::Group& world)
    : config_(config), model_(model), world_(world) {
  if (config.moe.record.empty()) return;
  checkpoint::together(world, [&] {
    if (world.rank() == 0) checkpoint::make_folders(config.moe.record);
  });
  recorded_.experts_LTK = at::empty(sizes_of_step(config, model), at::kInt);
  probe_.record = &recorded_;
}

StepOptions RoutingFiles::with_probe(StepOptions options) {
  if (!config_.moe.replay.empty() || !config_.moe.record.empty()) options.forward.probe = &probe_;
  return options;
}

void RoutingFiles::begin_step(std::int64_t step) {
  const InSection section(Section::data);
  given_ = read_routing(config_, model_, step);
  probe_.replay = given_ ? &*given_ : nullptr;
  // Less than any expert: the rank that has a token knows better.
  if (probe_.record) recorded_.experts_LTK.fill_(-1);
}

void RoutingFiles::end_step(std::int64_t step) {
  if (!probe_.record) return;
  const InSection section(Section::saving);
  for (std::int64_t layer = 0; layer < recorded_.experts_LTK.size(0); ++layer) {
    at::Tensor mine_TK = recorded_.experts_LTK[layer];
    mine_TK.copy_(world_.all_reduce(mine_TK.to(device(config_)), comm::ReduceOp::max));
  }
  checkpoint::together(world_, [&] {
    if (world_.rank() == 0)
      write(std::filesystem::path(config_.moe.record) / routing_name(step), recorded_.experts_LTK);
  });
}

// There as a whole, or as it was.
void RoutingFiles::write(const std::filesystem::path& path, const at::Tensor& experts_LTK) const {
  const at::Tensor values = experts_LTK.to(at::kShort);
  const std::filesystem::path partial = path.string() + ".partial";
  formats::file_system().remove(partial);
  {
    checkpoint::OutputFile file(partial, checkpoint::OutputFile::Mode::create);
    const std::string header = formats::npy_header(IdType::int16, values.sizes());
    file.write(0, header);
    file.write(header.size(), {static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
    file.sync();
  }
  if (formats::file_system().rename(partial, path) != 0) formats::fail_at(partial, "move", errno);
}

}  // namespace moesh::train
