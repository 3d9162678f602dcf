#include "moesh/checkpoint/convert.h"

#include <algorithm>
#include <set>

#include <ATen/ops/empty.h>

#include "moesh/base/error.h"
#include "moesh/checkpoint/companions.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/lock.h"
#include "moesh/checkpoint/plan.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/safetensors_index.h"

namespace moesh::checkpoint {
namespace {

const char* torch_name(formats::Dtype dtype) {
  switch (dtype) {
    case formats::Dtype::bf16: return "bfloat16";
    case formats::Dtype::f16: return "float16";
    case formats::Dtype::f64: return "float64";
    default: return "float32";
  }
}

void set(formats::JsonValue& json, const std::string& key, const formats::JsonValue& value) {
  for (auto& [name, old] : std::get<formats::JsonObject>(json.value))
    if (name == key) old = value;
}

// The config.json that was there, with what the conversion changes.
std::string changed_config(const std::string& text, const ConvertOptions& options,
                           bool was_quantized) {
  formats::JsonValue json = formats::parse_json(text, "config.json");
  if (was_quantized)
    std::erase_if(std::get<formats::JsonObject>(json.value),
                  [](const auto& entry) { return entry.first == "quantization_config"; });
  if (options.dtype)
    for (const char* key : {"dtype", "torch_dtype"}) set(json, key, {torch_name(*options.dtype)});
  return formats::to_json(json);
}

// A conversion that was killed has left its folder, which has a manifest from its beginning; before
// that only the lock. Whatever else is there is not moesh's.
void check_left_over(const std::filesystem::path& temporary) {
  if (!formats::exists(temporary)) return;
  for (const auto& name : formats::names_in(temporary))
    MOESH_CHECK(name == kLockFile || formats::exists(temporary / formats::kManifestFile),
                ErrorKind::storage, "'", temporary.string(),
                "' is in the way, and moesh did not make it; move it away");
}

std::set<std::string> names_of(const formats::DiskTable& table) {
  std::set<std::string> names;
  for (const auto& t : table.tensors) names.insert(t.name);
  return names;
}

// The parameters of one tensor, whole as far as they are in it.
std::vector<Part> parts_of(const formats::DiskTensor& tensor, at::ScalarType dtype) {
  std::vector<Part> parts;
  for (const auto& source : tensor.sources) {
    Region region{source.offset, {}};
    for (const auto dim : source.dims) region.length.push_back(tensor.view[dim]);
    parts.push_back({.name = source.param,
                     .region = region,
                     .owned = true,
                     .value = at::empty(region.length, dtype)});
  }
  return parts;
}

}  // namespace

Converted convert(const std::filesystem::path& from, const std::filesystem::path& target,
                  const formats::ModelOnDisk& model, const ConvertOptions& options) {
  const auto to = target.has_filename() ? target : target.parent_path();  // "out/" is "out"
  MOESH_CHECK(!formats::exists(to), ErrorKind::config, "'", to.string(),
              "' already exists; name a folder that does not");
  const TensorFolder source = TensorFolder::weights(from);
  const auto layout = find_layout(source, model);
  const auto has_one_layout = names_of(model.table(formats::ExpertLayout::per_expert)) ==
                              names_of(model.table(formats::ExpertLayout::stacked));
  MOESH_CHECK(!has_one_layout || options.layout != formats::ExpertLayout::per_expert,
              ErrorKind::config, "--layout per_expert: ", model.model_type,
              " has one layout on disk, with its experts stacked, and transformers reads no other; "
              "leave out --layout");
  const formats::DiskTable from_table = model.table(layout);
  formats::DiskTable to_table = model.table(options.layout.value_or(layout));
  const Loader loader(source, from_table);
  for (auto& t : to_table.tensors) {
    const auto old = loader.dtype_of(t.sources.front().param);
    t.dtype = options.dtype ? t.dtype.value_or(*options.dtype) : old;
  }

  const auto temporary = std::filesystem::path(to).concat(".saving");
  check_left_over(temporary);
  const FolderLock lock(temporary);  // a second conversion to this name is refused
  remove_contents(temporary, {kLockFile});
  write_file(temporary / formats::kManifestFile, "");
  formats::Manifest manifest{.model = model.model_type};
  const auto add_file = [&](const std::string& name, const formats::BlockSums& written) {
    manifest.files.push_back(formats::hash_file(temporary.string(), name, written));
  };
  Converted result;
  formats::SafetensorsIndex index{.total_size = 0};
  const auto files = plan_files("model", to_table.tensors, options.max_shard_size);
  for (const auto& file : files) {
    OutputFile out(temporary / file.name, OutputFile::Mode::create);
    out.reserve(file.size);
    out.write(0, file.header);
    for (const auto& t : file.tensors) {
      const auto parts = parts_of(*t.tensor, torch_dtype(t.dtype, t.tensor->name));
      loader.load(parts);
      write_tensor(out, t, by_name(parts));
      index.weight_map[t.tensor->name] = file.name;
      *index.total_size +=
          static_cast<std::uint64_t>(num_elements(t.tensor->shape)) * formats::size_of(t.dtype);
      ++result.num_tensors;
    }
    out.sync();
    add_file(file.name, out.sums());
  }
  const auto add_text = [&](const std::string& name, const std::string& text) {
    add_file(name, write_file(temporary / name, text));
  };
  add_text(formats::kIndexFile, formats::write_safetensors_index(index));
  add_text("config.json", changed_config(read_config(from), options, source.has_quantized()));
  for (const auto& [name, text] : read_companions(from)) add_text(name, text);
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  {
    OutputFile out(temporary / formats::kManifestFile, OutputFile::Mode::open);
    out.write(0, formats::write_manifest(manifest));
    out.sync();
  }
  sync_folder(temporary);
  rename_folder(temporary, to);
  // Not before: while the folder is under its temporary name, a second one would take it over.
  remove_folder(to / kLockFile);
  result.num_files = files.size(), result.num_bytes = *index.total_size;
  return result;
}

}  // namespace moesh::checkpoint
