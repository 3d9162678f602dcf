#include "moesh/checkpoint/save.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "moesh/base/error.h"

namespace moesh::checkpoint {
namespace {

std::string file_name(const std::string& prefix, std::size_t number, std::size_t count) {
  if (is_one_file(prefix)) return prefix;
  char text[48];
  std::snprintf(text, sizeof text, "-%05zu-of-%05zu.safetensors", number, count);
  return prefix + text;
}

std::uint64_t num_bytes(const formats::DiskTensor& t) {
  return static_cast<std::uint64_t>(num_elements(t.shape)) * formats::size_of(t.dtype.value());
}

// This rank's part of one tensor, in boxes that are as large as possible.
std::vector<BoxWithValues> owned_boxes(const formats::DiskTensor& tensor,
                                       const PartsByName& parts) {
  std::vector<BoxWithValues> boxes;
  for (const auto& source : tensor.sources) {
    const auto found = parts.find(source.param);
    // A rank of a pipeline has the parameters of its own stages.
    if (found == parts.end() || !found->second->owned) continue;
    if (const auto overlap = overlap_with(tensor, source, found->second->region))
      boxes.push_back({overlap->view, in_view_order(*found->second, source, *overlap)});
  }
  return merged(std::move(boxes));
}

}  // namespace

bool is_one_file(const std::string& prefix) { return prefix.ends_with(".safetensors"); }

std::vector<PlannedFile> plan_files(const std::string& prefix,
                                    const std::vector<formats::DiskTensor>& tensors,
                                    std::uint64_t max_size) {
  std::vector<std::vector<const formats::DiskTensor*>> groups;
  std::uint64_t size = 0;
  for (const auto& t : tensors) {
    const bool is_full = !is_one_file(prefix) && size > 0 && size + num_bytes(t) > max_size;
    if (groups.empty() || is_full) {
      groups.emplace_back();
      size = 0;
    }
    groups.back().push_back(&t);
    size += num_bytes(t);
  }
  std::vector<PlannedFile> files;
  for (const auto& group : groups) {
    PlannedFile file{.name = file_name(prefix, files.size() + 1, groups.size())};
    std::vector<formats::TensorInfo> infos;
    for (const auto* t : group)
      infos.push_back({.name = t->name, .dtype = t->dtype.value(), .shape = t->shape});
    file.header = formats::write_safetensors_header(
        infos, {{"format", "pt"}});  // without it transformers refuses the file
    file.size = file.header.size();
    for (std::size_t i = 0; i < group.size(); ++i) {
      file.tensors.push_back({group[i], infos[i].dtype, file.header.size() + infos[i].begin});
      file.size += infos[i].end - infos[i].begin;
    }
    files.push_back(std::move(file));
  }
  return files;
}

void add_to(formats::SafetensorsIndex& index, const PlannedFile& file) {
  for (const auto& t : file.tensors) {
    index.weight_map[t.tensor->name] = file.name;
    *index.total_size += num_bytes(*t.tensor);
  }
}

PartsByName by_name(const std::vector<TensorPart>& parts) {
  PartsByName map;
  for (const auto& p : parts)
    MOESH_CHECK(map.emplace(p.name, &p).second, "two parts of a checkpoint are called '", p.name,
                "'");
  return map;
}

namespace {
// In host memory. On a device one tensor is converted at a time, whatever the number of threads:
// there may be little memory left.
at::Tensor converted(const at::Tensor& value, at::ScalarType dtype) {
  if (value.is_cpu()) return value.to(dtype).contiguous();
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return to_host(value.to(dtype).contiguous());
}
}  // namespace

bool owns_some(const PlannedTensor& t, const PartsByName& parts) {
  return std::any_of(t.tensor->sources.begin(), t.tensor->sources.end(), [&](const auto& source) {
    const auto found = parts.find(source.param);
    return found != parts.end() && found->second->owned &&
           overlap_with(*t.tensor, source, found->second->region);
  });
}

void write_tensor(formats::OutputFile& out, const PlannedTensor& t, const PartsByName& parts) {
  const auto dtype = torch_dtype(t.dtype, t.tensor->name);
  const auto element = formats::size_of(t.dtype);
  for (const auto& [box, value] : owned_boxes(*t.tensor, parts)) {
    const at::Tensor host = converted(value, dtype);
    const auto* bytes = static_cast<const char*>(host.const_data_ptr());
    each_run(t.tensor->view, box,
             [&](std::int64_t in_view, std::int64_t in_box, std::int64_t length) {
               out.write(t.begin + static_cast<std::uint64_t>(in_view) * element,
                         {bytes + static_cast<std::uint64_t>(in_box) * element,
                          static_cast<std::uint64_t>(length) * element});
             });
  }
}

}  // namespace moesh::checkpoint
