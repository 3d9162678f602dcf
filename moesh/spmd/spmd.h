#pragma once
// Everything that a program of typed tensors needs.

#include "moesh/comm/launch.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/all_to_all.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/map.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/param.h"
#include "moesh/spmd/reach.h"
#include "moesh/spmd/recompute.h"
#include "moesh/spmd/reshard.h"
#include "moesh/spmd/together.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/whole.h"
