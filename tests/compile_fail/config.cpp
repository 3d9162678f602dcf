// Every option says what it changes.

#include "moesh/config/options.h"

namespace moesh::config {

#if defined(FAIL_option_without_an_effect)
// expect: no matching function for call to
Option steps() {
  return make_option<&Config::training, &TrainingSection::steps>("training.steps", "steps");
}
#else
Option steps() {
  return make_option<Effect::numbers, &Config::training, &TrainingSection::steps>("training.steps",
                                                                                  "steps");
}
#endif

}  // namespace moesh::config
