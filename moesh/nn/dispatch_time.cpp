#include "moesh/nn/dispatch_time.h"

#include <sstream>

#include "moesh/comm/launch.h"

namespace moesh::nn {

Exchange exchange_of(at::Device device) {
  const bool launched = comm::num_launched_processes() > 0;
  if (device.is_cuda()) return launched ? Exchange::nccl : Exchange::threads_on_gpu;
  return launched ? Exchange::mpi : Exchange::threads_on_cpu;
}

Exchange planned_exchange(at::Device device) {
  return device.is_cuda() && !device.has_index() ? Exchange::nccl : exchange_of(device);
}

const char* to_string(Exchange e) {
  switch (e) {
    case Exchange::threads_on_cpu: return "threads on a CPU";
    case Exchange::threads_on_gpu: return "threads on a GPU";
    case Exchange::mpi: return "MPI";
    case Exchange::nccl: return "NCCL";
  }
  return "unknown";
}

// Least squares over the table of docs/performance.md, "Dispatchers".
DispatchRates dispatch_rates(Exchange e) {
  if (e == Exchange::threads_on_gpu) return {0.93, 0.37, 1.77, 4.09, true};
  return {0, 1, 1, 1, false};
}

DispatchTimes dispatch_times(const DispatchRates& rates, const MeshShape& shape,
                             std::int64_t top_k) {
  const double rows = static_cast<double>(top_k), sent = (shape.ep - 1.0) / shape.ep;
  return {
      .all_to_all = rows * (rates.row + rates.sent_row * sent + rates.etp_row * (shape.etp - 1)),
      .all_gather = rates.token * (shape.ep * shape.etp - 1)};
}

std::string describe_choice(Exchange e, const MeshShape& shape, std::int64_t top_k) {
  const DispatchRates rates = dispatch_rates(e);
  const DispatchTimes t = dispatch_times(rates, shape, top_k);
  const bool rows = t.all_to_all < t.all_gather;
  std::ostringstream os;
  os.precision(2);
  os << (rows ? "all_to_all" : "all_gather") << " on " << shape.describe() << ": "
     << (rows ? t.all_to_all : t.all_gather) << " against " << (rows ? t.all_gather : t.all_to_all)
     << " for " << (rows ? "all_gather" : "all_to_all") << " (" << to_string(e) << ", "
     << (rates.is_measured ? "time as measured" : "rows that are sent: nothing was measured")
     << ")";
  return os.str();
}

}  // namespace moesh::nn
