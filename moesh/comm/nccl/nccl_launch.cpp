#include "moesh/comm/nccl/nccl_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/rank_status.h"

namespace moesh::comm {
namespace {

// The worlds of the ranks which are threads of this process: a fault in one of them reaches the
// others at once.
class LocalWorlds {
 public:
  void add(const std::shared_ptr<Group>& world) {
    std::lock_guard lock(mutex_);
    worlds_.push_back(world);
  }
  /// Stops the others, and gives the first fault of all.
  std::exception_ptr fail(int rank, const std::exception_ptr& fault) {
    std::vector<std::weak_ptr<Group>> worlds;
    {
      std::lock_guard lock(mutex_);
      if (first_) return first_;
      first_ = fault;
      worlds = worlds_;
    }
    const std::string reason = detail::concat("rank ", rank, " failed: ", text_of(fault));
    for (const auto& weak : worlds)
      if (const auto world = weak.lock()) stop_nccl(*world, reason);
    return fault;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> worlds_;
  std::exception_ptr first_;
};

}  // namespace

void prepare_cuda() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  try {
    if (num_launched_processes() < 2) return;
  } catch (const Error&) {
    return;  // launch() says what is wrong with the environment; other commands start no ranks
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
}

bool should_try_nccl(int num_ranks, const LaunchOptions& options) {
  if (options.backend == Backend::nccl) return true;
  const int num_processes = num_launched_processes();
  return options.backend == Backend::automatic && options.device.is_cuda() && num_processes > 0 &&
         (num_ranks == 0 || num_ranks == num_processes) && has_nccl();
}

std::function<void(Group&)> on_nccl(std::function<void(Group&)> f, LaunchOptions options,
                                    std::shared_ptr<const NcclApi> api) {
  return [f = std::move(f), options, api = std::move(api),
          local = std::make_shared<LocalWorlds>()](Group& host) {
    // Ranks that are threads of this process take one GPU each.
    const int place = num_launched_processes() > 0 ? local_process() : host.rank();
    const at::Device device = device_for(options.device, place);
    use_device(device);
    const auto& table = api ? api : installed_nccl();
    if (options.backend == Backend::automatic &&
        !ranks_that_share_a_gpu(host, device, table->ranks_may_share_device).empty()) {
      if (options.checked) check_ranks(host);
      return f(host);
    }
    // The `checked` group reads what it gathers: there a fault must show at once.
    const auto world = nccl_world(
        host, device, {.timeout = options.timeout, .block_host = options.checked, .api = table});
    local->add(world);
    if (options.checked) check_ranks(*world);
    try {
      f(*world);
      close_nccl(*world);
    } catch (...) {
      std::rethrow_exception(local->fail(host.rank(), std::current_exception()));
    }
  };
}

}  // namespace moesh::comm
