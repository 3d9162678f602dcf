#pragma once
// What can go wrong in a world: rank 1 does it, after two operations that went well. Shared by the
// tests of threads and mpi.

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::comm::faults {

struct Fault {
  std::string name;
  std::function<void(Group&)> rank_1;  // what it does as operation 2
  std::vector<std::string> texts;      // all of them are in what each other rank throws
  std::function<void(Group&)> others = [](Group& g) { g.all_reduce(at::ones({3})); };
  std::chrono::milliseconds timeout{30'000};
};

inline std::vector<Channel> all_channels(int size) {
  std::vector<Channel> channels;
  for (int i = 0; i < size; ++i)
    for (int j = 0; j < size; ++j)
      if (i != j) channels.push_back({i, j});
  return channels;
}

/// Rank 1 sends x to all the others.
inline void send_all(Group& g, const at::Tensor& x, std::int64_t label = 0) {
  std::vector<Handle> sends;
  for (int r = 0; r < g.size(); ++r)
    if (r != 1) sends.push_back(g.start_send(x, r, label));
  for (auto& send : sends) send.wait();
}

/// All the others receive from rank 1.
inline void receive(Group& g) { g.start_recv({3}, at::kFloat, 1).wait(); }

inline const std::vector<Fault>& all() {
  static const std::string waited =
      "waited in all_reduce(sum, float32 [3]), operation 2 of group 'world': ";
  static const std::string against =
      " as operation 2 of group 'world', where rank 0 called all_reduce(sum, float32 [3]) as operation 2";
  static const std::string waited_for_message =
      "waited in recv(float32 [3] from rank 1), message 0 of group 'world': ";
  static const std::string against_message = "called recv(float32 [3] from rank 1) as message 0";
  static const std::vector<Fault> faults{
      {"throws",
       [](Group&) { throw std::runtime_error("disk is full"); },
       {waited + "rank 1 failed: disk is full"}},
      // The others wait in another group: if rank 1 waited for its gather, nobody would end before
      // the deadline.
      {"throws_with_a_gather_under_way",
       [](Group& g) {
         const auto twin = g.split(0, 0, "twin");
         const Handle gather = g.start_all_gather(at::ones({20'000}));
         throw std::runtime_error("disk is full");
       },
       {"waited in all_reduce(sum, float32 [3]), operation 0 of group 'twin': rank 1 failed: disk is full"},
       [](Group& g) { g.split(0, 0, "twin")->all_reduce(at::ones({3})); },
       std::chrono::milliseconds(3'000)},
      {"returns", [](Group&) {}, {waited + "rank 1 has returned and will not come"}},
      {"other_operation",
       [](Group& g) { g.all_gather(at::ones({3})); },
       {"rank 1 called all_gather(float32 [3])" + against}},
      {"other_shape",
       [](Group& g) { g.all_reduce(at::ones({4})); },
       {"rank 1 called all_reduce(sum, float32 [4])" + against}},
      {"other_dtype",
       [](Group& g) { g.all_reduce(at::ones({3}, at::kDouble)); },
       {"rank 1 called all_reduce(sum, float64 [3])" + against}},
      {"other_reduction",
       [](Group& g) { g.all_reduce(at::ones({3}), ReduceOp::max); },
       {"rank 1 called all_reduce(max, float32 [3])" + against}},
      // Large enough that blocks do not fit into each other, nor into what MPI takes at once.
      {"other_size",
       [](Group& g) { g.all_reduce(at::ones({300'000})); },
       {"rank 1 called all_reduce(sum, float32 [300000]) as operation 2",
        "called all_reduce(sum, float32 [20000])"},
       [](Group& g) { g.all_reduce(at::ones({20'000})); }},
      {"other_rows",
       [](Group& g) {
         Rows rows(static_cast<size_t>(g.size()), 2);
         rows[0] = 1, rows[1] = 3;
         g.reduce_scatter(at::ones({2 * g.size(), 5}), rows);
       },
       {"rank 1 called reduce_scatter(sum, float32 [",
        "as operation 2 of group 'world' with other rows than rank 0"},
       [](Group& g) { g.reduce_scatter(at::ones({2 * g.size(), 5})); }},
      // Rank 0 is told of fewer rows than it expects.
      {"other_counts",
       [](Group& g) {
         Rows send(static_cast<size_t>(g.size()), 2);
         send[0] = 1;
         g.all_to_all(at::ones({2 * g.size() - 1}), send, Rows(send.size(), 2));
         g.barrier();
       },
       {"operation 2 of group 'world'",
        "rank 1 sends 1 elements and rank 0 expects 2. Every rank must pass the same rows"},
       [](Group& g) {
         g.all_to_all(at::ones({2 * g.size()}), {}, {});
         g.barrier();
       }},
      {"late",
       [](Group& g) {
         std::this_thread::sleep_for(std::chrono::seconds(2));
         g.all_reduce(at::ones({3}));
       },
       {waited, "rank 1 did not arrive within 0.8 s"},
       [](Group& g) { g.all_reduce(at::ones({3})); },
       std::chrono::milliseconds(800)},
      {"throws_before_a_message",
       [](Group&) { throw std::runtime_error("disk is full"); },
       {waited_for_message + "rank 1 failed: disk is full"},
       receive},
      {"returns_before_a_message",
       [](Group&) {},
       {waited_for_message + "rank 1 has returned and will not come"},
       receive},
      // Too large for what MPI takes at once.
      {"takes_no_message",
       [](Group&) {},
       {"waited in send(float32 [300000] to rank 1), message 0 of group 'world': rank 1 has returned"},
       [](Group& g) { g.start_send(at::ones({300'000}), 1).wait(); }},
      {"late_message",
       [](Group& g) {
         std::this_thread::sleep_for(std::chrono::seconds(2));
         send_all(g, at::ones({3}));
       },
       {waited_for_message + "rank 1 did not arrive within 0.8 s"},
       receive,
       std::chrono::milliseconds(800)},
      {"message_of_other_sizes",
       [](Group& g) { send_all(g, at::ones({300'000})); },
       {"rank 1 called send(float32 [300000] to rank ", against_message},
       receive},
      {"message_of_other_dtype",
       [](Group& g) { send_all(g, at::ones({3}, at::kLong)); },
       {"rank 1 called send(int64 [3] to rank ", against_message},
       receive},
      {"message_of_other_label",
       [](Group& g) { send_all(g, at::ones({3}), 7); },
       {"rank 1 called send(float32 [3] with label 7 to rank ", against_message},
       receive},
  };
  return faults;
}

inline void run(const Fault& fault, Group& world) {
  world.all_reduce(at::ones({2, 2}));  // operation 0
  world.barrier();                     // operation 1
  world.open_channels(all_channels(world.size()));
  if (world.rank() == 1) {
    fault.rank_1(world);
  } else {
    fault.others(world);
  }
}

}  // namespace moesh::comm::faults
