// Stands in for graph.cpp where LibTorch was built without CUDA, or there is no CUDA toolkit.
#include "moesh/base/error.h"
#include "moesh/kernels/graph.h"

namespace moesh::kernels {
namespace {
constexpr const char* kNone =
    "this moesh was built without CUDA graphs (make gpu builds it with them)";
}

std::string refuses_graphs(c10::Device) { return kNone; }

void keep_for_graph(const at::Tensor&) {}

std::unique_ptr<Graph> record_graph(const std::function<void()>&, const Graph*) {
  throw Error(ErrorKind::config, kNone);
}

}  // namespace moesh::kernels
