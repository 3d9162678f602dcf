#pragma once
// Token positions are strong types. Only SequenceShard turns one into the other, so that no code
// multiplies a local size by the size of an axis to guess a global one.

#include <algorithm>
#include <compare>
#include <cstdint>
#include <string>
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

/// Positions [begin, end) of a sequence.
struct PositionRange {
  std::int64_t begin, end;
  std::int64_t length() const { return std::max<std::int64_t>(0, end - begin); }
  bool operator==(const PositionRange&) const = default;
};
/// Positions of a sequence in rising order: no two ranges meet.
using PositionRanges = std::vector<PositionRange>;

inline PositionRange intersection(const PositionRange& a, const PositionRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}
inline std::int64_t total_length(const PositionRanges& ranges) {
  std::int64_t sum = 0;
  for (const PositionRange& r : ranges) sum += r.length();
  return sum;
}
/// The i-th of these positions.
inline std::int64_t position_at(const PositionRanges& ranges, std::int64_t i) {
  for (const PositionRange& r : ranges) {
    if (i < r.length()) return r.begin + i;
    i -= r.length();
  }
  throw Error(ErrorKind::internal, detail::concat("position ", i, " behind the last range"));
}

/// "[0, 4) and [12, 16)".
inline std::string describe(const PositionRanges& ranges) {
  std::string text;
  for (const PositionRange& r : ranges)
    text += detail::concat(text.empty() ? "[" : " and [", r.begin, ", ", r.end, ")");
  return text.empty() ? "none" : text;
}

/// How the ranks of cp cut a sequence.
enum class SequenceCut {
  contiguous,  // into one piece for each rank: neighbours are on one rank
  // Into two for each rank, of which rank i has the i-th from the beginning and the i-th from the
  // end: all see as many tokens before theirs.
  balanced,
};

/// [B, L] cut along L over `parts` ranks; rank `part` holds [B, length()]. A contiguous cut with a
/// width gives each rank that many pieces side by side: the span of one cp rank is `width` = tp
/// pieces of the cut over cp x tp, whether its tp ranks cut it further or not. A local index is
/// decoded with the true length and placed with the padded stride: using one for both is wrong for
/// B > 1.
class SequenceShard {
 public:
  SequenceShard(std::int64_t batch, std::int64_t sequence, std::int64_t parts, std::int64_t part,
                std::int64_t width = 1, SequenceCut cut = SequenceCut::contiguous)
      : batch_(batch),
        pieces_{sequence, parts * (cut == SequenceCut::balanced ? 2 : width)},
        part_(part),
        parts_(parts),
        width_(width),
        cut_(cut) {
    MOESH_CHECK(
        batch >= 0 && sequence >= 0 && parts >= 1 && part >= 0 && part < parts && width >= 1,
        ErrorKind::config, "no such sequence shard: batch ", batch, ", sequence length ", sequence,
        ", part ", part, " of ", parts, ", width ", width,
        "; batch and length must be 0 or more, width 1 or more, and 0 <= part < parts");
    if (cut == SequenceCut::contiguous) {
      ranges_ = {{pieces_.start(part * width), pieces_.start((part + 1) * width)}};
      return;
    }
    const std::int64_t second = 2 * parts - 1 - part;
    ranges_ = {{pieces_.start(part), pieces_.start(part + 1)},
               {pieces_.start(second), pieces_.start(second + 1)}};
    if (ranges_[0].end == ranges_[1].begin) ranges_[0].end = ranges_[1].end;
    if (ranges_[0].end == ranges_[1].end || ranges_[1].length() == 0) ranges_.pop_back();
  }

  std::int64_t batch() const { return batch_; }
  std::int64_t sequence() const { return pieces_.total; }
  /// The positions that it holds, in one range or two: a rank without any has one, which is empty.
  PositionRanges ranges() const { return ranges_; }
  std::int64_t start() const { return ranges_[0].begin; }
  std::int64_t length() const { return total_length(ranges_); }
  std::int64_t num_local() const { return batch_ * length(); }
  std::int64_t num_global() const { return batch_ * sequence(); }
  const Pieces& pieces() const { return pieces_; }
  /// What each of `width` ranks has that cut this among them: pieces side by side in its own order,
  /// the last ones shorter or empty.
  SequenceShard piece(std::int64_t i) const {
    const std::int64_t stride =
        cut_ == SequenceCut::contiguous ? pieces_.stride() : Pieces{length(), width_}.stride();
    SequenceShard out = *this;
    out.ranges_.clear();
    PositionRange left{std::min(i * stride, length()), std::min((i + 1) * stride, length())};
    for (const PositionRange& r : ranges_) {
      const PositionRange here{r.begin + left.begin, std::min(r.begin + left.end, r.end)};
      const bool is_last = &r == &ranges_.back();
      if (here.length() > 0 || (is_last && out.ranges_.empty())) out.ranges_.push_back(here);
      left = {std::max<std::int64_t>(0, left.begin - r.length()), left.end - r.length()};
    }
    return out;
  }

  GlobalToken global(LocalToken t) const {
    MOESH_CHECK(t.value >= 0 && t.value < num_local(), "local token ", t.value,
                " of a shard that holds ", num_local());
    const std::int64_t b = t.value / length(), position = position_at(ranges_, t.value % length());
    return {b * sequence() + position};
  }
  /// The part that a token is of.
  std::int64_t owner(GlobalToken t) const {
    check(t);
    const std::int64_t piece = pieces_.owner(t.value % sequence());
    return cut_ == SequenceCut::contiguous ? piece / width_
                                           : std::min(piece, 2 * parts_ - 1 - piece);
  }
  /// This rank's index of a token that it holds.
  LocalToken local(GlobalToken t) const {
    check(t);
    const std::int64_t b = t.value / sequence(), position = t.value % sequence();
    std::int64_t before = b * length();
    for (const PositionRange& r : ranges_) {
      if (position >= r.begin && position < r.end) return {before + position - r.begin};
      before += r.length();
    }
    throw Error(ErrorKind::internal,
                detail::concat("global token ", t.value, " belongs to part ", owner(t),
                               ", not to positions ", describe(ranges_), " of part ", part_));
  }

 private:
  void check(GlobalToken t) const {
    MOESH_CHECK(t.value >= 0 && t.value < num_global(), "global token ", t.value, " of ",
                num_global());
  }
  std::int64_t batch_;
  Pieces pieces_;
  std::int64_t part_, parts_, width_;
  SequenceCut cut_;
  PositionRanges ranges_;
};

}  // namespace moesh
