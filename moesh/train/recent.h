#pragma once
#include <cstddef>
#include <list>
#include <utility>

namespace moesh::train {

/// Values by key, at most so many: then the one that nobody has asked for the longest goes.
template <class Key, class Value>
class Recent {
 public:
  explicit Recent(std::size_t most) : most_(most) {}

  /// That of the key; a new one if there is none. What goes is gone before the new one is made.
  Value& operator[](const Key& key) {
    auto it = all_.begin();
    while (it != all_.end() && it->first != key) ++it;
    if (it == all_.end()) {
      if (all_.size() == most_) all_.pop_back();
      all_.emplace_front(key, Value());
    } else {
      all_.splice(all_.begin(), all_, it);
    }
    return all_.front().second;
  }
  /// The one that was asked for last comes first.
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  std::size_t size() const { return all_.size(); }
  void clear() { all_.clear(); }

 private:
  std::size_t most_;
  std::list<std::pair<Key, Value>> all_;
};

}  // namespace moesh::train
