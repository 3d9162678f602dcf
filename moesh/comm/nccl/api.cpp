#include "moesh/comm/nccl/api.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "moesh/base/error.h"

namespace moesh::comm {
namespace {

constexpr const char* kName = "libnccl.so.2";

// The head of ncclConfig_t as NCCL 2.14 had it. NCCL reads `size` bytes and gives what a later
// version added its default.
struct ConfigHead {
  std::size_t size = sizeof(ConfigHead);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

template <class F>
F* find(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  MOESH_CHECK(symbol, ErrorKind::config, "the NCCL library has no ", name,
              "; moesh needs NCCL 2.14 or later");
  return reinterpret_cast<F*>(symbol);
}

template <class F>
void bind(void* library, const char* name, std::function<F>& to) {
  to = find<F>(library, name);
}

std::shared_ptr<const NcclApi> table_of(void* library) {
  auto api = std::make_shared<NcclApi>();
  bind(library, "ncclGetUniqueId", api->get_unique_id);
  int version = 0;
  find<NcclResult(int*)>(library, "ncclGetVersion")(&version);
  api->ranks_may_share_device = takes_ranks_that_share_a_gpu(version);
  auto* init = find<NcclResult(NcclComm*, int, NcclUniqueId, int, ConfigHead*)>(
      library, "ncclCommInitRankConfig");
  api->comm_init_rank = [init](NcclComm* comm, int num_ranks, const NcclUniqueId& id, int rank) {
    ConfigHead config;
    return init(comm, num_ranks, id, rank, &config);
  };
  bind(library, "ncclCommFinalize", api->comm_finalize);
  bind(library, "ncclCommDestroy", api->comm_destroy);
  bind(library, "ncclCommAbort", api->comm_abort);
  bind(library, "ncclCommGetAsyncError", api->get_async_error);
  bind(library, "ncclAllReduce", api->all_reduce);
  bind(library, "ncclAllGather", api->all_gather);
  bind(library, "ncclReduceScatter", api->reduce_scatter);
  bind(library, "ncclBroadcast", api->broadcast);
  bind(library, "ncclSend", api->send);
  bind(library, "ncclRecv", api->recv);
  bind(library, "ncclGroupStart", api->group_start);
  bind(library, "ncclGroupEnd", api->group_end);
  bind(library, "ncclGetErrorString", api->error_string);
  bind(library, "ncclGetLastError", api->last_error);
  return api;
}

// The copy that pip puts beside torch: .../torch/lib/libtorch_cpu.so ->
// .../nvidia/nccl/lib/libnccl.so.2
std::string path_beside_torch() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &info) || !info.dli_fname)
    return kName;
  const auto torch = std::filesystem::path(info.dli_fname).parent_path().parent_path();
  return torch.parent_path() / "nvidia" / "nccl" / "lib" / kName;
}

struct Installed {
  std::shared_ptr<const NcclApi> api;
  std::string why_not;
};

Installed find_installed() {
  const std::string beside = path_beside_torch();
  void* library = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (!library) library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (!library) library = dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return {nullptr,
            detail::concat(
                "no ", kName, " is loaded, none is on the loader's path, and there is none at ",
                beside, "; install NCCL (pip install nvidia-nccl-cu13), or use backend host")};
  try {
    return {table_of(library), {}};
  } catch (const Error& e) {
    return {nullptr, e.what()};
  }
}

const Installed& installed() {
  static const Installed found = find_installed();
  return found;
}

}  // namespace

bool takes_ranks_that_share_a_gpu(int nccl_version) {
  const char* asked = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return nccl_version >= 23000 && asked && std::atoi(asked) != 0;
}

std::shared_ptr<const NcclApi> load_nccl(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  MOESH_CHECK(library, ErrorKind::config, "'", path,
              "' cannot be loaded as the NCCL library: ", dlerror());
  return table_of(library);
}

std::shared_ptr<const NcclApi> installed_nccl() {
  MOESH_CHECK(installed().api, ErrorKind::config, "NCCL is not here: ", installed().why_not);
  return installed().api;
}

bool has_nccl() { return installed().api != nullptr; }

}  // namespace moesh::comm
