#include "moesh/optim/groups.h"

#include <algorithm>

#include "moesh/base/error.h"

namespace moesh::optim {
namespace {

std::string name_of(std::size_t i) { return detail::concat("optimizer.group.", i, ".match"); }

}  // namespace

Groups::Groups(std::vector<GroupOptions> groups) : groups_(std::move(groups)) {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const std::string& match = groups_[i].match;
    MOESH_CHECK(!match.empty(), ErrorKind::config, name_of(i),
                " is empty; name the parameters of the group, as in match = \"\\\\.gate\\\\.\"");
    try {
      patterns_.emplace_back(match);
    } catch (const Error& e) {
      throw Error(e.kind(), detail::concat(name_of(i), ": ", e.what()));
    }
  }
}

std::optional<std::size_t> Groups::find(const std::string& name,
                                        const std::vector<std::string>& in_files) const {
  for (std::size_t i = 0; i < patterns_.size(); ++i) {
    const auto is_found = [&](const std::string& n) { return patterns_[i].is_in(n); };
    if (is_found(name)) return i;
    const auto first = std::find_if(in_files.begin(), in_files.end(), is_found);
    if (first == in_files.end()) continue;
    const auto other = std::find_if_not(in_files.begin(), in_files.end(), is_found);
    MOESH_CHECK(other == in_files.end(), ErrorKind::config, name_of(i), " is '", groups_[i].match,
                "', which is found in ", *first, " and not in ", *other,
                ": both belong to one parameter, ", name,
                ", which has one learning rate; match them all");
    return i;
  }
  return std::nullopt;
}

void check_matches(const Groups& groups, const std::vector<GroupMatch>& matches,
                   const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < matches.size(); ++i) {
    if (matches[i].num_tensors > 0) continue;
    const formats::Pattern pattern(groups[i].match);
    const bool is_taken = std::any_of(names.begin(), names.end(),
                                      [&](const std::string& name) { return pattern.is_in(name); });
    MOESH_CHECK(!is_taken, ErrorKind::config, name_of(i), " is '", groups[i].match,
                "', and all parameters that it matches are in a group before it; the first that "
                "matches counts, so put this one earlier");
    MOESH_CHECK(false, ErrorKind::config, name_of(i), " is '", groups[i].match,
                "', and no parameter has such a name; the model has ", names.front(), ", ",
                names[names.size() / 2], ", ", names.back(), " and ", names.size() - 3, " more");
  }
}

}  // namespace moesh::optim
