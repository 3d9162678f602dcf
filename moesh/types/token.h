#pragma once
// Token positions are strong types. Only SequenceShard turns one into the other, so that no code
// multiplies a local size by the size of an axis to guess a global one.

#include <algorithm>
#include <compare>
#include <cstdint>
#include <vector>

#include "moesh/base/error.h"

namespace moesh {

struct GlobalToken;
/// A token's place among those which this rank holds: index into [B, len_r] flattened.
struct LocalToken {
  std::int64_t value;
  operator GlobalToken() const = delete;  // a shard knows the way: shard.global(t)
  auto operator<=>(const LocalToken&) const = default;
};
/// A token's place in the whole micro-batch: b * L + position.
struct GlobalToken {
  std::int64_t value;
  operator LocalToken() const = delete;  // a shard knows the way: shard.local(t)
  auto operator<=>(const GlobalToken&) const = default;
};

/// `total` things in `parts` pieces of ceil(total / parts): the last ones are shorter or empty.
struct Pieces {
  std::int64_t total, parts;

  std::int64_t stride() const { return parts > 0 ? (total + parts - 1) / parts : 0; }
  std::int64_t start(std::int64_t part) const { return std::min(part * stride(), total); }
  std::int64_t length(std::int64_t part) const { return std::min(stride(), total - start(part)); }
  std::int64_t owner(std::int64_t index) const { return index / stride(); }
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> all(static_cast<std::size_t>(parts));
    for (std::int64_t r = 0; r < parts; ++r) all[static_cast<std::size_t>(r)] = length(r);
    return all;
  }
};

/// [B, L] cut along L over `parts` ranks; rank `part` holds [B, length()]. With a width each rank
/// holds that many pieces side by side: the span of one cp rank whose tp ranks do not cut the
/// sequence further is `width` = tp pieces of the cut over cp x tp. A local index is decoded with
/// the true length and placed with the padded stride: using one for both is wrong for B > 1.
class SequenceShard {
 public:
  SequenceShard(std::int64_t batch, std::int64_t sequence, std::int64_t parts, std::int64_t part,
                std::int64_t width = 1)
      : batch_(batch), pieces_{sequence, parts * width}, part_(part), width_(width) {
    MOESH_CHECK(
        batch >= 0 && sequence >= 0 && parts >= 1 && part >= 0 && part < parts && width >= 1,
        ErrorKind::config, "no such sequence shard: batch ", batch, ", sequence length ", sequence,
        ", part ", part, " of ", parts, ", width ", width,
        "; batch and length must be 0 or more, width 1 or more, and 0 <= part < parts");
  }

  std::int64_t batch() const { return batch_; }
  std::int64_t sequence() const { return pieces_.total; }
  std::int64_t start() const { return pieces_.start(part_ * width_); }
  std::int64_t length() const { return pieces_.start((part_ + 1) * width_) - start(); }
  std::int64_t num_local() const { return batch_ * length(); }
  std::int64_t num_global() const { return batch_ * sequence(); }
  const Pieces& pieces() const { return pieces_; }

  GlobalToken global(LocalToken t) const {
    MOESH_CHECK(t.value >= 0 && t.value < num_local(), "local token ", t.value,
                " of a shard that holds ", num_local());
    const std::int64_t b = t.value / length(), position = t.value % length();
    return {b * sequence() + start() + position};
  }
  /// The rank that holds a token.
  std::int64_t owner(GlobalToken t) const {
    check(t);
    return pieces_.owner(t.value % sequence()) / width_;
  }
  /// This rank's index of a token that it holds.
  LocalToken local(GlobalToken t) const {
    check(t);
    const std::int64_t b = t.value / sequence(), position = t.value % sequence() - start();
    MOESH_CHECK(position >= 0 && position < length(), "global token ", t.value, " belongs to part ",
                owner(t), ", not to part ", part_);
    return {b * length() + position};
  }

 private:
  void check(GlobalToken t) const {
    MOESH_CHECK(t.value >= 0 && t.value < num_global(), "global token ", t.value, " of ",
                num_global());
  }
  std::int64_t batch_;
  Pieces pieces_;
  std::int64_t part_, width_;
};

}  // namespace moesh
