#pragma once
// The flight recorder: the last collectives of each rank with their times, to be read when a rank
// was lost or hangs.

#include <cstdint>
#include <memory>
#include <string>

#include "moesh/comm/group.h"

namespace moesh::comm::flight {

/// How many a rank remembers.
constexpr std::size_t kLength = 256;

/// What a rank remembers. Each thread has one of its own, until it uses that of another: all
/// threads of a rank, such as one that saves, write into one.
class Recorder;
std::shared_ptr<Recorder> current();
void use(std::shared_ptr<Recorder> recorder);

/// What `Group` tells of this thread: a collective was called; it is in progress as `work`; it has
/// ended.
void called(const std::string& group, Collective op, std::int64_t bytes);
void in_progress(const std::string& group, Collective op, const Work* work);
void ended(const Work* work);
void ended(const std::string& group, Collective op);

/// The last collectives that the threads of this recorder called, the oldest first: a line each
/// with its number, when it was called, how long it took or that it has not ended, and what it was.
std::string text();

}  // namespace moesh::comm::flight
