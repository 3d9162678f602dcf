#include "moesh/tokenizer/code_points.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::tokenizer {

CodePointSet::CodePointSet(std::span<const CodePointRange> ranges)
    : ranges_(ranges.begin(), ranges.end()) {}

void CodePointSet::add(char32_t first, char32_t last) {
  CodePointSet one;
  one.ranges_.push_back({first, last});
  add(one);
}

void CodePointSet::add(const CodePointSet& other) {
  std::vector<CodePointRange> all;
  std::merge(ranges_.begin(), ranges_.end(), other.ranges_.begin(), other.ranges_.end(),
             std::back_inserter(all),
             [](const CodePointRange& a, const CodePointRange& b) { return a.first < b.first; });
  ranges_.clear();
  for (const CodePointRange& range : all) {
    if (!ranges_.empty() && range.first <= ranges_.back().last + 1)
      ranges_.back().last = std::max(ranges_.back().last, range.last);
    else
      ranges_.push_back(range);
  }
}

CodePointSet CodePointSet::complement() const {
  CodePointSet others;
  char32_t next = 0;
  for (const CodePointRange& range : ranges_) {
    if (range.first > next) others.ranges_.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodePoint) others.ranges_.push_back({next, kLastCodePoint});
  return others;
}

std::optional<CodePointSet> category_set(std::string_view name) {
  if (name.empty() || name.size() > 2) return std::nullopt;
  std::vector<CodePointRange> ranges;
  for (std::size_t i = 0; i < tables::kCategories.size(); ++i) {
    const auto& [first, category] = tables::kCategories[i];
    if (!tables::kCategoryNames[category].starts_with(name)) continue;
    const bool is_last = i + 1 == tables::kCategories.size();
    const char32_t last = is_last ? kLastCodePoint : tables::kCategories[i + 1].first - 1;
    if (!ranges.empty() && ranges.back().last + 1 == first)
      ranges.back().last = last;
    else
      ranges.push_back({first, last});
  }
  return ranges.empty() ? std::nullopt : std::optional(CodePointSet(ranges));
}

CodePointMasks::CodePointMasks(std::span<const CodePointSet> sets) {
  MOESH_CHECK(sets.size() <= 32, "a mask of ", sets.size(), " sets");
  constexpr std::size_t kBlock = 256;
  using Block = std::array<std::uint32_t, kBlock>;
  std::vector<std::size_t> reached(sets.size());  // the first range of each set that may matter
  std::map<Block, std::uint16_t> known;
  std::map<std::uint32_t, std::uint16_t> known_uniform;  // most blocks are: no need to compare them
  const auto number_of = [&](auto& map, const auto& key, const auto& make) {
    const auto [entry, is_new] =
        map.try_emplace(key, static_cast<std::uint16_t>(masks_.size() / kBlock));
    if (is_new) {
      const Block& block = make();
      masks_.insert(masks_.end(), block.begin(), block.end());
    }
    return entry->second;
  };
  Block block;
  for (char32_t first = 0; first <= kLastCodePoint; first += kBlock) {
    const char32_t last = first + kBlock - 1;
    std::uint32_t whole = 0;  // sets with all of the block
    bool is_uniform = true;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const auto& ranges = sets[i].ranges();
      std::size_t& r = reached[i];
      while (r < ranges.size() && ranges[r].last < first) ++r;
      for (std::size_t j = r; j < ranges.size() && ranges[j].first <= last; ++j) {
        if (ranges[j].first <= first && ranges[j].last >= last) {
          whole |= 1u << i;
          continue;
        }
        if (std::exchange(is_uniform, false)) block.fill(0);
        const char32_t end = std::min(ranges[j].last, last) + 1;
        for (char32_t c = std::max(ranges[j].first, first); c < end; ++c)
          block[c - first] |= 1u << i;
      }
    }
    const auto filled = [&]() -> const Block& { return block.fill(whole), block; };
    if (!is_uniform)
      for (std::uint32_t& mask : block) mask |= whole;
    blocks_.push_back(is_uniform
                          ? number_of(known_uniform, whole, filled)
                          : number_of(known, block, [&]() -> const Block& { return block; }));
  }
}

}  // namespace moesh::tokenizer
