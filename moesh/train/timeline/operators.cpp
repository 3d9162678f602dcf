#include "moesh/train/timeline/operators.h"

#include <memory>

#include "moesh/base/timeline.h"

namespace moesh::train {
namespace {

struct Observed final : at::ObserverContext {
  Observed(Timeline* t, std::int64_t s) : timeline(t), slice(s) {}
  Timeline* timeline;
  std::int64_t slice;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& f) {
  Timeline* timeline = Timeline::current();
  if (!timeline) return nullptr;  // a thread that helps a rank
  const bool is_scope = f.scope() == at::RecordScope::USER_SCOPE;
  return std::make_unique<Observed>(
      timeline, timeline->open(is_scope ? SliceKind::scope : SliceKind::op, f.name()));
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* observed = static_cast<Observed*>(context);
  if (observed && observed->timeline == Timeline::current())
    observed->timeline->close(observed->slice);
}

}  // namespace

RecordOperators::RecordOperators()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end))) {}

RecordOperators::~RecordOperators() { at::removeCallback(handle_); }

}  // namespace moesh::train
