#pragma once
// The report of a run that is still training, for a browser on this machine.

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "moesh/report/page.h"

namespace moesh::report {

/// Answers on 127.0.0.1 until `stop` is set; port 0: any that is free. `ready` gets the port.
/// Throws Error (config) where the port cannot be had.
void serve(std::vector<RunData> runs, const std::vector<VerifyResult>& verified, int port,
           const std::atomic<bool>& stop, const std::function<void(int port)>& ready);

/// The answer to a request, with its header: "GET /data?known=1.20.20 HTTP/1.1", then its
/// headers. A host that is not this machine by its number or as localhost is refused, so that no
/// other page of the browser can read the run.
std::string answer(const std::string& request, std::vector<RunData>& runs,
                   const std::vector<VerifyResult>& verified);

}  // namespace moesh::report
