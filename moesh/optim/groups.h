#pragma once
// Parameters that learn in another way than the others, by their names.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/pattern.h"

namespace moesh::optim {

struct GroupOptions {
  std::string match = "";  // a regular expression that is found in the names
  double lr_scale = 1;
  double weight_decay = -1;  // of all of them; -1: as that of the others
};

class Groups {
 public:
  /// Throws Error (config) if a pattern is invalid or empty.
  explicit Groups(std::vector<GroupOptions> groups);

  /// The first whose pattern is found in the name of a parameter, or in those of all tensors that
  /// hold it in files; nothing: none is. Throws Error (config) where a pattern is found in some of
  /// them: a parameter learns in one way.
  std::optional<std::size_t> find(const std::string& name,
                                  const std::vector<std::string>& in_files = {}) const;
  const GroupOptions& operator[](std::size_t i) const { return groups_[i]; }
  std::size_t size() const { return groups_.size(); }

 private:
  std::vector<GroupOptions> groups_;
  std::vector<formats::Pattern> patterns_;
};

/// The parameters that a group matches.
struct GroupMatch {
  std::int64_t num_tensors = 0, num_parameters = 0;
};

/// Throws Error (config) where a group has found nothing, with some of the names that there are.
void check_matches(const Groups& groups, const std::vector<GroupMatch>& matches,
                   const std::vector<std::string>& names);

}  // namespace moesh::optim
