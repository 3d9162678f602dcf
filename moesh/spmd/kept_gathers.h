#pragma once
// Where blocks keep their gathered parameters from forward to backward (no ReshardScope), several
// micro-batches of a pipeline are under way at once, and each would have gathered its own: they
// share one.

#include <memory>

namespace moesh {

/// Gathered, or cast, parameters of this thread, kept as long as it lives, which is a step at most:
/// then they are written.
class KeptGathers {
 public:
  /// Off: nothing is kept.
  explicit KeptGathers(bool on);
  ~KeptGathers();
  KeptGathers(const KeptGathers&) = delete;
  KeptGathers& operator=(const KeptGathers&) = delete;

  struct Map;

 private:
  std::unique_ptr<Map> map_;  // null: off
  Map* outer_;
};

/// While it lives, `use` on this thread takes parameters from its KeptGathers, and leaves there
/// what it gathers. Without a KeptGathers: nothing.
class TakeKept {
 public:
  TakeKept();
  ~TakeKept();
  TakeKept(const TakeKept&) = delete;
  TakeKept& operator=(const TakeKept&) = delete;

 private:
  bool outer_;
};

}  // namespace moesh
