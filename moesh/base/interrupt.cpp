#include "moesh/base/interrupt.h"

#include "moesh/base/error.h"

namespace moesh {

void throw_interrupted() { throw Error(ErrorKind::internal, "interrupted"); }

}  // namespace moesh
