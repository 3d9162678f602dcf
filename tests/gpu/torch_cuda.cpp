#include "tests/gpu/torch_cuda.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <string>

namespace moesh::gpu {
namespace {

class CountWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchronizing") != std::string::npos) ++count;
  }
  int count = 0;
};

// LibTorch warns of every wait, in all threads, while one of these lives.
class WarnOfWaits {
 public:
  WarnOfWaits() { change(1); }
  ~WarnOfWaits() { change(-1); }

 private:
  static void change(int by) {
    using enum c10::cuda::SyncDebugMode;
    static std::mutex mutex;
    static int num_alive = 0;
    const std::lock_guard lock(mutex);
    num_alive += by;
    c10::cuda::warning_state().set_sync_debug_mode(num_alive > 0 ? L_WARN : L_DISABLED);
  }
};

}  // namespace

int count_waits(const std::function<void()>& f) {
  CountWarnings counter;
  const c10::WarningUtils::WarningHandlerGuard guard(&counter);
  const WarnOfWaits warn;
  f();
  return counter.count;
}

float milliseconds(const std::function<void()>& f) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  f();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end);
}

}  // namespace moesh::gpu
