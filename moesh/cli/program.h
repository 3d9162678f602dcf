#pragma once
// The program `moesh`, from its arguments to its exit code.

#include <string>
#include <vector>

namespace moesh::cli {

/// Runs a command; what it throws is said on standard error and becomes the exit code, as does
/// output that could not be written.
int run_program(const std::vector<std::string>& args);

/// From here on an exception that nothing catches ends the process with a sentence and its exit
/// code, and so does a library that gets no memory because of a limit (ulimit -v).
void end_with_sentences();

/// The same, and a signal to a training counts from here on: may be called before any library is
/// initialized.
void begin_program(int argc, const char* const* argv);

}  // namespace moesh::cli
