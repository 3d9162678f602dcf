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

class WordWriter {
 public:
  std::vector<std::int64_t> words;

  void number(std::int64_t n) { words.push_back(n); }
  void text(const std::string& s) {
    number(static_cast<std::int64_t>(s.size()));
    const std::size_t at = words.size();
    words.resize(at + (s.size() + 7) / 8);
    std::memcpy(words.data() + at, s.data(), s.size());
  }
  template <class T, class F>
  void list(const std::vector<T>& items, F write) {
    number(static_cast<std::int64_t>(items.size()));
    for (const T& item : items) write(item);
  }
};

class WordReader {
 public:
  explicit WordReader(const std::vector<std::int64_t>& words) : words_(words) {}

  std::int64_t number() {
    need(1);
    return words_[at_++];
  }
  std::string text() {
    const auto size = static_cast<std::size_t>(number()), num_words = (size + 7) / 8;
    need(num_words);
    std::string s(size, '\0');
    std::memcpy(s.data(), words_.data() + at_, size);
    at_ += num_words;
    return s;
  }
  template <class T, class F>
  void list(std::vector<T>& items, F read) {
    const auto size = static_cast<std::size_t>(number());
    need(size);  // a word at least for each
    for (std::size_t i = 0; i < size; ++i) items.push_back(read());
  }
  bool is_at_end() const { return at_ == words_.size(); }

 private:
  void need(std::size_t count) const {
    MOESH_CHECK(count <= words_.size() - at_, "the record of a rank ends after ", words_.size(),
                " words, in the middle of something");
  }
  const std::vector<std::int64_t>& words_;
  std::size_t at_ = 0;
};

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

std::vector<std::int64_t> to_words(const RankRecord& r) {
  WordWriter w;
  w.number(r.begin), w.number(r.machine), w.number(r.process);
  w.list(r.timeline.names, [&](const std::string& name) { w.text(name); });
  w.list(r.timeline.groups, [&](const TimelineGroup& g) {
    w.text(g.name), w.number(g.meets_on_host);
    w.list(g.members, [&](int rank) { w.number(rank); });
  });
  w.list(r.timeline.slices, [&](const Slice& s) {
    w.number(static_cast<std::int64_t>(s.kind)), w.number(s.name), w.number(s.begin);
    w.number(s.end), w.number(s.collective);
  });
  w.list(r.timeline.collectives, [&](const CollectiveSpan& c) {
    w.number(c.op), w.number(c.group), w.number(c.bytes), w.number(c.begin);
    w.number(c.wait_begin), w.number(c.end), w.number(c.scope);
  });
  w.list(r.kernels, [&](const KernelSpan& k) {
    w.text(k.name), w.number(k.device), w.number(k.stream), w.number(k.rank), w.number(k.begin);
    w.number(k.end);
  });
  return std::move(w.words);
}

RankRecord from_words(const std::vector<std::int64_t>& words) {
  WordReader from(words);
  RankRecord r;
  r.begin = from.number(), r.machine = from.number(), r.process = from.number();
  from.list(r.timeline.names, [&] { return from.text(); });
  from.list(r.timeline.groups, [&] {
    TimelineGroup g{.name = from.text(), .members = {}, .meets_on_host = from.number() != 0};
    from.list(g.members, [&] { return static_cast<int>(from.number()); });
    return g;
  });
  // Braces are evaluated from the left to the right.
  from.list(r.timeline.slices, [&] {
    return Slice{static_cast<SliceKind>(from.number()), from.number(), from.number(), from.number(),
                 from.number()};
  });
  from.list(r.timeline.collectives, [&] {
    return CollectiveSpan{from.number(), from.number(), from.number(), from.number(),
                          from.number(), from.number(), from.number()};
  });
  from.list(r.kernels, [&] {
    return KernelSpan{from.text(),   from.number(), from.number(),
                      from.number(), from.number(), from.number()};
  });
  MOESH_CHECK(from.is_at_end(), "the record of a rank has ", words.size(),
              " words, and more than it says");
  return r;
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
