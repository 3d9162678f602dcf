#include "moesh/train/dump.h"

#include <ATen/ATen.h>

#include <fstream>

#include "moesh/base/error.h"
#include "moesh/formats/safetensors.h"

namespace moesh::train {
namespace {

formats::Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return formats::Dtype::f64;
    case at::kFloat: return formats::Dtype::f32;
    case at::kBFloat16: return formats::Dtype::bf16;
    case at::kLong: return formats::Dtype::i64;
    default: throw Error(ErrorKind::internal, detail::concat("a tensor of type ", type, " has no place in a file"));
  }
}

}  // namespace

void write_tensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<formats::TensorInfo> infos;
  for (const auto& [name, value] : tensors.tensors)
    infos.push_back({.name = name, .dtype = dtype_of(value.scalar_type()), .shape = value.sizes().vec()});
  const std::string header = formats::write_safetensors_header(infos, {});
  std::ofstream file(path, std::ios::binary);
  file << header;
  for (size_t i = 0; i < infos.size(); ++i) {
    const at::Tensor bytes = tensors.tensors[i].second.detach().cpu().contiguous();
    file.seekp(static_cast<std::streamoff>(header.size() + infos[i].begin));  // the header may order them by element size
    file.write(static_cast<const char*>(bytes.data_ptr()), static_cast<std::streamsize>(bytes.nbytes()));
  }
  file.flush();
  MOESH_CHECK(file.good(), ErrorKind::config, "cannot write ", path, "; choose a place that can be written and has room");
}

}  // namespace moesh::train
