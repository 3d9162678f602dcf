#pragma once
// Everything that a program of typed tensors needs.

#include "moesh/comm/launch.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/all_gather.h"
#include "moesh/spmd/all_reduce.h"
#include "moesh/spmd/all_to_all.h"
#include "moesh/spmd/as_term.h"
#include "moesh/spmd/backward.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/enter.h"
#include "moesh/spmd/keep.h"
#include "moesh/spmd/once.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/pad.h"
#include "moesh/spmd/param.h"
#include "moesh/spmd/reduce_scatter.h"
#include "moesh/spmd/whole.h"
