#pragma once
// Everything that a program of typed tensors needs.

#include "moesh/comm/launch.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/gather_ranges.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/rows.h"
#include "moesh/spmd/transitions.h"
