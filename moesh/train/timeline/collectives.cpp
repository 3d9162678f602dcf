#include "moesh/train/timeline/collectives.h"

namespace moesh::train {

void RecordCollectives::called(const comm::Operation& o) {
  numbers_[o.number] =
      timeline_.call(to_string(o.op), o.group.name(), o.ranks, o.group.meets_on_host(), o.bytes);
}

void RecordCollectives::started(std::int64_t number) {
  if (const auto found = numbers_.find(number); found != numbers_.end())
    timeline_.started(found->second);
}

void RecordCollectives::waits(std::int64_t number) {
  if (const auto found = numbers_.find(number); found != numbers_.end())
    timeline_.wait(found->second);
}

void RecordCollectives::ended(std::int64_t number) {
  const auto found = numbers_.find(number);
  if (found == numbers_.end()) return;
  timeline_.ended(found->second);
  numbers_.erase(found);
}

}  // namespace moesh::train
