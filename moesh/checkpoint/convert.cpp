#include "moesh/checkpoint/convert.h"

#include <algorithm>
#include <set>

#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>

#include "moesh/base/error.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/safetensors.h"
#include "moesh/kernels/float8.h"

namespace moesh::checkpoint {
namespace {

void set(formats::JsonValue& json, const std::string& key, const formats::JsonValue& value) {
  for (auto& [name, old] : std::get<formats::JsonObject>(json.value))
    if (name == key) old = value;
}

constexpr std::int64_t kBlock = 128;  // of float8, in files
constexpr const char* kScales = "_scale_inv";

bool is_float8(const formats::DiskTensor& tensor) {
  return tensor.dtype == formats::Dtype::f8_e4m3;
}

// Tensors of such parameters become float8, and the scales of each come right behind it.
void add_scales(formats::DiskTable& table, const std::set<std::string>& params,
                const std::string& model_type) {
  std::vector<formats::DiskTensor> all;
  for (formats::DiskTensor& t : table.tensors) {
    const bool is_wanted = std::ranges::all_of(
        t.sources, [&](const auto& source) { return params.contains(source.param); });
    if (is_wanted) {
      MOESH_CHECK(t.shape.size() == 2 && t.sources.size() == 1 && t.sources[0].fixed.empty(),
                  ErrorKind::config, "--float8: '", t.name, "' of ", model_type, " is ", t.shape,
                  ", and float8 takes matrices of one weight each; with --layout per_expert the "
                  "experts are written one by one, where the model has that layout");
      t.dtype = formats::Dtype::f8_e4m3;
    }
    all.push_back(t);
    if (!is_wanted) continue;
    all.push_back(formats::whole_tensor(
        t.name + kScales, t.name,
        {(t.shape[0] + kBlock - 1) / kBlock, (t.shape[1] + kBlock - 1) / kBlock}));
    all.back().dtype = formats::Dtype::f32;
  }
  table.tensors = std::move(all);
}

// What transformers needs to open it: which modules have no scales.
formats::JsonValue float8_config(const formats::DiskTable& table) {
  formats::JsonList others;
  const std::string end = ".weight";
  for (const auto& t : table.tensors)
    if (t.shape.size() == 2 && !is_float8(t) && t.name.ends_with(end))
      others.push_back({t.name.substr(0, t.name.size() - end.size())});
  return {formats::JsonObject{{"quant_method", {std::string("fp8")}},
                              {"fmt", {std::string("e4m3")}},
                              {"activation_scheme", {std::string("dynamic")}},
                              {"weight_block_size", {formats::JsonList{{kBlock}, {kBlock}}}},
                              {"modules_to_not_convert", {others}}}};
}

// The config.json that was there, with what the conversion changes.
std::string changed_config(const std::string& text, const ConvertOptions& options,
                           const formats::DiskTable& table, bool was_quantized) {
  formats::JsonValue json = formats::parse_json(text, "config.json");
  if (was_quantized)
    std::erase_if(std::get<formats::JsonObject>(json.value),
                  [](const auto& entry) { return entry.first == "quantization_config"; });
  if (!options.float8.empty())
    std::get<formats::JsonObject>(json.value)
        .emplace_back("quantization_config", float8_config(table));
  if (options.dtype)
    for (const char* key : {"dtype", "torch_dtype"})
      set(json, key, {formats::torch_name(*options.dtype)});
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

// The parameters of one tensor, whole as far as they are in it: of several pieces of one, the box
// around them.
std::vector<TensorPart> parts_of(const formats::DiskTensor& tensor, at::ScalarType dtype) {
  std::vector<TensorPart> parts;
  for (const auto& source : tensor.sources) {
    Region region{source.offset, {}};
    for (const auto dim : source.dims) region.length.push_back(tensor.view[dim]);
    const auto same = std::ranges::find(parts, source.param, &TensorPart::name);
    if (same == parts.end()) {
      parts.push_back({.name = source.param, .region = region, .owned = true});
      continue;
    }
    for (std::size_t d = 0; d < region.start.size(); ++d) {
      auto& [start, length] = same->region;
      const std::int64_t end = std::max(start[d] + length[d], region.start[d] + region.length[d]);
      start[d] = std::min(start[d], region.start[d]);
      length[d] = end - start[d];
    }
  }
  for (TensorPart& part : parts) part.value = at::empty(part.region.length, dtype);
  return parts;
}

// Adds to boxes of the model's parameters what an adapter adds to them.
class Merger {
 public:
  explicit Merger(const Merge& merge)
      : merge_(merge),
        source_(TensorFolder::adapter(merge.adapter)),
        loader_(source_, merge.table) {
    check_names(source_, merge.table);
  }

  bool adds_to(const std::string& param) const { return merge_.additions.contains(param); }
  void add(TensorPart& part) {
    const formats::LoraTerm& addition = merge_.additions.at(part.name);
    const at::Tensor a = load(addition.a), both = load(addition.b),
                     b = addition.half ? both.select(1, *addition.half) : both;
    const std::int64_t last = part.value.dim() - 1;
    const auto& [start, length] = part.region;
    const auto of = [&](const at::Tensor& t, std::int64_t dim, std::int64_t of_part) {
      const auto d = static_cast<std::size_t>(of_part);
      return t.narrow(dim, start[d], length[d]);
    };
    at::Tensor rows = of(b, last - 1, last - 1), columns = of(a, last, last);
    if (last == 2) rows = of(rows, 0, 0), columns = of(columns, 0, 0);
    part.value.add_(at::matmul(rows, columns).to(part.value.scalar_type()), addition.scale);
  }

 private:
  // Experts that lie one by one ask for the same A and B one after the other.
  at::Tensor load(const std::string& param) {
    if (const auto found = last_.find(param); found != last_.end()) return found->second;
    if (last_.size() >= 6) last_.clear();
    for (const auto& tensor : merge_.table.tensors)
      for (const auto& s : tensor.sources) {
        if (s.param != param) continue;
        std::vector<TensorPart> parts = parts_of(tensor, at::kDouble);
        loader_.load(parts);
        return last_[param] = parts[0].value;
      }
    throw Error(ErrorKind::internal, "no tensor of the adapter holds " + param);
  }

  const Merge& merge_;
  TensorFolder source_;
  Loader loader_;
  std::map<std::string, at::Tensor> last_;
};

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
  tell_left_out(source, from_table);
  const Loader loader(source, from_table);
  std::optional<Merger> merger;
  if (options.merge) merger.emplace(*options.merge);
  for (auto& t : to_table.tensors) {
    const auto old = loader.dtype_of(t.sources.front().param);
    t.dtype = options.dtype ? t.dtype.value_or(*options.dtype) : old;
  }
  if (!options.float8.empty()) add_scales(to_table, options.float8, model.model_type);

  const auto temporary = std::filesystem::path(to).concat(".saving");
  check_left_over(temporary);
  const FolderLock lock(temporary);  // a second conversion to this name is refused
  remove_contents(temporary, {kLockFile});
  write_file(temporary / formats::kManifestFile, "");
  formats::Manifest manifest{.model = model.model_type};
  const auto add_file = [&](const std::string& name, const formats::BlockSums& written) {
    manifest.files.push_back(formats::hash_file(temporary.string(), name, written));
  };
  formats::SafetensorsIndex index{.total_size = 0};
  std::optional<kernels::QuantizedBox> last;  // whose scales come next
  const auto write_bytes = [](formats::OutputFile& out, std::uint64_t at, const at::Tensor& t) {
    const at::Tensor bytes = t.contiguous();
    out.write(at, {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
  };
  const auto files = plan_files("model", to_table.tensors, options.max_shard_size);
  for (const auto& file : files) {
    formats::OutputFile out(temporary / file.name, formats::OutputFile::Mode::create);
    out.reserve(file.size);
    out.write(0, file.header);
    for (const auto& t : file.tensors) {
      if (t.tensor->name.ends_with(kScales)) {
        write_bytes(out, t.begin, last->scales);
      } else {
        const bool is_rounded = is_float8(*t.tensor);
        auto parts =
            parts_of(*t.tensor, is_rounded ? at::kFloat : torch_dtype(t.dtype, t.tensor->name));
        for (TensorPart& part : parts)  // what is added to is rounded once
          if (merger && merger->adds_to(part.name)) part.value = part.value.to(at::kDouble);
        loader.load(parts);
        for (TensorPart& part : parts)
          if (merger && merger->adds_to(part.name)) merger->add(part);
        if (is_rounded) {
          last = kernels::float8_blocks(parts[0].value.reshape(t.tensor->shape), kBlock);
          write_bytes(out, t.begin, last->codes);
        } else {
          write_tensor(out, t, by_name(parts));
        }
      }
    }
    add_to(index, file);
    out.sync();
    add_file(file.name, out.sums());
  }
  const auto add_text = [&](const std::string& name, const std::string& text) {
    add_file(name, write_file(temporary / name, text));
  };
  add_text(formats::kIndexFile, formats::write_safetensors_index(index));
  add_text("config.json",
           changed_config(read_config(from), options, to_table, source.has_quantized()));
  for (const auto& [name, text] : read_companions(from)) add_text(name, text);
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  {
    formats::OutputFile out(temporary / formats::kManifestFile, formats::OutputFile::Mode::open);
    out.write(0, formats::write_manifest(manifest));
    out.sync();
  }
  sync_folder(temporary);
  rename_folder(temporary, to);
  // Not before: while the folder is under its temporary name, a second one would take it over.
  remove_folder(to / kLockFile);
  return {.num_tensors = index.weight_map.size(),
          .num_files = files.size(),
          .num_bytes = *index.total_size};
}

}  // namespace moesh::checkpoint
