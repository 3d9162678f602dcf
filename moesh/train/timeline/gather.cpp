#include "moesh/train/timeline/gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::train {
namespace {

struct WordWriter {
  std::vector<std::int64_t> words;

  void number(const auto& n) { words.push_back(static_cast<std::int64_t>(n)); }
  void text(const std::string& s) {
    number(s.size());
    const std::size_t at = words.size();
    words.resize(at + (s.size() + 7) / 8);
    std::memcpy(words.data() + at, s.data(), s.size());
  }
  void list(const auto& items, const auto& each) {
    number(items.size());
    for (const auto& item : items) each(item);
  }
};

struct WordReader {
  const std::vector<std::int64_t>& words;
  std::size_t at = 0;

  template <class T>
  void number(T& n) {
    need(1);
    n = static_cast<T>(words[at++]);
  }
  void text(std::string& s) {
    std::size_t size = 0;
    number(size);
    need(size / 8 + (size % 8 != 0));
    s.assign(reinterpret_cast<const char*>(words.data() + at), size);
    at += (size + 7) / 8;
  }
  void list(auto& items, const auto& each) {
    std::size_t size = 0;
    number(size);
    need(size);  // a word at least for each
    items.resize(size);
    for (auto& item : items) each(item);
  }
  void need(std::size_t count) const {
    MOESH_CHECK(count <= words.size() - at, "the record of a rank ends after ", words.size(),
                " words, in the middle of something");
  }
};

// Writes a record as words, or reads it.
void go_through(auto& w, auto& r) {
  w.number(r.begin), w.number(r.machine), w.number(r.process);
  w.list(r.timeline.names, [&](auto& name) { w.text(name); });
  w.list(r.timeline.groups, [&](auto& g) {
    w.text(g.name), w.number(g.meets_on_host);
    w.list(g.members, [&](auto& rank) { w.number(rank); });
  });
  w.list(r.timeline.slices, [&](auto& s) {
    w.number(s.kind), w.number(s.name), w.number(s.begin), w.number(s.end);
    w.number(s.collective), w.number(s.lane);
  });
  w.list(r.timeline.collectives, [&](auto& c) {
    w.number(c.op), w.number(c.group), w.number(c.bytes), w.number(c.begin);
    w.number(c.wait_begin), w.number(c.end), w.number(c.scope), w.number(c.lane);
  });
  w.list(r.kernels, [&](auto& k) {
    w.text(k.name), w.number(k.device), w.number(k.stream), w.number(k.rank), w.number(k.begin);
    w.number(k.end), w.number(k.lane);
  });
}

// The kernel that runs here, which is whose clock this is; no two have the same id.
std::int64_t machine_number() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return static_cast<std::int64_t>(std::hash<std::string>{}(id));
}

void give_to_ranks(std::vector<RankRecord>& all) {
  std::vector<std::vector<KernelSpan>> given(all.size());
  for (std::size_t r = 0; r < all.size(); ++r)
    for (KernelSpan& k : all[r].kernels) {
      const auto rank = static_cast<std::size_t>(k.rank);
      const bool is_known = k.rank >= 0 && rank < all.size() &&
                            all[rank].machine == all[r].machine &&
                            all[rank].process == all[r].process;
      given[is_known ? rank : r].push_back(std::move(k));
    }
  for (std::size_t r = 0; r < all.size(); ++r) all[r].kernels = std::move(given[r]);
}

}  // namespace

RankRecord here_and_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return {.begin = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
          .machine = machine_number(),
          .process = ::getpid()};
}

std::vector<std::int64_t> to_words(const RankRecord& record) {
  WordWriter to;
  go_through(to, record);
  return std::move(to.words);
}

RankRecord from_words(const std::vector<std::int64_t>& words) {
  WordReader from{words};
  RankRecord record;
  go_through(from, record);
  MOESH_CHECK(from.at == words.size(), "the record of a rank has ", words.size(),
              " words, and more than it says");
  return record;
}

std::vector<RankRecord> gather(comm::Group& world, const RankRecord& mine) {
  const comm::ObserverPause quiet;
  const auto options = at::TensorOptions(world.control_device()).dtype(at::kLong);
  std::vector<std::int64_t> words = to_words(mine);
  const at::Tensor sizes =
      world.all_gather(at::full({1}, static_cast<std::int64_t>(words.size()), options)).cpu();
  // One rank after the other: all of a large world at once would be more than a host holds.
  std::vector<RankRecord> all;
  for (int r = 0; r < world.size(); ++r) {
    const std::int64_t size = sizes.const_data_ptr<std::int64_t>()[r];
    at::Tensor sent = at::empty({size}, at::kLong);
    if (r == world.rank())
      std::memcpy(sent.mutable_data_ptr(), words.data(), words.size() * sizeof(std::int64_t));
    const at::Tensor got = world.broadcast(sent.to(options.device()), r).cpu();
    if (world.rank() != 0) continue;
    const auto* p = got.const_data_ptr<std::int64_t>();
    all.push_back(from_words({p, p + size}));
  }
  give_to_ranks(all);
  return all;
}

}  // namespace moesh::train
