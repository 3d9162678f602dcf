#pragma once
// A simulated schedule as a picture.

#include <string>

#include "moesh/pipeline/simulate.h"

namespace moesh::pipeline {

/// A line for each rank, time from left to right, dots where it waits. An action is its letter and
/// its micro-batch ("F0 "; "F4.0 " with the stage, where ranks have several), and only the letter
/// where `columns` are too few for that. 0: as many as it takes.
std::string draw_text(const Simulation& simulation, int columns = 0);

/// A picture for browsers and pages, with its title, colours and numbers explained in it. The note
/// is under the title; empty: the bubble, and the most activations of a rank.
std::string draw_svg(const Simulation& simulation, const std::string& title,
                     const std::string& note = "");

}  // namespace moesh::pipeline
