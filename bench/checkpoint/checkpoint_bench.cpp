// How fast a checkpoint is saved and loaded, against `dd` and `cp` of the same bytes, and how long
// an asynchronous save holds up a step.
//   bench_checkpoint FOLDER [MiB] [RANKS] [cpu|cuda] [THREADS]

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "moesh/base/error.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/comm/launch.h"

namespace moesh::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;
using std::filesystem::path;

constexpr std::int64_t kWidth = 2048;
constexpr int kRepeats = 3;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Matrices [rows, 2048] of 16 MiB: half of them split by rows, as FSDP does, and half by columns,
// as tensor parallelism does. A third are weights, two thirds the state of AdamW.
struct Problem {
  std::int64_t num_matrices;
  int num_ranks;
  at::Device device;
};

std::vector<TensorPart> parts_of(const std::string& prefix, std::int64_t count, int rank,
                                 int num_ranks, bool filled) {
  std::vector<TensorPart> parts;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool by_rows = i % 2 == 0;
    Region region{{0, 0}, {kWidth, kWidth}};
    const std::size_t dim = by_rows ? 0 : 1;
    region.length[dim] = kWidth / num_ranks;
    region.start[dim] = rank * region.length[dim];
    // Element (r, c) of matrix i has its own value.
    at::Tensor value = at::empty(region.length, at::kFloat);
    if (filled) {
      const at::Tensor r =
          at::arange(region.start[0], region.start[0] + region.length[0]).unsqueeze(1);
      const at::Tensor c = at::arange(region.start[1], region.start[1] + region.length[1]);
      value.copy_((r * kWidth + c + i * 7919).remainder(16777213));
    }
    parts.push_back({.name = prefix + std::to_string(i),
                     .shape = {kWidth, kWidth},
                     .region = region,
                     .owned = true,
                     .value = value});
  }
  return parts;
}

formats::DiskTable table_of(const std::vector<TensorPart>& parts) {
  formats::DiskTable table;
  for (const auto& p : parts) {
    table.tensors.push_back(formats::whole_tensor(p.name, p.name, p.shape));
    table.tensors.back().dtype = formats::Dtype::f32;
  }
  return table;
}

Snapshot snapshot_of(const Problem& problem, int rank) {
  Snapshot s;
  s.manifest.step = 1;
  for (const auto& [file, prefix, count] :
       {std::tuple("model", "w", problem.num_matrices / 3),
        std::tuple("optimizer/state", "s", problem.num_matrices / 3 * 2)}) {
    TensorSet set{.prefix = file, .parts = parts_of(prefix, count, rank, problem.num_ranks, true)};
    for (auto& part : set.parts) part.value = part.value.to(problem.device);
    set.tensors = table_of(set.parts).tensors;
    s.sets.push_back(std::move(set));
  }
  return s;
}

void load_all(const path& checkpoint, const Snapshot& like, bool check) {
  const auto manifest = formats::read_manifest(checkpoint.string());
  for (const auto& set : like.sets) {
    std::vector<TensorPart> parts = set.parts;
    for (auto& p : parts) p.value = at::empty_like(p.value);
    const auto folder = TensorFolder::of_checkpoint(checkpoint, manifest, set.prefix);
    const auto table = table_of(parts);
    Loader(folder, table).load(parts);
    for (std::size_t i = 0; check && i < parts.size(); ++i)
      MOESH_CHECK(at::equal(parts[i].value, set.parts[i].value), "loaded '", parts[i].name,
                  "' is not what was saved");
  }
}

void shell(const std::string& command) {
  MOESH_CHECK(std::system(command.c_str()) == 0, ErrorKind::config, "'", command, "' failed");
}

int run(const path& folder, std::int64_t mebibytes, int num_ranks, at::Device device,
        int num_threads) {
  const Problem problem{std::max<std::int64_t>(3, mebibytes / 16), num_ranks, device};
  const path saved = folder / "saved", copy = folder / "copy";
  double save_time = 1e9, load_time = 1e9, copy_time = 1e9, block_time = 1e9, read_time = 1e9,
         first_block_time = 1e9, dd_time = 1e9, dd_read_time = 1e9;
  std::uint64_t bytes = 0;
  comm::launch(num_ranks, [&](comm::Group& world) {
    const Snapshot s = snapshot_of(problem, world.rank());
    const bool is_first = world.rank() == 0;
    const auto timed = [&](double& best, const auto& f) {
      world.barrier();
      const auto start = Clock::now();
      f();
      world.barrier();
      if (is_first) best = std::min(best, seconds_since(start));
    };
    const auto on_first = [&](const std::string& command) {
      if (is_first) shell(command);
      world.barrier();
    };
    path checkpoint;
    for (int i = 0; i < kRepeats; ++i) {
      on_first("rm -rf '" + saved.string() + "' '" + copy.string() + "'; sync");
      timed(save_time,
            [&] { checkpoint = save(s, {.folder = saved, .num_threads = num_threads}, world); });
      timed(load_time, [&] { load_all(checkpoint, s, i == 0); });
      timed(i == 0 ? first_block_time : block_time, [&] { copied(s); });
      const std::string plain = (folder / "plain").string();
      const std::string count = std::to_string(problem.num_matrices / 3 * 3);
      timed(dd_time, [&] {
        on_first("dd if=/dev/zero of='" + plain + "' bs=16M count=" + count +
                 " conv=fsync status=none");
      });
      // Out of the system's memory: a save reads back from the disk, too.
      on_first("dd of='" + plain + "' oflag=nocache conv=notrunc,fdatasync count=0 status=none");
      timed(dd_read_time,
            [&] { on_first("dd if='" + plain + "' of=/dev/null bs=16M status=none"); });
      on_first("rm '" + plain + "'");
      timed(copy_time, [&] {
        on_first("cp -r '" + checkpoint.string() + "' '" + copy.string() + "' && find '" +
                 copy.string() + "' -exec sync {} +");
      });
      timed(read_time, [&] {
        on_first("find '" + checkpoint.string() + "' -type f -exec cat {} + > /dev/null");
      });
    }
    if (is_first)
      for (const auto& f : formats::read_manifest(checkpoint.string()).files) bytes += f.size;
  });
  const auto line = [&](const char* what, double seconds, double baseline) {
    std::printf("%-44s %7.3f s  %6.2f GB/s", what, seconds,
                static_cast<double>(bytes) / seconds / 1e9);
    if (baseline > 0) std::printf("  %5.2f of the baseline's speed", baseline / seconds);
    std::printf("\n");
  };
  std::printf("%.0f MiB on %s, %d ranks, best of %d\n", static_cast<double>(bytes) / (1 << 20),
              device.str().c_str(), num_ranks, kRepeats);
  line("dd and fsync", dd_time, 0);
  line("dd back", dd_read_time, 0);
  line("dd there and back", dd_time + dd_read_time, 0);
  line("cp -r and fsync", copy_time, 0);
  line("save (written, read back, hashed, flushed)", save_time, dd_time + dd_read_time);
  line("cat (cached)", read_time, 0);
  line("load (read, hashed, put in place)", load_time, read_time);
  line("the first asynchronous save holds up a step", first_block_time, 0);
  line("a later one", block_time, 0);
  std::filesystem::remove_all(saved);
  std::filesystem::remove_all(copy);
  return 0;
}

}  // namespace
}  // namespace moesh::checkpoint

int main(int argc, char** argv) {
  if (argc < 2)
    return std::printf("usage: %s FOLDER [MiB] [RANKS] [cpu|cuda] [THREADS]\n", argv[0]), 2;
  return moesh::checkpoint::run(
      argv[1], argc > 2 ? std::atoll(argv[2]) : 960, argc > 3 ? std::atoi(argv[3]) : 4,
      at::Device(argc > 4 ? argv[4] : "cpu"), argc > 5 ? std::atoi(argv[5]) : 0);
}
