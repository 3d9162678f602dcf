#include "moesh/verify/dump.h"

#include <ATen/ATen.h>

#include <fstream>

#include "moesh/base/error.h"
#include "moesh/checkpoint/part.h"
#include "moesh/formats/safetensors.h"

namespace moesh::verify {
void write_tensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<formats::TensorInfo> infos;
  for (const auto& [name, value] : tensors.tensors)
    infos.push_back({.name = name,
                     .dtype = checkpoint::disk_dtype(value.scalar_type()),
                     .shape = value.sizes().vec()});
  const std::string header = formats::write_safetensors_header(infos, {});
  std::ofstream file(path, std::ios::binary);
  file << header;
  for (size_t i = 0; i < infos.size(); ++i) {
    const at::Tensor bytes = tensors.tensors[i].second.detach().cpu().contiguous();
    file.seekp(static_cast<std::streamoff>(
        header.size() + infos[i].begin));  // the header may order them by element size
    file.write(static_cast<const char*>(bytes.data_ptr()),
               static_cast<std::streamsize>(bytes.nbytes()));
  }
  file.flush();
  MOESH_CHECK(file.good(), ErrorKind::config, "cannot write ", path,
              "; choose a place that can be written and has room");
}

}  // namespace moesh::verify
