#pragma once
// Whole runs against what PyTorch computed of them, number by number (torch_test.py --record).

#include <string>
#include <vector>

namespace moesh::reference {

std::vector<std::string> run_names();
/// Trains as the run says: "", or the first number of its steps that is another in PyTorch. What is
/// thrown is a number, too.
std::string run_complaint(const std::string& name);

}  // namespace moesh::reference
