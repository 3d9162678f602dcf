#pragma once
// Everything that a program of typed tensors and parameters needs.

#include "moesh/fsdp/param.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/fsdp/step_state.h"
#include "moesh/spmd/spmd.h"
