#pragma once
// How long the ways of dispatch take, from what bench_dispatchers measured on each backend: what
// `auto` chooses by. It depends on the configuration and on how the program was started, which are
// the same for every rank.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "moesh/comm/mesh.h"

namespace moesh::nn {

/// What carries rows from rank to rank.
enum class Exchange { threads_on_cpu, threads_on_gpu, mpi, nccl };

/// That of ranks on this device in a program that was started as this one was.
Exchange exchange_of(at::Device device);
/// That of a run which is planned here and started elsewhere: GPUs without an index are those of
/// one rank each, under a launcher.
Exchange planned_exchange(at::Device device);
const char* to_string(Exchange e);

/// Forward and backward, in milliseconds for the size that was measured: only ratios matter.
struct DispatchRates {
  double row;        // sorting and combining each of the K rows of a token
  double sent_row;   // and taking it to the rank of its expert and back
  double etp_row;    // gathering it on one more etp rank, and summing the results
  double token;      // all_gather: a token on one more rank, and summing the results
  bool is_measured;  // if not: every row that is sent counts the same
};
DispatchRates dispatch_rates(Exchange e);

/// Without what both have in common (experts, router).
struct DispatchTimes {
  double all_to_all, all_gather;
};
DispatchTimes dispatch_times(const DispatchRates& rates, const MeshShape& shape,
                             std::int64_t top_k);

/// Why `auto` takes what it takes, for a log: "all_gather on tp=2 ep=2: 4.1 against 6.7 for
/// all_to_all (threads on a GPU, measured)".
std::string describe_choice(Exchange e, const MeshShape& shape, std::int64_t top_k);

}  // namespace moesh::nn
