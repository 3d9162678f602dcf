#include "moesh/train/lanes.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

#include "moesh/base/turns.h"
#include "moesh/comm/flight.h"
#include "moesh/comm/group.h"
#include "moesh/comm/mesh.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/nn/later.h"

namespace moesh::train {
namespace {

// What the thread of a rank has by now, for another thread of the same rank.
class OfRank {
 public:
  explicit OfRank(at::Device device) {
    if (!device.is_cuda()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_ = guard.getStream(guard.getDevice());
  }

  void run(const std::function<void()>& f) const {
    const at::ThreadLocalStateGuard torch(torch_);  // among others: backward in its own thread
    at::set_num_threads(num_threads_);
    if (stream_) {
      const c10::impl::VirtualGuardImpl guard(stream_->device_type());
      guard.setDevice(stream_->device());
      guard.exchangeStream(*stream_);
    }
    const MeshScope mesh(mesh_);
    const auto observers = comm::use_observers_of(observers_);
    comm::flight::use(recorder_);
    const kernels::UseGpuKernels kernels(kernels_);
    const auto checks = nn::CheckLater::use(checks_);
    f();
  }

 private:
  at::ThreadLocalState torch_;
  int num_threads_ = at::get_num_threads();
  std::optional<c10::Stream> stream_;
  const Mesh& mesh_ = current_mesh();
  comm::ThreadObservers& observers_ = comm::thread_observers();
  std::shared_ptr<comm::flight::Recorder> recorder_ = comm::flight::current();
  kernels::GpuKernels kernels_ = kernels::gpu_kernels();
  nn::CheckLater* checks_ = nn::CheckLater::current();
};

}  // namespace

void in_lanes(StepState& state, at::Device device,
              const std::function<void(int lane, StepState& state)>& f) {
  const OfRank rank(device);
  std::vector<std::function<void()>> lanes{[&] { f(0, state); }};
  for (int lane = 1; lane < kNumLanes; ++lane)
    lanes.emplace_back([&, lane] {
      rank.run([&] {
        StepState part(&state);
        f(lane, part);
      });
    });
  take_turns(lanes);
}

}  // namespace moesh::train
